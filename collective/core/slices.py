# SPDX-License-Identifier: Apache-2.0
"""Who reduces what, and by which way: slices of the buffer, each with its two trees.

A plan cuts the buffer into chunks and deals them to slices. A slice has a root. Parts travel up a tree to the root,
each node adding its children's sums to its own part; the result travels down another tree. Every plan and every
operation of this package is a choice of such trees:

    butterfly   every member that has links with all is the root of one slice; both trees are stars
    ring        every member is the root of one slice; both trees are paths round the ring
    gather      every member is the root of one slice; nothing goes up, a star goes down
    broadcast   one slice; nothing goes up

Rules: chunk ids start at 0 and have no gaps; a slice may be empty. A plan follows from its arguments alone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.collective.core.apart import NO_PAIR, Apart, apart_from, hubs

NOBODY = -1
"""Parent of a root, and of a member that a tree does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The two trees of a slice: for every rank its parent on the way to the root and on the way from it."""

    root: int
    up: tuple[int, ...]
    down: tuple[int, ...]
    is_reduced: bool = field(init=False, repr=False, compare=False)
    """Whether parts of other members go into the result."""
    is_star: bool = field(init=False, repr=False, compare=False)
    """Whether nobody stands between the root and the others."""

    def __post_init__(self) -> None:
        if len(self.up) != len(self.down):
            raise ValueError("both trees must speak of the same members")
        for tree in (self.up, self.down):
            if any(depth_of(rank, tree, self.root) is None for rank in range(len(tree))):
                raise ValueError(f"not a tree with the root {self.root}: {tree}")
        if self.down.count(NOBODY) != 1:
            raise ValueError(f"a tree down that does not hold all members: {self.down}")
        # Asked for every chunk and every round, so they are found once.
        object.__setattr__(self, "is_reduced", any(parent != NOBODY for parent in self.up))
        is_star = all(parent in (NOBODY, self.root) for parent in self.up + self.down)
        object.__setattr__(self, "is_star", is_star)


def depth_of(rank: int, tree: Sequence[int], root: int) -> int | None:
    """Hops between `rank` and the root, 0 for a member that the tree does not hold, None if the way has no end."""
    depth = 0
    if tree[rank] == NOBODY:
        return depth
    while rank != root:
        rank = tree[rank]
        depth += 1
        if rank == NOBODY or depth > len(tree):
            return None
    return depth if tree[root] == NOBODY else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """Slice s holds the chunks `bounds[s] .. bounds[s+1]`, which travel by `routes[s]`."""

    bounds: tuple[int, ...]
    routes: tuple[Route, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bounds[0] != 0 or list(self.bounds) != sorted(self.bounds):
            raise ValueError(f"slice bounds must rise from 0: {self.bounds}")
        if not self.routes or len(self.routes) != len(self.bounds) - 1:
            raise ValueError(f"{len(self.bounds) - 1} slices and {len(self.routes)} routes")
        if any(len(route.up) != self.world_size for route in self.routes):
            raise ValueError("all routes must speak of the same members")
        object.__setattr__(self, "_hash", hash((self.bounds, self.routes)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.routes[0].up)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole buffer."""
        return self.bounds[-1]

    def chunks_of(self, slice_: int) -> range:
        """The chunks of a slice, possibly none."""
        return range(self.bounds[slice_], self.bounds[slice_ + 1])

    def slice_of(self, chunk: int) -> int:
        """The slice that holds this chunk."""
        return bisect_right(self.bounds, chunk) - 1

    def is_rooted_at(self, rank: int, chunk: int) -> bool:
        """Whether the result of this chunk is made by this rank."""
        return self.root_of(chunk) == rank

    def root_of(self, chunk: int) -> int:
        """The rank that makes the result of this chunk."""
        return self.routes[self.slice_of(chunk)].root

    def rooted_at(self, rank: int) -> list[int]:
        """The chunks whose result is made by this rank, rising."""
        return [
            chunk for slice_, route in enumerate(self.routes) if route.root == rank for chunk in self.chunks_of(slice_)
        ]


def star(root: int, world_size: int, apart: Apart = NO_PAIR) -> tuple[int, ...]:
    """Everybody is a child of the root; whoever is apart from it is the child of a hub, which is one of the root.

    Which hub differs from root to root, so that they share the work.

    Raises:
        ValueError: somebody is apart from the root, and nobody has links with all.
    """
    far = apart_from(apart, root)
    if not far:
        return tuple(NOBODY if rank == root else root for rank in range(world_size))
    between = hubs(world_size, apart)
    if not between:
        raise ValueError("no member has links with all")
    hub = between[root % len(between)]
    return tuple(NOBODY if rank == root else hub if rank in far else root for rank in range(world_size))


def nobody(world_size: int) -> tuple[int, ...]:
    """The tree without members."""
    return (NOBODY,) * world_size


def butterfly(world_size: int, roots: Sequence[int] | None = None) -> tuple[Route, ...]:
    """Slice n is reduced by the n-th of the roots, by default everybody: two one-way trips, all exchange with those."""
    roots = range(world_size) if roots is None else roots
    return tuple(Route(root=root, up=star(root, world_size), down=star(root, world_size)) for root in roots)


def ring(order: Sequence[int]) -> tuple[Route, ...]:
    """Slice r ends its way round the ring at rank r, and the result goes round once more.

    Args:
        order: every rank once; each sends to the next one only.
    """
    world_size = len(order)
    following = {rank: order[(place + 1) % world_size] for place, rank in enumerate(order)}
    preceding = {after: rank for rank, after in following.items()}
    return tuple(
        Route(
            root=root,
            up=tuple(NOBODY if rank == root else following[rank] for rank in range(world_size)),
            down=tuple(NOBODY if rank == root else preceding[rank] for rank in range(world_size)),
        )
        for root in range(world_size)
    )


def gather(world_size: int, apart: Apart = NO_PAIR) -> tuple[Route, ...]:
    """Slice r is what rank r gives to all."""
    nothing = nobody(world_size)
    return tuple(Route(root=root, up=nothing, down=star(root, world_size, apart)) for root in range(world_size))


def broadcast(root: int, world_size: int, apart: Apart = NO_PAIR) -> tuple[Route, ...]:
    """One slice, from `root` to all."""
    return (Route(root=root, up=nobody(world_size), down=star(root, world_size, apart)),)
