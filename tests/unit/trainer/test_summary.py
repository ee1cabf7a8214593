# SPDX-License-Identifier: Apache-2.0
"""What people read while a peer trains, and when it has ended."""

from pathlib import Path

import msgspec
import pytest

from isthmus.trainer.record.status import MemberStatus, RoundStatus, Status
from isthmus.trainer.record.summary import format_duration, live_line, shown, summary

STATUS = Status(
    run_id="demo-0123abcd",
    peer_id="0123456789abcdef",
    incarnation=1,
    pid=1,
    phase="training",
    outer_step=1234,
    total_outer_steps=2000,
    inner_step=499,
    inner_steps_per_round=500,
    members=tuple(MemberStatus(peer_id=f"{n:016x}", incarnation=1, address="127.0.0.1:1") for n in range(64)),
    num_commits=9_000,
    num_inner_steps=4_500_000,
    peers_seen=70,
    seconds_left=359_999.4,
    first_loss=5.5119,
    train_loss=3.0,
    validation_loss=2.5,
    tokens=9_000_000_000,
    tokens_per_s=1_234_567.0,
    sent_bytes=80_600_000,
    received_bytes=79_000_000,
    last_round=RoundStatus(outer_step=99_999, seconds=1, exchange_seconds=1, bytes=1, num_members=64, loss=2.25),
    uptime_s=7290.0,
)


def test_the_live_line_of_a_large_run_fits_into_80_columns() -> None:
    assert live_line(STATUS) == ("step 1234/2000, round 499/500, loss 3.000, 1.23M tok/s, 64 peers, 99:59:59 left")
    slow = msgspec.structs.replace(STATUS, tokens_per_s=123_456.0, seconds_left=9.0)
    assert live_line(slow) == "step 1234/2000, round 499/500, loss 3.000, 123k tok/s, 64 peers, 0:09 left"


def test_a_peer_that_does_not_train_says_what_it_does_instead() -> None:
    early = Status(run_id="r", peer_id="p", incarnation=1, pid=1, phase="learning", outer_step=0, total_outer_steps=9)
    assert live_line(early) == "learning, step 0/9, 0 peers"


def test_the_end_is_five_lines_and_the_next_command() -> None:
    text = summary(STATUS, 0, Path("/somewhere/step-1"), "isthmus export --dir x")
    assert text.splitlines() == [
        "run demo-0123abcd is complete",
        "  steps       1234 of 2000, 9,000 commits and 4,500,000 inner steps here",
        "  loss        5.5119 -> 2.2500, held out 2.5000",
        "  tokens      9,000,000,000 in 2:01:30, 1,234,567 a second",
        "  peers       70 other peers, 80.6 MB sent, 79.0 MB received",
        "  checkpoint  /somewhere/step-1",
        "next: isthmus export --dir x",
    ]


@pytest.mark.parametrize(("code", "how"), [(20, "was left"), (8, "ended here with 8"), (99, "ended here with 99")])
def test_other_ends_are_told_as_what_they_are(code: int, how: str) -> None:
    bare = msgspec.structs.replace(STATUS, first_loss=None, validation_loss=None, peers_seen=1)
    lines = summary(bare, code, None, None).splitlines()
    assert lines[0] == f"run demo-0123abcd {how}"
    assert lines[2] == "  loss        unknown -> 2.2500"
    assert lines[4].startswith("  peers       1 other peer, ")
    assert lines[5:] == ["  checkpoint  none"]


def test_durations_and_paths_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [format_duration(s) for s in (0.4, 61, 3599.6, 90061)] == ["0:00", "1:01", "1:00:00", "25:01:01"]
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "x") == "runs/x"
    assert shown(Path("/somewhere")) == "/somewhere"
