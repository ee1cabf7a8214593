# SPDX-License-Identifier: Apache-2.0
"""Peers that stand still behind a beating heart: the others pay for it once."""

import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.run_harness import (
    OPEN_END,
    Audit,
    Process,
    Run,
    assert_same_commits,
    now_s,
    read_journal,
    running,
    wall_s,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SETTLED_S = 30.0
"""After a hang: by then the others are to be as fast as if the hung peer had never been there."""
WINDOW_S = 10.0


def test_a_hung_worker_costs_the_others_one_wait_and_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        others = [run.join(), run.join()]
        run.until_step(10, founder, *others)
        healthy = _rate(run, founder, now_s())
        late = run.join("--node.hang_timeout", "65s")  # after the windows in which the others are looked at
        run.until_step(founder.step + 10, founder, late)
        four = _rate(run, founder, now_s())

        (worker,) = late.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        hung_at = now_s()
        run.until("excuse", lambda: bool(late.events("excused")))
        # Whatever else this machine does: one of three windows shows how fast they are.
        after = [_rate(run, founder, hung_at + SETTLED_S + number * WINDOW_S) for number in range(3)]
        views = [event["cause"] for event in founder.events("view_decided") if wall_s(event) > hung_at]
        print(f"three {healthy:.2f} four {four:.2f} after {after} commits/s")
        assert len(views) == 1, views
        assert max(after) >= 0.9 * healthy

        run.until("other workers", lambda: bool(late.events("fault", kind="worker_hung")))
        (fault,) = late.events("fault", kind="worker_hung")
        assert fault["local_ranks"] == [0]
        assert "worker 0 is stopped" in fault["cause"]
        before = late.step
        run.until("work in a commit", lambda: late.step > before)
        assert late.worker_pids() != [worker]
        assert not late.events("learner"), "it was never put out"
        said = late.console.with_suffix(".err").read_text()
        assert said.count("worker_hung") == 1
        run.leave_all()
    assert_same_commits(founder, *others, late)
    audit = Audit.of(read_journal(founder.directory))  # no sample twice
    assert late.peer_id in audit.members_at(late.step)


def _rate(run: Run, founder: Process, since: float, window_s: float = WINDOW_S) -> float:
    """Commits a second in the window that begins then; waits until it is over."""
    until = since + window_s
    run.until("end of the window", lambda: now_s() >= until)
    return sum(since <= wall_s(event) < until for event in founder.events("commit")) / window_s
