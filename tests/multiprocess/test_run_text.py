# SPDX-License-Identifier: Apache-2.0
"""The run's text comes along: a joiner that lacks it gets it from the peers, and trains as if it had always had it."""

import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.other_python import VERSION
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, running
from tests.multiprocess.test_run_audit import audited

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

MIB = 1 << 20
NOBODY_REACHABLE, REFUSED = 4, 5


def _text_of(peer: Process) -> dict[str, Any]:
    """What the newest start of this peer has said about its text."""
    return peer.events("text")[-1]


def _leave(run: Run, *processes: Process) -> None:
    for process in processes:
        process.signal(signal.SIGINT)
    assert run.until_ended(*processes) == [LEFT] * len(processes)


def _write_text(path: Path, nbytes: int) -> Path:
    """Lines that do not repeat."""
    words = random.Random(nbytes)
    path.write_text("".join(f"{words.getrandbits(256):064x} and so on\n" for _ in range(nbytes // 75)))
    return path


def _other_python(folder: Path) -> Sequence[str]:
    """How `isthmus` starts where the standard library is another one."""
    folder.mkdir()
    (folder / "other.py").write_text("# the same module, a patch version later\n" * 100)
    (folder / "another.py").write_text("# and one more\n" * 100)
    return (sys.executable, str(Path(__file__).with_name("other_python.py")), str(folder))


def test_two_pythons_of_different_patch_versions_train_together_on_the_default_text(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        settings = ("-c", str(run.config), "--data.limit", "3MB", "--outer-steps", str(OPEN_END))
        founder = run.start("up", "--ticket-file", str(run.ticket), "--node.threads", "1", *settings)
        run.wait_for_ticket()
        program = _other_python(tmp_path / "other")
        joiner = run.start("join", f"@{run.ticket}", "--node.threads", "1", program=program)
        run.until_step(3, founder, joiner)
        run.leave_all()
        audited(run, founder, joiner)
    assert_same_commits(founder, joiner)
    told, fetched = _text_of(founder), _text_of(joiner)
    assert (told["source"], fetched["source"]) == ("machine", "peers")
    assert fetched["peers"] == [founder.peer_id]
    assert [fetched[name] for name in ("digest", "bytes", "description")] == [
        told[name] for name in ("digest", "bytes", "description")
    ]
    assert fetched["fetched_bytes"] == told["bytes"] > MIB
    assert VERSION not in fetched["description"]
    assert f"from peers {founder.peer_id[:4]}" in joiner.outcome().err


def test_a_joiner_gets_the_text_from_a_peer_that_has_got_it_itself_when_the_first_owner_is_gone(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        text = _write_text(tmp_path / "own.txt", 3 * MIB)
        given = ("--node.data", str(text))
        coordinator = run.coordinator("--data.path", "none", *given, "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        owner = run.join(*given)
        run.until_step(1, owner)
        second = run.join()
        run.until_step(1, second)
        owner.kill()
        text.unlink()
        third = run.join()
        run.until_step(second.step + 3, second, third)

        # The copy is found again without anybody's help.
        _leave(run, third)
        again = run.join(folder=third.directory)
        run.until_step(second.step + 3, second, again)
        _leave(run, second, again)
        coordinator.signal(signal.SIGINT)
        assert run.until_ended(coordinator) == [LEFT]
        audited(run, coordinator, owner, second, third)
    assert_same_commits(owner, second, third)
    texts = [_text_of(owner), _text_of(second), *again.events("text")]
    assert [one["source"] for one in texts] == ["machine", "peers", "peers", "copy"]
    assert [one["peers"] for one in texts] == [[], [owner.peer_id], [second.peer_id], []]
    assert len({one["digest"] for one in texts}) == 1
    assert texts[-1]["fetched_bytes"] == 0


def test_a_joiner_that_is_killed_while_it_fetches_goes_on_where_it_was_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        text = _write_text(tmp_path / "own.txt", 48 * MIB)
        given = ("--node.data", str(text), "--max-upload", "2MB")
        founder = run.found("--data", "none", *given, "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        second = run.join(*given)
        run.until_step(1, founder, second)
        step = founder.step
        joiner = run.join()
        log = joiner.console.with_suffix(".err")
        run.until("progress", lambda: " a second from " in log.read_text())
        joiner.kill()
        assert founder.step > step, "the members train on"
        (partial,) = (joiner.directory / "text").glob("*.partial")
        there_nbytes = partial.stat().st_size // MIB * MIB
        assert MIB <= there_nbytes < 48 * MIB

        again = run.join(folder=joiner.directory)
        run.until_step(3, founder, second, again)
        run.leave_all()
        audited(run, founder, second, again)
    told = _text_of(again)
    assert told["source"] == "peers"
    assert told["fetched_bytes"] <= told["bytes"] - there_nbytes
    assert told["fetched_bytes"] / told["seconds"] < 2.4e6, "the cap holds"
    assert " of it were here)" in again.outcome().err
    assert_same_commits(founder, second, again)


def test_a_text_that_is_named_is_used_or_refused_and_where_nobody_has_it_a_joiner_says_so(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        own, other = _write_text(tmp_path / "own.txt", MIB), _write_text(tmp_path / "other.txt", MIB + 200)
        run.coordinator("--data.path", "none", "--node.data", str(own), "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        refused, empty_handed = run.join("--data", str(other)), run.join()
        assert refused.outcome().code == REFUSED
        assert "the text here (other.txt) is not the run's" in refused.outcome().sentences[0]
        ended = empty_handed.outcome()
        assert ended.code == NOBODY_REACHABLE
        (sentence,) = ended.sentences
        assert "the run's text is not on this machine" in sentence
        assert "a coordinator alone gives nothing" in sentence
        assert "name a copy of it with --data" in sentence
        named = run.join("--data", str(own))
        run.until_step(1, named)
        assert (_text_of(named)["source"], _text_of(named)["fetched_bytes"]) == ("machine", 0)
        _leave(run, named)
