# SPDX-License-Identifier: Apache-2.0
"""The rounds of one outer step between three peers: who is in a result, whose fault it is if there is none."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from isthmus.collective.codec import codec_named
from isthmus.collective.core.types import HUGE, Epoch, OuterStep, RoundKey
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import Emitted, Op, Result, Round
from isthmus.optim.workload import draw_pairs
from isthmus.trainer.engine.round_exchange import Payload, RoundExchange, RoundResults
from tests.unit.trainer.rig import Site, sites_of_a_new_run, view_of

NUMEL = 11
"""Odd, as the wire forms are then: they lie one after the other."""
KEY = RoundKey(Epoch(1), OuterStep(0), 0)
GATHER = Round(fragment=FragmentKey(kind="param", index=0), op=Op.GATHER, inner_step=1)
PAIR = dataclasses.replace(GATHER, op=Op.PAIR)
MEAN = dataclasses.replace(GATHER, op=Op.MEAN, num_notes=1)  # so that members tell each other their weights


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=2048)
    yield threads
    threads.close()


@contextlib.asynccontextmanager
async def three(hasher: Hasher) -> AsyncIterator[list[Site]]:
    async with sites_of_a_new_run(3, hasher) as sites:
        yield sites


def payload(rank: int) -> Tensor:
    return torch.sin(torch.arange(NUMEL) * (rank + 1.0))


def through(codec: str, values: Tensor) -> Tensor:
    """What arrives of them."""
    coder = codec_named(codec)
    out = torch.empty(values.numel())
    coder.decode(coder.encode(values, torch.empty(coder.wire_nbytes(values.numel()), dtype=torch.uint8)), out)
    return out


def emitted(rank: int) -> Emitted:
    return Emitted(payload=payload(rank))


def noted(rank: int) -> Emitted:
    return Emitted(payload=payload(rank), notes=(float(rank),))


async def exchanged(
    sites: Sequence[Site],
    round_: Round,
    *,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    codec: str = "raw",
    gives: Callable[[int], Emitted] = emitted,
) -> list[RoundResults | BaseException]:
    async def run(rank: int, site: Site) -> RoundResults:
        return await RoundExchange(site.communicator, codec=codec).run(
            view_of(sites),
            KEY,
            [Payload(round_=round_, emitted=gives(rank))],
            weight=weights[rank],
            told=(),
            mean_buffer=lambda _: torch.empty(NUMEL),
        )

    return await asyncio.gather(*(run(rank, site) for rank, site in enumerate(sites)), return_exceptions=True)


def results_of(found: Sequence[RoundResults | BaseException]) -> list[Result | None]:
    results = []
    for made in found:
        assert isinstance(made, RoundResults), made
        ((result, _),) = made.results
        results.append(result)
    return results


def names_of(sites: Sequence[Site]) -> tuple[str, ...]:
    return tuple(site.me.peer_id for site in sites)


@pytest.mark.parametrize("codec", ["raw", "int8", "e3m0", "twobit", "bf16", "topk:64"])
async def test_a_gather_gives_every_payload_in_the_order_of_members_as_the_codec_left_it(
    hasher: Hasher, codec: str
) -> None:
    def gives(rank: int) -> Emitted:
        return Emitted(payload=payload(rank), notes=(0.1 + rank, 1e300))

    async with three(hasher) as sites:
        found = await exchanged(sites, dataclasses.replace(GATHER, num_notes=2), codec=codec, gives=gives)
        for result in results_of(found):
            assert result is not None
            assert torch.equal(result.value, torch.stack([through(codec, payload(rank)) for rank in range(3)]))
            assert result.members == names_of(sites)
            assert result.notes == tuple((0.1 + rank, 1e300) for rank in range(3))


async def test_who_has_no_weight_is_no_row_of_a_gather(hasher: Hasher) -> None:
    async with three(hasher) as sites:
        found = await exchanged(sites, GATHER, weights=(0.5, 0.0, 0.25))
        for result in results_of(found):
            assert result is not None
            assert torch.equal(result.value, torch.stack([payload(0), payload(2)]))
            assert (result.members, result.weights) == (names_of([sites[0], sites[2]]), (0.5, 0.25))


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_pairs_get_each_others_payload_and_the_odd_one_nothing(hasher: Hasher, codec: str) -> None:
    async with three(hasher) as sites:
        names = names_of(sites)
        partners = draw_pairs(PAIR, names)
        results = results_of(await exchanged(sites, PAIR, codec=codec, weights=(1.0, 2.0, 4.0)))
    assert results.count(None) == 1
    for rank, result in enumerate(results):
        if result is None:
            assert names[rank] not in partners
            continue
        partner = names.index(partners[names[rank]])
        assert torch.equal(result.value, through(codec, payload(partner)))
        assert (result.members, result.weights) == ((names[rank], names[partner]), (2.0**rank, 2.0**partner))


@pytest.mark.parametrize("idle", range(3))
async def test_who_has_no_weight_is_nobodys_partner(hasher: Hasher, idle: int) -> None:
    async with three(hasher) as sites:
        names = names_of(sites)
        results = results_of(await exchanged(sites, PAIR, weights=[float(rank != idle) for rank in range(3)]))
    one, other = (rank for rank in range(3) if rank != idle)
    members = [result and result.members for result in results]
    assert (members[one], members[other]) == ((names[one], names[other]), (names[other], names[one]))
    assert members[idle] is None


@pytest.mark.parametrize("round_", [MEAN, GATHER, PAIR], ids=lambda round_: round_.op.name)
async def test_a_round_in_which_nobody_has_a_weight_has_no_result_and_sends_nothing(
    hasher: Hasher, round_: Round
) -> None:
    async with three(hasher) as sites:
        found = await exchanged(sites, round_, weights=(0.0, 0.0, 0.0), gives=noted if round_ is MEAN else emitted)
        assert results_of(found) == [None] * 3
        assert not any(made.stats for made in found if isinstance(made, RoundResults))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_a_payload_that_is_not_finite_weighs_nothing_for_all_alike(hasher: Hasher, bad: float) -> None:
    def gives(rank: int) -> Emitted:
        values = payload(rank)
        if rank == 1:
            values[3] = bad
        return Emitted(payload=values)

    async with three(hasher) as sites:
        for result in results_of(await exchanged(sites, GATHER, gives=gives)):
            assert result is not None
            assert result.members == names_of([sites[0], sites[2]])


@pytest.mark.parametrize(
    ("weight", "factor", "note"), [(-1.0, 1.0, 0.0), (1e20, 1.0, 0.0), (1.0, -1.0, 0.0), (1.0, 1.0, math.nan)]
)
async def test_a_word_that_makes_no_sense_is_that_of_somebody_who_gives_nothing(
    hasher: Hasher, weight: float, factor: float, note: float
) -> None:
    def gives(rank: int) -> Emitted:
        said = {"weight": factor, "notes": (note,)} if rank == 1 else {"notes": (0.0,)}
        return Emitted(payload=payload(rank), **said)

    async with three(hasher) as sites:
        round_ = dataclasses.replace(GATHER, num_notes=1)
        for result in results_of(await exchanged(sites, round_, weights=(1.0, weight, 1.0), gives=gives)):
            assert result is not None
            assert result.members == names_of([sites[0], sites[2]])


@pytest.mark.parametrize("round_", [GATHER, PAIR], ids=lambda round_: round_.op.name)
async def test_bytes_that_cannot_be_read_are_zeros_and_as_large_as_can_be_said(
    hasher: Hasher, round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.trainer.engine.round_exchange.first_non_finite", lambda _: None)

    def gives(rank: int) -> Emitted:
        return Emitted(payload=torch.full((NUMEL,), math.nan) if rank == 0 else payload(rank))

    async with three(hasher) as sites:
        weights = (1.0, 1.0, 0.0) if round_ is PAIR else (1.0, 1.0, 1.0)
        _, *theirs = await exchanged(sites, round_, weights=weights, gives=gives)
    for made in theirs if round_ is GATHER else theirs[:1]:
        assert isinstance(made, RoundResults), made
        assert made.sizes[0] == HUGE
        assert 0.0 < made.sizes[1] < 10.0, made.sizes
        (result,) = results_of([made])
        assert result is not None
        assert not (result.value if round_ is PAIR else result.value[0]).any()


async def test_a_note_far_out_of_the_others_range_makes_its_sender_as_large(hasher: Hasher) -> None:
    """Notes are lengths and strides: what is multiplied by one follows it."""

    def gives(rank: int) -> Emitted:
        return Emitted(payload=torch.ones(NUMEL), notes=(1e10 if rank == 1 else 2.0 + rank,))

    async with three(hasher) as sites:
        found = await exchanged(sites, dataclasses.replace(MEAN, num_notes=1), gives=gives)
    for made in found:
        assert isinstance(made, RoundResults), made
        assert made.sizes == pytest.approx((1.0, math.sqrt(1e10 / 4.0), 1.0), rel=0.5)


def test_a_false_sum_of_a_further_round_counts_by_the_square_root_of_how_much_larger_it_is_than_parts() -> None:
    made = RoundResults()
    made.saw((1.0, 1.0, 2.0), (0.0, 9.0, 0.0))
    made.saw((0.01, 0.01, 0.01), (0.0, 0.04, 4.0))
    assert made.sizes == pytest.approx((1.0, 1.0, 2.0))
    assert made.sums == pytest.approx((0.0, 9.0, 20.0))
    made.saw((0.0, 0.0, 0.0), (HUGE, 0.0, 0.0))
    assert made.sums == pytest.approx((HUGE, 9.0, 20.0)), "also beside a round in which nobody's numbers are known"


async def test_notes_that_are_not_as_many_as_the_round_has_are_refused_before_anything_is_sent(hasher: Hasher) -> None:
    async with three(hasher) as sites:
        found = await exchanged(sites, dataclasses.replace(GATHER, num_notes=2), gives=noted)
        assert all(isinstance(error, ValueError) and "notes" in str(error) for error in found)
        assert not any(site.communicator.bytes_sent for site in sites)
