# SPDX-License-Identifier: Apache-2.0
"""A copied folder, as a disk image makes it: two live starts of one peer."""

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

REFUSED = 5


def _copy_if_there(source: str, target: str) -> None:
    """The peer goes on, and removes what it needs no more."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def test_a_peer_whose_folder_was_copied_and_started_ends_and_says_why(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        older = run.join()
        run.until_step(3, founder, older)

        copy = tmp_path / "copy"
        shutil.copytree(older.directory, copy, ignore=shutil.ignore_patterns("*.partial"), copy_function=_copy_if_there)
        older.is_judged = True
        newer = run.join(folder=copy)
        outcome = older.outcome()
        assert outcome.code == REFUSED, run.story()
        assert older.peer_id in outcome.sentences[-1]
        assert "copy" in outcome.sentences[-1]

        run.until_step(founder.step + 5, founder, newer)
        run.leave_all()
    assert_same_commits(founder, newer)
