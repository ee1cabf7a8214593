# SPDX-License-Identifier: Apache-2.0
"""The workers of this peer: started together, asked together (requests.py), and gone together.

Owns one start of them after the other, each a crew (crew.py; of a loop of somebody's own: loop.py). make_pool.py says
who they are. Rules: leaving the pool leaves no process, no descriptor and no file behind. Must not know what an outer
step is, and imports neither torch.distributed nor the training loop.

Errors, all of them for the operator (trainer/errors.py)::

    TrainingFault        what a worker reported: the loss or the gradient is not finite
    ConfigError          the text and the settings do not go together (trainer.data.corpus.DataError in a worker)
    EnvironmentFault     this machine does not allow it: no such device, no memory, a path too long
    WorkerCrashed
    ├── WorkerOutOfMemory    what was asked for does not fit into its device's memory
    ├── WorkerDied       a process ended unasked
    └── WorkerStalled    an answer did not come in its time
    LoopGone             somebody's own loop has ended without a word
    LoopLeft             it has ended in order, before its run

After the first of them the pool is broken and raises it again whatever it is asked. A WorkerCrashed costs no more than
the parameters and the optimizer's state, and `renew` mends the pool, unless the workers are somebody's own loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.link import WorkerLink
from isthmus.trainer.workers.requests import WorkerRequests

log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 180.0
"""From the start to the last worker's `Ready`."""
_STOP_TIMEOUT_S = 10.0
"""For the workers' way out."""


class Crew(Protocol):
    """One start of the workers: `WorkerCrew`, or `LoopCrew` of somebody's own loop."""

    link: WorkerLink
    closed: asyncio.Event

    @property
    def pids(self) -> Sequence[int]:
        """Process ids by local rank, as far as they are known."""
        ...

    async def start(self, *, timeout_s: float) -> tuple[ipc.Ready, ...]:
        """Until all are ready; their reports by local rank."""
        ...

    async def stop(self, *, timeout_s: float) -> None:
        """An end in order."""
        ...

    async def close(self) -> None:
        """An end in any case. May be called again."""
        ...


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """How many samples a worker computes at a time.

    Attributes:
        size: of workers that are started from now on.
        may_be_halved: whether it is this peer's own to find.
    """

    size: int
    may_be_halved: bool

    def halve(self) -> bool:
        """Make it smaller, unless it was given or is one sample; returns whether it is."""
        is_possible = self.may_be_halved and self.size > 1
        if is_possible:
            self.size = -(-self.size // 2)
        return is_possible


class WorkerPool(WorkerRequests):
    """The workers of one peer, as an asynchronous context manager: started on entry, gone on exit.

    Leave it in the task that entered it.

    Args:
        make_crew: who they are; the group owns its tasks.
        micro_batch: of the workers; None: they see to it themselves.
        request_timeout_s, hang_timeout_s: see `WorkerRequests`.
    """

    def __init__(
        self,
        make_crew: Callable[[asyncio.TaskGroup], Crew],
        *,
        micro_batch: MicroBatch | None = None,
        request_timeout_s: float,
        hang_timeout_s: float,
    ) -> None:
        super().__init__(request_timeout_s=request_timeout_s, hang_timeout_s=hang_timeout_s)
        self._make_crew = make_crew
        self.micro_batch = micro_batch
        self._resources = contextlib.AsyncExitStack()
        self._group: asyncio.TaskGroup  # made on entry
        self._crew: Crew | None = None
        self._ready: tuple[ipc.Ready, ...] = ()

    @property
    def num_workers(self) -> int:
        """How many answer."""
        return len(self._ready)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by local rank."""
        return () if self._crew is None else tuple(self._crew.pids)

    @property
    def devices(self) -> tuple[str, ...]:
        """What each worker computes on, for people."""
        return tuple(ready.device for ready in self._ready)

    @property
    def ready(self) -> tuple[ipc.Ready, ...]:
        """What each said when it was there, by local rank."""
        return self._ready

    async def __aenter__(self) -> Self:
        """Start the workers and wait until all are ready.

        Raises:
            WorkerDied: one did not come up.
            WorkerStalled: not all did in time.
            EnvironmentFault: no such devices, or no place for the socket.
        """
        try:
            self._group = await self._resources.enter_async_context(asyncio.TaskGroup())
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the workers: in order after an orderly body, at once otherwise."""
        try:
            if error is None and self._crew is not None and self._crew.link.failure is None:
                await self._crew.stop(timeout_s=_STOP_TIMEOUT_S)
        finally:
            await self._close()

    async def renew(self) -> None:
        """Other workers in the place of these, which are killed: after a WorkerCrashed. They know no parameters.

        Raises:
            WorkerDied, WorkerStalled, EnvironmentFault: as at the first start.
        """
        assert self._crew is not None, "the pool was entered"
        await self._crew.close()
        await self._start()

    async def failed(self) -> None:
        """Wait for the pool's failure and raise it: for a task that watches while nothing is asked.

        A crash is not raised here: whoever asks next hears of it, and renews the pool or ends.
        """
        before: Crew | None = None
        while (crew := self._crew) is not before:
            assert crew is not None, "the pool was entered"
            await crew.link.failed()
            failure = crew.link.failure
            if failure is not None and not isinstance(failure, WorkerCrashed):
                raise failure
            await crew.closed.wait()  # by then there is another one, or the pool is left
            before = crew

    async def _start(self) -> None:
        self._crew = crew = self._make_crew(self._group)
        self._ask_over(crew.link)
        self._ready = await crew.start(timeout_s=_READY_TIMEOUT_S)
        log.info("workers_ready num_workers=%d devices=%s", len(self.devices), ",".join(self.devices))

    async def _close(self) -> None:
        try:
            if self._crew is not None:
                await self._crew.close()
        finally:
            await self._resources.aclose()
