# SPDX-License-Identifier: Apache-2.0
"""Communicators of several peers in one process and one loop, on real sockets."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from isthmus.collective import (
    BulkOptions,
    Communicator,
    Epoch,
    Incarnation,
    Member,
    NonFiniteInput,
    OperationAborted,
    OuterStep,
    PeerId,
    PeerRef,
    PlanMismatch,
    RoundKey,
    View,
)
from isthmus.collective.core.progress import StallLimits
from isthmus.collective.rounds.supervision import Patience
from isthmus.collective.transport import Hello, HelloReply, Listener, Purpose, SocketOptions
from isthmus.collective.transport.wire import PROTOCOL_VERSION

# The floor is above the pause between two signs of life, else a member that waits for a third one would be a suspect.
QUICK = BulkOptions(
    patience=Patience(stall=StallLimits(floor_s=1.5), redial_s=0.2, first_contact_s=0.5, round_s=20.0),
    install_grace_s=5.0,
    sockets=SocketOptions(shares_memory=False),  # bytes go as between machines; test_shared_link.py has the other way
)


def make_bulk_hello(me: PeerRef, stream=0, num_streams=1):
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id="run",
        purpose=Purpose.BULK,
        peer_id=me.peer_id,
        incarnation=me.incarnation,
        stream=stream,
        num_streams=num_streams,
    )


class Site:
    """One peer: a communicator and its listener."""

    def __init__(self, number, incarnation=1, **more):
        self.me = PeerRef(PeerId(f"{number:016x}"), Incarnation(incarnation))
        self.communicator = Communicator(
            me=self.me,
            hello=lambda _, stream, num_streams: make_bulk_hello(self.me, stream, num_streams),
            **({"options": QUICK, "chunk_nbytes": 1 << 20} | more),
        )
        self.listener = Listener(
            "127.0.0.1:0",
            accept=lambda _: HelloReply(accepted=True, peer_id=self.me.peer_id, incarnation=self.me.incarnation),
            routes={},
            bulk=self.communicator.adopt,
        )

    @property
    def member(self):
        return Member(self.me.peer_id, self.me.incarnation, self.listener.address)

    @property
    def peer_id(self):
        return self.me.peer_id

    def mean(self, tensor, *, step=0, epoch=1, **more):
        return self.communicator.all_reduce(RoundKey(Epoch(epoch), OuterStep(step), 0), tensor, op="mean", **more)

    async def close(self):
        await self.communicator.close()
        await self.listener.close()


def make_view(sites, epoch=1):
    return View(Epoch(epoch), OuterStep(0), b"", tuple(site.member for site in sites))


@contextlib.asynccontextmanager
async def running_sites(count, *, first=None, **more):
    """`first`: of the first one alone."""
    sites = [Site(number, **(more if number else more | (first or {}))) for number in range(count)]
    for site in sites:
        await site.listener.start()
    try:
        await asyncio.gather(*(site.communicator.install(make_view(sites)) for site in sites))
        yield sites
    finally:
        for site in sites:
            await site.close()


async def wait_until(condition):
    """Give the loop its turns until `condition()` holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what sockets do has no event
            await asyncio.sleep(0)


async def outcome_or_abort(work):
    """The value of `work`, or the error by which its round was ended."""
    try:
        return await work
    except (OperationAborted, PlanMismatch, NonFiniteInput) as error:
        return error


async def all_outcomes(works):
    """Outcomes of rounds that run at once, in order. Whoever waits for a lost one is found by the test's timeout."""
    return await asyncio.gather(*(outcome_or_abort(work) for work in works))


@pytest.fixture
def outcome():
    return outcome_or_abort


@pytest.fixture
def outcomes():
    return all_outcomes


@pytest.fixture
def until():
    return wait_until


@pytest.fixture
def sites_running():
    return running_sites


@pytest.fixture
async def new_site():
    """Makes peers that no view has named yet."""
    sites = []

    async def make(number):
        sites.append(Site(number))
        await sites[-1].listener.start()
        return sites[-1]

    yield make
    for site in sites:
        await site.close()


@pytest.fixture
def view_of():
    return make_view


@pytest.fixture
def bulk_hello():
    return make_bulk_hello


def num_mapped():
    """How many such files this process has mapped."""
    return sum("memfd:isthmus-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))
