"""A joiner that the members cannot dial: it ends with the cause and the cure, and the run goes on without it."""

from pathlib import Path

import pytest

from tests.multiprocess.run_harness import OPEN_END, assert_same_commits, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

UNREACHABLE = 4
LAST_ID = "f" * 16
"""Of two peers the one with the smaller id dials: nobody waits for a call of this one."""
NOBODY = "127.0.0.1:1"
"""Nothing listens there: what a NAT, a firewall, or another machine's loopback looks like."""


def test_a_joiner_that_nobody_can_dial_goes_home_and_takes_nobody_with_it(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--members.grace", "1s")
        run.wait_for_ticket()
        others = run.join(), run.join()
        run.until_step(5, founder, *others)

        folder = tmp_path / "stranger"
        folder.mkdir()
        (folder / "peer_id").write_text(LAST_ID)
        stranger = run.join("--advertise", NOBODY, folder=folder)
        stranger.is_judged = True
        outcome = stranger.outcome()
        ended_at = founder.step
        assert outcome.code == UNREACHABLE, run.story()
        assert NOBODY in outcome.sentences[-1]
        assert "refused" in outcome.sentences[-1], "it is told with which error the others tried"
        assert "--advertise" in outcome.sentences[-1]

        run.until_step(ended_at + 5, founder, *others)
        assert not any(peer.events("learner") for peer in (founder, *others)), "no member was put out"
        assert not founder.events("fault", kind="round_broke"), "nobody waited for it"
        assert all(LAST_ID not in view["members"] for view in founder.events("view_decided")), "it was no member"
        run.leave_all()
    assert_same_commits(founder, *others)
