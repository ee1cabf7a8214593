"""Streaming DiLoCo in real daemons: four fragments in turn, inner steps while one is under way, deaths and returns."""

import json
from pathlib import Path

import pytest

from elastic.core.records import CommitRecord
from tests.multiprocess.run_harness import (
    OPEN_END,
    Audit,
    Process,
    Run,
    assert_same_commits,
    read_journal,
    running,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

H, P, BATCH, SEQ_LEN = 12, 4, 2, 32
STREAMING = ["--model.dim", "32", "--model.num_layers", "4", "--outer.type", "streaming", "--outer.codec", "int8"]
STREAMING += ["--outer.inner_steps", str(H), "--outer.num_fragments", str(P), "--outer.delay", "2"]


def audit_of(run: Run, *processes: Process) -> dict[str, object]:
    done = run.command("audit", "--json", *(str(process.directory) for process in processes))
    assert (done.code, done.err) == (0, ""), done.out
    report: dict[str, object] = json.loads(done.out)
    assert report["holds"]
    return report


def test_a_killed_peer_comes_back_into_a_streaming_run_that_went_on_to_its_end(tmp_path: Path) -> None:
    last = 120
    with running(tmp_path) as run:
        flags = ["--outer-steps", str(last), "--checkpoint.every", "10", "--eval.every", "40", *STREAMING]
        founder = run.found("--peers", "3", *flags)
        run.wait_for_ticket()
        victim, survivor = run.join(), run.join()
        run.until_step(9, founder, victim, survivor)
        victim.kill()
        run.until_step(founder.step + 6, founder, survivor)
        again = run.join(folder=victim.directory)
        assert run.until_ended(founder, survivor, again) == [0, 0, 0]
        audit_of(run, founder, survivor, again)
        model = tmp_path / "model"
        exported = run.command("export", "--dir", str(survivor.directory), "--out", str(model))
        assert exported.code == 0, exported.err
        assert run.command("sample", "Peers come", "--model", str(model), "--tokens", "8").code == 0
    digests = assert_same_commits(founder, survivor, again)
    assert sorted(digests) == list(range(1, last + 1))
    records = read_journal(founder.directory)
    Audit.of(records)  # nothing is consumed twice
    commits = [record for record in records if isinstance(record, CommitRecord)]
    assert [record.key.fragment for record in commits] == [step % P for step in range(1, last + 1)]
    trained = {event["outer_step"]: event for event in founder.events("trained")}
    assert [trained[step]["inner_step"] for step in range(1, last + 1)] == [H // P * s for s in range(1, last + 1)]
    assert trained[last]["loss"] < 0.75 * trained[1]["loss"]
    assert [event["outer_step"] for event in founder.events("evaluate")] == [40, 80, 120]
    assert founder.events("evaluate")[-1]["loss"] < trained[1]["loss"]


def test_a_peer_that_missed_a_few_fragments_fetches_only_those(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        # It waits for the third, so that only the steps since its checkpoint are missed.
        flags = ["--min-peers", "3", "--outer-steps", str(OPEN_END), "--checkpoint.every", "4", *STREAMING]
        founder = run.found("--peers", "3", *flags)
        run.wait_for_ticket()
        victim, other = run.join(), run.join()
        run.until("checkpoint", lambda: len(victim.events("checkpoint")) >= 2)
        run.until_step(victim.step + 2, victim)
        victim.kill()
        kept = max(event["outer_step"] for event in victim.events("checkpoint"))
        state_nbytes = 8 * victim.events("started")[0]["num_parameters"]
        num_catch_ups = len(victim.events("catch_up"))
        again = run.join(folder=victim.directory)
        run.until("membership", lambda: len(again.events("join")) == 2)
        joined = again.events("join")[-1]["outer_step"]
        run.until_step(joined + 2 * P, founder, other, again)
        run.leave_all()
        audit_of(run, founder, other, again)
    assert_same_commits(founder, other, again)
    num_missed = joined - kept
    assert 0 < num_missed <= 8
    fetched = sum(event["bytes"] for event in again.events("catch_up")[num_catch_ups:])
    # A byte an element of what moved, of eight in the state; no fragment is more than a third of this model.
    assert 0 < fetched <= state_nbytes * num_missed / 3 / 8 * 1.1
    print(f"missed {num_missed} of {P} fragments: {fetched} bytes, {fetched / state_nbytes:.1%} of the state")
