# SPDX-License-Identifier: Apache-2.0
"""The workers of this peer: started together, driven together, and gone together.

Owns one start of them after the other (crew.py; of a loop of somebody's own: loop.py). Rules: a request has a limit,
which follows from how long its kind has taken before (pace.py); leaving the pool leaves no process, no
descriptor and no file behind. Must not know what an outer step is, and imports neither torch.distributed nor the
training loop.

Errors, all of them for the operator (trainer/errors.py)::

    TrainingFault        what a worker reported: the loss or the gradient is not finite
    ConfigError          the text and the settings do not go together (trainer.data.corpus.DataError in a worker)
    EnvironmentFault     this machine does not allow it: no such device, no memory, a path too long
    WorkerCrashed
    ├── WorkerOutOfMemory    what was asked for does not fit into its device's memory
    ├── WorkerDied       a process ended unasked
    └── WorkerStalled    an answer did not come in its time
    LoopGone             somebody's own loop has ended, or hangs

After the first of them the pool is broken and raises it again whatever it is asked. A WorkerCrashed costs no more than
the parameters and the optimizer's state, and `renew` mends the pool.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from isthmus.trainer.config.job import Device, FilePart, TrainingJob, WorkerJob
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.crew import WorkerCrew
from isthmus.trainer.workers.link import WINDOW, AnswerT, WorkerLink, WorkerStalled
from isthmus.trainer.workers.loop import Loop, LoopCrew, LoopGone
from isthmus.trainer.workers.pace import WorkerPace
from isthmus.trainer.workers.process import WorkerDied
from isthmus.trainer.workers.shared_buffer import SharedBuffer, SharedTokens

__all__ = ["WINDOW", "WorkerDied", "WorkerPool", "WorkerStalled", "loop_pool", "worker_pool"]

log = logging.getLogger(__name__)

_LOOP_TIMEOUT_S = 3600.0
"""Between two steps of its optimizer a loop may judge its model, or write it down. The run goes on without it."""


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


class WorkerPool:
    """The workers of one peer, as an asynchronous context manager: started on entry, gone on exit.

    Leave it in the task that entered it.

    Args:
        make_crew: who they are; the group owns its tasks.
        is_renewable: whether others can take the place of those that are gone.
        micro_batch: of the workers; None: they see to it themselves.
        ready_timeout_s: from the start to the last worker's `Ready`.
        request_timeout_s: for the first answer to a kind of request, from the request on, and for any later one at
            most.
        hang_timeout_s: for any later one at least: longer where that kind has taken long before.
        stop_timeout_s: for the workers' way out.
    """

    def __init__(
        self,
        make_crew: Callable[[asyncio.TaskGroup], Crew],
        *,
        is_renewable: bool = True,
        micro_batch: "MicroBatch | None" = None,
        ready_timeout_s: float = 180.0,
        request_timeout_s: float = 600.0,
        hang_timeout_s: float = 60.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self._make_crew = make_crew
        self._is_renewable = is_renewable
        self.micro_batch = micro_batch
        self._ready_timeout_s = ready_timeout_s
        self._request_timeout_s = request_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._resources = contextlib.AsyncExitStack()
        self._group: asyncio.TaskGroup  # made on entry; so are the next two
        self._pace: WorkerPace
        self._crew: Crew | None = None
        self._ready: tuple[ipc.Ready, ...] = ()
        self._answered_s = 0.0

    # ------------------------------------------------------------------------------------------- requests

    async def step(self, indices: Sequence[int], *, inner_step: int, timeout_s: float | None = None) -> ipc.StepDone:
        """Train one inner step on a batch: `backward` and `update` in one request.

        Two steps may be under way; they are trained in the order of the calls. If the caller stops waiting, the step
        is trained all the same.

        Args:
            indices: samples, 1 to 65536 of them.
            inner_step: global number of the step, from 1.
            timeout_s: instead of what follows from the pace.

        Returns:
            Loss, norm and tokens of the whole batch; the seconds of the slowest worker.

        Raises:
            TrainingFault, WorkerDied, WorkerStalled: the pool is broken.
        """
        request = ipc.Step(serial=self._link.next_serial(), inner_step=inner_step, indices=_batch(indices))
        return _slowest(await self._ask(request, ipc.StepDone, timeout_s))

    async def backward(
        self, indices: Sequence[int], *, inner_step: int, timeout_s: float | None = None
    ) -> ipc.BackwardDone:
        """Compute the loss and the clipped gradient on a batch, and leave it there: `store(kind="grad")` reads it.

        Arguments and errors as for `step`. What was left there before is forgotten.
        """
        request = ipc.Backward(serial=self._link.next_serial(), inner_step=inner_step, indices=_batch(indices))
        return (await self._ask(request, ipc.BackwardDone, timeout_s))[0]

    async def update(self, *, inner_step: int, timeout_s: float | None = None) -> ipc.StepDone:
        """Let the inner optimizer use the gradient that is there now, once for each `backward`.

        One that came by `load(kind="grad")` is not clipped again. Loss and norm are those of the backward pass.
        Arguments, answer and errors as for `step`.
        """
        request = ipc.Update(serial=self._link.next_serial(), inner_step=inner_step)
        return _slowest(await self._ask(request, ipc.StepDone, timeout_s))

    async def load(
        self,
        ranges: Sequence[slice] = (),
        *,
        kind: str = "param",
        keep: float = 0.0,
        reset_optimizer: bool = False,
        own_steps: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Make the workers take values from the mailbox: value <- keep * value + (1 - keep) * mailbox.

        Leave the mailbox alone until this returns. The first load must be of all parameters, with keep = 0.

        Args:
            ranges: parts of the flat vector (`Fragment.ranges`); empty: everything.
            kind: as `Fragment.kind`: "param", "grad", or a tensor that the inner optimizer keeps, by its own name.
                Parameters for which it does not keep it are left alone.
            keep: in [0, 1].
            reset_optimizer: before that, forget the inner optimizer's state.
            own_steps: of how many inner steps that state is the outcome from now on; None: as before.
            timeout_s: instead of what follows from the pace.

        Returns:
            How many elements were not finite where a part of them was to be kept; they are the mailbox's now.

        Raises:
            ConfigError: the inner optimizer keeps nothing of this kind; `OptimizerJob.require_kinds` tells beforehand.
            WorkerDied, WorkerStalled: the pool is broken.
        """
        request = ipc.Load(
            serial=self._link.next_serial(),
            kind=kind,
            spans=_spans(ranges),
            keep=keep,
            reset_optimizer=reset_optimizer,
            own_steps=own_steps,
        )
        replies = await self._ask(request, ipc.Loaded, timeout_s)
        return sum(reply.num_broken for reply in replies)

    async def store(self, ranges: Sequence[slice] = (), *, kind: str = "param", timeout_s: float | None = None) -> int:
        """Make the workers write values into the mailbox, which is the caller's again when this returns.

        Zeros stand for what does not exist: a kind that is not kept for a parameter, or not before the first step.
        Steps asked for before are in it, those asked for later are not. Arguments and errors as for `load`.

        Returns:
            After how many inner steps of the inner optimizer it is.
        """
        request = ipc.Store(serial=self._link.next_serial(), kind=kind, spans=_spans(ranges))
        replies = await self._ask(request, ipc.Stored, timeout_s)
        return replies[0].own_steps

    async def evaluate(self, *, timeout_s: float | None = None) -> float:
        """Held-out loss of the present parameters, in nats per token. Errors as for `load`."""
        request = ipc.Evaluate(serial=self._link.next_serial())
        replies = await self._ask(request, ipc.Evaluated, timeout_s)
        return replies[0].loss

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

    @property
    def _link(self) -> WorkerLink:
        assert self._crew is not None, "the pool was entered"
        return self._crew.link

    async def _ask(self, request: ipc.Question, kind: type[AnswerT], timeout_s: float | None) -> list[AnswerT]:
        """The replies of all workers, and how long they took."""
        name, clock = type(request).__name__, asyncio.get_running_loop().time
        began = clock()
        replies = await self._link.ask(request, kind, self._pace.limit_s(name) if timeout_s is None else timeout_s)
        now = clock()
        self._pace.took(name, now - max(began, self._answered_s))  # they do one after the other
        self._answered_s = now
        return replies

    # ----------------------------------------------------------------------------------------------- life

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
                await self._crew.stop(timeout_s=self._stop_timeout_s)
        finally:
            await self._close()

    async def renew(self) -> None:
        """Other workers in the place of these, which are killed: after a WorkerCrashed. They know no parameters.

        Raises:
            WorkerDied, WorkerStalled, EnvironmentFault: as at the first start.
            LoopGone: it was somebody's own loop.
        """
        assert self._crew is not None, "the pool was entered"
        if not self._is_renewable:
            raise LoopGone(str(self._crew.link.failure))
        await self._crew.close()
        await self._start()

    async def _start(self) -> None:
        self._crew = crew = self._make_crew(self._group)
        self._pace = WorkerPace(floor_s=self._hang_timeout_s, first_s=self._request_timeout_s)
        self._ready = await crew.start(timeout_s=self._ready_timeout_s)
        log.info("workers_ready num_workers=%d devices=%s", len(self.devices), ",".join(self.devices))

    async def _close(self) -> None:
        try:
            if self._crew is not None:
                await self._crew.close()
        finally:
            await self._resources.aclose()


def worker_pool(
    training: TrainingJob,
    *,
    mailbox: SharedBuffer,
    corpus: Corpus,
    num_workers: int = 1,
    device: Device = "auto",
    num_threads: int | None = None,
    log_dir: Path,
    ready_timeout_s: float = 180.0,
    request_timeout_s: float = 600.0,
    hang_timeout_s: float = 60.0,
    stop_timeout_s: float = 10.0,
) -> WorkerPool:
    """A pool of processes of our own, which die with the thread that runs the event loop, at the latest.

    Args:
        training: what they train.
        mailbox: of all parameters; stays the caller's, and open for as long as the pool is.
        corpus: the text.
        num_workers: L, one for each device.
        device: where they compute.
        num_threads: CPU threads of each; None: this process's CPUs, divided.
        log_dir: existing folder for their output, `worker-0.log` and so on; appended to.
        ready_timeout_s: see `WorkerPool`.
        request_timeout_s: likewise; also for a worker's wait for the others.
        hang_timeout_s: likewise.
        stop_timeout_s: likewise.
    """
    if num_workers < 1:
        raise ValueError(f"a peer has at least one worker, not {num_workers}")

    micro_batch = MicroBatch(size=training.micro_batch, may_be_halved=training.halves_micro_batch)

    @contextlib.asynccontextmanager
    async def job(folder: Path) -> AsyncIterator[WorkerJob]:
        with (
            contextlib.closing(await asyncio.to_thread(SharedTokens.share, corpus.train)) as train,
            contextlib.closing(await asyncio.to_thread(SharedTokens.share, corpus.validation)) as validation,
        ):
            yield WorkerJob(
                training=msgspec.structs.replace(training, micro_batch=micro_batch.size),
                device=device,
                num_threads=num_threads or max(1, num_cpus() // num_workers),
                parent_pid=os.getpid(),
                socket_path=str(folder / "socket"),
                store_path=str(folder / "store"),
                collective_timeout_s=request_timeout_s,
                mailbox_fd=mailbox.fd,
                train=FilePart(fd=train.fd, offset=train.offset, numel=train.numel),
                validation=FilePart(fd=validation.fd, offset=validation.offset, numel=validation.numel),
            )

    return WorkerPool(
        lambda group: WorkerCrew(job, num_workers, log_dir, group),
        micro_batch=micro_batch,
        ready_timeout_s=ready_timeout_s,
        request_timeout_s=request_timeout_s,
        hang_timeout_s=hang_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


def loop_pool(loop: Loop) -> WorkerPool:
    """A pool of the processes of somebody's own loop, which are nobody's here to start or to end."""
    return WorkerPool(
        lambda group: LoopCrew(loop, group),
        is_renewable=False,
        request_timeout_s=_LOOP_TIMEOUT_S,
        hang_timeout_s=_LOOP_TIMEOUT_S,
    )


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spans(ranges: Sequence[slice]) -> tuple[ipc.Span, ...]:
    return tuple((part.start, part.stop) for part in ranges)


def _batch(indices: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(indices) <= ipc.MAX_STEP_SAMPLES:
        raise ValueError(f"a step takes 1 to {ipc.MAX_STEP_SAMPLES} samples, not {len(indices)}")
    return tuple(indices)


def _slowest(replies: Sequence[ipc.StepDone]) -> ipc.StepDone:
    return msgspec.structs.replace(replies[0], seconds=max(reply.seconds for reply in replies))
