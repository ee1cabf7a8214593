# SPDX-License-Identifier: Apache-2.0
"""The two pools there are: of processes of our own, and of those of somebody's own loop.

Owns what a worker of ours is told. Must not know how a pool is used.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from isthmus.trainer.config.job import Device, TrainingJob, WorkerJob
from isthmus.trainer.control_groups import num_processors
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.data.prepared import PreparedText
from isthmus.trainer.data.text_shelf import FOLDER_NAME as TEXT_FOLDER
from isthmus.trainer.workers.crew import WorkerCrew
from isthmus.trainer.workers.loop import Loop, LoopCrew
from isthmus.trainer.workers.pool import MicroBatch, WorkerPool
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from isthmus.trainer.workers.text import text_for_workers

_REQUEST_TIMEOUT_S = 600.0
"""For the first answer to a kind of request; also for a worker's wait for the others."""
_LOOP_TIMEOUT_S = 3600.0
"""Between two steps of its optimizer a loop may judge its model, or write it down. The run goes on without it."""


def worker_pool(
    training: TrainingJob,
    *,
    mailbox: SharedBuffer,
    corpus: Corpus | PreparedText,
    shuffle_shards: int = 1,
    num_workers: int = 1,
    device: Device = "auto",
    num_threads: int | None = None,
    log_dir: Path,
    hang_timeout_s: float = 60.0,
) -> WorkerPool:
    """A pool of processes of our own, which die with the thread that runs the event loop, at the latest.

    Args:
        training: what they train.
        mailbox: of all parameters; stays the caller's, and open for as long as the pool is.
        corpus: the text.
        shuffle_shards: of a prepared text, that are mixed at a time.
        num_workers: L, one for each device.
        device: where they compute.
        num_threads: CPU threads of each; None: those of this process (`num_processors`), divided, and beside workers of
            other peers those of the machine (neighbours.py).
        log_dir: existing folder of the peer, for their output, `worker-0.log` and so on; appended to. Copies of shards
            are in it.
        hang_timeout_s: see `WorkerRequests`.
    """
    if num_workers < 1:
        raise ValueError(f"a peer has at least one worker, not {num_workers}")

    micro_batch = MicroBatch(size=training.micro_batch, may_be_halved=training.halves_micro_batch)

    @contextlib.asynccontextmanager
    async def job(folder: Path) -> AsyncIterator[WorkerJob]:
        async with text_for_workers(corpus, cache=log_dir / TEXT_FOLDER, pool=shuffle_shards) as text:
            yield WorkerJob(
                training=msgspec.structs.replace(training, micro_batch=micro_batch.size),
                device=device,
                num_threads=num_threads or max(1, num_processors() // num_workers),
                # What is compiled is compiled for so many.
                divides_processors=num_threads is None and not training.is_compiled,
                parent_pid=os.getpid(),
                socket_path=str(folder / "socket"),
                store_path=str(folder / "store"),
                collective_timeout_s=_REQUEST_TIMEOUT_S,
                mailbox_fd=mailbox.fd,
                text=text,
            )

    return WorkerPool(
        lambda group: WorkerCrew(job, num_workers, log_dir, group),
        micro_batch=micro_batch,
        request_timeout_s=_REQUEST_TIMEOUT_S,
        hang_timeout_s=hang_timeout_s,
    )


def loop_pool(loop: Loop) -> WorkerPool:
    """A pool of the processes of somebody's own loop, which are nobody's here to start or to end."""
    return WorkerPool(
        lambda group: LoopCrew(loop, group),
        request_timeout_s=_LOOP_TIMEOUT_S,
        hang_timeout_s=_LOOP_TIMEOUT_S,
    )
