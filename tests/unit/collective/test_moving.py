# SPDX-License-Identifier: Apache-2.0
"""What counts as bringing a round further, and who is named where nothing does."""

import asyncio
import contextlib
import socket

import pytest
import torch

from isthmus.collective.errors import OperationAborted
from isthmus.collective.rounds.options import BulkOptions
from isthmus.collective.rounds.outbox import Outbox
from isthmus.collective.rounds.supervision import Patience, StallLimits
from isthmus.collective.transport.link import Caps, Link
from isthmus.collective.transport.moving import Moving
from isthmus.collective.transport.wire import PADDING_NBYTES, FrameType, Header, on_bulk, pack
from tests.unit.collective.conftest import QUICK

CHUNK_NBYTES = 1 << 20


class Outgoing:
    """A frame of this owner; a notice has none."""

    def __init__(self, header, payload, owner=None):
        self._pieces = pack(header, payload), memoryview(payload)
        self.owner = owner

    def pieces(self, _scratch):
        return self._pieces

    def sent(self, nbytes):
        pass


class Owner:
    """Of a link: sends what it is given, wants what it is told to want."""

    def __init__(self, *, wants=True):
        self.queue = []
        self.num_frames = 0
        self._wants = wants

    def next_out(self, _link):
        return self.queue.pop(0) if self.queue else None

    def place(self, link, header):
        is_chunk = header.type in (FrameType.PART, FrameType.RESULT)
        return link.staging.room(header.payload_nbytes), self if is_chunk else None

    @property
    def owner(self):
        return self

    def wants(self, _header):
        return self._wants

    def take(self, _link, _frame):
        self.num_frames += 1

    def on_frame(self, _link, _frame):
        self.num_frames += 1

    def on_lost(self, _link, _cause):
        pass


@contextlib.contextmanager
def linked(**more):
    """A link, its owner and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    ours.setblocking(False)
    owner = Owner(**more)
    link = Link(ours, stream=0, limits=on_bulk(CHUNK_NBYTES), caps=Caps(), owner=owner)
    try:
        yield link, owner, theirs
    finally:
        link.close()
        theirs.close()


def frame_of(frame_type, nbytes):
    payload = bytes(nbytes)
    return pack(Header(type=frame_type, payload_nbytes=nbytes), payload) + payload


@pytest.mark.parametrize(("frame_type", "nbytes"), [(FrameType.PADDING, PADDING_NBYTES), (FrameType.SIGN, 0)])
async def test_padding_and_signs_move_nothing_whole_or_not_in_either_direction(until, frame_type, nbytes):
    with linked() as (link, owner, theirs):
        whole = frame_of(frame_type, nbytes)
        theirs.sendall(whole + whole[: len(whole) // 2])
        await until(lambda: link.bytes_received == len(whole) + len(whole) // 2)
        owner.queue.append(Outgoing(Header(type=frame_type, payload_nbytes=nbytes), bytes(nbytes)))
        link.wake()
        theirs.recv(1 << 20)
        await until(lambda: link.bytes_sent and not link._untaken_nbytes())
        assert owner.num_frames == 1
        assert link.moved() == 0


async def test_a_chunk_that_is_needed_moves_as_it_comes_byte_by_byte(until):
    with linked() as (link, _, theirs):
        whole = frame_of(FrameType.PART, 10_000)
        theirs.sendall(whole[:1048])
        await until(lambda: link.moved() == 1000)
        theirs.sendall(whole[1048:1049])
        await until(lambda: link.moved() == 1001)


async def test_a_chunk_that_nobody_needs_moves_nothing_while_it_comes(until):
    with linked(wants=False) as (link, _, theirs):
        theirs.sendall(frame_of(FrameType.PART, 10_000)[:5000])
        await until(lambda: link.bytes_received == 5000)
        assert link.moved() == 0


async def test_a_chunk_that_is_sent_moves_as_far_as_it_is_taken_and_what_follows_it_does_not(until):
    with linked() as (link, owner, theirs):
        nbytes = CHUNK_NBYTES - 48
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        part = Header(type=FrameType.PART, payload_nbytes=nbytes)
        owner.queue += [Outgoing(part, bytes(nbytes), owner), Outgoing(Header(type=FrameType.SIGN), b"")]
        link.wake()
        seen, received = set(), 0
        while received < CHUNK_NBYTES + 48:
            received += len(await asyncio.to_thread(theirs.recv, 64 << 10))
            await asyncio.sleep(0)
            seen.add(link.moved())
        await until(lambda: link.moved() == CHUNK_NBYTES)
        assert len(seen) > 2, "it is seen to move on its way"


def test_the_number_never_falls_and_what_moves_again_counts_again():
    moving = Moving()
    assert moving.total(1000) == 1000
    assert moving.total(0) == 1000, "the link broke"
    assert moving.total(10) == 1010
    moving.came(100, is_needed=True)
    assert moving.total(0) == 1100


def test_of_chunks_that_no_round_needs_some_in_a_row_count():
    moving = Moving()
    for _ in range(100):
        moving.came(10, is_needed=False)
    assert moving.total(0) == 320
    moving.came(10, is_needed=True)
    moving.came(10, is_needed=False)
    assert moving.total(0) == 340


# ------------------------------------------------------------------------ whole rounds


async def _pad(site):
    while True:
        for bundle in list(site.communicator._mesh.bundles.values()):
            bundle.pad_once()
        await asyncio.sleep(0.1)


@pytest.fixture
def withholding(monkeypatch):
    """The member of rank 3 sends no parts."""
    put_chunk = Outbox.put_chunk

    def withhold(self, frame_type, to, chunk):
        if self.rank != 3 or frame_type is not FrameType.PART:
            put_chunk(self, frame_type, to, chunk)

    monkeypatch.setattr(Outbox, "put_chunk", withhold)


@pytest.mark.parametrize("pads", [False, True], ids=["silent", "padding"])
async def test_a_member_that_withholds_its_parts_is_named_alone_whatever_else_it_sends(
    sites_running, outcomes, withholding, pads
):
    # Found before: with padding it counted as moving; after half an hour the round ended and named everybody.
    async with sites_running(4) as sites, asyncio.TaskGroup() as tasks:
        padding = tasks.create_task(_pad(sites[3]) if pads else asyncio.sleep(0))
        ended = await outcomes([site.mean(torch.ones(4096)) for site in sites])
        padding.cancel()
        liar = sites[3].peer_id
    for error in ended:
        assert isinstance(error, OperationAborted)
        assert "no byte moved for too long" in str(error)
        assert error.suspects == (liar,)
    assert [error.told_by for error in ended[:3]] == [None] * 3, "all have seen it for themselves"


LATE = BulkOptions(patience=Patience(stall=StallLimits(floor_s=5.0), round_s=1.0), sockets=QUICK.sockets)
"""The deadline comes before any other suspicion."""


async def test_at_the_deadline_nobody_is_named_that_waits_for_others(sites_running, outcomes, withholding):
    async with sites_running(4, options=LATE) as sites:
        ended = await outcomes([site.mean(torch.ones(4096), plan="ring") for site in sites])
        liar = sites[3].peer_id
    for error in ended:
        assert isinstance(error, OperationAborted)
        assert "not finished in 1 s" in str(error)
        assert set(error.suspects) <= {liar}


async def test_at_the_deadline_only_who_has_not_come_is_named_and_not_who_waits_for_it(sites_running, outcomes):
    async with sites_running(3, options=LATE) as sites:
        here, missing = sites[:2], sites[2].peer_id
        ended = await outcomes([site.mean(torch.ones(4096)) for site in here])
    for error in ended:
        assert isinstance(error, OperationAborted)
        assert error.suspects == (missing,)


@pytest.mark.parametrize("cap", ["max_upload", "max_download"])
@pytest.mark.parametrize("plan", ["butterfly", "ring"])
async def test_a_slow_line_moves_in_either_direction_however_long_a_chunk_takes(sites_running, outcomes, cap, plan):
    patience = Patience(stall=StallLimits(floor_s=1.4, chunk_times=0.0), round_s=30.0)
    options = BulkOptions(patience=patience, sockets=QUICK.sockets, **{cap: 80e3})
    async with sites_running(3, options=options) as sites:
        ended = await outcomes([site.mean(torch.ones(50_000), plan=plan) for site in sites])  # 3 s and more
    assert not [error for error in ended if isinstance(error, Exception)]
