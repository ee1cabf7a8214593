# SPDX-License-Identifier: Apache-2.0
"""What `isthmus status` says of a folder where nothing runs any more."""

from pathlib import Path

import pytest

from isthmus.elastic.observation import Finished, RoundCommitted
from isthmus.trainer.cli.app import run
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.files import MEMBERSHIP_NAME
from isthmus.trainer.record.event_log import FILE_NAME, EventLog
from isthmus.trainer.record.events import CommitDecided, CoordinatorEnded, Started


def started(*, num_parameters: int) -> Started:
    return Started(
        run_id="demo-0123abcd",
        address="127.0.0.1:1",
        num_parameters=num_parameters,
        tokens_per_inner_step=1,
        samples_per_data_epoch=None,
    )


def write_log(folder: Path, *, steps: int, code: int | None, cause: str = "") -> None:
    with EventLog(folder / FILE_NAME, "a" * 16) as log:
        log.write(started(num_parameters=10))
        for step in range(1, steps + 1):
            log.write(RoundCommitted(epoch=1, outer_step=step, fragment=0, digest="d" * 64, final=False, seconds=1.0))
        if code is not None:
            log.write(Finished(code=code, cause=cause))


def test_a_log_of_an_older_version_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its views told less of their members."""
    write_log(tmp_path, steps=3, code=None)
    with (tmp_path / FILE_NAME).open("a") as log:
        view = '"event": "view", "epoch": 1, "outer_step": 3, "members": ["aa"], "apart": []'
        log.write('{"wall": "2026-11-27T00:00:00.000+00:00", ' + view + "}\n")
    assert run(["status", "--dir", str(tmp_path)]) == ExitCode.NOBODY_REACHABLE
    assert "ended without a word" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "cause", "is_joiner", "parts"),
    [
        (0, "the run is complete", False, ["demo-0123abcd is complete at outer step 3 (20", "isthmus export --dir"]),
        (20, "left at outer step 3", True, ["ended with 20 (left at outer step 3) (20", "isthmus join --dir"]),
        (None, "", True, ["ended without a word at outer step 3", "comes back"]),
        (None, "", False, ["ended without a word at outer step 3", "give its command again"]),
    ],
    ids=["complete", "left", "a joiner was killed", "a founder was killed"],
)
def test_how_a_peer_ended_is_told_with_what_to_type_next(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
    cause: str,
    is_joiner: bool,
    parts: list[str],
) -> None:
    write_log(tmp_path, steps=1, code=7, cause="an earlier start")
    write_log(tmp_path, steps=3, code=code, cause=cause)
    if is_joiner:
        (tmp_path / MEMBERSHIP_NAME).write_text("{}")
    assert run(["status", "--dir", str(tmp_path)]) == ExitCode.NOBODY_REACHABLE
    out, err = capsys.readouterr()
    assert out == ""
    (sentence,) = err.splitlines()
    assert sentence.startswith(f"isthmus: nothing runs in {tmp_path}: ")
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    ("complete", "parts"),
    [
        (True, ["demo-0123abcd is complete at outer step 2 (20", "is in the folders of its peers"]),
        (False, ["its coordinator of demo-0123abcd ended with 20 (stopped) at outer step 2", "give its command again"]),
        (None, ["its coordinator of demo-0123abcd ended without a word at outer step 2", "give its command again"]),
    ],
    ids=["complete", "stopped", "killed"],
)
def test_how_a_coordinator_without_a_peer_ended_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], complete: bool | None, parts: list[str]
) -> None:
    with EventLog(tmp_path / FILE_NAME, "a" * 16) as log:
        log.write(started(num_parameters=0))
        for step in (1, 2):
            log.write(
                CommitDecided(epoch=1, outer_step=step, fragment=0, digest="d", members=(), tokens=1, final=False)
            )
        if complete is not None:
            log.write(CoordinatorEnded(complete=complete))
    assert run(["status", "--dir", str(tmp_path)]) == ExitCode.NOBODY_REACHABLE
    (sentence,) = capsys.readouterr().err.splitlines()
    for part in parts:
        assert part in sentence


def test_a_folder_where_nothing_ever_ran_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--dir", str(tmp_path)]) == ExitCode.NOBODY_REACHABLE
    assert "no isthmus runs in" in capsys.readouterr().err
