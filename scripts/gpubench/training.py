# SPDX-License-Identifier: Apache-2.0
"""Tokens a second and memory of a worker's inner loop, and of a bare PyTorch loop in the same process.

The two take turns of some seconds, and the median of the ratios of neighbouring turns counts. The worker is one of a
peer that has no other, with NCCL (on the CPU gloo) and, in bf16, FSDP2 over itself; two steps are begun before the
numbers of the first are read, as in life. Its memory is the most that its device has lent it. Variants come after that.
"""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.model.decoder import ModelConfig, preset
from isthmus.trainer.workers.devices import choose_precision, peak_flops
from isthmus.trainer.workers.inner_loop import InnerLoop
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from isthmus.trainer.workers.step import PendingStep
from scripts.bare_training import BareTraining, batch_of
from scripts.gpubench.task import Figures, Task, synchronize

_TOKENS_OF_A_STEP = 16_384
_TURNS = 5
_SHARES = {"full checkpointing": 0.6, "compiled": 0.65}
"""Variants are begun only before this share of the part's time is over."""
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "full checkpointing": {"activation_checkpointing": "full"},
    "compiled": {"is_compiled": True},
}
_TEXT = np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)


@dataclasses.dataclass(slots=True)
class _Side:
    """One of the two: makes a step, or all that are begun to their end."""

    step: Callable[[int], None]
    finish: Callable[[], None]
    steps_done: int = 0

    def run(self, number: int) -> None:
        for _ in range(number):
            self.step(self.steps_done)
            self.steps_done += 1
        self.finish()


def measure(task: Task) -> Figures:
    """Of one preset."""
    began, device = time.perf_counter(), task.device
    config = preset(task.preset)
    seq_len = config.max_seq_len
    batch = max(1, _TOKENS_OF_A_STEP // seq_len) if task.is_cuda else 2
    precision = choose_precision("auto", task.device_type)
    if task.is_cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    job = _job(config, batch)
    figures: Figures = {"preset": task.preset, "seq_len": seq_len, "batch": batch, "precision": precision}
    with _site(device) as mesh, _first_values(config, task) as mailbox:
        figures["group_s"] = round(time.perf_counter() - began, 2)
        (worker, figures["worker_memory_gb"]) = _with_memory(lambda: _worker(job, mesh, mailbox), device)
        (bare, figures["bare_memory_gb"]) = _with_memory(lambda: _bare(config, batch, device, precision), device)
        tokens = batch * seq_len
        number = _steps_of_a_turn(bare, device, task.for_s(1 / 50))
        turns = [(_seconds(worker, number, device), _seconds(bare, number, device)) for _ in range(_TURNS)]
        worker_s, bare_s = (statistics.median(side) for side in zip(*turns, strict=True))
        ratios = sorted(bare_s / worker_s for worker_s, bare_s in turns)
        figures |= {
            "steps_of_a_turn": number,
            "worker_tokens_per_s": round(number * tokens / worker_s),
            "bare_tokens_per_s": round(number * tokens / bare_s),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        if task.is_cuda and (peak := peak_flops(torch.cuda.get_device_name(device), precision, has_tf32=True)):
            flops = number * tokens * config.num_flops_per_token(seq_len)
            figures["worker_mfu"] = round(flops / worker_s / peak, 3)
            figures["bare_mfu"] = round(flops / bare_s / peak, 3)
        task.keep(figures)
        del worker, bare
        for name, settings in _VARIANTS.items() if task.is_cuda else ():
            if time.perf_counter() - began < _SHARES[name] * task.limit_s:
                variant = msgspec.structs.replace(job, **settings)
                figures[name] = _variant(variant, mesh, mailbox, number, device)
                task.keep(figures)
    return figures | {"ok": True}


def _job(config: ModelConfig, batch: int) -> TrainingJob:
    return TrainingJob(
        model=config,
        seq_len=config.max_seq_len,
        data_seed=0,
        optimizer=OptimizerJob(lr=1e-4),
        schedule=ScheduleJob(total_steps=1_000_000),
        micro_batch=batch,
        eval_batch=1,
        num_eval_batches=1,
    )


@contextlib.contextmanager
def _site(device: torch.device) -> Iterator[DeviceMesh]:
    """A peer's only worker, as `trainer/workers/worker.py` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{Path(folder, 'store')}",
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        yield init_device_mesh(device.type, (1,))
        dist.destroy_process_group()


@contextlib.contextmanager
def _first_values(config: ModelConfig, task: Task) -> Iterator[SharedBuffer]:
    first = config.initial_parameters(0)
    mailbox = SharedBuffer.create(first.numel())
    mailbox.tensor.copy_(first)
    if task.is_cuda:
        mailbox.pin()
    yield mailbox
    mailbox.close()


def _worker(job: TrainingJob, mesh: DeviceMesh, mailbox: SharedBuffer) -> _Side:
    loop = InnerLoop(job, mesh=mesh, train=_TEXT, validation=_TEXT[: 8 * (job.seq_len + 1)])
    loop.load(mailbox.tensor)
    begun: deque[PendingStep] = deque()

    def indices(number: int) -> range:
        return range(number * job.micro_batch, (number + 1) * job.micro_batch)

    def step(number: int) -> None:
        begun.append(loop.begin_step(indices(number), number + 1))
        loop.prefetch(indices(number + 1))
        if len(begun) > 1:
            begun.popleft().result()

    def finish() -> None:
        while begun:
            begun.popleft().result()

    return _Side(step, finish)


def _bare(config: ModelConfig, batch: int, device: torch.device, precision: str) -> _Side:
    training = BareTraining(config, device=device, precision=precision)
    num_samples = (len(_TEXT) - 1) // config.max_seq_len

    def step(number: int) -> None:
        first = number * batch % (num_samples - batch)
        training.step(*batch_of(_TEXT, range(first, first + batch), config.max_seq_len))

    return _Side(step, lambda: synchronize(device))


def _with_memory(make: Callable[[], _Side], device: torch.device) -> tuple[_Side, float | None]:
    """Made, warmed up, and the most GB that it took of the device, beyond what others have; None on the CPU."""
    if device.type != "cuda":
        side = make()
        side.run(2)
        return side, None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    side = make()
    side.run(4)
    return side, round((torch.cuda.max_memory_allocated(device) - before) / 1e9, 2)


def _steps_of_a_turn(side: _Side, device: torch.device, turn_s: float) -> int:
    return max(2, round(turn_s / (_seconds(side, 2, device) / 2)))


def _seconds(side: _Side, number: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    side.run(number)
    synchronize(device)
    return time.perf_counter() - began


def _variant(job: TrainingJob, mesh: DeviceMesh, mailbox: SharedBuffer, number: int, device: torch.device) -> Figures:
    began = time.perf_counter()
    side, memory_gb = _with_memory(lambda: _worker(job, mesh, mailbox), device)
    ready_s = time.perf_counter() - began
    seconds = _seconds(side, number, device)
    return {
        "ready_s": round(ready_s, 1),
        "memory_gb": memory_gb,
        "tokens_per_s": round(number * job.micro_batch * job.seq_len / seconds),
    }
