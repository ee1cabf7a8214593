# SPDX-License-Identifier: Apache-2.0
"""`isthmus audit` where the journal was compacted: what its archives prove, and what is left to prove without them."""

import json
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.core.certificate import encode_certificate
from isthmus.elastic.core.records import CommitRecord, Record, SnapshotRecord
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.journal.archive import archives_of
from isthmus.trainer.audit.report import audit_as_json, render_audit
from isthmus.trainer.run.founding import JOURNAL_NAME
from tests.unit.elastic.machines import held
from tests.unit.elastic.test_audit import A, C
from tests.unit.trainer.test_audit import (
    RUN_ID,
    TRUE_LINES,
    audit_run,
    commit_line,
    digest_of,
    findings,
    save,
    with_state,
    write_journal,
    write_log,
)


def whole() -> list[Record]:
    """With a snapshot after the first commit, and one after the second."""
    records: list[Record] = []
    for record in with_state(2, digest_of(2)):
        records.append(record)
        if isinstance(record, CommitRecord) and record.outer_step < 3:
            records.append(RunState.replay(records).snapshot())
    return records


@pytest.fixture
def founder(tmp_path: Path) -> Path:
    folder = write_journal(tmp_path / "founder", whole())
    write_log(folder, A.peer_id, TRUE_LINES)
    save(folder, 2)
    return folder


def without_archives(founder: Path, *numbers: int) -> Path:
    for number in numbers or (1, 2):
        (founder / f"journal-{number:04}.sqlite").unlink()
    return founder


def test_with_its_archives_it_is_audited_as_if_it_had_never_been_compacted(founder: Path) -> None:
    audited = audit_run([founder])
    assert audited.holds, audited.findings
    assert (audited.first_record, list(audited.archives)) == (0, archives_of(founder / JOURNAL_NAME))
    assert audited.proved.account.num_records == len(whole())
    assert [item.num_looked_at for item in audited.verdicts if item.check == "snapshots"] == [2]
    assert f"{founder}/journal.sqlite with 2 archives, {len(whole())} records" in render_audit(audited)


@pytest.mark.parametrize("numbers", [(1,), (1, 2)])
def test_without_them_it_says_what_is_not_checked_and_checks_the_rest(founder: Path, numbers: tuple[int, ...]) -> None:
    audited = audit_run([without_archives(founder, *numbers)])
    assert audited.holds, audited.findings
    assert 0 < audited.first_record < len(whole())
    told = render_audit(audited)
    assert f"{audited.first_record} older records are in archives that are not here" in told
    assert f"the snapshot in record {audited.first_record} says of them is believed" in told
    assert json.loads(audit_as_json(audited))["first_record"] == audited.first_record
    assert audited.proved.account.outer_step == 3
    looked_at = {item.check: item.num_looked_at for item in audited.verdicts}
    assert looked_at["checkpoints"] == 1
    assert looked_at["logs"] > 0


def test_what_comes_after_the_snapshot_is_checked_without_the_archives(founder: Path, tmp_path: Path) -> None:
    without_archives(founder)
    other = write_log(tmp_path / "other", C.peer_id, [*TRUE_LINES[:-1], commit_line(3, 3, bytes(32), final=True)])
    (found,) = findings(audit_run([founder, other]), "logs")
    assert found.sentence.startswith(f"{C.peer_id} saw step 3 committed as 000000000000")
    assert found.slot is not None
    assert isinstance(whole()[found.slot], CommitRecord), "slots count from the run's first record"


def test_words_of_what_came_before_the_snapshot_are_no_findings(founder: Path, tmp_path: Path) -> None:
    lines = [commit_line(1, 1, bytes(32)), *TRUE_LINES]
    other = write_log(tmp_path / "other", C.peer_id, lines)
    save(other, 1)
    wrong = {verdict.check for verdict in audit_run([founder, other]).verdicts if not verdict.holds}
    assert wrong == {"logs", "checkpoints"}
    assert audit_run([without_archives(founder), other]).holds


def test_a_certificate_of_a_commit_that_only_the_snapshot_knows_is_compared_with_it(founder: Path) -> None:
    state = RunState.replay(whole()[:-3])
    known = state.past(held(1))
    assert known is not None
    certificate = known.certificate
    assert certificate is not None
    without_archives(founder)
    for digest, number in ((certificate.digest, 0), (bytes(32), 1)):
        kept = msgspec.structs.replace(certificate, digest=digest, seal=bytes(range(32)))
        (founder / "certificates").write_bytes(msgspec.msgpack.encode([encode_certificate(kept)]))
        audited = audit_run([founder])
        (verdict,) = (item for item in audited.verdicts if item.check == "certificates")
        assert (verdict.num_looked_at, verdict.num_findings) == (1, number), verdict.findings


def test_a_damaged_archive_is_a_finding_and_what_it_held_is_not_checked(founder: Path) -> None:
    archive = archives_of(founder / JOURNAL_NAME)[0]
    archive.chmod(0o600)
    with sqlite3.connect(archive) as database:
        database.execute("UPDATE journal SET record = X'00' WHERE slot = 1")
    database.close()
    audited = audit_run([founder])
    (found,) = findings(audited, "journal")
    assert found.sentence == f"the archive {archive} is damaged at record 1: its checksum is wrong"
    assert audited.first_record > 0


def test_a_snapshot_that_tells_something_else_is_found(tmp_path: Path) -> None:
    records = whole()
    slot = max(at for at, record in enumerate(records) if isinstance(record, SnapshotRecord))
    records[slot] = msgspec.structs.replace(records[slot], owned=())
    (found,) = findings(audit_run([write_journal(tmp_path / "founder", records)]), "snapshots")
    assert (found.invariant, found.slot) == ("I3", slot)
    assert found.sentence == "the snapshot tells owned otherwise than the records before it"


def test_a_copy_that_ends_earlier_agrees_and_one_that_goes_another_way_does_not(founder: Path, tmp_path: Path) -> None:
    records = whole()
    copy = write_journal(tmp_path / "copy", records[: len(records) - 4])
    assert audit_run([founder, copy]).holds
    shutil.rmtree(copy)
    fork = write_journal(tmp_path / "copy", [*records[:-1], records[0]])
    said = [finding.sentence for finding in audit_run([without_archives(founder), fork]).findings]
    assert any(f"part at record {len(records) - 1}: two coordinators wrote" in sentence for sentence in said), said


def test_the_runs_name_is_that_of_its_archives_too(founder: Path) -> None:
    assert audit_run([founder]).run_id == RUN_ID
    other = write_journal(founder.parent / "other", whole(), run_id="demo-ffffffff")
    without_archives(founder)
    for archive in archives_of(other / JOURNAL_NAME):
        shutil.copy(archive, founder)
    shutil.rmtree(other)
    audited = audit_run([founder])
    assert audited.holds
    assert audited.archives == ()
