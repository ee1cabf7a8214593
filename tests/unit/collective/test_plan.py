# SPDX-License-Identifier: Apache-2.0
"""How a buffer is cut, and the terms that name the cut."""

import pytest

from isthmus.collective.codec import BLOCK_NUMEL
from isthmus.collective.core.slices import butterfly, gather
from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.rounds.plan import Terms, cut, share_out, terms_of

MEMBERS = tuple(PeerRef(PeerId(f"{number:016x}"), Incarnation(1)) for number in range(3))
TERMS = {"op": "mean", "dtype": "float32", "codec": "raw", "chunk_nbytes": 1 << 20, "plan_name": "butterfly"}
NUMEL = 100_000


def cut_evenly(numel, world_size, item_nbytes=4, chunk_nbytes=1 << 20):
    numels = share_out(numel, [1.0] * world_size)
    return cut(numels, butterfly(world_size), item_nbytes=item_nbytes, chunk_nbytes=chunk_nbytes)


def test_fewer_blocks_than_members_leaves_empty_slices():
    plan = cut_evenly(5, 3)
    assert plan.slices.num_chunks == 1
    assert sum(len(plan.slices.chunks_of(rank)) == 0 for rank in range(3)) == 2
    assert (plan.numel, plan.numel_of(0)) == (5, 5)


def test_an_empty_buffer_has_no_chunks():
    plan = cut_evenly(0, 4)
    assert (plan.numel, plan.slices.num_chunks, plan.longest) == (0, 0, 0)
    assert [plan.slice_span(slice_) for slice_ in range(4)] == [(0, 0)] * 4


def test_shares_decide_how_much_a_member_reduces():
    assert share_out(256 * 100, [3.0, 1.0, 0.0]) == [256 * 75, 256 * 25, 0]
    assert share_out(256 * 100, [0.0, 1.0, 1.0]) == [0, 256 * 50, 256 * 50]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 4096, 100_001])
def test_shares_are_whole_blocks_that_make_up_the_buffer(world_size, numel):
    for shares in ([1.0] * world_size, [float(rank) for rank in range(1, world_size + 1)], [*[1.0] * world_size, 0.0]):
        numels = share_out(numel, shares)
        assert len(numels) == len(shares)
        assert sum(numels) == numel
        starts = [sum(numels[:rank]) for rank in range(len(numels))]
        assert all(start % BLOCK_NUMEL == 0 for start, own in zip(starts, numels, strict=True) if own)
        total = sum(shares)
        assert all(
            abs(own - numel * share / total) <= 2 * BLOCK_NUMEL for own, share in zip(numels, shares, strict=True)
        )
        assert all(own == 0 for own, share in zip(numels, shares, strict=True) if share == 0)


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -1.0]])
def test_shares_that_mean_nothing_are_refused(shares):
    with pytest.raises(ValueError, match="cannot share 1000 elements"):
        share_out(1000, shares)


@pytest.mark.parametrize("item_nbytes", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk_nbytes", [2048, 64 << 10, 1 << 20])
def test_chunks_are_even_whole_blocks_and_never_longer_than_allowed(item_nbytes, chunk_nbytes):
    for numels in ([1_000_001, 0, 300], [7, 70_000, 256], [0, 0, 0]):
        plan = cut(numels, gather(3), item_nbytes=item_nbytes, chunk_nbytes=chunk_nbytes)
        assert plan.starts[0] == 0
        assert plan.longest == max(map(plan.numel_of, range(plan.slices.num_chunks)), default=0)
        assert [end - start for start, end in map(plan.slice_span, range(3))] == numels
        for slice_ in range(3):
            chunks = plan.slices.chunks_of(slice_)
            lengths = [plan.numel_of(chunk) for chunk in chunks]
            first = plan.slice_span(slice_)[0]
            assert all(0 < length * item_nbytes <= chunk_nbytes for length in lengths)
            assert all((plan.starts[chunk] - first) % BLOCK_NUMEL == 0 for chunk in chunks)
            assert not lengths or max(lengths) - min(lengths) < 2 * BLOCK_NUMEL


def test_a_slice_is_cut_into_several_chunks_that_can_overlap_but_not_into_crumbs():
    for numel in (1 << 20, 10 << 20):
        assert 2 <= cut([numel], gather(1), item_nbytes=4, chunk_nbytes=64 << 20).slices.num_chunks <= 16
    assert cut([1 << 14], gather(1), item_nbytes=4, chunk_nbytes=64 << 20).slices.num_chunks == 1


# ------------------------------------------------------------------------------------ terms


def named(numel=1000, **more):
    return terms_of(cut_evenly(numel, 3), numel=numel, members=MEMBERS, **(TERMS | more))


def test_equal_arguments_give_equal_terms_and_hashes():
    assert named() == named()
    assert named().hash32 == named().hash32
    assert named().first_difference(named()) is None


@pytest.mark.parametrize(
    ("more", "difference"),
    [
        ({"op": "sum"}, ("op", "mean", "sum")),
        ({"dtype": "int32"}, ("dtype", "float32", "int32")),
        ({"numel": 1001}, ("numel", 1000, 1001)),
        ({"codec": "int8"}, ("codec", "raw", "int8")),
        ({"chunk_nbytes": 2048}, ("chunk_nbytes", 1 << 20, 2048)),
        ({"plan_name": "ring"}, ("plan", "butterfly", "ring")),
        ({"op": "sum", "codec": "int8"}, ("op", "mean", "sum")),
    ],
)
def test_terms_name_the_first_field_that_differs(more, difference):
    assert named().first_difference(named(**more)) == difference
    assert named().hash32 != named(**more).hash32


def test_other_members_other_cuts_and_other_trees_are_other_terms():
    plan = cut_evenly(100_000, 3)
    ours = terms_of(plan, numel=NUMEL, members=MEMBERS, **TERMS)
    others = terms_of(plan, numel=NUMEL, members=MEMBERS[::-1], **TERMS)
    assert ours.first_difference(others)[0] == "members"
    finer = cut_evenly(100_000, 3, chunk_nbytes=2048)
    assert ours.first_difference(terms_of(finer, numel=NUMEL, members=MEMBERS, **TERMS))[0] == "slices"
    down = cut(share_out(100_000, [1.0] * 3), gather(3), item_nbytes=4, chunk_nbytes=1 << 20)
    assert down.starts == plan.starts
    assert ours.first_difference(terms_of(down, numel=NUMEL, members=MEMBERS, **TERMS))[0] == "slices"


def test_every_field_of_the_terms_is_compared():
    ours = named()
    for field in Terms.__struct_fields__:
        other = Terms(**{name: getattr(ours, name) for name in Terms.__struct_fields__} | {field: "else"})
        assert ours.first_difference(other)[0] == field
