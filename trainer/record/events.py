# SPDX-License-Identifier: Apache-2.0
"""What happened, one JSON object a line, for people, plots and audits.

Schema `isthmus.events/1`, first line of every start: `{"event": "log_opened", "schema": "isthmus.events/1", …}`. Every
line has

    t_s      float, seconds since this log was opened, monotonic; use it for durations
    wall     ISO 8601 time of this machine's clock in UTC; only to find things
    peer     peer id
    event    what happened, snake_case
    …        fields of the event; units last in their names; a number that is not finite is null

Fields that more than one event has: `epoch`, `outer_step`, `inner_step`, `members`, `loss`, `tokens`, `bytes`,
`seconds`, `cause`. Fields are added without a new schema; none changes its meaning within one.

A log that has grown to its size goes on in a new file: `events.jsonl` becomes `events-0001.jsonl`, the next time
`events-0002.jsonl`, and of these only so many are kept. A new file begins with a line `log_continued`, which says again
what the start is a part of (`name_start`) and which file comes before it.

Rules: a line is written at once, whole or (disk full) recognisably not; a full disk never reaches the training: lines
are counted as lost and one warning is logged. Readers beside it see every line in one file. Must not know what the
events mean.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.files import PRIVATE_MODE

log = logging.getLogger(__name__)

SCHEMA = "isthmus.events/1"
FILE_NAME = "events.jsonl"

Field = None | bool | int | float | str | Sequence["Field"]
"""What an event may say about itself."""

_RESERVED = frozenset({"t_s", "wall", "peer", "event"})


class EventLog:
    """Appends to one file after the other; of one thread.

    Args:
        path: created if missing; its folder exists.
        peer_id: goes into every line.
        max_nbytes: size from which on it goes on in a new file; None: never.
        keep: how many older files stay; 0: all.

    Raises:
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(self, path: Path, peer_id: str, *, max_nbytes: int | None = None, keep: int = 0) -> None:
        self._peer_id = peer_id
        self._path = path
        self._max_nbytes = max_nbytes
        self._keep = keep
        self._about_start: dict[str, Field] = {}
        self._nbytes = 0
        self._opened_at = time.monotonic()
        self._line_is_torn = False
        self.num_lost = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_MODE)
            os.fchmod(self._fd, PRIVATE_MODE)  # an older version made it readable for everybody
            size = self._nbytes = os.fstat(self._fd).st_size
            # A line that a crash cut short must not swallow our first one.
            self._line_is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError as error:
            raise EnvironmentFault(
                f"{path} cannot be written: {error.strerror}", cure="give another folder with --dir"
            ) from error
        self.emit("log_opened", schema=SCHEMA)

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def emit(self, event: str, **fields: Field) -> None:
        """Write one event.

        Never raises for the disk's sake; what could not be written is counted in `num_lost`.

        Raises:
            ValueError: a field has the name of one that every line has, or the log is closed. Our bug.
        """
        if not _RESERVED.isdisjoint(fields):
            raise ValueError(f"event {event} has a field of a reserved name: {sorted(_RESERVED & fields.keys())}")
        if self._fd < 0:
            raise ValueError(f"event {event} after the log was closed")
        line = self._line(event, fields)
        self._write(b"\n" + line if self._line_is_torn else line)
        if self._max_nbytes is not None and self._nbytes >= self._max_nbytes and not self._line_is_torn:
            self._go_on_in_another_file()

    def name_start(self, **fields: Field) -> None:
        """What every further file says in its first line, since it may outlive those before it."""
        self._about_start = fields

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _line(self, event: str, fields: Mapping[str, Field]) -> bytes:
        stamp = {
            "t_s": round(time.monotonic() - self._opened_at, 6),
            "wall": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "peer": self._peer_id,
            "event": event,
        }
        return msgspec.json.encode({**stamp, **fields}) + b"\n"

    def _go_on_in_another_file(self) -> None:
        """Where that fails, this file grows on, and it is tried again when it has doubled."""
        number = max(older_files(self._path), default=0) + 1
        coming = self._path.with_name(f"{self._path.name}.next")
        older = numbered(self._path, number)
        fd = -1
        try:
            fd = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, PRIVATE_MODE)
            head = self._line("log_continued", {"schema": SCHEMA, "before": older.name} | self._about_start)
            if os.write(fd, head) < len(head):
                raise OSError(0, "no space left for a whole line")
            os.rename(self._path, older)
            os.rename(coming, self._path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._max_nbytes = 2 * self._nbytes
            log.warning("events_not_rotated path=%s cause=%r", self._path, error.strerror or str(error))
            return
        os.close(self._fd)
        self._fd, self._nbytes = fd, len(head)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        if not self._keep:
            return
        older = older_files(self._path)
        for number in sorted(older)[: -self._keep]:
            with contextlib.suppress(OSError):  # the next one will try again
                older[number].unlink()

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._count_lost(error.strerror or str(error))
            return
        self._nbytes += written
        # A short write is how a disk begins to be full.
        self._line_is_torn = written < len(line)
        if self._line_is_torn:
            self._count_lost("no space left for a whole line")

    def _count_lost(self, cause: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            log.warning(
                "events_lost path=%s cause=%r; training goes on, free some space to have events again",
                self._path,
                cause,
            )


def numbered(path: Path, number: int) -> Path:
    """Where an older part of this log is."""
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def older_files(path: Path) -> dict[int, Path]:
    """The older parts of this log that are there, by number. Raises OSError."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{4,}}){re.escape(path.suffix)}")
    found = ((name.fullmatch(entry), path.with_name(entry)) for entry in os.listdir(path.parent))
    return {int(match[1]): older for match, older in found if match is not None}


def has_events(path: Path) -> bool:
    """Whether any part of this log is there."""
    return path.exists() or bool(path.parent.is_dir() and older_files(path))


def missing_files(path: Path) -> int:
    """How many older parts of this log were there once and are gone. Raises OSError."""
    older = older_files(path)
    return max(older, default=0) - len(older)


def read_events(path: Path) -> Iterator[dict[str, Field]]:
    """The events of a log with its older parts, oldest first; a torn line is skipped, the last may still be written.

    Raises:
        OSError: a file cannot be read.
    """
    with contextlib.ExitStack() as stack:
        # It is opened first: what its writer calls it meanwhile, and begins after it, is of another moment.
        newest = None
        try:
            newest = stack.enter_context(path.open("rb"))
        except FileNotFoundError:  # it is between two names, or a crash was
            if not older_files(path):
                raise
        inode = -1 if newest is None else os.fstat(newest.fileno()).st_ino
        older = older_files(path)
        for number in sorted(older):
            try:
                part = older[number].open("rb")
            except FileNotFoundError:
                continue  # dropped meanwhile
            with part:
                if os.fstat(part.fileno()).st_ino == inode:
                    break
                yield from _events_in(part)
        if newest is not None:
            yield from _events_in(newest)


def _events_in(file: Iterable[bytes]) -> Iterator[dict[str, Field]]:
    for line in file:
        try:
            event = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeError):
            continue
        if isinstance(event, dict):
            yield event
