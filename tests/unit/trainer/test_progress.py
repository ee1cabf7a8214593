# SPDX-License-Identifier: Apache-2.0
"""The progress bar: on a terminal only, and honest."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from isthmus.trainer.progress import BarProgress, SilentProgress, open_progress

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
from isthmus.trainer.progress import open_progress
with open_progress(name="demo", total_outer_steps=4, inner_steps=10) as progress:
    progress.advance(outer_step=2, inner_step=5, world_size=3, loss=1.25)
"""


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=REPOSITORY, capture_output=True, timeout=50, check=True)
    assert done.stdout + done.stderr == b""
    with open_progress(name="demo", total_outer_steps=1, inner_steps=1) as progress:
        assert isinstance(progress, SilentProgress)


def test_bar_is_drawn_on_a_terminal_and_not_on_stdout() -> None:
    ours, theirs = pty.openpty()
    try:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment,
            timeout=50,
            check=True,
        )
        drawn = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout == b""
    assert "demo" in drawn


def test_bar_counts_inner_steps_and_names_what_matters() -> None:
    drawn: list[tuple[int, str]] = []
    bar = BarProgress(lambda completed, note: drawn.append((completed, note)), total_outer_steps=4, inner_steps=10)
    bar.advance(outer_step=0, inner_step=0, world_size=1, loss=None)
    bar.advance(outer_step=2, inner_step=25, world_size=3, loss=1.25)
    assert drawn == [(0, "step 0/4 · 1 peer"), (30, "step 2/4 · 3 peers · loss 1.250")]
