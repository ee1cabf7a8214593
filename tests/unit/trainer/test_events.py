"""The event log: one whole line an event, and a full disk never reaches the training."""

import json
import logging
import os
from datetime import datetime
from pathlib import Path

import pytest

from trainer.errors import EnvironmentFault
from trainer.events import SCHEMA, EventLog, read_events

PEER_ID = "0123456789abcdef"


def test_events_are_lines_with_what_every_line_has(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID) as events:
        events.emit("commit", epoch=2, outer_step=3, bytes=10, seconds=0.5, members=["a", "b"])
        events.emit("loss", loss=float("nan"), note="ü\n")
    opened, commit, loss = (json.loads(line) for line in path.read_text().splitlines())
    assert opened["event"] == "log_opened"
    assert opened["schema"] == SCHEMA
    assert {key: commit[key] for key in commit if key not in ("t_s", "wall")} == {
        "peer": PEER_ID,
        "event": "commit",
        "epoch": 2,
        "outer_step": 3,
        "bytes": 10,
        "seconds": 0.5,
        "members": ["a", "b"],
    }
    assert datetime.fromisoformat(commit["wall"]).tzinfo is not None
    assert 0 <= opened["t_s"] <= commit["t_s"] <= loss["t_s"]
    assert loss["loss"] is None


def test_every_line_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, PEER_ID) as events:
        events.emit("commit")
        assert [event["event"] for event in read_events(path)] == ["log_opened", "commit"]


def test_log_goes_on_after_a_restart_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, PEER_ID).close()
    with path.open("ab") as file:
        file.write(b'{"t_s": 1, "event": "com')
    with EventLog(path, PEER_ID) as events:
        events.emit("commit")
    assert [event["event"] for event in read_events(path)] == ["log_opened", "log_opened", "commit"]


def test_fields_that_every_line_has_cannot_be_overwritten(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", PEER_ID) as events, pytest.raises(ValueError, match="reserved"):
        events.emit("commit", peer="me")


def test_emit_after_close_is_our_bug(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", PEER_ID)
    events.close()
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events.emit("commit")


def test_log_that_cannot_be_opened_is_the_operators(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written: Is a directory"):
        EventLog(tmp_path, PEER_ID)


def test_full_disk_loses_lines_counts_them_and_warns_once(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small_disk / "events.jsonl"
    ballast = small_disk / "ballast"
    with EventLog(path, PEER_ID) as events, caplog.at_level(logging.WARNING):
        free = os.statvfs(small_disk)
        ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize))
        for number in range(200):
            events.emit("commit", number=number, padding="x" * 100)
        assert events.num_lost > 100
        assert [record.message.split()[0] for record in caplog.records] == ["events_lost"]
        ballast.unlink()
        events.emit("recovered")
    told = [event["event"] for event in read_events(path)]
    assert told[0] == "log_opened"
    assert told[-1] == "recovered"
    assert len(told) == 2 + 200 - events.num_lost
