# SPDX-License-Identifier: Apache-2.0
"""One worker process as its daemon sees it.

Owns the job, the environment and the log of the process, and how it is ended. Rules: it runs in a session of
its own, so that a terminal's Ctrl-C reaches the daemon alone; nothing is inherited but what the job names. Must not
know what is said to it.
"""

import contextlib
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from isthmus.trainer.config.job import WorkerJob
from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.files import open_private
from isthmus.trainer.workers.fork_server import ForkedProcess
from isthmus.trainer.workers.start import start_worker

_STDERR_TAIL_NBYTES = 4096
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class WorkerDied(WorkerCrashed):
    """A worker process ended without being asked to.

    Attributes:
        local_rank: which.
        worker_exit_code: its exit code; -n if signal n ended it. (`exit_code` is what our own process ends with.)
        how: the same in words, with the memory that it had if that ran out.
        was_out_of_memory: whether the kernel ended it because the machine had no memory left.
        memory_nbytes: the most it may have had: of this peer's workers so far the largest.
        stderr_tail: the end of what it printed.
        log_path: where all of it is.
    """

    def __init__(
        self,
        local_rank: int,
        exit_code: int,
        stderr_tail: str,
        log_path: Path,
        *,
        memory_nbytes: int = 0,
        was_out_of_memory: bool = False,
    ) -> None:
        self.was_out_of_memory = False
        how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
        cure = f"{log_path} says more; start the peer again"
        if was_out_of_memory and exit_code == -signal.SIGKILL:
            how += f": the kernel had no memory left, and the worker had up to {memory_nbytes / 1e9:.2f} GB"
            cure = "give the machine more memory, or the peer a smaller node.micro_batch"
            self.was_out_of_memory = True
        last_line = "" if exit_code < 0 else stderr_tail.strip().rpartition("\n")[2]  # else it tells of something else
        super().__init__(f"worker {local_rank} ended {how}" + (f": {last_line}" if last_line else ""), cure=cure)
        self.how = f"worker {local_rank} ended {how}"
        self.memory_nbytes = memory_nbytes
        self.local_rank = local_rank
        self.worker_exit_code = exit_code
        self.stderr_tail = stderr_tail
        self.log_path = log_path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerProcess:
    """A started worker. Whoever started it awaits `wait`, or a zombie is left."""

    local_rank: int
    log_path: Path
    _process: ForkedProcess
    _log_start: int
    """Size of the log before this process wrote to it."""
    _memory_kills: int
    """How often the kernel had ended a process for lack of memory before."""

    @classmethod
    async def start(cls, job: WorkerJob, *, local_rank: int, num_workers: int, log_path: Path) -> Self:
        """Start it; its output is appended to the log.

        Raises:
            OSError: the log cannot be opened, or no process can be started.
        """
        with open_private(log_path, "ab") as log:
            # Both before the start: by its end the worker may have written, or been killed.
            log_start, memory_kills = log.tell(), _num_memory_kills()
            own = msgspec.structs.replace(job, environment=_environment(local_rank, num_workers, job.num_threads))
            process = await start_worker(msgspec.json.encode(own).decode(), fds=job.fds, log=log.fileno())
            return cls(
                local_rank=local_rank,
                log_path=log_path,
                _process=process,
                _log_start=log_start,
                _memory_kills=memory_kills,
            )

    @property
    def pid(self) -> int:
        """Its process id, also that of its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not been seen to end."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit code, as soon as it has ended; -n if signal n ended it."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it and whatever it has started, at once; `wait` tells when that is done."""
        if self.is_running:
            # Between its end and our hearing of it there is nobody to signal; its id is not reused before `wait`.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def died(self, exit_code: int) -> WorkerDied:
        """The error that tells of its unexpected end."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _STDERR_TAIL_NBYTES))
            tail = log.read().decode("utf-8", "replace")
        return WorkerDied(
            self.local_rank,
            exit_code,
            tail,
            self.log_path,
            memory_nbytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _MAXRSS_UNIT,
            was_out_of_memory=_num_memory_kills() > self._memory_kills,
        )


def _num_memory_kills() -> int:
    """How many processes of this machine the kernel has ended for lack of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _environment(local_rank: int, num_workers: int, num_threads: int) -> dict[str, str]:
    """torchrun's words for one machine. The site's own traffic stays on the loopback interface."""
    interfaces = {name: os.environ.get(name, _LOOPBACK) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    ranks = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": num_workers}
    # For libraries that are not loaded yet; torch is told by the worker.
    threads = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads}
    return interfaces | {name: str(value) for name, value in (ranks | threads).items()}
