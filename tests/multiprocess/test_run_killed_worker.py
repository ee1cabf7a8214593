# SPDX-License-Identifier: Apache-2.0
"""A worker that is killed, as a machine without memory does it: the peer stays a member, and gets another worker."""

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, Run, broken_rounds, now_s, running, wall_s

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

WORKER_CRASHED = 10
NEXT_COMMIT_S = 120.0
"""From the kill to the next commit of the peer."""


def _kill_worker(run: Run, peer: Process) -> None:
    run.until("worker", lambda: len(peer.worker_pids()) == 1)
    (pid,) = peer.worker_pids()
    os.kill(pid, signal.SIGKILL)
    run.until("its end", lambda: pid not in peer.worker_pids())


def test_a_peer_whose_worker_is_killed_stays_a_member_and_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), *NEVER_LATE)
        run.wait_for_ticket()
        victim, other = run.join(), run.join()
        run.until_step(5, founder, victim, other)
        killed_at = now_s()
        _kill_worker(run, victim)
        run.until("fault", lambda: bool(victim.events("fault", kind="worker_died")))
        (fault,) = victim.events("fault", kind="worker_died")
        run.until("its next commit", lambda: any(wall_s(item) > wall_s(fault) for item in victim.events("commit")))
        after = next(item for item in victim.events("commit") if wall_s(item) > wall_s(fault))
        assert wall_s(after) - wall_s(fault) < NEXT_COMMIT_S
        assert "SIGKILL" in fault["cause"]
        assert fault["memory_bytes"] > 1 << 20
        lost = [event for peer in (founder, other) for event in broken_rounds(peer) if wall_s(event) > killed_at]
        assert not lost, "nobody lost a round"
        assert not victim.events("leave")
        assert len(victim.events("coordinator_connected")) == 1
        assert len({view["epoch"] for view in victim.events("join")}) <= 2, "late at most once"
        run.leave_all()
        said = victim.console.with_suffix(".err").read_text()
        assert said.count("worker_died") == 1
    assert_same_commits(founder, victim, other)


def test_a_peer_whose_fork_server_and_worker_are_killed_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END))
        run.until_step(2, founder)
        (server,) = set(founder.children()) - set(founder.worker_pids())
        os.kill(server, signal.SIGKILL)
        run.until_step(founder.step + 2, founder)
        _kill_worker(run, founder)
        run.until("fault", lambda: bool(founder.events("fault", kind="worker_died")))
        run.until_step(founder.step + 2, founder)
        run.leave_all()


@pytest.fixture
def too_little_memory() -> Iterator[Path]:
    """A control group in which nothing more can be allocated; its file that takes processes."""
    versions = (("memory", "memory.limit_in_bytes"), (".", "memory.max"))
    root = Path("/sys/fs/cgroup")
    place, limit = next((v for v in versions if (root / v[0] / "cgroup.procs").exists()), versions[1])
    group = root / place / f"isthmus-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / limit).write_text("65536")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"memory cannot be limited here: {error}")
    yield group / "cgroup.procs"
    group.rmdir()


def test_a_worker_that_the_kernel_ends_for_lack_of_memory_is_told_so(tmp_path: Path, too_little_memory: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END))
        run.until_step(3, founder)
        (pid,) = founder.worker_pids()
        too_little_memory.write_text(str(pid))
        run.until("fault", lambda: bool(founder.events("fault", kind="worker_died")))
        (fault,) = founder.events("fault", kind="worker_died")
        assert "the kernel had no memory left, and the worker had up to 0." in fault["cause"]
        run.until("workers", lambda: len(founder.events("workers")) == 2)
        first, second = (event["micro_batch"] for event in founder.events("workers"))
        assert second == -(-first // 2)
        run.until_step(founder.step + 3, founder)
        run.leave_all()


def test_a_peer_whose_workers_are_killed_again_and_again_ends_with_one_sentence(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END), "--outer.inner_steps", "200000")
        run.wait_for_ticket()
        founder.is_judged = True
        for number in range(4):
            run.until("workers", lambda number=number: _num_starts(founder) == number + 1)
            _kill_worker(run, founder)
        run.until("its end", lambda: "peer_failed" in founder.console.with_suffix(".err").read_text())
        founder.signal(signal.SIGINT)  # the coordinator in it goes on for the others
        outcome = founder.outcome()
    assert outcome.code == WORKER_CRASHED
    (sentence,) = outcome.sentences
    assert sentence.startswith("isthmus: worker 0 ended by SIGKILL")
    assert "ExceptionGroup" not in outcome.err
    assert len(founder.events("fault", kind="worker_died")) == 3


def _num_starts(peer: Process) -> int:
    return peer.console.with_suffix(".err").read_text().count("workers_ready")
