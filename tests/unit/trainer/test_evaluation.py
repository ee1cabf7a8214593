# SPDX-License-Identifier: Apache-2.0
"""Which anchors are judged, by whom, and how a peer judges one while it trains on."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.state.digest import Hasher
from isthmus.trainer.engine.evaluation import Evaluation, Judged, Turns
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.errors import WorkerCrashed
from tests.unit.trainer.loop_rig import INNER_STEPS, NUM_BATCHES, Rig
from tests.unit.trainer.test_training_loop_streaming import anchor_of

OFFSET = sum(number * (number + 1) for number in range(NUM_BATCHES)) / sum(range(1, NUM_BATCHES + 1))
"""What the rig adds to the loss of a whole evaluation that is made of parts."""
STREAMING = {"inner_steps": 12, "num_fragments": 4, "delay": 2, "keep": 0.5}


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


# --------------------------------------------------------------------------------------------------------- whose turn


def ranks(turns: Turns, commits: int, samples: int, world_size: int, *, last: int = 0) -> dict[int, int]:
    """By outer step: who judges it, where every commit holds so many samples."""
    judges = {}
    for step in range(1, commits + 1):
        turns.committed(step, DataPosition(step * samples))
        rank = turns.rank(step, world_size, is_final=step == last)
        if rank is not None:
            judges[step] = rank
    return judges


def test_an_evaluation_is_due_whenever_so_many_tokens_are_done_and_at_the_end() -> None:
    turns = Turns(every=1000, tokens_per_sample=10)
    assert list(ranks(turns, 20, 30, 3, last=20)) == [4, 7, 10, 14, 17, 20]
    assert turns.tokens(20) == 6000
    assert list(ranks(Turns(every=1000, tokens_per_sample=10), 5, 30, 3, last=5)) == [4, 5]


@pytest.mark.parametrize(("every", "samples"), [(1, 30), (300, 30), (1000, 30), (10_000, 30), (7, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_duty_goes_round(every: int, samples: int, world_size: int) -> None:
    turns = Turns(every=every, tokens_per_sample=10)
    judges = list(ranks(turns, 400, samples, world_size).values())
    assert len(judges) > 10
    shares = Counter(judges)
    if len(judges) >= world_size:
        assert max(shares.values()) - min(shares.values()) <= 1
        assert set(shares) == set(range(world_size))


def test_zero_means_never_not_even_at_the_end() -> None:
    assert ranks(Turns(every=0, tokens_per_sample=10), 20, 30, 3, last=20) == {}


def test_samples_that_no_commit_has_consumed_do_not_count() -> None:
    turns = Turns(every=100, tokens_per_sample=10)
    turns.committed(1, DataPosition(30, (IndexRange(3, 13), IndexRange(20, 30))))
    assert turns.tokens(1) == 100
    assert turns.rank(1, 2, is_final=False) == 1


def test_who_does_not_know_the_commit_before_leaves_the_evaluation_to_others() -> None:
    turns = Turns(every=1, tokens_per_sample=10)
    turns.committed(7, DataPosition(70))
    assert turns.rank(7, 1, is_final=False) is None
    assert turns.rank(7, 1, is_final=True) == 0
    turns.committed(8, DataPosition(80))
    assert turns.rank(8, 1, is_final=False) == 0
    assert turns.rank(9, 1, is_final=True) is None  # nobody has said where the data stands


def test_what_is_remembered_is_bounded() -> None:
    turns = Turns(every=1, tokens_per_sample=1)
    ranks(turns, 10_000, 1, 2)
    assert len(turns._tokens) <= 64


# ------------------------------------------------------------------------------------------------------- how it is done


class Judging:
    """A rig whose overseer judges the anchors of these outer steps."""

    def __init__(self, hasher: Hasher, steps: range, **settings: object) -> None:
        self.rig = rig = Rig(hasher, outer_steps=8, **settings)
        self.judged: list[Judged] = []
        self.anchors: dict[int, float] = {}
        self._now_s = 0.0
        evaluation = Evaluation(rig.values, rig.pool, self._clock, self.judged.append)
        rig.overseer.idle = evaluation.idle
        replace = rig.overseer.replace_workers

        async def landed(report: RoundReport) -> None:
            await evaluation.advance()
            if report.outer_step in steps:
                self.anchors[report.outer_step] = float(anchor_of(rig).sum())
                await evaluation.begin(report.outer_step, 10 * report.outer_step)
            if report.final:
                await evaluation.finish()

        async def replace_workers(crash: WorkerCrashed) -> None:
            evaluation.drop()
            await replace(crash)

        rig.overseer.landed, rig.overseer.replace_workers = landed, replace_workers
        rig._audit = lambda *_: None

    def _clock(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.mark.parametrize("streaming", [None, STREAMING], ids=["diloco", "streaming"])
async def test_an_anchor_is_judged_as_it_was_while_its_peer_trains_on(
    hasher: Hasher, streaming: Mapping[str, object] | None
) -> None:
    plain = Rig(hasher, outer_steps=8, streaming=streaming)
    plain._audit = lambda *_: None
    await plain.run()
    judging = Judging(hasher, range(2, 9, 3), streaming=streaming)
    await judging.rig.run()
    assert [one.outer_step for one in judging.judged] == [2, 5, 8]
    assert [one.tokens for one in judging.judged] == [20, 50, 80]
    for one in judging.judged:
        assert one.loss == pytest.approx(judging.anchors[one.outer_step] + OFFSET)
        assert 0 < one.held_s <= one.seconds
    assert judging.rig.pool.local.equal(plain.pool.local), "it trains as if nobody had judged"
    assert any(done for done in judging.rig.pool.judged_at), "not all of it before the next inner step"


async def test_the_workers_judge_while_they_stand_still_and_lose_only_the_copy(hasher: Hasher) -> None:
    judging = Judging(hasher, range(3, 4))
    finish = judging.rig.commit_round

    async def slow(ready: object) -> object:
        for _ in range(50):
            await judging.rig.wait()
        return await finish(ready)

    judging.rig.commit_round = slow
    await judging.rig.run()
    assert [one.outer_step for one in judging.judged] == [3]
    assert judging.rig.pool.judged_at == [4 * INNER_STEPS] * NUM_BATCHES, "all of it in the next exchange"
    assert judging.judged[0].held_s == 1.0, "one tick: the copy"


async def test_without_room_for_a_copy_the_anchor_is_judged_at_once(hasher: Hasher) -> None:
    judging = Judging(hasher, range(1, 9), streaming=STREAMING)
    judging.rig.pool.has_room = False
    await judging.rig.run()
    assert [one.loss for one in judging.judged] == list(judging.anchors.values())
    assert [one.outer_step for one in judging.judged] == list(range(1, 9))
    assert all(one.held_s == one.seconds for one in judging.judged)


@pytest.mark.parametrize("place", range(1, 30, 2))
async def test_workers_that_hang_in_an_evaluation_are_replaced_and_training_goes_on(hasher: Hasher, place: int) -> None:
    judging = Judging(hasher, range(1, 9))
    judging.rig.pool.hangs_at = place
    await judging.rig.run()
    assert judging.rig.pool.num_hangs == 1
    assert judging.rig.state.live.manifest.outer_step == 8
    assert len(judging.judged) >= 6, "the one that was under way is missing, and the one that was to begin"
    for one in judging.judged:
        assert one.loss == pytest.approx(judging.anchors[one.outer_step] + OFFSET)


async def test_a_step_that_was_committed_lands_although_the_membership_ended_while_its_peer_judged(
    hasher: Hasher,
) -> None:
    judging = Judging(hasher, range(7, 9))
    rig = judging.rig
    landed, idle = [], rig.overseer.idle
    judge = rig.overseer.landed

    async def slow(until: asyncio.Future[None]) -> None:
        await idle(until)
        if rig.state.live.manifest.outer_step == 8:
            rig.active_view = None  # as at the end of a run

    async def noted(report: RoundReport) -> None:
        landed.append(report.outer_step)
        await judge(report)

    rig.overseer.idle, rig.overseer.landed = slow, noted
    await rig.run()
    assert landed == list(range(1, 9))
    assert [one.outer_step for one in judging.judged] == [7, 8]
