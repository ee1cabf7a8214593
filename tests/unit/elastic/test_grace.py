# SPDX-License-Identifier: Apache-2.0
"""How long a round with its quorum waits: by what rounds took that nothing interrupted. Four members, quorum two."""

import pytest

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.grace import Grace
from isthmus.elastic.core.values import Digest
from tests.unit.elastic.machines import KEYS

CONFIG = CoordinatorConfig(
    manifest_digest=Digest(bytes(32)),
    sealer=KEYS.of_the_run,
    outer_steps=OuterStep(100),
    grace_initial_s=60.0,
    grace_floor_s=0.1,
    grace_factor=3.0,
    grace_limit=1.5,
)
MEMBERS = 4


def grace_after(*rounds, began=0.0, interrupted_at=None):
    """After rounds of so many seconds until the quorum, and so many more until the last one."""
    grace = Grace(CONFIG)
    now = began
    grace.learn([], MEMBERS, now)
    for work_s, lateness_s in rounds:
        if interrupted_at is not None:
            grace.interrupted(now + interrupted_at)
        ready_at = [now + work_s, now + work_s, now + work_s, now + work_s + lateness_s]
        now = ready_at[-1]
        grace.learn(ready_at, MEMBERS, now)
    return grace


def test_grace_is_some_times_the_usual_lateness_and_less_than_the_work_that_is_lost_by_waiting():
    assert grace_after((4.0, 1.0)).window_s == pytest.approx(3.0)
    assert grace_after((4.0, 9.0)).window_s == pytest.approx(6.0)
    assert grace_after((4.0, 0.001)).window_s == pytest.approx(0.1)


def test_what_was_usual_fades():
    window_s = grace_after((4.0, 1.0), (4.0, 0.0), (4.0, 0.0)).window_s
    assert window_s == pytest.approx(3.0 * 0.9**2)


def test_round_that_was_interrupted_teaches_nothing():
    grace = grace_after((4.0, 1.0))
    grace.interrupted(7.0)
    grace.learn([64.0, 64.0, 64.0, 94.0], MEMBERS, 94.0)
    assert grace.window_s == pytest.approx(3.0)


def test_if_every_round_is_interrupted_the_first_one_is_better_than_nothing_and_makes_nobody_wait_longer():
    assert grace_after((8.0, 1.0), interrupted_at=5.0).window_s == pytest.approx(3.0)
    assert grace_after((500.0, 900.0), interrupted_at=5.0).window_s == pytest.approx(CONFIG.grace_initial_s)


def test_view_that_changes_between_two_rounds_interrupts_none():
    assert grace_after((4.0, 1.0), interrupted_at=0.0).window_s == pytest.approx(3.0)


def test_after_an_interrupted_round_the_next_one_teaches_again():
    grace = grace_after((4.0, 1.0))
    grace.interrupted(7.0)
    grace.learn([40.0] * MEMBERS, MEMBERS, 40.0)
    grace.learn([42.0, 42.0, 42.0, 42.5], MEMBERS, 42.5)
    assert grace.window_s == pytest.approx(3.0 * 0.9)


def test_grace_that_was_too_short_is_longer_next_time_and_never_longer_than_work_allows():
    grace = grace_after((4.0, 0.5))
    windows = []
    for _ in range(4):
        grace.was_too_short()
        windows.append(grace.window_s)
    assert windows == pytest.approx([2.25, 3.375, 5.0625, 6.0])


def test_a_round_in_which_nobody_could_be_late_does_not_make_the_grace_fade():
    grace = grace_after((4.0, 1.0))
    grace.learn([9.0], 1, 9.0)
    assert grace.window_s == pytest.approx(3.0)
    grace.learn([13.0, 13.0, 13.0], MEMBERS, 13.0)  # one is excused: would it have been in time?
    assert grace.window_s == pytest.approx(3.0)


def test_nobody_knows_how_long_a_grace_should_be_before_anything_was_measured():
    grace = Grace(CONFIG)
    grace.was_too_short()
    assert grace.window_s == CONFIG.grace_initial_s
