# SPDX-License-Identifier: Apache-2.0
"""What a peer learns from its own transfers: rates, limits, whose turn it is. Bundles are mere counters."""

import asyncio
from dataclasses import replace

import pytest

from isthmus.collective.core.types import Incarnation, Member, PeerId
from isthmus.collective.links.measurements import LinkMeter

WINDOW_S = 0.25
PACE = 1e6
PACKET_NBYTES = 1448


class Path:
    """As much of a bundle as is looked at."""

    is_whole = True
    round_trip_s = real_round_trip_s = 0.02

    def __init__(self, rate=PACE, *, pace_now=PACE, is_waiting=True):
        self.rate, self.pace_now, self.is_waiting = rate, pace_now, is_waiting
        self.delivered, self.bytes_received = 0.0, 0
        self.num_raised = 0

    def bytes_delivered(self):
        return self.delivered

    def shortest_round_trip_s(self):
        return self.round_trip_s

    def pad_once(self):
        self.round_trip_s = self.real_round_trip_s

    def raise_pace(self):
        self.num_raised += 1


def members_of(world_size):
    return [Member(PeerId(f"{rank:016x}"), Incarnation(1), "") for rank in range(world_size)]


def meter_of(*paths):
    return LinkMeter({member.ref: path for member, path in zip(members_of(len(paths)), paths, strict=True)})


def raised_after(num_windows, *paths, meanwhile=lambda _window: None, window_s=WINDOW_S):
    """How often each path's pace was raised."""
    meter = meter_of(*paths)
    for window in range(num_windows + 1):  # the first look begins a window
        meanwhile(window)
        meter.sample(window * window_s)
        for path in paths:
            path.delivered += path.rate * window_s
    return [path.num_raised for path in paths]


@pytest.mark.parametrize(("num_windows", "num_raised"), [(2, 0), (3, 1), (5, 1), (6, 2)])
def test_paces_that_all_carry_what_they_may_for_three_windows_are_raised(num_windows, num_raised):
    assert raised_after(num_windows, Path(), Path(pace_now=10 * PACE, rate=10 * PACE)) == [num_raised] * 2


def test_the_path_whose_receiver_is_full_keeps_its_pace_while_the_others_are_raised():
    others = [Path(rate=2 * PACE, pace_now=2 * PACE) for _ in range(7)]
    assert raised_after(3, Path(rate=0.83 * PACE), *others) == [0] + [1] * 7


def test_windows_under_other_paces_do_not_count():
    path = Path()
    meter = meter_of(path)
    for window in range(6):
        if window == 2:
            meter.paced_anew()
        meter.sample(window * WINDOW_S)
        path.delivered += path.rate * WINDOW_S
    assert path.num_raised == 1  # after windows 2, 3, 4; the one from 0 to 1 is forgotten


def test_a_line_that_carries_less_than_all_paces_together_is_what_holds_us_back():
    assert raised_after(9, Path(), Path(rate=0.85 * PACE)) == [0, 0]


def test_one_that_for_a_moment_has_what_others_leave_raises_nothing():
    assert raised_after(9, Path(rate=1.1 * PACE), Path(rate=0.7 * PACE)) == [0, 0]


def test_who_merely_ends_last_is_held_back_by_its_share_of_the_work():
    assert raised_after(9, Path(), Path(is_waiting=False)) == [0, 0]


def test_who_has_no_pace_says_nothing_about_those_that_have_one():
    assert raised_after(3, Path(), Path(pace_now=None, rate=0.0, is_waiting=False)) == [1, 0]


def test_windows_count_only_in_a_row():
    path = Path()

    def pause(window):
        path.is_waiting = window % 3 != 0

    assert raised_after(12, path, meanwhile=pause) == [0]


def test_a_window_with_a_pause_in_it_shows_nothing():
    assert raised_after(9, Path(), window_s=1.0) == [0]


class Packets(Path):
    """What its pace lets through, as far as the line carries it, in whole packets: often none in a window."""

    def __init__(self, *, pace_now, line):
        super().__init__(pace_now=pace_now)
        self.line, self.allowed = line, 0.0

    def pass_time(self, seconds):
        self.allowed += min(self.pace_now, self.line) * seconds
        self.delivered = self.allowed // PACKET_NBYTES * PACKET_NBYTES

    def raise_pace(self):
        self.pace_now *= 1.5


@pytest.mark.parametrize("num_paths", [1, 3])
def test_paces_a_thousand_times_too_low_are_soon_what_the_line_carries(num_paths):
    """As after a survey that was taken while the line was full of something else."""
    paths = [Packets(pace_now=1e3, line=PACE) for _ in range(num_paths)]
    meter = meter_of(*paths)
    for window in range(60):
        meter.sample(window * WINDOW_S)
        for path in paths:
            path.pass_time(WINDOW_S)
    assert all(path.pace_now > PACE for path in paths)


def test_paces_of_a_line_that_is_as_slow_stay_near_it():
    path = Packets(pace_now=8e3, line=8e3)
    meter = meter_of(path)
    for window in range(200):
        meter.sample(window * WINDOW_S)
        path.pass_time(WINDOW_S)
    assert path.pace_now < 3 * path.line


US = Member(PeerId("f" * 16), Incarnation(1), "")


def seen_of(*windows, is_padding=False):
    """What is told after windows in which each path carried so many kilobytes, the same both ways; in kB/s."""
    paths = [Path() for _ in windows[0]]
    meter = meter_of(*paths)
    meter.sample(0.0)
    for number, moved in enumerate(windows, 1):
        for path, kilobytes in zip(paths, moved, strict=True):
            path.delivered += 1000 * kilobytes
            path.bytes_received += 1000 * kilobytes
        meter.sample(number * WINDOW_S, is_padding=is_padding)
    seen = meter.observation([*members_of(len(paths)), US])
    sent_to = tuple(rate / 1000 for rate in seen.sent_to)
    return replace(seen, sent=seen.sent / 1000, received=seen.received / 1000, sent_to=sent_to)


def test_a_rate_is_what_was_held_over_several_windows_not_the_burst_after_a_gap():
    windows = [(50, 50), (0, 0), (200, 200), (100, 100), (90, 90)]
    seen = seen_of(*windows)
    assert seen.sent == seen.received == pytest.approx((400 + 200 + 180) / (3 * WINDOW_S))
    padded = seen_of(*windows, is_padding=True)
    assert padded.sent == padded.received == pytest.approx((400 + 200) / (2 * WINDOW_S)), "steadier, and shorter"


def test_of_a_short_transfer_all_there_is_counts():
    assert seen_of((100,), (60,)).sent == pytest.approx(80 / WINDOW_S)
    assert seen_of((100,)).sent == pytest.approx(100 / WINDOW_S)


def test_what_padding_showed_long_ago_is_forgotten():
    path = Path()
    meter = meter_of(path)
    meter.sample(0.0)
    for window in range(1, 80):
        path.delivered += 1e6 if window < 10 else 1e5
        meter.sample(window * WINDOW_S, is_padding=window < 10)
    assert meter.observation([*members_of(1), US]).sent == pytest.approx(1e5 / WINDOW_S)


def test_padding_of_which_a_packet_or_two_arrived_says_nothing_of_the_line():
    """Acknowledgements wait behind what fills the line the other way."""
    seen = seen_of((0, 0), (1.448, 0), (0, 2.896), is_padding=True)
    assert (seen.sent, seen.received) == (0.0, 0.0)
    assert seen.sent_to == (0.0, 0.0, 0.0)
    assert seen_of((1.448, 0), (0, 2.896)).sent > 0.0, "of what was to be sent it counts"


def test_padding_of_many_paths_counts_together_since_they_share_the_line():
    seen = seen_of((2.896,) * 15, (2.896,) * 15, is_padding=True)
    assert seen.sent == pytest.approx(15 * 2.896 / WINDOW_S)


def test_what_is_received_while_only_some_send_is_no_limit():
    assert seen_of((100, 0, 0), (100, 2, 0), (0, 0, 100), (0, 100, 0)).received == 0.0
    assert seen_of((100, 90, 80), (100, 5, 80)).received == 0.0, "once may be a chance"
    assert seen_of((100, 90, 80), (100, 15, 80)).received == pytest.approx((270 + 195) / (2 * WINDOW_S))


def test_who_sees_nobody_has_seen_nothing():
    meter = meter_of()
    for instant in (0.0, 0.25, 0.5):
        meter.sample(instant)
    assert meter.observation([]).received == 0.0


def test_a_path_that_others_pushed_aside_under_padding_is_not_taken_for_slow():
    padded = seen_of((150, 100, 50), (150, 100, 50), is_padding=True)
    assert padded.sent_to == pytest.approx((600.0, 400.0, 400.0, 0.0))
    assert seen_of((150, 100, 50), (150, 100, 50)).sent_to == pytest.approx((600.0, 400.0, 200.0, 0.0))
    slow = seen_of((150, 120, 30), (150, 120, 30), is_padding=True)
    assert slow.sent_to == pytest.approx((600.0, 480.0, 120.0, 0.0))


class Turns(LinkMeter):
    """Tells when it would have sent padding."""

    began = 0.0

    async def probe(self, _members, _seconds):
        self.began = asyncio.get_running_loop().time()


async def order_of(world_size, *, stayers=()):
    """The ranks in the order in which they begin."""
    members = members_of(world_size)
    async with asyncio.TaskGroup() as tasks:
        meters = []
        for rank in range(world_size):
            others = [member for member in members if member is not members[rank]]
            meters.append(Turns({member.ref: Path() for member in others}))
            if rank in stayers:
                for window in range(3):
                    meters[rank].sample(window * WINDOW_S)
                    meters[rank]._bundles[others[-1].ref].delivered += 1
            tasks.create_task(meters[rank].look_ahead(others, rank, 0.01, connect_s=1.0))
    return sorted(range(world_size), key=lambda rank: meters[rank].began)


async def test_members_that_are_all_new_send_padding_one_after_another():
    assert await order_of(4) == [0, 1, 2, 3]


async def test_those_who_know_a_way_begin_and_the_newcomer_follows():
    order = await order_of(3, stayers=(1, 2))
    assert order[-1] == 0


async def test_paths_that_a_frame_shows_to_be_short_are_not_waited_for():
    path = Path()
    path.real_round_trip_s = 1e-4
    meter = Turns(dict.fromkeys([members_of(1)[0].ref], path))
    async with asyncio.timeout(5.0):
        await meter.look_ahead(members_of(1), 3, 600.0, connect_s=1.0)
    assert meter.began == 0.0
