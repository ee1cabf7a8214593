# SPDX-License-Identifier: Apache-2.0
"""Peers that nobody has told how many threads to have, side by side on one machine."""

import os
import re
from pathlib import Path

import pytest

from isthmus.trainer.control_groups import num_processors
from tests.multiprocess.run_harness import OPEN_END, Process, running

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(200),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one processor, which nobody can divide"),
]


def threads_of(process: Process) -> list[tuple[int, int]]:
    """Its changes: threads, and workers on this machine."""
    text = (process.directory / "worker-0.log").read_text()
    found = re.findall(r"num_threads=(\d+) workers_on_this_machine=(\d+)", text)
    return [(int(num_threads), int(num_workers)) for num_threads, num_workers in found]


def test_two_peers_divide_the_processors_of_their_machine_and_the_one_that_stays_gets_them_back(tmp_path: Path) -> None:
    most = num_processors()
    divided = min(most, max(1, (os.cpu_count() or 1) // 2))
    with running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END), "--node.threads", "0")
        run.wait_for_ticket()
        run.until_step(2, founder)
        joiner = run.join("--node.threads", "0")
        run.until("fewer threads", lambda: (divided, 2) in threads_of(founder))
        assert (divided, 2) in threads_of(joiner)
        joiner.kill()
        run.until("all threads again", lambda: threads_of(founder)[-1] == (most, 1))
