# SPDX-License-Identifier: Apache-2.0
"""A journal that was compacted: nothing is lost, whatever moment the process dies in; its archives are one chain."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.collective.core.types import PeerId
from isthmus.elastic.core.messages import Bar
from isthmus.elastic.core.records import BarRecord, Record, SnapshotRecord, TicketRecord
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.errors import JournalCorrupted
from isthmus.elastic.journal.archive import archives_of
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.journal.reader import read_file, read_journal
from tests.unit.elastic.test_audit import history

ROOT = Path(__file__).parents[3]
RUN = "demo-0123abcd"

CUT_SHORT = """
import itertools, os, shutil, signal, sqlite3, sys
from pathlib import Path
from isthmus.elastic.journal import journal
from isthmus.elastic.journal import archive as journal_archive
from tests.unit.elastic.test_journal_archive import bars, snapshot_of, RUN
from tests.unit.elastic.test_audit import history

def write(path, step, before):
    steps = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal steps
            steps += 1
            if steps == step and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call

    class Dying(sqlite3.Connection):
        execute, executemany = dying(sqlite3.Connection.execute), dying(sqlite3.Connection.executemany)

    opened = journal.Journal(path, run_id=RUN)
    opened._database.close()
    opened._database = sqlite3.connect(path, isolation_level=None, factory=Dying)
    for owner, name in ((os, "open"), (os, "fsync"), (Path, "chmod"), (Path, "rename"), (Path, "unlink")):
        setattr(owner, name, dying(getattr(owner, name)))
    opened.append(snapshot_of(history()))
    opened.append(bars(1)[0])

folder, copies, before = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "before"
for step in itertools.count(1):
    copy = copies / str(step)
    shutil.copytree(folder, copy)
    child = os.fork()  # to begin a process for each step takes much longer
    if child == 0:
        write(copy / "journal.sqlite", step, before)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 0:
        break
    assert ended == -signal.SIGKILL
print(step)
"""


def snapshot_of(records: list[Record]) -> SnapshotRecord:
    return RunState.replay(records).snapshot()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.sqlite"


@contextmanager
def opened(path: Path, *, keep_archives: int = 0) -> Iterator[Journal]:
    journal = Journal(path, run_id=RUN, keep_archives=keep_archives)
    try:
        yield journal
    finally:
        journal.close()


def write(path: Path, records: list[Record], *, keep_archives: int = 0) -> None:
    with opened(path, keep_archives=keep_archives) as journal:
        for record in records:
            journal.append(record)


def replayed(path: Path) -> list[Record]:
    with opened(path) as journal:
        return journal.replay()


def bars(number: int) -> list[Record]:
    return [BarRecord(bar=Bar(PeerId(f"{index:016x}"), index, index)) for index in range(number)]


def compacted(times: int) -> list[Record]:
    """A history with so many snapshots in it, and two records after each."""
    records = list(history())
    for number in range(times):
        records.append(snapshot_of(records))
        records += bars(2 * number + 2)[-2:]
    return records


def test_a_journal_begins_with_the_newest_snapshot_and_its_archives_hold_the_rest(path: Path) -> None:
    records = compacted(3)
    write(path, records)
    assert replayed(path) == records[-3:]
    assert [archive.name for archive in archives_of(path)] == [
        "journal-0001.sqlite",
        "journal-0002.sqlite",
        "journal-0003.sqlite",
    ]
    assert {archive.stat().st_mode & 0o777 for archive in archives_of(path)} == {0o400}
    reading = read_journal(path)
    assert (reading.broken, reading.base.slot, list(reading.records)) == (None, 0, records)
    assert list(reading.archives) == archives_of(path)


def test_slots_and_checksums_are_those_of_a_journal_that_was_never_compacted(path: Path, tmp_path: Path) -> None:
    records = compacted(2)
    write(path, records)
    whole = tmp_path / "whole" / "journal.sqlite"
    with opened(whole) as journal:
        journal._begin_with = lambda base: None  # type: ignore[method-assign]
        assert [journal.append(record) for record in records] == list(range(len(records)))
    assert read_journal(path).checksums == read_journal(whole).checksums
    with opened(path) as journal, opened(whole) as other:
        assert journal.append(history()[-1]) == other.append(history()[-1]) == len(records)


def test_recovery_is_that_of_all_records(path: Path) -> None:
    ticket = TicketRecord(b"ticket 1", 2**40, PeerId("a" * 16), 1, True)
    records = [*history(), ticket, *bars(3)]
    write(path, [*records, snapshot_of(records)])
    again = RunState.replay(replayed(path))
    assert again.snapshot() == snapshot_of(records)
    assert again.doors.tickets == {ticket.ticket_id: ticket}
    assert again.doors.admitted == {ticket.used_by: ticket}


def test_a_reader_beside_the_writer_sees_one_moment(path: Path) -> None:
    records = compacted(2)
    with opened(path) as journal:
        for number, record in enumerate(records, start=1):
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as reader:
                reader.execute("BEGIN")
                before = reader.execute("SELECT count(*) FROM journal").fetchone()
                journal.append(record)
                assert reader.execute("SELECT count(*) FROM journal").fetchone() == before
            reader.close()
            assert list(read_journal(path).records) == records[:number]
    assert list(read_journal(path).records) == records


def test_without_an_archive_the_chain_begins_with_the_snapshot_after_it(path: Path) -> None:
    records = compacted(3)
    write(path, records)
    archives_of(path)[1].unlink()
    reading = read_journal(path)
    third = next(slot for slot in range(len(records) - 3, 0, -1) if isinstance(records[slot - 3], SnapshotRecord)) - 3
    assert reading.base.slot == third
    assert list(reading.records) == records[third:]
    assert list(reading.archives) == [archives_of(path)[-1]]


def test_a_changed_archive_is_no_part_of_the_chain(path: Path) -> None:
    records = compacted(2)
    write(path, records)
    archive = archives_of(path)[-1]
    archive.chmod(0o600)
    with sqlite3.connect(archive) as database:
        (first,) = database.execute("SELECT min(slot) FROM journal").fetchone()
        database.execute("UPDATE journal SET record = X'00' WHERE slot = ?", (first + 1,))
    database.close()
    reading = read_journal(path)
    assert reading.base.slot == len(records) - 3
    assert reading.archives == ()
    assert [item.path for item in reading.damaged] == [archive]


def test_a_journal_whose_base_is_damaged_is_not_taken_for_another(path: Path) -> None:
    write(path, compacted(1))
    for name, value in (("base_slot", "0"), ("base_slot", "x"), ("base_checksum", "00"), ("base_checksum", "00" * 32)):
        copy = path.parent.parent / "copy" / path.name
        shutil.copytree(path.parent, copy.parent)
        with sqlite3.connect(copy) as database:
            database.execute("UPDATE about SET value = ? WHERE name = ?", (value, name))
        database.close()
        assert read_journal(copy).broken is not None
        with pytest.raises(JournalCorrupted):
            replayed(copy)
        shutil.rmtree(copy.parent)


def test_only_so_many_archives_stay(path: Path) -> None:
    write(path, compacted(5), keep_archives=2)
    assert [archive.name for archive in archives_of(path)] == ["journal-0004.sqlite", "journal-0005.sqlite"]


def test_where_no_archive_can_be_written_the_journal_only_stays_long(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = compacted(1)
    write(path, records[:-3])
    with opened(path) as journal:
        (path.parent / f"{path.name}.part").mkdir()
        for record in records[-3:]:
            journal.append(record)
        assert journal.replay() == records
    assert "journal_not_compacted" in caplog.text
    assert archives_of(path) == []
    (path.parent / f"{path.name}.part").rmdir()
    write(path, [snapshot_of(records)])
    assert len(replayed(path)) == 1
    assert list(read_journal(path).records) == [*records, snapshot_of(records)]


def test_archives_of_a_journal_that_was_lost_are_neither_replaced_nor_read(path: Path) -> None:
    write(path, [*bars(3), *compacted(1)])
    old = archives_of(path)[0].read_bytes()
    path.unlink()
    write(path, compacted(1))
    assert archives_of(path)[0].read_bytes() == old
    assert [archive.name for archive in read_journal(path).archives] == ["journal-0002.sqlite"]


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_an_archive_of_which_a_power_cut_left_a_part_harms_nobody(path: Path, kept: int) -> None:
    records = compacted(1)
    write(path, records[:-3])
    torn = path.with_name("journal-0001.sqlite")
    torn.write_bytes(path.read_bytes()[:kept])
    assert list(read_journal(path).records) == records[:-3]  # it was not dropped from the journal yet
    write(path, records[-3:])
    reading = read_journal(path)
    assert (list(reading.records), reading.broken, reading.damaged) == (records, None, ())
    archives_of(path)[1].unlink()
    (damaged,) = read_journal(path).damaged
    assert damaged.path == torn


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_whatever_step_the_process_is_killed_at_one_whole_journal_is_left(path: Path, moment: str) -> None:
    records = history()
    write(path, list(records))
    snapshot = snapshot_of(list(records))
    copies = path.parent.parent / "copies"
    command = [sys.executable, "-c", CUT_SHORT, str(path.parent), str(copies), moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    num_steps = int(done.stdout) - 1
    seen = set()
    for step in range(1, num_steps + 1):
        copy = copies / str(step) / path.name
        left = read_journal(copy)
        assert (left.broken, left.base.slot) == (None, 0)
        assert list(left.records) in (list(records), [*records, snapshot], [*records, snapshot, *bars(1)])
        seen.add((len(replayed(copy)), len(left.archives)))
        assert snapshot_of(replayed(copy)[: len(records)]).commits == snapshot.commits
        write(copy, [snapshot_of(list(left.records)), *bars(1)])  # and it goes on, and is compacted
        assert len(replayed(copy)) == 2
        assert list(read_journal(copy).records)[: len(records)] == list(records)
        assert read_journal(copy).base.slot == 0
        assert read_file(copy).base.slot >= len(records)
    assert num_steps >= 10
    assert {(len(records) + 1, 0), (1, 1)} <= seen, "half and done"
    assert (moment == "before") == ((len(records), 0) in seen)


def test_the_file_does_not_grow_from_snapshot_to_snapshot(path: Path) -> None:
    with opened(path) as journal:
        for record in history():
            journal.append(record)
        sizes = []
        for number in range(4):
            for record in bars(300):
                journal.append(record)
            state = RunState.replay(journal.replay())
            journal.append(state.snapshot())
            journal._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sizes.append(os.path.getsize(path))
            assert len(archives_of(path)) == number + 1
    assert sizes[3] <= 1.5 * sizes[1]
