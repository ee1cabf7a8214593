# SPDX-License-Identifier: Apache-2.0
"""Who shares memory at the door, and whole operations over it."""

import asyncio
import contextlib
import os
import socket

import pytest
import torch

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.collective.errors import HandshakeRefused, OperationAborted
from isthmus.collective.rounds.options import BulkOptions
from isthmus.collective.transport import Hello, HelloReply, Listener, Purpose
from isthmus.collective.transport.dialling import open_connection
from isthmus.collective.transport.shared_socket import SharedSocket
from isthmus.collective.transport.sockets import SocketOptions
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from tests.unit.collective.conftest import QUICK, num_descriptors, num_mapped

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files are Linux's")

PLAIN = SocketOptions(shares_memory=False)


# ------------------------------------------------------------------------ a door


def hello(purpose=Purpose.BULK):
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id="run",
        purpose=purpose,
        peer_id=PeerId("c" * 16),
        incarnation=Incarnation(7),
    )


@contextlib.asynccontextmanager
async def door(*, accepted=True, options=None):
    """A listener, and the bulk connections that came in."""
    came = []

    async def keep(channel):
        came.append(channel)
        await asyncio.sleep(3600)

    answer = HelloReply(accepted=accepted, code=5, reason="no", peer_id=PeerId("5" * 16), incarnation=Incarnation(3))
    async with Listener(
        "127.0.0.1:0",
        accept=lambda _: answer,
        routes={Purpose.CONTROL: keep},
        bulk=lambda sock, _: came.append(sock),
        options=options,
    ) as listener:
        yield listener.address, came
    for sock in came:
        sock.close()


async def dialled(address, came, until, *, options=None, purpose=Purpose.BULK):
    sock, reply, _ = await open_connection(address, hello(purpose), timeout_s=5, options=options)
    await until(lambda: came)
    return sock, reply


async def test_bulk_connections_within_the_machine_share_memory(until):
    async with door() as (address, came):
        sock, reply = await dialled(address, came, until)
        assert reply.shares_memory
        assert isinstance(sock, SharedSocket)
        assert isinstance(came[0], SharedSocket)
        sock.send(b"hello")
        came[0].recv_into(buffer := bytearray(5))
        assert buffer == b"hello"
        sock.close()
    assert num_mapped() == 0


@pytest.mark.parametrize(("ours", "theirs"), [(PLAIN, None), (None, PLAIN)])
async def test_either_side_can_keep_to_tcp(until, ours, theirs):
    async with door(options=theirs) as (address, came):
        sock, reply = await dialled(address, came, until, options=ours)
        assert not reply.shares_memory
        assert (type(sock), type(came[0])) == (socket.socket, socket.socket)
        sock.close()
    assert num_mapped() == 0


async def test_other_connections_stay_with_tcp(until):
    async with door() as (address, came):
        sock, _ = await dialled(address, came, until, purpose=Purpose.CONTROL)
        assert type(sock) is socket.socket
        sock.close()


async def test_who_is_refused_leaves_no_memory_behind():
    before = num_descriptors()
    async with door(accepted=False) as (address, _):
        with pytest.raises(HandshakeRefused):
            await open_connection(address, hello(), timeout_s=5)
    assert num_mapped() == 0
    assert num_descriptors() == before


# ------------------------------------------------------------------------ rounds


SHARING = {"options": BulkOptions(patience=QUICK.patience, install_grace_s=5.0), "chunk_nbytes": 1 << 20}


def parts(count, numel=3_000_000):
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(count)]


@pytest.mark.parametrize("codec", ["raw", "int8", "topk:64"])
@pytest.mark.parametrize(
    ("count", "plan", "numel"),
    [(2, "butterfly", 1_500_000), (2, "auto", 50_000), (3, "butterfly", 1_500_000), (4, "ring", 1_500_000)],
)
async def test_operations_have_the_same_bits_as_over_tcp(sites_running, count, plan, numel, codec):
    outs = []
    for more in (SHARING, {"options": QUICK}):
        async with sites_running(count, **more) as sites:
            links = [
                link for site in sites for b in site.communicator._mesh.bundles.values() for link in b._links.values()
            ]
            assert {isinstance(link._sock, SharedSocket) for link in links} == {more is SHARING}
            ours = [torch.empty(numel) for _ in sites]
            await asyncio.gather(
                *(
                    site.mean(part, out=out, codec=codec, plan=plan)
                    for site, part, out in zip(sites, parts(count, numel), ours, strict=True)
                )
            )
            moved = [bundle.moved() > 0 for site in sites for bundle in site.communicator._mesh.bundles.values()]
            assert sum(moved) == (2 * count if plan == "ring" else count * (count - 1))
            assert sum(link.bytes_delivered() for link in links) > 0
        assert all(torch.equal(out, ours[0]) for out in ours)
        outs.append(ours[0])
    if count == 2:  # with more of them the order of a sum may differ
        assert torch.equal(*outs)
    else:
        assert torch.allclose(*outs, atol=1e-5 if codec == "raw" else 0.2)
    assert num_mapped() == 0


async def test_many_operations_at_once_and_caps_end_well(sites_running):
    options = BulkOptions(patience=QUICK.patience, max_upload=40e6, max_download=40e6)
    for more in (SHARING, SHARING | {"options": options}):
        async with sites_running(3, **more) as sites:
            tensors = parts(3, 300_000)
            works = [
                site.mean(tensor, out=torch.empty(300_000), step=step)
                for step in range(12)
                for site, tensor in zip(sites, tensors, strict=True)
            ]
            async with asyncio.timeout(15):
                stats = await asyncio.gather(*works)
        assert len(stats) == 36


async def test_a_peer_that_vanishes_in_mid_operation_ends_it_and_leaves_no_memory(sites_running, outcome, until):
    async with sites_running(3, **SHARING) as sites:
        tensors = parts(3)
        works = [asyncio.ensure_future(outcome(site.mean(tensor))) for site, tensor in zip(sites, tensors, strict=True)]
        await until(lambda: any(site.communicator._mesh.bytes_received > 1 << 20 for site in sites))
        await sites[2].close()
        ends = await asyncio.gather(*works)
    assert all(isinstance(end, OperationAborted) for end in ends[:2])
    assert all(torch.equal(*both) for both in zip(tensors[:2], parts(3)[:2], strict=True))
    assert num_mapped() == 0
