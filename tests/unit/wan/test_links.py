# SPDX-License-Identifier: Apache-2.0
"""What a path and a port do: chances in the long run, times to the last digit."""

import itertools
from random import Random

import pytest

from scripts.wanlink.links import NEVER, QUEUE_MIN_NBYTES, Bursts, Link, Port, Queue, Rare, gap
from scripts.wanlink.scenario import LinkSettings, PortSettings

SEGMENTS = 400_000


@pytest.mark.parametrize("probability", [0.0005, 0.01, 0.3])
def test_rare_events_come_as_often_as_set(probability: float) -> None:
    rare, expected = Rare(probability, Random(5)), SEGMENTS * probability
    hits = sum(len(rare.hits(40)) for _ in range(SEGMENTS // 40))
    assert hits == pytest.approx(expected, abs=4 * (expected * (1 - probability)) ** 0.5)


def test_rare_events_do_not_depend_on_how_segments_are_counted() -> None:
    one_by_one, in_runs = Rare(0.1, Random(5)), Rare(0.1, Random(5))
    single = [i for i in range(6000) if one_by_one.hits(1)]
    together = [i * 60 + hit for i in range(100) for hit in in_runs.hits(60)]
    assert single == together
    assert len(single) > 400


def test_what_never_happens_never_happens_and_what_is_certain_always_does() -> None:
    assert gap(0.0, Random(1)) == NEVER
    assert Rare(0.0, Random(1)).hits(10**9) == ()
    assert list(Rare(1.0, Random(1)).hits(5)) == [0, 1, 2, 3, 4]


def test_bursts_reach_gilberts_loss_and_length() -> None:
    bursts = Bursts(enter=0.01, leave=0.2, loss=1.0, rng=Random(7))
    lost = [i * 25 + hit for i in range(SEGMENTS // 25) for hit in bursts.hits(25)]
    assert len(lost) / SEGMENTS == pytest.approx(0.01 / 0.21, rel=0.05)
    begins = 1 + sum(b - a > 1 for a, b in itertools.pairwise(lost))
    assert len(lost) / begins == pytest.approx(1 / 0.2, rel=0.05)


def test_bursts_with_elliotts_partial_loss() -> None:
    bursts = Bursts(enter=0.02, leave=0.1, loss=0.25, rng=Random(7))
    lost = sum(len(bursts.hits(10)) for _ in range(SEGMENTS // 10))
    assert lost / SEGMENTS == pytest.approx(0.25 * 0.02 / 0.12, rel=0.07)


def test_bursts_do_not_depend_on_how_segments_are_counted() -> None:
    one_by_one, in_runs = Bursts(0.05, 0.3, 1.0, Random(2)), Bursts(0.05, 0.3, 1.0, Random(2))
    single = [i for i in range(4200) if one_by_one.hits(1)]
    together = [i * 42 + hit for i in range(100) for hit in in_runs.hits(42)]
    assert single == together
    assert len(single) > 400


def test_path_adds_independent_and_bursty_losses_and_counts_them() -> None:
    link = Link(Random(3))
    link.set(LinkSettings(loss_percent=2, burst_enter_percent=1, burst_leave_percent=50))
    lost = sum(len(link.lose(20)) for _ in range(SEGMENTS // 20))
    together = 1 - (1 - 0.02) * (1 - 0.01 / 0.51)
    assert lost / SEGMENTS == pytest.approx(together, rel=0.05)
    assert (link.segments, link.lost) == (SEGMENTS, lost)


def test_delay_is_exact_without_jitter() -> None:
    link = Link(Random(3))
    link.set(LinkSettings(delay_ms=25))
    assert link.arrival(2.0) == 2.025


def test_jitter_stays_within_its_bounds_and_lets_nothing_overtake() -> None:
    link = Link(Random(3))
    link.set(LinkSettings(delay_ms=20, jitter_ms=5))
    far_apart = [link.arrival(float(i)) - i for i in range(2000)]
    assert 0.015 <= min(far_apart) < 0.0155
    assert 0.0245 < max(far_apart) <= 0.025 + 1e-9
    close = [link.arrival(5000 + i * 1e-4) for i in range(2000)]
    assert close == sorted(close)


def test_reordered_segments_are_late_and_others_pass_them() -> None:
    link = Link(Random(3))
    link.set(LinkSettings(delay_ms=20, reorder_percent=10))
    late = [seconds for seconds in (link.holds_back(1) for _ in range(1000)) if seconds]
    assert set(late) == {0.005}
    assert len(late) == link.reordered == pytest.approx(100, abs=35)


def test_accidents_hit_the_same_segments_whether_or_not_those_between_them_are_passed_over() -> None:
    settings = LinkSettings(loss_percent=1, burst_enter_percent=0.2, burst_leave_percent=30, reorder_percent=1)
    one_by_one, passed_over = Link(Random(4)), Link(Random(4))
    for link in (one_by_one, passed_over):
        link.set(settings)
    expected = [(len(one_by_one.lose(3)), one_by_one.holds_back(3)) for _ in range(4000)]
    found = [
        (0, 0.0) if passed_over.passes(3) else (len(passed_over.lose(3)), passed_over.holds_back(3))
        for _ in range(4000)
    ]
    assert found == expected
    assert passed_over.lost == one_by_one.lost > 100
    assert passed_over.segments == one_by_one.segments
    assert passed_over.reordered == one_by_one.reordered > 50


def test_most_segments_are_passed_over() -> None:
    link = Link(Random(5))
    link.set(LinkSettings(loss_percent=0.1))
    assert sum(link.passes(5) or bool(link.lose(5)) for _ in range(2000)) == 2000
    assert 0 < link.lost < 30


def test_change_of_settings_leaves_the_cut_and_the_counters() -> None:
    link = Link(Random(3))
    link.is_cut = True
    link.lose(10)
    link.set(LinkSettings(delay_ms=1))
    assert link.is_cut
    assert link.segments == 10


def test_queue_sends_at_its_rate() -> None:
    queue = Queue()
    queue.set(8.0, 1000, now=0.0)  # 1 MB/s
    assert queue.departure(0.0, 1500, 1) == pytest.approx(0.0015)
    assert queue.departure(0.0, 1500, 1) == pytest.approx(0.0030)
    assert queue.departure(1.0, 500, 1) == pytest.approx(1.0005)


def test_queue_drops_what_does_not_fit_and_counts_segments() -> None:
    queue = Queue()
    queue.set(8.0, 10, now=0.0)  # 1 MB/s, room for 10 000 bytes
    sent = [queue.departure(0.0, 3000, 2) for _ in range(5)]
    assert [when is None for when in sent] == [False, False, False, True, True]
    assert queue.dropped == 4
    assert queue.departure(0.003, 3000, 2) == pytest.approx(0.012)


def test_queue_without_a_rate_neither_waits_nor_drops() -> None:
    queue = Queue()
    assert [queue.departure(1.0, 10**9, 1) for _ in range(3)] == [1.0] * 3


def test_shortest_queue_still_passes_segments() -> None:
    queue = Queue()
    queue.set(0.01, 0, now=0.0)
    assert queue.limit_nbytes == QUEUE_MIN_NBYTES
    assert queue.departure(0.0, 1514, 1) is not None


def test_what_waits_is_sent_at_the_new_rate() -> None:
    queue = Queue()
    queue.set(8.0, 1000, now=0.0)
    queue.departure(0.0, 100_000, 1)  # until 0.1
    queue.set(80.0, 1000, now=0.05)  # 50 000 bytes are left, at 10 MB/s
    assert queue.departure(0.05, 10_000, 1) == pytest.approx(0.056)
    queue.set(0.0, 1000, now=0.05)
    assert queue.departure(0.05, 10_000, 1) == 0.05


def test_port_has_two_queues_of_the_same_time() -> None:
    port = Port()
    port.set(PortSettings(up_mbit=8, down_mbit=80, queue_ms=50), now=0.0)
    assert (port.up.limit_nbytes, port.down.limit_nbytes) == (50_000, 500_000)
