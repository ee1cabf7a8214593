# SPDX-License-Identifier: Apache-2.0
"""One peer of the lab: its process, what its events say, and what can be done to it.

Rules: never waits. What it says of itself is read from its events as they are written.
"""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.chaoslab.process import Process, children, send

_ENDS = {0: "the run is complete", 20: "left", 130: "stopped at once", -2: "stopped at once", -9: "killed"}


@dataclass(slots=True, kw_only=True, eq=False)
class Site:
    """See the module.

    Attributes:
        number: 0 is the founder.
        place: where the emulated network has it; empty without one.
        folder: its `--dir`.
        console: what it prints.
        command: makes the command line of a start.
        environment: of its process.
    """

    number: int
    place: str
    folder: Path
    console: Path
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    process: Process | None = None
    was_killed: bool = False
    is_leaving: bool = False
    is_frozen: bool = False
    is_cut: bool = False
    is_member: bool = False
    outer_step: int = 0
    loss: float | None = None
    num_tokens: int = 0
    num_members: int = 0
    _read_to: int = field(default=0, init=False)
    _told_end: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        """For people."""
        return f"peer {self.number}" + (f" ({self.place})" if self.place else "")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_running

    @property
    def is_heard(self) -> bool:
        """Whether nothing keeps it from the others."""
        return not (self.is_frozen or self.is_cut)

    @property
    def standing(self) -> str:
        """In a word."""
        if self.process is None:
            return "not started"
        if not self.is_running:
            return f"ended: {self.end}"
        states = (
            ("frozen", self.is_frozen),
            ("cut off", self.is_cut),
            ("leaving", self.is_leaving),
            ("member", self.is_member),
        )
        return next((word for word, holds in states if holds), "not a member")

    @property
    def code(self) -> int | None:
        """How it has ended; None if it has not."""
        return None if self.process is None else self.process.popen.poll()

    @property
    def end(self) -> str:
        """The same in words."""
        return _ENDS.get(self.code or 0, f"exit code {self.code}, see {self.console}")

    def start(self) -> None:
        """Its command, in its folder."""
        self.process = Process.start(self.number, self.command(), self.folder, self.console, self.environment)
        self.was_killed = self.is_leaving = self.is_frozen = self.is_member = self._told_end = False

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.is_running:
            self.process.kill()
        self.was_killed = self._told_end = True

    def signal(self, what: signal.Signals, *, and_workers: bool = False) -> None:
        """To its process."""
        if self.process is not None and self.is_running:
            pid = self.process.popen.pid
            send([pid, *(children(pid) if and_workers else [])], what)

    def leave(self) -> None:
        """Ask it to hand in its work and go."""
        self.is_leaving = True
        self.signal(signal.SIGINT)

    def freeze(self) -> None:
        """It and its workers stand still, as in a machine that is suspended."""
        self.signal(signal.SIGSTOP, and_workers=True)
        self.is_frozen = True

    def thaw(self) -> None:
        """It goes on."""
        self.signal(signal.SIGCONT, and_workers=True)
        self.is_frozen = False

    # -------------------------------------------------------------------------------- what it says

    def news(self) -> list[str]:
        """What has happened since the last look that people want to know."""
        found = [line for event in self._events() if (line := self._take(event))]
        if self.process is not None and not self.is_running and not self._told_end:
            self._told_end, self.is_member = True, False
            found.append(f"{self.name} has ended: {self.end}")
        return found

    def _events(self) -> list[dict[str, Any]]:
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
                file.seek(self._read_to)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read_to += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, event: Mapping[str, Any]) -> str:
        match event["event"]:
            case "join":
                self.is_member = True
                return f"{self.name} is a member from outer step {event['outer_step']} on"
            case "view":
                self.num_members = len(event["members"])
            case "learner":
                self.is_member = False
                return f"{self.name} is no member: {event['cause']}"
            case "commit":
                self.outer_step = event["outer_step"]
            case "trained":
                self.num_tokens += event["tokens"]
                self.loss = self.loss if event["loss"] is None else event["loss"]
            case "leave":
                self.is_member = False
                return f"{self.name} leaves: {event['cause']}"
            case _:
                pass
        return ""
