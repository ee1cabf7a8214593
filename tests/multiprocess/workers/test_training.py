# SPDX-License-Identifier: Apache-2.0
"""What real workers compute: alone and in twos, whole steps and halves, by way of the mailbox."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import InnerType
from isthmus.trainer.config.job import OptimizerJob, TrainingJob
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from tests.multiprocess.workers.pools import JOB, MODEL, NUMEL, tiny_pool

pytestmark = pytest.mark.multiprocess


async def _train(
    num_workers: int, mailbox: SharedBuffer, log_dir: Path, job: TrainingJob
) -> tuple[list[float], list[float]]:
    """Losses and norms of four steps and of an evaluation; the end is in the mailbox."""
    async with tiny_pool(mailbox, log_dir, num_workers, job) as pool:
        await pool.load()
        # 7 samples: with two workers 4 and 3, in micro-batches of 2: the second has none left for half a micro-batch.
        # 1 sample: the second worker has nothing at all.
        batches = [range(7), range(7, 14), [14], range(15, 20)]
        async with asyncio.TaskGroup() as group:  # all at once: the pool itself keeps to its window
            steps = [
                group.create_task(pool.step(batch, inner_step=number)) for number, batch in enumerate(batches, start=1)
            ]
        done = [step.result() for step in steps]
        assert [step.inner_step for step in done] == [1, 2, 3, 4]
        assert [step.num_tokens for step in done] == [56, 56, 8, 40]
        loss = await _judge_beside(pool)
        await pool.store()
        return [*(step.loss for step in done), loss], [step.grad_norm for step in done]


async def _judge_beside(pool: WorkerPool) -> float:
    """The held-out loss, of a copy that is judged batch by batch while the parameters are others."""
    whole = await pool.evaluate()
    kept = await pool.keep(place=None)
    assert kept.has_room
    await pool.store()
    await pool.load(keep=0.5)  # of what they are
    parts = [await pool.evaluate(range(number, number + 1), is_kept=True) for number in range(kept.num_batches)]
    loss = sum(part.loss * part.num_tokens for part in parts) / sum(part.num_tokens for part in parts)
    assert loss == pytest.approx(whole.loss, rel=1e-6)
    return whole.loss


# Muon makes its steps orthogonal in bf16: what differs in the last bit before it, differs in the third digit after it.
@pytest.mark.parametrize(("type_", "rel", "atol"), [("adamw", 1e-6, 1e-6), ("adopt", 1e-6, 1e-6), ("muon", 1e-4, 5e-3)])
async def test_one_and_two_workers_train_to_equal_parameters(
    mailbox: SharedBuffer, tmp_path: Path, type_: InnerType, rel: float, atol: float
) -> None:
    job = msgspec.structs.replace(JOB, optimizer=OptimizerJob(type=type_, lr=1e-2))
    losses, norms = await _train(1, mailbox, tmp_path, job)
    alone = mailbox.tensor.clone()
    mailbox.tensor.copy_(MODEL.initial_parameters(0))
    losses_of_two, norms_of_two = await _train(2, mailbox, tmp_path, job)
    assert losses_of_two == pytest.approx(losses, rel=rel)
    assert norms_of_two == pytest.approx(norms, rel=10 * rel)
    torch.testing.assert_close(mailbox.tensor, alone, rtol=1e-4, atol=atol)
    assert not torch.equal(alone, MODEL.initial_parameters(0))


async def test_load_and_store_of_two_workers(mailbox: SharedBuffer, tmp_path: Path) -> None:
    first = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    second = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2))
    async with tiny_pool(mailbox, tmp_path, 2) as pool:
        mailbox.tensor.copy_(first)
        await pool.load()
        mailbox.tensor.fill_(torch.nan)
        await pool.store()
        assert torch.equal(mailbox.tensor, first), "the round trip is bit for bit"

        mailbox.tensor.copy_(second)
        await pool.load(keep=0.5)
        mailbox.tensor.fill_(torch.nan)
        await pool.store()
        assert torch.equal(mailbox.tensor, first * 0.5 + second * 0.5), "a blend is of separate products"

        blended = mailbox.tensor.clone()
        fragment = (slice(10, 500), slice(900, 901))
        mailbox.tensor.copy_(second)
        await pool.load(fragment)
        mailbox.tensor.fill_(7.0)
        await pool.store((slice(0, 600),))
        expected = torch.full((NUMEL,), 7.0)
        expected[:600] = blended[:600]
        expected[10:500] = second[10:500]
        assert torch.equal(mailbox.tensor, expected), "a fragment moves alone"


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_moments_and_gradients_go_through_the_mailbox_by_span(
    num_workers: int, mailbox: SharedBuffer, tmp_path: Path
) -> None:
    job = msgspec.structs.replace(JOB, optimizer=OptimizerJob(type="muon", lr=1e-2))
    table = FragmentTable.from_named_shapes(MODEL.named_shapes())
    is_hidden = torch.zeros(NUMEL, dtype=torch.bool)
    for spec in table.specs:
        table.view(is_hidden, spec.name).fill_(spec.name.startswith("blocks") and len(spec.shape) == 2)
    theirs = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    spans = (slice(10, 500), slice(2060, 2150), slice(NUMEL - 3, NUMEL))
    inside = torch.zeros(NUMEL, dtype=torch.bool)
    for span in spans:
        inside[span] = True
    async with tiny_pool(mailbox, tmp_path, num_workers, job) as pool:

        async def stored(kind: str) -> torch.Tensor:
            mailbox.tensor.fill_(torch.nan)
            assert await pool.store(kind=kind) == num_steps
            return mailbox.tensor.clone()

        await pool.load()
        num_steps = 0
        for has_stepped in (False, True):
            if has_stepped:
                await pool.step(range(4), inner_step=1)
                await pool.backward(range(4), inner_step=2)
                num_steps = 1
            for kind, is_kept in {"momentum_buffer": is_hidden, "exp_avg": ~is_hidden, "grad": None}.items():
                before = await stored(kind)
                assert before.any() == has_stepped, (kind, "zeros where there is nothing yet")
                wanted = inside if is_kept is None else inside & is_kept
                assert wanted.any()
                mailbox.tensor.copy_(theirs)
                assert await pool.load(spans, kind=kind, keep=0.5) == 0
                expected = torch.where(wanted, before * 0.5 + theirs * 0.5, before)
                assert torch.equal(await stored(kind), expected), kind
                mailbox.tensor.fill_(7.0)
                await pool.store(spans, kind=kind)
                assert torch.equal(mailbox.tensor, torch.where(inside, expected, 7.0)), "a span is written alone"
        assert (await pool.update(inner_step=2)).inner_step == 2
        num_steps = 2
        assert (await stored("exp_avg")).isfinite().all()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("type_", ["adamw", "adopt", "muon", "sgd"])
async def test_a_step_and_its_two_halves_give_equal_bits(
    type_: InnerType, num_workers: int, mailbox: SharedBuffer, tmp_path: Path
) -> None:
    job = msgspec.structs.replace(JOB, optimizer=OptimizerJob(type=type_, lr=1e-2))
    ends = []
    for is_halved in (False, True):
        mailbox.tensor.copy_(MODEL.initial_parameters(0))
        told = []
        async with tiny_pool(mailbox, tmp_path, num_workers, job) as pool:
            await pool.load()
            for inner_step, batch in enumerate([range(7), [14]], start=1):
                if is_halved:
                    await pool.backward(batch, inner_step=inner_step)
                    await pool.store(kind="grad")
                    await pool.load(kind="grad")
                    done = await pool.update(inner_step=inner_step)
                else:
                    done = await pool.step(batch, inner_step=inner_step)
                told.append((done.inner_step, done.loss, done.num_tokens, done.grad_norm, done.lr))
            assert await pool.store() == 2
            ends.append((told, mailbox.tensor.clone()))
    (told, whole), (told_of_halves, halves) = ends
    assert told_of_halves == told
    assert torch.equal(halves, whole)
    assert not torch.equal(whole, MODEL.initial_parameters(0))


async def test_values_that_are_not_finite_are_mended_by_the_mailbox_and_counted_over_all_workers(
    mailbox: SharedBuffer, tmp_path: Path
) -> None:
    good, bad = mailbox.tensor.clone(), mailbox.tensor.clone()
    bad[[0, 1, 2047, NUMEL - 1]] = torch.nan  # of the first row, the last row of the embedding, and the last parameter
    async with tiny_pool(mailbox, tmp_path, 2) as pool:
        mailbox.tensor.copy_(bad)
        await pool.load()
        mailbox.tensor.copy_(good)
        assert await pool.load((slice(1, NUMEL),), keep=0.5) == 3
        assert await pool.load(keep=0.5) == 1
        assert await pool.load(keep=0.5) == 0
        await pool.store()
        torch.testing.assert_close(mailbox.tensor, good)
