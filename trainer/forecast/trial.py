# SPDX-License-Identifier: Apache-2.0
"""How long an inner step takes on this machine: the run's own workers make a few, over Python's sources.

Must not know what the seconds are for.

Errors: as of workers that do not start, or have no memory: `WorkerCrashed` (10), `EnvironmentFault` (3).
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.wiring import training_job
from isthmus.trainer.data.corpus import load_corpus
from isthmus.trainer.workers.make_pool import worker_pool
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.shared_buffer import SharedBuffer

_WARM_UP_STEPS: Final = 2
"""The first ones find memory, and compile."""
_LEAST_STEPS: Final = 3
_ENOUGH_S: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of it.

    Attributes:
        step_s: the median of a few inner steps.
        device: where the workers compute, as "cpu (4 threads)".
    """

    step_s: float
    device: str


async def timed(config: Config, num_parameters: int) -> Trial:
    """Start the workers that `[node]` describes, and let them train.

    Args:
        config: with a vocabulary; not of a loop of one's own.
        num_parameters: of the model, those that are trained.
    """
    training, node = training_job(config), config.node
    mailbox = SharedBuffer.create(num_parameters)
    # Any numbers will do, as long as nothing overflows.
    torch.nn.init.normal_(mailbox.tensor, std=0.02, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(prefix="isthmus-plan-") as folder:
        async with worker_pool(
            training,
            mailbox=mailbox,
            corpus=load_corpus(None, seq_len=training.seq_len),
            num_workers=node.local_workers,
            device=node.device,
            num_threads=node.threads or None,
            log_dir=Path(folder),
            hang_timeout_s=node.hang_timeout_s,
        ) as pool:
            await pool.load()
            return Trial(step_s=await _median_s(pool, config.inner.batch_size), device=pool.devices[0])


async def _median_s(pool: WorkerPool, batch_size: int) -> float:
    taken: list[float] = []
    while len(taken) < _WARM_UP_STEPS + _LEAST_STEPS or sum(taken[_WARM_UP_STEPS:]) < _ENOUGH_S:
        began, step = time.perf_counter(), len(taken)
        await pool.step(range(step * batch_size, (step + 1) * batch_size), inner_step=step + 1)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[_WARM_UP_STEPS:])
