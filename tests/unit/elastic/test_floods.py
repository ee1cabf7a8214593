# SPDX-License-Identifier: Apache-2.0
"""Who says more than anybody honest ever does is read later; everybody else gets its turns."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from isthmus.collective.core.types import Epoch, Incarnation, OuterStep, PeerRef
from isthmus.collective.transport import Channel, FrameType, Purpose, connect
from isthmus.collective.transport.reading import BOUNDS, Allowance, Allowances
from isthmus.collective.transport.wire import Header, pack
from isthmus.elastic.core.messages import Heartbeat, Met, PeerMessage
from isthmus.elastic.shell.control import ControlConnection
from isthmus.elastic.state.digest import Hasher
from isthmus.elastic.state.wire import StockRequest
from isthmus.elastic.wire import encode
from tests.unit.elastic.harness import DonorPeer, dial_state, hello, listening, peer_id, until

FLOOD_S = 1.5
LONGEST_GAP_S = 0.3
"""Before, the loop did not turn as long as the flood lasted; now it does every few milliseconds on a quiet machine."""
BEAT = Heartbeat(epoch=Epoch(1), outer_step=OuterStep(1), progress=1, blocked=True)
CROWD = Met(peers=tuple(PeerRef(peer_id(number), Incarnation(number)) for number in range(2000)))


def _frame(frame_type: FrameType, payload: bytes) -> bytes:
    return pack(Header(type=frame_type, payload_nbytes=len(payload)), payload) + payload


@contextlib.asynccontextmanager
async def _flooded(channel: Channel, frame: bytes) -> AsyncIterator[Callable[[], bool]]:
    """Other threads send this for a while, as fast as it is taken, and read answers. Yields whether they ended."""
    sock = socket.socket(fileno=socket.dup(channel._sock.fileno()))  # type: ignore[attr-defined]
    sock.settimeout(0.1)
    end = time.monotonic() + FLOOD_S
    block = frame * max(1, (64 << 10) // len(frame))

    def send() -> None:
        rest = memoryview(block)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                rest = rest[sock.send(rest) :] or memoryview(block)

    def read() -> None:
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                sock.recv(1 << 16)

    threads = [threading.Thread(target=work, daemon=True) for work in (send, read)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: time.monotonic() >= end
    finally:
        for thread in threads:
            await asyncio.to_thread(thread.join)
        sock.close()


async def _longest_gap_s(is_over: Callable[[], bool]) -> float:
    """How long the loop did not turn at most, until then."""
    longest_s, last = 0.0, time.monotonic()
    while not is_over():
        await asyncio.sleep(0)
        now = time.monotonic()
        longest_s, last = max(longest_s, now - last), now
    return longest_s


@pytest.mark.parametrize("word", [BEAT, CROWD, None], ids=["heartbeats", "crowds", "nothing"])
async def test_a_flood_of_words_leaves_the_loop_to_the_others(word: msgspec.Struct | None) -> None:
    heard: list[PeerMessage] = []

    async def serve(channel: Channel) -> None:
        await ControlConnection(channel, msgspec.msgpack.Decoder(PeerMessage)).run(heard.append)

    frame = _frame(FrameType.CONTROL, b"" if word is None else encode(word))
    async with listening(0, {Purpose.CONTROL: serve}) as door:
        channel = await connect(door.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        began = time.monotonic()
        async with _flooded(channel, frame) as is_over:
            assert await _longest_gap_s(is_over) < LONGEST_GAP_S
        elapsed_s = time.monotonic() - began
        channel.close()
    bounds = BOUNDS[Purpose.CONTROL]
    assert len(heard) <= bounds.frames_at_once + bounds.frames_per_s * elapsed_s + 1
    assert len(heard) * len(frame) <= bounds.bytes_at_once + bounds.bytes_per_s * elapsed_s + len(frame)
    assert heard or word is None


async def test_a_flood_of_questions_leaves_a_donor_to_the_others(hasher: Hasher) -> None:
    donor = DonorPeer.at_step(1, hasher, 5)
    async with donor.serving() as member:
        channel = await dial_state(member)
        question = _frame(FrameType.STATE_REQUEST, encode(StockRequest(OuterStep(10**6))))
        async with _flooded(channel, question) as is_over:
            assert await _longest_gap_s(is_over) < LONGEST_GAP_S
        channel.close()
        await until(lambda: donor.donor.num_connections == 0)


def _waits(allowance: Allowance) -> bool:
    waiting = allowance.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return False
    waiting.close()
    return True


async def test_nobody_honest_ever_waits_to_be_read() -> None:
    allowance = Allowance(BOUNDS[Purpose.CONTROL])
    for _ in range(
        3 * 300
    ):  # a second of the fastest run: a vote, a heartbeat and a request for samples of each commit
        assert not _waits(allowance)
        allowance.spend(1000)
    allowance = Allowance(BOUNDS[Purpose.CONTROL])
    for _ in range(16):  # the longest that a peer may say, as it comes
        assert not _waits(allowance)
        allowance.spend(256 << 10)
    allowance.spend(256 << 10)
    assert _waits(allowance)


async def test_who_dials_anew_has_what_it_has_left() -> None:
    allowances = Allowances()
    first = allowances.of(hello(Purpose.CONTROL, 1))
    assert first is not None
    assert allowances.of(hello(Purpose.BULK, 1)) is None
    first.spend(1)
    assert allowances.of(hello(Purpose.CONTROL, 1, incarnation=2)) is first
    assert allowances.of(hello(Purpose.STATE, 1)) is not first
    assert allowances.of(hello(Purpose.CONTROL, 2)) is not first
