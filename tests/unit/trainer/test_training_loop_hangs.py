# SPDX-License-Identifier: Apache-2.0
"""Workers that hang or die and are replaced: no sample is lost or used twice, whatever they were asked for."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from isthmus.elastic.state.digest import Hasher
from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.workers.link import WorkerStalled
from isthmus.trainer.workers.process import WorkerDied
from tests.unit.trainer.loop_rig import BATCH, INNER_STEPS, Happening, Rig

HANG = WorkerStalled("step", (0,), 1.0, "hangs")
DEATH = WorkerDied(0, -9, "", Path("worker-0.log"))
STREAMING = {"inner_steps": 8, "num_fragments": 4, "delay": 1, "keep": 1.0}


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


@pytest.mark.parametrize("streaming", [None, STREAMING], ids=["diloco", "streaming"])
@pytest.mark.parametrize("place", range(1, 14))
@pytest.mark.parametrize("crash", [HANG, DEATH], ids=["hangs", "dies"])
async def test_samples_of_a_worker_that_crashed_are_trained_on_again(
    hasher: Hasher, place: int, streaming: Mapping[str, object] | None, crash: WorkerCrashed
) -> None:
    rig = Rig(hasher, outer_steps=4, streaming=streaming)
    rig.pool.hangs_at, rig.pool.crash = place, crash
    await rig.run()
    assert rig.pool.num_hangs == 1
    rig.audit_the_end()
    samples = sorted(index for commit in rig.commits for index in commit.samples)
    assert samples == list(range(len(samples))), "one is left out"
    assert (len(rig.state._versions), rig.state.live.pins) == (1, 1), "no other state is left in memory"


@pytest.mark.parametrize("place", range(1, 14))
@pytest.mark.parametrize("what", [Happening.MISSED_ROUND, Happening.BLINK_WITH_COMMITS, Happening.EVICTION])
@pytest.mark.parametrize("later", [0, 1, 2, 5])
async def test_what_happens_to_the_membership_meanwhile_changes_nothing(
    hasher: Hasher, place: int, what: Happening, later: int
) -> None:
    rig = Rig(hasher, [Happening.NOTHING] * (2 * place + later) + [what], outer_steps=5)
    rig.pool.hangs_at = place
    await rig.run()
    assert rig.pool.num_hangs == 1
    rig.audit_the_end()


async def test_the_others_get_whole_rounds_from_it_afterwards(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=4)
    rig.pool.hangs_at = 3
    await rig.run()
    assert [len(commit.samples) for commit in rig.commits] == [INNER_STEPS * BATCH] * 4


@pytest.mark.parametrize("streaming", [None, {**STREAMING, "keep": 0.5}], ids=["diloco", "streaming"])
async def test_values_that_are_no_numbers_any_more_begin_anew_at_the_anchor(
    hasher: Hasher, streaming: Mapping[str, object] | None
) -> None:
    rig = Rig(hasher, outer_steps=4, streaming=streaming)
    step = rig.pool.step

    async def goes_astray(indices: tuple[int, ...], *, inner_step: int, position: float) -> object:
        done = await step(indices, inner_step=inner_step, position=position)
        if inner_step == 4 and not rig.pool.num_hangs:
            rig.pool.local[9] = float("nan")
        return done

    rig.pool.step = goes_astray
    await rig.run()
    assert rig.pool.num_hangs == 1, "the workers are replaced, once"
    rig.audit_the_end()
    assert bool(rig.pool.local.isfinite().all())
    samples = sorted(index for commit in rig.commits for index in commit.samples)
    assert samples == list(range(len(samples))), "one is left out"
