# SPDX-License-Identifier: Apache-2.0
"""One `isthmus` process of a test: how it is started, what it has written down, how it ended.

Not a test. run_harness.py starts them together.
"""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.trainer.record.event_log import FILE_NAME, EventReader
from isthmus.trainer.workers.start import WORKER_NAME
from tests.multiprocess.forked import MARK, Forked, forked

Event = dict[str, Any]
ISTHMUS = str(Path(sys.executable).parent / "isthmus")
POLL_INTERVAL_S = 0.02
TIMEOUT_S = 180.0
"""For anything that is waited for. Generous: the machine may be busy with other things."""
END_TIMEOUT_S = 60.0
LEFT, FORCED, KILLED = 20, 130, -signal.SIGKILL
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) +\w+(\.\w+)* \S+")


@dataclass(slots=True)
class Outcome:
    """What a command left when it ended."""

    code: int
    out: str
    err: str

    @property
    def sentences(self) -> list[str]:
        """The lines of stderr that are not of the log."""
        return [line for line in self.err.splitlines() if _LOG_LINE.match(line) is None]


@dataclass(slots=True)
class Process:
    """One `isthmus` process and its folder."""

    directory: Path
    popen: "subprocess.Popen[bytes] | Forked"
    console: Path
    """stdout, and beside it stderr with the suffix `.err`."""
    is_judged: bool = False
    """Whether a test has looked at its end, so that nobody else has to."""
    _events: list[Event] = field(default_factory=list)
    _reader: EventReader | None = None

    @property
    def name(self) -> str:
        return self.console.stem

    @property
    def peer_id(self) -> str:
        return (self.directory / "peer_id").read_text()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def events(self, name: str | None = None, /, **fields: object) -> list[Event]:
        """What it has written down so far, all starts in this folder together; a line may still be being written."""
        if self._reader is None:
            self._reader = EventReader(self.directory / FILE_NAME)
        self._events += self._reader.new()
        return [
            event
            for event in self._events
            if (name is None or event["event"] == name) and all(event.get(k) == v for k, v in fields.items())
        ]

    def commits(self) -> dict[int, str]:
        """Digest by outer step of the commits it took part in."""
        return {event["outer_step"]: event["digest"] for event in self.events("commit")}

    @property
    def step(self) -> int:
        """The newest outer step it has committed; 0 before the first."""
        return max(self.commits(), default=0)

    def outcome(self, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """How it ended; waits for that."""
        code = self.popen.wait(timeout_s)
        self.is_judged = True
        return Outcome(code, self.console.read_text(), self.console.with_suffix(".err").read_text())

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.kill()
        assert self.popen.wait(END_TIMEOUT_S) == KILLED

    def children(self) -> list[int]:
        """The processes that it has started."""
        return [pid for pid in pids() if _parent_of(pid) == self.popen.pid]

    def worker_pids(self) -> list[int]:
        """Its workers."""
        return [pid for pid in self.children() if _read_of(pid, "comm").strip() == WORKER_NAME.encode()]


def start_program(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: int, stderr: int, forks: bool = True
) -> "subprocess.Popen[bytes] | Forked":
    """A program in a session of its own: forked if that can be and is wished, else started anew."""
    net, program = None, list(command)
    if program[0] == "nsenter" and program[1].startswith("--net="):
        net, program = program[1].removeprefix("--net="), program[2:]
    with open(os.devnull, "rb") as nothing:
        if forks and program[0] in (ISTHMUS, sys.executable):
            return forked(program, cwd=cwd, env=env, stdio=(nothing.fileno(), stdout, stderr), net=net)
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=nothing, stdout=stdout, stderr=stderr, start_new_session=True
        )


def leave_memory(pid: int, nbytes: int) -> None:
    """From now on a process may have no more than so many bytes of address space beside what it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + nbytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read_of(pid: int, name: str) -> bytes:
    """A file of /proc; empty if the process has gone meanwhile."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _parent_of(pid: int) -> int | None:
    match = re.search(rb"^PPid:\s+(\d+)$", _read_of(pid, "status"), re.MULTILINE)
    return None if match is None else int(match[1])


def has_mark(pid: int, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in _read_of(pid, "environ").split(b"\0")


def command_of(pid: int) -> str:
    return _read_of(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:120]
