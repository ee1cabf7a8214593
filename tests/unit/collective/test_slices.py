# SPDX-License-Identifier: Apache-2.0
"""The two trees of every slice: whole, without circles, and shared out among the members."""

import pytest

from isthmus.collective.core.slices import (
    NOBODY,
    Route,
    SlicePlan,
    broadcast,
    butterfly,
    depth_of,
    gather,
    ring,
    star,
)

SIZES = [1, 2, 3, 4, 8, 16]
REDUCING = {
    "butterfly": butterfly,
    "ring": lambda world_size: ring([*range(1, world_size), 0]),
}


def whole(tree, root):
    """Whether all members are in the tree, each with a way to the root."""
    return tree[root] == NOBODY and all(
        rank == root or (tree[rank] != NOBODY and depth_of(rank, tree, root) is not None) for rank in range(len(tree))
    )


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", REDUCING)
def test_every_member_is_the_root_of_one_slice_that_all_give_to_and_get_from(world_size, name):
    routes = REDUCING[name](world_size)
    assert [route.root for route in routes] == list(range(world_size))
    assert all(whole(route.up, route.root) and whole(route.down, route.root) for route in routes)
    assert all(route.is_reduced == (world_size > 1) for route in routes)


@pytest.mark.parametrize("world_size", SIZES)
def test_a_butterfly_is_one_hop_each_way(world_size):
    for route in butterfly(world_size):
        assert max(depth_of(rank, route.up, route.root) for rank in range(world_size)) == min(1, world_size - 1)
        assert route.up == route.down == star(route.root, world_size)


@pytest.mark.parametrize("order", [[0], [1, 0], [2, 0, 1], [3, 1, 0, 2]])
def test_in_a_ring_everybody_sends_to_its_successor_only(order):
    after = {rank: order[(place + 1) % len(order)] for place, rank in enumerate(order)}
    for route in ring(order):
        assert all(parent in (NOBODY, after[rank]) for rank, parent in enumerate(route.up))
        # Results go the same way round: whoever gives to a member stands before it.
        assert all(parent == NOBODY or after[parent] == rank for rank, parent in enumerate(route.down))
        assert max(depth_of(rank, route.up, route.root) for rank in order) == len(order) - 1


@pytest.mark.parametrize("world_size", SIZES)
def test_gather_and_broadcast_only_go_down(world_size):
    for route in (*gather(world_size), *broadcast(world_size - 1, world_size)):
        assert set(route.up) == {NOBODY}
        assert not route.is_reduced
        assert whole(route.down, route.root)
    assert [route.root for route in broadcast(world_size - 1, world_size)] == [world_size - 1]


@pytest.mark.parametrize(
    ("root", "up", "down"),
    [
        (0, (NOBODY, 2, 1), (NOBODY, 0, 0)),  # a circle
        (0, (NOBODY, 0, 0), (NOBODY, 1, 0)),  # its own parent
        (0, (1, NOBODY, 0), (NOBODY, 0, 0)),  # the root has a parent
        (0, (NOBODY, 0, 1), (1, NOBODY, 0)),
        (0, (NOBODY, 0), (NOBODY, 0, 0)),  # not the same members
        (0, (NOBODY, NOBODY, 1), (NOBODY, 0, 0)),  # ends at one that is not the root
    ],
)
def test_what_is_no_tree_is_refused(root, up, down):
    with pytest.raises(ValueError, match="tree"):
        Route(root=root, up=up, down=down)


@pytest.mark.parametrize(
    ("bounds", "routes"),
    [
        ((1, 2, 3), butterfly(2)),
        ((0, 3, 2), butterfly(2)),
        ((0, 1), butterfly(2)),
        ((0,), ()),
        ((0, 1, 2), (*broadcast(0, 2), *broadcast(0, 3))),
    ],
)
def test_plans_that_do_not_fit_together_are_refused(bounds, routes):
    with pytest.raises(ValueError, match=r"slice|routes"):
        SlicePlan(bounds=bounds, routes=routes)


def test_a_plan_says_whose_a_chunk_is_also_round_empty_slices():
    plan = SlicePlan(bounds=(0, 2, 2, 5), routes=butterfly(3))
    assert (plan.world_size, plan.num_chunks) == (3, 5)
    assert [plan.slice_of(chunk) for chunk in range(5)] == [0, 0, 2, 2, 2]
    assert [list(plan.chunks_of(slice_)) for slice_ in range(3)] == [[0, 1], [], [2, 3, 4]]
    assert [plan.rooted_at(rank) for rank in range(3)] == [[0, 1], [], [2, 3, 4]]
