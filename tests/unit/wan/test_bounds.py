# SPDX-License-Identifier: Apache-2.0
"""The best possible time of a butterfly all-reduce, against values worked out by hand."""

import pytest

from scripts.wanlink.bounds import LowerBound, lower_bound


def bound(nbytes: float, rates: list[float], **others: float) -> LowerBound:
    return lower_bound(nbytes, rates, rates, **others)


def test_two_peers_send_the_tensor_once_however_it_is_sliced() -> None:
    # out = S · ((1 − s) + s) = S for every s; the slower peer decides: 1000 / 50 = 20.
    assert bound(1000, [100, 50]).seconds == pytest.approx(20)


def test_equal_peers_take_equal_slices() -> None:
    # N = 4, s = 1/4: out = S · (3/4 + 3/4) = 1.5 S; at 100 bytes/s and S = 1000: 15 s.
    found = bound(1000, [100] * 4)
    assert found.seconds == pytest.approx(15)
    assert found.shares == pytest.approx((0.25,) * 4)


def test_faster_peers_take_more_until_all_end_together() -> None:
    # N = 3: out_i = S (1 + s_i). All end together if 1 + s_i = T r_i / S, so 4 = T · Σ r / S: with S = 1000 and
    # rates 100, 100, 120 that is T = 4000 / 320 = 12.5, s = (0.25, 0.25, 0.5).
    found = bound(1000, [100, 100, 120])
    assert found.seconds == pytest.approx(12.5)
    assert found.shares == pytest.approx((0.25, 0.25, 0.5))


def test_peer_too_slow_for_a_slice_gets_none_and_its_own_contribution_decides() -> None:
    # S / 10 = 100 s for its own contribution; the others could do all the rest in 4 · 1000 / 200 = 20 s or less.
    found = bound(1000, [100, 100, 10])
    assert found.seconds == pytest.approx(100)
    assert found.shares[2] == pytest.approx(0, abs=1e-9)


def test_one_peer_can_have_at_most_the_whole_tensor() -> None:
    # N = 4, rates 1000 and three of 10: the slow ones take S / 10 = 100 s with no slice at all; the fast one would
    # take the whole tensor, out = 3 S, in 3 s.
    found = bound(1000, [1000, 10, 10, 10])
    assert found.seconds == pytest.approx(100)
    assert found.shares[0] == pytest.approx(1, abs=1e-6)


def test_narrower_direction_counts() -> None:
    assert lower_bound(1000, [100, 100], [100, 40]).seconds == pytest.approx(25)
    assert lower_bound(1000, [100, 40], [100, 100]).seconds == pytest.approx(25)


def test_two_trips_are_added() -> None:
    assert bound(1000, [100, 100], one_way_s=0.075).seconds == pytest.approx(10.15)


@pytest.mark.parametrize("rates", [[70.0, 100, 130, 210, 90], [5, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8], [3, 1000, 1000]])
def test_shares_sum_to_one_keep_the_time_and_no_other_shares_beat_it(rates: list[float]) -> None:
    found = bound(1000, rates)
    peers = len(rates)

    def seconds(shares: tuple[float, ...]) -> float:
        return max(1000 * (1 + (peers - 2) * share) / rate for share, rate in zip(shares, rates, strict=True))

    assert sum(found.shares) == pytest.approx(1)
    assert seconds(found.shares) == pytest.approx(found.seconds)
    for giver in range(peers):
        for taker in range(peers):
            moved = min(0.01, found.shares[giver])
            other = tuple(s - moved * (i == giver) + moved * (i == taker) for i, s in enumerate(found.shares))
            assert seconds(other) >= found.seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("nbytes", "up", "down", "one_way_s"),
    [
        (0, [1, 1], [1, 1], 0),
        (1, [1], [1], 0),
        (1, [1, 1], [1], 0),
        (1, [1, 0], [1, 1], 0),
        (1, [1, 1], [1, -1], 0),
        (1, [1, 1], [1, 1], -1),
    ],
)
def test_impossible_arguments_are_refused(nbytes: float, up: list[float], down: list[float], one_way_s: float) -> None:
    with pytest.raises(ValueError, match=r"give an up|must be above"):
        lower_bound(nbytes, up, down, one_way_s=one_way_s)
