# SPDX-License-Identifier: Apache-2.0
"""A machine that opens connections without end, and another one that wants to join meanwhile."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.collective.core.address import candidates_of, split_address
from isthmus.trainer.contact.ticket import read_ticket
from tests.multiprocess.processes import LEFT
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, running
from tests.netns.machines import MARKS, Machine, World

pytestmark = [*MARKS, pytest.mark.timeout(600)]

PER_S = 200
HELD_S = 5.0
NUM_PAIRS = 4
AS_LONG = 3.0
SHORT_S = 1.0
"""A join takes less than this on an idle machine, and what a busy one adds is not the flood's."""
_FLOOD = """
import asyncio, sys
host, port, per_s, held_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
async def hold():
    try:
        _, writer = await asyncio.open_connection(host, port)
        await asyncio.sleep(held_s)
        writer.close()
    except OSError:
        pass
async def main():
    async with asyncio.TaskGroup() as tasks:
        for number in range(10**9):
            tasks.create_task(hold())
            if number == per_s:
                print("flows", flush=True)
            await asyncio.sleep(1 / per_s)
asyncio.run(main())
"""


@contextlib.contextmanager
def _flooding(machine: Machine, host: str, port: int) -> Iterator[None]:
    command = [*machine.inside, sys.executable, "-c", _FLOOD, host, str(port), str(PER_S), str(HELD_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"flows\n"
            yield
        finally:
            flood.kill()


def _join_s(run: Run, machine: Machine) -> float:
    """Seconds from the command to the first commit with the joiner's work. It leaves again."""
    began_s = time.monotonic()
    joiner = run.join(inside=machine.inside)
    run.until("commit", lambda: bool(joiner.commits()))
    took_s = time.monotonic() - began_s
    joiner.signal(signal.SIGINT)
    assert run.until_ended(joiner) == [LEFT]
    return took_s


def _is_short(calm_s: float, beside_s: float) -> bool:
    return beside_s < AS_LONG * max(calm_s, SHORT_S)


def test_a_join_beside_two_hundred_connections_a_second_takes_at_most_three_times_as_long(tmp_path: Path) -> None:
    with World() as world, running(tmp_path) as run:
        home = world.machine(lan="10.9.0.1/24")
        run.found("--outer-steps", str(OPEN_END), "--members.grace", "2s", inside=home.inside)
        run.wait_for_ticket()
        first = run.join(inside=world.machine(lan="10.9.0.4/24").inside)
        run.until("commit of two", lambda: bool(first.commits()))  # from here on exchanges never pause

        host, port = split_address(candidates_of(read_ticket(f"@{run.ticket}").addresses[0])[0])
        flooder = world.machine(lan="10.9.0.66/24")
        pairs: list[tuple[float, float]] = []
        # In pairs, since other tests may slow a join down. A flood that harms, harms all of them.
        while len(pairs) < NUM_PAIRS and not any(_is_short(*pair) for pair in pairs):
            calm_s = _join_s(run, world.machine(lan=f"10.9.0.{10 + 2 * len(pairs)}/24"))
            with _flooding(flooder, host, port):
                pairs.append((calm_s, _join_s(run, world.machine(lan=f"10.9.0.{11 + 2 * len(pairs)}/24"))))
        for calm_s, beside_s in pairs:
            print(f"a join takes {calm_s:.1f} s, beside {PER_S} connections a second {beside_s:.1f} s")
        assert any(_is_short(*pair) for pair in pairs), pairs
        run.leave_all()
    assert_same_commits(*run.processes)
