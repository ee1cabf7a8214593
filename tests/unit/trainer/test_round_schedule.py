# SPDX-License-Identifier: Apache-2.0
"""The n-th round of the plan makes outer step n."""

import pytest

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import Op, Round
from isthmus.trainer.round_schedule import RoundSchedule


@pytest.mark.parametrize("inner_steps", [1, 4, 500])
def test_every_round_of_diloco_follows_h_inner_steps(inner_steps: int) -> None:
    schedule = RoundSchedule(DiLoCo(inner_steps=inner_steps))
    assert [schedule.inner_step_at(step) for step in range(4)] == [0, inner_steps, 2 * inner_steps, 3 * inner_steps]
    assert schedule.round_after(2).inner_step == 3 * inner_steps


def test_the_order_of_the_questions_makes_no_difference() -> None:
    forwards, backwards = RoundSchedule(DiLoCo(inner_steps=3)), RoundSchedule(DiLoCo(inner_steps=3))
    expected = [forwards.round_after(step) for step in range(9)]
    assert [backwards.round_after(step) for step in reversed(range(9))] == expected[::-1]


def test_rounds_of_one_inner_step_make_consecutive_outer_steps_and_delays_do_not_count() -> None:
    class Streams(DiLoCo):
        def plan(self, inner_step: int, /) -> tuple[Round, ...]:
            if inner_step % 5:
                return ()
            keys = (FragmentKey(kind="param", index=index) for index in range(2))
            return tuple(Round(fragment=key, op=Op.MEAN, inner_step=inner_step, delay=2) for key in keys)

    schedule = RoundSchedule(Streams())
    assert [schedule.round_after(step).fragment.index for step in range(4)] == [0, 1, 0, 1]
    assert [schedule.inner_step_at(step) for step in range(5)] == [0, 0, 0, 5, 5]
