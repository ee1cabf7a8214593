"""The butterfly MEAN as a pure machine over chunk references (ARCHITECTURE §6).

The buffer is cut into chunks, the chunks are dealt to the members in slices. Every member sends its part of a slice
to the slice's owner; the owner adds them up, divides by the sum of weights, encodes once and sends the same bytes to
all. This machine decides who sends what and when a chunk is complete. It never sees a byte: the values live in the
effects, so the simulator can carry chunks that are multisets of contributors.

Rules:
* Every contribution is counted once. A duplicate is dropped and counted in `duplicates`; order does not matter.
* Credit: a member that has not opened the round gets at most `eager_chunks` contributions, so what it must hold back
  is bounded. A contribution of its own proves that it has opened.
* The round is finished when every member has opened it, every chunk owned here is finished and every other chunk is
  installed. Sends may still be under way then; the shell drains them before it lets go of the buffers.
* In a link's queue, results go before contributions: a result completes a chunk, a contribution only begins one.
* No time in here. Whoever moves the bytes sees who stands still, and asks `waiting_for()` whom that concerns.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from collective.core.types import RoundKey
from collective.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """Who owns which chunks: rank r owns `bounds[r] .. bounds[r+1]`. Chunk ids start at 0 and have no gaps."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or list(self.bounds) != sorted(self.bounds):
            raise ValueError(f"slice bounds must rise from 0: {self.bounds}")

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.bounds) - 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole buffer."""
        return self.bounds[-1]

    def chunks_of(self, rank: int) -> range:
        """The chunks that this rank owns, possibly none."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def owner_of(self, chunk: int) -> int:
        """The rank that owns this chunk."""
        return bisect_right(self.bounds, chunk) - 1


class ChunkRefused(RemoteProtocolError):
    """A member sent a chunk that the plan does not allow."""

    def __init__(self, rank: int, chunk: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.chunk = chunk


# ------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """This member has posted the round, with the same plan."""

    rank: int


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """This member's part of a chunk that is owned here is whole and verified."""

    rank: int
    chunk: int


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """The finished chunk is here, whole and verified, from `rank`."""

    rank: int
    chunk: int


@dataclass(frozen=True, slots=True)
class LinkRenewed:
    """The way to this member broke and was made anew: whatever was on it may be lost."""

    rank: int


ReduceEvent = PeerOpened | ContributionArrived | ResultArrived | LinkRenewed

# ------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Tell this member our terms: the plan, the codec, our weight."""

    to: int


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Encode our part of this chunk when the link can take it, and send it to its owner."""

    to: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add `weight · x` of this rank (maybe our own) to the chunk's sum. The first one starts the sum."""

    chunk: int
    rank: int


@dataclass(frozen=True, slots=True)
class FinishChunk:
    """Divide the sum by the sum of weights, encode once, keep what the encoding decodes to."""

    chunk: int


@dataclass(frozen=True, slots=True)
class SendResult:
    """Send the finished chunk's encoding to this member, ahead of contributions."""

    to: int
    chunk: int


@dataclass(frozen=True, slots=True)
class InstallResult:
    """Decode the chunk that just arrived into its place in the output."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every chunk of the output is in place. Comes exactly once."""


ReduceEffect = SendOpen | SendContribution | Accumulate | FinishChunk | SendResult | InstallResult | Finished


class MeanMachine:
    """One member's part in one round.

    Args:
        key: name of the round, for whoever reads a story of it.
        rank: our place in the view.
        slices: who owns what; the same on all members.
        eager_chunks: how many contributions a member may get before it has opened the round, at least 1.
    """

    def __init__(self, *, key: RoundKey, rank: int, slices: SlicePlan, eager_chunks: int) -> None:
        if not 0 <= rank < slices.world_size or eager_chunks < 1:
            raise ValueError(f"rank {rank} of {slices.world_size}, {eager_chunks} eager chunks")
        self.key = key
        self.rank = rank
        self.slices = slices
        self.duplicates = 0
        self.finished = False
        self._eager_chunks = eager_chunks
        self._others = tuple(other for other in range(slices.world_size) if other != rank)
        self._own = slices.chunks_of(rank)
        self._opened = [other == rank for other in range(slices.world_size)]
        self._next_to_send = [slices.chunks_of(other).start for other in range(slices.world_size)]
        self._counted = [0] * len(self._own)  # bit r: the part of rank r is in the sum
        self._missing_parts = [len(self._own)] * slices.world_size
        self._installed = bytearray(slices.num_chunks)
        self._missing_results = [len(slices.chunks_of(other)) for other in range(slices.world_size)]
        self._everyone = (1 << slices.world_size) - 1

    def start(self) -> Sequence[ReduceEffect]:
        """Open the round towards everybody and send what the credit allows. Call once, before any event."""
        effects: list[ReduceEffect] = [SendOpen(other) for other in self._others]
        for other in self._others:
            self._send_contributions(other, effects)
        if not self._others:
            for chunk in self._own:
                self._count(self.rank, chunk, effects)
        self._finish_if_complete(effects)
        return effects

    def handle(self, event: ReduceEvent) -> Sequence[ReduceEffect]:
        """Take one fact, return the orders that follow, to be carried out in this order.

        Raises:
            ChunkRefused: the member named in it sent something outside the plan. The machine is unchanged.
        """
        effects: list[ReduceEffect] = []
        match event:
            case PeerOpened(rank=rank):
                self._open(self._member(rank), effects)
            case ContributionArrived(rank=rank, chunk=chunk):
                self._on_contribution(self._member(rank, chunk), chunk, effects)
            case ResultArrived(rank=rank, chunk=chunk):
                self._on_result(self._member(rank, chunk), chunk, effects)
            case LinkRenewed(rank=rank):
                self._on_link_renewed(self._member(rank), effects)
            case _:
                assert_never(event)
        self._finish_if_complete(effects)
        return effects

    def needs(self, rank: int) -> bool:
        """Whether we cannot finish without hearing more from this member."""
        if rank == self.rank:
            return False
        return not self._opened[rank] or self._missing_parts[rank] > 0 or self._missing_results[rank] > 0

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks from which an opening, a contribution or a result is still missing."""
        return tuple(other for other in self._others if self.needs(other))

    def has_opened(self, rank: int) -> bool:
        """Whether this member is known to have posted the round."""
        return self._opened[rank]

    def owes_contributions(self, rank: int) -> bool:
        """Whether parts of our chunks are missing from this member. Those depend on nobody but itself."""
        return self._missing_parts[rank] > 0

    def wants_contribution(self, rank: int, chunk: int) -> bool:
        """Whether this part would be counted. False for what is not ours and for duplicates."""
        return chunk in self._own and not self._counted[chunk - self._own.start] >> rank & 1

    def wants_result(self, rank: int, chunk: int) -> bool:
        """Whether this result would be installed. False for what is not this rank's and for duplicates."""
        return (
            rank != self.rank
            and chunk in self.slices.chunks_of(rank)
            and chunk < self._next_to_send[rank]
            and not self._installed[chunk]
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        own_done = sum(parts == self._everyone for parts in self._counted)
        assert all(0 <= parts <= self._everyone for parts in self._counted)
        for rank in range(self.slices.world_size):
            chunks = self.slices.chunks_of(rank)
            counted_parts = sum(parts >> rank & 1 for parts in self._counted)
            if rank == self.rank:
                # Our own part is counted together with the first that arrives.
                assert counted_parts == sum(parts != 0 for parts in self._counted)
                assert sum(self._installed[chunk] for chunk in chunks) == own_done
                continue
            assert counted_parts + self._missing_parts[rank] == len(self._own)
            installed = [chunk for chunk in chunks if self._installed[chunk]]
            assert len(installed) + self._missing_results[rank] == len(chunks)
            # An owner cannot have finished a chunk without our part of it.
            assert all(chunk < self._next_to_send[rank] for chunk in installed)
            assert chunks.start <= self._next_to_send[rank] <= chunks.stop
            if not self._opened[rank]:
                assert self._next_to_send[rank] <= chunks.start + self._eager_chunks
                assert counted_parts == 0
        complete = own_done == len(self._own) and not self.waiting_for()
        assert self.finished == complete

    # -------------------------------------------------------------------------------- transitions

    def _on_contribution(self, rank: int, chunk: int, effects: list[ReduceEffect]) -> None:
        if chunk not in self._own:
            raise ChunkRefused(rank, chunk, "contribution to a chunk that is not ours")
        self._open(rank, effects)
        if self._counted[chunk - self._own.start] >> rank & 1:
            self.duplicates += 1
            return
        if not self._counted[chunk - self._own.start]:
            self._count(self.rank, chunk, effects)
        self._count(rank, chunk, effects)

    def _on_result(self, rank: int, chunk: int, effects: list[ReduceEffect]) -> None:
        if chunk not in self.slices.chunks_of(rank):
            raise ChunkRefused(rank, chunk, "result of a chunk that its sender does not own")
        if chunk >= self._next_to_send[rank]:
            raise ChunkRefused(rank, chunk, "result of a chunk before our contribution to it")
        if self._installed[chunk]:
            self.duplicates += 1
            return
        self._installed[chunk] = 1
        self._missing_results[rank] -= 1
        effects.append(InstallResult(chunk))

    def _on_link_renewed(self, rank: int, effects: list[ReduceEffect]) -> None:
        effects.append(SendOpen(rank))
        chunks = self.slices.chunks_of(rank)
        sent = range(chunks.start, self._next_to_send[rank])
        effects.extend(SendContribution(rank, chunk) for chunk in sent if not self._installed[chunk])
        effects.extend(SendResult(rank, chunk) for chunk in self._own if self._installed[chunk])

    def _open(self, rank: int, effects: list[ReduceEffect]) -> None:
        if not self._opened[rank]:
            self._opened[rank] = True
            self._send_contributions(rank, effects)

    def _send_contributions(self, rank: int, effects: list[ReduceEffect]) -> None:
        chunks = self.slices.chunks_of(rank)
        stop = chunks.stop if self._opened[rank] else min(chunks.stop, chunks.start + self._eager_chunks)
        effects.extend(SendContribution(rank, chunk) for chunk in range(self._next_to_send[rank], stop))
        self._next_to_send[rank] = stop

    def _count(self, rank: int, chunk: int, effects: list[ReduceEffect]) -> None:
        index = chunk - self._own.start
        self._counted[index] |= 1 << rank
        self._missing_parts[rank] -= 1
        effects.append(Accumulate(chunk, rank))
        if self._counted[index] == self._everyone:
            self._installed[chunk] = 1
            self._missing_results[self.rank] -= 1
            effects.append(FinishChunk(chunk))
            effects.extend(SendResult(other, chunk) for other in self._others)

    def _finish_if_complete(self, effects: list[ReduceEffect]) -> None:
        if self.finished or self._missing_results[self.rank] or any(map(self.needs, self._others)):
            return
        self.finished = True
        effects.append(Finished())

    def _member(self, rank: int, chunk: int = -1) -> int:
        if not 0 <= rank < self.slices.world_size or rank == self.rank:
            raise ChunkRefused(rank, chunk, "sender is not another member of the round")
        return rank
