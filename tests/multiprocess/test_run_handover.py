"""repro"""
from pathlib import Path

import pytest

from tests.multiprocess.run_harness import LEFT, OPEN_END, Process, Run, assert_same_commits, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

BIG_STATE = ("--model.dim", "128", "--model.hidden_dim", "256")


@pytest.mark.parametrize("alone", [True, False])
def test_repro(tmp_path: Path, alone: bool) -> None:
    with running(tmp_path) as run:
        if alone:
            coordinator = run.coordinator("--outer-steps", str(OPEN_END), *BIG_STATE)
            run.wait_for_ticket()
            first = run.join("--max-upload", "400kB")
        else:
            first = run.found("--outer-steps", str(OPEN_END), "--max-upload", "400kB", *BIG_STATE)
            run.wait_for_ticket()
        run.until_step(2, first)
        second = run.join()
        run.until("fetch", lambda: bool(second.events("catch_up_started")), timeout_s=30)
        try:
            done = run.command("leave", "--dir", str(first.directory), "--timeout", "10")
            print("LEAVE", done)
            run.until("x", lambda: bool(second.commits()), timeout_s=15)
        except BaseException:
            print(run.story())
            raise
