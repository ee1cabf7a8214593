"""Who stands still?"""

from collective.core.progress import ProgressWatch, StallLimits

LIMITS = StallLimits(floor_s=4.0, chunk_times=8.0, ceiling_s=30.0)


def test_silence_longer_than_the_floor_is_a_stall():
    watch = ProgressWatch(LIMITS, now=0.0)
    watch.observe(10, 0.1, 1.0)
    assert not watch.is_stalled(4.9, owes=True, owes_only_results=False)
    assert watch.is_stalled(5.1, owes=True, owes_only_results=False)


def test_every_byte_starts_the_clock_again():
    watch = ProgressWatch(LIMITS, now=0.0)
    for second in range(20):
        watch.observe(second, 0.1, float(second))
        assert not watch.is_stalled(second + 0.9, owes=True, owes_only_results=False)


def test_a_member_that_may_wait_for_a_third_one_has_twice_the_time():
    watch = ProgressWatch(LIMITS, now=0.0)
    assert not watch.is_stalled(7.9, owes=True, owes_only_results=True)
    assert watch.is_stalled(8.1, owes=True, owes_only_results=True)


def test_whoever_owes_nothing_is_never_stalled():
    assert not ProgressWatch(LIMITS, now=0.0).is_stalled(1e9, owes=False, owes_only_results=False)


def test_a_slow_link_gets_longer_up_to_the_ceiling():
    watch = ProgressWatch(LIMITS, now=0.0)
    watch.observe(1, 1.0, 0.0)
    assert watch.limit_s == 8.0
    watch.observe(2, 100.0, 0.0)
    assert watch.limit_s == 30.0
