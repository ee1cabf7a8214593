# SPDX-License-Identifier: Apache-2.0
"""events.jsonl: one JSON object a line for everything that happens (`events.py`), for people, plots and audits.

A log that has grown to its size goes on in a new file: `events.jsonl` becomes `events-0001.jsonl`, the next time
`events-0002.jsonl`, and of these only so many are kept. A new file begins with a line `log_continued`, which says again
what the start is a part of and which file comes before it.

Rules: a line is written at once, whole or (disk full) recognisably not; a full disk never reaches the training: lines
are counted as lost and one warning is logged. Readers beside it see every line in one file.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from isthmus.elastic.observation import Event
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.files import PRIVATE_MODE
from isthmus.trainer.record.events import LogContinued, LogOpened, Started, Unfiled, line_of

log = logging.getLogger(__name__)

FILE_NAME = "events.jsonl"

Line = dict[str, Any]


class EventLog:
    """Appends to one file after the other; of one thread.

    Args:
        path: created if missing; its folder exists.
        peer_id: goes into every line.
        max_nbytes: size from which on it goes on in a new file; None: never.
        keep: how many older files stay; 0: all.
        clock: monotonic seconds.

    Raises:
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        peer_id: str,
        *,
        max_nbytes: int | None = None,
        keep: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer_id = peer_id
        self._path = path
        self._max_nbytes = max_nbytes
        self._keep = keep
        self._continued = LogContinued(before="")
        self._nbytes = 0
        self._clock = clock
        self._opened_at = clock()
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
        self.write(LogOpened())

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now_s(self) -> float:
        """Seconds since it was opened."""
        return round(self._clock() - self._opened_at, 6)

    def write(self, event: Event) -> Event:
        """Write one event, unless it is one that the file leaves out; returns it with its stamp.

        Never raises for the disk's sake; what could not be written is counted in `num_lost`.

        Raises:
            ValueError: the log is closed. Our bug.
        """
        event = self._stamped(event)
        if isinstance(event, Unfiled):
            return event
        if self._fd < 0:
            raise ValueError(f"{event} after the log was closed")
        if isinstance(event, Started):
            run_id, number = event.run_id, event.samples_per_data_epoch
            self._continued = LogContinued(before="", run_id=run_id, samples_per_data_epoch=number)
        line = _encode(event)
        self._write(b"\n" + line if self._line_is_torn else line)
        if self._max_nbytes is not None and self._nbytes >= self._max_nbytes and not self._line_is_torn:
            self._go_on_in_another_file()
        return event

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _stamped(self, event: Event) -> Event:
        wall = datetime.now(UTC).isoformat(timespec="milliseconds")
        return replace(event, t_s=self.now_s(), wall=wall, peer=self._peer_id)

    def _go_on_in_another_file(self) -> None:
        """Where that fails, this file grows on, and it is tried again when it has doubled."""
        number = max(older_files(self._path), default=0) + 1
        coming = self._path.with_name(f"{self._path.name}.next")
        older = self._path.with_name(f"{self._path.stem}-{number:04d}{self._path.suffix}")
        fd = -1
        try:
            fd = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, PRIVATE_MODE)
            head = _encode(self._stamped(replace(self._continued, before=older.name)))
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


class EventReader:
    """Reads a log with its older parts, oldest first, also while it is being written, and goes on where it was.

    Args:
        path: of the newest part.
        tail_nbytes: begin so far before its end; None: at the beginning of the oldest.
    """

    def __init__(self, path: Path, *, tail_nbytes: int | None = None) -> None:
        self._path = path
        self._number = 0  # of the part that was read last: the newest one will have the next number
        self._read_nbytes = 0
        if tail_nbytes is not None and path.exists():
            self._number = max(older_files(path), default=0) + 1
            self._read_nbytes = max(0, path.stat().st_size - tail_nbytes)

    def new(self) -> Iterator[Line]:
        """What has come since; nothing if there is no log. What a full disk has torn is left out.

        Raises:
            OSError: a file cannot be read.
        """
        # The newest is opened first: what its writer calls it meanwhile, and begins after it, is of another moment.
        newest = _open(self._path)
        with newest or contextlib.nullcontext():
            older = older_files(self._path) if self._path.parent.is_dir() else {}
            for number in sorted(older):
                if number < self._number or (part := _open(older[number])) is None:
                    continue
                with part:
                    yield from self._new_in(part, number)
                    if newest is not None and os.path.sameopenfile(part.fileno(), newest.fileno()):
                        return
            if newest is not None:
                yield from self._new_in(newest, max(older, default=0) + 1)

    def _new_in(self, part: BinaryIO, number: int) -> Iterator[Line]:
        if number != self._number:
            self._number, self._read_nbytes = number, 0
        part.seek(self._read_nbytes)
        for line in part:
            if not line.endswith(b"\n"):
                return
            self._read_nbytes += len(line)
            try:
                event = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeError):
                continue
            if isinstance(event, dict):
                yield event


def read_events(path: Path) -> Iterator[Line]:
    """All events of a log, as `EventReader.new`."""
    return EventReader(path).new()


def _open(path: Path) -> BinaryIO | None:
    """None if it is not there: a name may be between two files, and an older part was dropped."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _encode(event: Event) -> bytes:
    return msgspec.json.encode(line_of(event)) + b"\n"
