#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutated frames against everything that reads frames: `scripts/fuzz_frames.py --frames 1000000`.

Half of them go through a FrameReader with the limits of each kind of connection, and what comes out is decoded as its
type says. The other half go into a communicator that is in the middle of an all-reduce with the attacker, over TCP or
through shared memory, so through Link, Bundle, Engine and Round as in life. Every 2,000 frames that communicator must
exchange a tensor with an honest peer, and get the exact mean.

Fails on any error but RemoteProtocolError in a reader, on any exception that reaches the event loop, on an operation
that ends in another way than a result, OperationAborted or PlanMismatch, and if memory grows by more than 64 MiB.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import resource
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from isthmus.collective import BulkOptions, Communicator, OperationAborted, PlanMismatch, RemoteProtocolError
from isthmus.collective.api.standalone import open_communicator, peer_id_of, view_of
from isthmus.collective.rounds.notices import AbortNotice
from isthmus.collective.rounds.plan import Terms
from isthmus.collective.rounds.supervision import Patience
from isthmus.collective.transport.hello import Hello, HelloReply, Purpose, decode
from isthmus.collective.transport.shared_memory import make_offering, take_offer
from isthmus.collective.transport.shared_socket import SharedSocket
from isthmus.collective.transport.wire import (
    BEFORE_HELLO,
    BEFORE_REPLY,
    HEADER_NBYTES,
    ON_CONTROL,
    ON_STATE,
    PROTOCOL_VERSION,
    FrameReader,
    FrameType,
    Header,
    on_bulk,
    whole_frame,
)
from scripts.faults.hostile import Hostile

CHUNK_NBYTES = 8192
NUMEL = 6144
ATTACKER, VICTIM, HONEST = 0, 5, 6
NOWHERE = "127.0.0.1:1"
MAX_GROWTH_KIB = 64 << 10
_BATCH = 8
_USE_EVERY = 2000
_HOSTILITIES = (0.0, 0.0, 0.1, 0.3, 1.0)
"""How many frames of a batch are changed. Often few, to be far in a round when it happens."""
_KINDS = {
    FrameType.HELLO: Hello,
    FrameType.HELLO_REPLY: HelloReply,
    FrameType.OPEN: Terms,
    FrameType.ABORT: AbortNotice,
}
_LIMITS = (BEFORE_HELLO, BEFORE_REPLY, ON_CONTROL, ON_STATE, on_bulk(CHUNK_NBYTES))


class FuzzError(Exception):
    """Something came out that must not."""


# ------------------------------------------------------------------------------------ readers alone


def fuzz_readers(hostile: Hostile, rng: random.Random, num_frames: int) -> None:
    """Feed mutated frames to readers, in pieces of any length; decode what comes out. Raises whatever is wrong."""
    stream = b""
    for count in range(num_frames):
        stream += hostile.frame(1.0)
        if count % _BATCH == _BATCH - 1 or count == num_frames - 1:
            _read(stream, rng)
            stream = b""


def _read(stream: bytes, rng: random.Random) -> None:
    limits = rng.choice(_LIMITS)

    def place(header: Header) -> memoryview:
        if header.payload_nbytes > limits[header.type]:
            raise FuzzError(f"{header.payload_nbytes} bytes are to be placed, more than {limits[header.type]}")
        return memoryview(bytearray(header.payload_nbytes))

    with contextlib.suppress(RemoteProtocolError):
        whole_frame(memoryview(stream), limits)
    reader = FrameReader(limits=limits, place=place, read_ahead=rng.random() < 0.5)
    piece = rng.choice((1 << 16, 1000, 47))
    position = 0
    while position < len(stream):
        nbytes = 0
        for buffer in reader.next_buffers():
            taken = min(len(buffer), piece - nbytes, len(stream) - position)
            buffer[:taken] = stream[position : position + taken]
            position, nbytes = position + taken, nbytes + taken
        try:
            frames = reader.received(nbytes)
        except RemoteProtocolError:
            # The connection would be closed. Whoever comes next has a reader of his own, at the next frame.
            reader = FrameReader(limits=limits, place=place, read_ahead=True)
            position = _next_frame(stream, position)
            continue
        for frame in frames:
            kind: Any = _KINDS.get(frame.header.type)
            if kind is not None:
                with contextlib.suppress(RemoteProtocolError):
                    decode(frame.payload, kind)


def _next_frame(stream: bytes, position: int) -> int:
    found = stream.find(b"IS", max(0, position - HEADER_NBYTES + 1))
    return len(stream) if found < 0 else max(found, position)


# ------------------------------------------------------------------------------------ a whole communicator


class Attack:
    """An attacker that is a member, against a communicator in the middle of an all-reduce with it."""

    def __init__(self, victim: Communicator, honest: Communicator, hostile: Hostile, rng: random.Random) -> None:
        self._victim = victim
        self._honest = honest
        self._hostile = hostile
        self._rng = rng
        self._epoch = 0
        self._step = 0
        self._sock: socket.socket | None = None
        self._reader = _reader()
        self._operation: asyncio.Task[None] | None = None
        self._tensor = torch.arange(NUMEL).float()
        self.outcomes: Counter[str] = Counter()

    async def run(self, num_frames: int) -> None:
        """Send so many frames. Raises whatever is wrong."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with asyncio.TaskGroup() as tasks:
                for start in range(0, num_frames, _USE_EVERY):
                    await self._install_attacked()
                    for first in range(start, min(start + _USE_EVERY, num_frames), _BATCH):
                        if self._operation is None or self._operation.done():
                            self._operation = tasks.create_task(self._operate())
                        await self._send(server, min(_BATCH, num_frames - first))
                    await self._use()
            if self._sock is not None:
                self._sock.close()

    async def _install_attacked(self) -> None:
        self._epoch += 1
        address = self._victim.address
        assert address is not None
        await self._victim.install(view_of(self._epoch, {ATTACKER: NOWHERE, VICTIM: address}))

    async def _operate(self) -> None:
        self._step += 1
        try:
            out, codec = torch.empty(NUMEL), self._rng.choice(("raw", "int8"))
            await self._victim.all_reduce(self._victim.key(self._step), self._tensor, out=out, codec=codec)
        except (OperationAborted, PlanMismatch) as error:
            outcome = type(error).__name__
        else:
            outcome = "finished"
        self.outcomes[outcome] += 1

    async def _send(self, server: socket.socket, num_frames: int) -> None:
        if self._sock is None:
            self._sock = self._connect(server)
        await asyncio.sleep(0)
        hostility = self._rng.choice(_HOSTILITIES)
        try:
            self._listen(self._sock)
            self._sock.send(b"".join(self._hostile.frame(hostility) for _ in range(num_frames)))
            for _ in range(3):
                await asyncio.sleep(0)
            self._listen(self._sock)
        except BlockingIOError:
            await asyncio.sleep(0)
        except OSError:
            self._sock.close()
            self._sock = None
            self.outcomes["connection closed"] += 1
            if self._rng.random() < 0.02 and self._operation is not None:
                await asyncio.wait([self._operation])

    def _connect(self, server: socket.socket) -> socket.socket:
        ours = socket.create_connection(server.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset leaves no TIME_WAIT
        theirs, _ = server.accept()
        self._reader = _reader()
        for sock in (ours, theirs):
            sock.setblocking(False)
        offering = make_offering() if self._rng.random() < 0.5 else None
        if offering is not None:
            memory = take_offer(offering.offer)
            offering.close()
            if memory is None:
                raise RuntimeError("a process cannot reach its own memory: is /proc mounted?")
            ours = SharedSocket(ours, offering.memory, is_dialler=True)
            theirs = SharedSocket(theirs, memory, is_dialler=False)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id="",
            purpose=Purpose.BULK,
            peer_id=peer_id_of(ATTACKER),
            incarnation=self._victim.me.incarnation,
        )
        self._victim.adopt(theirs, hello)
        return ours

    def _listen(self, sock: socket.socket) -> None:
        """Read what the victim says, and learn from it. Raises OSError if it has hung up."""
        with contextlib.suppress(BlockingIOError):
            while True:
                nbytes = sock.recv_into(self._reader.next_buffers()[0])
                if not nbytes:
                    raise ConnectionResetError
                for frame in self._reader.received(nbytes):
                    self._hostile.learn(frame, rank=0)

    async def _use(self) -> None:
        """The victim must still be of use to an honest peer."""
        self._epoch += 1
        peers = {VICTIM: self._victim, HONEST: self._honest}
        view = view_of(self._epoch, {number: peer.address or "" for number, peer in peers.items()})
        outs = [torch.empty(NUMEL) for _ in peers]
        await asyncio.gather(*(peer.install(view) for peer in peers.values()))
        if self._operation is not None:
            await asyncio.wait([self._operation])
        await asyncio.gather(
            *(
                peer.all_reduce(peer.key(0), self._tensor * number, out=out)
                for (number, peer), out in zip(peers.items(), outs, strict=True)
            )
        )
        expected = self._tensor * ((VICTIM + HONEST) / 2)
        if not all(torch.equal(out, expected) for out in outs):
            raise FuzzError("an honest exchange after the attack has wrong values")


def _reader() -> FrameReader:
    limits = on_bulk(CHUNK_NBYTES)
    return FrameReader(limits=limits, place=lambda h: memoryview(bytearray(h.payload_nbytes)), read_ahead=False)


async def fuzz_communicator(hostile: Hostile, rng: random.Random, num_frames: int) -> Counter[str]:
    """Attack a communicator with so many frames; returns how its operations and connections ended.

    Raises whatever is wrong.
    """
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(repr(context)))
    options = BulkOptions(patience=Patience(redial_s=0.02, round_s=5.0))
    async with (
        open_communicator(VICTIM, chunk_nbytes=CHUNK_NBYTES, options=options) as victim,
        open_communicator(HONEST, chunk_nbytes=CHUNK_NBYTES, options=options) as honest,
    ):
        attack = Attack(victim, honest, hostile, rng)
        await attack.run(num_frames)
    if raised:
        raise FuzzError(f"{len(raised)} exceptions reached the event loop; the first: {raised[0]}")
    return attack.outcomes


def fuzz(num_frames: int, seed: int) -> Counter[str]:
    """Both halves; returns how the communicator's operations and connections ended. Raises whatever is wrong."""
    rng = random.Random(seed)
    hostile = Hostile(rng, peer_id_of(VICTIM))
    before_kib = 0
    outcomes: Counter[str] = Counter()
    for share in (num_frames // 10, num_frames - num_frames // 10):  # the first tenth warms up
        outcomes += asyncio.run(fuzz_communicator(hostile, rng, share // 2))
        fuzz_readers(hostile, rng, share - share // 2)
        before_kib = before_kib or _most_kib()
    growth_kib = _most_kib() - before_kib
    if growth_kib > MAX_GROWTH_KIB:
        raise FuzzError(f"memory has grown by {growth_kib >> 10} MiB")
    return outcomes


def _most_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("isthmus.collective").setLevel(logging.ERROR)  # every dropped link is worth a warning, else
    started = time.monotonic()
    outcomes = fuzz(options.frames, options.seed)
    seconds = time.monotonic() - started
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{options.frames} frames in {seconds:.0f} s, {options.frames / seconds:.0f} frames/s; {ended}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
