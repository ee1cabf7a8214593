# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anybody imports torch: on a busy machine its threads fight for the cores and stop an event loop for longer
# than the deadlines that are tested here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# All workers collect the same cases, also around midnight (tests/multiprocess/run_harness.py, `todays`).
os.environ.setdefault("MATRIX_DAY", str(datetime.now(UTC).date().toordinal()))

# A shell without job control starts what it puts in the background with SIGINT ignored, and all processes of the tests
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are made says how busy the machine is, nothing of the code. The blob of a failure repeats it.
settings.register_profile("isthmus", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("isthmus")


_ONCE = re.compile(r"resource_tracker|workers\.start|multiprocess\.forked")
ORPHANS_END_S = 30.0
"""Where this process is the one that orphans are given to, workers of a killed daemon may take so long to end."""


@pytest.fixture(autouse=True)
def no_child_outlives_its_test() -> Iterator[None]:
    """It is named where it was left, and ended, so that no other test is blamed or slowed down by it."""
    before = _living_children()
    yield
    deadline = time.monotonic() + ORPHANS_END_S
    while (left := _living_children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    commands = {pid: _command_of(pid) for pid in left}
    for pid in left:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody has waited for it meanwhile
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not commands, f"child processes outlived their test: {commands}"


def _living_children() -> set[int]:
    """Ids of this process's children but for zombies; none where the kernel does not list them.

    What is started once for the life of the process is nobody's: Python's own resource tracker, and fork servers.
    """
    pids: set[int] = set()
    for thread in Path("/proc/self").glob("task/*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            pids.update(int(pid) for pid in (thread / "children").read_text().split())
    return {pid for pid in pids if _state_of(pid) not in "ZX" and not _ONCE.search(_command_of(pid))}


def _state_of(pid: int) -> str:
    """One letter, see proc(5); X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")[:300]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
