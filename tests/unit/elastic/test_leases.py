"""Ranges of samples and the ledger that says where each sample is (I7)."""

import random

import pytest

from elastic.core.leases import MAX_RANGES_PER_GRANT, LeaseLedger, count, merged, overlap, without
from elastic.core.messages import IndexRange
from tests.unit.elastic.machines import ref


def ranges(*bounds: tuple[int, int]) -> tuple[IndexRange, ...]:
    return tuple(IndexRange(start, stop) for start, stop in bounds)


def indices(items: tuple[IndexRange, ...]) -> set[int]:
    return {index for item in items for index in range(item.start, item.stop)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ()),
        (((3, 3),), ()),
        (((5, 7), (0, 2)), ((0, 2), (5, 7))),
        (((0, 2), (2, 4)), ((0, 4),)),
        (((0, 5), (1, 2), (4, 9)), ((0, 9),)),
    ],
)
def test_merged_ranges_are_sorted_disjoint_and_maximal(
    given: tuple[tuple[int, int], ...], expected: tuple[tuple[int, int], ...]
) -> None:
    assert merged(ranges(*given)) == ranges(*expected)


def test_range_algebra_agrees_with_sets_of_indices() -> None:
    rng = random.Random(1)
    for _ in range(300):
        left, right = (
            tuple(IndexRange(start, start + rng.randrange(6)) for start in rng.choices(range(30), k=rng.randrange(6)))
            for _ in range(2)
        )
        assert indices(merged(left)) == indices(left)
        assert indices(overlap(left, right)) == indices(left) & indices(right)
        assert indices(without(left, right)) == indices(left) - indices(right)
        assert count(merged(left)) == len(indices(left))


def test_freed_indices_are_given_before_new_ones() -> None:
    ledger = LeaseLedger(100, ranges((10, 13), (20, 22)))
    assert ledger.plan(4) == ranges((10, 13), (20, 21))
    assert ledger.plan(7) == ranges((10, 13), (20, 22), (100, 102))


def test_grant_has_a_bounded_number_of_ranges_and_may_be_smaller_for_it() -> None:
    scattered = ranges(*((index, index + 1) for index in range(0, 400, 2)))
    ledger = LeaseLedger(400, scattered)
    assert len(ledger.plan(1000)) == MAX_RANGES_PER_GRANT
    assert count(ledger.plan(1000)) == MAX_RANGES_PER_GRANT


def test_what_is_not_consumed_returns_when_its_owner_goes() -> None:
    ledger = LeaseLedger()
    ledger.grant(ref(1), 1, ranges((0, 10)))
    ledger.consume(ref(1), ranges((2, 5)))
    ledger.release(ref(1), ledger.owned_by(ref(1)))
    assert ledger.free == ranges((0, 2), (5, 10))
    assert ledger.owners() == ()
    ledger.check_invariants()


def test_index_never_has_two_owners() -> None:
    ledger = LeaseLedger()
    ledger.grant(ref(1), 1, ranges((0, 4)))
    with pytest.raises(AssertionError, match="two owners"):
        ledger.grant(ref(2), 1, ranges((3, 6)))


def test_index_is_consumed_by_its_owner_and_once() -> None:
    ledger = LeaseLedger()
    ledger.grant(ref(1), 1, ranges((0, 4)))
    ledger.consume(ref(1), ranges((0, 2)))
    for who, what in ((ref(1), ranges((1, 2))), (ref(2), ranges((2, 3)))):
        with pytest.raises(AssertionError, match="does not own"):
            ledger.consume(who, what)


def test_newest_serial_outlives_the_release_but_not_the_start_of_the_peer() -> None:
    ledger = LeaseLedger()
    ledger.grant(ref(1), 7, ranges((0, 4)))
    ledger.release(ref(1), ranges((0, 4)))
    assert ledger.newest_serial(ref(1)) == 7
    assert ledger.newest_grant(ref(1)) == ()
    assert ledger.newest_serial(ref(1, incarnation=2)) == -1


def test_position_counts_owned_and_free_indices_as_unconsumed() -> None:
    ledger = LeaseLedger(10, ranges((0, 2)))
    ledger.grant(ref(1), 1, ranges((10, 14)))
    ledger.consume(ref(1), ranges((10, 11)))
    position = ledger.position()
    assert (position.next_index, position.unconsumed) == (14, ranges((0, 2), (11, 14)))
