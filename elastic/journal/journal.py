# SPDX-License-Identifier: Apache-2.0
"""The coordinator's memory on disk: every record, in order, before anybody hears of it.

SQLite in WAL mode with synchronous=FULL: a record is on disk when `append` returns, and a torn tail is SQLite's
business. On top of it this module adds what SQLite does not promise: every row's checksum covers the row before it
(a chain of SHA-256), so that a record which was changed, moved or taken out is found at `replay`; a second live
writer is refused by a file lock; and a file of another run is refused by its name.

Rules: records are only appended. After a failed append the journal takes no more: the machine in memory is then ahead
of the disk and has to go. Where a snapshot was appended, what came before it goes to an archive (archive.py);
if that fails the journal is only longer. What other records mean is not known here.
"""

import fcntl
import itertools
import logging
import os
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from isthmus.elastic.core.records import Record, SnapshotRecord
from isthmus.elastic.errors import JournalCorrupted, JournalInUse, JournalOfAnotherRun, JournalUnwritable
from isthmus.elastic.journal.archive import (
    COMPACTED_FORMAT,
    archives_of,
    base_in,
    drop_before,
    remove_all_but,
    write_archive,
)
from isthmus.elastic.journal.store import Base, chain, pack, verified

_log = logging.getLogger(__name__)

_FORMAT = "1"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS journal (slot INTEGER PRIMARY KEY, checksum BLOB NOT NULL, record BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""


class Journal:
    """A `Store` in one SQLite file. One live writer; used from one thread at a time.

    Args:
        path: the file; `path` with `-wal` and `.lock` beside it belong to it. Created if it is not there.
        run_id: the run whose records these are.
        keep_archives: how many of the archives stay; 0: all.

    Raises:
        JournalInUse: another process has this journal open.
        JournalOfAnotherRun: the file holds the records of another run.
        JournalUnwritable: the place cannot be written.
        JournalCorrupted: the file is no journal, or damaged.
    """

    def __init__(self, path: Path, *, run_id: str, keep_archives: int = 0) -> None:
        self.path = path
        self._keep_archives = keep_archives
        self._broken: str | None = None
        self._lock_fd = self._lock()
        try:
            self._database = self._open(run_id)
            try:
                self._base, (self._slot, self._checksum) = self._ends()
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def is_quick(self) -> bool:
        """Yes: a local disk."""
        return True

    @property
    def longest_nbytes(self) -> int:
        """Half of what SQLite takes."""
        return 500_000_000

    def append(self, record: Record) -> int:
        """Write one record and wait until it is on disk (0.2 ms on an ordinary SSD)."""
        if self._broken is not None:
            raise JournalUnwritable(self.path, self._broken)
        data = pack(record)
        checksum = chain(self._checksum, self._slot, data)
        try:
            self._database.execute("INSERT INTO journal VALUES (?, ?, ?)", (self._slot, checksum, data))
        except sqlite3.Error as error:
            self._broken = str(error)
            raise JournalUnwritable(self.path, str(error)) from error
        before = Base(self._slot, self._checksum)
        self._checksum = checksum
        self._slot += 1
        if isinstance(record, SnapshotRecord) and before.slot > self._base.slot:
            self._begin_with(before)
        return before.slot

    def replay(self) -> list[Record]:
        """The records since the base in order, each verified against its checksum and its predecessor."""
        with closing(self._rows()) as rows:  # the first bad one ends it, and a reader must not outlive the journal
            return [record for _, record in verified(rows, self.path, self._base)]

    def close(self) -> None:
        """Close the file and give up the lock."""
        if self._lock_fd < 0:
            return
        try:
            self._database.close()
        finally:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._broken = "it is closed"

    # -------------------------------------------------------------------------------- inside

    def _begin_with(self, base: Base) -> None:
        """Put aside what came before the snapshot in this slot. Without success all of it stays here."""
        number = base.slot - self._base.slot
        try:
            archive = write_archive(self._database, self.path)
            drop_before(self._database, base)
        except (OSError, sqlite3.Error) as error:
            _log.warning("journal_not_compacted path=%s cause=%r; it is longer than it need be", self.path, str(error))
            return
        self._base = base
        _log.info("journal_compacted records=%d archive=%s", number, archive)
        if self._keep_archives:
            try:
                remove_all_but(archives_of(self.path), self._keep_archives)
            except OSError as error:
                _log.warning("archives_not_removed path=%s cause=%r", self.path, str(error))

    def _lock(self) -> int:
        # A file of its own: closing any descriptor of the database would drop SQLite's own locks on it.
        lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalUnwritable(self.path, error.strerror or str(error)) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock_fd)
            raise JournalInUse(self.path) from error
        return lock_fd

    def _make_private(self) -> None:
        """SQLite would make the file readable for everybody; those beside it get its mode."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)  # before SQLite holds a lock on it
        except OSError as error:
            raise JournalUnwritable(self.path, error.strerror or str(error)) from error

    def _open(self, run_id: str) -> sqlite3.Connection:
        self._make_private()
        with _mapped(self.path):
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5.0)
        try:
            with _mapped(self.path):
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=FULL")
                database.executescript(_SCHEMA)
                about = {"format": _FORMAT, "run_id": run_id}
                database.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", about.items())
                actual = dict(database.execute("SELECT name, value FROM about"))
                if actual["format"] not in (_FORMAT, COMPACTED_FORMAT):
                    raise JournalCorrupted(self.path, None, f"format {actual['format']} is not known here")
                if actual["run_id"] != run_id:
                    raise JournalOfAnotherRun(self.path, run_id, actual["run_id"])
        except BaseException:
            database.close()
            raise
        return database

    def _ends(self) -> tuple[Base, Base]:
        """What the journal goes on from, and what the next record will."""
        with _mapped(self.path):
            base = base_in(dict(self._database.execute("SELECT name, value FROM about")))
            row = self._database.execute("SELECT slot, checksum FROM journal ORDER BY slot DESC LIMIT 1").fetchone()
        return base, base if row is None else Base(row[0] + 1, row[1])

    def _rows(self) -> Generator[tuple[int, bytes, bytes], None, None]:
        with _mapped(self.path):
            yield from self._database.execute("SELECT slot, checksum, record FROM journal ORDER BY slot")


def set_aside(path: Path) -> Path:
    """Rename a journal that nobody has open, with the files beside it, so that another can be begun in its place.

    Returns:
        Its new path. SQLite can still open it there.

    Raises:
        JournalUnwritable: the place cannot be written.
    """
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    try:
        for end in ("-wal", "-shm", ""):  # the file itself goes last: a start that was cut short here begins again
            old = path.with_name(path.name + end)
            if old.exists():
                old.rename(aside.with_name(aside.name + end))
    except OSError as error:
        raise JournalUnwritable(path, error.strerror or str(error)) from error
    return aside


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    """SQLite's errors while opening and reading, as ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # "readonly", "full", "unable to open", "disk I/O error": the place is at fault, not the records.
        raise JournalUnwritable(path, str(error)) from error
    except (sqlite3.DatabaseError, KeyError, TypeError, ValueError) as error:
        # A flipped bit also makes a number of a blob, other letters of a name, and no letters at all of an error.
        raise JournalCorrupted(path, None, str(error)) from error
