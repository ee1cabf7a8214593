# SPDX-License-Identifier: Apache-2.0
"""A worker process (start.py begins it), with RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them.

Owns the process: its device, its process group, its end of the socket, its exit code. Rules: it does what the daemon
says, one request after the other, and answers each; it outlives its daemon by nothing; only the daemon ends it, so a
signal meant for the daemon's whole group does not. Must not know what an outer step is.

Exit codes: 0 told to stop · 1 our bug, see the log · 2 config or data · 3 this machine does not allow it · 8 training
fault.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal, NoReturn, assert_never

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.trainer.config.job import FilePart, WorkerJob
from isthmus.trainer.data.corpus import TokenArray
from isthmus.trainer.errors import ConfigError, ExitCode, IsthmusError, TrainingFault
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.channel import DaemonChannel, DaemonGone
from isthmus.trainer.workers.devices import choose_device
from isthmus.trainer.workers.inner_loop import InnerLoop, StepResult
from isthmus.trainer.workers.shared_buffer import SharedBuffer, SharedTokens

log = logging.getLogger(__name__)


def work(text: str, fds: Sequence[int]) -> NoReturn:
    """Do a job, and end the process.

    Args:
        text: the job, as JSON.
        fds: the descriptors that the job names, as they are numbered here: mailbox, text, held-out text.
    """
    started = time.perf_counter()
    told = msgspec.json.decode(text, type=WorkerJob)
    job = msgspec.structs.replace(
        told,
        mailbox_fd=fds[0],
        train=msgspec.structs.replace(told.train, fd=fds[1]),
        validation=msgspec.structs.replace(told.validation, fd=fds[2]),
    )
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
    serial = 0
    try:
        torch.set_num_threads(job.num_threads)
        with _site(job, rank, size) as mesh:
            inner_loop = InnerLoop(
                job.training, mesh=mesh, train=_inherited(job.train), validation=_inherited(job.validation)
            )
            mailbox = SharedBuffer(job.mailbox_fd, inner_loop.numel)
            if mesh.device_type == "cuda":
                mailbox.pin()
            seconds = time.perf_counter() - started
            device = _describe(mesh)
            log.info(
                "worker_ready local_rank=%d local_world_size=%d device=%r seconds=%.1f", rank, size, device, seconds
            )
            channel.send(ipc.Ready(serial=0, local_rank=rank, device=device, seconds=seconds))
            while not isinstance(request := channel.receive(), ipc.Stop):
                serial = request.serial
                channel.send(_answer(request, inner_loop, mailbox))
    except IsthmusError as error:
        log.warning("worker_gives_up local_rank=%d exit_code=%d reason=%s", rank, error.exit_code, error)
        channel.send(_failed(error, serial))
        return error.exit_code
    except DaemonGone:
        log.warning("worker_orphaned local_rank=%d", rank)
    return ExitCode.DONE


def _answer(request: ipc.Question, inner_loop: InnerLoop, mailbox: SharedBuffer) -> ipc.Reply:
    match request:
        case ipc.Load():
            num_broken = inner_loop.load(
                mailbox.tensor,
                _ranges(request.spans),
                kind=request.kind,
                keep=request.keep,
                reset_optimizer=request.reset_optimizer,
                own_steps=request.own_steps,
            )
            return ipc.Loaded(serial=request.serial, num_broken=num_broken)
        case ipc.Store():
            inner_loop.store(mailbox.tensor, _ranges(request.spans), kind=request.kind)
            return ipc.Stored(serial=request.serial, own_steps=inner_loop.own_steps)
        case ipc.Step():
            return _done(request, inner_loop.step(request.indices, request.inner_step))
        case ipc.Backward():
            loss, num_tokens = inner_loop.backward(request.indices, request.inner_step)
            return ipc.BackwardDone(serial=request.serial, loss=loss, num_tokens=num_tokens)
        case ipc.Update():
            return _done(request, inner_loop.update(request.inner_step))
        case ipc.Keep():
            has_room = inner_loop.judge.keep(mailbox.tensor if request.is_in_mailbox else None)
            return ipc.Kept(serial=request.serial, has_room=has_room, num_batches=inner_loop.judge.num_batches)
        case ipc.Evaluate():
            batches = None if request.batches is None else range(*request.batches)
            loss, num_tokens = inner_loop.judge.evaluate(batches, is_kept=request.is_kept)
            return ipc.Evaluated(serial=request.serial, loss=loss, num_tokens=num_tokens)
        case _:
            assert_never(request)


def _done(request: ipc.Step | ipc.Update, result: StepResult) -> ipc.StepDone:
    return ipc.StepDone(
        serial=request.serial,
        inner_step=request.inner_step,
        loss=result.loss,
        num_tokens=result.num_tokens,
        grad_norm=result.grad_norm,
        lr=result.lr,
        seconds=result.seconds,
    )


def _failed(error: IsthmusError, serial: int) -> ipc.WorkerFailed:
    kind: Literal["training_fault", "environment", "config"] = "environment"
    if isinstance(error, TrainingFault):
        kind = "training_fault"
    elif isinstance(error, ConfigError):
        kind = "config"
    return ipc.WorkerFailed(serial=serial, kind=kind, problem=error.problem[:8192], cure=error.cure[:8192])


def _ranges(spans: tuple[ipc.Span, ...]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in spans)


def _inherited(part: FilePart) -> TokenArray:
    return SharedTokens(part.fd, part.offset, part.numel).tokens()


@contextlib.contextmanager
def _site(job: WorkerJob, rank: int, size: int) -> Iterator[DeviceMesh]:
    """The workers of this peer as a mesh; the process group is left in order if the body ends in order."""
    device_type = choose_device(job.device, size)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
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
        return f"cpu ({torch.get_num_threads()} threads)"
    index = torch.cuda.current_device()
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"
