# SPDX-License-Identifier: Apache-2.0
"""What `isthmus plan` says of a run is what comes of it, on emulated lines."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from scripts.wanlink.wan import Wan
from tests.multiprocess.processes import Process
from tests.multiprocess.run_harness import OPEN_END, Run, running
from tests.netns.machines import MARKS, why_no_wan

ROUND_TRIP_MS, MBIT, PAYLOAD_SHARE = 60, 8, 1448 / 1514
INNER_STEPS = 10
CONFIG = f"""
[inner]
batch_size = 1
[outer]
inner_steps = {INNER_STEPS}
[members]
start_peers = 2
equal_steps = true
[checkpoint]
every = 0
[eval]
every = 0
[metrics]
port = "none"
"""


NO_WAN = why_no_wan()
pytestmark = [*MARKS, pytest.mark.timeout(600), pytest.mark.skipif(NO_WAN is not None, reason=str(NO_WAN))]


def _plan(run: Run, step_s: float, *flags: str) -> dict[str, Any]:
    line = ("--link", f"{MBIT * PAYLOAD_SHARE}mbit/{ROUND_TRIP_MS}ms", "--step", f"{step_s}s")
    planned = run.command("plan", "-c", str(run.config), *line, *flags, "--json")
    assert planned.code == 0, planned.err
    told: dict[str, Any] = json.loads(planned.out)
    return told


def _late_half(process: Process, event: str) -> list[dict[str, Any]]:
    """When the lines are known."""
    told = process.events(event)
    return told[len(told) // 2 :]


def _median(process: Process, event: str, key: str) -> float:
    return statistics.median(each[key] for each in _late_half(process, event))


def _period_s(process: Process) -> float:
    """From one outer step to the next."""
    at = [each["t_s"] for each in _late_half(process, "trained")]
    return statistics.median(after - before for before, after in itertools.pairwise(at))


def _agrees(planned: float, measured: float) -> bool:
    """Within 15 % on a quiet machine. A busy one emulates the line late, and one peer begins long after the other."""
    return 0.4 * planned <= measured <= 2.0 * planned


@pytest.mark.parametrize(
    ("flags", "outer_steps", "inner_steps"),
    [
        ((), 8, INNER_STEPS),
        (("--outer.type", "streaming", "--outer.num-fragments", "2", "--outer.delay", "2"), 16, INNER_STEPS // 2),
        (("--outer.type", "delayed", "--outer.codec", "e3m0"), 8, INNER_STEPS),
    ],
    ids=["diloco", "streaming", "delayed"],
)
def test_exchanges_and_rounds_are_as_long_as_planned(
    tmp_path: Path, flags: tuple[str, ...], outer_steps: int, inner_steps: int
) -> None:
    with Wan(peers=2) as wan, running(tmp_path) as run:
        wan.set_link("*", "*", delay_ms=ROUND_TRIP_MS / 2)
        for peer in range(2):
            wan.set_port(peer, up_mbit=MBIT, down_mbit=MBIT)
        run.config.write_text(CONFIG)
        founder = run.found("--outer-steps", str(OPEN_END), *flags, inside=wan.command(0, []))
        run.wait_for_ticket()
        joiner = run.join(inside=wan.command(1, []))
        for attempt in range(1, 4):  # a round waits for the other peer, which may get no processor for seconds
            run.until_step(attempt * outer_steps, founder, joiner)
            step_s = _median(joiner, "trained", "train_s") / inner_steps
            planned = _plan(run, step_s, *flags)["typical"]
            assert planned["inner_steps"] == inner_steps
            assert planned["sent_nbytes"] == pytest.approx(_median(joiner, "round", "bytes_sent"), rel=0.1)
            measured = {
                "exchange": (planned["exchange_s"], _median(joiner, "round", "seconds")),
                "period": (inner_steps * step_s + planned["waiting_s"], _period_s(joiner)),
            }
            if all(_agrees(*figures) for figures in measured.values()):
                break
        else:
            raise AssertionError(measured)
        run.leave_all()
