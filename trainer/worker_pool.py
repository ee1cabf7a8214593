"""The workers of this peer: started together, driven together, and gone together.

Owns L processes, their private folder and what they inherit. Rules: when one worker fails, all are killed at once,
because the others would wait for it; leaving the pool leaves no process, no descriptor and no file behind. Must not
know what an outer step is, and imports neither torch.distributed nor the training loop.

Errors, all of them for the operator (trainer/errors.py)::

    TrainingFault        what a worker reported: the loss or the gradient is not finite
    ConfigError          the text and the settings do not go together (trainer.corpus.DataError in a worker)
    EnvironmentFault     this machine does not allow it: no such device, no memory, a path too long
    WorkerCrashed
    ├── WorkerDied       a process ended unasked
    └── WorkerStalled    an answer did not come in its time

After the first of them the pool is broken and raises it again whatever it is asked. Start a new pool.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from optim.inner import Moment
from trainer import ipc
from trainer.corpus import Corpus
from trainer.errors import EnvironmentFault
from trainer.shared_buffer import SharedBuffer, SharedTokens
from trainer.worker_job import Device, FilePart, TrainingJob, WorkerJob
from trainer.worker_link import WINDOW, WorkerLink, WorkerStalled
from trainer.worker_process import WorkerDied, WorkerProcess

__all__ = ["WINDOW", "WorkerDied", "WorkerPool", "WorkerStalled"]

log = logging.getLogger(__name__)

_MAX_SOCKET_PATH_NBYTES = 100  # the kernel's limit is 107
_EXPLANATION_GRACE_S = 0.5
_KILL_TIMEOUT_S = 5.0


class WorkerPool:
    """The workers of one peer, as an asynchronous context manager: started on entry, gone on exit.

    Leave it in the task that entered it. The workers die with the thread that runs the event loop, at the latest.

    Args:
        training: what they train.
        mailbox: of all parameters; stays the caller's, and open for as long as the pool is.
        corpus: the text.
        num_workers: L, one for each device.
        device: where they compute.
        num_threads: CPU threads of each; None: this process's CPUs, divided.
        log_dir: existing folder for their output, `worker-0.log` and so on; appended to.
        ready_timeout_s: from the start to the last worker's `Ready`.
        request_timeout_s: for an answer, from the request on; also for a worker's wait for the others.
        stop_timeout_s: for the workers' way out.
    """

    def __init__(
        self,
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
        stop_timeout_s: float = 10.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a peer has at least one worker, not {num_workers}")
        self.num_workers = num_workers
        self._training = training
        self._mailbox = mailbox
        self._corpus = corpus
        self._device: Device = device
        self._num_threads = num_threads or max(1, num_cpus() // num_workers)
        self._log_dir = log_dir
        self._ready_timeout_s = ready_timeout_s
        self._request_timeout_s = request_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._resources = contextlib.AsyncExitStack()
        self._link: WorkerLink  # made on entry
        self._processes: list[WorkerProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: tuple[ipc.Ready, ...] = ()
        self._is_stopping = False

    # ------------------------------------------------------------------------------------------- requests

    async def step(self, indices: Sequence[int], *, inner_step: int, timeout_s: float | None = None) -> ipc.StepDone:
        """Train one inner step on a batch.

        Two steps may be under way; they are trained in the order of the calls. If the caller stops waiting, the step
        is trained all the same.

        Args:
            indices: samples, 1 to 65536 of them.
            inner_step: global number of the step, from 1.
            timeout_s: instead of `request_timeout_s`.

        Returns:
            Loss, norm and tokens of the whole batch; the seconds of the slowest worker.

        Raises:
            TrainingFault, WorkerDied, WorkerStalled: the pool is broken.
        """
        if not 1 <= len(indices) <= ipc.MAX_STEP_SAMPLES:
            raise ValueError(f"a step takes 1 to {ipc.MAX_STEP_SAMPLES} samples, not {len(indices)}")
        request = ipc.Step(serial=self._link.next_serial(), inner_step=inner_step, indices=tuple(indices))
        replies = await self._link.ask(request, ipc.StepDone, self._timeout_s(timeout_s))
        return msgspec.structs.replace(replies[0], seconds=max(reply.seconds for reply in replies))

    async def load(
        self,
        ranges: Sequence[slice] = (),
        *,
        keep: float = 0.0,
        reset_optimizer: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Make the workers take parameters from the mailbox: p <- keep * p + (1 - keep) * mailbox.

        Leave the mailbox alone until this returns. The first load must be of everything, with keep = 0.

        Args:
            ranges: parts of the flat vector (`Fragment.ranges`); empty: everything.
            keep: in [0, 1].
            reset_optimizer: also forget the inner optimizer's state.
            timeout_s: instead of `request_timeout_s`.

        Raises:
            WorkerDied, WorkerStalled: the pool is broken.
        """
        request = ipc.Load(
            serial=self._link.next_serial(), spans=_spans(ranges), keep=keep, reset_optimizer=reset_optimizer
        )
        await self._link.ask(request, ipc.Loaded, self._timeout_s(timeout_s))

    async def store(self, ranges: Sequence[slice] = (), *, timeout_s: float | None = None) -> None:
        """Make the workers write parameters into the mailbox, which is the caller's again when this returns.

        Steps asked for before are in it, those asked for later are not. Arguments and errors as for `load`.
        """
        request = ipc.Store(serial=self._link.next_serial(), spans=_spans(ranges))
        await self._link.ask(request, ipc.Stored, self._timeout_s(timeout_s))

    async def load_moment(self, name: Moment, *, own_steps: int) -> None:
        """Make the workers' inner optimizer take one of its moments from the mailbox.

        Args:
            name: by torch's name, of AdamW.
            own_steps: how many inner steps it is the outcome of.

        Raises:
            WorkerDied, WorkerStalled: the pool is broken.
        """
        request = ipc.Load(serial=self._link.next_serial(), values=name, own_steps=own_steps)
        await self._link.ask(request, ipc.Loaded, self._timeout_s(None))

    async def store_moment(self, name: Moment) -> int:
        """Make the workers write one of the moments into the mailbox; returns after how many inner steps it is.

        Errors as for `load_moment`.
        """
        request = ipc.Store(serial=self._link.next_serial(), values=name)
        replies = await self._link.ask(request, ipc.Stored, self._timeout_s(None))
        return replies[0].own_steps

    async def evaluate(self, *, timeout_s: float | None = None) -> float:
        """Held-out loss of the present parameters, in nats per token. Errors as for `load`."""
        request = ipc.Evaluate(serial=self._link.next_serial())
        replies = await self._link.ask(request, ipc.Evaluated, self._timeout_s(timeout_s))
        return replies[0].loss

    async def failed(self) -> None:
        """Wait for the pool's failure and raise it: for a task that watches while nothing is asked."""
        await self._link.failed()
        assert self._link.failure is not None
        raise self._link.failure

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by local rank."""
        return tuple(process.pid for process in self._processes)

    @property
    def devices(self) -> tuple[str, ...]:
        """What each worker computes on, for people."""
        return tuple(ready.device for ready in self._ready)

    def _timeout_s(self, wanted_s: float | None) -> float:
        return self._request_timeout_s if wanted_s is None else wanted_s

    # ----------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        """Start the workers and wait until all are ready.

        Raises:
            WorkerDied: one did not come up.
            WorkerStalled: not all did in time.
            EnvironmentFault: no such devices, or no place for the socket.
        """
        try:
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
            if error is None and self._link.failure is None:
                await self._stop()
        finally:
            await self._close()

    async def _start(self) -> None:
        folder = _private_folder()
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        self._link = WorkerLink(folder / "socket", self.num_workers, on_failure=self._kill)
        self._resources.callback(self._link.close)
        group = await self._resources.enter_async_context(asyncio.TaskGroup())
        self._resources.callback(self._cancel_tasks)
        self._tasks.append(group.create_task(self._link.run()))
        with (
            contextlib.closing(await asyncio.to_thread(SharedTokens.share, self._corpus.train)) as train,
            contextlib.closing(await asyncio.to_thread(SharedTokens.share, self._corpus.validation)) as validation,
        ):
            job = self._job(folder, train, validation)
            for local_rank in range(self.num_workers):
                process = await WorkerProcess.start(
                    job,
                    local_rank=local_rank,
                    num_workers=self.num_workers,
                    log_path=self._log_dir / f"worker-{local_rank}.log",
                )
                self._processes.append(process)
                self._tasks.append(group.create_task(self._watch(process)))
        self._ready = await self._link.ready(self._ready_timeout_s)
        log.info("workers_ready num_workers=%d devices=%s", self.num_workers, ",".join(self.devices))

    def _job(self, folder: Path, train: SharedTokens, validation: SharedTokens) -> WorkerJob:
        return WorkerJob(
            training=self._training,
            device=self._device,
            num_threads=self._num_threads,
            parent_pid=os.getpid(),
            socket_path=str(folder / "socket"),
            store_path=str(folder / "store"),
            collective_timeout_s=self._request_timeout_s,
            mailbox_fd=self._mailbox.fd,
            train=FilePart(fd=train.fd, offset=train.offset, numel=train.numel),
            validation=FilePart(fd=validation.fd, offset=validation.offset, numel=validation.numel),
        )

    async def _watch(self, process: WorkerProcess) -> None:
        """Tell the link when a process ends unasked."""
        exit_code = await process.wait()
        if exit_code >= 0 and not self._is_stopping:
            # It ended by itself: its last words may still be in the socket, or it was a victim of another's death.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPLANATION_GRACE_S):
                    await self._link.failed()
        if not self._is_stopping:
            self._link.fail(process.died(exit_code))
        elif exit_code > 0 and self._link.failure is None:
            log.warning("worker_stopped_badly %s", process.died(exit_code))

    async def _stop(self) -> None:
        """Ask the workers to exit and wait for it."""
        self._is_stopping = True
        self._link.stop_workers()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                for process in self._processes:
                    await process.wait()
        except TimeoutError:
            log.warning("workers_killed reason=%r", f"did not stop in {self._stop_timeout_s:g} s")

    async def _close(self) -> None:
        self._is_stopping = True
        try:
            self._kill()
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                for process in self._processes:
                    await process.wait()
        except TimeoutError:
            # Only a process that hangs in the kernel, in a broken driver say, outlives SIGKILL.
            log.critical("workers_survive_sigkill pids=%s", self.pids)
        finally:
            await self._resources.aclose()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _private_folder() -> Path:
    """A new folder that only this user can enter, short enough for a unix socket's path.

    Raises:
        EnvironmentFault: there is none.
    """
    folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
    if len(os.fsencode(folder / "socket")) > _MAX_SOCKET_PATH_NBYTES:
        folder.rmdir()
        raise EnvironmentFault(f"{folder.parent} is too long a path for a socket", cure="set TMPDIR to a shorter one")
    return folder


def _spans(ranges: Sequence[slice]) -> tuple[ipc.Span, ...]:
    return tuple((part.start, part.stop) for part in ranges)
