# SPDX-License-Identifier: Apache-2.0
"""`isthmus audit`: a run's folders against each other, what can be wrong in each, and how that is told."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.audit import Finding
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import CommitRecord, Record, ViewRecord
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.observation import (
    CatchUpEnded,
    Event,
    RoundBroke,
    RoundCommitted,
    RoundStaged,
    RoundStarted,
    ViewInstalled,
)
from isthmus.elastic.state.digest import CHUNK_NBYTES, Hasher, StateManifest, describe_state
from isthmus.trainer.audit.audit import RunAudit, audit_runs
from isthmus.trainer.audit.checkpoints import read_checkpoints
from isthmus.trainer.audit.report import render_audit
from isthmus.trainer.checkpoint.checkpoint import (
    FOLDER_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointMeta,
    CheckpointStore,
    Manifest,
)
from isthmus.trainer.checkpoint.proof import prove_checkpoint
from isthmus.trainer.cli.app import run
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault, ExitCode
from isthmus.trainer.record import events
from isthmus.trainer.record.event_log import FILE_NAME, EventLog
from isthmus.trainer.run.founding import JOURNAL_NAME
from tests.unit.elastic.machines import held, key
from tests.unit.elastic.test_audit import A, B, C, history

RUN_ID = "demo-0123abcd"
TENSORS = {"momentum": torch.arange(5.0), "anchor": torch.linspace(0, 1, 50)}


def manifest_of(step: int, tensors: dict[str, Tensor]) -> StateManifest:
    hasher = Hasher(num_threads=1)
    try:
        parts = hasher.describe([(name, memoryview(tensor.numpy()).cast("B")) for name, tensor in tensors.items()])
    finally:
        hasher.close()
    return describe_state(step, parts)


@functools.cache
def digest_of(step: int) -> bytes:
    return manifest_of(step, TENSORS).digest


def with_state(step: int, digest: bytes) -> list[Record]:
    """The history with another digest at this step, in every record that names it."""
    records: list[Record] = []
    for record in history():
        match record:
            case CommitRecord():
                made = digest if record.outer_step == step else record.digest
                before = digest if record.outer_step == step + 1 else record.previous
                records.append(msgspec.structs.replace(record, digest=made, previous=before))
            case ViewRecord(view=view) if view.outer_step == step:
                records.append(msgspec.structs.replace(record, view=msgspec.structs.replace(view, digest=digest)))
            case _:
                records.append(record)
    return records


def write_journal(folder: Path, records: Sequence[Record], run_id: str = RUN_ID) -> Path:
    journal = Journal(folder / JOURNAL_NAME, run_id=run_id)
    for record in records:
        journal.append(record)
    journal.close()
    return folder


def started(run_id: str) -> events.Started:
    return events.Started(
        run_id=run_id, address="", num_parameters=1, tokens_per_inner_step=1, samples_per_data_epoch=12
    )


def write_log(folder: Path, peer_id: str, lines: Sequence[Event], run_id: str | None = RUN_ID) -> Path:
    folder.mkdir(exist_ok=True)
    with EventLog(folder / FILE_NAME, peer_id) as log:
        if run_id is not None:
            log.write(started(run_id))
        for event in lines:
            log.write(event)
    return folder


def save(
    folder: Path,
    step: int,
    digest: bytes | None = None,
    *,
    run_id: str = RUN_ID,
    next_index: int = 20,
    returned: tuple[IndexRange, ...] = (IndexRange(16, 20),),
    certificate: bytes = b"",
) -> Path:
    """A checkpoint; by default as the history has it after step 2."""
    meta = CheckpointMeta(
        run_id=run_id,
        outer_step=step,
        digest=digest or digest_of(step),
        run_manifest=b"{}",
        next_index=next_index,
        returned=returned,
        certificate=certificate,
    )
    return CheckpointStore(folder / FOLDER_NAME, keep=9).save(meta, TENSORS)


def reseal(checkpoint: Path, **fields: object) -> None:
    """Change a manifest as somebody would who knows how it is sealed."""
    path = checkpoint / MANIFEST_NAME
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **fields).sealed()))


@pytest.fixture
def founder(tmp_path: Path) -> Path:
    """The folder of A, in which the coordinator lives."""
    return write_journal(tmp_path / "founder", with_state(2, digest_of(2)))


def audit_run(folders: Sequence[Path]) -> RunAudit:
    """Of the only run here."""
    (audited,) = audit_runs(folders)
    return audited


def findings(audited: RunAudit, check: str) -> tuple[Finding, ...]:
    """What this check found; nothing else found anything."""
    assert all(verdict.holds for verdict in audited.verdicts if verdict.check != check), audited.findings
    (verdict,) = (verdict for verdict in audited.verdicts if verdict.check == check)
    return verdict.findings


def commit_line(step: int, epoch: int, digest: bytes, *, fragment: int = 0, final: bool = False) -> RoundCommitted:
    return RoundCommitted(
        epoch=epoch, outer_step=step, fragment=fragment, digest=digest.hex(), final=final, seconds=1.0
    )


def decision(step: int, epoch: int, digest: bytes) -> events.CommitDecided:
    return events.CommitDecided(
        epoch=epoch, outer_step=step, fragment=0, digest=digest.hex(), members=(), tokens=0, final=False
    )


def view(epoch: int, *members: PeerRef) -> ViewInstalled:
    return ViewInstalled(epoch=epoch, outer_step=0, members=tuple(member.peer_id for member in members), apart=())


def view_decided(epoch: int, *members: PeerRef) -> events.ViewDecided:
    names = tuple(member.peer_id for member in members)
    return events.ViewDecided(epoch=epoch, outer_step=0, members=names, apart=(), cause="", excused=())


def genesis(digest: bytes) -> events.Genesis:
    return events.Genesis(outer_step=0, digest=digest.hex(), next_index=0)


def vote(digest: bytes) -> RoundStaged:
    return RoundStaged(epoch=1, outer_step=0, fragment=0, digest=digest.hex(), seconds=0.1)


def caught_up(step: int, digest: bytes) -> CatchUpEnded:
    return CatchUpEnded(outer_step=step, digest=digest.hex(), cause="", bytes=1, seconds=0.1)


def weighed(weight: float) -> RoundStarted:
    return RoundStarted(epoch=1, outer_step=0, fragment=0, weight=weight)


TRUE_LINES: list[Event] = [
    genesis(held(0).digest),
    view_decided(1, A, B),
    view(1, A, B),
    events.Lease(of=A.peer_id, serial=1, samples=10),
    weighed(8.0),
    vote(held(1).digest),
    RoundBroke(epoch=1, outer_step=0, fragment=0, suspects=(), cause="of no interest here"),
    commit_line(1, 1, held(1).digest),
    decision(1, 1, held(1).digest),
    events.LeaseReturned(of=B.peer_id, epoch=2, samples=6),
    commit_line(2, 2, digest_of(2)),
    caught_up(2, digest_of(2)),
    CatchUpEnded(outer_step=None, digest=None, cause="no donor", bytes=0, seconds=0.1),
    commit_line(3, 3, held(3).digest, final=True),
]


def test_logs_and_checkpoints_that_say_what_the_journal_says_are_counted_and_nothing_is_changed(
    founder: Path, tmp_path: Path
) -> None:
    write_log(founder, A.peer_id, TRUE_LINES)
    other = write_log(tmp_path / "other", C.peer_id, TRUE_LINES[-4:])
    save(founder, 2)
    save(other, 2)
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    audited = audit_run([other, founder])
    assert audited.holds, audited.findings
    assert {path: path.stat() for path in tmp_path.rglob("*")}.keys() == before.keys()
    assert [(item.check, item.num_looked_at) for item in audited.verdicts[-2:]] == [("logs", 17), ("checkpoints", 2)]
    assert audited.journal == founder / JOURNAL_NAME
    data = audited.proved.samples.data_epochs
    assert data is not None
    assert data.num_samples == 12


def test_logs_in_several_files_are_audited_as_one_and_what_is_gone_is_told(founder: Path) -> None:
    def write(keep: int) -> None:
        with EventLog(founder / FILE_NAME, A.peer_id, max_nbytes=300, keep=keep) as log:
            log.write(started(RUN_ID))
            for event in TRUE_LINES:
                log.write(event)

    write(keep=0)
    audited = audit_run([founder])
    assert (audited.holds, audited.missing_logs) == (True, ())
    assert audited.verdicts[-2].num_looked_at == 13
    write(keep=2)  # the next start, of another configuration
    audited = audit_run([founder])
    assert audited.holds
    assert 0 < audited.verdicts[-2].num_looked_at < 13
    (missing,) = audited.missing_logs
    assert missing.folder == founder
    assert missing.number > 10
    data = audited.proved.samples.data_epochs
    assert data is not None
    assert data.num_samples == 12


WRONG_LINES: dict[str, tuple[Event, str, int | None, str]] = {
    "commit lost": (commit_line(4, 3, held(4).digest), "I3", None, "saw step 4 committed as 0004"),
    "commit changed": (commit_line(1, 1, held(5).digest), "I1", 4, "saw step 1 committed as 0005"),
    "commit of another epoch": (commit_line(1, 2, held(1).digest), "I3", 4, "in epoch 2 (fragment 0)"),
    "commit of another fragment": (commit_line(1, 1, held(1).digest, fragment=3), "I3", 4, "(fragment 3)"),
    "last commit": (commit_line(1, 1, held(1).digest, final=True), "I3", 4, "as the last one"),
    "not the last commit": (commit_line(3, 3, held(3).digest), "I3", 11, "as one of many"),
    "decision lost": (decision(4, 3, held(4).digest), "I3", None, "does not hold it"),
    "view lost": (view(4), "I8", None, "was told of view 4 of nobody"),
    "view changed": (view_decided(2, A, B), "I8", 5, "has other members"),
    "beginning changed": (genesis(held(5).digest), "I5", 0, "run began with"),
    "caught up to another state": (caught_up(1, held(5).digest), "I5", 4, "caught up to step 1 as 0005"),
    "caught up to a step that was not": (caught_up(9, held(9).digest), "I5", None, "the journal does not hold it"),
    "another weight": (weighed(4.0), "I2", 4, "weight 4.0 in step 1"),
    "no weight": (weighed(float("nan")), "I2", 4, "counts it with 8.0"),
    "lease lost": (events.Lease(of=B.peer_id, serial=1, samples=9), "I7", None, "was given 9 samples"),
    "return lost": (events.LeaseReturned(of=B.peer_id, epoch=3, samples=6), "I7", None, "returned 6 samples"),
    "outvoted": (vote(held(5).digest), "I1", 4, "though 1 of its 2 members voted"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_what_a_peer_saw_and_the_journal_does_not_say_is_found(founder: Path, name: str) -> None:
    line, invariant, slot, said = WRONG_LINES[name]
    write_log(founder, A.peer_id, [*TRUE_LINES, line])
    (finding,) = findings(audit_run([founder]), "logs")
    assert (finding.invariant, finding.slot) == (invariant, slot)
    assert said in finding.sentence


def test_who_was_outvoted_is_named_and_no_fault_of_the_run(founder: Path, tmp_path: Path) -> None:
    records = history()[:5]
    members = (*records[1].view.members, msgspec.structs.replace(records[1].view.members[0], peer_id=C.peer_id))  # type: ignore[union-attr]
    records[1] = msgspec.structs.replace(records[1], view=msgspec.structs.replace(records[1].view, members=members))  # type: ignore[union-attr]
    parts = records[4].contributions  # type: ignore[union-attr]
    records[4] = msgspec.structs.replace(
        records[4], contributions=(*parts, msgspec.structs.replace(parts[0], ref=C, consumed=()))
    )
    folder = write_journal(tmp_path / "three", records)
    write_log(folder, C.peer_id, [vote(held(5).digest)])
    audited = audit_run([folder])
    assert audited.holds, audited.findings
    assert [(item.peer_id, item.outer_step) for item in audited.deviants] == [(C.peer_id, 1)]
    assert f"{C.peer_id} at step 1" in render_audit(audited)


def test_lines_of_other_runs_of_no_run_and_of_no_schema_are_not_judged(founder: Path) -> None:
    lie = commit_line(4, 3, held(4).digest)
    write_log(founder, A.peer_id, [lie], run_id="demo-ffffffff")
    write_log(founder, A.peer_id, [lie], run_id=None)
    with (founder / FILE_NAME).open("a") as file:
        file.write('{"event": "commit", "outer_step": "many"}\n[1, 2]\n{"event": "com')
    audited = audit_run([founder])
    assert audited.holds
    assert audited.verdicts[-2].num_looked_at == 0
    assert "logs           nothing to check" in render_audit(audited)


# --------------------------------------------------------------------------------------------------------- checkpoints


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def rewrite(checkpoint: Path) -> None:
    """Other tensors, under a manifest that fits the file but names the old state."""
    flip(checkpoint / STATE_NAME, -1)
    reseal(checkpoint, state_sha256=hashlib.sha256((checkpoint / STATE_NAME).read_bytes()).hexdigest())


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "byte": (lambda path: flip(path / STATE_NAME, -5), "was changed since it was written (its SHA-256 differs)"),
    "manifest": (lambda path: flip(path / MANIFEST_NAME, 40), ""),
    "cut": (lambda path: (path / STATE_NAME).write_bytes(b"short"), "has 5 bytes instead of"),
    "missing": (lambda path: (path / STATE_NAME).unlink(), "is missing"),
    "other tensors": (rewrite, "is not the state of step 2 that its manifest names"),
    "another step": (lambda path: reseal(path, outer_step=1), "is not the state of step 1 that its manifest names"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_checkpoint_that_is_not_what_was_voted_for_is_found(founder: Path, name: str) -> None:
    damage, said = DAMAGE[name]
    damage(save(founder, 2))
    (finding,) = findings(audit_run([founder]), "checkpoints")
    assert (finding.invariant, finding.slot) == ("I9", None)
    assert said in finding.sentence


def test_the_digest_of_a_state_is_made_again_chunk_by_chunk(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(CHUNK_NBYTES // 4 * 2.0),
        "a": torch.arange(CHUNK_NBYTES // 4 + 1.0),
        "c": torch.empty(0),
    }
    manifest = manifest_of(7, tensors)
    assert [len(item.chunk_digests) for item in manifest.tensors] == [2, 2, 0]
    meta = CheckpointMeta(run_id=RUN_ID, outer_step=7, digest=manifest.digest, run_manifest=b"{}", next_index=0)
    path = CheckpointStore(tmp_path, keep=1).save(meta, tensors)
    assert prove_checkpoint(path).digest == manifest.digest.hex()


def test_a_whole_checkpoint_that_the_journal_does_not_know_is_found(founder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other, 4)
    (finding,) = findings(audit_run([founder, other]), "checkpoints")
    assert (finding.invariant, finding.slot) == ("I3", None)
    assert "holds step 4, the journal does not" in finding.sentence

    save(founder, 1)
    found = findings(audit_run([founder]), "checkpoints")
    assert [(item.invariant, item.slot) for item in found] == [("I1", 4)]


@pytest.mark.parametrize(
    ("next_index", "returned"),
    [(20, ()), (19, ((16, 19),)), (20, ((15, 20),)), (30, ((16, 20),)), (20, ((16, 18), (19, 20)))],
)
def test_a_checkpoint_at_another_place_in_the_data_is_found(
    founder: Path, next_index: int, returned: tuple[tuple[int, int], ...]
) -> None:
    save(founder, 2, next_index=next_index, returned=tuple(IndexRange(*item) for item in returned))
    found = findings(audit_run([founder]), "checkpoints")
    assert [(item.invariant, item.slot) for item in found] == ([] if next_index == 19 else [("I7", 8)])


def test_leases_given_after_the_commit_do_not_move_the_checkpoint_in_the_data(founder: Path) -> None:
    save(founder, 2, next_index=30, returned=(IndexRange(16, 30),))
    assert audit_run([founder]).holds


def test_checkpoints_of_other_runs_are_not_judged(founder: Path) -> None:
    save(founder, 7, run_id="demo-ffffffff")
    audited = audit_run([founder])
    assert audited.holds
    assert audited.verdicts[-1].num_looked_at == 0


def test_a_checkpoint_that_makes_room_while_it_is_read_is_no_damage(
    founder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Path) -> Manifest:
        path.rename(path.with_name(".partial-pruned-2"))
        raise CheckpointCorrupted(path, "is missing")

    save(founder, 2)
    monkeypatch.setattr("isthmus.trainer.audit.checkpoints.prove_checkpoint", gone)
    assert read_checkpoints([founder]) == []


# ------------------------------------------------------------------------------------------------------------ journals


def test_behind_the_break_of_a_journal_nothing_else_is_judged(founder: Path) -> None:
    write_log(founder, A.peer_id, [*TRUE_LINES, commit_line(9, 9, held(9).digest)])
    save(founder, 2)
    record = msgspec.msgpack.encode(with_state(2, digest_of(2))[8])
    flip(founder / JOURNAL_NAME, (founder / JOURNAL_NAME).read_bytes().index(record) + 9)
    (finding,) = findings(audit_run([founder]), "journal")
    assert (finding.invariant, finding.slot) == ("I9", 8)
    assert "is damaged at record 8: its checksum is wrong" in finding.sentence


def test_two_journals_of_one_run_are_one_if_one_begins_the_other_and_a_fork_if_not(
    founder: Path, tmp_path: Path
) -> None:
    records = with_state(2, digest_of(2))
    older = write_journal(tmp_path / "older", records[:7])
    audited = audit_run([older, founder])
    assert audited.holds
    assert audited.journal == founder / JOURNAL_NAME

    fork = write_journal(tmp_path / "fork", [*records[:5], *records[6:8]])
    (finding,) = findings(audit_run([fork, founder]), "journal")
    assert (finding.invariant, finding.slot) == ("I3", 5)
    assert "part at record 5: two coordinators wrote" in finding.sentence


def test_a_journal_under_another_name_than_its_runs_is_found(founder: Path) -> None:
    (founder / "run.json").write_text(json.dumps({"run_id": RUN_ID, "secret": "x"}))
    assert audit_run([founder]).holds
    (founder / "run.json").write_text(json.dumps({"run_id": "demo-ffffffff", "secret": "x"}))
    (finding,) = findings(audit_run([founder]), "journal")
    assert "is of run demo-0123abcd" in finding.sentence
    assert "run.json says demo-ffffffff" in finding.sentence


def test_an_empty_journal_proves_nothing_and_is_no_fault(tmp_path: Path) -> None:
    audited = audit_run([write_journal(tmp_path / "new", [])])
    assert audited.holds
    assert "chain          nothing to check" in render_audit(audited)


def test_peers_folders_are_found_in_the_folder_above_them(founder: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "other", C.peer_id, TRUE_LINES)
    (tmp_path / "notes").mkdir()
    assert audit_run([tmp_path]).folders == (founder, tmp_path / "other")
    write_log(tmp_path, A.peer_id, [])  # as the demo puts the events of all peers there
    assert audit_run([tmp_path]).folders == (founder, tmp_path / "other")


def test_what_is_no_run_is_the_operators_mistake(founder: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other", C.peer_id, TRUE_LINES)
    with pytest.raises(ConfigError, match=r"there is no journal in .*other; name the folder of its founder"):
        audit_run([other])
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        audit_run([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="is no folder"):
        audit_run([founder / JOURNAL_NAME])


def test_several_runs_are_audited_each_by_itself(founder: Path, tmp_path: Path) -> None:
    alone = audit_run([founder])
    other = write_journal(tmp_path / "other", history(), run_id="demo-ffffffff")
    ours, theirs = audit_runs([founder, other])
    assert (ours.run_id, theirs.run_id) == ("demo-0123abcd", "demo-ffffffff")
    assert ours.verdicts == alone.verdicts
    assert theirs.holds
    (other / JOURNAL_NAME).unlink()
    write_journal(tmp_path / "other", history()[:1], run_id="demo-ffffffff")
    assert audit_runs([founder, other])[0].verdicts == alone.verdicts


@pytest.mark.parametrize("says_its_run", [False, True])
def test_a_destroyed_journal_beside_two_sound_runs_is_found(founder: Path, tmp_path: Path, says_its_run: bool) -> None:
    other = write_journal(tmp_path / "other", history(), run_id="demo-ffffffff")
    third = tmp_path / "third"
    third.mkdir()
    (third / JOURNAL_NAME).write_bytes(b"")
    if says_its_run:
        (third / "run.json").write_text('{"run_id": "demo-eeeeeeee"}')
    audits = audit_runs([founder, other, third])
    assert sorted(audit.holds for audit in audits) == [False, True, True]
    assert run(["audit", *map(str, (founder, other, third))]) == ExitCode.INTEGRITY


def test_what_cannot_be_read_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).mkdir()
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        audit_run([tmp_path])
    (tmp_path / JOURNAL_NAME).rmdir()
    write_journal(tmp_path, history())
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(EnvironmentFault, match=r"events.jsonl cannot be read"):
        audit_run([tmp_path])


# --------------------------------------------------------------------------------------------------------- the command


def test_the_report_is_some_aligned_lines(founder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(founder, A.peer_id, TRUE_LINES)
    save(founder, 2)
    assert run(["audit", str(founder)]) == ExitCode.DONE
    told = capsys.readouterr()
    assert told.err == ""
    assert (
        told.out
        == f"""\
run            demo-0123abcd
journal        {founder}/journal.sqlite, 12 records
outer steps    0 to 3, complete
views          3, the last is epoch 3, 1 to 2 members a commit
peers          3 in 3 starts, 40 tokens
               0000000000000001             24 tokens  60.0%        3 commits          15 samples
               0000000000000002              8 tokens  20.0%        1 commits           4 samples
               0000000000000003              8 tokens  20.0%        1 commits          10 samples
departures     1 member
               0000000000000002  at step 1: dropped: silent
other votes    none
samples        29 used up by commits, each once
               6 returned from who was gone, 0 of them free, 1 leased; new from 30
data           1 complete of 12 samples; epoch 1: 11; epoch 2: 6

journal        holds               12 records,             I3 I9
chain          holds               3 commits,              I1 I3
views          holds               3 views,                I1 I2 I3 I8
contributions  holds               5 contributions,        I2
rollbacks      nothing to check    0 rollbacks,            I1 I2 I3 I7
snapshots      nothing to check    0 snapshots,            I3 I7 I8
leases         holds               30 samples,             I7
certificates   nothing to check    0 certificates,         I1 I2 I3 I7 I9
logs           holds               13 lines,               I1 I2 I3 I5 I7 I8
checkpoints    holds               1 checkpoint,           I1 I3 I7 I9
"""
    )


def test_what_does_not_hold_is_exit_code_9_and_the_first_finding_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = history()
    records[8] = msgspec.structs.replace(records[8], previous=bytes(32), key=key(1, 1))
    folder = write_journal(tmp_path / "run", records)
    assert run(["audit", str(folder)]) == ExitCode.INTEGRITY
    told = capsys.readouterr()
    assert "chain          FAILS, 1 finding" in told.out
    said = "step 2 starts from 000000000000, before it was 000100010001"
    assert f"               {said} (I1, record 8)\n" in told.out
    assert told.err == (
        f"isthmus: {said} (I1, record 8), and 1 more; do not go on from this run before it is known why\n"
    )
    assert run(["audit", "--json", str(folder)]) == ExitCode.INTEGRITY
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["holds"], report["run_id"]) == ("isthmus.audit/1", False, RUN_ID)
    (chain,) = (check for check in report["checks"] if check["check"] == "chain")
    assert (chain["holds"], chain["num_findings"]) == (False, 1)
    assert chain["findings"] == [{"invariant": "I1", "slot": 8, "sentence": said}]


def test_a_folder_without_a_journal_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(tmp_path)]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "",
        f"isthmus: there is no journal in {tmp_path}; "
        "name the folder of its founder or coordinator too, where journal.sqlite is\n",
    )
