"""Peers that stand still behind a beating heart: the others pay for it once."""

import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.run_harness import OPEN_END, Process, Run, now_s, running, wall_s

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SETTLED_S = 30.0
"""After a hang: by then the others are to be as fast as if the hung peer had never been there."""
WINDOW_S = 10.0


def test_a_hung_worker_costs_the_others_one_wait(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        others = [run.join(), run.join()]
        run.until_step(10, founder, *others)
        healthy = _rate(run, founder, now_s())
        late = run.join()
        run.until_step(founder.step + 10, founder, late)
        four = _rate(run, founder, now_s())

        (worker,) = late.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        hung_at = now_s()
        first = _rate(run, founder, hung_at, SETTLED_S)
        after = _rate(run, founder, hung_at + SETTLED_S)
        views = [e for e in founder.events("view_decided") if wall_s(e) > hung_at]
        print(f"three {healthy:.2f} four {four:.2f} first {first:.2f} after {after:.2f} commits/s, views {len(views)}")
        assert after >= 0.9 * healthy
        run.leave_all()


def _rate(run: Run, founder: Process, since: float, window_s: float = WINDOW_S) -> float:
    """Commits a second in the window that begins then; waits until it is over."""
    until = since + window_s
    run.until("end of the window", lambda: now_s() >= until)
    return sum(since <= wall_s(event) < until for event in founder.events("commit")) / window_s
