# SPDX-License-Identifier: Apache-2.0
"""Real processes for the tests that need not load Python and torch anew: forked by a fork server that has done so.

Not a test. A forked process is one like any other: its own id, session, descriptors, environment and end. Only the
interpreter's start, what stands at the top of modules, and what Python does at its end (`atexit`) is left out. Training
loops and test_first_hour.py start theirs anew.
"""

import atexit
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.optim.registry import outer_types
from isthmus.trainer.workers.fork_server import ForkServer, Runner, process_id, serve
from isthmus.trainer.workers.lifeline import name_process

MARK = "RUN_HARNESS_MARK"
"""Variable that tells which processes belong to a test, in the environment that the kernel shows."""
_NO_MARK = "0" * 32
_ROOT = Path(__file__).parents[2]
_ANSWER_S = 120.0
_CLONE_NEWNET = 0x40000000

_server: ForkServer | None = None


class Forked:
    """A child, with the face of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                readable, _, _ = select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
            if not readable:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """To it alone, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def forked(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdio: Sequence[int], net: str | None = None
) -> Forked:
    """A program of Python as a new process: `isthmus …`, `python FILE …` or `python -m MODULE …`.

    Args:
        command: its words, the program first.
        cwd: its working directory.
        env: its environment; MARK has 32 characters.
        stdio: descriptors of stdin, stdout and stderr.
        net: file of the network namespace that it is in; None: this process's.
    """
    global _server
    if _server is None:
        _server = ForkServer.launch(__name__, environment=_environment())
        atexit.register(_server.close)
    text = json.dumps({"words": list(command), "net": net, "folder": str(cwd), "environment": dict(env)})
    answer = _server.fork(text, stdio=stdio)
    try:
        assert select.select([answer], [], [], _ANSWER_S)[0], "the fork server does not answer"
        return Forked(process_id(answer))
    finally:
        os.close(answer)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ) | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", MARK: _NO_MARK}


def _load() -> Runner:
    for name in ("cli", "run.daemon", "workers.worker", "attach"):
        importlib.import_module(f"isthmus.trainer.{name}")
    importlib.import_module("torch._dynamo")
    outer_types()  # imports all methods

    def run(text: str, _fds: Sequence[int]) -> None:
        said = json.loads(text)
        if said["net"] is not None:
            _enter(said["net"])
        program, *arguments = said["words"]
        _show_mark(said["environment"][MARK])
        os.environ.clear()
        os.environ.update(said["environment"])
        os.chdir(said["folder"])
        name_process(Path(program).name[:15])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        sys.orig_argv = [program, *arguments]
        if Path(program).name == "isthmus":
            sys.argv = [program, *arguments]
            runpy.run_module("isthmus.trainer.cli", run_name="__main__")
        elif arguments[0] == "-m":
            sys.path.insert(0, said["folder"])
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")

    return run


def _enter(net: str) -> None:
    with open(net, "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {net}")


def _show_mark(mark: str) -> None:
    """Write it into the environment that /proc shows of this process: that of the fork server, at its start."""
    assert len(mark) == len(_NO_MARK)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(MARK.encode())
    assert ctypes.string_at(place).decode() == _NO_MARK
    ctypes.memmove(place, mark.encode(), len(mark))


if __name__ == "__main__":
    serve(_load)
