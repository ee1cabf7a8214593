# SPDX-License-Identifier: Apache-2.0
"""Peers that nobody has told how many threads to have, side by side on one machine, where no other test's peers are."""

import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.trainer.control_groups import num_processors
from tests.multiprocess.processes import Process
from tests.multiprocess.run_harness import OPEN_END, running
from tests.netns.machines import MARKS

MOST = num_processors()
DIVIDED = min(MOST, max(1, (os.cpu_count() or 1) // 2))
pytestmark = [
    *MARKS,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DIVIDED == MOST, reason="half of this machine is no less than what this process may use"),
]


@pytest.fixture
def inside() -> Iterator[tuple[str, ...]]:
    """What goes before a command on a machine with a network of its own."""
    name = f"isthmus-{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield "ip", "netns", "exec", name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def threads_of(process: Process) -> list[tuple[int, int]]:
    """Its changes: threads, and workers on this machine."""
    text = (process.directory / "worker-0.log").read_text()
    found = re.findall(r"num_threads=(\d+) workers_on_this_machine=(\d+)", text)
    return [(int(num_threads), int(num_workers)) for num_threads, num_workers in found]


def test_two_peers_divide_the_processors_of_their_machine_and_the_one_that_stays_gets_them_back(
    tmp_path: Path, inside: tuple[str, ...]
) -> None:
    with running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END), "--node.threads", "0", inside=inside)
        run.wait_for_ticket()
        run.until_step(2, founder)
        joiner = run.join("--node.threads", "0", inside=inside)
        run.until("fewer threads", lambda: threads_of(founder) == [(DIVIDED, 2)])
        run.until("as few at the other", lambda: threads_of(joiner) == [(DIVIDED, 2)])
        joiner.kill()
        run.until("all threads again", lambda: threads_of(founder)[-1] == (MOST, 1))
