# SPDX-License-Identifier: Apache-2.0
"""The learning rate follows what a run has committed."""

import itertools
from collections.abc import Iterable

import pytest

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.progress import Progress

LENGTH, STEPS = 10, 100
TOTAL = LENGTH * STEPS


def positions(samples: Iterable[int], *, first: int = 1, progress: Progress | None = None) -> list[float]:
    """After each outer step; `samples`: committed by each."""
    progress = progress or Progress(OuterPlan(DiLoCo(inner_steps=LENGTH)), total_steps=TOTAL)
    found = []
    for outer_step, num_samples in enumerate(itertools.accumulate(samples), start=first):
        progress.committed(outer_step, num_samples)
        found.append(progress.position(LENGTH * outer_step))
    return found


@pytest.mark.parametrize("of_step", [30, 7, 1])
def test_where_members_stay_the_same_it_is_the_plans_own_count_to_the_bit(of_step: int) -> None:
    # Also where a slow one among them leaves steps out: it is always as many.
    assert positions([of_step] * STEPS) == [float(LENGTH * step) for step in range(1, STEPS + 1)]


def test_what_counts_is_tokens_and_not_outer_steps() -> None:
    # Half of the members come after half of the run: then a third of the tokens is done, and a half of the steps.
    found = positions([30] * 50 + [60] * 50)
    assert found[49] == 500.0
    assert found[59] == pytest.approx(TOTAL * (1500 + 600) / (1500 + 50 * 60))
    assert found[-1] == TOTAL
    assert found[60:] == sorted(found[60:])


def test_one_round_without_a_member_moves_it_little() -> None:
    found = positions([30] * 50 + [20, 40] + [30] * 48)
    assert max(abs(position - LENGTH * step) for step, position in enumerate(found, start=1)) < 0.02 * TOTAL


def test_between_commits_it_goes_on_by_a_peers_own_inner_steps() -> None:
    progress = Progress(OuterPlan(DiLoCo(inner_steps=LENGTH)), total_steps=TOTAL)
    assert [progress.position(step) for step in range(3)] == [0.0, 1.0, 2.0]
    progress.committed(1, 30)
    assert [progress.position(step) for step in (10, 11, 19)] == [10.0, 11.0, 19.0]


def test_a_newcomer_is_where_the_others_are() -> None:
    progress = Progress(OuterPlan(DiLoCo(inner_steps=LENGTH)), total_steps=TOTAL)
    assert progress.position(400) == 400.0, "it has not heard of a commit yet"
    progress.committed(40, 1200)
    assert progress.position(400) == 400.0


def test_a_run_that_goes_back_is_where_it_was() -> None:
    progress = Progress(OuterPlan(DiLoCo(inner_steps=LENGTH)), total_steps=TOTAL)
    found = positions([30] * 20, progress=progress)
    progress.committed(12, 12 * 30)
    assert progress.position(120) == found[11]
    progress.committed(13, 12 * 30 + 15)
    assert progress.position(130) > 130.0, "with fewer members, less of the run is left"


def test_a_run_that_is_longer_than_its_schedule_stays_at_the_end() -> None:
    assert positions([30] * (STEPS + 2))[-3:] == [TOTAL, TOTAL + LENGTH, TOTAL + 2 * LENGTH]
