# SPDX-License-Identifier: Apache-2.0
"""Ranges of samples and the ledger that says where each sample is (I7)."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.elastic.core.leases import (
    MAX_NEW_PIECES_PER_VOTE,
    MAX_PIECES,
    MAX_RANGES_PER_GRANT,
    LeaseLedger,
    count,
    merged,
    overlap,
    without,
)
from isthmus.elastic.core.messages import DataPosition, IndexRange
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


def commit(ledger: LeaseLedger, votes: dict[int, tuple[IndexRange, ...]]) -> None:
    claims = [ledger.clip(ref(number), vote) for number, vote in votes.items()]
    for number, consumed in zip(votes, ledger.bounded(claims), strict=True):
        ledger.consume(ref(number), consumed)
    ledger.check_invariants()


def assert_fits_a_certificate(ledger: LeaseLedger) -> None:
    position = ledger.position()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(position), type=DataPosition) == position


def test_votes_with_a_thousand_holes_leave_a_position_that_decodes() -> None:
    ledger = LeaseLedger()
    for turn in range(10):
        for number in range(16):
            ledger.grant(ref(number), turn, ledger.plan(2048))
        holes = {
            number: tuple(IndexRange(i, i + 1) for item in ledger.owned_by(ref(number)) for i in item_middles(item))
            for number in range(16)
        }
        commit(ledger, {number: vote[-1024:] for number, vote in holes.items()})
        assert_fits_a_certificate(ledger)
    assert len(ledger.position().unconsumed) > MAX_PIECES // 2  # the bound was reached for, and held


def item_middles(item: IndexRange) -> range:
    return range(item.start + 1, item.stop - 1, 2)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(MAX_PIECES - 40, MAX_PIECES + 1))
def test_no_votes_grants_and_departures_outgrow_a_certificate(seed: int, num_members: int, num_pieces: int) -> None:
    chance = random.Random(seed)
    ledger = LeaseLedger(2 * num_pieces + 1, [IndexRange(2 * i, 2 * i + 1) for i in range(num_pieces)])
    for turn in range(3):
        for number in range(num_members):
            ledger.grant(ref(number), turn, ledger.plan(chance.choice((1, 3, 70, 400))))
        votes = {}
        for number in range(num_members):
            step = chance.choice((1, 2, 3))
            owned = [i for item in ledger.owned_by(ref(number)) for i in range(item.start, item.stop)]
            votes[number] = merged(IndexRange(i, i + 1) for i in owned[chance.randrange(2) :: step])
        commit(ledger, votes)
        assert_fits_a_certificate(ledger)
        if chance.random() < 0.3:
            gone = ref(chance.randrange(num_members))
            ledger.release(gone, ledger.owned_by(gone))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_peers_that_train_through_their_grants_in_order_lose_nothing(seed: int) -> None:
    """As the sample feed does: grant after grant, each from its front; a late vote reports two rounds at once."""
    chance = random.Random(seed)
    ledger, stocks, used = LeaseLedger(), dict[int, list[int]](), dict[int, list[int]]()
    for turn in range(30):
        for number in range(6):
            planned = ledger.plan(chance.choice((8, 64, 200)))
            ledger.grant(ref(number), turn, planned)
            stocks.setdefault(number, []).extend(i for item in planned for i in range(item.start, item.stop))
            num_taken = chance.randrange(len(stocks[number]))
            used.setdefault(number, []).extend(stocks[number][:num_taken])
            del stocks[number][:num_taken]
        for number in (number for number in range(6) if chance.random() < 0.8):  # the others are excused
            claim = ledger.clip(ref(number), merged(IndexRange(i, i + 1) for i in used.pop(number, [])))
            assert len(claim) <= MAX_NEW_PIECES_PER_VOTE
            assert ledger.bounded([claim]) == [claim]
            ledger.consume(ref(number), claim)
        if chance.random() < 0.3:
            gone = chance.randrange(6)
            ledger.release(ref(gone), ledger.owned_by(ref(gone)))
            stocks.pop(gone, None)
            used.pop(gone, None)
