# SPDX-License-Identifier: Apache-2.0
"""Methods that are delayed by a whole round: a payload is the only copy of its block, whatever is missed meanwhile.

Found before: a step that was committed and not due landed as soon as the others had made the next one. The inner steps
since the last payload were gone, and were voted and weighed as trained. The block after it had nothing to land when it
was emitted, so the next payload held it once more. And who heard in a pause that two steps were missed kept only one.
"""

from collections.abc import Iterator

import pytest

from isthmus.elastic.state.digest import Hasher
from isthmus.optim.co2 import CO2
from isthmus.optim.delayed import Delayed
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.eager import Eager
from tests.unit.trainer.loop_rig import BATCH, INNER_STEPS, Happening, Rig

NOTHING = Happening.NOTHING
SETTINGS = {"lr": 1.0, "momentum": 0.0, "inner_steps": INNER_STEPS}
METHODS = [Delayed(**SETTINGS), Eager(**SETTINGS), CO2(clip=float("inf"), **SETTINGS)]


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


def samples_of(rig: Rig) -> list[int]:
    return sorted(index for commit in rig.commits for index in commit.samples)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
async def test_each_block_of_a_calm_run_is_in_one_payload(hasher: Hasher, method: DiLoCo) -> None:
    rig = Rig(hasher, outer_steps=6, method=method)
    await rig.run()
    rig.audit_the_end()
    assert samples_of(rig) == rig.pool.trained == list(range(5 * INNER_STEPS * BATCH))


# Where something is missed, counted in waits of the pool, the feed and the coordinator.
@pytest.mark.parametrize("place", range(66))
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
async def test_a_missed_round_loses_no_work_and_brings_none_twice(
    hasher: Hasher, method: DiLoCo, place: int, times: int
) -> None:
    rig = Rig(hasher, [NOTHING] * place + [Happening.MISSED_ROUND] * times, outer_steps=8, method=method)
    await rig.run()
    rig.audit_the_end()  # each payload is exactly the work on the samples that its vote names
    waiting = [index for piece in rig.feed.consumed() for index in range(piece.start, piece.stop)]
    assert sorted(samples_of(rig) + waiting) == rig.pool.trained, "what no vote names is on its way"
    assert sum(commit.num_tokens for commit in rig.commits) == len(samples_of(rig))
    assert rig.state.live.pins == 1, "only the workers' base is pinned"
