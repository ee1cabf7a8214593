# SPDX-License-Identifier: Apache-2.0
"""A peer whose disk is full goes on training, says so, and keeps the checkpoint it has."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.trainer.checkpoint.checkpoint import load_resumed
from tests.multiprocess.processes import LEFT, Event, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

ROOM_NBYTES = 256 << 10
"""Left for events when the disk is filled; less than a checkpoint has."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 12 MiB, in which a run fits: the only honest way to run out of space."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_fails_a_checkpoint_and_nothing_else(tmp_path: Path, disk: Path) -> None:
    with running(tmp_path) as run:
        # Over a quarter of a million parameters: a checkpoint is large beside the events.
        founder = run.found("--outer-steps", str(OPEN_END), "--checkpoint.every", "5", "--model.hidden_dim", "2048")
        run.wait_for_ticket()
        peer = run.join(folder=disk / "peer")
        run.until("checkpoint", lambda: bool(peer.events("checkpoint")))
        ballast = _fill(disk)
        run.until("failed checkpoint", lambda: bool(_failures(peer)))
        assert "No space left on device" in _failures(peer)[0]["cause"]
        saved = [event["outer_step"] for event in peer.events("checkpoint")]
        earlier = load_resumed(peer.directory)
        assert earlier.meta.outer_step == saved[-1]
        assert earlier.meta.digest.hex() == peer.commits()[saved[-1]]
        run.until_step(peer.step + 5, founder, peer)

        ballast.unlink()
        run.until("next checkpoint", lambda: len(peer.events("checkpoint")) > len(saved))
        run.leave_all()
        newest = load_resumed(peer.directory)
        assert newest.meta.outer_step > saved[-1]
        assert_same_commits(founder, peer)
    assert [event["kind"] for event in founder.events("fault") if event["kind"] == "checkpoint_failed"] == []


def _failures(peer: Process) -> list[Event]:
    return peer.events("fault", kind="checkpoint_failed")


def _fill(disk: Path, room_nbytes: int = ROOM_NBYTES) -> Path:
    """A file that leaves at most so many bytes of the disk, whoever else writes to it meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        while (nbytes := _free_nbytes(disk) - room_nbytes) > 0:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                break
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return ballast


def _free_nbytes(disk: Path) -> int:
    space = os.statvfs(disk)
    return space.f_bavail * space.f_frsize


def test_a_coordinator_whose_disk_is_full_ends_with_one_sentence_and_nobody_writes_a_traceback(
    tmp_path: Path, disk: Path
) -> None:
    with running(tmp_path) as run:
        coordinator = run.coordinator("--peers", "3", "--outer-steps", str(OPEN_END), folder=disk / "coordinator")
        run.wait_for_ticket()
        peers = [run.join() for _ in range(3)]
        run.until_step(2, *peers)
        ballast = _fill(disk, room_nbytes=0)
        ended = coordinator.outcome()
        assert ended.code == 3
        assert "journal" in ended.sentences[-1]
        ballast.unlink()
        back = run.coordinator("--peers", "3", "--outer-steps", str(OPEN_END), folder=disk / "coordinator")
        step = max(peer.step for peer in peers)
        run.until_step(step + 3, *peers)
        for peer in peers:
            peer.signal(signal.SIGINT)
        assert run.until_ended(*peers) == [LEFT] * 3
        back.signal(signal.SIGINT)
        assert back.outcome().code == LEFT
        assert_same_commits(*peers)
    for process in (coordinator, back, *peers):
        assert "Traceback" not in process.console.with_suffix(".err").read_text()
