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

Rules: a line is written at once, whole or (disk full) recognisably not; a full disk never reaches the training: lines
are counted as lost and one warning is logged. Must not know what the events mean.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from trainer.errors import EnvironmentFault
from trainer.files import PRIVATE_MODE

log = logging.getLogger(__name__)

SCHEMA = "isthmus.events/1"
FILE_NAME = "events.jsonl"

Field = None | bool | int | float | str | Sequence["Field"]
"""What an event may say about itself."""

_RESERVED = frozenset({"t_s", "wall", "peer", "event"})


class EventLog:
    """Appends to one file; of one thread.

    Args:
        path: created if missing; its folder exists.
        peer_id: goes into every line.

    Raises:
        EnvironmentFault: the file cannot be opened.
    """

    def __init__(self, path: Path, peer_id: str) -> None:
        self._peer_id = peer_id
        self._path = path
        self._opened_at = time.monotonic()
        self._line_is_torn = False
        self.num_lost = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_MODE)
            os.fchmod(self._fd, PRIVATE_MODE)  # an older version made it readable for everybody
            size = os.fstat(self._fd).st_size
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
        stamp = {
            "t_s": round(time.monotonic() - self._opened_at, 6),
            "wall": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "peer": self._peer_id,
            "event": event,
        }
        line = msgspec.json.encode(stamp | fields) + b"\n"
        self._write(b"\n" + line if self._line_is_torn else line)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._count_lost(error.strerror or str(error))
            return
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


def read_events(path: Path) -> Iterator[dict[str, Field]]:
    """The events of a log, oldest first; a torn line is skipped, the last one may still be being written.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                event = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeError):
                continue
            if isinstance(event, dict):
                yield event
