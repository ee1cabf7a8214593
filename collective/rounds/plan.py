# SPDX-License-Identifier: Apache-2.0
"""How a buffer is cut into slices and chunks, and the terms that all members of a round must share.

Borders of a reduced buffer lie on multiples of 256 elements, so that no codec's block crosses one; the last chunk
takes the rest. A buffer with fewer blocks than members leaves some slices empty.

Rules: a plan follows from its arguments alone, so equal arguments give equal plans everywhere. `Terms` names them;
its hash is in every frame of the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import msgspec
import xxhash

from isthmus.collective.codec.base import BLOCK_NUMEL
from isthmus.collective.core.slices import Route, SlicePlan
from isthmus.collective.core.types import PeerRef

_MIN_CHUNK_NBYTES = 1 << 20
"""Do not cut finer: a frame costs 0.1 ms, its code has left the cache by then. Once a survey has found a long path,
chunks are shorter."""
FAR_CHUNK_NBYTES = 256 << 10
"""On a long path several streams share a slice: short chunks keep them all busy until the end."""
_CHUNKS_WANTED = 8
"""A slice of several chunks lets sending, adding and receiving overlap."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, forbid_unknown_fields=True):
    """What every member must have posted alike. OPEN carries it; the weight is each member's own."""

    op: str
    dtype: str
    numel: int
    codec: str
    chunk_nbytes: int
    members: str
    plan: str
    slices: str

    @property
    def hash32(self) -> int:
        """Short name of these terms, for every frame."""
        return _hash32(self)

    def first_difference(self, theirs: "Terms") -> tuple[str, object, object] | None:
        """(field, ours, theirs) of the first field that differs."""
        for name in self.__struct_fields__:
            mine, other = getattr(self, name), getattr(theirs, name)
            if mine != other:
                return name, mine, other
        return None


@lru_cache(maxsize=64)
def _hash32(terms: Terms) -> int:
    return xxhash.xxh32_intdigest(msgspec.msgpack.encode(terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One round's cut. Chunk c covers the elements `starts[c] .. starts[c+1]` of the whole buffer."""

    slices: SlicePlan
    starts: tuple[int, ...]
    digest: str = field(init=False, repr=False, compare=False)
    """Names the plan: equal for equal plans only."""
    longest: int = field(init=False, repr=False, compare=False)
    """Elements of the longest chunk, 0 if there is none."""

    def __post_init__(self) -> None:
        trees = [(route.root, route.up, route.down) for route in self.slices.routes]
        packed = msgspec.msgpack.encode((self.slices.bounds, self.starts, trees))
        object.__setattr__(self, "digest", xxhash.xxh3_64_hexdigest(packed))
        longest = max((end - start for start, end in pairwise(self.starts)), default=0)
        object.__setattr__(self, "longest", longest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.starts[-1]

    def numel_of(self, chunk: int) -> int:
        """Number of elements of a chunk."""
        return self.starts[chunk + 1] - self.starts[chunk]

    def slice_span(self, slice_: int) -> tuple[int, int]:
        """First and last element (excluded) of a slice."""
        return self.starts[self.slices.bounds[slice_]], self.starts[self.slices.bounds[slice_ + 1]]


def share_out(numel: int, shares: Sequence[float]) -> list[int]:
    """How many elements each slice gets: whole blocks in proportion to the shares, the last block may be short.

    Args:
        numel: elements of the whole buffer, 0 allowed.
        shares: of each slice, any unit; equal numbers for equal links.

    Raises:
        ValueError: no slices, a negative share, or only zeros.
    """
    total_share = sum(shares)
    if not shares or min(shares) < 0 or total_share <= 0 or numel < 0:
        raise ValueError(f"cannot share {numel} elements out by {list(shares)}")
    num_blocks = -(-numel // BLOCK_NUMEL)
    borders = [0]
    share = 0.0
    for own_share in shares:
        share += own_share
        borders.append(min(num_blocks, max(borders[-1], round(num_blocks * share / total_share))))
    last_wanted = max(index for index, own_share in enumerate(shares) if own_share > 0)
    borders[last_wanted + 1 :] = [num_blocks] * (len(shares) - last_wanted)
    ends = [min(border * BLOCK_NUMEL, numel) for border in borders]
    return [end - start for start, end in pairwise(ends)]


def cut(numels: Sequence[int], routes: tuple[Route, ...], *, item_nbytes: int, chunk_nbytes: int) -> RoundPlan:
    """Cut every slice into chunks as even as can be.

    Args:
        numels: elements of each slice, in the order of `routes`.
        routes: the slices' trees.
        item_nbytes: length of an element.
        chunk_nbytes: longest chunk as it lies in memory, at least 256 elements of 8 bytes.
    """
    return _cut(tuple(numels), routes, item_nbytes, chunk_nbytes)


@lru_cache(maxsize=64)  # training posts the same operations again and again
def _cut(numels: tuple[int, ...], routes: tuple[Route, ...], item_nbytes: int, chunk_nbytes: int) -> RoundPlan:
    starts = [0]
    bounds = [0]
    max_blocks = chunk_nbytes // (BLOCK_NUMEL * item_nbytes)
    min_blocks = min(max_blocks, max(1, _MIN_CHUNK_NBYTES // (BLOCK_NUMEL * item_nbytes)))
    for numel in numels:
        first = starts[-1]
        num_blocks = -(-numel // BLOCK_NUMEL)
        chunk_blocks = min(max_blocks, max(min_blocks, -(-num_blocks // _CHUNKS_WANTED)))
        num_chunks = -(-num_blocks // chunk_blocks)
        starts.extend(
            first + min(num_blocks * (index + 1) // num_chunks * BLOCK_NUMEL, numel) for index in range(num_chunks)
        )
        bounds.append(len(starts) - 1)
    return RoundPlan(slices=SlicePlan(bounds=tuple(bounds), routes=routes), starts=tuple(starts))


@lru_cache(maxsize=64)
def terms_of(
    plan: RoundPlan,
    *,
    op: str,
    dtype: str,
    numel: int,
    codec: str,
    chunk_nbytes: int,
    members: tuple[PeerRef, ...],
    plan_name: str,
) -> Terms:
    """Name what all members of a round must share. `numel` is the caller's, for people."""
    return Terms(
        op=op,
        dtype=dtype,
        numel=numel,
        codec=codec,
        chunk_nbytes=chunk_nbytes,
        members=xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(members)),
        plan=plan_name,
        slices=plan.digest,
    )
