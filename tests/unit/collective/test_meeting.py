# SPDX-License-Identifier: Apache-2.0
"""Links before a view names their peers: made by who dials, seen by both, and kept for the view."""

import asyncio

import pytest
import torch

from isthmus.collective import Member
from isthmus.collective.api import communicator
from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.transport import redial
from isthmus.collective.transport.dialling import open_connection


async def test_both_sides_of_a_pair_see_the_link_that_one_has_dialled(new_site) -> None:
    smaller, larger = [await new_site(number) for number in (1, 2)]
    met = await asyncio.gather(smaller.communicator.meet(larger.member), larger.communicator.meet(smaller.member))
    assert met == [None, None]


@pytest.mark.parametrize("slower", [None, 1, 2], ids=["at once", "the larger is first", "the smaller is first"])
async def test_of_two_calls_that_cross_the_one_of_the_smaller_id_stays(
    new_site, view_of, monkeypatch: pytest.MonkeyPatch, slower: int | None
) -> None:
    smaller, larger = sites = [await new_site(number) for number in (1, 2)]
    larger.communicator._mesh._dials[smaller.me.peer_id] = True  # as where a fault has turned their roles round
    have_answers, is_there, num_dials = asyncio.Barrier(2), asyncio.Event(), 0
    dial = redial.open_connection

    async def dialling(address, hello, **options):
        nonlocal num_dials
        num_dials += 1
        if slower is not None and hello.peer_id == sites[slower - 1].me.peer_id:
            await is_there.wait()  # its call sets out when the other one has come
        found = await dial(address, hello, **options)
        if slower is None and num_dials <= 2:
            await have_answers.wait()
        is_there.set()
        return found

    monkeypatch.setattr(redial, "open_connection", dialling)
    met = await asyncio.gather(smaller.communicator.meet(larger.member), larger.communicator.meet(smaller.member))
    assert met == [None, None]
    outs = [torch.empty(100) for _ in sites]
    await asyncio.gather(*(site.communicator.install(view_of(sites)) for site in sites))
    await asyncio.gather(*(site.mean(torch.ones(100), out=out) for site, out in zip(sites, outs, strict=True)))
    assert num_dials == 2
    assert smaller.communicator._mesh.bundles[larger.me].is_dialler
    assert not larger.communicator._mesh.bundles[smaller.me].is_dialler


async def test_a_peer_of_many_starts_does_not_push_out_a_newcomer(new_site, bulk_hello) -> None:
    # Found before: the oldest of 64 strangers went, so one member under ever new start numbers kept all newcomers out.
    here, newcomer = [await new_site(number) for number in (1, 2)]
    assert await asyncio.gather(here.communicator.meet(newcomer.member), newcomer.communicator.meet(here.member))
    link = here.communicator._mesh.bundles[newcomer.me]
    opened = []
    for start in range(100):
        hello = bulk_hello(PeerRef(PeerId(f"{3:016x}"), Incarnation(start)), 0, 1)
        opened.append(await open_connection(here.listener.address, hello, timeout_s=5))
        await asyncio.sleep(0)
    for there in opened:
        there.sock.close()
    assert here.communicator._mesh.bundles[newcomer.me] is link
    assert not link.closed
    assert len(here.communicator._mesh.bundles) <= 1 + 4


async def test_a_view_goes_on_with_the_links_that_were_made_before_it(new_site, view_of) -> None:
    sites = [await new_site(number) for number in (1, 2)]
    await asyncio.gather(sites[0].communicator.meet(sites[1].member), sites[1].communicator.meet(sites[0].member))
    before = [dict(site.communicator._mesh.bundles) for site in sites]
    await asyncio.gather(*(site.communicator.install(view_of(sites)) for site in sites))
    assert [dict(site.communicator._mesh.bundles) for site in sites] == before
    outs = [torch.empty(100) for _ in sites]
    await asyncio.gather(*(site.mean(torch.ones(100), out=out) for site, out in zip(sites, outs, strict=True)))
    assert all(torch.equal(out, torch.ones(100)) for out in outs)


async def test_who_meets_in_the_middle_of_a_round_does_not_disturb_it(sites_running, new_site) -> None:
    async with sites_running(2) as sites:
        newcomer = await new_site(9)
        waiting = asyncio.ensure_future(sites[0].mean(torch.ones(10), out=torch.empty(10)))
        met = await asyncio.gather(
            sites[0].communicator.meet(newcomer.member), newcomer.communicator.meet(sites[0].member)
        )
        assert met == [None, None]
        await asyncio.gather(waiting, sites[1].mean(torch.ones(10), out=torch.empty(10)))


async def test_an_address_where_nobody_listens_is_told_with_its_error(
    new_site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "MEET_S", 0.5)
    site, other = await new_site(1), await new_site(2)
    await other.listener.close()
    assert await site.communicator.meet(other.member) == "refused"


async def test_who_waits_for_a_call_says_that_it_did_not_come(new_site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "MEET_S", 0.5)
    site, silent = await new_site(2), await new_site(1)
    assert await site.communicator.meet(silent.member) == "it has not called"


async def test_another_start_of_the_peer_does_not_count(new_site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "MEET_S", 0.5)
    site, other = await new_site(1), await new_site(2)
    older = Member(other.me.peer_id, other.me.incarnation - 1, other.listener.address)
    assert await site.communicator.meet(older) is not None
