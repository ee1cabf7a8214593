# SPDX-License-Identifier: Apache-2.0
"""Connections made anew when the candidate that led to the peer does not any more: others do, or none."""

import asyncio
import contextlib

import pytest
import torch

from isthmus.collective import Member
from isthmus.collective.api.communicator import View
from isthmus.collective.core.address import join_candidates, split_address
from isthmus.collective.transport import HelloReply, Listener, dialling, redial

NOBODY = "127.0.0.1:1"
SOON_S = 2.0
"""Less than a dial may take, and much more than one takes here."""


def door_of(site, address="127.0.0.1:0"):
    """One more way to a peer."""
    return Listener(
        address,
        accept=lambda _: HelloReply(accepted=True, peer_id=site.me.peer_id, incarnation=site.me.incarnation),
        routes={},
        bulk=site.communicator.adopt,
    )


def at(site, *addresses):
    return Member(site.me.peer_id, site.me.incarnation, join_candidates(addresses))


def bundle_of(site, other):
    return site.communicator._mesh.bundles[other.me]


async def link(caller, called, *, caller_at=None, called_at=None):
    """The two bundles of a new link that the first of them has dialled."""
    met = await asyncio.gather(
        caller.communicator.meet(called_at or called.member), called.communicator.meet(caller_at or caller.member)
    )
    assert met == [None, None]
    return bundle_of(caller, called), bundle_of(called, caller)


@contextlib.asynccontextmanager
async def silence(address="127.0.0.1:0"):
    """Where connections are taken, and that is all."""
    taken = []
    server = await asyncio.start_server(lambda *both: taken.append(both), *split_address(address))
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _, writer in taken:
            writer.close()


@contextlib.asynccontextmanager
async def _nobody(_address, _new_site):
    yield


@contextlib.asynccontextmanager
async def _who_hangs_up(address, _new_site):
    server = await asyncio.start_server(lambda _, writer: writer.close(), *split_address(address))
    async with server:
        yield


@contextlib.asynccontextmanager
async def _somebody_else(address, new_site):
    async with door_of(await new_site(9), address):
        yield


@contextlib.asynccontextmanager
async def _who_says_no(address, _new_site):
    refusal = HelloReply(accepted=False, code=5, reason="of another run", peer_id="9" * 16, incarnation=1)
    async with Listener(address, accept=lambda _: refusal, routes={}, bulk=lambda *_: None):
        yield


@pytest.mark.parametrize("now_there", [_nobody, _who_hangs_up, _who_says_no, _somebody_else])
async def test_when_the_way_to_a_peer_refuses_another_candidate_is_taken(new_site, until, now_there):
    caller, called = await new_site(1), await new_site(2)
    first = called.listener.address
    async with door_of(called) as second:
        ours, theirs = await link(caller, called, called_at=at(called, first, second.address))
        await called.listener.close()
        async with now_there(first, new_site):
            ours.cut("the peer is somewhere else now")
            await until(lambda: not theirs.is_connected)
            async with asyncio.timeout(SOON_S):
                await ours.repair()
            assert (ours.is_whole, ours.is_refused) == (True, False)
            await until(lambda: theirs.is_connected)


async def test_a_round_goes_on_over_another_candidate_and_nobody_is_suspected(new_site):
    caller, called = await new_site(1), await new_site(2)
    first = called.listener.address
    async with door_of(called) as second:
        called_at = at(called, first, second.address)
        ours, _ = await link(caller, called, called_at=called_at)
        for site in (caller, called):
            await site.communicator.install(View(1, 0, b"", (caller.member, called_at)))
        await called.listener.close()
        ours.cut("the peer is somewhere else now")
        outs = [torch.empty(100) for _ in range(2)]
        await asyncio.gather(
            *(site.mean(torch.ones(100), out=out) for site, out in zip((caller, called), outs, strict=True))
        )
        assert all(torch.equal(out, torch.ones(100)) for out in outs)


async def test_a_way_that_was_silent_until_the_repair_was_cancelled_is_given_up(new_site, until):
    caller, called = await new_site(1), await new_site(2)
    first = called.listener.address
    async with door_of(called) as second:
        ours, theirs = await link(caller, called, called_at=at(called, first, second.address))
        await called.listener.close()
        async with silence(first):
            ours.cut("the peer is somewhere else now")
            await until(lambda: not theirs.is_connected)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):  # as a round does
                    await ours.repair()
            assert (ours.is_connected, ours.is_refused) == (False, False)
            async with asyncio.timeout(SOON_S):
                await ours.repair()
            assert ours.is_whole


async def test_a_way_that_answers_is_kept(new_site, until):
    caller, called = await new_site(1), await new_site(2)
    async with door_of(called) as second:
        ours, theirs = await link(caller, called, called_at=at(called, called.listener.address, NOBODY))
        ours.address = join_candidates([second.address, called.listener.address])
        for _ in range(2):
            ours.cut("a moment without a line")
            await until(lambda: not theirs.is_connected)
            await ours.repair()
            assert ours.is_whole
            assert ours._redial.path == called.listener.address


@pytest.mark.parametrize("num_ways", [1, 2])
async def test_a_peer_that_is_refused_wherever_it_may_be_is_gone_at_once(new_site, monkeypatch, num_ways):
    caller, called = await new_site(1), await new_site(2)
    async with door_of(called) as second:
        ways = (called.listener.address, second.address)[:num_ways]
        ours, _ = await link(caller, called, called_at=at(called, *ways))
    await called.listener.close()
    ours.cut("its process has died")
    monkeypatch.setattr(redial, "_FIRST_PAUSE_S", 60.0)  # there is none
    monkeypatch.setattr(dialling, "_HEAD_START_S", 60.0)
    async with asyncio.timeout(SOON_S):
        await ours.repair()
    assert ours.is_refused


async def test_a_peer_whose_other_candidate_is_silent_is_not_gone_yet(new_site):
    caller, called = await new_site(1), await new_site(2)
    async with silence() as silent:
        ours, _ = await link(caller, called, called_at=at(called, called.listener.address, silent))
        await called.listener.close()
        ours.cut("its process has died, or its firewall says so")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ours.repair()
        assert not ours.is_refused


async def test_the_side_that_waits_accuses_nobody_who_can_be_reached_elsewhere(new_site, until):
    caller, called = await new_site(1), await new_site(2)
    async with door_of(caller) as second:
        caller_at = at(caller, caller.listener.address, second.address)
        ours, theirs = await link(caller, called, caller_at=caller_at)
        await caller.listener.close()
        ours.cut("the peer is somewhere else now")
        await until(lambda: not theirs.is_connected)
        theirs._redial.found()  # it looks anew
        async with asyncio.timeout(SOON_S):
            await theirs.repair()
        assert not theirs.is_refused
    theirs._redial.found()
    async with asyncio.timeout(SOON_S):
        await theirs.repair()
    assert theirs.is_refused
