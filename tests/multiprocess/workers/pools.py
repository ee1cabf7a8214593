# SPDX-License-Identifier: Apache-2.0
"""Pools of real worker processes with a tiny model. Not a test."""

from pathlib import Path

import numpy as np

from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.workers.make_pool import worker_pool
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.shared_buffer import SharedBuffer

MODEL = ModelConfig(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=13, max_seq_len=8)
NUMEL = MODEL.num_parameters()
TEXT = np.frombuffer(b"Peers come and go; the run goes on. " * 40, dtype=np.uint8)
CORPUS = Corpus.of(TEXT[:1000], TEXT[1000:], "")
JOB = TrainingJob(
    model=MODEL,
    seq_len=8,
    data_seed=3,
    optimizer=OptimizerJob(lr=1e-2),
    schedule=ScheduleJob(total_steps=100),
    micro_batch=2,
    eval_batch=2,
    num_eval_batches=5,
)


def tiny_pool(
    mailbox: SharedBuffer, log_dir: Path, num_workers: int = 1, job: TrainingJob = JOB, **settings
) -> WorkerPool:
    """On one thread each, in batches of two samples. Settings are those of `worker_pool`."""
    return worker_pool(
        job, mailbox=mailbox, corpus=CORPUS, num_workers=num_workers, device="cpu", num_threads=1, log_dir=log_dir,
        **settings,
    )  # fmt: skip
