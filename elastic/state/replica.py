# SPDX-License-Identifier: Apache-2.0
"""The shared state as elastic sees it: named bytes of a committed step, with no meaning.

The trainer implements `Replica` (parameters, outer momentum, whatever must be equal everywhere); elastic pins it for
learners, fills it from donors, and replays commits into it. Nothing here knows a tensor's shape, type or purpose.
"""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import OuterStep, PeerId
from isthmus.elastic.core.messages import Digest, Held, Natural
from isthmus.elastic.state.digest import StateManifest

CountedWeight = Annotated[float, Meta(ge=0.0, le=2.0**64)]
"""What a part was counted with: a member's work, times the factor that its method has put on it.

At most `MAX_WEIGHT` of collective/transport/wire.py, which would load torch here.
"""


class ResultChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wire form of one chunk of a round's result, as all members decoded it. Owned bytes."""

    start_numel: Natural
    data: bytes


class RoundRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one round of an outer step returned, as far as the shared state follows from it.

    A mean is one result in chunks; a gather has one chunk for each member of `weights`, in their order.
    """

    codec: str
    weights: tuple[tuple[PeerId, CountedWeight], ...]
    """Of those whose payloads it holds, by rank."""
    notes: tuple[tuple[float, ...], ...] = ()
    """What each of them said beside its payload."""
    chunks: tuple[ResultChunk, ...] = ()


class CommitEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One committed outer step, enough to make step `outer_step` out of step `outer_step - 1`, bit for bit.

    `rounds` are in the order of the plan; all of them were voted together.
    """

    outer_step: OuterStep
    digest: Digest
    rounds: tuple[RoundRecord, ...]

    @property
    def chunks(self) -> tuple[ResultChunk, ...]:
        """Those of all rounds, in the order in which they travel and are written."""
        return tuple(chunk for record in self.rounds for chunk in record.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded results."""
        return sum(len(chunk.data) for chunk in self.chunks)


class Pinned(Protocol):
    """An immutable snapshot of the held state. Training goes on beside it."""

    @property
    def manifest(self) -> StateManifest:
        """What the snapshot consists of; hashed when the step was committed, never again for a learner."""
        ...

    def chunk(self, tensor: int, chunk: int) -> memoryview:
        """Bytes of one chunk; `tensor` and `chunk` are indices into the manifest. Valid until `release`."""
        ...

    def release(self) -> None:
        """Give the snapshot up. Called exactly once."""
        ...


class SharedText(Protocol):
    """The text that the run trains on, or a part of it; it never changes."""

    @property
    def manifest(self) -> StateManifest:
        """What it consists of; the root is the text's digest."""
        ...

    @property
    def description(self) -> str:
        """Its name for people: up to 200 characters that can be printed."""
        ...

    def read(self, side: int, chunk: int) -> memoryview:
        """A copy of the bytes of one chunk; `side` and `chunk` are indices into the manifest.

        It may wait for a disk: not for the event loop.
        """
        ...

    def part(self, digest: Digest) -> "SharedText | None":
        """The part with this digest, or the text itself if it is its own; None if it is not here. May wait as well."""
        ...


class PrivateState(Protocol):
    """What is this peer's own, such as its inner optimizer's: no commit knows it, and it is sent to whoever has none.

    Called from the event loop's thread only.
    """

    @property
    def is_wanted(self) -> bool:
        """Whether this peer would begin with another's: it has none yet, and was told to ask."""
        ...

    async def lend(self) -> Pinned | None:
        """An immutable copy of it, hashed; None if there is none worth having. Ends in bounded time."""
        ...

    def begin_borrowing(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        """Writable memory for every tensor, in the manifest's order (one-dimensional, format B).

        Raises:
            StateMismatch: names or sizes are not those of this peer's model.
        """
        ...

    async def borrowed(self) -> None:
        """All of it is there: begin with it.

        Raises:
            StateMismatch: it cannot be what it says it is.
        """
        ...


class Replica(Protocol):
    """The shared state of this peer. Called from the event loop's thread only, one write at a time."""

    def held(self) -> Held | None:
        """The committed state in memory, or None if there is none yet."""
        ...

    def pin(self) -> Pinned:
        """An immutable snapshot of the held state, cheap enough for the event loop. Needs a held state."""
        ...

    def leftover(self) -> StateManifest | None:
        """What the memory that `begin_restore` hands out next contains, or None if nobody knows.

        It need not contain the chunks that the held state has with the same digest.

        A staged result that the others overruled, or a replay that diverged, is often wrong in a single chunk.
        """
        ...

    def begin_restore(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        """Writable destination of every tensor, in the manifest's order (one-dimensional, format B).

        Never the held state's own memory: that stays as it is until `finish_restore`. The same tuple again means the
        same memory with what has arrived in it, so that a transfer goes on where it was cut off; whatever needs that
        memory meanwhile (a replay, a round) takes it, and the next call returns another one.

        Raises:
            StateMismatch: names or sizes are not those of this peer's model.
        """
        ...

    async def finish_restore(self, manifest: StateManifest) -> Held:
        """Every byte of the destinations has been verified: install them as the held state."""
        ...

    async def replay(self, entry: CommitEntry) -> Held:
        """Apply one committed result to the held state. Returns what is held then: the entry's step and digest.

        Raises:
            StateDiverged: the outcome does not have the entry's digest; what was held is still held.
        """
        ...
