# SPDX-License-Identifier: Apache-2.0
"""How often strangers may knock, and that nobody who belongs here ever meets that limit."""

from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective.transport.accept_limit import (
    NO_PLACE_FOR_ADDRESS,
    NO_PLACE_FOR_STRANGERS,
    TOO_MANY_FROM_ADDRESS,
    TOO_MANY_STRANGERS,
    AcceptLimiter,
    AcceptLimits,
)

HOST = "203.0.113.7"


def attempts(limiter, host, count, now=0.0):
    """How many of so many attempts may go on."""
    return sum(limiter.attempt(host, now).refusal is None for _ in range(count))


def test_an_address_may_knock_64_times_at_once_and_then_5_times_a_second():
    limiter = AcceptLimiter()
    assert attempts(limiter, HOST, 1000) == 64
    assert limiter.attempt(HOST, 0.0).refusal == TOO_MANY_FROM_ADDRESS
    assert attempts(limiter, HOST, 1000, now=2.0) == 10


def test_another_address_is_not_made_to_pay_for_it():
    limiter = AcceptLimiter()
    attempts(limiter, HOST, 1000)
    assert attempts(limiter, "203.0.113.8", 60) == 60


def test_16_peers_behind_one_address_with_64_streams_each_never_meet_the_limit():
    limiter = AcceptLimiter()
    for second in range(20):  # as if all links broke every second
        for _ in range(16):
            open_at_once = [limiter.attempt(HOST, float(second)) for _ in range(64)]
            assert {attempt.refusal for attempt in open_at_once} == {None}
            for attempt in open_at_once:
                attempt.forgive()


def test_a_hello_gives_its_token_back_once():
    limiter = AcceptLimiter(AcceptLimits(address_burst=2, address_rate=0.001))
    first = limiter.attempt(HOST, 0.0)
    assert attempts(limiter, HOST, 5) == 1
    first.forgive()
    first.forgive()
    assert attempts(limiter, HOST, 5) == 1


def test_strangers_from_many_addresses_share_one_limit_that_members_do_not_need():
    limiter = AcceptLimiter()
    limiter.attempt(HOST, 0.0).forgive()
    assert sum(attempts(limiter, f"198.51.{i}.{j}", 1) for i in range(10) for j in range(250)) == 256
    assert limiter.attempt("198.51.99.99", 0.0).refusal == TOO_MANY_STRANGERS
    assert attempts(limiter, HOST, 10) == 10
    assert sum(attempts(limiter, f"198.51.99.{j}", 1, now=1.0) for j in range(250)) == 50


def test_a_household_of_ipv6_counts_as_one_address_and_so_does_a_mapped_one():
    limiter = AcceptLimiter(AcceptLimits(address_burst=1))
    assert attempts(limiter, "2001:db8:1:2::1", 1) == 1
    assert attempts(limiter, "2001:db8:1:2:ffff::9", 1) == 0
    assert attempts(limiter, "2001:db8:1:3::1", 1) == 1
    assert attempts(limiter, "fe80::1%eth0", 1) == 1
    assert attempts(limiter, HOST, 1) == 1
    assert attempts(limiter, f"::ffff:{HOST}", 1) == 0


def test_this_machine_may_knock_more_often_unless_told_otherwise():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        limiter = AcceptLimiter()
        assert attempts(limiter, host, 2100) == 2048
        assert attempts(limiter, host, 250, now=1.0) == 200
    assert attempts(AcceptLimiter(AcceptLimits(favours_loopback=False)), "127.0.0.1", 250) == 64


def hold(limiter, hosts, num_places=128):
    """Who of these gets a place, as attempts that go on holding it."""
    waiting = []
    for host in hosts:
        attempt = limiter.attempt(host, 0.0, waiting=waiting, num_places=num_places)
        if attempt.refusal is None:
            waiting.append(attempt)
    return waiting


def test_one_address_gets_an_eighth_of_the_places_and_half_once_it_has_shown_a_hello():
    limiter = AcceptLimiter()
    waiting = hold(limiter, [HOST] * 100)
    assert len(waiting) == 16
    assert limiter.attempt(HOST, 0.0, waiting=waiting, num_places=128).refusal == NO_PLACE_FOR_ADDRESS
    assert limiter.attempt("203.0.113.8", 0.0, waiting=waiting, num_places=128).refusal is None
    assert len(hold(AcceptLimiter(), [f"2001:db8:1:2::{number}" for number in range(100)])) == 16
    limiter = AcceptLimiter()
    limiter.attempt(HOST, 0.0).forgive()
    assert len(hold(limiter, [HOST] * 100)) == 64


def test_strangers_from_many_addresses_leave_half_of_the_places_to_members():
    limiter = AcceptLimiter()
    limiter.attempt(HOST, 0.0).forgive()
    strangers = [f"198.51.{i}.{j}" for i in range(10) for j in range(20)]
    waiting = hold(limiter, strangers)
    assert len(waiting) == 64
    assert limiter.attempt("192.0.2.1", 0.0, waiting=waiting, num_places=128).refusal == NO_PLACE_FOR_STRANGERS
    assert limiter.attempt(HOST, 0.0, waiting=waiting, num_places=128).refusal is None


def test_the_table_of_addresses_is_bounded_and_keeps_those_seen_last():
    limiter = AcceptLimiter(AcceptLimits(max_addresses=10, address_burst=1, strangers_burst=10_000))
    attempts(limiter, HOST, 1)
    for number in range(1000):
        attempts(limiter, f"198.51.{number // 250}.{number % 250}", 1)
        assert attempts(limiter, HOST, 1) == 0  # still remembered, for it is still knocking
    assert limiter.num_addresses == 10


def test_a_flood_from_more_addresses_than_are_remembered_makes_no_stranger_of_a_member():
    limiter = AcceptLimiter()
    limiter.attempt(HOST, 0.0).forgive()
    for number in range(5000):  # each its own household
        limiter.attempt(f"2001:db8:1:{number:x}::1", 1.0)
    assert limiter.attempt("198.51.99.99", 1.0).refusal == TOO_MANY_STRANGERS
    assert limiter.attempt(HOST, 1.0).refusal is None
    assert limiter.num_addresses == AcceptLimits().max_addresses


def test_where_all_addresses_are_known_the_one_not_seen_for_longest_is_forgotten():
    limiter = AcceptLimiter(AcceptLimits(max_addresses=3, strangers_burst=4))
    for number in range(4):
        limiter.attempt(f"198.51.100.{number}", 0.0).forgive()
    attempts(limiter, "198.51.101.1", 64)  # the strangers' bucket is empty; the second one is forgotten for it
    assert [limiter.attempt(f"198.51.100.{number}", 0.0).refusal for number in (2, 3)] == [None, None]
    assert limiter.attempt("198.51.100.1", 0.0).refusal == TOO_MANY_STRANGERS


@given(
    st.lists(
        st.tuples(st.floats(min_value=0, max_value=3), st.integers(0, 3), st.integers(1, 100), st.booleans()),
        max_size=40,
    )
)
def test_failed_attempts_stay_within_rate_and_burst_whatever_the_others_do(steps):
    limits = AcceptLimits()
    limiter, now = AcceptLimiter(limits), 0.0
    failed = dict.fromkeys(range(4), 0)
    for idle_s, address, count, is_honest in steps:
        now += idle_s
        for _ in range(count):
            attempt = limiter.attempt(f"203.0.113.{address}", now)
            if attempt.refusal is None:
                if is_honest:
                    attempt.forgive()
                else:
                    failed[address] += 1
    for count in failed.values():
        assert count <= limits.address_burst + limits.address_rate * now + 1e-3
