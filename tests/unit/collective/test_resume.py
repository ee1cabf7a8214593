# SPDX-License-Identifier: Apache-2.0
"""An operation that was aborted and runs again among the same members does not send twice what it has."""

import asyncio

import pytest
import torch

from isthmus.collective import OperationAborted

NUMEL = 2_000_000
CHUNK = 16 << 10


async def aborted_half_way(sites, tensors, outs, view_of, until, codec, first_records):
    """Run until a quarter of the results is in place everywhere, then install the next view."""

    def record_into(rank):
        return lambda start, numel, wire: first_records[rank].append((start, numel, bytes(wire)))

    works = [
        asyncio.ensure_future(
            site.mean(x, out=out, codec=codec, resume=True, plan="butterfly", record=record_into(rank))
        )
        for rank, (site, x, out) in enumerate(zip(sites, tensors, outs, strict=True))
    ]
    await until(lambda: all(sum(numel for _, numel, _ in records) >= NUMEL // 4 for records in first_records))
    for site in sites:
        await site.communicator.install(view_of(sites, epoch=2))
    results = await asyncio.gather(*works, return_exceptions=True)
    assert all(isinstance(result, OperationAborted) for result in results)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("forgetful", [None, 1])
@pytest.mark.parametrize("in_place", [False, True])
async def test_what_was_reduced_is_not_sent_again_and_the_bits_are_the_same(
    sites_running, view_of, until, codec, forgetful, in_place
):
    async with sites_running(3, chunk_nbytes=CHUNK) as sites:
        tensors = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        kept = [tensor.clone() for tensor in tensors]
        outs = tensors if in_place else [torch.empty(NUMEL) for _ in tensors]
        first_records = [[] for _ in sites]
        await aborted_half_way(sites, tensors, outs, view_of, until, codec, first_records)
        assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, kept, strict=True))
        records = [[] for _ in sites]

        def again(rank):
            more = {"resume": rank != forgetful, "plan": "butterfly", "codec": codec, "epoch": 2}
            if rank == forgetful:  # other memory: nothing of the first attempt fits
                more["out"] = torch.empty(NUMEL)
            else:
                more["out"] = outs[rank]
            record = lambda start, numel, wire: records[rank].append((start, numel, bytes(wire)))  # noqa: E731
            return sites[rank].mean(tensors[rank], record=record, **more)

        stats = await asyncio.gather(*(again(rank) for rank in range(3)))
        whole, _ = await asyncio.gather(
            sites[0].mean(kept[0].clone(), out=torch.empty(NUMEL), codec=codec, plan="butterfly", epoch=2, step=1),
            asyncio.gather(
                *(
                    sites[rank].mean(kept[rank], out=torch.empty(NUMEL), codec=codec, plan="butterfly", epoch=2, step=1)
                    for rank in (1, 2)
                )
            ),
        )
    everything = sorted(records[0])
    assert all(sorted(record) == everything for record in records)  # each result once, the same bytes for all
    assert sum(numel for _, numel, _ in everything) == NUMEL
    if forgetful is None:
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert sum(stat.bytes_sent for stat in stats) < 0.95 * 3 * whole.bytes_sent
        for start, numel, wire in first_records[0]:
            assert (start, numel, wire) in everything


async def test_another_tensor_begins_from_nothing(sites_running, view_of, until):
    async with sites_running(2, chunk_nbytes=CHUNK) as sites:
        tensors = [torch.full((NUMEL,), 1.0) for _ in sites]
        outs = [torch.empty(NUMEL) for _ in sites]
        await aborted_half_way(sites, tensors, outs, view_of, until, "raw", [[], []])
        others = [torch.full((NUMEL,), 5.0) for _ in sites]
        works = (
            site.mean(x, out=out, epoch=2, plan="butterfly", resume=True)
            for site, x, out in zip(sites, others, outs, strict=True)
        )
        await asyncio.gather(*works)
    assert all(torch.equal(out, torch.full((NUMEL,), 5.0)) for out in outs)
