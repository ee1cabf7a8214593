# SPDX-License-Identifier: Apache-2.0
"""The event log: one whole line an event, and a full disk never reaches the training."""

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from isthmus.elastic.observation import BecameLearner, WorkCarriedOver
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.record.event_log import EventLog, EventReader, missing_files, older_files, read_events
from isthmus.trainer.record.events import SCHEMA, Evaluate, InnerStep, Round, Started

PEER_ID = "0123456789abcdef"
COMMIT = WorkCarriedOver(outer_step=1)
STARTED = Started(run_id="run-1", address="", num_parameters=1, tokens_per_inner_step=1, samples_per_data_epoch=7)


def test_events_are_lines_with_what_every_line_has(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    round_ = Round(
        epoch=2,
        outer_step=3,
        fragment=0,
        members=("a", "b"),
        bytes_sent=10,
        bytes_received=20,
        seconds=0.5,
        plan="ring",
        predicted_s=None,
    )
    with EventLog(path, PEER_ID) as events:
        written = events.write(round_)
        events.write(Evaluate(outer_step=3, loss=float("nan")))
        events.write(BecameLearner(cause="ü\n"))
    opened, line, evaluated, learner = (json.loads(line) for line in path.read_text().splitlines())
    assert (opened["event"], opened["schema"]) == ("log_opened", SCHEMA)
    assert list(line.items())[3:] == [
        ("event", "round"),
        ("epoch", 2),
        ("outer_step", 3),
        ("fragment", 0),
        ("members", ["a", "b"]),
        ("bytes_sent", 10),
        ("bytes_received", 20),
        ("seconds", 0.5),
        ("plan", "ring"),
        ("predicted_s", None),
    ]
    assert (line["t_s"], line["wall"], line["peer"]) == (written.t_s, written.wall, written.peer) != (0.0, "", "")
    assert line["peer"] == PEER_ID
    assert datetime.fromisoformat(line["wall"]).tzinfo is not None
    assert 0 <= opened["t_s"] <= line["t_s"] <= evaluated["t_s"]
    assert (evaluated["loss"], learner["cause"]) == (None, "ü\n")


def test_what_there_is_too_much_of_is_stamped_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID) as events:
        assert events.write(InnerStep(inner_step=1, loss=None, tokens=3)).peer == PEER_ID
    assert [event["event"] for event in read_events(path)] == ["log_opened"]


def test_every_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID) as events:
        events.write(COMMIT)
        assert [event["event"] for event in read_events(path)] == ["log_opened", "carried_over"]


def test_log_goes_on_after_a_restart_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, PEER_ID).close()
    with path.open("ab") as file:
        file.write(b'{"t_s": 1, "event": "com')
    with EventLog(path, PEER_ID) as events:
        events.write(COMMIT)
    assert [event["event"] for event in read_events(path)] == ["log_opened", "log_opened", "carried_over"]


def test_write_after_close_is_our_bug(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", PEER_ID)
    events.close()
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events.write(COMMIT)


def test_log_that_cannot_be_opened_is_the_operators(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written: Is a directory"):
        EventLog(tmp_path, PEER_ID)


def test_full_disk_loses_lines_counts_them_and_warns_once(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small_disk / "events.jsonl"
    ballast = small_disk / "ballast"
    with EventLog(path, PEER_ID) as events, caplog.at_level(logging.WARNING):
        free = os.statvfs(small_disk)
        ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize))
        for _ in range(200):
            events.write(BecameLearner(cause="x" * 100))
        assert events.num_lost > 100
        assert [record.message.split()[0] for record in caplog.records] == ["events_lost"]
        ballast.unlink()
        events.write(COMMIT)
    told = [event["event"] for event in read_events(path)]
    assert told[0] == "log_opened"
    assert told[-1] == "carried_over"
    assert len(told) == 2 + 200 - events.num_lost


def numbers(path: Path) -> list[object]:
    return [event["outer_step"] for event in read_events(path) if event["event"] == "carried_over"]


def test_log_that_has_grown_goes_on_in_a_new_file_and_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID, max_nbytes=1000) as events:
        events.write(STARTED)
        for number in range(50):
            events.write(WorkCarriedOver(outer_step=number))
            assert numbers(path) == list(range(number + 1))
    assert len(older_files(path)) > 4
    assert all(1000 <= older.stat().st_size < 1200 for older in older_files(path).values())
    assert {older.stat().st_mode & 0o777 for older in [path, *older_files(path).values()]} == {0o600}
    with EventLog(path, PEER_ID, max_nbytes=1000) as events:  # the next start
        for number in range(50, 60):
            events.write(WorkCarriedOver(outer_step=number))
    assert numbers(path) == list(range(60))
    assert missing_files(path) == 0


def test_every_further_file_says_what_its_start_is_part_of(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID, max_nbytes=600) as events:
        events.write(STARTED)
        for number in range(20):
            events.write(WorkCarriedOver(outer_step=number))
    older = older_files(path)
    for number, part in [*((number, older[number]) for number in sorted(older)[1:]), (len(older) + 1, path)]:
        head = json.loads(part.read_text().splitlines()[0])
        assert (head["event"], head["schema"]) == ("log_continued", SCHEMA)
        assert (head["run_id"], head["samples_per_data_epoch"]) == ("run-1", 7)
        assert head["before"] == older[number - 1].name


def test_only_so_many_older_files_stay_and_the_loss_can_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID, max_nbytes=600, keep=3) as events:
        for number in range(60):
            events.write(WorkCarriedOver(outer_step=number))
    left = numbers(path)
    assert left == list(range(left[0], 60))  # type: ignore[arg-type, call-overload]
    older = sorted(older_files(path))
    assert len(older) == 3
    assert missing_files(path) == older[0] - 1 > 3


def test_reader_beside_a_writer_sees_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID, max_nbytes=400) as events, ThreadPoolExecutor(1) as other:
        events.write(WorkCarriedOver(outer_step=0))
        is_over = threading.Event()

        def read() -> int:
            num_reads = 0
            while not is_over.is_set() or num_reads == 0:
                found = numbers(path)
                assert found == list(range(len(found)))
                num_reads += 1
            return num_reads

        reading = other.submit(read)
        for number in range(1, 1500):
            events.write(WorkCarriedOver(outer_step=number))
        is_over.set()
        assert reading.result(timeout=30) > 0
    assert numbers(path) == list(range(1500))


def test_reader_goes_on_where_it_was_over_all_files_and_leaves_a_line_without_end_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert list(reader.new()) == []
    found: list[int] = []
    with EventLog(path, PEER_ID, max_nbytes=400, keep=2) as events:
        for number in range(40):
            events.write(WorkCarriedOver(outer_step=number))
            found += [line["outer_step"] for line in reader.new() if line["event"] == "carried_over"]
            assert found == list(range(number + 1))
    with path.open("ab") as file:
        file.write(b'{"event": "learner", ')
        file.flush()
        assert list(reader.new()) == []
        file.write(b'"cause": "x"}\n')
    assert [line["cause"] for line in reader.new()] == ["x"]
    assert list(reader.new()) == []


def test_file_that_cannot_be_renamed_grows_on_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    (tmp_path / "events.jsonl.next").mkdir()  # nothing can be opened there
    with EventLog(path, PEER_ID, max_nbytes=600) as events:
        for number in range(60):
            events.write(WorkCarriedOver(outer_step=number))
        assert numbers(path) == list(range(60))
        assert older_files(path) == {}
        assert 1 <= len(caplog.records) <= 6  # not at every line
        (tmp_path / "events.jsonl.next").rmdir()
        for number in range(60, 120):
            events.write(WorkCarriedOver(outer_step=number))
    assert numbers(path) == list(range(120))
    assert len(older_files(path)) == 1
