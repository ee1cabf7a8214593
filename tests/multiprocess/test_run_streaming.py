# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo in real daemons: four fragments in turn, inner steps while one is under way, deaths and returns."""

import json
from pathlib import Path

import pytest

from isthmus.elastic.core.records import CommitRecord
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import OPEN_END, Run, is_frozen_between_checkpoints, newest_checkpoint, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

H, P, BATCH = 12, 4, 2
STREAMING = ["--model.dim", "32", "--model.num_layers", "4", "--outer.type", "streaming", "--outer.codec", "int8"]
STREAMING += ["--outer.inner_steps", str(H), "--outer.num_fragments", str(P), "--outer.delay", "2"]


def audit_of(run: Run, *processes: Process) -> dict[str, object]:
    done = run.command("audit", "--json", *(str(process.directory) for process in processes))
    assert (done.code, done.err) == (0, ""), done.out
    report: dict[str, object] = json.loads(done.out)
    assert report["holds"]
    return report


def test_a_streaming_run_goes_through_its_fragments_to_the_end_and_its_model_is_whole(tmp_path: Path) -> None:
    last = 80
    with running(tmp_path) as run:
        tokens = H // P * BATCH * 32  # of an outer step
        flags = ("--outer-steps", str(last), "--checkpoint.every", "20", "--eval.every", str(20 * tokens), *STREAMING)
        founder = run.found(*flags)
        assert run.until_ended(founder) == [0]
        audit_of(run, founder)
        model = tmp_path / "model"
        exported = run.command("export", "--dir", str(founder.directory), "--out", str(model))
        assert exported.code == 0, exported.err
        assert run.command("sample", "Peers come", "--model", str(model), "--tokens", "8").code == 0
    records = read_journal(founder.directory)
    commits = [record for record in records if isinstance(record, CommitRecord)]
    assert [record.key.fragment for record in commits] == [step % P for step in range(1, last + 1)]
    assert len(Audit.of(records).consumed) == last * H // P * BATCH
    trained = founder.events("trained")
    assert [event["inner_step"] for event in trained] == [H // P * step for step in range(1, last + 1)]
    judged = founder.events("evaluate")
    assert [event["outer_step"] for event in judged] == [20, 40, 60, 80]
    assert judged[-1]["loss"] < 0.75 * trained[0]["loss"]


def test_a_killed_peer_comes_back_into_a_streaming_run_that_went_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--checkpoint.every", "10", *STREAMING)
        run.wait_for_ticket()
        victim, survivor = run.join(), run.join()
        run.until_step(9, founder, victim, survivor)
        victim.kill()
        num_before = len(victim.events("join"))
        run.until_step(founder.step + 6, founder, survivor)
        again = run.join(folder=victim.directory)
        run.until("membership", lambda: len(again.events("join")) > num_before)
        run.until_step(again.events("join")[-1]["outer_step"] + 2 * P, founder, survivor, again)
        run.leave_all()
        audit_of(run, founder, survivor, again)
    digests = assert_same_commits(founder, survivor, again)
    assert sorted(digests) == list(range(1, len(digests) + 1))
    Audit.of(read_journal(founder.directory))  # nothing is consumed twice


def test_a_peer_that_missed_a_few_fragments_fetches_only_those(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        # It waits for the third, so that only the steps since its checkpoint are missed.
        flags = ["--min-peers", "3", "--outer-steps", str(OPEN_END), "--checkpoint.every", "4", *STREAMING]
        founder = run.found("--peers", "3", *flags)
        run.wait_for_ticket()
        victim, other = run.join(), run.join()
        run.until("checkpoint", lambda: len(victim.events("checkpoint")) >= 2)
        run.until("a commit after the newest checkpoint", lambda: is_frozen_between_checkpoints(victim))
        victim.kill()
        kept = newest_checkpoint(victim)
        state_nbytes = 8 * victim.events("started")[0]["num_parameters"]
        num_catch_ups, num_joins = len(victim.events("catch_up")), len(victim.events("join"))
        again = run.join(folder=victim.directory)
        run.until("membership", lambda: len(again.events("join")) > num_joins)
        joined = again.events("join")[-1]["outer_step"]
        run.until_step(joined + 2 * P, founder, other, again)
        run.leave_all()
        audit_of(run, founder, other, again)
    assert_same_commits(founder, other, again)
    num_missed = joined - kept
    assert 0 < num_missed <= 8
    fetched = sum(event["bytes"] for event in again.events("catch_up")[num_catch_ups:])
    # A byte an element of what moved, of eight in the state; no fragment is more than a third of this model.
    assert fetched <= state_nbytes * num_missed / 3 / 8 * 1.1
    print(f"missed {num_missed} of {P} fragments: {fetched} bytes, {fetched / state_nbytes:.1%} of the state")
