# SPDX-License-Identifier: Apache-2.0
"""Who stands still?"""

import pytest

from isthmus.collective.core.progress import ProgressWatch, StallLimits

LIMITS = StallLimits(floor_s=4.0, chunk_times=8.0, ceiling_s=30.0)


def watching(now=0.0, **more):
    watch = ProgressWatch(LIMITS, now=now)
    see(watch, now, **more)
    return watch


def see(watch, now, *, heard=10, moved=10, host_silent_s=0.0, chunk_s=0.1, owes_now=True):
    watch.observe(
        heard=heard, moved=moved, host_silent_s=host_silent_s, chunk_s=chunk_s, owes_now=owes_now, now=float(now)
    )


def test_silence_longer_than_the_floor_is_a_stall():
    watch = watching(now=1.0, owes_now=False)
    assert not watch.is_stalled(4.9, owes=True)
    assert watch.is_stalled(5.1, owes=True)


@pytest.mark.parametrize("owes_now", [False, True])
def test_every_byte_of_the_round_starts_both_clocks_again(owes_now):
    watch = watching(owes_now=owes_now)
    for second in range(1, 20):
        assert not watch.is_stalled(second + 2.9, owes=True)
        see(watch, second, heard=10 + second, moved=10 + second, owes_now=owes_now)


def test_a_member_that_may_wait_for_a_third_one_is_judged_by_its_signs_of_life():
    watch = watching(owes_now=False)
    for second in range(1, 20):
        see(watch, second, heard=10 + second, moved=10, owes_now=False)
    assert not watch.is_stalled(22.9, owes=True)
    assert watch.is_stalled(23.1, owes=True)


def test_time_in_which_nothing_was_owed_is_not_held_against_who_owes_from_now_on():
    """Two of four have exchanged what they could and wait for a third: then each has a result for the other."""
    watch = watching(owes_now=False)
    for second in range(1, 10):
        see(watch, second, heard=10 + second, moved=10, owes_now=False)
    see(watch, 10.0, heard=20, moved=10)
    assert not watch.is_stalled(10.0, owes=True)
    for second in range(11, 14):
        see(watch, second, heard=10 + second, moved=10)
    assert not watch.is_stalled(13.9, owes=True)
    assert watch.is_stalled(14.1, owes=True)


def test_signs_of_life_do_not_excuse_a_member_between_whom_and_us_bytes_must_move():
    watch = watching()
    for second in range(1, 4):
        see(watch, second, heard=10 + second, moved=10)
    assert not watch.is_stalled(3.9, owes=True)
    assert watch.is_stalled(4.1, owes=True)


def test_whoever_takes_what_we_send_moves_though_nothing_is_heard_from_it_but_silence_counts_all_the_same():
    watch = watching()
    for second in range(1, 4):
        see(watch, second, heard=10, moved=10 + second)
    assert not watch.is_stalled(3.9, owes=True)
    assert watch.is_stalled(4.1, owes=True)


def test_our_own_signs_of_life_are_no_movement_while_they_are_acknowledged():
    """A sign is taken off the count when it is sent, and is back in it with its acknowledgement."""
    watch = watching(moved=1000)
    for half_second in range(1, 9):
        moved = 1000 - 48 * (half_second % 2)
        see(watch, half_second / 2, heard=10 + half_second, moved=moved)
    assert watch.is_stalled(4.1, owes=True)


def test_whoever_owes_nothing_is_never_stalled():
    assert not ProgressWatch(LIMITS, now=0.0).is_stalled(1e9, owes=False)
    assert not watching().is_stalled(1e9, owes=False)


def test_time_in_which_we_did_not_run_ourselves_is_forgiven():
    watch = watching()
    watch.forgive(10.0)
    assert not watch.is_stalled(13.9, owes=True)
    assert watch.is_stalled(14.1, owes=True)


def test_a_host_that_acknowledges_nothing_is_cut_off_whether_its_process_computes_or_not():
    watch = watching(owes_now=False)
    see(watch, 6, host_silent_s=3.9, owes_now=False)
    assert not watch.is_cut_off(6.0)
    see(watch, 7, host_silent_s=4.9, owes_now=False)
    assert watch.is_cut_off(7.0)
    see(watch, 8, host_silent_s=0.1, owes_now=False)
    assert not watch.is_cut_off(8.0)


def test_a_host_that_was_not_asked_before_the_round_has_not_been_silent():
    """The last acknowledgement is as old as what was sent last, and between rounds nothing is."""
    watch = watching(now=60.0, host_silent_s=60.0)
    see(watch, 63, host_silent_s=63.0)
    assert not watch.is_cut_off(63.9)
    assert watch.is_cut_off(64.1)


def test_who_is_heard_is_not_cut_off_though_its_host_acknowledges_nothing():
    """A host acknowledges what comes; who sends only sends no answer."""
    watch = watching(host_silent_s=60.0)
    see(watch, 3, heard=11, host_silent_s=63.0)
    assert not watch.is_cut_off(6.9)


def test_time_in_which_we_did_not_run_does_not_cut_off_a_host():
    watch = watching()
    watch.forgive(10.0)
    see(watch, 10, host_silent_s=10.0)
    assert not watch.is_cut_off(13.9)


def test_bytes_that_were_lost_with_a_connection_are_no_sign_of_life():
    """They had come, and nobody had read them when the connection broke."""
    watch = watching(heard=100, owes_now=False)
    see(watch, 3, heard=90, owes_now=False)
    assert watch.is_stalled(4.1, owes=True)
    see(watch, 4, heard=91, owes_now=False)
    assert not watch.is_stalled(4.1, owes=True)


def test_a_slow_link_gets_longer_up_to_the_ceiling():
    watch = watching(chunk_s=1.0)
    assert watch.limit_s == 8.0
    see(watch, 0.0, heard=11, moved=11, chunk_s=100.0)
    assert watch.limit_s == 30.0


@pytest.mark.parametrize(
    "limits", [{"floor_s": 0.0}, {"floor_s": 5.0, "ceiling_s": 4.0}, {"chunk_times": -1.0}, {"ceiling_s": 0.0}]
)
def test_limits_that_mean_nothing_are_refused(limits):
    with pytest.raises(ValueError, match="must be positive"):
        StallLimits(**limits)
