# SPDX-License-Identifier: Apache-2.0
"""Fragments in turn, and inner steps that go on while one of them is under way, whatever happens to the membership."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from isthmus.elastic.state.digest import Hasher
from isthmus.trainer.engine.state_version import gather_anchor
from tests.unit.trainer.loop_rig import BATCH, INNER_STEPS, NUMEL, Happening, Rig

H, P, DELAY = 8, 4, 2
SETTINGS = {"inner_steps": H, "num_fragments": P, "delay": DELAY, "keep": 1.0}
NOTHING = Happening.NOTHING


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=64)
    yield threads
    threads.close()


def anchor_of(rig: Rig) -> torch.Tensor:
    flat = torch.full((NUMEL,), float("nan"))
    gather_anchor(rig.state.live.tensors, rig.fragments, out=flat)
    return flat


def samples_of(rig: Rig) -> list[int]:
    return [index for commit in rig.commits for index in commit.samples]


async def test_samples_of_overlapped_steps_are_each_in_exactly_one_commit_and_in_order(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=10, streaming=SETTINGS)
    await rig.run()
    rig.audit_the_end()
    assert samples_of(rig) == list(range(10 * H // P * BATCH))
    assert [report.inner_step for report in rig.overseer.reports] == [H // P * turn for turn in range(1, 11)]
    assert [report.num_tokens for report in rig.overseer.reports] == [H // P * BATCH] * 10
    assert rig.pool.inner_steps == list(range(1, 10 * H // P + 1)), "after the last payload nobody trains on"


@pytest.mark.parametrize("keep", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("num_fragments", "delay"), [(4, 0), (4, 1), (4, 2), (3, 2), (1, 3)])
async def test_the_shared_parameters_are_those_of_the_plain_formula(
    hasher: Hasher, keep: float, num_fragments: int, delay: int
) -> None:
    """What optim/outer.py says an engine does, in one loop without tasks."""
    settings = {"inner_steps": H, "num_fragments": num_fragments, "delay": delay, "keep": keep}
    rig = Rig(hasher, outer_steps=12, streaming=settings)
    await rig.run()
    local, anchor, under_way, num_absorbed, t = torch.zeros(NUMEL), torch.zeros(NUMEL), [], 0, 0
    while num_absorbed < 12:
        t += 1
        for index in range(BATCH * (t - 1), BATCH * t):
            local[index % NUMEL] -= 1.0
        for round_ in rig.outer.plan(t):
            places = rig.fragments[round_.fragment.index].ranges
            under_way.append((round_.due_step, [(place, anchor[place] - local[place]) for place in places]))
        while under_way and under_way[0][0] <= t:
            for place, payload in under_way.pop(0)[1]:
                anchor[place] -= payload
                local[place] = keep * local[place] + (1 - keep) * anchor[place]
            num_absorbed += 1
    assert torch.equal(anchor_of(rig), anchor)


async def test_one_fragment_without_delay_makes_the_digests_of_diloco(hasher: Hasher) -> None:
    settings = {"inner_steps": INNER_STEPS, "num_fragments": 1, "delay": 0, "keep": 0.0}
    diloco = Rig(hasher, outer_steps=6, momentum=0.9)
    streaming = Rig(hasher, outer_steps=6, momentum=0.9, streaming=settings)
    for rig in (diloco, streaming):
        await rig.run()
        rig.audit_the_end()
    assert [report.digest for report in streaming.overseer.reports] == [
        report.digest for report in diloco.overseer.reports
    ]


async def test_inner_steps_go_on_up_to_the_due_step_while_a_round_is_out(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=3, streaming=SETTINGS)
    install, stands_still, seen = rig._install, rig.overseer.stands_still, []

    async def slow(*args: object, **kwargs: object) -> object:
        await stands_still.wait()
        stands_still.clear()
        seen.append(len(rig.pool.inner_steps))
        return await install(*args, **kwargs)

    rig._install = slow
    await asyncio.wait_for(rig.run(), 20.0)
    rig.audit_the_end()
    apart = H // P
    assert seen == [apart + DELAY, 2 * apart + DELAY, 3 * apart], "the run's last round holds nobody's later work"


async def test_who_has_the_outcome_before_it_is_due_stands_still_for_nobody(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=4, streaming={**SETTINGS, "num_fragments": 1, "delay": 7})
    step, committed = rig.pool.step, asyncio.Event()

    def note(report: object) -> None:
        rig.overseer.reports.append(report)
        committed.set()

    async def last_step_waits(*args: object, inner_step: int, position: float) -> object:
        if inner_step > H and inner_step % H == 7:
            await committed.wait()
        if inner_step % H == 0:
            committed.clear()
        return await step(*args, inner_step=inner_step, position=position)

    rig.overseer.committed, rig.pool.step = note, last_step_waits
    await asyncio.wait_for(rig.run(), 20.0)
    rig.audit_the_end()
    assert [report.wait_s for report in rig.overseer.reports[:-1]] == [0.0] * 3
    assert rig.overseer.reports[-1].wait_s > 0.0


# Where in the first rounds something happens, counted in waits of the pool, the feed and the coordinator.
@pytest.mark.parametrize("place", range(2, 72, 3))
@pytest.mark.parametrize(
    "what", [Happening.BLINK, Happening.BLINK_WITH_COMMITS, Happening.EVICTION, Happening.DEMOTION]
)
async def test_work_of_a_lost_membership_is_never_handed_in_after_the_next(
    hasher: Hasher, place: int, what: Happening
) -> None:
    rig = Rig(hasher, [NOTHING] * place + [what], outer_steps=9, streaming=SETTINGS)
    await rig.run()
    rig.audit_the_end()
    assert rig.state.live.pins == 1, "only the workers' base is pinned"


@pytest.mark.parametrize("place", range(2, 72, 3))
@pytest.mark.parametrize("times", [1, 2, 5])
async def test_work_of_a_missed_round_stays_in_its_fragment_and_its_samples_go_with_the_next_round(
    hasher: Hasher, place: int, times: int
) -> None:
    rig = Rig(hasher, [NOTHING] * place + [Happening.MISSED_ROUND] * times, outer_steps=12, streaming=SETTINGS)
    await rig.run()
    rig.audit_the_end()  # each payload is the work since its fragment was last in a commit
    assert samples_of(rig) == list(range(len(samples_of(rig)))), "no sample is lost, or trained twice"
    assert rig.state.live.pins == 1


async def test_who_keeps_the_others_waiting_hands_in_what_it_has_and_goes_on_with_the_global_step(
    hasher: Hasher,
) -> None:
    rig = Rig(hasher, outer_steps=8, patience=0.0, streaming=SETTINGS)
    rig.overseer.is_awaited = True
    await rig.run()
    rig.audit_the_end()
    first, *later = [len(commit.samples) for commit in rig.commits]
    assert first == H // P * BATCH
    assert all(num_samples < H // P * BATCH for num_samples in later)
    assert [report.inner_step for report in rig.overseer.reports] == [H // P * turn for turn in range(1, 9)]


async def test_workers_judge_the_shared_parameters_and_get_their_own_back(hasher: Hasher) -> None:
    rig = Rig(hasher, outer_steps=3, streaming={**SETTINGS, "keep": 0.5})
    judged = []

    async def landed(_report: object) -> None:
        own = rig.pool.local.clone()
        judged.append((await rig.values.judge_anchor()).loss == float(anchor_of(rig).sum()))
        assert torch.equal(rig.pool.local, own)
        assert not torch.equal(own, anchor_of(rig))

    rig.overseer.landed = landed
    rig._audit = lambda *_: None  # what was trained since when is forgotten with the whole load
    await rig.run()
    assert judged == [True] * 3
