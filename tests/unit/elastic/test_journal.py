# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from isthmus.collective.core.types import Member, PeerRef, RoundKey, View
from isthmus.elastic.core.messages import Bar, IndexRange
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    CommittedPart,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    SnapshotRecord,
    TicketRecord,
    ViewRecord,
)
from isthmus.elastic.errors import JournalCorrupted, JournalInUse, JournalOfAnotherRun, JournalUnwritable
from isthmus.elastic.journal.journal import Journal
from tests.unit.elastic.machines import certificate

PEER = "00000000000000aa"
CERTIFICATE = certificate(1, 0, 1)
RECORDS = [
    Genesis(outer_step=0, digest=b"0" * 32, next_index=0),
    ViewRecord(view=View(1, 0, b"0" * 32, (Member(PEER, 1, "127.0.0.1:1"),)), cause="founded"),
    LeaseRecord(ref=PeerRef(PEER, 1), serial=1, ranges=(IndexRange(0, 64),)),
    CommitRecord(
        key=RoundKey(1, 0, 0),
        outer_step=1,
        previous=b"0" * 32,
        digest=b"1" * 32,
        contributions=(CommittedPart(PeerRef(PEER, 1), 1.0, 640, (IndexRange(0, 32),)),),
        final=False,
    ),
    ReleaseRecord(ref=PeerRef(PEER, 1), epoch=2, ranges=(IndexRange(32, 64),)),
    RebuildRecord(epoch=9, certificate=CERTIFICATE, testified=(PeerRef(PEER, 1),), insisted=False),
    RollbackRecord(epoch=10, certificate=CERTIFICATE, given_up=4, holders=(PeerRef(PEER, 2),)),
    BarRecord(bar=Bar(PEER, 1, 2)),
    TicketRecord(b"ticket 1", 2, PEER, 1),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "journal.sqlite"


def _filled(path):
    with_journal = Journal(path, run_id="run")
    slots = [with_journal.append(record) for record in RECORDS]
    with_journal.close()
    assert slots == list(range(len(RECORDS)))


def _replayed(path):
    journal = Journal(path, run_id="run")
    try:
        return journal.replay()
    finally:
        journal.close()


def test_records_come_back_in_order_after_a_restart(path):
    assert {type(record) for record in RECORDS} | {SnapshotRecord} == set(Record.__args__)  # see test_journal_archive
    _filled(path)
    assert _replayed(path) == RECORDS


def test_journal_goes_on_where_it_ended(path):
    _filled(path)
    journal = Journal(path, run_id="run")
    assert journal.append(RECORDS[0]) == len(RECORDS)
    assert journal.replay() == [*RECORDS, RECORDS[0]]
    journal.close()


def test_new_journal_has_no_records(path):
    assert _replayed(path) == []


def _edit(path, statement, *values):
    with sqlite3.connect(path) as database:
        database.execute(statement, values)
    database.close()


def test_changed_record_is_found_at_its_slot(path):
    _filled(path)
    forged = msgspec.msgpack.encode(Genesis(outer_step=9, digest=b"0" * 32, next_index=0))
    _edit(path, "UPDATE journal SET record = ? WHERE slot = 2", forged)
    with pytest.raises(JournalCorrupted) as caught:
        _replayed(path)
    assert (caught.value.path, caught.value.slot) == (path, 2)


def test_missing_record_is_found_at_its_slot(path):
    _filled(path)
    _edit(path, "DELETE FROM journal WHERE slot = 1")
    with pytest.raises(JournalCorrupted) as caught:
        _replayed(path)
    assert caught.value.slot == 1


def test_records_that_changed_places_are_found(path):
    _filled(path)
    _edit(path, "UPDATE journal SET slot = 100 WHERE slot = 2")
    _edit(path, "UPDATE journal SET slot = 2 WHERE slot = 3")
    _edit(path, "UPDATE journal SET slot = 3 WHERE slot = 100")
    with pytest.raises(JournalCorrupted) as caught:
        _replayed(path)
    assert caught.value.slot == 2


def test_record_replaced_together_with_its_checksum_breaks_the_chain(path, tmp_path):
    _filled(path)
    other = Journal(tmp_path / "other.sqlite", run_id="run")
    other.append(Genesis(outer_step=1, digest=b"x" * 32, next_index=0))
    other.close()
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        row = database.execute("SELECT checksum, record FROM journal").fetchone()
    database.close()
    _edit(path, "UPDATE journal SET checksum = ?, record = ? WHERE slot = 0", *row)
    with pytest.raises(JournalCorrupted) as caught:
        _replayed(path)
    assert caught.value.slot == 1


def test_record_of_an_unknown_kind_is_corruption_and_not_ignored(path):
    journal = Journal(path, run_id="run")

    class Unheard(msgspec.Struct, tag=True):
        value: int

    journal.append(Unheard(3))
    with pytest.raises(JournalCorrupted) as caught:
        journal.replay()
    assert caught.value.slot == 0
    journal.close()


def test_damaged_page_of_the_file_is_corruption(path):
    _filled(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(size - 100))
    with pytest.raises(JournalCorrupted):
        _replayed(path)


def test_file_that_is_no_journal_is_refused(path):
    path.parent.mkdir()
    path.write_bytes(b"this is not a database, it is a letter" * 100)
    with pytest.raises(JournalCorrupted):
        Journal(path, run_id="run")


def test_second_live_writer_is_refused(path):
    journal = Journal(path, run_id="run")
    with pytest.raises(JournalInUse) as caught:
        Journal(path, run_id="run")
    assert caught.value.path == path
    journal.append(RECORDS[0])
    journal.close()
    assert _replayed(path) == RECORDS[:1]


def test_journal_of_another_run_is_refused_and_stays_unchanged(path):
    _filled(path)
    with pytest.raises(JournalOfAnotherRun) as caught:
        Journal(path, run_id="other")
    assert (caught.value.expected, caught.value.actual) == ("other", "run")
    assert _replayed(path) == RECORDS


_WRITER = """
import os, signal, sys
sys.path.insert(0, os.getcwd())
from pathlib import Path
from isthmus.elastic.core.records import Genesis
from isthmus.elastic.journal.journal import Journal
journal = Journal(Path(sys.argv[1]), run_id="run")
for step in range(int(sys.argv[2])):
    print(journal.append(Genesis(outer_step=step, digest=b"0" * 32, next_index=0)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _write_and_die(path, count):
    """A process that appends `count` records, telling each one after it is durable, and is killed."""
    done = subprocess.run([sys.executable, "-c", _WRITER, str(path), str(count)], capture_output=True, timeout=50)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    return [int(line) for line in done.stdout.split()]


def test_every_record_that_was_told_of_outlives_sigkill(path):
    assert _write_and_die(path, 40) == list(range(40))
    records = _replayed(path)
    assert [record.outer_step for record in records] == list(range(40))


@pytest.mark.parametrize("kept", [0.0, 0.13, 0.5, 0.77, 0.999])
def test_torn_tail_leaves_a_shorter_journal_in_order(path, kept):
    _write_and_die(path, 40)
    wal = path.with_name(path.name + "-wal")
    full_nbytes = wal.stat().st_size
    assert full_nbytes > 0, "a killed writer leaves its write-ahead log behind"
    os.truncate(wal, int(full_nbytes * kept))
    # The schema is in the same log, so with most of it gone the journal is simply new.
    records = _replayed(path)
    assert [record.outer_step for record in records] == list(range(len(records)))
    assert len(records) < 40
    assert (len(records) > 0) == (kept >= 0.5)


def test_torn_bytes_in_the_tail_leave_a_shorter_journal_in_order(path):
    _write_and_die(path, 40)
    wal = path.with_name(path.name + "-wal")
    with wal.open("r+b") as file:
        file.seek(-1500, os.SEEK_END)
        file.write(os.urandom(1000))
    records = _replayed(path)
    assert 0 < len(records) < 40
    assert [record.outer_step for record in records] == list(range(len(records)))


def test_a_record_is_on_the_disk_before_anybody_hears_of_it(path):
    """SIGKILL cannot tell: what the kernel has, it keeps. A power cut would lose it with any other setting."""
    journal = Journal(path, run_id="run")
    try:
        assert journal._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    finally:
        journal.close()


def test_full_disk_is_a_typed_error_and_the_records_before_it_stay(path):
    journal = Journal(path, run_id="run")
    journal.append(RECORDS[0])
    limit = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count={limit}")
    big = Genesis(
        outer_step=1, digest=b"1" * 32, next_index=0, returned=tuple(IndexRange(i, i + 1) for i in range(5000))
    )
    with pytest.raises(JournalUnwritable, match="full"):
        journal.append(big)
    with pytest.raises(JournalUnwritable):
        journal.append(RECORDS[1])
    journal.close()
    assert _replayed(path) == RECORDS[:1]


def _limited(path, pipe):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (96 << 10, 96 << 10))
    journal = Journal(path, run_id="run")
    step = 0
    try:
        while True:
            journal.append(Genesis(outer_step=step, digest=b"0" * 32, next_index=0))
            step += 1
    except JournalUnwritable:
        pipe.send(step)


def test_file_that_cannot_grow_loses_nothing_that_was_told(path):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_limited, args=(path, theirs))
    process.start()
    assert ours.poll(40)
    told = ours.recv()
    process.join(20)
    ours.close()
    theirs.close()
    assert process.exitcode == 0
    assert told > 5
    assert [record.outer_step for record in _replayed(path)] == list(range(told))


def test_place_that_is_no_folder_is_a_typed_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(JournalUnwritable):
        Journal(blocker / "journal.sqlite", run_id="run")


def test_read_only_file_is_a_typed_error(path):
    _filled(path)
    journal = Journal(path, run_id="run")
    journal._database.execute("PRAGMA query_only=ON")
    with pytest.raises(JournalUnwritable):
        journal.append(RECORDS[0])
    journal.close()


def test_closed_journal_takes_no_records(path):
    journal = Journal(path, run_id="run")
    journal.close()
    journal.close()
    with pytest.raises(JournalUnwritable):
        journal.append(RECORDS[0])


def test_journal_keeps_the_exact_type_of_every_record(path):
    _filled(path)
    records: list[Record] = _replayed(path)
    assert [type(record) for record in records] == [type(record) for record in RECORDS]
    assert isinstance(path, Path)
