"""Who reduces which part."""

import pytest

from collective.plan import Terms, plan_mean


def test_fewer_blocks_than_members_leaves_empty_slices():
    plan = plan_mean(5, [1.0, 1.0, 1.0], 1024)
    assert plan.slices.num_chunks == 1
    assert sum(len(plan.slices.chunks_of(rank)) == 0 for rank in range(3)) == 2
    assert plan.span(0) == slice(0, 5)


def test_shares_decide_how_much_a_member_reduces():
    plan = plan_mean(256 * 100, [3.0, 1.0, 0.0], 256 * 10)
    numels = [sum(plan.numel_of(chunk) for chunk in plan.slices.chunks_of(rank)) for rank in range(3)]
    assert numels == [256 * 75, 256 * 25, 0]


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -1.0]])
def test_shares_that_mean_nothing_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        plan_mean(1000, shares, 256)


def test_terms_name_the_first_field_that_differs():
    base = {"op": "mean", "dtype": "float32", "numel": 8, "codec": "raw", "chunk_numel": 256}
    ours = Terms(**base, members="m", slices="s")
    assert ours.first_difference(ours) is None
    assert ours.first_difference(Terms(**(base | {"codec": "int8"}), members="m", slices="t")) == (
        "codec",
        "raw",
        "int8",
    )
