# SPDX-License-Identifier: Apache-2.0
"""A run of another user is told from none at all: root in a container without rights reads no folder of the daemon."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.trainer.cli.app import run
from isthmus.trainer.cli.support import choose_folder
from isthmus.trainer.errors import ExitCode, NothingRuns, NotOurs
from isthmus.trainer.run.control_socket import PEER_FILE_NAME, find_peer

STRANGER = 10001


@contextmanager
def as_somebody_else(folder: Path) -> Iterator[None]:
    """Without the right to look into the folder."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(STRANGER)
    else:
        folder.chmod(0)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        else:
            folder.chmod(0o700)


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder as a peer makes it, below the working directory."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/tiny")
    folder.parent.mkdir(mode=0o755)
    folder.mkdir(mode=0o700)
    (folder / PEER_FILE_NAME).write_text("{}")
    return folder


def assert_told(error: NotOurs) -> None:
    assert error.exit_code == ExitCode.ENVIRONMENT
    assert "may not read runs/tiny" in str(error)
    assert f"run this command as its owner, user {os.geteuid()}" in str(error)


def test_run_that_may_not_be_read_is_not_called_absent(closed: Path) -> None:
    with as_somebody_else(closed), pytest.raises(NotOurs) as caught:
        choose_folder(None, holding=PEER_FILE_NAME, or_else=NothingRuns)
    assert_told(caught.value)


def test_folder_that_is_named_and_may_not_be_read_says_so(closed: Path) -> None:
    with as_somebody_else(closed), pytest.raises(NotOurs) as caught:
        find_peer(closed)
    assert_told(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ["audit", "runs/tiny"],
        ["audit", "runs"],
        ["export", "--dir", "runs/tiny"],
        ["export", "--dir", "runs/tiny/checkpoints/step-00000001"],
        ["ckpt", "list", "--dir", "runs/tiny"],
        ["eval", "runs/tiny"],
        ["up", "--resume", "runs/tiny"],
    ],
)
def test_a_command_on_somebody_elses_folder_ends_with_3(
    closed: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with as_somebody_else(closed):
        assert run(command) == ExitCode.ENVIRONMENT
    assert "may not read runs/tiny" in capsys.readouterr().err


def test_ones_own_run_is_found_beside_a_closed_one(closed: Path) -> None:
    own = Path("runs/own")
    own.mkdir(mode=0o755)
    (own / PEER_FILE_NAME).write_text("{}")
    with as_somebody_else(closed):
        assert choose_folder(None, holding=PEER_FILE_NAME, or_else=NothingRuns) == own


def test_where_nothing_is_closed_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NothingRuns, match="there is no run under runs/ here"):
        choose_folder(None, holding=PEER_FILE_NAME, or_else=NothingRuns)
