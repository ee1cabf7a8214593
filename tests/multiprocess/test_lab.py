# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab`: several peers by one command, and what is done to them from another terminal."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.multiprocess.lab_harness import ISTHMUS, LAB, ROOT, TIMEOUT_S, all_are_members, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_peers_are_killed_started_frozen_and_added_by_orders_and_the_audit_of_their_folders_holds(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "--peers", "2") as lab:
        lab.until("two members", lambda: all_are_members(lab, 0, 1))
        assert "peer 1 is killed" in lab.order("kill", "1")
        assert lab.standing(1) == "ended: killed"
        step = lab.step()
        lab.until("the other goes on", lambda: lab.step() > step)
        num_before = lab.told().count("peer 1 is a member")
        lab.order("start", "1")
        lab.until("it is a member again", lambda: lab.told().count("peer 1 is a member") > num_before)
        assert "runs already" in lab.order("start", "1", code=2)
        assert "no peer 7" in lab.order("kill", "7", code=2)
        assert "begin the lab with --wan" in lab.order("cut", "1", code=2)
        assert "for 0.5 s" in lab.order("freeze", "1", "--seconds", "0.5")
        lab.until("it goes on", lambda: "peer 1 goes on" in lab.told())
        assert "is not frozen" in lab.order("thaw", "1", code=2)
        lab.order("freeze", "1", "--seconds", "1")
        assert "`thaw 1` ends that" in lab.order("freeze", "1")
        assert "is frozen; `thaw 1` first" in lab.order("leave", "1", code=2)
        lab.order("freeze", "1", "--seconds", "-1", code=2)
        lab.order("thaw", "1")
        assert lab.order("add").startswith("peer 2")
        lab.until("a third member", lambda: all_are_members(lab, 2))
        lab.order("kill", "0", "1", "2")
        step = lab.step()
        lab.order("start", "0", "1", "2")
        lab.until("the run goes on", lambda: lab.step() > step)
        lab.order("down")
        assert lab.popen.wait(TIMEOUT_S) == 0, lab.told()
    folders = [str(lab.folder / str(number)) for number in range(3)]
    audit = subprocess.run([ISTHMUS, "audit", *folders], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert not (lab.folder / "orders").exists()
    assert "no lab runs" in lab.order("status", code=2)


def test_a_founder_that_does_not_come_up_says_why_and_ends_the_lab(tmp_path: Path) -> None:
    command = [*LAB, "up", "--folder", str(tmp_path / "lab"), "--no-such-flag", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert "the founder has ended with 2" in done.stderr
    assert not (tmp_path / "lab").exists(), "nothing has begun"
    assert "no-such-flag" in done.stderr


def test_a_flag_that_the_lab_gives_itself_is_refused(tmp_path: Path) -> None:
    command = [*LAB, "up", "--folder", str(tmp_path / "lab"), "--dir", "elsewhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--dir: the lab gives each peer its own" in done.stderr


def test_whose_terminal_is_gone_ends_and_leaves_no_peer_behind(tmp_path: Path) -> None:
    with running(tmp_path, "--peers", "1") as lab:
        lab.until("a member", lambda: all_are_members(lab, 0))
        lab.popen.send_signal(signal.SIGHUP)
        assert lab.popen.wait(TIMEOUT_S) == 0, lab.told()
    assert "peer 0 has ended: left" in lab.told()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    command = [*LAB, "up", "--folder", "/proc/lab"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/proc/lab cannot be made" in done.stderr


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    command = [*LAB, "up", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is there already" in done.stderr
