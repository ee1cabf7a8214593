# SPDX-License-Identifier: Apache-2.0
"""What a round sends: its frames, and which of its chunks are not the kernel's yet.

Rules: a chunk waits as a reference and is encoded when a socket can take it; its memory is the round's until `release`.
Nothing is decided here: what is sent to whom is the machine's business (core/round_machine.py).
"""

import functools
from collections.abc import Callable, Collection, Sequence

from isthmus.collective.codec.base import NotFinite
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.types import RoundKey
from isthmus.collective.errors import NonFiniteInput
from isthmus.collective.rounds.buffers import RoundBuffers
from isthmus.collective.rounds.chunks import ChunkSend
from isthmus.collective.rounds.notices import opening_payload
from isthmus.collective.rounds.plan import Terms
from isthmus.collective.transport.bundle import Bundle, Notice
from isthmus.collective.transport.memory import Scratch
from isthmus.collective.transport.wire import FrameType, Header, pack


class Outbox:
    """See the module.

    Args:
        key: of the round.
        rank: our place in it.
        terms: what its OPEN says.
        plan_hash: of the terms.
        weight: of our part.
        buffers: what is encoded.
        machine: knows which form a chunk has.
        bundles: by rank; None at ours.
        on_bad_input: told when our own numbers cannot be sent.
        on_drained: told whenever a chunk is the kernel's and no other waits.
    """

    def __init__(
        self,
        *,
        key: RoundKey,
        rank: int,
        terms: Terms,
        plan_hash: int,
        weight: float,
        buffers: RoundBuffers,
        machine: RoundMachine,
        bundles: Sequence[Bundle | None],
        on_bad_input: Callable[[NonFiniteInput], None],
        on_drained: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.bytes_sent = 0
        self.num_unsent = 0
        self._key = key
        self._terms = terms
        self._plan_hash = plan_hash
        self._weight = weight
        self._buffers = buffers
        self._machine = machine
        self._bundles = bundles
        self._on_bad_input = on_bad_input
        self._on_drained = on_drained
        self._unsent: list[set[ChunkSend]] = [set() for _ in bundles]
        self._result_headers: dict[int, bytes] = {}

    # -------------------------------------------------------------------------------- from the round

    def put_open(self, to: int) -> None:
        """Our terms, for this member."""
        header, payload = self._opening
        self.bundle(to).notices.append(Notice(header, payload))
        self.bytes_sent += len(header) + len(payload)

    def put_chunk(self, frame_type: FrameType, to: int, chunk: int) -> None:
        """A chunk for this member; whoever calls wakes the bundle."""
        send = ChunkSend(self, frame_type, to, chunk)
        self._unsent[to].add(send)
        self.num_unsent += 1
        bundle = self.bundle(to)
        (bundle.results if frame_type is FrameType.RESULT else bundle.parts).append(send)

    def refuse(self, bundle: Bundle) -> None:
        """Tell an outsider our terms; it holds others."""
        self._notify(bundle, FrameType.OPEN, opening_payload(self._terms))

    def hand_on(self, frame_type: FrameType, to: int, *, of: int, payload: bytes, weight: float = 0.0) -> None:
        """Tell a member the word of another one, with which it has no link."""
        header = self._header(frame_type, len(payload), rank=of, weight=weight)
        bundle = self.bundle(to)
        bundle.notices.append(Notice(pack(header, payload), payload))
        bundle.wake()

    def abort(self, payload: bytes) -> None:
        """Tell all that we have given the round up."""
        for bundle in self._bundles:
            if bundle is not None:
                self._notify(bundle, FrameType.ABORT, payload)

    def holds_for(self, rank: int) -> bool:
        """Whether chunks for this member are not the kernel's yet."""
        return self.num_unsent_to(rank) > 0

    def num_unsent_to(self, rank: int) -> int:
        """Chunks for this member that are not the kernel's yet."""
        return len(self._unsent[rank])

    def unsent_to(self, rank: int) -> Collection[ChunkSend]:
        """These chunks."""
        return self._unsent[rank]

    def forget(self, rank: int) -> None:
        """Take back what waits for this member: it will be put in again."""
        self.bundle(rank).forget_queued(self)
        self.num_unsent -= len(self._unsent[rank])
        self._unsent[rank].clear()

    def bundle(self, rank: int) -> Bundle:
        """The links to this member."""
        bundle = self._bundles[rank]
        assert bundle is not None
        return bundle

    def let_go(self) -> None:
        """Nothing more will be sent or asked: who made us is free now, not when cycles are looked for."""
        self._on_bad_input = self._on_drained = _nobody
        for unsent in self._unsent:
            unsent.clear()

    # -------------------------------------------------------------------------------- from the links

    def on_sent(self, send: ChunkSend, nbytes: int) -> None:
        """A chunk is the kernel's now."""
        self.bytes_sent += nbytes
        if send in self._unsent[send.to]:
            self._unsent[send.to].discard(send)
            self.num_unsent -= 1
        if not self.num_unsent:
            self._on_drained()

    def pieces_of(self, frame_type: FrameType, chunk: int, scratch: Scratch) -> tuple[bytes, memoryview] | None:
        """Encode now. None if our own numbers cannot be sent: then the round has ended."""
        if frame_type is FrameType.PART:
            try:
                is_into_root = self._machine.is_into_root(self.rank, chunk)
                payload = self._buffers.part(
                    chunk, scratch, is_sum=not self._machine.sends_own_part(chunk), is_into_root=is_into_root
                )
            except NotFinite:
                index = self._buffers.first_bad_input()
                assert index is not None, "what is sent up is our own part, or sums that were looked at"
                self._on_bad_input(NonFiniteInput(index))
                return None
            return pack(self._header(frame_type, len(payload), chunk), payload), payload
        payload = self._buffers.result(chunk)
        header = self._result_headers.get(chunk)
        if header is None:  # the same frame goes to all: its checksum is made once
            header = self._result_headers[chunk] = pack(self._header(frame_type, len(payload), chunk), payload)
        return header, payload

    # -------------------------------------------------------------------------------- frames

    def _notify(self, bundle: Bundle, frame_type: FrameType, payload: bytes) -> None:
        bundle.notices.append(Notice(pack(self._header(frame_type, len(payload)), payload), payload))
        bundle.wake()

    @functools.cached_property
    def _opening(self) -> tuple[bytes, bytes]:
        """Header and payload of our OPEN, the same for all."""
        payload = opening_payload(self._terms)
        return pack(self._header(FrameType.OPEN, len(payload)), payload), payload

    def _header(
        self,
        frame_type: FrameType,
        payload_nbytes: int,
        chunk: int = 0,
        *,
        rank: int | None = None,
        weight: float | None = None,
    ) -> Header:
        return Header(
            type=frame_type,
            payload_nbytes=payload_nbytes,
            epoch=self._key.epoch,
            outer_step=self._key.outer_step,
            fragment=self._key.fragment,
            rank=self.rank if rank is None else rank,
            chunk=chunk,
            weight=self._weight if weight is None else weight,
            plan_hash=self._plan_hash,
        )


def _nobody(*_: object) -> None:
    """Who is told when the round is over."""
