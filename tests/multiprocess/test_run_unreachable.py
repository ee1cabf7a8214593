# SPDX-License-Identifier: Apache-2.0
"""A joiner without a link to the members: it ends with the cause and the cure, and the run goes on without it."""

import sys
from pathlib import Path

import pytest

from scripts.chaoslab import walled
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, broken_rounds, make_folder, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

UNREACHABLE = 4
LAST_IDS = "ff"
"""How an id begins that is larger than nearly all. Of two peers the smaller one dials: none waits for a call of it."""
NOBODY = "127.0.0.1:1"
"""Nothing listens there: what a NAT, a firewall, or another machine's loopback looks like."""


def test_a_joiner_that_nobody_can_dial_and_that_reaches_nobody_goes_home_and_takes_nobody_with_it(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        calm = ("--members.heartbeat-timeout", "60s", "--members.stall-timeout", "10min")
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--members.grace", "1s", *calm)
        run.wait_for_ticket()
        others = run.join(), run.join()
        run.until_step(5, founder, *others)

        folder = make_folder(tmp_path / "stranger", id_begins=LAST_IDS)
        ticket = f"@{run.ticket}"
        flags = ("--node.threads", "1", "--listen", "127.0.0.1:0", "--advertise", NOBODY)
        stranger = run.start("join", ticket, *flags, folder=folder, program=(sys.executable, walled.__file__))
        stranger.is_judged = True
        outcome = stranger.outcome()
        ended_at = founder.step
        assert outcome.code == UNREACHABLE, run.story()
        assert NOBODY in outcome.sentences[-1]
        assert "refused" in outcome.sentences[-1], "it is told with which error the others tried"
        assert "--advertise" in outcome.sentences[-1]

        run.until_step(ended_at + 5, founder, *others)
        assert not any(peer.events("learner") for peer in (founder, *others)), "no member was put out"
        assert not broken_rounds(founder), "nobody waited for it"
        views = founder.events("view_decided")
        assert all(stranger.peer_id not in view["members"] for view in views), "it was no member"
        run.leave_all()
    assert_same_commits(founder, *others)
