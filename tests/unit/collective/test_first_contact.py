"""Peers that come one after the other, and keep their loops busy meanwhile."""

import asyncio

import torch

from collective import BulkOptions
from collective.standalone import open_communicator, peer_id_of, view_of
from collective.supervision import Patience
from collective.transport import SocketOptions
from collective.transport.dialling import introduce
from collective.transport.sockets import dial

REDIAL_S = 0.05
OPTIONS = BulkOptions(
    patience=Patience(redial_s=REDIAL_S, first_contact_s=20.0),
    sockets=SocketOptions(shares_memory=False),
)


async def given_up(address, hello):
    """A connection of peer 0 whose dialler did not wait until it was taken."""
    sock = await dial(address, SocketOptions(), timeout_s=5)
    await introduce(sock, hello, timeout_s=5)
    sock.close()


async def test_a_dial_that_was_given_up_before_it_was_taken_was_no_contact(bulk_hello, until):
    """Found as a first round that was aborted after 0.3 s: both peers made their tensors for longer than that."""
    async with open_communicator(0, options=OPTIONS) as late, open_communicator(1, options=OPTIONS) as early:
        view = view_of(1, [late.address, early.address])
        await early.install(view)
        me = type(view.members[0].ref)(peer_id_of(0), view.members[0].incarnation)
        await given_up(early.address, bulk_hello(me))
        (bundle,) = early._mesh.bundles.values()
        await until(lambda: bundle.was_connected and bundle.has_lost)
        waiting = asyncio.ensure_future(early.all_reduce(early.key(1), torch.ones(8), op="mean"))
        await asyncio.wait([waiting], timeout=6 * REDIAL_S)
        await late.install(view)
        await asyncio.gather(waiting, late.all_reduce(late.key(1), torch.ones(8), op="mean"))
