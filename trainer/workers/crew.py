# SPDX-License-Identifier: Apache-2.0
"""One start of all workers of a peer: their processes, their folder, the socket to them, and their end.

Rules: when one worker fails, all are killed at once, because the others would wait for it; a crew that is closed leaves
no process, no descriptor and no file behind. It is not started twice: who wants workers again makes another crew.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from isthmus.trainer.config.job import WorkerJob
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.inquest import inquire
from isthmus.trainer.workers.link import WorkerLink
from isthmus.trainer.workers.process import WorkerProcess

log = logging.getLogger(__name__)

_MAX_SOCKET_PATH_NBYTES = 100  # the kernel's limit is 107
_EXPLANATION_GRACE_S = 0.5
_KILL_TIMEOUT_S = 5.0

JobMaker = Callable[[Path], AbstractAsyncContextManager[WorkerJob]]
"""What the workers are told, given the folder where their socket and their meeting point are. The descriptors in it are
open in the body."""


class WorkerCrew:
    """Call `start` once, then `stop` for an end in order, and `close` in any case.

    Args:
        make_job: says what they are told.
        num_workers: one for each device.
        log_dir: existing folder for their output, `worker-0.log` and so on; appended to.
        group: owns the tasks that listen and watch, until `close`.
    """

    def __init__(self, make_job: JobMaker, num_workers: int, log_dir: Path, group: asyncio.TaskGroup) -> None:
        self._make_job = make_job
        self._num_workers = num_workers
        self._log_dir = log_dir
        self._group = group
        self._folder = _private_folder()
        self.link = WorkerLink(self._folder / "socket", num_workers, on_failure=self._kill, explain=self._explain)
        """The socket to the workers."""
        self._processes: list[WorkerProcess] = []
        self.closed = asyncio.Event()
        """Set when nothing is left of it."""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def pids(self) -> Sequence[int]:
        """Process ids by local rank."""
        return tuple(process.pid for process in self._processes)

    async def start(self, *, timeout_s: float) -> tuple[ipc.Ready, ...]:
        """Start the workers and wait until all are ready; their reports by local rank.

        Raises:
            WorkerDied: one did not come up.
            WorkerStalled: not all did in time.
        """
        self._tasks.append(self._group.create_task(self.link.run()))
        async with self._make_job(self._folder) as job:
            await self._start_processes(job)
        return await self.link.ready(timeout_s)

    async def _start_processes(self, job: WorkerJob) -> None:
        for local_rank in range(self._num_workers):
            process = await WorkerProcess.start(
                job,
                local_rank=local_rank,
                num_workers=self._num_workers,
                log_path=self._log_dir / f"worker-{local_rank}.log",
            )
            self._processes.append(process)
            self._tasks.append(self._group.create_task(self._watch(process)))

    async def stop(self, *, timeout_s: float) -> None:
        """Ask the workers to exit and wait for it."""
        self._is_stopping = True
        self.link.stop_workers()
        try:
            async with asyncio.timeout(timeout_s):
                for process in self._processes:
                    await process.wait()
        except TimeoutError:
            log.warning("workers_killed reason=%r", f"did not stop in {timeout_s:g} s")

    async def close(self) -> None:
        """Kill whoever is left and tidy up. May be called again."""
        self._is_stopping = True
        try:
            self._kill()
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                for process in self._processes:
                    await process.wait()
        except TimeoutError:
            # Only a process that hangs in the kernel, in a broken driver say, outlives SIGKILL.
            log.critical("workers_survive_sigkill pids=%s", [process.pid for process in self._processes])
        finally:
            for task in self._tasks:
                task.cancel()
            self.link.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self.closed.set()

    async def _watch(self, process: WorkerProcess) -> None:
        """Tell the link when a process ends unasked."""
        exit_code = await process.wait()
        if exit_code >= 0 and not self._is_stopping:
            # It ended by itself: its last words may still be in the socket, or it was a victim of another's death.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPLANATION_GRACE_S):
                    await self.link.failed()
        if not self._is_stopping:
            self.link.fail(process.died(exit_code))
        elif exit_code > 0 and self.link.failure is None:
            log.warning("worker_stopped_badly %s", process.died(exit_code))

    async def _explain(self, local_ranks: Sequence[int]) -> str:
        """What these workers do instead of answering, for people."""
        return await inquire([process for process in self._processes if process.local_rank in local_ranks])

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


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
