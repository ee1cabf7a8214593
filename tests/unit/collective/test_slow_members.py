# SPDX-License-Identifier: Apache-2.0
"""Members that move, and come to no end: the others give up in time, and name whom they have found themselves."""

import asyncio
import dataclasses

import pytest
import torch

from isthmus.collective import Epoch, OperationAborted, OuterStep, RoundKey
from isthmus.collective.core.progress import StallLimits
from isthmus.collective.core.round_times import SlowLimits
from isthmus.collective.rounds.outbox import Outbox
from isthmus.collective.rounds.running_round import RunningRound
from isthmus.collective.transport.link import Link
from tests.multiprocess.lies import on_the_wire
from tests.unit.collective.conftest import QUICK

NUMEL = 700_001
SLOW = SlowLimits(floor_s=2.0, factor=4.0, unknown_s=2.0)
KEY = RoundKey(Epoch(1), OuterStep(0), 0)
PATIENT = dataclasses.replace(
    QUICK, patience=dataclasses.replace(QUICK.patience, stall=StallLimits(floor_s=10.0), slow=SLOW, round_s=60.0)
)
"""Nobody is found for standing still."""
CHANGED = [(Outbox, "put_chunk"), (Link, "_within")]
"""Links ask the last one only where uploads have a bound, as the first member's have in one test."""


@pytest.fixture
def lies(monkeypatch):
    """Makes the first member lie from now on, with a lie of a real liar (tests/multiprocess/liar.py)."""

    def lie(kind):
        honest = {(owner, name): getattr(owner, name) for owner, name in CHANGED}
        kind(lambda: True)
        for (owner, name), method in honest.items():
            lying = getattr(owner, name)
            setattr(owner, name, method)  # which monkeypatch restores
            monkeypatch.setattr(owner, name, _of_the_first(lying, method) if owner is Outbox else lying)

    return lie


def _of_the_first(lying, honest):
    return lambda self, *words: (honest if self.rank else lying)(self, *words)


async def means(sites, step):
    return await asyncio.gather(*(site.mean(torch.ones(NUMEL), step=step) for site in sites))


async def test_a_member_that_sends_its_parts_byte_by_byte_is_named_by_both_others(sites_running, outcomes, lies):
    lies(on_the_wire.send_byte_by_byte)
    slowly = dataclasses.replace(PATIENT, max_upload=1e9)  # else it is not asked
    async with sites_running(3, first={"options": slowly}, options=PATIENT) as sites:
        ended = await outcomes(site.mean(torch.ones(NUMEL)) for site in sites)
    for error in ended[1:]:
        assert isinstance(error, OperationAborted)
        assert error.suspects == (sites[0].peer_id,), error
        assert error.told_by is None, "of its own finding"
        assert "too slow" in error.cause


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_member_that_keeps_back_its_sums_is_whom_both_others_wait_for(
    sites_running, outcomes, lies, num_before
):
    async with sites_running(3, options=PATIENT) as sites:
        for step in range(num_before):
            await means(sites, step)
        lies(on_the_wire.withhold_sums)
        ended = await outcomes(site.mean(torch.ones(NUMEL), step=9) for site in sites)
    assert all(isinstance(error, OperationAborted) for error in ended[1:])
    assert [error.told_by for error in ended[1:]] == [sites[0].peer_id] * 2
    assert [error.suspects for error in ended[1:]] == [()] * 2


async def test_a_round_that_was_given_up_may_take_twice_as_long_the_next_time(sites_running, outcomes, lies):
    loop = asyncio.get_running_loop()
    async with sites_running(2, options=PATIENT) as sites:
        await asyncio.gather(*(site.mean(torch.ones(2 * NUMEL)) for site in sites))
        lies(on_the_wire.withhold_sums)
        took_s = []
        for step in (1, 2):
            began = loop.time()
            await outcomes(site.mean(torch.ones(2 * NUMEL), step=step) for site in sites)
            took_s.append(loop.time() - began)
    assert took_s[0] > SLOW.floor_s
    assert took_s[1] > 2 * SLOW.floor_s


async def test_a_member_that_says_at_once_that_a_round_takes_too_long_makes_the_others_name_nobody(
    sites_running, outcomes, monkeypatch
):
    start = RunningRound.start

    def lie(self):
        start(self)
        if self.rank == 0:
            self.hold_up("a lie")

    monkeypatch.setattr(RunningRound, "start", lie)
    async with sites_running(3, options=PATIENT) as sites:
        ended = await outcomes(site.mean(torch.ones(NUMEL)) for site in sites)
    for error in ended[1:]:
        assert error.suspects == ()
        assert error.told_by == sites[0].peer_id


async def test_a_member_that_is_still_sending_is_not_waited_for_in_vain(sites_running, outcomes):
    """It has all that it needs, and nothing comes to it any more; found before: it named the other one."""
    slowly = dataclasses.replace(PATIENT, max_upload=800e3)
    async with sites_running(2, first={"options": slowly}, options=PATIENT) as sites:
        ended = await outcomes(
            site.communicator.exchange(KEY, torch.ones(1_000_000), out=torch.empty(1_000_000), partner=other.peer_id)
            for site, other in zip(sites, sites[::-1], strict=True)
        )
    assert not any(isinstance(error, OperationAborted) for error in ended), ended


@pytest.mark.parametrize("codec", ["raw", "int8", "topk"])
@pytest.mark.parametrize("plan", ["butterfly", "ring"])
async def test_what_is_still_to_come_is_counted_as_it_travels(sites_running, monkeypatch, plan, codec):
    """Found before: sums and results counted alike, as they lie in memory, and topk sends a hundredth of that."""
    to_come = []
    start = RunningRound.start

    def look(self):
        to_come.append((self, sum(self.left_nbytes(rank) for rank in range(3) if rank != self.rank)))
        start(self)

    monkeypatch.setattr(RunningRound, "start", look)
    async with sites_running(3, options=PATIENT) as sites:
        await asyncio.gather(*(site.mean(torch.ones(NUMEL), codec=codec, plan=plan) for site in sites))
    for round_, nbytes in to_come:
        assert 0 <= round_.bytes_received - nbytes <= 0.01 * nbytes + 10_000, "headers and openings come to it"
        assert [round_.left_nbytes(rank) for rank in range(3) if rank != round_.rank] == [0, 0]
