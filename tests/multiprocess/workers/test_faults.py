# SPDX-License-Identifier: Apache-2.0
"""What workers report: values that are no numbers, too little memory, and what the operator can cure."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode, TrainingFault, WorkerOutOfMemory
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.workers.make_pool import worker_pool
from isthmus.trainer.workers.process import WorkerDied
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from tests.multiprocess.processes import leave_memory
from tests.multiprocess.workers.pools import CORPUS, JOB, TEXT, tiny_pool

pytestmark = pytest.mark.multiprocess


async def test_what_the_inner_optimizer_does_not_keep_is_the_operators_fault(
    mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with tiny_pool(mailbox, tmp_path) as pool:
        await pool.load()
        with pytest.raises(
            ConfigError, match=r"outer exchanges 'momentum_buffer', which inner\.type = 'adamw'"
        ) as caught:
            await pool.store(kind="momentum_buffer")
        assert caught.value.exit_code == ExitCode.USAGE


async def test_a_loss_that_is_not_finite_is_a_training_fault(mailbox: SharedBuffer, tmp_path: Path) -> None:
    mailbox.tensor[3] = torch.inf
    async with tiny_pool(mailbox, tmp_path, 2) as pool:
        await pool.load()
        with pytest.raises(TrainingFault, match="inner step 9: loss nan") as caught:
            await pool.step(range(4), inner_step=9)
        assert caught.value.exit_code == ExitCode.TRAINING_FAULT
        assert caught.value.cure


async def test_a_worker_without_memory_is_replaced_by_one_that_takes_half_as_much_at_a_time(tmp_path: Path) -> None:
    model = ModelConfig(dim=64, num_layers=2, num_heads=2, num_kv_heads=2, hidden_dim=4096, max_seq_len=512)
    text = np.resize(TEXT, 100_000)
    job = msgspec.structs.replace(
        JOB, model=model, seq_len=512, micro_batch=16, halves_micro_batch=True, eval_batch=1, num_eval_batches=1
    )
    mailbox = SharedBuffer.create(model.num_parameters())
    mailbox.tensor.copy_(model.initial_parameters(0))
    pool = worker_pool(
        job, mailbox=mailbox, corpus=Corpus.of(text[:90_000], text[90_000:], ""), device="cpu", log_dir=tmp_path,
        num_threads=1,
    )  # fmt: skip
    async with pool:
        await pool.load()
        await pool.step(range(1), inner_step=1)  # what is needed in any case is there
        # One layer's activations of 16 samples alone are 134 MB: 16 * 512 * 4096 numbers.
        leave_memory(pool.pids[0], 200_000_000)
        with pytest.raises(WorkerOutOfMemory, match="can't allocate memory"):
            await pool.step(range(16), inner_step=2)
        assert pool.micro_batch.halve()
        assert pool.micro_batch.size == 8
        await pool.renew()
        await pool.load()
        again = await pool.step(range(16), inner_step=2)
        assert (again.num_tokens, pool.ready[0].precision) == (16 * 512, "fp32")
        assert again.parts.passes_s > 0.0
    mailbox.close()


async def test_a_text_that_is_too_short_is_the_operators_fault(mailbox: SharedBuffer, tmp_path: Path) -> None:
    job = msgspec.structs.replace(JOB, seq_len=900)
    with pytest.raises(ConfigError, match="held-out tokens"):
        async with tiny_pool(mailbox, tmp_path, 2, job):
            pytest.fail("the pool must not start")


async def test_an_unexpected_error_in_a_worker_comes_with_its_traceback(mailbox: SharedBuffer, tmp_path: Path) -> None:
    job = msgspec.structs.replace(JOB, seq_len=16)  # longer than the model was made for
    async with tiny_pool(mailbox, tmp_path, 2, job) as pool:
        await pool.load()
        with pytest.raises(WorkerDied, match="ValueError: sequence of 16 tokens") as caught:
            await pool.step(range(4), inner_step=1)
    assert caught.value.worker_exit_code == ExitCode.UNEXPECTED
    assert "Traceback" in caught.value.stderr_tail
    assert caught.value.log_path.read_text().endswith(caught.value.stderr_tail)


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="needs a machine with fewer devices than workers")
async def test_missing_devices_are_the_operators_fault(mailbox: SharedBuffer, tmp_path: Path) -> None:
    pool = worker_pool(JOB, mailbox=mailbox, corpus=CORPUS, num_workers=4, device="cuda", log_dir=tmp_path)
    with pytest.raises(EnvironmentFault, match="4 workers need as many CUDA devices"):
        async with pool:
            pytest.fail("the pool must not start")
