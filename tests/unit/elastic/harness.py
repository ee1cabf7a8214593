# SPDX-License-Identifier: Apache-2.0
"""A replica of whole numbers in memory, and donors behind real loopback connections.

The state is two int64 vectors. A commit adds a sum to the anchor and keeps the sum as momentum, so that a wrong,
missing or repeated commit gives other bits.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np

from isthmus.collective.core.types import Incarnation, Member, OuterStep, PeerId
from isthmus.collective.errors import ConnectionLost
from isthmus.collective.transport import Channel, FrameType, Hello, HelloReply, Listener, Purpose, connect
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.records import Record
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.donor.donor import Donor
from isthmus.elastic.errors import StateDiverged, StateMismatch
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.state.digest import Hasher, StateManifest, chunk_of, describe_state
from isthmus.elastic.state.replica import CommitEntry, ResultChunk, RoundRecord
from isthmus.elastic.state.wire import Pace

CHUNK_NBYTES = 1024
NUM_CHUNKS = 16
"""Of two tensors of 8,000 bytes."""
QUICK = Pace(patience_s=0.5, floor_bytes_per_s=1 << 20, window=3)
"""Of a learner that does not wait for long."""
RUN_ID = "test-run"


def peer_id(number: int) -> PeerId:
    return PeerId(f"{number:016x}")


class Pin:
    def __init__(self, replica: "NumberReplica") -> None:
        self._replica = replica
        self._tensors = replica.tensors
        assert replica.manifest is not None
        self.manifest = replica.manifest
        self.num_read = 0
        replica.num_pins += 1

    def chunk(self, tensor: int, chunk: int) -> memoryview:
        name = self.manifest.tensors[tensor].name
        self._replica.num_chunks_read += 1
        return chunk_of(byte_view(self._tensors[name]), chunk, self.manifest.chunk_nbytes)

    def release(self) -> None:
        self._replica.num_pins -= 1


class NumberReplica:
    """isthmus.elastic.state.replica.Replica over numbers."""

    def __init__(self, hasher: Hasher, numel: int = 1000) -> None:
        self.hasher = hasher
        self.numel = numel
        self.tensors: dict[str, np.ndarray] = {}
        self.manifest: StateManifest | None = None
        self.num_pins = 0
        self.num_chunks_read = 0
        self.num_restores = 0
        self.unwanted: tuple[dict[str, np.ndarray], StateManifest] | None = None
        self.replayed: list[int] = []
        self._restoring: tuple[dict[str, np.ndarray], tuple[memoryview, ...]] | None = None

    def _install(self, tensors: dict[str, np.ndarray], manifest: StateManifest) -> Held:
        self.tensors, self.manifest = tensors, manifest
        self.unwanted = None
        return Held(manifest.outer_step, manifest.digest)

    def _next(self, total: np.ndarray) -> tuple[dict[str, np.ndarray], StateManifest]:
        assert self.manifest is not None
        tensors = {"anchor": self.tensors["anchor"] + total, "momentum": total.copy()}
        return tensors, self._describe(self.manifest.outer_step + 1, tensors)

    def _describe(self, outer_step: int, tensors: dict[str, np.ndarray]) -> StateManifest:
        parts = self.hasher.describe([(name, byte_view(array)) for name, array in sorted(tensors.items())])
        return describe_state(outer_step, parts, chunk_nbytes=self.hasher.chunk_nbytes)

    def found(self) -> Held:
        tensors = {"anchor": np.arange(self.numel, dtype=np.int64), "momentum": np.zeros(self.numel, np.int64)}
        return self._install(tensors, self._describe(0, tensors))

    def adopt(self, outer_step: int, tensors: dict[str, np.ndarray]) -> Held:
        """Hold these numbers as this step's state."""
        return self._install(tensors, self._describe(outer_step, tensors))

    def staged(self, total: np.ndarray) -> tuple[dict[str, np.ndarray], StateManifest]:
        return self._next(total)

    def install(self, staged: tuple[dict[str, np.ndarray], StateManifest]) -> Held:
        return self._install(*staged)

    def commit(self, total: np.ndarray, log: CommitLog | None = None) -> Held:
        held = self._install(*self._next(total))
        if log is not None:
            log.append(entry_of(held, total))
        return held

    # ---------------------------------------------------------------- elastic.Replica

    def held(self) -> Held | None:
        return None if self.manifest is None else Held(self.manifest.outer_step, self.manifest.digest)

    def pin(self) -> Pin:
        return Pin(self)

    def leftover(self) -> StateManifest | None:
        return None if self.unwanted is None else self.unwanted[1]

    def begin_restore(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        theirs = {part.name: part.nbytes for part in manifest.tensors}
        if theirs != {"anchor": 8 * self.numel, "momentum": 8 * self.numel}:
            raise StateMismatch(f"the donor's state holds {theirs}")
        if self._restoring is None or self.unwanted is not None:
            self.num_restores += 1
            if self.unwanted is not None:
                tensors = self.unwanted[0]
            else:
                tensors = {name: np.zeros(self.numel, np.int64) for name in theirs}
            self.unwanted = None
            self._restoring = tensors, tuple(byte_view(tensors[part.name]) for part in manifest.tensors)
        return self._restoring[1]

    async def finish_restore(self, manifest: StateManifest) -> Held:
        assert self._restoring is not None
        (tensors, _), self._restoring = self._restoring, None
        return self._install(tensors, manifest)

    async def replay(self, entry: CommitEntry) -> Held:
        dtype = np.int16 if entry.rounds[0].codec == "int16" else np.int64
        self._restoring = None
        total = np.frombuffer(b"".join(chunk.data for chunk in entry.chunks), dtype).astype(np.int64)
        tensors, manifest = self._next(total)
        if manifest.digest != entry.digest:
            self.unwanted = tensors, manifest
            raise StateDiverged(entry.outer_step, entry.digest, manifest.digest)
        self.replayed.append(entry.outer_step)
        return self._install(tensors, manifest)


def byte_view(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8))


def entry_of(held: Held, total: np.ndarray) -> CommitEntry:
    """As the product's int8: an eighth of the state, where the numbers are small enough."""
    half = total.size // 2
    is_small = bool((np.abs(total) < 2**15).all())
    wire = total.astype(np.int16) if is_small else total
    return CommitEntry(
        outer_step=held.outer_step,
        digest=held.digest,
        rounds=(
            RoundRecord(
                codec="int16" if is_small else "raw",
                weights=((peer_id(1), 1.0),),
                chunks=(ResultChunk(0, wire[:half].tobytes()), ResultChunk(half, wire[half:].tobytes())),
            ),
        ),
    )


def totals(outer_step: int, numel: int = 1000) -> np.ndarray:
    """What the commit that makes `outer_step` adds."""
    return np.random.default_rng(outer_step).integers(-(2**15) + 1, 2**15, numel)


def hello(purpose: Purpose, number: int, incarnation: int = 1) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id=RUN_ID,
        purpose=purpose,
        peer_id=peer_id(number),
        incarnation=Incarnation(incarnation),
    )


@contextlib.asynccontextmanager
async def listening(
    number: int,
    routes: dict[Purpose, Callable[[Channel], Awaitable[None]]],
    *,
    address: str = "127.0.0.1:0",
    incarnation: int = 1,
) -> AsyncIterator[Listener]:
    """A listener of peer `number` on a free port."""

    def accept(_hello: Hello) -> HelloReply:
        return HelloReply(accepted=True, peer_id=peer_id(number), incarnation=Incarnation(incarnation))

    def bulk(sock: object, _hello: Hello) -> None:
        raise AssertionError(f"nobody sends bulk here: {sock}")

    listener = Listener(address, accept=accept, routes=routes, bulk=bulk)
    try:
        await listener.start()
        await asyncio.sleep(0)  # let it begin to accept
        yield listener
    finally:
        await listener.close()


class DonorPeer:
    """A donor with `num_steps` commits behind it. `tamper` may stand between its donor and the network."""

    def __init__(self, number: int, replica: NumberReplica, log: CommitLog) -> None:
        self.number = number
        self.replica = replica
        self.log = log
        self.donor = Donor(replica, log)
        self.member: Member | None = None
        self.num_connections = 0

    @classmethod
    def at_step(cls, number: int, hasher: Hasher, num_steps: int, *, numel: int = 1000, log_nbytes: int = 1 << 20):
        replica, log = NumberReplica(hasher, numel), CommitLog(log_nbytes)
        replica.found()
        for step in range(1, num_steps + 1):
            replica.commit(totals(step, numel), log)
        return cls(number, replica, log)

    async def serve(self, channel: Channel) -> None:
        self.num_connections += 1
        await self.donor.serve(channel)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Member]:
        async with listening(self.number, {Purpose.STATE: self.serve}) as listener:
            self.member = Member(peer_id(self.number), Incarnation(1), listener.address)
            yield self.member

    @property
    def held(self) -> Held:
        held = self.replica.held()
        assert held is not None
        return held

    def advance(self) -> Held:
        return self.replica.commit(totals(self.held.outer_step + 1, self.replica.numel), self.log)


class _Tampered:
    """A channel that does something to the frames of its donor."""

    def __init__(self, channel, on_send):
        self._channel = channel
        self._on_send = on_send
        self.hello = channel.hello

    async def send(self, frame_type, payload, *, chunk=0, timeout_s):
        payload = await self._on_send(self._channel, frame_type, payload, chunk)
        await self._channel.send(frame_type, payload, chunk=chunk, timeout_s=timeout_s)

    async def receive(self, *, timeout_s, into=None):
        return await self._channel.receive(timeout_s=timeout_s, into=into)

    def close(self):
        self._channel.close()


def tampered(donor: DonorPeer, on_send: Callable[..., Awaitable[bytes]]) -> DonorPeer:
    """Let something happen to every frame that the donor sends: (channel, type, payload, chunk) -> payload."""
    plain = donor.donor.serve

    async def serve(channel):
        donor.num_connections += 1
        await plain(_Tampered(channel, on_send))

    donor.serve = serve
    return donor


def that_dies(donor: DonorPeer, after: int) -> DonorPeer:
    """The donor's connection breaks when it should send its chunk number `after`."""
    sent = 0

    async def on_send(channel: Channel, frame_type: FrameType, payload: bytes, _chunk: int) -> bytes:
        nonlocal sent
        if frame_type is FrameType.STATE_CHUNK:
            if sent == after:
                channel.close()
                raise ConnectionLost("the donor died")
            sent += 1
        return payload

    return tampered(donor, on_send)


async def dial_state(member: Member, *, number: int = 99) -> Channel:
    return await connect(member.address, hello(Purpose.STATE, number), timeout_s=5.0)


def records_of(path: Path) -> list[Record]:
    """What the coordinator has written down."""
    journal = Journal(path, run_id=RUN_ID)
    try:
        return list(journal.replay())
    finally:
        journal.close()


def step_of(held: Held | None) -> OuterStep | None:
    return None if held is None else held.outer_step


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Let the loop go on until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of several objects, none of which tells
            await asyncio.sleep(0.005)
