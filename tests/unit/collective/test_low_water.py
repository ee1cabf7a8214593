# SPDX-License-Identifier: Apache-2.0
"""For how many bytes a link is woken. Real sockets; their distance is set."""

import asyncio
import contextlib
import os
import socket
from random import Random

import pytest

from isthmus.collective.transport import low_water
from isthmus.collective.transport.link import Caps, Link
from isthmus.collective.transport.wire import FrameType, Header, on_bulk, pack
from tests.unit.collective.test_tls import closing_pair, readable, tcp_pair

CHUNK_NBYTES = 256 << 10
CHUNK_S = 0.016  # of one of eight streams that share 1 Gbit/s


class Owner:
    """Keeps what it hears."""

    def __init__(self):
        self.frames = []
        self.cause = None

    def next_out(self, _link):
        return None

    def place(self, link, header):
        return link.staging.room(header.payload_nbytes), self

    def wants(self, _header):
        return True

    def take(self, _link, frame):
        self.frames.append((frame.header.chunk, bytes(frame.payload)))

    def on_frame(self, link, frame):
        self.take(link, frame)

    def on_lost(self, _link, cause):
        self.cause = cause


def link_on(sock, *, download=None):
    """A link that knows its speed already, and its owner."""
    owner = Owner()
    link = Link(sock, stream=0, limits=on_bulk(CHUNK_NBYTES), caps=Caps(download=download), owner=owner)
    link._whole_chunk_s = CHUNK_S
    return link, owner


@contextlib.contextmanager
def linked(**more):
    ours, theirs = tcp_pair()
    ours.setblocking(False)
    link, owner = link_on(ours, **more)
    with contextlib.closing(theirs), contextlib.closing(link):
        yield link, owner, ours, theirs


def chunk(number, nbytes):
    payload = Random(number).randbytes(nbytes)
    return pack(Header(type=FrameType.RESULT, payload_nbytes=nbytes, chunk=number), payload) + payload


def threshold(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(low_water, "round_trip_s", lambda _: 0.05)


async def test_it_waits_for_what_comes_in_a_moment_and_for_no_more_than_is_missing(far, until):
    with linked() as (link, owner, ours, theirs):
        assert threshold(ours) == 1
        whole = chunk(0, CHUNK_NBYTES)
        theirs.sendall(whole[:1000])
        await until(lambda: link.bytes_received == 1000)
        assert threshold(ours) == 128 << 10
        theirs.sendall(whole[1000:-5000])
        await until(lambda: link.heard() == len(whole) - 5000)
        assert threshold(ours) <= len(whole) - link.bytes_received
        theirs.sendall(whole[-5000:])
        await until(lambda: owner.frames)
        assert threshold(ours) == 1
        link._whole_chunk_s = 10.0  # 26 KB/s
        theirs.sendall(whole[:1000])
        await until(lambda: link.bytes_received == len(whole) + 1000)
        assert threshold(ours) == CHUNK_NBYTES // 1000


@pytest.mark.parametrize("seed", range(10))
async def test_every_frame_arrives_in_whatever_pieces_it_comes(far, until, seed):
    random = Random(seed)
    sizes = [random.choice([0, 1, 100, 5000, 70_000, CHUNK_NBYTES]) for _ in range(8)]
    with linked() as (_, owner, _, theirs):
        await trickle(theirs, b"".join(chunk(number, size) for number, size in enumerate(sizes)), random)
        await until(lambda: len(owner.frames) == len(sizes))
        assert owner.frames == [(number, chunk(number, size)[48:]) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(10))
async def test_what_the_encryption_holds_of_a_record_is_not_waited_for_again(far, until, seed):
    random = Random(seed)
    async with closing_pair() as (here, there):
        relay_in, relay_out = tcp_pair()
        with contextlib.closing(relay_in), contextlib.closing(relay_out):
            sealed = await sealed_bytes(here, there, chunk(0, CHUNK_NBYTES) + chunk(1, 3000))
            os.dup2(relay_out.fileno(), there.fileno())
            link, owner = link_on(there)
            with contextlib.closing(link):
                await trickle(relay_in, sealed, random)
                await until(lambda: len(owner.frames) == 2)


async def trickle(sock, data, random):
    """Send in pieces of any length; the receiver has its turn after each."""
    sock.setblocking(False)
    while data:
        piece = random.choice([1, 50, 1448, 20_000, 100_000])
        await asyncio.get_running_loop().sock_sendall(sock, data[:piece])
        data = data[piece:]
        await asyncio.sleep(0)


async def sealed_bytes(here, there, data):
    """What the kernel would carry of it; `there` does not see it."""
    sealed, view = b"", memoryview(data)
    while view or readable(there):
        with contextlib.suppress(BlockingIOError):
            view = view[here.send(view) if view else 0 :]
        while readable(there):
            sealed += os.read(there.fileno(), 1 << 20)
    return sealed


async def test_what_waits_in_the_kernel_is_heard_and_has_moved(far, until):
    with linked() as (link, _, ours, theirs):
        whole = chunk(0, CHUNK_NBYTES)
        theirs.sendall(whole[:1000])
        await until(lambda: threshold(ours) > 1)
        heard, moved = link.heard(), link.moved()
        theirs.sendall(whole[1000:31_000])
        await until(lambda: link.heard() == heard + 30_000)
        assert link.moved() == moved + 30_000
        assert link.bytes_received == 1000


async def test_the_end_wakes_at_once(far, until):
    with linked() as (link, owner, ours, theirs):
        theirs.sendall(chunk(0, CHUNK_NBYTES)[:1000])
        await until(lambda: threshold(ours) > 1)
        theirs.sendall(bytes(10))
        theirs.close()
        await until(lambda: owner.cause is not None)
        assert link.closed


async def test_near_and_under_a_cap_every_byte_wakes(monkeypatch, until):
    with linked() as (link, _, ours, theirs):
        theirs.sendall(chunk(0, CHUNK_NBYTES)[:1000])
        await until(lambda: link.bytes_received == 1000)
        assert threshold(ours) == 1
    monkeypatch.setattr(low_water, "round_trip_s", lambda _: 0.05)
    with linked(download=1e9) as (link, _, ours, theirs):
        theirs.sendall(chunk(0, CHUNK_NBYTES)[:1000])
        await until(lambda: link.bytes_received == 1000)
        assert threshold(ours) == 1
