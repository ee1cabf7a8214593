"""Who stands still?"""

import pytest

from collective.core.progress import ProgressWatch, StallLimits

LIMITS = StallLimits(floor_s=4.0, chunk_times=8.0, ceiling_s=30.0)


def watching(now=0.0, heard=10, moved=10, chunk_s=0.1, owes_now=True):
    watch = ProgressWatch(LIMITS, now=now)
    watch.observe(heard=heard, moved=moved, chunk_s=chunk_s, owes_now=owes_now, now=now)
    return watch


def test_silence_longer_than_the_floor_is_a_stall():
    watch = watching(now=1.0, owes_now=False)
    assert not watch.is_stalled(4.9, owes=True)
    assert watch.is_stalled(5.1, owes=True)


@pytest.mark.parametrize("owes_now", [False, True])
def test_every_byte_of_the_round_starts_both_clocks_again(owes_now):
    watch = watching(owes_now=owes_now)
    for second in range(1, 20):
        assert not watch.is_stalled(second + 2.9, owes=True)
        watch.observe(heard=10 + second, moved=10 + second, chunk_s=0.1, owes_now=owes_now, now=float(second))


def test_a_member_that_may_wait_for_a_third_one_is_judged_by_its_signs_of_life():
    watch = watching(owes_now=False)
    for second in range(1, 20):
        watch.observe(heard=10 + second, moved=10, chunk_s=0.1, owes_now=False, now=float(second))
    assert not watch.is_stalled(22.9, owes=True)
    assert watch.is_stalled(23.1, owes=True)


def test_time_in_which_nothing_was_owed_is_not_held_against_who_owes_from_now_on():
    """Two of four have exchanged what they could and wait for a third: then each has a result for the other."""
    watch = watching(owes_now=False)
    for second in range(1, 10):
        watch.observe(heard=10 + second, moved=10, chunk_s=0.1, owes_now=False, now=float(second))
    watch.observe(heard=20, moved=10, chunk_s=0.1, owes_now=True, now=10.0)
    assert not watch.is_stalled(10.0, owes=True)
    for second in range(11, 14):
        watch.observe(heard=10 + second, moved=10, chunk_s=0.1, owes_now=True, now=float(second))
    assert not watch.is_stalled(13.9, owes=True)
    assert watch.is_stalled(14.1, owes=True)


def test_signs_of_life_do_not_excuse_a_member_between_whom_and_us_bytes_must_move():
    watch = watching()
    for second in range(1, 4):
        watch.observe(heard=10 + second, moved=10, chunk_s=0.1, owes_now=True, now=float(second))
    assert not watch.is_stalled(3.9, owes=True)
    assert watch.is_stalled(4.1, owes=True)


def test_whoever_takes_what_we_send_moves_though_nothing_is_heard_from_it_but_silence_counts_all_the_same():
    watch = watching()
    for second in range(1, 4):
        watch.observe(heard=10, moved=10 + second, chunk_s=0.1, owes_now=True, now=float(second))
    assert not watch.is_stalled(3.9, owes=True)
    assert watch.is_stalled(4.1, owes=True)


def test_our_own_signs_of_life_are_no_movement_while_they_are_acknowledged():
    """A sign is taken off the count when it is sent, and is back in it with its acknowledgement."""
    watch = watching(moved=1000)
    for half_second in range(1, 9):
        moved = 1000 - 48 * (half_second % 2)
        watch.observe(heard=10 + half_second, moved=moved, chunk_s=0.1, owes_now=True, now=half_second / 2)
    assert watch.is_stalled(4.1, owes=True)


def test_whoever_owes_nothing_is_never_stalled():
    assert not ProgressWatch(LIMITS, now=0.0).is_stalled(1e9, owes=False)
    assert not watching().is_stalled(1e9, owes=False)


def test_time_in_which_we_did_not_run_ourselves_is_forgiven():
    watch = watching()
    watch.forgive(10.0)
    assert not watch.is_stalled(13.9, owes=True)
    assert watch.is_stalled(14.1, owes=True)


def test_a_slow_link_gets_longer_up_to_the_ceiling():
    watch = watching(chunk_s=1.0)
    assert watch.limit_s == 8.0
    watch.observe(heard=11, moved=11, chunk_s=100.0, owes_now=True, now=0.0)
    assert watch.limit_s == 30.0


@pytest.mark.parametrize(
    "limits", [{"floor_s": 0.0}, {"floor_s": 5.0, "ceiling_s": 4.0}, {"chunk_times": -1.0}, {"ceiling_s": 0.0}]
)
def test_limits_that_mean_nothing_are_refused(limits):
    with pytest.raises(ValueError, match="must be positive"):
        StallLimits(**limits)
