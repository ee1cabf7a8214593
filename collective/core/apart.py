# SPDX-License-Identifier: Apache-2.0
"""Members that have no link with each other, as two that are behind NATs: who reaches everybody, and who hands on.

A pair that is apart is a missing edge: nothing is sent over it, and nobody is blamed for what does not come over it.
At least one member, a hub, has links with all. Only hubs are roots of a reduction; what else would cross a missing
edge takes two hops, through a hub.

Rules: pure; ranks are those of one view, or of the members of one round.
"""

Pair = tuple[int, int]
"""Two ranks, the lower one first."""

Apart = frozenset[Pair]
"""All pairs of a view that have no link."""

NO_PAIR: Apart = frozenset()


def are_apart(apart: Apart, one: int, other: int) -> bool:
    """Whether these two have no link."""
    return ((one, other) if one < other else (other, one)) in apart


def apart_from(apart: Apart, rank: int) -> frozenset[int]:
    """The ranks that this one has no link with."""
    return frozenset(b if a == rank else a for a, b in apart if rank in (a, b))


def hubs(world_size: int, apart: Apart) -> tuple[int, ...]:
    """The ranks that have links with all, rising."""
    lacking = {rank for pair in apart for rank in pair}
    return tuple(rank for rank in range(world_size) if rank not in lacking)
