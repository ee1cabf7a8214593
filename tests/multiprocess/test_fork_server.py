# SPDX-License-Identifier: Apache-2.0
"""A real fork server, and the processes that it forks."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from isthmus.trainer.errors import ExitCode
from isthmus.trainer.workers.fork_server import ForkedProcess, ForkServer, ForkServerGone, Runner, serve

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 30.0


def _load() -> Runner:
    def run(text: str, fds: Sequence[int]) -> None:
        if text == "raise":
            raise ValueError("the runner's own")
        if text == "wait":
            signal.pause()
        facts = {"parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "text": text}
        facts["open"] = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        os.write(fds[0], json.dumps(facts).encode())
        sys.exit(7)

    return run


@pytest.fixture
def server() -> Iterator[ForkServer]:
    path = os.pathsep.join(sys.path)
    server = ForkServer.launch(__name__, environment=os.environ | {"PYTHONPATH": path})
    yield server
    server.close()


async def _fork(server: ForkServer, text: str, *, err: int = 2, fds: Sequence[int] = ()) -> ForkedProcess:
    return await server.process(text, stdio=(0, 1, err), fds=fds, timeout_s=TIMEOUT_S)


async def test_a_forked_process_is_a_child_with_its_own_session_descriptors_and_exit_code(server: ForkServer) -> None:
    reader, writer = os.pipe()
    process = await _fork(server, "over there", fds=[writer])
    os.close(writer)
    assert await process.wait() == process.returncode == 7
    facts = json.loads(os.read(reader, 4096))
    os.close(reader)
    assert facts["parent"] == os.getpid()
    assert facts["leads"]
    assert facts["text"] == "over there"
    assert len(facts["open"]) == 5, "stdin, stdout, stderr, what was sent, and the one that lists them"


async def test_two_may_wait_for_a_process_that_a_signal_ends(server: ForkServer) -> None:
    process = await _fork(server, "wait")
    assert process.returncode is None
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.gather(process.wait(), process.wait()) == [-signal.SIGKILL] * 2


async def test_what_a_runner_raises_is_told_and_ends_its_process_alone(server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = await _fork(server, "raise", err=log.fileno())
    assert await process.wait() == 1
    assert "ValueError: the runner's own" in (tmp_path / "log").read_text()
    other = await _fork(server, "wait")
    os.kill(other.pid, signal.SIGKILL)
    assert await other.wait() == -signal.SIGKILL


async def test_a_process_outlives_its_fork_server_which_forks_no_more(server: ForkServer) -> None:
    process = await _fork(server, "wait")
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ForkServerGone):
        await _fork(server, "wait")
    assert process.returncode is None
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_a_fork_server_that_stands_still_is_given_up(server: ForkServer) -> None:
    first = await _fork(server, "wait")
    os.kill(first.pid, signal.SIGKILL)
    await first.wait()
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ForkServerGone, match=r"not answered in 0\.2 s"):
        await server.process("wait", stdio=(0, 1, 2), timeout_s=0.2)


NEVER_LOADED = """
import signal, sys
print("loading", file=sys.stderr, flush=True)
signal.pause()
"""
"""A torch that takes for ever, and a process that does not look around meanwhile."""

DAEMON = """
import os, socket, subprocess, sys
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
command = [sys.executable, "-m", "isthmus.trainer.workers.start", str(theirs.fileno()), str(PARENT)]
server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
print(server.pid, flush=True)
sys.exit(server.wait())
"""


def _with_fork_server(tmp_path: Path, parent: str) -> "subprocess.Popen[str]":
    """Launches a fork server whose parent is, or was, this process. Its torch is never loaded."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(NEVER_LOADED)
    return subprocess.Popen(
        [sys.executable, "-c", DAEMON.replace("PARENT", parent)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_fork_server_dies_with_its_daemon_also_before_it_has_loaded_anything(tmp_path: Path) -> None:
    with _with_fork_server(tmp_path, parent="os.getpid()") as daemon:
        assert daemon.stdout is not None
        pidfd = os.pidfd_open(int(daemon.stdout.readline()))
        assert daemon.stdout.readline() == "loading\n"
        daemon.kill()
    readable, _, _ = select.select([pidfd], [], [], 5.0)
    os.close(pidfd)
    assert readable, "it lives on"


def test_a_fork_server_whose_daemon_is_gone_already_loads_nothing(tmp_path: Path) -> None:
    its_parent = "os.getppid()"  # as after the daemon's death
    with _with_fork_server(tmp_path, parent=its_parent) as daemon:
        said, _ = daemon.communicate(timeout=60)
    assert daemon.returncode == ExitCode.UNEXPECTED
    assert "loading" not in said


if __name__ == "__main__":
    serve(_load)
