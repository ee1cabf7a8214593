# SPDX-License-Identifier: Apache-2.0
"""What is left when it is over, and all that the verdict knows: journal, logs, faults, waits, ends.

Times are seconds of this machine's wall clock, as the logs have them. Sites are numbers: 0 is the coordinator's, the
others are peers'. A site holds one process at a time, and one folder after the other.

Rules: data, and how it is read from files. What it means is verdict.py's business.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from isthmus.elastic.core.records import Record
from isthmus.elastic.errors import JournalCorrupted
from isthmus.elastic.journal import reader as journal_reader

Event = dict[str, Any]

COORDINATOR = 0
KINDS = (
    "kill",
    "freeze",
    "coordinator",
    "donor",
    "joiner",
    "stranger",
    "clone",
    "leave",
    "handover",
    "power",
    "hung",
    "silent",
    "cut",
    "disk",
)
OF_ALL = ("power", "handover")
"""Whoever else is hit meanwhile would not know by what."""
NEED_ROOT = ("cut", "disk")
JOURNAL_NAME = "journal.sqlite"


def now_s() -> float:
    """The wall clock that the events have."""
    return datetime.now(UTC).timestamp()


def wall_s(event: Event) -> float:
    """When it happened."""
    return datetime.fromisoformat(event["wall"]).timestamp()


@dataclass(slots=True, kw_only=True)
class Fault:
    """One thing that was done."""

    kind: str
    """Of KINDS."""
    victims: tuple[int, ...]
    detail: str
    """For people: behind "peer 3"."""
    at_s: float
    over_s: float | None = None
    """When it was thawed, healed, back, or had its disk again."""
    is_for_good: bool = False
    """What was stopped did not go on by itself: it had to be replaced."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Wait:
    """An operation whose end is visible from outside, and the time it may take."""

    what: str
    site: int
    at_s: float
    seconds: float
    limit_s: float


@dataclass(slots=True, frozen=True, kw_only=True)
class End:
    """A process has ended."""

    site: int
    at_s: float
    code: int
    expected: frozenset[int]
    words: str = ""
    """The last lines of its stderr, if nobody expected it."""


@dataclass(slots=True, frozen=True)
class Glimpse:
    """How far the journal was when the coordinator was dead: rows, archived ones too, and the last one's checksum."""

    num_rows: int
    checksum: bytes


@dataclass(slots=True)
class Log:
    """The events of one folder."""

    site: int
    folder: str
    events: list[Event] = field(default_factory=list)

    def named(self, *names: str) -> Iterator[Event]:
        """Events of these names, oldest first."""
        return (event for event in self.events if event["event"] in names)


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Everything."""

    began_s: float
    """All peers were members, the first fault was still to come."""
    calm_until_s: float
    """When the first fault could come."""
    ended_s: float
    records: Sequence[Record]
    checksums: Sequence[bytes]
    """Of the journal's rows."""
    glimpses: list[Glimpse] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    """One for each folder; the coordinator's too."""
    faults: list[Fault] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    able: list[tuple[float, bool]] = field(default_factory=list)
    """From when on enough healthy peers and a healthy coordinator were there, or not."""
    leftovers: list[str] = field(default_factory=list)
    """What should not have been there afterwards: processes, crash reports."""
    num_starts: int = 0

    def peer_logs(self) -> list[Log]:
        """Without the coordinator's."""
        return [log for log in self.logs if log.site != COORDINATOR]


def glimpse(directory: Path) -> Glimpse:
    """How far a journal is that nobody has open. Looks at a copy: opening it would tidy it up."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        for name in (JOURNAL_NAME, f"{JOURNAL_NAME}-wal"):
            if (directory / name).exists():
                shutil.copy(directory / name, scratch)
        database = sqlite3.connect(Path(scratch) / JOURNAL_NAME)
        try:
            newest = database.execute("SELECT slot, checksum FROM journal ORDER BY slot DESC LIMIT 1").fetchone()
        finally:
            database.close()
    return Glimpse(0, b"") if newest is None else Glimpse(newest[0] + 1, newest[1])


def read_journal(directory: Path) -> tuple[list[Record], list[bytes]]:
    """Records and checksums of a journal that nobody has open, with all its archives.

    Raises:
        JournalCorrupted: it is damaged, or an archive is missing.
    """
    path = directory / JOURNAL_NAME
    reading = journal_reader.read_journal(path)
    if reading.broken is not None:
        raise JournalCorrupted(path, reading.broken.slot, reading.broken.cause)
    if reading.base.slot:
        raise JournalCorrupted(path, reading.base.slot - 1, "it is in no archive")
    return list(reading.records), list(reading.checksums)
