# SPDX-License-Identifier: Apache-2.0
"""Peers that are late: the others go on, and nothing that the late one did is lost."""

import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import OPEN_END, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_a_peer_whose_worker_freezes_is_excused_and_hands_its_work_in_when_it_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        calm = ("--members.heartbeat-timeout", "60s", "--members.stall-timeout", "10min")
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--members.grace", "1s", *calm)
        run.wait_for_ticket()
        late, other = run.join(), run.join()
        run.until_step(5, founder, late, other)

        (worker,) = late.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        # The daemon's heart beats, and its patience with a stalled member would be twenty seconds.
        run.until("excuse", lambda: bool(late.events("excused")))
        excused_at = founder.step
        run.until_step(excused_at + 5, founder, other)
        assert late.step < excused_at + 5

        os.kill(worker, signal.SIGCONT)
        run.until("return", lambda: late.step > excused_at + 5)
        run.until_step(late.step + 3, founder, late, other)
        assert not late.events("learner"), "it was never put out"
        run.leave_all()
    assert_same_commits(founder, late, other)
    audit = Audit.of(read_journal(founder.directory))  # no sample twice
    without_it = [step for step in range(1, late.step) if late.peer_id not in audit.members_at(step)]
    assert len(without_it) >= 4
    assert late.peer_id in audit.members_at(late.step)
