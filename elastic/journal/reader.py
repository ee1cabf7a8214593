# SPDX-License-Identifier: Apache-2.0
"""Reading a journal that is not ours to open: finished, copied, damaged, or being written by its coordinator.

`Journal` (journal.py) opens a file in order to write it: it takes the writer's lock, makes what is missing and
raises at the first bad record. This reader takes no lock of a writer, changes no record and keeps what is good: the
records up to the first that is not what was written, and which one that is. A journal that was compacted is read
together with its archives (archive.py), as one chain, as far back as the checksums of these go on.

How SQLite is asked depends on whether there is a write-ahead log. With one, a reader of its own sees the newest
durable record beside a live writer (of whom it asks nothing: readers never stop writers in WAL mode). Without one,
nobody has the file open, and it is read as a file that does not change, so that nothing is made beside it; if
somebody begins to write meanwhile, that is seen afterwards and it is read again.
"""

import dataclasses
import hashlib
import sqlite3
import struct
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import msgspec

from isthmus.elastic.core.records import Record
from isthmus.elastic.errors import JournalUnreadable
from isthmus.elastic.journal.archive import COMPACTED_FORMAT, archives_of, base_in
from isthmus.elastic.journal.store import FIRST, Base

_FORMATS = ("1", COMPACTED_FORMAT)
_SLOT = struct.Struct("!Q")
_ATTEMPTS = 5
_BUSY_TIMEOUT_S = 5.0
_PLACE_AT_FAULT = frozenset(
    {
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalBreak:
    """Where a journal ceases to be what was written. `slot` is the first bad record, None if it is none of them."""

    slot: int | None
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalReading:
    """What a journal file says.

    Attributes:
        path: the file.
        run_id: the run whose records these are; None if that cannot be read.
        base: what the records go on from: their first slot is 0, unless older records are in an archive that is not
            here.
        records: verified, from the base on.
        checksums: of these.
        broken: None if the whole file is sound.
        archives: the files that older ones of these records were found in.
        damaged: archives of this run that are not what was written, and lead no further than they do.
    """

    path: Path
    run_id: str | None
    base: Base
    records: tuple[Record, ...]
    checksums: tuple[bytes, ...]
    broken: JournalBreak | None
    archives: tuple[Path, ...] = ()
    damaged: "tuple[JournalReading, ...]" = ()

    @property
    def end(self) -> int:
        """The slot of the record that comes next."""
        return self.base.slot + len(self.records)

    def goes_on_from(self, older: "JournalReading") -> bool:
        """Whether these records are those that follow what the older file holds, or some of it."""
        last = self.base.slot - 1 - older.base.slot
        if older.run_id != self.run_id or not 0 <= last < len(older.checksums):
            return False
        return older.checksums[last] == self.base.checksum


def read_journal(path: Path) -> JournalReading:
    """Read and verify a journal, whoever else has it open. What a crash cut off its end was told to nobody.

    The journal is read first: what it does not hold any more is in an archive by then.

    Raises:
        JournalUnreadable: there is no such file, or this machine does not let us read it or one of its archives.
    """
    reading = read_file(path)
    try:
        archives = archives_of(path) if reading.base.slot else []
    except OSError as error:
        raise JournalUnreadable(path, error.strerror or str(error)) from error
    while reading.base.slot and archives:
        archive = archives.pop()
        older = read_file(archive)
        if reading.goes_on_from(older):
            number = reading.base.slot - older.base.slot
            reading = dataclasses.replace(
                reading,
                base=older.base,
                records=(*older.records[:number], *reading.records),
                checksums=(*older.checksums[:number], *reading.checksums),
                archives=(archive, *reading.archives),
            )
        elif older.broken is not None and older.run_id in (None, reading.run_id):
            reading = dataclasses.replace(reading, damaged=(older, *reading.damaged))
    return reading


def read_file(path: Path) -> JournalReading:
    """The same of one file alone, the journal's or an archive."""
    for _ in range(_ATTEMPTS):
        before = _footprint(path)
        is_open = path.with_name(path.name + "-wal").exists()
        reading = _read(path, "mode=ro" if is_open else "mode=ro&immutable=1")
        if is_open or _footprint(path) == before:
            return reading
    raise JournalUnreadable(path, "it changes while it is read")


def _footprint(path: Path) -> tuple[object, ...]:
    """What changes when somebody writes the file or begins to."""
    try:
        found = path.stat()
    except OSError as error:
        raise JournalUnreadable(path, error.strerror or str(error)) from error
    return found.st_ino, found.st_size, found.st_mtime_ns, path.with_name(path.name + "-wal").exists()


def _read(path: Path, how: str) -> JournalReading:
    reader = _Reader()
    broken = None
    database: sqlite3.Connection | None = None
    try:
        uri = f"file:{urllib.parse.quote(str(path.absolute()))}?{how}"
        database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
        database.text_factory = bytes  # a damaged name is still to be read
        database.execute("BEGIN")  # one moment of the file for everything that follows
        broken = reader.read(database)
    except UnicodeError as error:
        broken = JournalBreak(slot=reader.due, cause=f"its tables have no names: {error}")
    except sqlite3.Error as error:
        # The low byte is the kind of error, the others say more.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PLACE_AT_FAULT:
            raise JournalUnreadable(path, str(error)) from error
        broken = JournalBreak(slot=reader.due, cause=str(error))
    finally:
        if database is not None:
            database.close()
    return JournalReading(
        path=path,
        run_id=reader.run_id,
        base=reader.base,
        records=tuple(reader.records),
        checksums=tuple(reader.checksums),
        broken=broken,
    )


class _Reader:
    """What has been read and verified so far."""

    def __init__(self) -> None:
        self.run_id: str | None = None
        self.base = FIRST
        self.records: list[Record] = []
        self.checksums: list[bytes] = []
        self._decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)

    @property
    def due(self) -> int:
        """The slot of the record that comes next."""
        return self.base.slot + len(self.records)

    def read(self, database: sqlite3.Connection) -> JournalBreak | None:
        """Take in what the file holds; returns the first fault of its content. Raises sqlite3.Error."""
        fault = self._read_about(database) or self._read_records(database)
        if fault is not None:
            return fault
        # A page that was lost with the newest records on it breaks no chain.
        found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        return None if found == b"ok" else JournalBreak(slot=None, cause=_text(found).splitlines()[-1])

    def _read_about(self, database: sqlite3.Connection) -> JournalBreak | None:
        about = {_text(name): _text(value) for name, value in database.execute("SELECT name, value FROM about")}
        self.run_id = about.get("run_id")
        if self.run_id is None:
            return JournalBreak(slot=None, cause="it does not say which run it is of")
        if about.get("format") not in _FORMATS:
            return JournalBreak(slot=None, cause=f"its format is {about.get('format')}, not {' or '.join(_FORMATS)}")
        try:
            self.base = base_in(about)
        except (ValueError, KeyError) as error:
            return JournalBreak(slot=None, cause=f"it does not say what it goes on from: {error}")
        return None

    def _read_records(self, database: sqlite3.Connection) -> JournalBreak | None:
        previous = self.base.checksum
        for slot, checksum, data in database.execute("SELECT slot, checksum, record FROM journal ORDER BY slot"):
            due = self.due
            if slot != due:
                return JournalBreak(slot=due, cause="it is missing")
            # As written by Journal.append; put down here once more, so that the reader trusts no code of the writer.
            if not isinstance(data, bytes) or checksum != hashlib.sha256(previous + _SLOT.pack(slot) + data).digest():
                return JournalBreak(slot=due, cause="its checksum is wrong")
            try:
                self.records.append(self._decoder.decode(data))
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                return JournalBreak(slot=due, cause=f"it is no record of this version: {error}")
            self.checksums.append(checksum)
            previous = checksum
        if self.base.slot and not self.records:
            return JournalBreak(slot=self.base.slot, cause="it is missing")
        return None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
