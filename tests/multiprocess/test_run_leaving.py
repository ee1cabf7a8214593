# SPDX-License-Identifier: Apache-2.0
"""Peers that are asked to go: in order by the command or the first signal, at once by the second."""

import signal
import sys
from pathlib import Path

import pytest

from tests.multiprocess.processes import FORCED, LEFT
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import OPEN_END, running

_SPAWN = "import pty, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])"
TERMINAL = ("env", sys.executable, "-c", _SPAWN)
"""Its child's terminal ends with it. It does not pass on what `nohup` has ignored for the tests."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_a_peer_leaves_in_order_by_the_command_or_the_first_signal_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        first, second = run.join(), run.join()
        run.until_step(3, founder, first, second)

        done = run.command("leave", "--dir", str(first.directory))
        assert done.code == 0
        assert first.outcome().code == LEFT
        run.until_step(founder.step + 3, founder, second)

        founder.signal(signal.SIGINT)
        run.until("goodbye", lambda: bool(founder.events("leave", code=LEFT)))
        # Its work is over, but the coordinator lives in it: it stays for the one that is left.
        run.until_step(second.step + 5, second)
        assert founder.is_running

        second.signal(signal.SIGTERM)
        assert run.until_ended(second, founder) == [LEFT, LEFT]
    assert_same_commits(founder, first, second)
    audit = Audit.of(read_journal(founder.directory))
    # Whoever leaves hands in what it has: its last commit counts, and the next one is without it.
    for peer in (first, founder):
        assert peer.peer_id in audit.members_at(peer.step)
        assert peer.peer_id not in audit.members_at(peer.step + 1)


def test_a_peer_whose_terminal_is_closed_leaves_in_order(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        other = run.join(inside=TERMINAL)
        run.until_step(2, founder, other)
        other.kill()
        run.until("goodbye", lambda: bool(other.events("leave", code=LEFT)))
        founder.signal(signal.SIGINT)
        assert run.until_ended(founder) == [LEFT]
    assert_same_commits(founder, other)


def test_the_second_signal_stops_a_peer_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        other = run.join()
        run.until_step(2, founder, other)
        founder.signal(signal.SIGINT)
        run.until("goodbye", lambda: bool(founder.events("leave", code=LEFT)))
        run.until_step(other.step + 3, other)
        founder.signal(signal.SIGINT)
        assert founder.outcome().code == FORCED
        # Nobody is left who could say goodbye to this one.
        other.signal(signal.SIGINT)
        run.until("first signal", lambda: "interrupt again to stop at once" in _log(other.console))
        other.signal(signal.SIGINT)
        assert other.outcome().code == FORCED


def test_a_founder_that_nobody_has_joined_leaves_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2")
        run.until("membership", lambda: bool(founder.events("join")))
        founder.signal(signal.SIGINT)
        assert founder.outcome().code == LEFT
        assert founder.commits() == {}


def _log(console: Path) -> str:
    return console.with_suffix(".err").read_text()
