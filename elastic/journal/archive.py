# SPDX-License-Identifier: Apache-2.0
"""What a snapshot makes unnecessary, put aside: the older records of a journal, in files that nobody writes any more.

    journal.sqlite         from the newest snapshot on, which is its first record; its base names what came before
    journal-0001.sqlite    the records up to a snapshot, that included; read-only; for proofs alone
    journal-0002.sqlite    from that snapshot up to the next one

Rules: an archive is whole and on the disk before what it holds is dropped from the journal, in one transaction. So a
crash at any point leaves one journal that is whole, and at most an archive too many, of which the reader sees that it
is not needed. No archive is ever replaced: a journal that was lost may have left some, and its successor's count on.
The file of the journal keeps its name and its size: its pages are used again. To write a new file and to rename it was
not done: SQLite knows a write-ahead log and the locks of its readers by the journal's name, and a reader that had the
old file open would have met the new one's.
"""

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from isthmus.elastic.journal.store import FIRST, Base

BASE_SLOT, BASE_CHECKSUM = "base_slot", "base_checksum"
"""Where the table `about` says what the journal goes on from; missing in a journal that has all of its records."""

COMPACTED_FORMAT = "2"
"""Format of a journal that does not begin with slot 0: who knows only the first one does not take it for damaged."""


def archives_of(path: Path) -> list[Path]:
    """The archives beside this journal, oldest first; some may be of an older journal. Raises OSError."""
    return [entry for _, entry in sorted(_numbered(path))]


def write_archive(database: sqlite3.Connection, path: Path) -> Path:
    """Copy all that this journal holds now into its next archive; it is on the disk when this returns.

    Raises:
        OSError, sqlite3.Error: it could not be written, and there is none.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # of a process that died
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        database.execute("VACUUM INTO ?", (str(part),))
        _flush(part)
        part.chmod(0o400)
    except BaseException:
        part.unlink(missing_ok=True)  # a disk that is full needs the space
        raise
    number = 1 + max((known for known, _ in _numbered(path)), default=0)
    archive = path.with_name(f"{path.stem}-{number:04}{path.suffix}")
    part.rename(archive)
    _flush(path.parent)
    return archive


def drop_before(database: sqlite3.Connection, base: Base) -> None:
    """Let the journal begin with this slot, in one transaction.

    Raises:
        sqlite3.Error: nothing has changed.
    """
    about = {"format": COMPACTED_FORMAT, BASE_SLOT: str(base.slot), BASE_CHECKSUM: base.checksum.hex()}
    database.execute("BEGIN IMMEDIATE")
    try:
        database.execute("DELETE FROM journal WHERE slot < ?", (base.slot,))
        database.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def remove_all_but(archives: Sequence[Path], keep: int) -> None:
    """Remove the oldest of these. Raises OSError."""
    for archive in archives[: max(0, len(archives) - keep)]:
        archive.unlink(missing_ok=True)


def base_in(about: dict[str, str]) -> Base:
    """What a journal goes on from, as its table says. Raises ValueError, KeyError: that is damaged."""
    if BASE_SLOT not in about:
        return FIRST
    base = Base(int(about[BASE_SLOT]), bytes.fromhex(about[BASE_CHECKSUM]))
    if base.slot < 1 or len(base.checksum) != 32:
        raise ValueError(f"it goes on from slot {base.slot}, {len(base.checksum)} bytes")
    return base


def _numbered(path: Path) -> Iterator[tuple[int, Path]]:
    pattern = re.compile(re.escape(path.stem) + r"-(\d{4,})" + re.escape(path.suffix))
    for entry in path.parent.iterdir():
        if (match := pattern.fullmatch(entry.name)) is not None:
            yield int(match[1]), entry


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
