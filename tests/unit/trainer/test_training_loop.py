# SPDX-License-Identifier: Apache-2.0
"""From the anchor to the commit and on, whatever happens to the membership meanwhile."""

import asyncio
from collections.abc import Iterator

import pytest

from isthmus.elastic.errors import NotAMember
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.outer import ANCHOR, Work
from isthmus.trainer.engine.waiting import Patience
from isthmus.trainer.errors import TrainingFault
from tests.unit.trainer.loop_rig import BATCH, INNER_STEPS, Happening, Rig

NOTHING, BLINK = Happening.NOTHING, Happening.BLINK


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


async def test_undisturbed_training_takes_every_sample_once_and_in_order(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=4)
    await rig.run()
    rig.audit_the_end()
    per_round = INNER_STEPS * BATCH
    assert [index for commit in rig.commits for index in commit.samples] == list(range(4 * per_round))
    assert [commit.num_tokens for commit in rig.commits] == [per_round] * 4


async def test_the_next_step_is_with_the_workers_before_this_one_is_done(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=3)
    await rig.run()
    rig.audit_the_end()
    assert rig.pool.most_steps == 2


async def test_while_the_others_wait_no_step_is_asked_for_beforehand(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=3)
    rig.overseer.is_awaited = True
    await rig.run()
    assert rig.pool.most_steps == 1


async def test_reports_tell_what_was_done_in_each_round(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=2)
    await rig.run()
    first, last = rig.overseer.reports
    assert (first.outer_step, first.inner_step, first.num_tokens) == (1, INNER_STEPS, INNER_STEPS * BATCH)
    assert first.loss == pytest.approx(2.0)  # steps 1, 2 and 3
    assert (first.final, last.final) == (False, True)
    assert last.digest == rig.state.live.manifest.digest
    assert last.train_s >= 0.0
    assert (last.work.step_s, last.work.passes_s) == (0.5 * INNER_STEPS, 0.25 * INNER_STEPS)
    assert last.work.step_tokens == last.num_tokens
    assert last.wait_s >= 0.0
    assert last.position is not None


async def test_the_others_are_told_when_this_peer_stands_still_for_them(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=2)
    await rig.run()
    assert rig.overseer.standstills == [True, False] * 2


async def test_a_fresh_member_whose_fellows_wait_hands_in_what_it_has(hasher: Hasher) -> None:
    # Put out in the first round, back after the others have committed it: fresh in the second.
    rig = Rig(hasher, [NOTHING] * 4 + [Happening.BLINK_WITH_COMMITS], outer_steps=4)
    rig.overseer.is_awaited = True
    await rig.run()
    rig.audit_the_end()
    mine = [commit for commit in rig.commits if commit.is_mine]
    assert mine[0].samples == ()
    assert rig.overseer.reports[0].loss is None
    assert all(len(commit.samples) == INNER_STEPS * BATCH for commit in mine[1:])  # only a fresh one may do less


async def test_all_do_the_whole_of_the_first_round_because_they_begin_it_together(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=2)
    rig.overseer.is_awaited = True
    await rig.run()
    assert [len(commit.samples) for commit in rig.commits] == [INNER_STEPS * BATCH] * 2


# Where in the first round the membership is lost and won again, counted in waits of the pool and the feed.
@pytest.mark.parametrize("place", range(24))
@pytest.mark.parametrize("what", [BLINK, Happening.BLINK_WITH_COMMITS, Happening.EVICTION, Happening.DEMOTION])
async def test_work_of_a_lost_membership_is_never_handed_in_after_the_next(
    hasher: Hasher, place: int, what: Happening
) -> None:
    rig = Rig(hasher, [NOTHING] * place + [what], outer_steps=4)
    await rig.run()
    rig.audit_the_end()


@pytest.mark.parametrize("place", range(30))
@pytest.mark.parametrize("times", [1, 2])
async def test_work_of_a_missed_round_is_in_the_next_payload_and_undoes_nothing(
    hasher: Hasher, place: int, times: int
) -> None:
    rig = Rig(hasher, [NOTHING] * place + [Happening.MISSED_ROUND] * times, outer_steps=5)
    await rig.run()
    rig.audit_the_end()  # each payload is exactly the work on the samples that its vote names
    samples = [index for commit in rig.commits for index in commit.samples]
    assert samples == list(range(len(samples))), "no sample of a missed round is lost, or trained twice"
    assert sum(commit.num_tokens for commit in rig.commits) == len(samples)


@pytest.mark.parametrize("place", range(30))
async def test_a_method_hears_of_the_work_that_is_behind_its_payload(
    hasher: Hasher, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Work] = []

    def emit(self, round_, value, shared, private, work, *, out):
        assert work.samples == float((shared[ANCHOR] - value).sum()), "each sample has taken 1"
        heard.append(work)
        return plain(self, round_, value, shared, private, work, out=out)

    plain = DiLoCo.emit
    monkeypatch.setattr(DiLoCo, "emit", emit)
    rig = Rig(hasher, [NOTHING] * place + [Happening.MISSED_ROUND], outer_steps=5)
    await rig.run()
    assert heard
    assert all(work.samples == BATCH * work.inner_steps for work in heard)


@pytest.mark.parametrize("place", range(30))
async def test_who_has_missed_a_round_hands_in_what_it_has_when_the_others_wait_for_the_next(
    hasher: Hasher, place: int
) -> None:
    rig = Rig(hasher, [NOTHING] * place + [Happening.MISSED_ROUND], outer_steps=5)
    rig.overseer.is_awaited = True
    await rig.run()
    rig.audit_the_end()
    assert max(len(commit.samples) for commit in rig.commits) <= INNER_STEPS * BATCH, "it would be late again"


async def test_who_keeps_the_others_waiting_for_long_hands_in_what_it_has(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=3, patience=0.0)
    rig.overseer.is_awaited = True
    await rig.run()
    rig.audit_the_end()
    first, *later = [len(commit.samples) for commit in rig.commits]
    assert first == INNER_STEPS * BATCH, "nothing is measured before the first round"
    assert all(BATCH <= num_samples < INNER_STEPS * BATCH for num_samples in later)


@pytest.mark.parametrize("follows_speed", [True, False])
async def test_a_peer_that_is_much_slower_than_another_leaves_steps_out_unless_all_are_to_make_as_many(
    hasher: Hasher, follows_speed: bool
) -> None:
    rig = Rig(hasher, outer_steps=4, follows_speed=follows_speed)
    rig.runner.speeds = (1e-9,)
    await rig.run()
    rig.audit_the_end()
    first, *later = [len(commit.samples) for commit in rig.commits]
    assert first == INNER_STEPS * BATCH, "nothing was told before"
    assert later == [BATCH if follows_speed else INNER_STEPS * BATCH] * 3
    told = rig.runner.told[1:]
    assert all(seconds > 0.0 for seconds in told)


def test_patience_begins_anew_when_the_others_have_ceased_to_wait() -> None:
    now, others_wait = 0.0, True
    patience = Patience(0.5, lambda _outer_step: 6.0, lambda: others_wait, clock=lambda: now)
    looks = []
    for now, others_wait in ((1.0, True), (3.0, True), (3.5, False), (5.0, True), (8.0, True), (8.1, True)):  # noqa: B007
        looks.append(patience.is_over(2, has_work=True))
    assert looks == [False] * 5 + [True], "half of the six seconds that a round's own work takes"


async def test_samples_of_a_lost_membership_are_trained_again_by_whoever_gets_them(hasher: Hasher) -> None:
    rig = Rig(hasher, [NOTHING] * 6 + [Happening.EVICTION], outer_steps=2)
    await rig.run()
    rig.audit_the_end()
    samples = sorted(index for commit in rig.commits for index in commit.samples)
    assert samples == list(range(2 * INNER_STEPS * BATCH))


async def test_losing_the_membership_while_the_round_is_out_starts_again_from_the_anchor(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=2)
    handed_in = asyncio.Event()
    commit_round = rig.commit_round

    async def lose_the_first(ready: object) -> object:
        if not handed_in.is_set():
            handed_in.set()
            rig.evict()
            raise NotAMember("evicted while it voted")
        return await commit_round(ready)

    rig.commit_round = lose_the_first
    await rig.run()
    rig.audit_the_end()
    assert rig.overseer.standstills == [True, False] * 3


async def test_the_loop_ends_quietly_when_this_peers_part_is_over(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=10)
    step = rig.pool.step

    async def end_after_the_step(*args: object, **kwargs: object) -> object:
        done = await step(*args, **kwargs)
        if kwargs["inner_step"] == INNER_STEPS + 1:
            rig.active_view, rig.is_over = None, True
        return done

    rig.pool.step = end_after_the_step
    await rig.run()
    assert [commit.outer_step for commit in rig.commits] == [1]


async def test_a_fault_of_the_workers_comes_through(hasher: Hasher) -> None:
    rig = Rig(hasher)

    async def fail(*_args: object, **_kwargs: object) -> None:
        raise TrainingFault("the loss is not finite", cure="lower inner.lr")

    rig.pool.step = fail
    with pytest.raises(TrainingFault):
        await rig.run()
