# SPDX-License-Identifier: Apache-2.0
"""The guard against too large numbers and honest peers, whose numbers differ: one warms up, another does not."""

import signal
from pathlib import Path

import pytest

from tests.multiprocess.run_harness import OPEN_END, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_a_veteran_keeps_its_place_when_the_founder_comes_back_and_warms_up(tmp_path: Path) -> None:
    """The founder holds the coordinator: it, too, begins again (`running` fails if somebody is accused)."""
    warm_up = ("--inner.schedule.warmup_steps", "300")
    flags = ("--peers", "2", "--min-peers", "2", "--outer-steps", str(OPEN_END), *warm_up)
    with running(tmp_path) as run:
        founder = run.found(*flags)
        run.wait_for_ticket()
        veteran = run.join()
        run.until_step(100, founder, veteran)
        founder.signal(signal.SIGKILL)
        founder.popen.wait()
        founder.is_judged = True
        again = run.found(*flags, folder=founder.directory)
        run.until_step(veteran.step + 20, again, veteran)
