# SPDX-License-Identifier: Apache-2.0
"""Real worker processes under a real pool."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import InnerType
from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode, TrainingFault, WorkerOutOfMemory
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.workers.fork_server import ForkedProcess
from isthmus.trainer.workers.inquest import frames_of
from isthmus.trainer.workers.link import WorkerStalled
from isthmus.trainer.workers.make_pool import worker_pool
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.process import WorkerDied
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from isthmus.trainer.workers.start import STACK_SIGNAL, fork_server, start_worker
from tests.multiprocess.processes import leave_memory

pytestmark = pytest.mark.multiprocess

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


@pytest.fixture
def mailbox() -> Iterator[SharedBuffer]:
    buffer = SharedBuffer.create(NUMEL)
    buffer.tensor.copy_(MODEL.initial_parameters(0))
    yield buffer
    buffer.close()


@pytest.fixture(autouse=True)
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, short enough, that must be empty in the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor may outlive a test; that no child does is seen to for all tests."""
    fork_server()
    before = _inodes_of_descriptors()
    yield
    leaked = _inodes_of_descriptors() - before
    assert not {name for name in leaked if "memfd" in name or "socket" in name or "worker" in name}, leaked


def _inodes_of_descriptors() -> set[str]:
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return names


def _pool(mailbox: SharedBuffer, log_dir: Path, num_workers: int = 1, job: TrainingJob = JOB, **settings) -> WorkerPool:
    return worker_pool(
        job, mailbox=mailbox, corpus=CORPUS, num_workers=num_workers, device="cpu", num_threads=1, log_dir=log_dir,
        **settings,
    )  # fmt: skip


async def _train(
    num_workers: int, mailbox: SharedBuffer, log_dir: Path, job: TrainingJob
) -> tuple[list[float], list[float]]:
    """Losses and norms of four steps and of an evaluation; the end is in the mailbox."""
    async with _pool(mailbox, log_dir, num_workers, job) as pool:
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
    async with _pool(mailbox, tmp_path, 2) as pool:
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
    async with _pool(mailbox, tmp_path, num_workers, job) as pool:

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
        async with _pool(mailbox, tmp_path, num_workers, job) as pool:
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
    async with _pool(mailbox, tmp_path, 2) as pool:
        mailbox.tensor.copy_(bad)
        await pool.load()
        mailbox.tensor.copy_(good)
        assert await pool.load((slice(1, NUMEL),), keep=0.5) == 3
        assert await pool.load(keep=0.5) == 1
        assert await pool.load(keep=0.5) == 0
        await pool.store()
        torch.testing.assert_close(mailbox.tensor, good)


async def test_what_the_inner_optimizer_does_not_keep_is_the_operators_fault(
    mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with _pool(mailbox, tmp_path) as pool:
        await pool.load()
        with pytest.raises(
            ConfigError, match=r"outer exchanges 'momentum_buffer', which inner\.type = 'adamw'"
        ) as caught:
            await pool.store(kind="momentum_buffer")
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_killed_worker_is_told_at_once_and_the_others_are_ended(
    num_workers: int, mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with _pool(mailbox, tmp_path, num_workers) as pool:
        await pool.load()
        pidfds = [os.pidfd_open(pid) for pid in pool.pids]
        os.kill(pool.pids[-1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerDied, match="ended by SIGKILL") as caught:
            await pool.store()
        assert time.monotonic() - started < 30.0  # and not after a minute, as one that hangs
        assert (caught.value.local_rank, caught.value.worker_exit_code) == (num_workers - 1, -signal.SIGKILL)
        assert caught.value.exit_code == ExitCode.WORKER_CRASHED
        assert "worker_ready" in caught.value.stderr_tail
        _wait_for_ends(pidfds)
        with pytest.raises(WorkerDied):
            await pool.store()


async def test_the_end_of_a_worker_is_told_also_to_a_daemon_that_was_busy_while_it_started(
    mailbox: SharedBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_path = tmp_path / "worker-0.log"
    log_path.write_text("what an earlier worker said\n")

    async def start_and_be_busy(job: str, *, fds: Sequence[int], log: int) -> ForkedProcess:
        process = await start_worker(job, fds=fds, log=log)
        async with asyncio.timeout(180.0):
            while "worker_ready" not in log_path.read_text():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)
        return process

    monkeypatch.setattr("isthmus.trainer.workers.process.start_worker", start_and_be_busy)
    async with _pool(mailbox, tmp_path) as pool:
        await pool.load()
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await pool.store()
    assert "worker_ready" in caught.value.stderr_tail
    assert "an earlier worker" not in caught.value.stderr_tail


async def test_a_worker_that_dies_while_a_step_is_under_way_ends_the_step(
    mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with _pool(mailbox, tmp_path, 2) as pool:
        await pool.load()
        os.kill(pool.pids[0], signal.SIGSTOP)  # the other one now waits for it in a collective
        async with asyncio.TaskGroup() as group:
            step = group.create_task(_outcome(pool.step(range(4), inner_step=1)))
            await asyncio.sleep(0)
            os.kill(pool.pids[0], signal.SIGKILL)
        assert isinstance(step.result(), WorkerDied)
        assert step.result().local_rank == 0


async def _outcome(awaitable) -> object:
    try:
        return await awaitable
    except WorkerDied as error:
        return error


async def test_a_worker_that_hangs_is_stalled_in_bounded_time(mailbox: SharedBuffer, tmp_path: Path) -> None:
    async with _pool(mailbox, tmp_path, 2, hang_timeout_s=8.0) as pool:
        await pool.load()
        await pool.store()
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerStalled) as caught:
            await pool.store()
        assert (caught.value.request, caught.value.local_ranks) == ("store", (1,))
        assert caught.value.what.startswith("worker 1 is stopped in do_signal_stop, does not answer a signal"), caught


async def test_the_worker_that_hangs_is_told_from_the_one_that_waits_for_it(
    mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with _pool(mailbox, tmp_path, 2, hang_timeout_s=8.0) as pool:
        await pool.load()
        await pool.step(range(4), inner_step=1)  # the first one may take as long as it likes
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerStalled) as caught:
            await pool.step(range(4), inner_step=2)
        assert (caught.value.request, caught.value.local_ranks) == ("step", (0, 1))
        hangs, waits = caught.value.what.split("; ")
        assert hangs.startswith("worker 1 is stopped")
        assert waits.startswith("worker 0 is ")
        assert "distributed_c10d" in waits, "its stack"
        assert waits.endswith("waits for the others")
        log = (tmp_path / "worker-0.log").read_text()
        assert "most recent call first" in log


async def test_workers_that_hang_or_die_are_replaced_and_train_on(mailbox: SharedBuffer, tmp_path: Path) -> None:
    async with _pool(mailbox, tmp_path, 2, hang_timeout_s=1.0) as pool:
        watching = asyncio.ensure_future(pool.failed())
        await pool.load()
        before = await pool.step(range(4), inner_step=1)
        pidfds = [os.pidfd_open(pid) for pid in pool.pids]
        os.kill(pool.pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerStalled):
            await pool.step(range(4), inner_step=2)
        for crash in (None, WorkerDied):
            if crash is not None:
                pidfds = [os.pidfd_open(pid) for pid in pool.pids]
                os.kill(pool.pids[0], signal.SIGKILL)
                with pytest.raises(crash):
                    await pool.step(range(4), inner_step=2)
            _wait_for_ends(pidfds)
            mailbox.tensor.copy_(MODEL.initial_parameters(0))
            await pool.renew()
            await pool.load()
            again = await pool.step(range(4), inner_step=1)
            assert again.loss == before.loss, "from the same parameters on the same samples"
        assert not watching.done(), "whoever asked knows of it"
        watching.cancel()
        await asyncio.wait([watching])


async def test_a_worker_that_is_asked_for_its_stack_goes_on(mailbox: SharedBuffer, tmp_path: Path) -> None:
    async with _pool(mailbox, tmp_path) as pool:
        await pool.load()
        os.kill(pool.pids[0], STACK_SIGNAL)
        assert (await pool.step([0], inner_step=1)).num_tokens == 8
        frames = frames_of((tmp_path / "worker-0.log").read_text())
        assert any(name == "work" for _, _, name in frames), frames


async def test_a_loss_that_is_not_finite_is_a_training_fault(mailbox: SharedBuffer, tmp_path: Path) -> None:
    mailbox.tensor[3] = torch.inf
    async with _pool(mailbox, tmp_path, 2) as pool:
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
        async with _pool(mailbox, tmp_path, 2, job):
            pytest.fail("the pool must not start")


async def test_an_unexpected_error_in_a_worker_comes_with_its_traceback(mailbox: SharedBuffer, tmp_path: Path) -> None:
    job = msgspec.structs.replace(JOB, seq_len=16)  # longer than the model was made for
    async with _pool(mailbox, tmp_path, 2, job) as pool:
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


async def test_workers_ignore_the_signals_that_are_for_the_daemon(mailbox: SharedBuffer, tmp_path: Path) -> None:
    async with _pool(mailbox, tmp_path) as pool:
        await pool.load()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pool.pids[0], signal_number)
        assert os.getsid(pool.pids[0]) == pool.pids[0] != os.getsid(0)
        assert (await pool.step([0], inner_step=1)).num_tokens == 8


async def test_a_step_whose_caller_is_cancelled_is_trained_all_the_same(mailbox: SharedBuffer, tmp_path: Path) -> None:
    before = mailbox.tensor.clone()
    async with _pool(mailbox, tmp_path) as pool:
        await pool.load()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await pool.step([0], inner_step=1)
        done = await pool.step([1], inner_step=2)
        assert done.inner_step == 2
        await pool.store()
    assert not torch.equal(mailbox.tensor, before)


async def test_an_error_in_the_body_ends_the_workers_at_once(mailbox: SharedBuffer, tmp_path: Path) -> None:
    pidfds: list[int] = []

    async def fail() -> None:
        async with _pool(mailbox, tmp_path, 2) as pool:
            pidfds.extend(os.pidfd_open(pid) for pid in pool.pids)
            raise LookupError("the daemon's own")

    with pytest.raises(LookupError, match="the daemon's own"):
        await fail()
    _wait_for_ends(pidfds)


def test_workers_die_with_a_killed_daemon(tmp_path: Path, private_tmp: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        # torch makes a folder for what it compiles, unless it is given one: nothing that a daemon of ours tidies up.
        env=os.environ | {"TMPDIR": str(private_tmp), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
        text=True,
    ) as daemon:
        assert daemon.stdout is not None
        pids = [int(pid) for pid in daemon.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)  # it cannot look for its parent; the kernel must end it
        daemon.kill()
    _wait_for_ends(pidfds)
    # A daemon that was killed cannot tidy up: an empty socket's name and the workers' meeting point stay behind.
    for folder in private_tmp.glob("isthmus-*"):
        assert folder.stat().st_mode & 0o777 == 0o700
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _wait_for_ends(pidfds: list[int]) -> None:
    """Wait until the processes are gone, and close their descriptors."""
    for pidfd in pidfds:
        readable, _, _ = select.select([pidfd], [], [], 30.0)
        os.close(pidfd)
        assert readable, "a worker lives on"


async def _run_daemon(log_dir: Path) -> None:
    """A daemon with two workers that waits to be killed."""
    mailbox = SharedBuffer.create(NUMEL)
    mailbox.tensor.copy_(MODEL.initial_parameters(0))
    async with _pool(mailbox, log_dir, 2) as pool:
        await pool.load()
        print(*pool.pids, flush=True)
        await pool.failed()


if __name__ == "__main__":
    asyncio.run(_run_daemon(Path(sys.argv[1])))
