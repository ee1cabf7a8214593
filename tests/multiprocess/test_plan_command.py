# SPDX-License-Identifier: Apache-2.0
"""`isthmus plan` where nobody says how long an inner step takes: the run's own workers show it."""

import json
from pathlib import Path

import pytest

from tests.multiprocess.run_harness import running

pytestmark = pytest.mark.multiprocess
LINE = ("--peers", "3", "--link", "20mbit/40ms", "--node.threads", "1")


def test_inner_steps_are_timed_by_workers_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        planned = run.command("plan", "-c", str(run.config), *LINE, "--json")
        assert (planned.code, planned.err) == (0, "")
        told = json.loads(planned.out)
        assert 0.0 < told["step_s"] < 5.0
        assert told["step_source"] == "timed here on cpu (1 thread)"
        run.until("end of the workers", lambda: not run.alive())
        assert not list(run.temporary.glob("isthmus-*"))
        assert not (tmp_path / "runs").exists()


def test_a_device_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        planned = run.command("plan", "-c", str(run.config), *LINE, "--device", "cuda")
        assert planned.code == 3
        (sentence,) = planned.sentences
        assert sentence.startswith("isthmus: 1 worker needs a CUDA device, and this machine shows 0; set ")
