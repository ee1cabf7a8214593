# SPDX-License-Identifier: Apache-2.0
"""`isthmus track`: what a peer wrote down, in each of the trackers."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isthmus.elastic.observation import Finished
from isthmus.trainer.cli.app import run
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.record.event_log import FILE_NAME, EventLog
from isthmus.trainer.record.events import Evaluate, Round, Started, Trained

REPOSITORY = Path(__file__).parents[3]
ME = "a" * 16


def trained(outer_step: int, loss: float | None) -> Trained:
    return Trained(
        epoch=1,
        outer_step=outer_step,
        inner_step=4 * outer_step,
        loss=loss,
        tokens=300,
        train_s=1.0,
        wait_s=0.5,
        world_size=3,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A peer's, which made two commits, went back by one, made it again, and ended."""
    with EventLog(tmp_path / FILE_NAME, ME) as log:
        log.write(
            Started(
                run_id="demo-0123abcd",
                address="127.0.0.1:1",
                num_parameters=10,
                tokens_per_inner_step=75,
                samples_per_data_epoch=None,
            )
        )
        for outer_step, loss in ((1, 3.0), (2, 2.5), (2, 2.25)):
            log.write(
                Round(
                    epoch=1,
                    outer_step=outer_step - 1,
                    fragment=0,
                    members=(ME,),
                    bytes_sent=2_000_000,
                    bytes_received=1_000_000,
                    seconds=0.25,
                    plan="butterfly",
                    predicted_s=None,
                )
            )
            log.write(trained(outer_step, loss))
        log.write(Evaluate(outer_step=2, loss=2.75))
        log.write(trained(3, None))
        log.write(Finished(code=0, cause="the run is complete"))
    return tmp_path


def test_tensorboard_gets_every_figure_under_the_fields_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second call writes the same anew
        assert run(["track", "--dir", str(folder)]) == ExitCode.DONE
        assert capsys.readouterr().out == "3\n"
    shown = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False)
    shown.Reload()

    def points(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in shown.Scalars(name)]

    assert points("loss") == [(1, 3.0), (2, 2.5), (2, 2.25)]
    assert points("eval_loss") == [(2, 2.75)]
    assert points("tps") == [(step, 200.0) for step in (1, 2, 2, 3)]
    assert points("tokens") == [(1, 300.0), (2, 600.0), (2, 900.0), (3, 1200.0)]
    assert points("inner_step") == [(1, 4.0), (2, 8.0), (2, 8.0), (3, 12.0)]
    assert points("sent_mb")[-1] == (3, 6.0)
    assert points("received_mb")[-1] == (3, 3.0)
    assert points("exchange_s")[0] == (1, 0.25)
    assert points("peers")[0] == (1, 3.0)
    assert {"train_s", "wait_s"} < set(shown.Tags()["scalars"])


def test_wandb_gets_them_and_says_so(folder: Path) -> None:
    done = subprocess.run(  # its library is for a process of its own
        [sys.executable, "-m", "isthmus.trainer.cli", "track", "--dir", str(folder), "--to", "wandb"],
        cwd=folder,
        env=dict(os.environ) | {"WANDB_MODE": "offline", "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "3\n"
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    last = dict(re.findall(r"(?m)^wandb: +(outer_step|loss|eval_loss|tokens) ([\d.]+)$", done.stderr))
    assert last == {"outer_step": "3", "loss": "2.25", "eval_loss": "2.75", "tokens": "1200"}


def test_trackio_gets_them_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    assert run(["track", "--dir", str(folder), "--to", "trackio", "--project", "far"]) == ExitCode.DONE
    with sqlite3.connect(folder / "trackio" / "far.db") as store:
        rows = [json.loads(row) for (row,) in store.execute("select metrics from metrics order by id")]
    store.close()
    assert [row["loss"] for row in rows if "loss" in row] == [3.0, 2.5, 2.25]
    assert [row["outer_step"] for row in rows if "eval_loss" in row] == [2]


def test_a_folder_where_no_peer_ever_ran_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["track", "--dir", str(tmp_path)]) == ExitCode.NOBODY_REACHABLE
    assert "no peer has ever run in" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named_with_the_cure(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert run(["track", "--dir", str(folder), "--to", "trackio"]) == ExitCode.ENVIRONMENT
    assert capsys.readouterr().err == "isthmus: trackio is not installed; pip install trackio\n"


def test_a_library_that_does_not_begin_is_this_machines_affair(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise ValueError("No API key configured.\nUse `wandb login`")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert run(["track", "--dir", str(folder), "--to", "wandb"]) == ExitCode.ENVIRONMENT
    assert capsys.readouterr().err.startswith("isthmus: wandb does not begin: No API key configured; see to that, or")


def test_a_folder_that_tensorboard_cannot_have_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / FILE_NAME / "tensorboard"
    assert run(["track", "--dir", str(folder), "--out", str(out)]) == ExitCode.ENVIRONMENT
    expected = f"isthmus: {out} cannot be written: Not a directory; name another folder with --out\n"
    assert capsys.readouterr().err == expected
