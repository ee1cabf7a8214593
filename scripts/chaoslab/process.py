# SPDX-License-Identifier: Apache-2.0
"""One start of one `isthmus` process at a site, and what /proc says about it and its workers."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.trainer.workers.fork_server import SERVER_NAME
from scripts.chaoslab.evidence import now_s

LEFT, ENVIRONMENT, NOBODY_REACHABLE, REFUSED, KILLED = 20, 3, 4, 5, -signal.SIGKILL
_WORDS_LINES, _WORDS_LENGTH = 12, 300


@dataclass(slots=True, eq=False)
class Process:
    """One start."""

    site: int
    folder: Path
    console: Path
    """stdout and stderr of all starts of the site."""
    popen: "subprocess.Popen[bytes]"
    began_s: float
    expected: set[int] = field(default_factory=set)
    """Exit codes that are no surprise any more."""
    is_up: bool = False
    """A coordinator that listens, a peer that became a member."""
    is_listening: bool = False
    outer_step: int = 0
    """The newest that it has committed."""
    has_ended: bool = False

    @classmethod
    def start(
        cls, site: int, command: Sequence[str], folder: Path, console: Path, environment: Mapping[str, str]
    ) -> "Process":
        """Start it, as the leader of a session of its own."""
        began_s = now_s()
        with console.open("ab") as out:
            popen = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(site, folder, console, popen, began_s)

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> list[int]:
        """SIGKILL, and wait until it is gone; returns its workers, which have to follow."""
        workers = children(self.popen.pid)
        self.expected.add(KILLED)
        self.popen.kill()
        self.popen.wait()
        return workers

    def interrupt(self) -> None:
        """Ask it to leave in order."""
        self.expected |= {LEFT, 0}
        self.popen.send_signal(signal.SIGINT)

    def words(self) -> str:
        """The last lines that it has said, shortened."""
        lines = self.console.read_text(errors="replace").splitlines()
        return "\n".join(line[:_WORDS_LENGTH] for line in lines[-_WORDS_LINES:])


def children(pid: int) -> list[int]:
    """Processes that this one has started and that live, but for the fork server, which does none of its work."""
    return [other for other in pids() if parent_of(other) == pid and _name_of(other) != SERVER_NAME]


def _name_of(pid: int) -> str:
    return read_of(pid, "comm").decode().strip()


def send(pids_: Sequence[int], what: signal.Signals) -> None:
    """A signal to each that is still there."""
    for pid in pids_:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def kill_all(pids_: Sequence[int]) -> None:
    """SIGKILL them."""
    send(pids_, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    stat = read_of(pid, "stat")
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def pids() -> list[int]:
    """All processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_of(pid: int) -> int | None:
    """Who has started it."""
    match = re.search(rb"^PPid:\s+(\d+)$", read_of(pid, "status"), re.MULTILINE)
    return None if match is None else int(match[1])


def read_of(pid: int, name: str) -> bytes:
    """A file of /proc; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
