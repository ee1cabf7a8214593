# SPDX-License-Identifier: Apache-2.0
"""Every operation gives the values it promises, for every dtype, size and number of members, whatever is in flight.

Expected values are computed apart: with numpy in int64 or float64, from numbers small enough to be exact there.
"""

import asyncio
import itertools
import math
import random

import numpy as np
import pytest
import torch

from isthmus.collective import Epoch, NonFiniteInput, OperationAborted, OuterStep, PlanMismatch, RoundKey, RoundRefused
from isthmus.collective.rounds.buffers import DTYPES, OPS

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMBINATIONS = [
    (dtype, op) for dtype, op in itertools.product(FLOATS + INTEGERS, OPS) if dtype in FLOATS or op != "mean"
]
NUMPY = {
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def key(step=0, fragment=0, epoch=1):
    return RoundKey(Epoch(epoch), OuterStep(step), fragment)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(first, second):
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(bits(first), bits(second))


def numbers(numel, rank):
    """Whole numbers from -3 to 9, other ones on every member."""
    return (np.arange(numel, dtype=np.int64) * 7 + rank * 5 + np.arange(numel) // 13 * rank) % 13 - 3


def tensor_of(values, dtype):
    values = values.astype(NUMPY.get(dtype, values.dtype))
    return torch.empty(len(values), dtype=dtype).copy_(torch.from_numpy(values))


def expected(op, parts, dtype):
    """From int64 parts; integers wrap around, quotients are made in float64 and rounded once."""
    if dtype is torch.uint8 and op in ("min", "max"):
        parts = [part % 256 for part in parts]
    stacked = np.stack(parts)
    match op:
        case "sum":
            values = stacked.sum(0)
        case "mean":
            values = stacked.sum(0) / len(parts)
        case "min":
            values = stacked.min(0)
        case _:
            values = stacked.max(0)
    return tensor_of(values, dtype)


async def together(works):
    return await asyncio.gather(*works)


# ------------------------------------------------------------------------------------ all_reduce: values


def test_the_list_of_dtypes_is_whole():
    assert set(DTYPES) == {*FLOATS, *INTEGERS}
    assert len(COMBINATIONS) == 4 * 4 + 5 * 3


@pytest.mark.parametrize(
    ("world_size", "numels"),
    [
        (1, (0, 1, 1000)),
        (2, (0, 1, 5, 257, 70_001)),
        (3, (0, 1, 2, 1000, 70_001)),
        (4, (3, 20_011)),
        (8, (5003,)),
        (16, (1009,)),
    ],
)
async def test_every_dtype_and_op_is_exact_with_all_in_flight_in_other_orders_in_place_and_not(
    sites_running, world_size, numels
):
    combinations = COMBINATIONS if world_size < 16 else COMBINATIONS[::5]  # then every op and most dtypes
    cases = list(enumerate(itertools.product(combinations, numels)))
    async with sites_running(world_size, chunk_nbytes=64 << 10) as sites:

        async def run(site, rank, fragment, dtype, op, numel):
            tensor = tensor_of(numbers(numel, rank), dtype)
            is_in_place = (rank + fragment) % 2 == 0
            out = tensor if is_in_place else torch.full_like(tensor, 77)
            await site.communicator.all_reduce(
                key(0, fragment), tensor, op=op, out=None if is_in_place else out, deadline_s=55.0
            )
            if not is_in_place:
                assert same(tensor, tensor_of(numbers(numel, rank), dtype))
            return fragment, out

        async def run_all(rank, site):
            shuffled = random.Random(rank).sample(cases, len(cases))
            return dict(await together(run(site, rank, n, *combination, numel) for n, (combination, numel) in shuffled))

        results = await together(run_all(rank, site) for rank, site in enumerate(sites))
    for fragment, ((dtype, op), numel) in cases:
        value = expected(op, [numbers(numel, rank) for rank in range(world_size)], dtype)
        for rank in range(world_size):
            assert same(results[rank][fragment], value), (dtype, op, numel, rank)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_rounded_sums_are_near_the_true_ones_and_equal_on_all_members(sites_running, world_size, dtype, op):
    parts = [torch.randn(30_000, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(world_size)]
    outs = [torch.empty_like(part) for part in parts]
    async with sites_running(world_size) as sites:
        await together(
            site.communicator.all_reduce(key(), part, op=op, out=out)
            for site, part, out in zip(sites, parts, outs, strict=True)
        )
    assert all(same(out, outs[0]) for out in outs)
    exact = sum(part.double() for part in parts) / (world_size if op == "mean" else 1)
    largest = sum(part.double().abs() for part in parts)
    # Half precision is rounded once, at the end; the others at each of at most three additions and a division.
    roundings = 0.501 if dtype in (torch.bfloat16, torch.float16) else 4.0
    bound = largest if roundings > 1 else exact.abs().clamp_min(torch.finfo(dtype).tiny)
    assert bool(((outs[0].double() - exact).abs() <= roundings * torch.finfo(dtype).eps * bound).all())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "op", "large", "small", "value"),
    [
        (torch.bfloat16, "sum", 256.0, 0.75, {2: 256.0, 3: 258.0}),
        (torch.float16, "sum", 2048.0, 0.75, {2: 2048.0, 3: 2050.0}),
        (torch.float16, "mean", 60_000.0, 60_000.0, {2: 60_000.0, 3: 60_000.0}),
    ],
)
async def test_half_precision_is_summed_wider_and_rounded_once(
    sites_running, world_size, dtype, op, large, small, value
):
    parts = [torch.full((1000,), large if rank == 0 else small, dtype=dtype) for rank in range(world_size)]
    async with sites_running(world_size) as sites:
        await together(
            site.communicator.all_reduce(key(), part, op=op) for site, part in zip(sites, parts, strict=True)
        )
    assert all(same(part, torch.full((1000,), value[world_size], dtype=dtype)) for part in parts)


@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_a_half_precision_sum_that_overflows_aborts_without_a_suspect_and_leaves_the_input(
    sites_running, outcomes, world_size
):
    parts = [torch.full((1000,), 40_000.0, dtype=torch.float16) for _ in range(world_size)]
    async with sites_running(world_size) as sites:
        errors = await outcomes(
            site.communicator.all_reduce(key(), part, op="sum", weight=2.0)
            for site, part in zip(sites, parts, strict=True)
        )
    assert all(isinstance(error, OperationAborted) and error.suspects == () for error in errors)
    assert all(same(part, torch.full((1000,), 40_000.0, dtype=torch.float16)) for part in parts)


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_a_member_alone_whose_weight_overflows_has_finite_numbers_all_the_same(sites_running, outcome, codec):
    async with sites_running(1) as sites:
        error = await outcome(
            sites[0].communicator.all_reduce(key(), torch.full((512,), 3e38), op="sum", weight=2.0, codec=codec)
        )
    assert isinstance(error, OperationAborted)
    assert error.suspects == ()


@pytest.mark.parametrize("world_size", [2, 3])
async def test_large_integers_keep_every_digit_and_sums_wrap_around(sites_running, world_size):
    large = 2**62 + 12345
    async with sites_running(world_size) as sites:
        cases = [("sum", (large * world_size + 2**63) % 2**64 - 2**63), ("min", large), ("max", large)]
        for step, (op, value) in enumerate(cases):
            parts = [torch.full((300,), large, dtype=torch.int64) for _ in sites]
            await together(
                site.communicator.all_reduce(key(step), part, op=op) for site, part in zip(sites, parts, strict=True)
            )
            assert all(part.unique().tolist() == [value] for part in parts)
        parts = [torch.full((300,), 100, dtype=torch.int8) for _ in sites]
        await together(
            site.communicator.all_reduce(key(9), part, op="sum") for site, part in zip(sites, parts, strict=True)
        )
        assert all(part.unique().tolist() == [(100 * world_size + 128) % 256 - 128] for part in parts)


@pytest.mark.parametrize("world_size", [2, 3])
async def test_extremes_may_be_infinite_and_nan_is_passed_on_alike_to_all(sites_running, world_size):
    parts = [torch.tensor([1.0, math.inf, -math.inf, 2.0, -0.0]) + rank for rank in range(world_size)]
    parts[-1][0] = math.nan
    async with sites_running(world_size) as sites:
        for step, op in enumerate(["min", "max"]):
            outs = [torch.empty(5) for _ in sites]
            await together(
                site.communicator.all_reduce(key(step), part, op=op, out=out)
                for site, part, out in zip(sites, parts, outs, strict=True)
            )
            assert all(same(out, outs[0]) for out in outs)
            assert math.isnan(outs[0][0])
            last = 0.0 if op == "min" else world_size - 1.0
            assert outs[0][1:].tolist() == [math.inf, -math.inf, 2.0 + last, last]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
async def test_weights_count_for_sums_and_means(sites_running, dtype, world_size):
    weights = [0.5, 1.5, 0.0, 2.0][:world_size]
    ours = [numbers(3000, rank) for rank in range(world_size)]
    total = sum(weight * values for weight, values in zip(weights, ours, strict=True))
    async with sites_running(world_size) as sites:
        for step, (op, value) in enumerate([("sum", total), ("mean", total / sum(weights))]):
            parts = [tensor_of(values, dtype) for values in ours]
            stats = await together(
                site.communicator.all_reduce(key(step), part, op=op, weight=weight)
                for site, part, weight in zip(sites, parts, weights, strict=True)
            )
            assert all(same(part, torch.from_numpy(value).to(dtype)) for part in parts)
            assert all(stat.weights == tuple(weights) and stat.weight_sum == sum(weights) for stat in stats)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_no_weight_at_all_gives_zeros(sites_running, world_size, codec):
    async with sites_running(world_size) as sites:
        for step, op in enumerate(["sum", "mean"]):
            parts = [torch.full((1000,), 5.0) for _ in sites]
            await together(
                site.communicator.all_reduce(key(step), part, op=op, weight=0.0, codec=codec)
                for site, part in zip(sites, parts, strict=True)
            )
            assert all(not part.any() for part in parts)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_a_codec_sums_as_well_as_it_averages(sites_running, world_size, op):
    parts = [torch.randn(50_000, generator=torch.Generator().manual_seed(n)) for n in range(world_size)]
    exact = sum(parts) / (world_size if op == "mean" else 1)
    async with sites_running(world_size) as sites:
        await together(
            site.communicator.all_reduce(key(), part, op=op, codec="int8")
            for site, part in zip(sites, parts, strict=True)
        )
    assert all(same(part, parts[0]) for part in parts)
    assert (parts[0] - exact).norm() / exact.norm() <= 1.1e-2


# ------------------------------------------------------------------------------------ all_reduce: shapes and kinds


@pytest.mark.parametrize("world_size", [2, 3])
async def test_arrays_and_tensors_of_any_shape_take_part_in_one_round(sites_running, world_size):
    parts = [np.full((3, 5, 7), 2.0, dtype=np.float32), torch.full((105,), 4.0), torch.full((7, 15), 6.0)][:world_size]
    async with sites_running(world_size) as sites:
        await together(
            site.communicator.all_reduce(key(), part, op="sum") for site, part in zip(sites, parts, strict=True)
        )
    assert [tuple(part.shape) for part in parts] == [(3, 5, 7), (105,), (7, 15)][:world_size]
    assert all(np.array_equal(part, np.full(part.shape, {2: 6.0, 3: 12.0}[world_size])) for part in parts)


async def test_single_numbers_and_parameters_that_want_gradients_are_reduced_in_place(sites_running):
    async with sites_running(3) as sites:
        scalars = [torch.tensor(float(rank)) for rank in range(3)]
        weights = [torch.nn.Parameter(torch.full((4, 4), float(rank))) for rank in range(3)]
        await together(site.communicator.all_reduce(key(0), scalars[n], op="sum") for n, site in enumerate(sites))
        await together(site.communicator.all_reduce(key(1), weights[n], op="max") for n, site in enumerate(sites))
    assert [scalar.item() for scalar in scalars] == [3.0] * 3
    assert all(torch.equal(weight, torch.full((4, 4), 2.0)) and weight.requires_grad for weight in weights)


@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_arrays_without_elements_take_part_too(sites_running, world_size):
    async with sites_running(world_size) as sites:
        await together(site.communicator.all_reduce(key(0), np.zeros(0, np.float32)) for site in sites)
        await together(
            site.communicator.all_reduce(key(1), np.zeros((3, 0), np.int16), op="max", out=np.zeros((0, 2), np.int16))
            for site in sites
        )
        results = await together(site.communicator.all_gather(key(2), np.zeros(0, np.float32)) for site in sites)
    assert all([part.numel() for part in parts] == [0] * world_size for parts, _ in results)


async def test_the_output_may_have_another_shape_and_be_an_array(sites_running):
    async with sites_running(2) as sites:
        outs = [np.zeros((2, 3), dtype=np.int32) for _ in sites]
        await together(
            site.communicator.all_reduce(key(), torch.arange(6, dtype=torch.int32), op="sum", out=out)
            for site, out in zip(sites, outs, strict=True)
        )
    assert all(np.array_equal(out, [[0, 2, 4], [6, 8, 10]]) for out in outs)


# ------------------------------------------------------------------------------------ gather, broadcast


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_all_gather_brings_equal_parts_in_the_order_of_ranks(sites_running, dtype, world_size):
    async with sites_running(world_size, chunk_nbytes=64 << 10) as sites:
        ours = [tensor_of(numbers(40_001, rank), dtype) for rank in range(world_size)]
        results = await together(
            site.communicator.all_gather(key(), part) for site, part in zip(sites, ours, strict=True)
        )
    for parts, stats in results:
        assert len(parts) == world_size == len(stats.members)
        assert all(same(part, own) for part, own in zip(parts, ours, strict=True))


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (1, 257, 70_000), (5, 0, 0, 1), (0, 1, 2, 3, 4, 5, 6, 7)])
async def test_all_gather_takes_parts_of_unequal_sizes_into_the_callers_memory(sites_running, sizes):
    async with sites_running(len(sizes)) as sites:
        ours = [tensor_of(numbers(size, rank), torch.float32) for rank, size in enumerate(sizes)]
        outs = [torch.full((sum(sizes),), math.nan) for _ in sites]
        results = await together(
            site.communicator.all_gather(key(), part, sizes=sizes, out=out)
            for site, part, out in zip(sites, ours, outs, strict=True)
        )
    for (parts, _), out in zip(results, outs, strict=True):
        assert same(out, torch.cat(ours))
        assert all(same(part, own) for part, own in zip(parts, ours, strict=True))
        assert all(part.data_ptr() >= out.data_ptr() for part in parts if part.numel())


async def test_sizes_that_only_their_owners_know_are_gathered_first(sites_running):
    async with sites_running(3) as sites:

        async def run(rank, site):
            own = torch.full((10 * rank,), float(rank))
            sizes, _ = await site.communicator.all_gather(key(0), torch.tensor([own.numel()]))
            parts, _ = await site.communicator.all_gather(key(1), own, sizes=[int(size) for size in sizes])
            return [part.tolist() for part in parts]

        results = await together(run(rank, site) for rank, site in enumerate(sites))
    assert results == [[[], [1.0] * 10, [2.0] * 20]] * 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
async def test_broadcast_brings_every_roots_tensor_to_all(sites_running, world_size):
    async with sites_running(world_size, chunk_nbytes=64 << 10) as sites:
        for root, numel, dtype in itertools.product(range(world_size), [0, 1, 40_001], [torch.float32, torch.uint8]):
            given = tensor_of(numbers(numel, root), dtype)
            tensors = [given.clone() if rank == root else torch.full_like(given, 77) for rank in range(world_size)]
            fragment = 10 * numel % 101 + (dtype is torch.uint8)
            await together(
                site.communicator.broadcast(key(root, fragment), tensor, root=sites[root].peer_id)
                for site, tensor in zip(sites, tensors, strict=True)
            )
            assert all(same(tensor, given) for tensor in tensors)


async def test_pairs_exchange_under_one_key(sites_running):
    partners = {0: 3, 3: 0, 1: 2, 2: 1}
    async with sites_running(5, chunk_nbytes=64 << 10) as sites:
        for step, numel in enumerate([0, 1, 50_001]):
            ours = [tensor_of(numbers(numel, rank), torch.int64) for rank in range(4)]
            outs = [torch.full_like(own, 77) for own in ours]
            stats = await together(
                sites[rank].communicator.exchange(key(step), ours[rank], out=outs[rank], partner=sites[other].peer_id)
                for rank, other in partners.items()
            )
            assert all(same(outs[rank], ours[other]) for rank, other in partners.items())
            assert all(len(stat.members) == 2 for stat in stats)


async def test_a_barrier_waits_for_every_member(sites_running, until):
    async with sites_running(3) as sites:
        early = [asyncio.ensure_future(site.communicator.barrier(key())) for site in sites[:2]]
        # Whatever they tell each other has arrived: a later round of the two is through.
        await together(
            sites[n].communicator.exchange(key(1), torch.ones(9), out=torch.empty(9), partner=sites[1 - n].peer_id)
            for n in range(2)
        )
        assert not any(task.done() for task in early)
        assert sites[2].communicator.is_awaited()
        await sites[2].communicator.barrier(key())
        await together(early)


# ------------------------------------------------------------------------------------ several at once, keys


async def test_64_operations_of_all_kinds_are_in_flight_and_each_ends_with_its_own_values(sites_running):
    async with sites_running(3, chunk_nbytes=64 << 10) as sites:

        async def run(rank, number):
            communicator, name = sites[rank].communicator, key(number // 8, number % 8)
            own = torch.full((1000 + number,), float(rank + number))
            total = 3.0 * number + 3.0
            match number % 4:
                case 0:
                    await communicator.all_reduce(name, own, op="sum")
                    return torch.equal(own, torch.full_like(own, total))
                case 1:
                    parts, _ = await communicator.all_gather(name, own)
                    return [part.unique().tolist() for part in parts] == [[number], [number + 1], [number + 2]]
                case 2:
                    await communicator.broadcast(name, own, root=sites[number % 3].peer_id)
                    return torch.equal(own, torch.full_like(own, float(number % 3 + number)))
                case _:
                    await communicator.all_reduce(name, own, op="max")
                    return torch.equal(own, torch.full_like(own, number + 2.0))

        async def run_all(rank):
            return await together(run(rank, number) for number in random.Random(rank).sample(range(64), 64))

        results = await together(run_all(rank) for rank in range(3))
    assert results == [[True] * 64] * 3


async def test_no_more_than_256_rounds_are_in_flight_and_the_next_one_says_so(sites_running):
    async with sites_running(2) as sites:
        works = [asyncio.ensure_future(sites[0].communicator.barrier(key(0, number))) for number in range(256)]
        await asyncio.sleep(0)  # each has posted
        with pytest.raises(RoundRefused, match="256 rounds are in flight; await some first"):
            await sites[0].communicator.barrier(key(1))
        await together([*(sites[1].communicator.barrier(key(0, number)) for number in reversed(range(256))), *works])
        await together(site.communicator.barrier(key(1)) for site in sites)


async def test_a_key_is_refused_while_it_is_in_flight_and_ever_after(sites_running):
    async with sites_running(2) as sites:
        communicator = sites[0].communicator
        running = asyncio.ensure_future(communicator.all_reduce(key(), torch.ones(9)))
        await asyncio.sleep(0)
        with pytest.raises(RoundRefused, match="used before"):
            await communicator.all_reduce(key(), torch.ones(9))
        await sites[1].communicator.all_reduce(key(), torch.ones(9))
        await running
        with pytest.raises(RoundRefused, match="used before"):
            await communicator.barrier(key())
        with pytest.raises(RoundRefused, match="used before"):
            await communicator.all_gather(key(), torch.ones(9))


async def test_a_key_whose_round_failed_is_refused_as_well(sites_running):
    async with sites_running(2) as sites:
        with pytest.raises(OperationAborted):
            await sites[0].communicator.barrier(key(), deadline_s=0.1)
        with pytest.raises(RoundRefused, match="used before"):
            await sites[0].communicator.barrier(key())


async def test_arguments_that_are_refused_do_not_use_up_their_key(sites_running):
    async with sites_running(2) as sites:
        for site in sites:
            with pytest.raises(ValueError, match="no codec"):
                await site.communicator.all_reduce(key(), torch.ones(9), codec="zip")
            with pytest.raises(ValueError, match="no operation"):
                await site.communicator.all_reduce(key(), torch.ones(9), op="product")
        await together(site.communicator.all_reduce(key(), torch.ones(9)) for site in sites)


@pytest.mark.parametrize("numbers_of_key", [(1, 2**32, 0), (1, 0, 2**16), (1, -1, 0), (1, 0, -1)])
async def test_a_key_that_does_not_fit_a_frame_is_refused(sites_running, numbers_of_key):
    async with sites_running(1) as sites:
        with pytest.raises(RoundRefused, match="do not fit a frame"):
            await sites[0].communicator.barrier(RoundKey(*numbers_of_key))


@pytest.mark.parametrize("world_size", [2, 3])
async def test_rounds_that_were_given_up_leave_room_for_the_next_ones(sites_running, world_size):
    """What an honest member has sent ahead stays within the other's bound, though its rounds end one after another."""
    async with sites_running(world_size, chunk_nbytes=64 << 10) as sites:
        for step in range(40):
            task = asyncio.ensure_future(sites[0].communicator.all_reduce(key(step), torch.ones(1_200_000)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert sites[0].communicator.bytes_sent > 2 << 20
        # Everything that was sent ahead has been read when the last barrier is through.
        await together(site.communicator.barrier(key(99)) for site in sites)
        assert all(site.communicator.dropped == {} for site in sites)


# ------------------------------------------------------------------------------------ terms that differ


def post(site, sites, kind, step=0):
    """The same operation on all members, but for what `kind` names."""
    communicator, name, ones = site.communicator, key(step), torch.ones(1200)
    match kind:
        case "numel":
            return communicator.all_reduce(name, torch.ones(1201), op="sum")
        case "dtype":
            return communicator.all_reduce(name, torch.ones(1200, dtype=torch.int32), op="sum")
        case "codec":
            return communicator.all_reduce(name, ones, op="sum", codec="int8")
        case "op":
            return communicator.all_reduce(name, ones, op="max")
        case "ring":
            return communicator.all_reduce(name, ones, op="sum", plan="ring")
        case "barrier":
            return communicator.barrier(name)
        case "gather":
            return communicator.all_gather(name, ones)
        case "broadcast":
            return communicator.broadcast(name, ones, root=sites[0].peer_id)
        case "other root":
            return communicator.broadcast(name, ones, root=sites[1].peer_id)
        case "sizes":
            return communicator.all_gather(name, ones[:600], sizes=[*[600] * (len(sites) - 1), 600])
        case _:
            return communicator.all_reduce(name, ones, op="sum")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("deviant", [0, 1])
@pytest.mark.parametrize(
    ("common", "other", "field"),
    [
        ("all_reduce", "numel", "numel"),
        ("all_reduce", "dtype", "dtype"),
        ("all_reduce", "codec", "codec"),
        ("all_reduce", "op", "op"),
        ("all_reduce", "barrier", "op"),
        ("all_reduce", "gather", "op"),
        ("all_reduce", "broadcast", "op"),
        ("all_reduce", "ring", "plan"),
        ("gather", "sizes", "numel"),
        ("broadcast", "other root", "slices"),
    ],
)
async def test_other_terms_are_a_named_error_on_all_members_at_once(
    sites_running, outcomes, world_size, deviant, common, other, field
):
    async with sites_running(world_size) as sites:
        errors = await outcomes(
            post(site, sites, other if rank == deviant else common) for rank, site in enumerate(sites)
        )
        assert [type(error) for error in errors] == [PlanMismatch] * world_size
        assert [error.field for error in errors] == [field] * world_size
        assert all(error.peer_id == sites[deviant].peer_id for rank, error in enumerate(errors) if rank != deviant)
        # Nothing else is broken by that.
        results = await together(site.communicator.all_gather(key(1), torch.tensor([7.0])) for site in sites)
        assert all(torch.cat(parts).tolist() == [7.0] * world_size for parts, _ in results)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("other", ["numel", "dtype", "codec", "op"])
async def test_terms_that_came_with_chunks_before_we_posted_others_are_a_named_error(
    sites_running, outcome, outcomes, until, world_size, other
):
    async with sites_running(world_size) as sites:
        early = [asyncio.ensure_future(outcome(post(site, sites, "all_reduce"))) for site in sites[:-1]]
        await until(lambda: sites[-1].communicator.bytes_received >= 2000 * (world_size - 1))
        errors = [await outcome(post(sites[-1], sites, other)), *(await together(early))]
    assert [type(error) for error in errors] == [PlanMismatch] * world_size


async def test_a_member_that_posts_after_others_found_a_mismatch_hears_who_differed(sites_running, outcome, outcomes):
    async with sites_running(3) as sites:
        parts = [torch.ones(1000), torch.ones(1001), torch.ones(1000)]
        early = await outcomes(sites[rank].communicator.all_reduce(key(), parts[rank]) for rank in (0, 1))
        late = await outcome(sites[2].communicator.all_reduce(key(), parts[2]))
    assert [type(error) for error in (*early, late)] == [PlanMismatch] * 3
    assert (late.field, late.ours, late.theirs, late.peer_id) == ("numel", 1000, 1001, sites[1].peer_id)


async def test_a_round_that_its_poster_gave_up_before_we_posted_ends_here_at_once(sites_running, outcome, until):
    async with sites_running(3) as sites:
        gone = asyncio.ensure_future(post(sites[0], sites, "all_reduce"))
        await until(lambda: sites[1].communicator.bytes_received)
        before = sites[1].communicator.bytes_received
        gone.cancel()
        await asyncio.wait([gone])
        await until(lambda: sites[1].communicator.bytes_received > before)
        error = await outcome(post(sites[1], sites, "all_reduce"))
    assert isinstance(error, OperationAborted)
    assert "gave up: cancelled by its caller" in error.cause


@pytest.mark.parametrize("world_size", [2, 3])
async def test_a_mismatch_names_both_counts_as_their_callers_know_them(sites_running, outcomes, world_size):
    async with sites_running(world_size) as sites:
        errors = await outcomes(
            site.communicator.all_reduce(key(), torch.ones(1000 + (rank == 0))) for rank, site in enumerate(sites)
        )
    assert (errors[0].field, errors[0].ours, errors[0].theirs) == ("numel", 1001, 1000)
    assert (errors[1].field, errors[1].ours, errors[1].theirs) == ("numel", 1000, 1001)


async def test_unequal_shares_of_a_gather_are_a_named_error(sites_running, outcomes):
    async with sites_running(2) as sites:
        errors = await outcomes(
            [
                sites[0].communicator.all_gather(key(), torch.ones(3), sizes=[3, 5]),
                sites[1].communicator.all_gather(key(), torch.ones(6), sizes=[2, 6]),
            ]
        )
    assert [type(error) for error in errors] == [PlanMismatch] * 2
    assert {error.field for error in errors} == {"slices"}


async def test_partners_that_do_not_name_each_other_are_told_so(sites_running, outcomes):
    async with sites_running(3) as sites:
        errors = await outcomes(
            sites[rank].communicator.exchange(
                key(), torch.ones(9), out=torch.empty(9), partner=sites[other].peer_id, deadline_s=3.0
            )
            for rank, other in [(0, 1), (1, 2), (2, 0)]
        )
        assert [type(error) for error in errors] == [PlanMismatch] * 3
        assert all(site.communicator.dropped.get("rank is not the sender's", 0) == 0 for site in sites)


async def test_partners_that_swap_unequal_lengths_are_told_so(sites_running, outcomes):
    async with sites_running(2) as sites:
        errors = await outcomes(
            site.communicator.exchange(key(), torch.ones(9 + n), out=torch.empty(9 + n), partner=sites[1 - n].peer_id)
            for n, site in enumerate(sites)
        )
    assert [(type(error), error.field) for error in errors] == [(PlanMismatch, "numel")] * 2


# ------------------------------------------------------------------------------------ views and aborts


KINDS = ["all_reduce", "ring", "gather", "broadcast", "barrier"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_view_cannot_change_under_a_round_without_ending_it(sites_running, view_of, outcome, kind):
    async with sites_running(2) as sites:
        running = asyncio.ensure_future(outcome(post(sites[1], sites, kind)))
        await asyncio.sleep(0)
        await sites[1].communicator.install(view_of(sites, epoch=2))
        error = await running
        assert isinstance(error, OperationAborted)
        assert error.suspects == ()
        assert "view 2 was installed" in error.cause
        await sites[0].communicator.install(view_of(sites, epoch=2))
        await together(site.communicator.barrier(key(epoch=2)) for site in sites)


@pytest.mark.parametrize("numel", [1000, 1_000_000])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("world_size", [2, 3])
async def test_an_input_in_place_is_as_before_after_an_abort_in_mid_round(
    sites_running, outcome, until, numel, codec, world_size
):
    """The record of the first result ends the round on one member; by then sums were begun on all of them."""
    tensors = [torch.tensor(numbers(numel, rank)).float() for rank in range(world_size)]
    before = [tensor.clone() for tensor in tensors]

    def refuse(*_):
        raise KeyError("full")

    async with sites_running(world_size, chunk_nbytes=64 << 10) as sites, asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(outcome(site.mean(tensor, codec=codec)))
            for site, tensor in zip(sites[1:], tensors[1:], strict=True)
        ]
        with pytest.raises(KeyError):
            await sites[0].mean(tensors[0], codec=codec, record=refuse)
    assert same(tensors[0], before[0])
    for task, tensor, earlier in zip(others, tensors[1:], before[1:], strict=True):
        if isinstance(task.result(), OperationAborted):
            assert same(tensor, earlier)
        else:  # it was through before it heard
            assert numel == 1000


@pytest.mark.parametrize("num_turns", [1, 2, 3])
async def test_a_cancelled_caller_finds_its_tensor_whole_the_old_or_the_new(sites_running, num_turns):
    tensor = torch.full((6_000_000,), 1.0)
    async with sites_running(1) as sites:
        running = asyncio.ensure_future(sites[0].communicator.all_reduce(key(), tensor, op="sum", weight=2.0))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    assert [number.item() for number in tensor.aminmax()] in ([1.0, 1.0], [2.0, 2.0])


async def test_memory_is_the_callers_again_when_the_operation_ends(sites_running):
    """What is done with it then does not reach the others, though they may still be receiving."""
    numel = 1_000_000
    async with sites_running(3, chunk_nbytes=64 << 10) as sites:
        tensors = [torch.full((numel,), float(rank)) for rank in range(3)]

        async def run(rank):
            out = torch.empty(3 * numel)
            await sites[rank].communicator.all_gather(key(), tensors[rank], out=out)
            tensors[rank].fill_(77.0)
            return [[number.item() for number in part.aminmax()] for part in out.split(numel)]

        results = await together(run(rank) for rank in range(3))
    assert results == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]] * 3


# ------------------------------------------------------------------------------------ arguments


async def refused(work):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at all of the text
        await work
    return str(error.value)


async def test_what_an_all_reduce_cannot_do_is_a_value_error_that_names_the_cure(sites_running):
    ones = torch.ones(12)
    async with sites_running(2) as sites:
        reduce = sites[0].communicator.all_reduce
        assert "separate memory" in await refused(reduce(key(), ones[:8], out=ones[2:10]))
        assert 'use op="sum" and divide, or convert to float32' in await refused(reduce(key(), ones.int()))
        assert 'use codec="raw"' in await refused(reduce(key(), ones.double(), codec="int8"))
        assert 'use codec="raw"' in await refused(reduce(key(), ones, op="min", codec="int8"))
        assert "mean, sum, min, max" in await refused(reduce(key(), ones, op="avg"))
        assert "leave it at 1" in await refused(reduce(key(), ones, op="max", weight=2.0))
        assert "leave it at 1" in await refused(reduce(key(), ones.int(), op="sum", weight=2.0))
        assert "needs 12" in await refused(reduce(key(), ones, out=torch.ones(13)))
        assert "make it alike" in await refused(reduce(key(), ones, out=torch.ones(12).double()))
        assert ".contiguous()" in await refused(reduce(key(), ones[::2]))
        for weight in (-1.0, math.nan, math.inf):
            assert "a number from 0 to 2**64" in await refused(reduce(key(), ones, weight=weight))


async def test_what_the_other_operations_cannot_do_is_a_value_error_that_names_the_cure(sites_running):
    ones = torch.ones(12)
    async with sites_running(2) as sites:
        one = sites[0].communicator
        assert "separate memory" in await refused(one.all_gather(key(), ones[:6], out=ones))
        assert "needs 24" in await refused(one.all_gather(key(), ones, out=torch.empty(23)))
        for sizes in ([12], [11, 12], [12, -1], [12, 12, 12]):
            assert "our 12 elements" in await refused(one.all_gather(key(), ones, sizes=sizes))
        assert "its members are" in await refused(one.broadcast(key(), ones, root="f" * 16))
        for partner in ("f" * 16, sites[0].peer_id):
            assert "no other member" in await refused(one.exchange(key(), ones, out=torch.empty(12), partner=partner))
        assert "separate memory" in await refused(one.exchange(key(), ones, out=ones, partner=sites[1].peer_id))
        assert "needs 12" in await refused(one.exchange(key(), ones, out=torch.empty(11), partner=sites[1].peer_id))


async def test_whoever_is_in_no_view_or_not_in_this_one_is_refused(sites_running, view_of):
    async with sites_running(2) as sites:
        await sites[0].communicator.install(view_of(sites[1:], epoch=2))
        with pytest.raises(RoundRefused, match="no member of the view"):
            await sites[0].communicator.barrier(key(epoch=2))
        with pytest.raises(ValueError, match="older than the installed"):
            await sites[0].communicator.install(view_of(sites, epoch=1))


async def test_a_key_is_made_for_the_installed_view(sites_running, view_of):
    async with sites_running(1) as sites:
        assert sites[0].communicator.key(5, 2) == key(5, 2, epoch=1)
        await sites[0].communicator.install(view_of(sites, epoch=7))
        assert sites[0].communicator.key(5) == key(5, 0, epoch=7)


async def test_figures_of_a_round_count_its_bytes(sites_running):
    async with sites_running(3, chunk_nbytes=64 << 10) as sites:
        stats = await together(site.communicator.all_reduce(key(), torch.ones(256 * 300)) for site in sites)
        moved = [site.communicator.progress() for site in sites]
    nbytes = 256 * 300 * 4
    for stat, sum_of_both in zip(stats, moved, strict=True):
        # Two thirds of the tensor go out as parts, a third twice as a result; as much comes in.
        assert 4 / 3 * nbytes <= stat.bytes_sent <= 1.03 * 4 / 3 * nbytes
        assert 4 / 3 * nbytes <= stat.bytes_received <= 1.03 * 4 / 3 * nbytes
        assert stat.bytes_sent + stat.bytes_received <= sum_of_both
        assert stat.seconds > 0


async def test_numbers_that_are_not_finite_pass_where_nothing_is_added_up(sites_running, outcomes):
    odd = torch.tensor([math.nan, math.inf, 1.0])
    async with sites_running(2) as sites:
        tensors = [odd.clone(), torch.zeros(3)]
        results = await outcomes(
            site.communicator.broadcast(key(), tensor, root=sites[0].peer_id)
            for site, tensor in zip(sites, tensors, strict=True)
        )
        assert not any(isinstance(result, NonFiniteInput) for result in results)
        assert all(same(tensor, odd) for tensor in tensors)


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_a_member_that_is_alone_says_how_large_its_numbers_are(sites_running, codec):
    async with sites_running(1) as (site,):
        stats = await site.communicator.all_reduce(key(), torch.full((3000,), -2.0), codec=codec)
        assert stats.sizes == (2.0,)


async def test_a_member_is_told_where_its_own_part_was_encoded_by_itself(sites_running, outcomes):
    async with sites_running(3) as sites:
        parts = [torch.ones(3000)] * 3
        for step, (plan, is_alone) in enumerate([("butterfly", True), ("ring", False)]):
            all_stats = await outcomes(
                site.communicator.all_reduce(key(step), part.clone(), codec="int8", plan=plan)
                for site, part in zip(sites, parts, strict=True)
            )
            for rank, stats in enumerate(all_stats):
                others = tuple((start, stop) for root, start, stop in stats.roots if root != rank)
                assert bool(others) == is_alone, "on a ring only sums are encoded, on their way into the root"
                assert stats.coded == others
