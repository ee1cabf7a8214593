# SPDX-License-Identifier: Apache-2.0
"""Operations among members of which two have no link: everything goes through one that has links with both."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
import torch

from isthmus.collective import OperationAborted, View, open_communicator, view_of
from isthmus.collective.api.communicator import Communicator
from isthmus.collective.core.cost import Volume
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.planner import choose
from isthmus.collective.core.slices import broadcast, gather, star
from isthmus.collective.rounds.outbox import Outbox
from isthmus.collective.transport.bundle import Bundle
from isthmus.collective.transport.wire import FrameType
from tests.unit.collective.conftest import QUICK, wait_until

HUB, ONE, OTHER = range(3)
APART = frozenset({(ONE, OTHER)})


def test_what_crosses_a_missing_edge_goes_through_a_hub() -> None:
    assert star(ONE, 3, APART) == (ONE, -1, HUB)
    assert [route.down for route in gather(3, APART)] == [(-1, 0, 0), (1, -1, 0), (2, 0, -1)]
    assert broadcast(OTHER, 3, APART)[0].down == (2, 0, -1)
    with pytest.raises(ValueError, match="no member has links with all"):
        star(0, 2, frozenset({(0, 1)}))


def test_only_hubs_are_roots_of_a_reduction_whatever_is_known_of_the_links() -> None:
    volume = Volume(nbytes_up_raw=4e6, nbytes_up=1e6, nbytes_down=1e6, chunk_nbytes=1e5)
    for table in (LinkTable.unknown(3), LinkTable.unknown(3).without(APART)):
        known = LinkTable(latency_s=((0.01,) * 3,) * 3, rate=table.rate, upload=(1e6,) * 3, download=(1e6,) * 3)
        roots = [{route.root for route in choose(item, volume).routes} for item in (table, known)]
        assert roots == ([{0, 1, 2}] * 2 if table.apart == frozenset() else [{HUB}] * 2)


class Trio:
    """Three communicators; `communicators[ONE]` and `communicators[OTHER]` have no link."""

    def __init__(self, communicators: list[Communicator], view: View) -> None:
        self.communicators, self.view = communicators, view

    async def all(self, operation: str, tensors: list[torch.Tensor], **options: object) -> list[object]:
        calls = [
            getattr(each, operation)(each.key(7), tensor, **options)
            for each, tensor in zip(self.communicators, tensors, strict=True)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)


async def with_trio(work) -> None:
    async with (
        open_communicator(0, "127.0.0.1:0") as hub,
        open_communicator(1, "127.0.0.1:0") as one,
        open_communicator(2, "127.0.0.1:0") as other,
    ):
        communicators = [hub, one, other]
        addresses = [str(each.address) for each in communicators]
        view = msgspec.structs.replace(view_of(0, addresses), apart=((ONE, OTHER),))
        await asyncio.gather(*(each.install(view) for each in communicators))
        await work(Trio(communicators, view))
        for each, partner in ((one, other), (other, one)):
            assert partner.me not in each._mesh.bundles, "nothing has dialled"


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_all_reduce_gives_the_same_bits_to_members_without_a_link(codec: str) -> None:
    async def work(trio: Trio) -> None:
        tensors = [torch.full((5000,), float(rank)) for rank in range(3)]
        stats = await trio.all("all_reduce", tensors, codec=codec)
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        assert tensors[0][0].item() == pytest.approx(1.0, abs=0.02)
        assert all(item.weights == (1.0, 1.0, 1.0) for item in stats)

    await with_trio(work)


async def test_all_gather_and_broadcast_reach_members_without_a_link() -> None:
    async def work(trio: Trio) -> None:
        tensors = [torch.full((10,), float(rank)) for rank in range(3)]
        for parts, _ in await trio.all("all_gather", tensors):
            assert [part[0].item() for part in parts] == [0.0, 1.0, 2.0]

    await with_trio(work)


async def test_a_member_that_gives_up_is_heard_of_by_one_that_has_no_link_with_it() -> None:
    async def work(trio: Trio) -> None:
        hub, one, other = trio.communicators
        key = hub.key(9)
        tensors = [torch.ones(6_000_000) for _ in range(3)]  # more than a member is sent before it has come
        waiting = asyncio.ensure_future(other.all_reduce(key, tensors[OTHER]))
        with pytest.raises(OperationAborted, match=r"not finished in 0\.1 s"):  # the hub has not come
            await one.all_reduce(key, tensors[ONE], deadline_s=0.1)
        with pytest.raises(OperationAborted):
            await hub.all_reduce(key, tensors[HUB])
        with pytest.raises(OperationAborted) as aborted:
            await waiting
        assert aborted.value.told_by == one.me.peer_id

    await with_trio(work)


async def test_word_of_a_member_without_a_link_that_was_lost_with_a_stream_is_not_awaited_to_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that the third one owes has come over another stream, and only who waits can dial this one."""
    held: list[Bundle] = []
    hand_on = Outbox.hand_on

    def hold(outbox: Outbox, frame_type: FrameType, to: int, **word: object) -> None:
        if held or to != 1:
            hand_on(outbox, frame_type, to, **word)
        else:
            held.append(outbox.bundle(to))  # the stream has the word, and delivers it to nobody

    settings = {"num_streams": 2, "options": replace(QUICK, install_grace_s=0.0)}
    async with (
        open_communicator(0, "127.0.0.1:0", **settings) as one,
        open_communicator(1, "127.0.0.1:0", **settings) as other,
        open_communicator(2, "127.0.0.1:0", **settings) as hub,
    ):
        communicators = [one, other, hub]
        view = view_of(0, [str(each.address) for each in communicators])
        view = msgspec.structs.replace(view, apart=((0, 1),))
        await asyncio.gather(*(each.install(view) for each in communicators))
        way = other._mesh.bundles[hub.me]
        for number in range(100):  # rounds in which somebody is awaited make all streams
            waiting = asyncio.gather(*(each.all_reduce(each.key(number), torch.ones(10)) for each in (one, other)))
            await wait_until(lambda waiting=waiting: way.is_whole or waiting.done())
            await asyncio.gather(hub.all_reduce(hub.key(number), torch.ones(10)), waiting)
            if way.is_whole and hub._mesh.bundles[other.me].is_whole:
                break
        monkeypatch.setattr(Outbox, "hand_on", hold)
        first, last, third = [
            asyncio.ensure_future(each.all_reduce(each.key(100), torch.ones(1000))) for each in communicators
        ]
        async with asyncio.timeout(10.0):
            await asyncio.gather(first, third)
            held[0]._links[1].close()
            with pytest.raises(OperationAborted, match="the round has ended there"):
                await last


async def test_what_needs_a_link_that_is_not_there_is_a_mistake_with_a_sentence() -> None:
    async def work(trio: Trio) -> None:
        one = trio.communicators[ONE]
        partner = trio.view.members[OTHER].peer_id
        with pytest.raises(ValueError, match="have no link; exchange with another member"):
            await one.exchange(one.key(3), torch.ones(4), out=torch.empty(4), partner=partner)
        with pytest.raises(ValueError, match='use "auto"'):
            await one.all_reduce(one.key(4), torch.ones(4000), plan="ring")

    await with_trio(work)
