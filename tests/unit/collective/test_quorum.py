# SPDX-License-Identifier: Apache-2.0
"""Rounds that do not wait for everybody."""

import asyncio

import pytest
import torch

from isthmus.collective import LeftBehind, OperationAborted
from isthmus.collective.core.quorum import Clerk, Quorum

TWO_AT_ONCE = Quorum(min_members=2, grace_s=0.0)


def test_the_clerk_waits_for_the_quorum_then_for_the_grace_and_decides_once():
    clerk = Clerk(Quorum(min_members=2, grace_s=5.0), world_size=4)
    clerk.on_ready(3, now=1.0)
    assert clerk.closed(100.0) is None
    clerk.on_ready(0, now=100.0)
    assert clerk.next_look == 105.0
    clerk.on_ready(1, now=104.0)
    assert clerk.closed(104.9) is None
    assert clerk.closed(105.0) == (0, 1, 3)
    clerk.on_ready(2, now=105.1)
    assert clerk.closed(106.0) == (0, 1, 3)


def test_nobody_waits_for_the_grace_when_all_are_there():
    clerk = Clerk(Quorum(min_members=1, grace_s=60.0), world_size=2)
    clerk.on_ready(0, now=0.0)
    clerk.on_ready(1, now=1.0)
    assert clerk.closed(1.0) == (0, 1)


def test_the_clerk_itself_is_always_in():
    clerk = Clerk(Quorum(min_members=1, grace_s=0.0), world_size=3)
    clerk.on_ready(1, now=0.0)
    assert clerk.closed(10.0) is None


def test_who_is_lost_before_the_decision_is_not_in_and_after_it_changes_nothing():
    clerk = Clerk(Quorum(min_members=2, grace_s=1.0), world_size=3)
    for rank in (0, 1):
        clerk.on_ready(rank, now=0.0)
    clerk.on_gone(1)
    assert clerk.closed(9.0) is None
    clerk.on_ready(2, now=9.0)
    assert clerk.closed(10.0) == (0, 2)
    clerk.on_gone(2)
    assert clerk.closed(11.0) == (0, 2)


@pytest.mark.parametrize(("least", "grace_s"), [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_a_quorum_that_means_nothing_is_refused(least, grace_s):
    with pytest.raises(ValueError, match="quorum"):
        Quorum(min_members=least, grace_s=grace_s)


async def test_a_round_closes_without_the_straggler_who_is_told_so_and_takes_part_in_the_next(sites_running):
    async with sites_running(3) as sites:
        tensors = [torch.full((1000,), float(rank)) for rank in range(3)]
        outs = [torch.empty(1000) for _ in sites]
        early = [sites[rank].mean(tensors[rank], out=outs[rank], quorum=TWO_AT_ONCE) for rank in (0, 1)]
        stats = await asyncio.gather(*early)
        assert all(len(stat.members) == 2 for stat in stats)
        assert all(torch.equal(outs[rank], torch.full((1000,), 0.5)) for rank in (0, 1))
        with pytest.raises(LeftBehind) as late:
            await sites[2].mean(tensors[2], out=outs[2], quorum=TWO_AT_ONCE)
        assert late.value.members == tuple(site.me.peer_id for site in sites[:2])
        patient = Quorum(min_members=3, grace_s=0.0)
        await asyncio.gather(
            *(site.mean(x, out=out, step=1, quorum=patient) for site, x, out in zip(sites, tensors, outs, strict=True))
        )
    assert all(torch.equal(out, torch.ones(1000)) for out in outs)


async def test_a_member_within_the_grace_is_in(sites_running, until):
    quorum = Quorum(min_members=1, grace_s=30.0)
    async with sites_running(2) as sites, asyncio.TaskGroup() as tasks:
        outs = [torch.empty(10), torch.empty(10)]
        first = tasks.create_task(sites[0].mean(torch.zeros(10), out=outs[0], quorum=quorum))
        await until(lambda: sites[1].communicator.bytes_received)
        stats = await sites[1].mean(torch.ones(10), out=outs[1], quorum=quorum)
        assert (await first).weight_sum == stats.weight_sum == 2.0
    assert torch.equal(outs[0], outs[1])


async def test_another_quorum_is_a_named_error(sites_running):
    async with sites_running(2) as sites:
        results = await asyncio.gather(
            sites[0].mean(torch.ones(10), quorum=TWO_AT_ONCE),
            sites[1].mean(torch.ones(10), quorum=Quorum(min_members=2, grace_s=1.0)),
            return_exceptions=True,
        )
    assert [getattr(result, "field", None) for result in results] == ["plan", "plan"]


async def test_the_loss_of_the_clerk_ends_the_round_with_its_name(sites_running, until):
    async with sites_running(3) as sites:
        quorum = Quorum(min_members=3, grace_s=0.0)
        running = [asyncio.ensure_future(site.mean(torch.ones(10), quorum=quorum)) for site in sites[:2]]
        await until(lambda: sites[2].communicator.bytes_received)
        await sites[0].close()
        results = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(results[1], OperationAborted)
    assert results[1].suspects == (sites[0].me.peer_id,)
