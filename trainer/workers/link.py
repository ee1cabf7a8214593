# SPDX-License-Identifier: Apache-2.0
"""The daemon's end of the socket to its workers: who was asked what, and who owes an answer.

Rules: all workers get the same requests in the same order, because most of them are collectives of the site; a request
is done when every worker has answered it; at most `WINDOW` are under way; after the first failure every request, under
way or new, raises that failure. Must not know processes: whoever sees one end says so with `fail`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import zmq
import zmq.asyncio

from isthmus.trainer.errors import (
    ConfigError,
    EnvironmentFault,
    IsthmusError,
    LoopLeft,
    TrainingFault,
    WorkerCrashed,
    WorkerOutOfMemory,
)
from isthmus.trainer.workers import ipc

WINDOW = 2
"""Requests under way at once: the next step is with the workers before the daemon has heard of this one."""

_LOOK_S = 1.0
"""A daemon that was suspended wakes with every time limit behind it, and its workers too."""

_FAULTS: Mapping[str, type[IsthmusError]] = MappingProxyType(
    {
        "training_fault": TrainingFault,
        "environment": EnvironmentFault,
        "config": ConfigError,
        "out_of_memory": WorkerOutOfMemory,
        "loop_left": LoopLeft,
    }
)

AnswerT = TypeVar("AnswerT", bound=ipc.Answer)


class WorkerStalled(WorkerCrashed):
    """Workers did not answer in time.

    Attributes:
        request: what they were asked: "step", "load" and so on, or "start" before they were ready.
        local_ranks: who owes the answer.
        timeout_s: how long they had.
        what: what they did instead, a sentence about each; who hangs before who waits for it.
    """

    def __init__(self, request: str, local_ranks: Sequence[int], timeout_s: float, what: str) -> None:
        who = ", ".join(map(str, local_ranks))
        super().__init__(
            f"no answer to {request} from worker {who} in {timeout_s:.3g} s: {what}",
            cure="see the workers' logs, then start the peer again",
        )
        self.request = request
        self.local_ranks = tuple(local_ranks)
        self.timeout_s = timeout_s
        self.what = what


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A request that not all workers have answered."""

    name: str
    done: asyncio.Future[list[ipc.Reply]]
    replies: dict[int, ipc.Reply] = field(default_factory=dict)


class WorkerLink:
    """Requests to all workers of a peer.

    Args:
        path: of the socket, in a folder that only this user can enter.
        num_workers: who will connect, as `ipc.worker_identity` names them.
        on_failure: called once, at the first failure, before anybody is told.
        explain: says what workers do that owe an answer; within seconds.
        linger_s: how long `close` may wait until the last request is with them.
    """

    def __init__(
        self,
        path: Path,
        num_workers: int,
        *,
        on_failure: Callable[[], None],
        explain: Callable[[Sequence[int]], Awaitable[str]],
        linger_s: float = 0.0,
    ) -> None:
        self._local_ranks = {ipc.worker_identity(local_rank): local_rank for local_rank in range(num_workers)}
        self._on_failure = on_failure
        self._explain = explain
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        ipc.configure(self._socket, linger_s=linger_s)
        self._socket.bind(f"ipc://{path}")
        self._ready: dict[int, ipc.Ready] = {}
        self._all_ready = asyncio.Event()
        self._pending: dict[int, _Pending] = {}
        self._window = asyncio.Semaphore(WINDOW)
        self._last_serial = 0
        self._failure: IsthmusError | None = None
        self._has_failed = asyncio.Event()

    # ------------------------------------------------------------------------------------------------- use

    @property
    def failure(self) -> IsthmusError | None:
        """The first failure, if there was one."""
        return self._failure

    def next_serial(self) -> int:
        """A number no earlier request has."""
        self._last_serial += 1
        return self._last_serial

    async def ready(self, timeout_s: float) -> tuple[ipc.Ready, ...]:
        """Wait until every worker is ready; their reports by local rank.

        Raises:
            IsthmusError: the first failure. WorkerStalled if it is the time that ran out.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ready.wait()
        except TimeoutError:
            missing = self._missing(self._ready)
            self.fail(WorkerStalled("start", missing, timeout_s, await self._explain(missing)))
        if self._failure is not None:
            raise self._failure
        return tuple(self._ready[local_rank] for local_rank in self._local_ranks.values())

    async def ask(self, request: ipc.Question, kind: type[AnswerT], timeout_s: float) -> list[AnswerT]:
        """Send a request to all workers and collect their replies, of this kind, by local rank.

        A caller that is cancelled leaves the request under way.

        Raises:
            IsthmusError: the first failure. WorkerStalled if it is the time that ran out, for earlier requests or
                for this one. Time in which this process itself did not run is not counted.
        """
        wire = ipc.encode(request)
        name = type(request).__name__.lower()
        await self._enter_window(timeout_s)
        pending = _Pending(name=name, done=asyncio.Future())
        self._pending[request.serial] = pending
        self._broadcast(wire)
        left_s = timeout_s
        while not pending.done.done():
            # `wait` leaves the future alone whatever happens to the caller: the reply is for the books as well.
            await asyncio.wait({pending.done}, timeout=min(_LOOK_S, left_s))
            left_s -= _LOOK_S
            if left_s <= 0.0 and not pending.done.done():
                await self._stall(timeout_s)
                left_s = timeout_s  # it was answered while we asked why it is not, or the one before it was
        return _of_kind(pending.done.result(), kind)

    async def _enter_window(self, timeout_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._window.acquire()
            except TimeoutError:
                await self._stall(timeout_s)
                if self._failure is None:
                    continue
            if self._failure is not None:
                raise self._failure
            return

    def fail(self, error: IsthmusError) -> None:
        """Everything under way ends with this error; a second one is only a consequence of the first, and ignored."""
        if self._failure is not None:
            return
        self._failure = error
        self._on_failure()
        for pending in self._pending.values():
            pending.done.set_exception(error)
            pending.done.exception()  # seen, even if the caller has gone
        for _ in range(WINDOW):
            self._window.release()
        self._pending.clear()
        self._all_ready.set()
        self._has_failed.set()

    async def failed(self) -> None:
        """Wait for the first failure; returns, does not raise it."""
        await self._has_failed.wait()

    # ---------------------------------------------------------------------------------------------- socket

    async def run(self) -> None:
        """Take replies until cancelled.

        Raises:
            MalformedMessage: a worker said what no worker says.
        """
        while True:
            identity, wire = await self._socket.recv_multipart()
            self._on_reply(self._local_ranks[identity], ipc.decode_reply(wire))

    def stop_workers(self) -> None:
        """Tell all workers to exit."""
        self._broadcast(ipc.encode(ipc.Stop(serial=self.next_serial())))

    def close(self, *, at_once: bool = False) -> None:
        """Close the socket; idempotent. `at_once`: nobody is left who could hear the last request."""
        self._socket.close(linger=0 if at_once else None)
        self._context.term()

    def _broadcast(self, wire: bytes) -> None:
        # Called, not awaited: pyzmq hands a message over at once while the queue has room, and it always has (it is
        # longer than the window). So no cancellation can come between two workers and leave them with different orders.
        # What is sent to a dead worker is dropped; its end is somebody else's news.
        for identity in self._local_ranks:
            self._socket.send_multipart([identity, wire], flags=zmq.DONTWAIT)

    def _on_reply(self, local_rank: int, reply: ipc.Reply) -> None:
        match reply:
            case ipc.WorkerFailed():
                self.fail(_FAULTS[reply.kind](reply.problem, cure=reply.cure))
            case ipc.Ready():
                self._ready[local_rank] = reply
                if not self._missing(self._ready):
                    self._all_ready.set()
            case _ if reply.serial in self._pending:
                pending = self._pending[reply.serial]
                pending.replies[local_rank] = reply
                if not self._missing(pending.replies):
                    del self._pending[reply.serial]
                    self._window.release()
                    pending.done.set_result([pending.replies[rank] for rank in self._local_ranks.values()])
            case _:
                # After a failure late answers come to questions that are closed.
                if self._failure is None:
                    raise ipc.MalformedMessage(f"worker {local_rank} answers what nobody asked: {reply}")

    def _missing(self, replies: dict[int, ipc.Ready] | dict[int, ipc.Reply]) -> list[int]:
        return [local_rank for local_rank in self._local_ranks.values() if local_rank not in replies]

    async def _stall(self, timeout_s: float) -> None:
        """The time of a request ran out; to blame is the oldest one that is under way, if it still is."""
        oldest = next(iter(self._pending.values()), None)
        if oldest is None:
            return
        missing = self._missing(oldest.replies)
        what = await self._explain(missing)
        if not oldest.done.done():
            self.fail(WorkerStalled(oldest.name, missing, timeout_s, what))


def _of_kind(replies: list[ipc.Reply], kind: type[AnswerT]) -> list[AnswerT]:
    answers: list[AnswerT] = [reply for reply in replies if isinstance(reply, kind)]
    if len(answers) != len(replies):
        raise ipc.MalformedMessage(f"{kind.__name__} was expected, not {replies}")
    return answers
