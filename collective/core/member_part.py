# SPDX-License-Identifier: Apache-2.0
"""What a plan means for one member, before anything has happened: where its round begins.

Rules: pure, and the same whenever it is asked for; so it is read from the plan once.
"""

from dataclasses import dataclass
from functools import lru_cache

from isthmus.collective.core.slices import Route, SlicePlan


@dataclass(frozen=True, slots=True)
class MemberPart:
    """See the module."""

    slice_of: tuple[int, ...]
    """Of each chunk."""
    route_of: tuple[Route, ...]
    missing: tuple[int, ...]
    """Of each chunk; bit r: the part of rank r is not in the sum yet."""
    children_up: tuple[tuple[int, ...], ...]
    """Of each slice, who sends us parts."""
    children_down: tuple[tuple[int, ...], ...]
    """Who gets results from us."""
    missing_parts: tuple[int, ...]
    """Of each member."""
    missing_results: tuple[int, ...]
    """Of each member; ours: chunks that we finish."""


@lru_cache(maxsize=64)  # training posts the same operations again and again
def part_of(slices: SlicePlan, rank: int) -> MemberPart:
    """What this plan means for the member of this rank."""
    slice_of: list[int] = []
    missing: list[int] = []
    children_up = [_children(route.up, rank) for route in slices.routes]
    missing_parts, missing_results = [0] * slices.world_size, [0] * slices.world_size
    for slice_, route in enumerate(slices.routes):
        num_chunks = len(slices.chunks_of(slice_))
        slice_of += [slice_] * num_chunks
        missing += [sum(1 << child for child in children_up[slice_])] * num_chunks
        for child in children_up[slice_]:
            missing_parts[child] += num_chunks
        giver = rank if route.root == rank else route.down[rank]
        missing_results[giver] += num_chunks
    return MemberPart(
        slice_of=tuple(slice_of),
        route_of=tuple(slices.routes[slice_] for slice_ in slice_of),
        missing=tuple(missing),
        children_up=tuple(children_up),
        children_down=tuple(_children(route.down, rank) for route in slices.routes),
        missing_parts=tuple(missing_parts),
        missing_results=tuple(missing_results),
    )


def _children(tree: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(other for other, parent in enumerate(tree) if parent == rank)
