"""Who reduces which part of the buffer, and the terms that all members of a round must share.

The butterfly: the buffer is cut into one slice a member, a slice into chunks. Borders lie on multiples of 256
elements, so that no codec's block crosses one; the last chunk takes the rest. A buffer with fewer blocks than members
leaves some slices empty.

Rules: a plan follows from its arguments alone, so equal arguments give equal plans everywhere. `Terms` names them;
its hash is in every frame of the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from collective.codec.base import BLOCK_NUMEL
from collective.core.reduce import SlicePlan
from collective.core.types import View

_MIN_CHUNK_BLOCKS = 256
"""Do not cut below 256 KiB of fp32: a frame has its price."""
_CHUNKS_WANTED = 4
"""A slice of several chunks lets sending, adding and receiving overlap."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every member must have posted alike. OPEN carries it; the weight is each member's own."""

    op: str
    dtype: str
    numel: int
    codec: str
    chunk_numel: int
    members: str
    slices: str

    @property
    def hash32(self) -> int:
        """Short name of these terms, for every frame."""
        return xxhash.xxh32_intdigest(msgspec.msgpack.encode(self))

    def first_difference(self, theirs: "Terms") -> tuple[str, object, object] | None:
        """(field, ours, theirs) of the first field that differs."""
        for field in self.__struct_fields__:
            mine, other = getattr(self, field), getattr(theirs, field)
            if mine != other:
                return field, mine, other
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPlan:
    """One round's cut. Chunk c covers elements `starts[c] .. starts[c+1]`."""

    slices: SlicePlan
    starts: tuple[int, ...]

    def span(self, chunk: int) -> slice:
        """The elements of a chunk."""
        return slice(self.starts[chunk], self.starts[chunk + 1])

    def numel_of(self, chunk: int) -> int:
        """Number of elements of a chunk."""
        return self.starts[chunk + 1] - self.starts[chunk]


def plan_mean(numel: int, shares: Sequence[float], chunk_numel: int) -> MeanPlan:
    """Cut a buffer.

    Args:
        numel: elements of the whole buffer, 0 allowed.
        shares: for each rank how much of the reducing it takes, any unit; equal numbers for equal links.
        chunk_numel: longest chunk, a multiple of 256.

    Raises:
        ValueError: no members, a negative share, only zeros, or a chunk that is no multiple of 256.
    """
    total_share = sum(shares)
    if not shares or min(shares) < 0 or total_share <= 0:
        raise ValueError(f"shares must be numbers from 0 up, not all 0: {list(shares)}")
    if chunk_numel <= 0 or chunk_numel % BLOCK_NUMEL or numel < 0:
        raise ValueError(f"cannot cut {numel} elements into chunks of {chunk_numel}")
    num_blocks = -(-numel // BLOCK_NUMEL)
    starts = [0]
    bounds = [0]
    share = 0.0
    first = 0
    for rank, own_share in enumerate(shares):
        share += own_share
        stop = num_blocks if rank == len(shares) - 1 else max(first, round(num_blocks * share / total_share))
        starts.extend(min(block * BLOCK_NUMEL, numel) for block in _cut(first, stop, chunk_numel // BLOCK_NUMEL))
        bounds.append(len(starts) - 1)
        first = stop
    return MeanPlan(slices=SlicePlan(bounds=tuple(bounds)), starts=tuple(starts))


def terms_of(view: View, *, numel: int, codec: str, chunk_numel: int, plan: MeanPlan) -> Terms:
    """The terms of a MEAN of fp32 in this view."""
    members = msgspec.msgpack.encode([member.ref for member in view.members])
    return Terms(
        op="mean",
        dtype="float32",
        numel=numel,
        codec=codec,
        chunk_numel=chunk_numel,
        members=xxhash.xxh3_64_hexdigest(members),
        slices=xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((plan.slices.bounds, plan.starts))),
    )


def _cut(first: int, stop: int, max_chunk_blocks: int) -> list[int]:
    """Where the chunks of the blocks `first .. stop` end, as even as can be."""
    num_blocks = stop - first
    if num_blocks == 0:
        return []
    chunk_blocks = min(max_chunk_blocks, max(_MIN_CHUNK_BLOCKS, -(-num_blocks // _CHUNKS_WANTED)))
    num_chunks = -(-num_blocks // chunk_blocks)
    return [first + num_blocks * (index + 1) // num_chunks for index in range(num_chunks)]
