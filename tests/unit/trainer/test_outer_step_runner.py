# SPDX-License-Identifier: Apache-2.0
"""Rounds between the mailbox and the outer state, with real communicators on loopback."""

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from isthmus.collective.core.types import Epoch, OuterStep, RoundKey
from isthmus.collective.errors import NonFiniteInput, OperationAborted
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.values import Size
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer import ANCHOR, Result
from isthmus.optim.sparseloco import SparseLoCo
from isthmus.optim.streaming import Streaming
from tests.unit.trainer.rig import Site, has_the_bits_of_its_manifest, numbers, outer_state, sites_of_a_new_run, view_of


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=2048)
    yield threads
    threads.close()


def key(outer_step: int, epoch: int = 1, fragment: int = 0) -> RoundKey:
    return RoundKey(Epoch(epoch), OuterStep(outer_step), fragment)


async def exchange(
    sites: Sequence[Site], outer_step: int, *, epoch: int = 1, weights: Sequence[float] = (), fragment: int = 0
) -> list[bytes]:
    view = view_of(sites, epoch, outer_step)
    for site in sites:
        site.offer()
    made = await asyncio.gather(
        *(
            site.runner.exchange(view, key(outer_step, epoch, fragment), weights[rank] if weights else 1.0)
            for rank, site in enumerate(sites)
        )
    )
    return [item.digest for item in made]


async def commit(
    sites: Sequence[Site], outer_step: int, *, epoch: int = 1, weights: Sequence[float] = (), fragment: int = 0
) -> Held:
    digests = await exchange(sites, outer_step, epoch=epoch, weights=weights, fragment=fragment)
    assert len(set(digests)) == 1
    held = Held(OuterStep(outer_step + 1), digests[0])
    for site in sites:
        await site.runner.install_staged(key(outer_step, epoch, fragment), held, final=False)
    return held


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "e3m0"])
async def test_members_stage_the_same_digest_and_install_the_same_bits(hasher: Hasher, codec: str) -> None:
    async with sites_of_a_new_run(3, hasher, codec=codec) as sites:
        founded = sites[0].state.held()
        digests = await exchange(sites, 0, weights=[1.0, 2.0, 0.0])
        assert len(set(digests)) == 1
        assert all(site.state.held() == founded for site in sites)
        held = Held(OuterStep(1), digests[0])
        for site in sites:
            await site.runner.install_staged(key(0), held, final=True)
        assert all(torch.equal(site.state.live.tensors[ANCHOR], sites[0].state.live.tensors[ANCHOR]) for site in sites)
        assert all(site.runner.take_outcomes()[0].after[ANCHOR] is site.state.live.tensors[ANCHOR] for site in sites)
        assert not any(site.runner.take_outcomes() for site in sites), "the state before it is not kept"
        assert [site.exchanged for site in sites] == [[key(0)]] * 3


async def test_the_committed_state_is_one_outer_step_on_the_weighted_mean(hasher: Hasher) -> None:
    outer = DiLoCo(inner_steps=4)
    async with sites_of_a_new_run(2, hasher) as sites:
        await commit(sites, 0, weights=[3.0, 1.0])
        mean = (3.0 * sites[0].mailbox + sites[1].mailbox) / 4.0
        before = outer.init(outer_state(hasher).fragments[0], numbers(99))
        result = Result(value=mean, members=("a", "b"), weight_sum=4.0, weights=(3.0, 1.0))
        expected = outer.step(outer.plan(4)[0], result, before)[ANCHOR]
        assert torch.allclose(sites[0].state.live.tensors[ANCHOR], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "e3m0"])
async def test_a_learner_replays_the_recorded_rounds_to_the_same_bits(hasher: Hasher, codec: str) -> None:
    learner = outer_state(hasher)
    await learner.found(numbers(99))
    async with sites_of_a_new_run(3, hasher, codec=codec) as sites:
        # The third round is one of fresh members that have not trained: no weight at all.
        for step, weights in enumerate(([0.1, 0.2, 0.7], [1e15, 0.0, 1e-3], [0.0] * 3, [64.0] * 3)):
            held = await commit(sites, step, weights=weights)
            entries = [site.log.get(OuterStep(step + 1)) for site in sites]
            assert entries[0] is not None
            assert entries == [entries[0]] * 3
            assert await learner.replay(entries[0]) == held
        assert torch.equal(learner.live.tensors[ANCHOR], sites[1].state.live.tensors[ANCHOR])


@pytest.mark.parametrize(("num_missed", "most"), [(1, 1 / 30), (4, 1 / 7.5), (6, 1 / 5), (8, 1 / 3.75)])
async def test_a_missed_step_costs_a_learner_a_byte_of_eight_an_element_of_its_fragment(
    hasher: Hasher, num_missed: int, most: float
) -> None:
    table = FragmentTable.from_named_shapes((f"layer{number}", (60, 50)) for number in range(8))
    outer = Streaming(inner_steps=8, num_fragments=4)
    learner = outer_state(hasher, outer, table.numel, table)
    await learner.found(numbers(99, table.numel))
    async with sites_of_a_new_run(2, hasher, outers=[outer] * 2, codec="int8", table=table) as sites:
        replayed = 0
        for step in range(num_missed):
            held = await commit(sites, step, fragment=(step + 1) % 4)
            entry = sites[0].log.get(held.outer_step)
            assert await learner.replay(entry) == held
            replayed += entry.nbytes
    assert num_missed / 32 <= replayed / learner.live.manifest.nbytes < most


async def test_the_same_payload_runs_again_in_the_next_view_after_a_member_was_lost(hasher: Hasher) -> None:
    async with sites_of_a_new_run(3, hasher) as sites:
        payloads = [site.mailbox.clone() for site in sites]
        view = view_of(sites)
        first, second, third = sites
        for site in sites:
            site.offer()
        runs = [asyncio.ensure_future(site.runner.exchange(view, key(0), 1.0)) for site in (first, second)]
        await asyncio.sleep(0)
        await third.communicator.close()
        for site in (first, second):
            site.runner.discard_staged(key(0))
        next_view = view_of([first, second], epoch=2)
        await asyncio.gather(*(site.runner.install_view(next_view) for site in (first, second)))
        for run in runs:
            with pytest.raises(OperationAborted):
                await run
        assert all(torch.equal(site.mailbox, payload) for site, payload in zip(sites, payloads, strict=True))
        await commit([first, second], 0, epoch=2)
        assert torch.equal(first.state.live.tensors[ANCHOR], second.state.live.tensors[ANCHOR])
        assert all(torch.equal(site.mailbox, payload) for site, payload in zip(sites, payloads, strict=True))
        assert third.state.held() == Held(OuterStep(0), third.state.live.manifest.digest)


async def test_what_an_aborted_round_staged_is_never_installed(hasher: Hasher) -> None:
    async with sites_of_a_new_run(2, hasher) as sites:
        digests = await exchange(sites, 0)
        for site in sites:
            site.runner.discard_staged(key(0))
        with pytest.raises(AssertionError, match="nothing is staged"):
            await sites[0].runner.install_staged(key(0), Held(OuterStep(1), digests[0]), final=False)
        assert sites[0].log.get(OuterStep(1)) is None
        view = view_of(sites, epoch=2)
        await asyncio.gather(*(site.runner.install_view(view) for site in sites))
        assert (await commit(sites, 0, epoch=2)).digest == digests[0]


async def test_an_exchange_that_is_cancelled_twice_while_it_stages_is_over_when_it_returns(hasher: Hasher) -> None:
    loop = asyncio.get_running_loop()
    has_begun, may_end = asyncio.Event(), threading.Event()

    class Slow(DiLoCo):
        def step(self, *args, **kwargs):
            loop.call_soon_threadsafe(has_begun.set)
            may_end.wait(30.0)
            return DiLoCo.step(self, *args, **kwargs)

    outers = [Slow(inner_steps=4), DiLoCo(inner_steps=4)]
    async with sites_of_a_new_run(2, hasher, outers=outers) as sites:
        view = view_of(sites)
        for site in sites:
            site.offer()
        slow, quick = (asyncio.ensure_future(site.runner.exchange(view, key(0), 1.0)) for site in sites)
        digest = (await quick).digest
        await has_begun.wait()
        try:
            for _ in range(2):
                slow.cancel()
                await asyncio.sleep(0)
            assert not slow.done()
        finally:
            may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await slow
        for site in sites:
            site.runner.discard_staged(key(0))
        next_view = view_of(sites, epoch=2)
        await asyncio.gather(*(site.runner.install_view(next_view) for site in sites))
        assert (await commit(sites, 0, epoch=2)).digest == digest
        assert all(has_the_bits_of_its_manifest(site.state.live) for site in sites)


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_a_fragment_without_elements_is_exchanged_like_any_other(hasher: Hasher, codec: str) -> None:
    # Found before: a layer whose tensors are all empty ended every member at its first exchange.
    table = FragmentTable.from_named_shapes([("layers.0.w", (2, 3)), ("layers.1.w", (0, 3))])
    outers = [Streaming(inner_steps=4, num_fragments=2, delay=0) for _ in range(2)]
    async with sites_of_a_new_run(2, hasher, outers=outers, codec=codec, table=table) as sites:
        for step in range(4):
            await commit(sites, step)
        assert all(has_the_bits_of_its_manifest(site.state.live) for site in sites)


async def test_a_payload_that_is_not_finite_is_told_before_anything_is_sent(hasher: Hasher) -> None:
    async with sites_of_a_new_run(1, hasher) as sites:
        sites[0].mailbox[17] = math.nan
        with pytest.raises(NonFiniteInput):
            await exchange(sites, 0)
        assert sites[0].state.held().outer_step == 0
        assert not sites[0].exchanged


async def test_numbers_too_large_to_be_squared_still_make_votes_that_can_be_read(hasher: Hasher) -> None:
    # Found before: of a gather their size was infinite, and the coordinator refused the votes of all who had seen them.
    outers = [SparseLoCo(inner_steps=4, dense_steps=0, topk=4096) for _ in range(3)]
    async with sites_of_a_new_run(3, hasher, outers=outers) as sites:
        sites[0].mailbox.fill_(1e25)
        view = view_of(sites)
        for site in sites:
            site.offer()
        made = await asyncio.gather(*(site.runner.exchange(view, key(0), 1.0) for site in sites))
        for staged in made:
            assert msgspec.convert(staged.sizes, tuple[Size, ...]) == staged.sizes
            assert staged.sizes[0] > 1e6 * max(staged.sizes[1:])


async def test_a_peer_alone_trains_like_any_other(hasher: Hasher) -> None:
    async with sites_of_a_new_run(1, hasher) as sites:
        for step in range(3):
            await commit(sites, step, weights=[float(step)])
        assert sites[0].log.span == range(1, 4)
