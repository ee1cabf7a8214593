# SPDX-License-Identifier: Apache-2.0
"""A worker process (start.py begins it), with RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them.

Owns the process: its device, its process group, its end of the socket, its exit code. Rules: it does what the daemon
says, one request after the other, and answers each; it outlives its daemon by nothing; only the daemon ends it, so a
signal meant for the daemon's whole group does not. Must not know what an outer step is.

Exit codes: 0 told to stop · 1 our bug, see the log · 2 config or data · 3 this machine does not allow it · 8 training
fault · 10 out of memory.
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal, NoReturn, assert_never

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.trainer.config.job import RealPrecision, WorkerJob
from isthmus.trainer.errors import ConfigError, ExitCode, IsthmusError, TrainingFault, WorkerOutOfMemory
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.channel import DaemonChannel, DaemonGone
from isthmus.trainer.workers.devices import choose_device, peak_flops, require_compiler
from isthmus.trainer.workers.inner_loop import InnerLoop
from isthmus.trainer.workers.neighbours import Neighbours, SharedThreads
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from isthmus.trainer.workers.step import PendingStep, StepResult
from isthmus.trainer.workers.text import sides_of

log = logging.getLogger(__name__)

_MOST_BEGUN = 2
_LOOK_S = 0.001
"""Between two looks whether the device has done a step, or the daemon has said something."""
_NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""What torch says where it has no class of error for it."""


def work(text: str, fds: Sequence[int]) -> NoReturn:
    """Do a job, and end the process.

    Args:
        text: the job, as JSON.
        fds: the descriptors that the job names, as they are numbered here.
    """
    started = time.perf_counter()
    job = msgspec.json.decode(text, type=WorkerJob).renumbered(fds)
    os.environ.update(job.environment)
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    channel = DaemonChannel(job.socket_path, local_rank=rank, is_there=lambda: os.getppid() == job.parent_pid)
    try:
        code = _run(job, rank, size, channel, started)
    except Exception:
        log.exception("worker_failed local_rank=%d", rank)
        code = ExitCode.UNEXPECTED
    finally:
        channel.close()
    # A collective that never ends must not keep a worker alive that has said its last word.
    logging.shutdown()
    os._exit(code)


def _run(job: WorkerJob, rank: int, size: int, channel: DaemonChannel, started: float) -> ExitCode:
    try:
        neighbours = Neighbours() if job.divides_processors else None
        with SharedThreads(job.num_threads, neighbours) as threads, _site(job, rank, size) as mesh:
            train, validation = sides_of(job.text)
            inner_loop = InnerLoop(job.training, mesh=mesh, train=train, validation=validation)
            mailbox = SharedBuffer(job.mailbox_fd, inner_loop.numel)
            if mesh.device_type == "cuda":
                mailbox.pin()
            seconds = time.perf_counter() - started
            device = _describe(mesh)
            log.info(
                "worker_ready local_rank=%d local_world_size=%d device=%r seconds=%.1f", rank, size, device, seconds
            )
            channel.send(
                ipc.Ready(
                    serial=0,
                    local_rank=rank,
                    device=device,
                    seconds=seconds,
                    precision=inner_loop.precision,
                    peak_flops=_peak_flops(job, mesh, inner_loop.precision),
                )
            )
            _Server(channel, inner_loop, mailbox, threads).serve()
            inner_loop.close()
    except IsthmusError as error:
        log.warning("worker_gives_up local_rank=%d exit_code=%d reason=%s", rank, error.exit_code, error)
        channel.send(_failed(error))
        return error.exit_code
    except DaemonGone:
        log.warning("worker_orphaned local_rank=%d", rank)
    return ExitCode.DONE


class _Server:
    """Does what the daemon asks for, in turn.

    A step is answered when its numbers are there, and where the device computes while the host goes on, the next one is
    begun before that: then two of them are with the device, which never waits for the host.
    """

    def __init__(
        self, channel: DaemonChannel, inner_loop: InnerLoop, mailbox: SharedBuffer, threads: SharedThreads
    ) -> None:
        self._channel = channel
        self._threads = threads
        self._inner_loop = inner_loop
        self._mailbox = mailbox
        self._begun: deque[tuple[ipc.Step, PendingStep]] = deque()

    def serve(self) -> None:
        """Until the daemon says `Stop`."""
        while True:
            self._answer_steps()
            request = self._channel.receive()
            if isinstance(request, ipc.Stop):
                return
            with _told_if_out_of_memory():
                if isinstance(request, ipc.Step):
                    self._begin(request)
                else:
                    self._answer_steps(may_wait=True)
                    self._channel.send(self._answer(request))

    def _begin(self, request: ipc.Step) -> None:
        self._threads.look()
        step = self._inner_loop.begin_step(request.indices, request.inner_step, request.position)
        self._begun.append((request, step))
        if isinstance(following := self._channel.look_ahead(), ipc.Step | ipc.Backward):
            self._inner_loop.prefetch(following.indices)

    def _answer_steps(self, *, may_wait: bool = False) -> None:
        """Answer what is done; also, if it `may_wait`, what is not. Looks for another request while there is one."""
        while self._begun:
            request, step = self._begun[0]
            if not (may_wait or len(self._begun) == _MOST_BEGUN or step.is_ready):
                if self._channel.look_ahead(_LOOK_S) is not None:
                    return
                continue
            self._begun.popleft()
            self._channel.send(_done(request, step.result()))

    def _answer(self, request: ipc.Load | ipc.Backward | ipc.Update | ipc.Store | ipc.Keep | ipc.Evaluate) -> ipc.Reply:
        inner_loop, mailbox = self._inner_loop, self._mailbox
        match request:
            case ipc.Load():
                num_broken = inner_loop.load(
                    mailbox.at(request.place),
                    _ranges(request.spans),
                    kind=request.kind,
                    keep=request.keep,
                    own_steps=request.own_steps,
                )
                return ipc.Loaded(serial=request.serial, num_broken=num_broken)
            case ipc.Store():
                inner_loop.store(mailbox.tensor, _ranges(request.spans), kind=request.kind)
                return ipc.Stored(serial=request.serial, own_steps=inner_loop.own_steps)
            case ipc.Backward():
                loss, num_tokens = inner_loop.backward(request.indices, request.inner_step)
                return ipc.BackwardDone(serial=request.serial, loss=loss, num_tokens=num_tokens)
            case ipc.Update():
                return _done(request, inner_loop.update(request.inner_step, request.position))
            case ipc.Keep():
                has_room = inner_loop.judge.keep(None if request.place is None else mailbox.at(request.place))
                return ipc.Kept(serial=request.serial, has_room=has_room, num_batches=inner_loop.judge.num_batches)
            case ipc.Evaluate():
                batches = None if request.batches is None else range(*request.batches)
                loss, num_tokens = inner_loop.judge.evaluate(batches, is_kept=request.is_kept)
                return ipc.Evaluated(serial=request.serial, loss=loss, num_tokens=num_tokens)
            case _:
                assert_never(request)


@contextlib.contextmanager
def _told_if_out_of_memory() -> Iterator[None]:
    """A device or a machine that has no memory left is the operator's to know of.

    Raises:
        WorkerOutOfMemory: instead of torch's error.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise WorkerOutOfMemory(str(error)) from error
    except RuntimeError as error:
        if _NO_CPU_MEMORY not in str(error):
            raise
        raise WorkerOutOfMemory(str(error)) from error


def _done(request: ipc.Step | ipc.Update, result: StepResult) -> ipc.StepDone:
    return ipc.StepDone(
        serial=request.serial,
        inner_step=request.inner_step,
        loss=result.loss,
        num_tokens=result.num_tokens,
        grad_norm=result.grad_norm,
        lr=result.lr,
        seconds=result.seconds,
        parts=result.parts,
    )


def _failed(error: IsthmusError) -> ipc.WorkerFailed:
    kind: Literal["training_fault", "environment", "config", "out_of_memory"] = "environment"
    if isinstance(error, TrainingFault):
        kind = "training_fault"
    elif isinstance(error, ConfigError):
        kind = "config"
    elif isinstance(error, WorkerOutOfMemory):
        kind = "out_of_memory"
    return ipc.WorkerFailed(serial=0, kind=kind, problem=error.problem[:8192], cure=error.cure[:8192])


def _peak_flops(job: WorkerJob, mesh: DeviceMesh, precision: RealPrecision) -> float | None:
    if mesh.device_type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(), precision, has_tf32=job.training.has_tf32)


def _ranges(spans: tuple[ipc.Span, ...]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in spans)


@contextlib.contextmanager
def _site(job: WorkerJob, rank: int, size: int) -> Iterator[DeviceMesh]:
    """The workers of this peer as a mesh; the process group is left in order if the body ends in order."""
    device_type = choose_device(job.device, size)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        if job.training.has_tf32:
            torch.set_float32_matmul_precision("high")
    if job.training.is_compiled:
        require_compiler(device_type)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        # A file in the daemon's private folder: no port to race for, and nobody else on this machine can join.
        init_method=f"file://{job.store_path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=job.collective_timeout_s),
        device_id=device if device_type == "cuda" else None,
    )
    yield init_device_mesh(device_type, (size,))
    dist.destroy_process_group()


def _describe(mesh: DeviceMesh) -> str:
    if mesh.device_type != "cuda":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    index = torch.cuda.current_device()
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"
