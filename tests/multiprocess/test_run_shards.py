# SPDX-License-Identifier: Apache-2.0
"""A run over a prepared text: each sample once, whoever has which shards, and whoever is killed when."""

import functools
import http.server
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.trainer.data.prep.preparing import Settings, prepare
from isthmus.trainer.data.prepared import PreparedText
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, running
from tests.multiprocess.test_run_audit import audited
from tests.unit.trainer.prep_rig import documents, write_jsonl, write_parquet

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

SHARD_NBYTES = 4 << 10
"""63 samples: a few outer steps of two peers."""
VOCABULARY = 300
ONE_AT_A_TIME = ("--data.shuffle_shards", "1", "--data.document_masks", "true", "--eval.every", "500")


def _prepared(folder: Path) -> PreparedText:
    sources = (
        (write_jsonl(folder / "lines.jsonl", documents(800, seed=1)), 1.0),
        (write_parquet(folder / "rows.parquet", documents(800, seed=2)), 1.0),
    )
    settings = Settings(
        sources=sources,
        out=folder / "prepared",
        train_tokenizer=VOCABULARY,
        shard_nbytes=SHARD_NBYTES,
        validation_fraction=0.05,
    )
    return prepare(settings, lambda _progress: None)


def _shards(process: Process) -> list[str]:
    """Names of the training shards that came from elsewhere."""
    return [event["name"] for event in process.events("shard") if event["name"].startswith("train-")]


def _said(process: Process) -> str:
    """Its log."""
    return process.console.with_suffix(".err").read_text()


def _copies(process: Process) -> int:
    """Whole parts in the peer's folder, the index and the tokenizer included."""
    return sum(1 for path in (process.directory / "text").iterdir() if len(path.name) == 64)


def test_no_sample_is_lost_or_doubled_though_one_has_the_shards_one_fetches_them_and_all_are_killed(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        text = _prepared(tmp_path)
        num_shards = len(text.index.train)
        assert num_shards > 50
        owns = (
            "--data",
            "none",
            "--node.data",
            str(tmp_path / "prepared"),
            *ONE_AT_A_TIME,
            "--outer-steps",
            str(OPEN_END),
        )
        owns = (*owns, "--checkpoint.every", "2", "--members.durable", "true")
        founder = run.found(*owns)
        run.wait_for_ticket()
        run.until_step(1, founder)
        bounded = ("--node.data_cache", "20KB")
        joiner = run.join(*bounded)
        run.until("two shards", lambda: len(_shards(joiner)) >= 2)
        run.until_step(3, joiner)
        joiner.kill()
        again = run.join(*bounded, folder=joiner.directory)
        run.until_step(joiner.step + 8, founder, again)

        # The power goes.
        founder.kill()
        again.kill()
        founder = run.found(*owns, folder=founder.directory)
        run.wait_for_ticket()
        again = run.join(*bounded, folder=joiner.directory)
        before = founder.step
        run.until_step(before + 6, founder, again)
        run.leave_all()
        report = audited(run, founder, again)[""]

    assert report["account"]["num_commits"] >= before + 6
    (told,) = {event["digest"] for process in (founder, again) for event in process.events("text")}
    assert told == text.digest
    assert {tuple(event["peers"]) for event in again.events("shard")} == {(founder.peer_id,)}
    assert len(_shards(again)) < num_shards, "it needs those that its leases touch"
    assert _copies(again) <= 2 + 8 + 5, "index, tokenizer, held-out shards, and what the bound leaves"
    assert not founder.events("shard")
    assert again.events("evaluate") or founder.events("evaluate")


def test_peers_that_lack_a_shard_wait_while_the_only_one_that_has_it_is_suspended(tmp_path: Path) -> None:
    """Found before: after 30 s they ended with 4, though a coordinator was there."""
    with running(tmp_path) as run:
        _prepared(tmp_path)
        text = ("--node.data", str(tmp_path / "prepared"))
        settings = (*text, "--members.stall-timeout", "60s", *ONE_AT_A_TIME)
        coordinator = run.coordinator("--data.path", "none", *settings, "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        owner = run.join(*text)
        run.until_step(1, owner)
        lacking = [run.join("--node.data_cache", "20KB") for _ in range(2)]
        run.until("shards", lambda: all(_shards(process) for process in lacking))
        owner.signal(signal.SIGSTOP)
        run.until("a word on what is missing", lambda: any("shard_missing" in _said(process) for process in lacking))
        before = max(process.step for process in lacking)
        owner.signal(signal.SIGCONT)
        run.until_step(before + 6, owner, *lacking)
        for process in (owner, *lacking):
            process.signal(signal.SIGINT)
        assert run.until_ended(owner, *lacking) == [LEFT] * 3, run.story()
        coordinator.signal(signal.SIGINT)
        assert run.until_ended(coordinator) == [LEFT], run.story()
        audited(run, coordinator, owner, *lacking)
    assert all(_said(process).count("shard_missing") <= 1 for process in lacking)


def test_shards_come_from_a_url_and_from_a_peer_that_has_them_itself_from_there(tmp_path: Path) -> None:
    with running(tmp_path) as run, _served(tmp_path) as url:
        text = _prepared(tmp_path)
        founder = run.found("--data", f"{url}/prepared", *ONE_AT_A_TIME, "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        run.until_step(2, founder)
        joiner = run.join("--data", f"file://{tmp_path}/prepared")
        third = run.join()
        run.until_step(3, joiner, third)
        run.leave_all()
        audited(run, founder, joiner, third)
    assert_same_commits(founder, joiner, third)
    sources = [process.events("text")[-1]["source"] for process in (founder, joiner, third)]
    assert sources == ["url", "url", "peers"]
    assert {event["url"] for event in founder.events("shard")} == {f"{url}/prepared"}
    assert {event["url"] for event in joiner.events("shard")} == {f"file://{tmp_path}/prepared"}
    assert third.events("shard")
    assert all(event["url"] is None for event in third.events("shard"))
    assert {event["digest"] for event in third.events("text")} == {text.digest}


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The folder over HTTP."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
