"""What a peer learns from its own transfers: when paces are all that holds it back. Bundles are mere counters."""

import pytest

from collective.core.types import Incarnation, PeerId, PeerRef
from collective.links import LinkMeter

WINDOW_S = 0.25
PACE = 1000.0


class Path:
    """As much of a bundle as is looked at."""

    def __init__(self, rate=PACE, *, pace_now=PACE, is_waiting=True):
        self.rate, self.pace_now, self.is_waiting = rate, pace_now, is_waiting
        self.delivered, self.bytes_received = 0.0, 0
        self.num_raised = 0

    def bytes_delivered(self):
        return self.delivered

    def raise_pace(self):
        self.num_raised += 1


def raised_after(num_windows, *paths, meanwhile=lambda _window: None, window_s=WINDOW_S):
    """How often each path's pace was raised."""
    meter = LinkMeter({PeerRef(PeerId(f"{n:016x}"), Incarnation(1)): path for n, path in enumerate(paths)})
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
    meter = LinkMeter({PeerRef(PeerId("0" * 16), Incarnation(1)): path})
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
