# SPDX-License-Identifier: Apache-2.0
"""What an all-reduce tells of the members' parts: how large their numbers were, and with which weights it counted."""

import asyncio
import math
import struct

import pytest
import torch

from isthmus.collective import Epoch, OuterStep, RoundKey
from isthmus.collective.core.types import HUGE
from isthmus.collective.rounds.buffers import RoundBuffers
from isthmus.collective.rounds.chunks import ChunkSend
from isthmus.collective.rounds.coded import CodedBuffers
from isthmus.collective.rounds.sizes import Sizes
from isthmus.collective.transport.wire import FrameType, pack

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


@pytest.mark.parametrize("codec", ["raw", "int8", "twobit"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
async def test_a_part_with_nan_is_as_large_as_can_be_said_where_the_round_goes_on(
    sites_running, monkeypatch, world_size, codec
):
    honest_pieces, last = ChunkSend.pieces, world_size - 1
    spoilt_type = FrameType.RESULT if world_size == 2 and codec == "raw" else FrameType.PART

    def spoilt(self, scratch):
        made, outbox = honest_pieces(self, scratch), self.owner
        if outbox.rank != last or self.type is not spoilt_type:
            return made
        payload = struct.pack("<f", math.nan) + made[1][4:]  # an element, or a scale
        return pack(outbox._header(self.type, len(payload), self.chunk), payload), memoryview(payload)

    parts = [noise(rank, 1.0) for rank in range(world_size)]
    async with sites_running(world_size) as sites:
        monkeypatch.setattr(ChunkSend, "pieces", spoilt)
        _, stats = await reduce_all(sites, parts, [10.0] * world_size, codec=codec, is_tolerant=True)
    for stat in stats[:-1]:
        assert stat.sizes[-1] == HUGE
        assert all(0.5 < size < 2.0 for size in stat.sizes[:-1]), stat.sizes


@pytest.mark.parametrize("codec", ["raw", "int8", "e3m0"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
async def test_a_part_that_makes_the_sum_overflow_is_as_large_as_can_be_said_where_the_round_goes_on(
    sites_running, world_size, codec
):
    parts = [noise(rank, 1.0) for rank in range(world_size - 1)] + [torch.full((NUMEL,), 3e38)]
    async with sites_running(world_size) as sites:
        outs, stats = await reduce_all(sites, parts, [10.0] * world_size, codec=codec, is_tolerant=True)
    for out, stat in zip(outs, stats, strict=True):
        assert torch.isfinite(out).all()
        assert stat.sizes[-1] == HUGE
    assert all(0.5 < size < 2.0 for stat in stats[:-1] for size in stat.sizes[:-1])


@pytest.mark.parametrize("weights", [(10.0, 20.0, 30.0), (10.0, 20.0, 0.0)])
@pytest.mark.parametrize(("codec", "value"), [("raw", 100.0), ("raw", math.nan), ("int8", 100.0)])
async def test_a_false_sum_that_a_root_gives_to_all_is_told_as_a_sum_and_not_as_a_part(
    sites_running, monkeypatch, codec, value, weights
):
    made_by = RoundBuffers if codec == "raw" else CodedBuffers
    finish = made_by.finish

    def falsify(self, chunk, weight_sum):
        finish(self, chunk, weight_sum)
        if self._rank == 2:
            self._out_part(chunk).fill_(value)
            if codec != "raw":
                self._codec.encode(self._out_part(chunk), self._results[chunk])

    monkeypatch.setattr(made_by, "finish", falsify)
    async with sites_running(3) as sites:
        _, stats = await reduce_all(sites, [noise(rank, 1.0) for rank in range(3)], weights, codec=codec)
    for stat in stats[:2]:
        assert all(0.5 < size < 2.0 for size in stat.sizes[: 3 if weights[2] else 2]), stat.sizes
        assert stat.sums == (0.0, 0.0, HUGE if math.isnan(value) else pytest.approx(value, rel=0.05))
    assert not any(stats[2].sums)


@pytest.mark.parametrize("is_sum", [False, True])
def test_who_sends_zeros_itself_says_all_the_same_whose_numbers_cannot_be_counted(is_sum):
    seen, zeros = Sizes(3, 0), torch.zeros(8)
    seen.saw_part(0, zeros)
    seen.saw_sum(1, torch.full((8,), 1e6), zeros)
    if is_sum:
        seen.saw_sum(2, torch.full((8,), math.nan), zeros)
    else:
        seen.saw_part(2, None)
    told = seen.sums() if is_sum else seen.by_rank()
    assert told == (0.0, 0.0, HUGE), "and of all others nothing, for want of a measure"


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_who_adds_nothing_up_sees_false_sums_too(sites_running, monkeypatch, codec):
    made_by = RoundBuffers if codec == "raw" else CodedBuffers
    own_part = made_by._own_part
    monkeypatch.setattr(
        made_by, "_own_part", lambda self, chunk: own_part(self, chunk) * (100.0 if self._rank == 1 else 1.0)
    )
    async with sites_running(3) as sites:
        _, stats = await reduce_all(sites, [noise(rank, 1.0)[:200] for rank in range(3)], [1.0] * 3, codec=codec)
    assert stats[0].roots == ((1, 0, 200),)
    for rank in (0, 2):
        assert stats[rank].sums == (0.0, pytest.approx(33.0, rel=0.3), 0.0)
        assert stats[rank].sizes[rank] == pytest.approx(1.0, rel=0.2)
        assert stats[rank].sizes[1] == stats[rank].sizes[2 - rank] == 0.0


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_a_part_that_is_large_in_one_slice_is_a_part_to_its_root_and_a_sum_to_all_others(sites_running, codec):
    parts = [noise(rank, 1.0) for rank in range(4)]
    parts[3][NUMEL // 4 + 1000 : NUMEL // 2 - 1000] *= 100.0  # in the slice of rank 1
    async with sites_running(4) as sites:
        _, stats = await reduce_all(sites, parts, [1.0] * 4, codec=codec)
    for rank in (0, 2):
        assert stats[rank].sizes == pytest.approx((1.0,) * 4, rel=0.05)
        assert stats[rank].sums == (0.0, pytest.approx(25.0, rel=0.1), 0.0, 0.0)
    assert stats[1].sizes == (*[pytest.approx(1.0, rel=0.05)] * 3, pytest.approx(100.0, rel=0.1))
    assert not any(stats[1].sums)


async def test_a_part_without_weight_has_no_size_since_it_is_in_no_sum(sites_running):
    async with sites_running(3) as sites:
        _, stats = await reduce_all(sites, [noise(rank, 10.0**rank) for rank in range(3)], [1.0, 2.0, 0.0])
    assert all(stat.sizes == pytest.approx((1.0, 10.0, 0.0), rel=0.03) for stat in stats)


async def test_an_honest_sum_is_nobodys_size_however_much_members_and_places_differ(sites_running):
    scale = torch.logspace(-3, 3, NUMEL)
    parts = [noise(rank, 10.0**rank) * scale for rank in range(4)]
    async with sites_running(4) as sites:
        _, stats = await reduce_all(sites, parts, [1.0, 2.0, 3.0, 4.0], codec="int8")
    for rank, stat in enumerate(stats):
        start = rank * NUMEL // 4
        true = [part[start : start + NUMEL // 4].square().mean().sqrt().item() for part in parts]
        assert stat.sizes == pytest.approx(true, rel=0.05)
        assert not any(stat.sums)


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
