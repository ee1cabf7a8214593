"""What all tests share."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anybody imports torch: on a busy machine its threads fight for the cores and stop an event loop for longer
# than the deadlines that are tested here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast examples are made says how busy the machine is, nothing of the code. The blob of a failure repeats it.
settings.register_profile("isthmus", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("isthmus")


@pytest.fixture(autouse=True)
def no_child_outlives_its_test() -> Iterator[None]:
    """Dead or alive. It is named where it was left, and ended, so that no other test is blamed or slowed down by it."""
    before = _children()
    yield
    left = {pid: _command_of(pid) for pid in _children() - before}
    for pid in left:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody has waited for it meanwhile
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not left, f"child processes outlived their test: {left}"


def _children() -> set[int]:
    """Ids of this process's children; none where the kernel does not list them."""
    pids: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            pids.update(int(pid) for pid in (thread / "children").read_text().split())
    return pids


def _command_of(pid: int) -> str:
    """What it runs and whether it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return f"{state} {' '.join(words)[:300]}"
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
