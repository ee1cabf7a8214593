# SPDX-License-Identifier: Apache-2.0
"""How long an open round may take, from how long such rounds took."""

import math

import pytest

from isthmus.collective import Incarnation, PeerId, PeerRef
from isthmus.collective.core.round_times import RoundTimes, SlowLimits, is_hopeless

A, B, C = (PeerRef(PeerId(f"{number:016x}"), Incarnation(1)) for number in range(3))
LIMITS = SlowLimits(floor_s=20.0, factor=10.0, hopeless=2.0)


def times_after(*seconds, members=(A, B), nbytes=1000):
    times = RoundTimes(LIMITS)
    for one in seconds:
        times.took(members, nbytes, one)
    return times


def test_nothing_is_known_of_members_that_have_made_no_round_together():
    assert RoundTimes(LIMITS).limit([A, B], 1000).own_s == math.inf
    assert times_after(5.0).limit([A, B, C], 1000).own_s == math.inf


def test_a_round_may_take_ten_times_what_is_usual_and_twenty_seconds_at_least():
    assert times_after(0.1).limit([A, B], 1000).own_s == 20.0
    assert times_after(5.0).limit([A, B], 1000).own_s == 50.0


def test_rounds_of_more_members_count_and_rounds_of_less_than_half_the_bytes_do_not():
    assert times_after(5.0, members=(A, B, C)).limit([A, B], 1000).own_s == 50.0
    assert times_after(5.0, nbytes=499).limit([A, B], 1000).own_s == math.inf
    assert times_after(5.0, nbytes=500).limit([A, B], 1000).own_s == 50.0


def test_one_slow_round_does_not_allow_a_second_one():
    assert times_after(5.0, 5.0, 5.0, 400.0).limit([A, B], 1000).own_s == 50.0


def test_a_member_that_was_too_slow_is_given_twice_as_long_each_time_and_less_again_when_it_needs_less():
    times = times_after(0.1)
    times.too_slow([B], 1000)
    times.too_slow([B], 1000)
    assert times.limit([A, B], 1000).own_s == 80.0
    times.took([A, B], 1000, 70.0)
    times.took([A, B], 1000, 0.1)
    assert times.limit([A, B], 1000).own_s == 40.0, "the round of 70 s needed its time"
    times.took([A, B], 1000, 0.1)
    assert times.limit([A, B], 1000).own_s == 20.0


def test_a_small_round_takes_no_doubling_back():
    times = times_after(0.1)
    times.too_slow([B], 1000)
    times.took([A, B], 100, 0.01)
    assert times.limit([A, B], 1000).own_s == 40.0
    assert times.limit([A, B], 1000).usual_s == 20.0, "what others may have who know of no doubling"


def test_the_members_that_are_remembered_have_a_bound():
    times = times_after(0.1)
    for number in range(10_000):
        times.too_slow([PeerRef(PeerId(f"{number:016x}"), Incarnation(2))], 1000)
    assert len(times._doublings) == 1024


def test_however_often_a_member_was_too_slow_it_is_given_eight_times_as_long_at_most():
    times = times_after(0.1)
    for _ in range(100):
        times.too_slow([B], 1000)
    assert times.limit([A, B], 1000).own_s == 160.0


@pytest.mark.parametrize(("moved", "expected"), [(0, True), (10, True), (20_000, False), (1_000_000, False)])
def test_what_would_take_hours_at_its_rate_is_hopeless(moved, expected):
    left = 1_000_000 - moved
    assert is_hopeless(LIMITS, moved=moved, left=left, seconds=20.0, deadline_s=1800.0) == expected


def test_who_owes_nothing_more_is_not_hopeless():
    assert not is_hopeless(LIMITS, moved=10, left=0, seconds=20.0, deadline_s=1800.0)
