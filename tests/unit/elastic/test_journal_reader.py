# SPDX-License-Identifier: Apache-2.0
"""Reading a journal without being its writer: beside a live one, after a killed one, and past nothing that is bad."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.core.records import Record
from isthmus.elastic.errors import JournalUnreadable
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.journal.reader import JournalBreak, read_journal
from tests.unit.elastic.test_audit import history

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.sqlite"


def write(path: Path, records: list[Record]) -> None:
    journal = Journal(path, run_id="demo-0123abcd")
    for record in records:
        journal.append(record)
    journal.close()


def edit(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement, values)
    database.close()


def test_a_closed_journal_is_read_and_its_folder_left_as_it_was(path: Path) -> None:
    write(path, history())
    before = {entry.name: entry.stat() for entry in path.parent.iterdir()}
    reading = read_journal(path)
    assert (reading.run_id, reading.broken) == ("demo-0123abcd", None)
    assert list(reading.records) == history()
    after = {entry.name: entry.stat() for entry in path.parent.iterdir()}
    assert before.keys() == after.keys()
    assert before["journal.sqlite"].st_mtime_ns == after["journal.sqlite"].st_mtime_ns


def test_a_live_writer_is_read_to_its_newest_record_and_goes_on(path: Path) -> None:
    journal = Journal(path, run_id="demo-0123abcd")
    for number, record in enumerate(history(), start=1):
        journal.append(record)
        reading = read_journal(path)
        assert reading.broken is None
        assert list(reading.records) == history()[:number]
    journal.close()
    assert list(read_journal(path).records) == history()


WRITER = """
import os, signal, sys
from pathlib import Path
from isthmus.elastic.journal.journal import Journal
from tests.unit.elastic.test_audit import history
journal = Journal(Path(sys.argv[1]), run_id="demo-0123abcd")
for record in history():
    journal.append(record)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
sys.stdin.readline()
for record in history():
    journal.append(record)
journal.close()
"""


def test_a_writer_in_another_process_is_neither_waited_for_nor_stopped(path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path), "live"]
    writer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        assert list(read_journal(path).records) == history()
        writer.communicate("\n", timeout=30)
        assert writer.returncode == 0
    finally:
        writer.kill()
        writer.wait()
    assert list(read_journal(path).records) == history() * 2


def test_a_killed_writer_has_left_every_record_that_it_told_of(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITER, str(path), "die"], cwd=ROOT, timeout=50, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("journal.sqlite-wal").exists()
    assert list(read_journal(path).records) == history()
    assert list(read_journal(path).records) == history()  # and reading has spent nothing
    Journal(path, run_id="demo-0123abcd").close()


@pytest.mark.parametrize(
    ("statement", "values", "broken"),
    [
        (
            "UPDATE journal SET record = ? WHERE slot = 4",
            [msgspec.msgpack.encode(history()[0])],
            JournalBreak(slot=4, cause="its checksum is wrong"),
        ),
        ("UPDATE journal SET checksum = x'00' WHERE slot = 4", [], JournalBreak(slot=4, cause="its checksum is wrong")),
        ("DELETE FROM journal WHERE slot = 4", [], JournalBreak(slot=4, cause="it is missing")),
        ("UPDATE journal SET slot = 40 WHERE slot = 4", [], JournalBreak(slot=4, cause="it is missing")),
        (
            "INSERT INTO journal SELECT -1, checksum, record FROM journal WHERE slot = 4",
            [],
            JournalBreak(slot=0, cause="it is missing"),
        ),
        (
            "UPDATE about SET value = '3' WHERE name = 'format'",
            [],
            JournalBreak(slot=None, cause="its format is 3, not 1 or 2"),
        ),
        ("DELETE FROM about", [], JournalBreak(slot=None, cause="it does not say which run it is of")),
        ("DROP TABLE about", [], JournalBreak(slot=0, cause="no such table: about")),
    ],
)
def test_the_first_bad_record_is_named_and_those_before_it_are_kept(
    path: Path, statement: str, values: list[object], broken: JournalBreak
) -> None:
    write(path, history())
    edit(path, statement, *values)
    reading = read_journal(path)
    assert reading.broken == broken
    assert list(reading.records) == history()[: broken.slot or 0]


def test_a_record_of_a_later_version_is_a_break(path: Path) -> None:
    class Unheard(msgspec.Struct, tag=True):
        value: int

    write(path, [*history(), Unheard(3)])  # type: ignore[list-item]
    reading = read_journal(path)
    assert reading.broken is not None
    assert reading.broken.slot == len(history())
    assert "no record of this version" in reading.broken.cause
    assert list(reading.records) == history()


def test_a_file_that_is_no_journal_is_broken_from_its_beginning(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"", b"this is not a database, it is a letter" * 100):
        path.write_bytes(content)
        reading = read_journal(path)
        assert reading.broken is not None
        assert (reading.run_id, reading.records, reading.broken.slot) == (None, (), 0)


def test_a_journal_whose_end_is_cut_off_is_broken(path: Path) -> None:
    write(path, history() * 40)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    reading = read_journal(path)
    assert reading.broken is not None
    assert list(reading.records) == (history() * 40)[: len(reading.records)]


def test_a_journal_that_cannot_be_read_is_no_verdict_about_its_records(tmp_path: Path) -> None:
    with pytest.raises(JournalUnreadable, match="No such file"):
        read_journal(tmp_path / "journal.sqlite")
    (tmp_path / "folder").mkdir()
    with pytest.raises(JournalUnreadable):
        read_journal(tmp_path / "folder")


def test_a_journal_that_never_rests_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, history())
    times = iter(range(1, 100))

    def touching(*_: object, **__: object) -> sqlite3.Connection:
        os.utime(path, ns=(0, next(times)))
        return connect(path)

    connect = sqlite3.connect
    monkeypatch.setattr("isthmus.elastic.journal.reader.sqlite3.connect", touching)
    with pytest.raises(JournalUnreadable, match="changes while it is read"):
        read_journal(path)
