# SPDX-License-Identifier: Apache-2.0
"""Workers that die, hang or are ended: told at once, named, replaced, and nothing is left of them."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from isthmus.trainer.errors import ExitCode
from isthmus.trainer.workers.fork_server import ForkedProcess
from isthmus.trainer.workers.inquest import frames_of
from isthmus.trainer.workers.link import WorkerStalled
from isthmus.trainer.workers.process import WorkerDied
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from isthmus.trainer.workers.start import STACK_SIGNAL, start_worker
from tests.multiprocess.workers.pools import MODEL, NUMEL, tiny_pool

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_killed_worker_is_told_at_once_and_the_others_are_ended(
    num_workers: int, mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with tiny_pool(mailbox, tmp_path, num_workers) as pool:
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
    async with tiny_pool(mailbox, tmp_path) as pool:
        await pool.load()
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await pool.store()
    assert "worker_ready" in caught.value.stderr_tail
    assert "an earlier worker" not in caught.value.stderr_tail


async def test_a_worker_that_dies_while_a_step_is_under_way_ends_the_step(
    mailbox: SharedBuffer, tmp_path: Path
) -> None:
    async with tiny_pool(mailbox, tmp_path, 2) as pool:
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
    async with tiny_pool(mailbox, tmp_path, 2, hang_timeout_s=8.0) as pool:
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
    async with tiny_pool(mailbox, tmp_path, 2, hang_timeout_s=8.0) as pool:
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
    async with tiny_pool(mailbox, tmp_path, 2, hang_timeout_s=1.0) as pool:
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
    async with tiny_pool(mailbox, tmp_path) as pool:
        await pool.load()
        os.kill(pool.pids[0], STACK_SIGNAL)
        assert (await pool.step([0], inner_step=1)).num_tokens == 8
        frames = frames_of((tmp_path / "worker-0.log").read_text())
        assert any(name == "work" for _, _, name in frames), frames


async def test_workers_ignore_the_signals_that_are_for_the_daemon(mailbox: SharedBuffer, tmp_path: Path) -> None:
    async with tiny_pool(mailbox, tmp_path) as pool:
        await pool.load()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pool.pids[0], signal_number)
        assert os.getsid(pool.pids[0]) == pool.pids[0] != os.getsid(0)
        assert (await pool.step([0], inner_step=1)).num_tokens == 8


async def test_a_step_whose_caller_is_cancelled_is_trained_all_the_same(mailbox: SharedBuffer, tmp_path: Path) -> None:
    before = mailbox.tensor.clone()
    async with tiny_pool(mailbox, tmp_path) as pool:
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
        async with tiny_pool(mailbox, tmp_path, 2) as pool:
            pidfds.extend(os.pidfd_open(pid) for pid in pool.pids)
            raise LookupError("the daemon's own")

    with pytest.raises(LookupError, match="the daemon's own"):
        await fail()
    _wait_for_ends(pidfds)


def test_workers_die_with_a_killed_daemon(tmp_path: Path, private_tmp: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(tmp_path)],
        cwd=Path(__file__).parents[3],
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
    async with tiny_pool(mailbox, log_dir, 2) as pool:
        await pool.load()
        print(*pool.pids, flush=True)
        await pool.failed()


if __name__ == "__main__":
    asyncio.run(_run_daemon(Path(sys.argv[1])))
