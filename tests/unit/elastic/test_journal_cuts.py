# SPDX-License-Identifier: Apache-2.0
"""The journal's real files, cut or damaged at any byte: what was acknowledged before that byte, or a named error."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.collective.core.types import Member, PeerRef, RoundKey, View
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import CommitRecord, CommittedPart, Genesis, Record, ViewRecord
from isthmus.elastic.errors import JournalCorrupted, JournalOfAnotherRun, JournalUnwritable
from isthmus.elastic.journal.journal import Journal

PEER = "00000000000000aa"
NUM_COMMITS = 5
WAL_HEADER_NBYTES, WAL_FRAME_NBYTES = 32, 24 + 4096
SHORTEST_DATABASE_NBYTES = 512
"""SQLite takes what is shorter than the smallest page for a file that nobody has written yet."""
NAMED = (JournalCorrupted, JournalOfAnotherRun, JournalUnwritable)


def _commit(step: int) -> CommitRecord:
    return CommitRecord(
        key=RoundKey(1, step, 0),
        outer_step=step + 1,
        previous=bytes([step]) * 32,
        digest=bytes([step + 1]) * 32,
        contributions=(CommittedPart(PeerRef(PEER, 1), 1.0, 640, (IndexRange(32 * step, 32 * step + 32),)),),
        final=False,
    )


RECORDS: list[Record] = [
    Genesis(outer_step=0, digest=bytes(32), next_index=0),
    ViewRecord(view=View(1, 0, bytes(32), (Member(PEER, 1, "127.0.0.1:1"),)), cause="founded"),
    *(_commit(step) for step in range(NUM_COMMITS)),
]


@dataclass(frozen=True)
class Files:
    """The bytes of a journal whose process was killed, and how long its log was when each record was acknowledged."""

    database: bytes
    log: bytes
    acknowledged_at: tuple[int, ...]


@pytest.fixture
def path() -> Iterator[Path]:
    """Where damaged journals are opened, thousands of times: in memory if possible, or every fsync is waited for."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "journal"


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Files:
    """All records are in the write-ahead log."""
    path = tmp_path_factory.mktemp("killed") / "journal"
    journal, acknowledged_at = Journal(path, run_id="run"), []
    for record in RECORDS:
        journal.append(record)
        acknowledged_at.append(_log_of(path).stat().st_size)
    files = Files(path.read_bytes(), _log_of(path).read_bytes(), tuple(acknowledged_at))
    journal.close()
    return files


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory) -> Files:
    """The first three records are in the database; the log begins anew, over what it held before."""
    path = tmp_path_factory.mktemp("checkpointed") / "journal"
    journal = Journal(path, run_id="run")
    for index, record in enumerate(RECORDS):
        if index == 3:
            journal._database.execute("PRAGMA wal_checkpoint(FULL)")
        journal.append(record)
    files = Files(path.read_bytes(), _log_of(path).read_bytes(), (0, 0, 0))
    journal.close()
    return files


@pytest.fixture(scope="module")
def closed(tmp_path_factory) -> bytes:
    """The database alone, after an orderly end."""
    path = tmp_path_factory.mktemp("closed") / "journal"
    journal = Journal(path, run_id="run")
    for record in RECORDS:
        journal.append(record)
    journal.close()
    assert not _log_of(path).exists()
    return path.read_bytes()


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _replayed(path: Path, database: bytes, log: bytes | None) -> list[Record] | None:
    """What the files say, or None for a named error."""
    for file in path.parent.glob("journal*"):
        file.unlink()
    path.write_bytes(database)
    if log is not None:
        _log_of(path).write_bytes(log)
    try:
        journal = Journal(path, run_id="run")
    except NAMED:
        return None
    try:
        return journal.replay()
    except NAMED:
        return None
    finally:
        journal.close()


def _flipped(data: bytes, place: int, mask: int) -> bytes:
    return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


def _check_log(path: Path, files: Files, log: bytes, first_damage: int) -> None:
    records = _replayed(path, files.database, log)
    if records is None:
        return
    num_acknowledged = sum(end <= first_damage for end in files.acknowledged_at)
    assert records == RECORDS[: len(records)], "a record that nobody wrote"
    assert len(records) >= num_acknowledged, "a record is lost that was acknowledged before the damage"


def _places(files: Files) -> list[int]:
    """Every end of a frame and the bytes around it, and a byte here and there between them."""
    ends = range(WAL_HEADER_NBYTES, len(files.log) + 1, WAL_FRAME_NBYTES)
    near = {end + offset for end in ends for offset in (-1, 0, 1, 8, 24)}
    return sorted(place for place in near | set(range(0, len(files.log), 1511)) if 0 <= place <= len(files.log))


def test_log_cut_at_any_byte_holds_what_was_acknowledged_before_it(path, killed):
    assert len(set(killed.acknowledged_at)) == len(RECORDS)
    for place in _places(killed):
        _check_log(path, killed, killed.log[:place], place)


def test_whole_log_holds_everything(path, killed, checkpointed):
    for files in (killed, checkpointed):
        assert _replayed(path, files.database, files.log) == RECORDS


def test_log_with_any_byte_changed_holds_what_was_acknowledged_before_it(path, killed):
    for place in _places(killed)[:-1]:
        _check_log(path, killed, _flipped(killed.log, place, 1 << place % 8), place)


def test_log_that_began_anew_never_brings_back_what_it_held_before(path, checkpointed):
    for place in _places(checkpointed):
        _check_log(path, checkpointed, checkpointed.log[:place], place)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rubbish=st.binary(min_size=1, max_size=9000))
def test_log_with_rubbish_over_it_holds_what_was_acknowledged_before_it(path, killed, data, rubbish):
    place = data.draw(st.integers(0, len(killed.log) - 1))
    log = killed.log[:place] + rubbish + killed.log[place + len(rubbish) :]
    _check_log(path, killed, log, place)


def test_database_with_any_byte_changed_holds_everything_or_is_refused(path, closed):
    places = [place for place, byte in enumerate(closed) if place % 3 == 0 and (byte or place % 499 == 0)]
    outcomes = [_replayed(path, _flipped(closed, p, 1 << p % 8), None) for p in places]
    assert all(records in (None, RECORDS) for records in outcomes)
    assert None in outcomes
    assert RECORDS in outcomes, "not every byte is in use"


def test_database_cut_anywhere_holds_everything_or_is_refused(path, closed):
    for place in range(SHORTEST_DATABASE_NBYTES, len(closed), 211):
        assert _replayed(path, closed[:place], None) in (None, RECORDS)
