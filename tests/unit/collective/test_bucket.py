# SPDX-License-Identifier: Apache-2.0
"""The token bucket: never more than its rate and burst, and nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective.core.bucket import TokenBucket

RATES = st.floats(min_value=0.01, max_value=1e10)
BURSTS = st.floats(min_value=1, max_value=1e8)
STEPS = st.lists(
    st.tuples(st.floats(min_value=0, max_value=10), st.integers(min_value=1, max_value=1 << 24)), max_size=60
)
STARTS = st.floats(min_value=0, max_value=1e7)


@given(rate=RATES, burst=BURSTS, steps=STEPS, start=STARTS)
def test_no_interval_carries_more_than_rate_and_burst(rate, burst, steps, start):
    bucket, now, taken = TokenBucket(rate, burst), start, []
    for idle_s, count in steps:
        now += idle_s
        now += bucket.delay_s(now, count)
        if bucket.delay_s(now, count) == 0:
            bucket.take(now, count)
            taken.append((now, count))
    for first in range(len(taken)):
        total = 0
        for at, count in taken[first:]:
            total += count
            allowed = rate * (at - taken[first][0] + 2e-6) + max(burst, max(n for _, n in taken[first:]))
            assert total <= allowed * (1 + 1e-9)


@given(rate=RATES, burst=BURSTS, steps=STEPS, start=STARTS)
def test_whoever_waits_as_long_as_told_gets_through(rate, burst, steps, start):
    bucket, now = TokenBucket(rate, burst), start
    for _, count in steps:
        waited = 0
        while (delay_s := bucket.delay_s(now, count)) > 0:
            now += delay_s
            waited += 1
            assert waited <= 3  # more than once only by the rounding of large clocks
        bucket.take(now, count)


@given(rate=RATES, burst=BURSTS, steps=STEPS)
def test_a_caller_that_never_rests_gets_the_whole_rate(rate, burst, steps):
    bucket, now, total = TokenBucket(rate, burst), 0.0, 0
    for _, count in steps:
        now += bucket.delay_s(now, count)
        bucket.take(now, count)
        total += count
    assert rate * now <= total + 1e-6 * rate * len(steps)  # nobody is held back for longer than what it took


def test_a_full_bucket_gives_its_burst_at_once_and_then_its_rate():
    bucket = TokenBucket(rate=100, burst=1000)
    assert (bucket.available(5.0), bucket.delay_s(5.0, 1000)) == (1000, 0)
    bucket.take(5.0, 1000)
    assert bucket.available(5.0) == 0
    assert bucket.delay_s(5.0, 1) == pytest.approx(0.01)
    assert bucket.available(7.0) == 200
    assert bucket.available(1e6) == 1000


def test_a_piece_larger_than_the_burst_goes_when_the_bucket_is_full_and_leaves_a_debt():
    bucket = TokenBucket(rate=10, burst=10)
    bucket.take(0.0, 5)
    assert bucket.delay_s(0.0, 100) == pytest.approx(0.5)
    bucket.take(0.5, 100)
    assert bucket.available(0.5) == 0
    assert bucket.delay_s(0.5) == pytest.approx(9.0)  # until there is no debt
    assert bucket.delay_s(0.5, 10) == pytest.approx(10.0)


def test_what_is_given_back_may_be_taken_again():
    bucket = TokenBucket(rate=1, burst=2)
    bucket.take(0.0, 2)
    assert bucket.delay_s(0.0, 1) > 0
    bucket.give_back(1)
    assert bucket.delay_s(0.0, 1) == 0
    bucket.give_back(50)
    assert bucket.available(0.0) == 2  # never more than full


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (float("inf"), 1), (float("nan"), 1), (1, 0), (1, 0.5)])
def test_a_rate_or_burst_that_makes_no_sense_is_refused(rate, burst):
    with pytest.raises(ValueError, match="must be a finite number"):
        TokenBucket(rate, burst)
