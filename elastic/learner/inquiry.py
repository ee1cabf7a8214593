# SPDX-License-Identifier: Apache-2.0
"""What was wrong with a peer whose result the others overruled: the first tensor that differs, and whose fault it was.

The peer voted for one digest, the others agreed on another in the same round. Its staged result is kept by its digests
until the committed manifest is known; the two name the chunks that differ, and where the chunk is fetched in place of
the wrong one, the very bytes. Before that the held state is hashed again: if its bits are no longer those that were
committed, memory has changed that nobody wrote to, and the machine is to blame rather than the computation.

Rules: it only looks. Repair is state_sync's: the wrong result lies in the memory of the next restore, so that only the
chunks that differ are fetched. What cannot be found out is told as such, and the story ends with the catch-up.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.elastic.core.messages import Held
from isthmus.elastic.learner.transfer import Transfer
from isthmus.elastic.observation import Deviated, Observe, state_fields
from isthmus.elastic.state.digest import Hasher, StateManifest, chunk_of
from isthmus.elastic.state.parity import Difference, damaged_chunks, differing, first_difference, narrowed
from isthmus.elastic.state.replica import Replica
from isthmus.elastic.state.wire import ChunkMap

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Case:
    """One overruled vote, and what is known of it."""

    committed: Held
    voted: bytes
    staged: StateManifest | None = None
    """What this peer had computed."""
    num_damaged: int | None = None
    """Chunks of the state before it whose memory has changed; None before anybody has looked."""
    difference: Difference | None = None
    evidence: tuple[int, bytes] | None = None
    """Number and bytes of the first wrong chunk: one chunk of memory."""


class Inquiry:
    """At most one case at a time; a newer one replaces the older.

    Args:
        replica: whose results and memory are looked at.
        hasher: hashes the held state again.
        observe: told once a case, when it is known where the states differ.
    """

    def __init__(self, replica: Replica, hasher: Hasher, observe: Observe) -> None:
        self._replica = replica
        self._hasher = hasher
        self._observe = observe
        self._case: _Case | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is something to find out: then it pays to ask the donors for their digests."""
        return self._case is not None and self._case.staged is not None

    def begin(self, committed: Held, voted: bytes) -> None:
        """The others agreed on `committed`, this peer had voted for `voted` in the same round."""
        self._case = _Case(committed, voted)

    async def memory_is_sound(self) -> bool:
        """Whether the state that this peer computed from is still what was committed. Costs one pass over it."""
        case = self._case
        if case is None or self._replica.held() is None:
            return True
        if case.num_damaged is None:
            await self._look_at_memory(case)
        return not case.num_damaged

    async def _look_at_memory(self, case: _Case) -> None:
        leftover = self._replica.leftover()
        case.staged = leftover if leftover is not None and leftover.digest == case.voted else None
        pinned = self._replica.pin()
        try:
            damaged = await damaged_chunks(pinned, self._hasher)
        finally:
            pinned.release()
        case.num_damaged = len(damaged)
        if damaged:
            tensor, chunk = ChunkMap(pinned.manifest).place(damaged[0])
            _log.error(
                "memory_damaged outer_step=%d chunks=%d tensor=%s chunk=%d; the held state is not what was committed, "
                "and nobody wrote to it: test this machine's memory",
                pinned.manifest.outer_step,
                len(damaged),
                pinned.manifest.tensors[tensor].name,
                chunk,
            )

    def compare(self, manifest: StateManifest) -> None:
        """A donor describes a state; if it is the committed one, it shows which chunks differ."""
        case = self._case
        if case is not None and case.staged is not None and manifest.digest == case.committed.digest:
            case.difference = first_difference(manifest, case.staged)

    def keep_evidence(
        self, manifest: StateManifest, destinations: Sequence[memoryview], contents: StateManifest | None
    ) -> None:
        """The destinations, with these contents, are about to be written: keep the first wrong chunk."""
        case = self._case
        if case is None or contents is None or contents.digest != case.voted or case.difference is None:
            return
        assert case.staged is not None, "a difference is one of two"
        index = differing(manifest, case.staged)[0]
        tensor, chunk = ChunkMap(manifest).place(index)
        case.evidence = index, bytes(chunk_of(destinations[tensor], chunk, manifest.chunk_nbytes))

    def repaired(self, manifest: StateManifest, transfer: Transfer) -> None:
        """A snapshot is whole."""
        case = self._case
        if case is None or manifest.digest != case.committed.digest:
            return
        if case.difference is not None and case.evidence is not None:
            index, before = case.evidence
            case.difference = narrowed(case.difference, before, transfer.place(index)[0])
        self.end()

    def arrived(self) -> None:
        """A commit was replayed; if it made the committed state, its manifest is known."""
        case = self._case
        if case is None or self._replica.held() != case.committed:
            return
        pinned = self._replica.pin()
        try:
            self.compare(pinned.manifest)
        finally:
            pinned.release()
        self.end()

    def end(self) -> None:
        """Tell what was found out, if there was something to find out."""
        case, self._case = self._case, None
        if case is None:
            return
        fields, where = state_fields(case.committed), case.difference
        if where is not None:
            fields |= {"tensor": where.tensor, "start_bytes": where.start_nbytes, "stop_bytes": where.stop_nbytes}
            fields["differing_chunks"] = where.num_chunks
        self._observe(Deviated(**fields, voted=case.voted.hex(), damaged_chunks=case.num_damaged or 0))
