# SPDX-License-Identifier: Apache-2.0
"""One peer: does what the view server says, reports how each operation ended, checks every result it ever had.

It keeps no copy of its inputs. Where an operation was aborted it posts the same memory again; only where it had
finished in place, and the server says that the round does not count, it makes its input anew.

Rules: a later view overtakes an earlier one, also in the middle of an installation. Results are checked when the
server asks, outside the time that is measured, or before they are overwritten. Ends with the server's connection.
"""

import asyncio
import contextlib
import functools
import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from isthmus.collective import Communicator, Incarnation, OperationAborted, PeerId, PeerRef, RoundKey
from isthmus.collective.api.standalone import peer_id_of
from isthmus.collective.transport.hello import Hello, HelloReply, Purpose
from isthmus.collective.transport.listener import Listener
from isthmus.collective.transport.memory import give_back_to_system
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from scripts.faults.values import bits, fill, is_mean
from scripts.faults.words import (
    Beat,
    Check,
    Here,
    Launch,
    Mode,
    Post,
    Prepare,
    Ready,
    Report,
    SelfFault,
    Struck,
    ToPeer,
    Verdict,
    Weigh,
    Weight,
    line,
)

_OVERTAKEN = "a newer view came before it was posted"


class FaultPeer:
    """See the module. `say` writes a word to the server at once."""

    def __init__(self, launch: Launch, communicator: Communicator, say: Callable[[msgspec.Struct], None]) -> None:
        self._number = launch.number
        self._deadline_s = launch.deadline_s
        self._communicator = communicator
        self._say = say
        self._tensor = torch.empty(launch.nbytes // 4)
        self._out = torch.empty(launch.nbytes // 4)
        self._prepared: set[int] = set()  # fragments whose input is in its place
        self._results: dict[int, tuple[Post, tuple[int, ...]]] = {}
        self._numel_recorded = 0
        self._following: asyncio.Task[None] | None = None
        self._operations: set[asyncio.Task[None]] = set()

    async def obey(self, reader: asyncio.StreamReader) -> None:
        """Until the server hangs up."""
        decoder: msgspec.json.Decoder[ToPeer] = msgspec.json.Decoder(ToPeer)
        async with asyncio.TaskGroup() as tasks:
            while received := await reader.readline():
                word = decoder.decode(received)
                match word:
                    case Prepare(step=step, mode=mode):
                        self._prepare(step, mode)
                    case Post() as post:
                        if self._following is not None:
                            self._following.cancel()
                        self._following = tasks.create_task(self._follow(post, tasks))
                        self._following.add_done_callback(functools.partial(self._on_followed, post))
                    case Check():
                        for fragment in list(self._results):
                            self._judge(fragment)
                    case Weigh():
                        self._say(weight())
                    case Beat():
                        self._say(Beat())
            for task in (self._following, *self._operations):
                if task is not None:
                    task.cancel()

    def _prepare(self, step: int, mode: Mode) -> None:
        self._results.clear()
        for fragment in mode.fragments:
            fill(self._piece(self._tensor, mode, fragment), number=self._number, step=step, fragment=fragment)
        self._prepared = set(mode.fragments)
        self._say(Ready(step=step))

    async def _follow(self, post: Post, tasks: asyncio.TaskGroup) -> None:
        await self._communicator.install(post.view)
        if self._operations:
            await asyncio.wait(self._operations)  # of the view before: that installation ended them
        self._numel_recorded = 0
        for fragment in post.fragments:
            if fragment in self._results:
                self._judge(fragment)
            if fragment not in self._prepared:
                source = self._piece(self._tensor, post.mode, fragment)
                fill(source, number=self._number, step=post.step, fragment=fragment)
                self._prepared.add(fragment)
        for fragment in post.fragments:
            operation = tasks.create_task(self._operate(post, fragment))
            self._operations.add(operation)
            operation.add_done_callback(self._operations.discard)

    def _on_followed(self, post: Post, task: asyncio.Task[None]) -> None:
        """Report what was overtaken, also by a word that came together with it, before the task had begun."""
        if task.cancelled():
            now = time.monotonic()
            for fragment in post.fragments:
                key = self._key(post, fragment)
                self._say(Report(key=key, outcome="aborted", at=now, posted_at=now, cause=_OVERTAKEN))

    async def _operate(self, post: Post, fragment: int) -> None:
        key, posted_at = self._key(post, fragment), time.monotonic()
        in_place = post.mode is Mode.IN_PLACE
        numbers: tuple[int, ...] = ()
        cause = ""
        suspects: tuple[int, ...] = ()
        try:
            stats = await self._communicator.all_reduce(
                key,
                self._piece(self._tensor, post.mode, fragment),
                out=None if in_place else self._piece(self._out, post.mode, fragment),
                codec=post.mode.codec,
                record=None if post.fault is None else self._fuse(post.fault),
                deadline_s=self._deadline_s,
            )
        except OperationAborted as error:
            outcome, cause, suspects = "aborted", error.cause, tuple(map(number_of, error.suspects))
        except Exception as error:  # noqa: BLE001 - whatever it is, the server has to count it
            outcome, cause = "failed", repr(error)
        else:
            outcome, numbers = "finished", tuple(number_of(member.peer_id) for member in stats.members)
            self._results[fragment] = (post, numbers)
            if in_place:
                self._prepared.discard(fragment)
        at = time.monotonic()
        self._say(
            Report(
                key=key, outcome=outcome, at=at, posted_at=posted_at, numbers=numbers, cause=cause, suspects=suspects
            )
        )

    def _judge(self, fragment: int) -> None:
        post, numbers = self._results.pop(fragment)
        result = self._piece(self._tensor if post.mode is Mode.IN_PLACE else self._out, post.mode, fragment)
        is_right = is_mean(result, numbers, step=post.step, fragment=fragment)
        self._say(Verdict(key=self._key(post, fragment), is_right=is_right, bits=bits(result)))

    def _fuse(self, fault: SelfFault) -> Callable[[int, int, memoryview], None]:
        def record(_start: int, numel: int, _wire: memoryview) -> None:
            before, self._numel_recorded = self._numel_recorded, self._numel_recorded + numel
            if before < fault.after_numel <= self._numel_recorded:
                self._say(Struck(at=time.monotonic()))
                os.kill(os.getpid(), fault.signal)

        return record

    def _key(self, post: Post, fragment: int) -> RoundKey:
        return RoundKey(post.view.epoch, post.step, fragment)  # type: ignore[arg-type] # plain numbers are welcome

    @staticmethod
    def _piece(tensor: Tensor, mode: Mode, fragment: int) -> Tensor:
        return tensor.chunk(len(mode.fragments))[fragment]


def number_of(peer_id: PeerId) -> int:
    """The inverse of `peer_id_of`."""
    return int(peer_id, 16)


def weight() -> Weight:
    """What this process holds: without what only waits for the collector, or for malloc to give it back."""
    gc.collect()
    give_back_to_system()
    status = Path("/proc/self/status").read_text().splitlines()
    (rss_kib,) = (int(row.split()[1]) for row in status if row.startswith("VmRSS:"))
    return Weight(rss_kib=rss_kib, descriptors=len(os.listdir("/proc/self/fd")))


async def run_peer(launch: Launch, host: str) -> None:
    """Be this peer until the server hangs up."""
    me = PeerRef(peer_id_of(launch.number), Incarnation(launch.incarnation))

    def hello(_to: PeerRef, stream: int, num_streams: int) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id="faults",
            purpose=Purpose.BULK,
            peer_id=me.peer_id,
            incarnation=me.incarnation,
            stream=stream,
            num_streams=num_streams,
        )

    def accept(_hello: Hello) -> HelloReply:
        return HelloReply(accepted=True, peer_id=me.peer_id, incarnation=me.incarnation)

    communicator = Communicator(me=me, hello=hello, num_streams=launch.num_streams)
    async with Listener(f"{host}:0", accept=accept, routes={}, bulk=communicator.adopt) as listener:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(launch.path)
            reader, writer = await asyncio.open_unix_connection(sock=sock)

            def say(word: msgspec.Struct) -> None:
                writer.write(line(word))  # goes to the kernel at once while its buffer has room, and it has

            say(Here(number=launch.number, incarnation=launch.incarnation, address=listener.address, pid=os.getpid()))
            with contextlib.suppress(ConnectionError):
                await FaultPeer(launch, communicator, say).obey(reader)
            writer.close()
        await communicator.close()
