# SPDX-License-Identifier: Apache-2.0
"""What an all-reduce tells of the members' parts: how large their numbers were, and with which weights it counted."""

import asyncio

import pytest
import torch

from isthmus.collective import Epoch, OuterStep, RoundKey

NUMEL = 100_000


def key(step=0):
    return RoundKey(Epoch(1), OuterStep(step), 0)


async def reduce_all(sites, parts, weights, *, told=None, **more):
    outs = [torch.empty_like(part) for part in parts]
    stats = await asyncio.gather(
        *(
            site.communicator.all_reduce(key(), part, out=out, weight=weight, told=told, **more)
            for site, part, out, weight in zip(sites, parts, outs, weights, strict=True)
        )
    )
    return outs, stats


def noise(rank, size):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * size


@pytest.mark.parametrize("codec", ["raw", "int8", "bf16", "e3m0"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
async def test_every_member_sees_how_large_each_part_was(sites_running, world_size, codec):
    sizes = [1.0, 1000.0, 0.5, 2.0][:world_size]
    async with sites_running(world_size) as sites:
        _, stats = await reduce_all(
            sites, [noise(rank, size) for rank, size in enumerate(sizes)], [1.0] * world_size, codec=codec
        )
    for stat in stats:
        assert stat.sizes == pytest.approx(sizes, rel=0.2 if codec == "e3m0" else 0.03)


async def test_the_members_of_a_ring_see_the_part_of_the_one_before_them_and_their_own(sites_running):
    async with sites_running(4) as sites:
        _, stats = await reduce_all(sites, [noise(rank, 1.0 + rank) for rank in range(4)], [1.0] * 4, plan="ring")
    for rank, stat in enumerate(stats):
        seen = {other for other, size in enumerate(stat.sizes) if size > 0.0}
        assert len(seen) == 2
        assert rank in seen
        assert all(stat.sizes[other] == pytest.approx(1.0 + other, rel=0.05) for other in seen)


async def test_numbers_too_large_to_be_squared_are_as_large_as_can_be_said(sites_running):
    async with sites_running(3) as sites:
        parts = [noise(0, 1.0), noise(1, 1.0), torch.full((NUMEL,), 1e30)]
        _, stats = await reduce_all(sites, parts, [1.0] * 3)
    assert all(stat.sizes[2] == pytest.approx(1e30) for stat in stats)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("world_size", [2, 3])
async def test_weights_that_are_agreed_on_count_whatever_a_member_says(sites_running, monkeypatch, world_size, codec):
    told = (1.0, 2.0, 5.0)[:world_size]
    parts = [noise(rank, 1.0) for rank in range(world_size)]
    async with sites_running(world_size) as sites:
        honest = sites[1].communicator._runner
        run = honest.run

        async def lying(key, members, rank, operation, **more):
            operation.weight = 100.0
            return await run(key, members, rank, operation, **more)

        monkeypatch.setattr(honest, "run", lying)
        outs, stats = await reduce_all(sites, parts, told, told=told, codec=codec)
    assert all(stat.weights == told for rank, stat in enumerate(stats) if rank != 1)
    expected = sum(part * weight for part, weight in zip(parts, told, strict=True)) / sum(told)
    # What the others add up; the liar does as it likes where it adds up itself.
    torch.testing.assert_close(outs[0][:1000], expected[:1000], rtol=0.03, atol=0.05)


async def test_weights_that_do_not_fit_are_refused_before_anything_is_sent(sites_running):
    async with sites_running(2) as sites:
        for told in ((1.0,), (2.0, 1.0)):
            with pytest.raises(ValueError, match="told"):
                await sites[0].communicator.all_reduce(key(), noise(0, 1.0), weight=1.0, told=told)
