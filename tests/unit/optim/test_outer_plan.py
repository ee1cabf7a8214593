# SPDX-License-Identifier: Apache-2.0
"""The n-th plan that is not empty makes outer step n."""

import dataclasses

import pytest

from isthmus.optim import outer_types
from isthmus.optim.data_parallel import DataParallel
from isthmus.optim.delayed import Delayed
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.error_feedback import ErrorFeedback
from isthmus.optim.fragments import FragmentKey, FragmentTable
from isthmus.optim.outer import GRAD, Op, Round
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.registry import outer_from_config
from isthmus.optim.run_facts import RunFacts
from isthmus.optim.streaming import Streaming

RUN = RunFacts(num_peers=2, outer_steps=10, peak_lr=1e-3)


@pytest.mark.parametrize("inner_steps", [1, 4, 500])
def test_every_step_of_diloco_follows_h_inner_steps(inner_steps: int) -> None:
    plan = OuterPlan(DiLoCo(inner_steps=inner_steps))
    assert [plan.inner_step(step) for step in range(4)] == [0, inner_steps, 2 * inner_steps, 3 * inner_steps]
    assert plan.rounds(3)[0].inner_step == plan.due_step(3) == 3 * inner_steps


def test_the_order_of_the_questions_makes_no_difference() -> None:
    forwards, backwards = OuterPlan(DiLoCo(inner_steps=3)), OuterPlan(DiLoCo(inner_steps=3))
    expected = [forwards.rounds(step) for step in range(1, 10)]
    assert [backwards.rounds(step) for step in reversed(range(1, 10))] == expected[::-1]


def planning(*keys: int, delays: tuple[int, ...] = (2, 2)) -> OuterPlan:
    class Streams(DiLoCo):
        def plan(self, inner_step: int, /) -> tuple[Round, ...]:
            if inner_step % 5:
                return ()
            return tuple(
                Round(fragment=FragmentKey(kind="param", index=index), op=Op.MEAN, inner_step=inner_step, delay=delay)
                for index, delay in zip(keys, delays, strict=True)
            )

    return OuterPlan(Streams())


def test_rounds_of_one_inner_step_make_one_outer_step_that_is_due_later() -> None:
    plan = planning(0, 1)
    assert [[round_.fragment.index for round_ in plan.rounds(step)] for step in (1, 2)] == [[0, 1], [0, 1]]
    assert [(plan.inner_step(step), plan.due_step(step)) for step in (1, 2)] == [(0, 2), (5, 7)]


@pytest.mark.parametrize(
    ("outer", "ahead"),
    [
        (DiLoCo(inner_steps=3), 0),
        (Delayed(inner_steps=3), 1),
        (Delayed(inner_steps=3, overlap=False), 0),
        (Streaming(inner_steps=8, num_fragments=4, delay=7), 0),
    ],
)
def test_what_is_given_anew_before_it_lands_is_that_of_a_method_that_is_delayed_by_a_whole_round(
    outer: DiLoCo, ahead: int
) -> None:
    plan = OuterPlan(outer)
    assert [plan.again(step) for step in range(1, 6)] == [step + ahead for step in range(1, 6)]


def test_a_fragment_is_given_anew_when_its_outcome_is_due_and_not_before() -> None:
    assert planning(0, delays=(4,)).again(3) == 3
    assert planning(0, delays=(5,)).again(3) == 4
    with pytest.raises(ValueError, match="at inner step 5, and its last outcome is due after inner step 6"):
        planning(0, delays=(6,)).rounds(2)


def test_fragments_that_are_given_anew_before_they_land_are_all_in_every_plan() -> None:
    class TakesTurns(Streaming):
        def plan(self, inner_step: int, /) -> tuple[Round, ...]:
            return tuple(dataclasses.replace(round_, delay=8) for round_ in Streaming.plan(self, inner_step))

    plan = OuterPlan(TakesTurns(inner_steps=8, num_fragments=4, delay=7))
    assert plan.rounds(4)[0].fragment.index == 0
    with pytest.raises(ValueError, match="given again before it has landed"):
        plan.rounds(5)


def test_rounds_of_one_step_that_are_not_due_together_or_of_one_fragment_are_refused() -> None:
    with pytest.raises(ValueError, match="several delays"):
        planning(0, 1, delays=(2, 3)).rounds(1)
    with pytest.raises(ValueError, match="different fragments"):
        planning(1, 1).rounds(1)


def test_a_method_without_rounds_is_told_so() -> None:
    class Alone(DiLoCo):
        def plan(self, _inner_step: int, /) -> tuple[Round, ...]:
            return ()

    with pytest.raises(ValueError, match="plans no round"):
        OuterPlan(Alone()).rounds(1)


@pytest.mark.parametrize("name", outer_types())
def test_workers_may_leave_inner_steps_out_unless_each_exchanges_its_gradient(name: str) -> None:
    table = FragmentTable.from_named_shapes([(f"layers.{number}.weight", (8, 8)) for number in range(4)])
    settings = {"inner_steps": 4} if name not in ("data_parallel", "demo") else {}
    outer = outer_from_config({"type": name, **settings}).fitted(table, RUN)
    kinds = {fragment.kind for fragment in outer.fragments(table)}
    assert OuterPlan(outer).steps_may_differ == outer.steps_may_differ == (GRAD not in kinds)
    assert ErrorFeedback(outer=outer).steps_may_differ == outer.steps_may_differ


def test_a_method_of_gradients_that_lets_steps_differ_is_refused() -> None:
    class Careless(DataParallel):
        @property
        def steps_may_differ(self) -> bool:
            return True

    with pytest.raises(ValueError, match="must say that inner steps may not differ"):
        OuterPlan(Careless()).rounds(1)
