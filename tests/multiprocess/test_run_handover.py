# SPDX-License-Identifier: Apache-2.0
"""The last holder of the state is asked to go while a newcomer fetches it: it hands the state over first."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from isthmus.trainer.checkpoint.checkpoint import newest_usable
from tests.multiprocess.processes import ISTHMUS, LEFT, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, running, wall_s

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

BIG_STATE = ("--model.dim", "128", "--model.hidden_dim", "256", "--outer-steps", str(OPEN_END))
SLOW_LINE = ("--max-upload", "100kB")
"""Some fifteen seconds for the 1.6 MB of that state: the command tells every ten who fetches."""


def fetching(run: Run, peer: Process) -> None:
    run.until("fetch", lambda: bool(peer.events("catch_up_started")))


def caught_up_at(peer: Process) -> float:
    return wall_s(next(event for event in peer.events("catch_up") if event["outer_step"] is not None))


def test_the_last_holder_leaves_when_the_newcomer_has_the_state_and_the_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        coordinator = run.coordinator(*BIG_STATE)
        run.wait_for_ticket()
        first = run.join(*SLOW_LINE)
        run.until_step(2, first)
        second = run.join()
        fetching(run, second)

        done = run.command("leave", "--dir", str(first.directory))
        assert done.code == 0, run.story()
        assert done.out.startswith(f"left at outer step {first.step}\n"), done
        assert "waits until another peer has fetched it" in done.err
        assert second.peer_id in done.err, "it says who fetches"
        assert first.outcome().code == LEFT
        assert caught_up_at(second) <= wall_s(first.events("leave")[0])
        run.until_step(first.step + 3, second)
        second.signal(signal.SIGINT)
        assert second.outcome().code == LEFT
        coordinator.signal(signal.SIGINT)
        run.until_ended(coordinator)
    assert_same_commits(first, second)


def test_a_founder_that_coordinates_hands_over_too_and_the_command_does_not_wait_for_the_run(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found(*BIG_STATE, *SLOW_LINE)
        run.wait_for_ticket()
        run.until_step(2, founder)
        second = run.join()
        fetching(run, second)

        done = run.command("leave", "--dir", str(founder.directory))
        assert done.code == 0, run.story()
        assert "its process coordinates another peer" in done.out
        assert founder.is_running
        assert caught_up_at(second) <= wall_s(founder.events("leave", code=LEFT)[0])
        run.until_step(founder.step + 3, second)
        run.leave_all()
    assert_same_commits(founder, second)


def test_who_leaves_at_once_says_that_nobody_else_holds_the_state_and_brings_it_back(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        coordinator = run.coordinator(*BIG_STATE)
        run.wait_for_ticket()
        first = run.join(*SLOW_LINE)
        run.until_step(2, first)
        second = run.join()
        fetching(run, second)

        done = run.command("leave", "--now", "--dir", str(first.directory))
        assert done.code == 0, run.story()
        assert "which nobody else holds: start this peer again" in done.out
        assert first.outcome().code == LEFT
        step = first.step
        checkpoint = newest_usable(first.directory, run_id=str(first.events("started")[0]["run_id"]))
        assert checkpoint is not None
        assert checkpoint.meta.outer_step == step
        back = run.join(folder=first.directory)
        run.until_step(step + 3, back, second)
        for peer in (back, second):
            peer.signal(signal.SIGINT)
        run.until_ended(back, second)
        coordinator.signal(signal.SIGINT)
        run.until_ended(coordinator)


def test_the_command_tells_what_a_long_leave_waits_for_and_may_be_interrupted(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "1", "--outer-steps", str(OPEN_END), "--outer.inner_steps", "3000")
        run.wait_for_ticket()
        run.until("training", lambda: bool(founder.events("lease") and founder.worker_pids()))
        (worker,) = founder.worker_pids()
        os.kill(worker, signal.SIGSTOP)  # however long the command takes to start

        command = [ISTHMUS, "leave", "--dir", str(founder.directory)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
            assert first.stderr is not None
            line = first.stderr.readline()
            assert "waits for the commit that holds its last steps" in line
            assert "of 3000" in line
            first.send_signal(signal.SIGINT)
            assert "the peer goes on leaving" in first.stderr.read()
            assert first.wait(60) == 130
        assert founder.is_running
        os.kill(worker, signal.SIGCONT)

        done = run.command("leave", "--dir", str(founder.directory))
        assert (done.code, founder.outcome().code) == (0, LEFT)
        assert done.out.startswith("left at outer step 1, which nobody else holds")
