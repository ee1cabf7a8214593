# SPDX-License-Identifier: Apache-2.0
"""Peers that come one after the other, and keep their loops busy meanwhile."""

import asyncio

import pytest
import torch

from isthmus.collective import BulkOptions, OperationAborted
from isthmus.collective.api.standalone import open_communicator, peer_id_of, view_of
from isthmus.collective.rounds.supervision import Patience
from isthmus.collective.transport import SocketOptions
from isthmus.collective.transport.dialling import introduce
from isthmus.collective.transport.sockets import dial

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


@pytest.mark.parametrize(("epoch", "is_patient"), [(2, False), (3, True)])
async def test_who_missed_a_view_waits_for_a_new_call_of_peers_whose_old_connection_ends(epoch, is_patient):
    """A healed line may need a second until calls get through; what was connected before it was cut ends meanwhile."""
    async with open_communicator(0, options=OPTIONS) as calling, open_communicator(1, options=OPTIONS) as healed:
        addresses = [calling.address, healed.address]
        await asyncio.gather(*(each.install(view_of(1, addresses)) for each in (calling, healed)))
        await asyncio.gather(*(each.all_reduce(each.key(1), torch.ones(8), op="mean") for each in (calling, healed)))
        await healed.install(view_of(epoch, addresses))
        (bundle,) = calling._mesh.bundles.values()
        calling._mesh.drop(bundle.peer)
        waiting = asyncio.ensure_future(healed.all_reduce(healed.key(2), torch.ones(8), op="mean"))
        await asyncio.wait([waiting], timeout=10 * REDIAL_S)
        if is_patient:
            await calling.install(view_of(epoch, addresses))
            await asyncio.gather(waiting, calling.all_reduce(calling.key(2), torch.ones(8), op="mean"))
        else:
            with pytest.raises(OperationAborted, match="connection lost"):
                await waiting
