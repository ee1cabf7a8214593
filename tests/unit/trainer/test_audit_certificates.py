# SPDX-License-Identifier: Apache-2.0
"""`isthmus audit` on the certificates that peers keep: what can be wrong with them is found, and nothing else is."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.audit import Finding
from isthmus.elastic.core.certificate import Certificate, encode_certificate
from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.core.records import CommitRecord, RebuildRecord, Record
from isthmus.elastic.core.run_state import RunState
from isthmus.trainer.audit.report import render_audit
from isthmus.trainer.checkpoint.certificates import FILE_NAME
from isthmus.trainer.checkpoint.checkpoint import load_checkpoint
from isthmus.trainer.contact.admission import RunTerms
from isthmus.trainer.contact.identity import PeerFolder, RunIdentity
from isthmus.trainer.run.founding import remember_membership
from tests.keys import Keys, certified
from tests.unit.elastic.machines import KEYS, OTHERS, certificate, held, key
from tests.unit.elastic.test_audit import A, history, signed, view
from tests.unit.trainer.test_audit import RUN_ID, audit_run, digest_of, findings, save, with_state, write_journal

pytestmark = pytest.mark.usefixtures("keys_of_histories")

SECRET = b"s" * 32
replace = msgspec.structs.replace


def chain(records: Sequence[Record], keys: Keys = KEYS) -> list[Certificate]:
    """What the coordinator tells of these records' commits."""
    state, told = RunState(), list[Certificate]()
    for record in records:
        state.apply(record)
        if state.certificate is not None and (not told or told[-1].link != state.certificate.link):
            told.append(state.certificate.sealed(keys.of_the_run))
    return told


def keep(folder: Path, certificates: Sequence[Certificate]) -> Path:
    folder.mkdir(exist_ok=True)
    pieces = [encode_certificate(item) for item in certificates]
    (folder / FILE_NAME).write_bytes(msgspec.msgpack.encode(pieces))
    return folder


def know(folder: Path, run_id: str = RUN_ID) -> Path:
    """The folder of the run's coordinator has its secret."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_bytes(msgspec.json.encode(RunIdentity(run_id=run_id, secret=SECRET)))
    return folder


@pytest.fixture
def founder(tmp_path: Path) -> Path:
    """The folder of A, in which the coordinator lives."""
    return know(write_journal(tmp_path / "founder", history()))


def found_in(*folders: Path) -> tuple[Finding, ...]:
    return findings(audit_run(folders), "certificates")


def test_certificates_of_the_journals_commits_hold_and_are_counted(founder: Path, tmp_path: Path) -> None:
    keep(founder, chain(history()))
    peer = keep(tmp_path / "peer", chain(history())[1:])
    audited = audit_run([founder, peer])
    assert audited.holds, audited.findings
    assert audited.knows_authorities
    assert [item.num_looked_at for item in audited.verdicts if item.check == "certificates"] == [5]
    assert "seals" not in render_audit(audited)


def changed(place: int, **fields: object) -> list[Certificate]:
    """The chain with one certificate that says something else, under the run's seal."""
    told = chain(history())
    told[place] = certified(replace(told[place], **fields), KEYS)
    return told


TOLD = chain(history())
LIES: dict[str, tuple[list[Certificate], str, int | None, str]] = {
    "digest": (changed(2, digest=held(9).digest), "I1", 11, "step 3 in epoch 3 as 0009"),
    "start": (changed(2, previous=held(9).digest), "I1", 11, "that started from 0009"),
    "members": (changed(2, contributors=TOLD[2].contributors[:1]), "I2", 11, "of other work than the journal's"),
    "end": (changed(2, final=False), "I3", 11, "as one of many, the journal says otherwise"),
    "samples": (changed(2, position=DataPosition(30, (IndexRange(18, 20),))), "I7", 11, "names other samples"),
    "next sample": (changed(2, position=DataPosition(31, (IndexRange(19, 20), IndexRange(30, 31)))), "I7", 11, "names"),
    "parent": (changed(2, parent=held(9).digest), "I1", 11, "does not follow the one before it"),
    "first parent": (changed(0, parent=held(9).digest)[:1], "I1", 4, "does not follow the one before it"),
    "commit": ([*TOLD, certificate(3, 3, 1, 3, parent=TOLD[2])], "I3", None, "the journal does not hold"),
    "epoch": (changed(2, key=key(4, 2)), "I3", None, "the journal does not hold it"),
    "seal": ([*TOLD[:2], replace(TOLD[2], final=False)], "I9", None, "run's keys do not prove"),
    "another run's seal": ([*TOLD[:2], TOLD[2].sealed(OTHERS.of_the_run)], "I9", None, "run's keys do not prove"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_certificate_that_says_something_else_than_the_journal_is_found(founder: Path, name: str) -> None:
    certificates, invariant, slot, said = LIES[name]
    (finding,) = found_in(keep(founder, certificates))
    assert (finding.invariant, finding.slot) == (invariant, slot)
    assert said in finding.sentence
    assert str(founder / FILE_NAME) in finding.sentence


def test_two_peers_with_different_certificates_of_one_commit_are_found(founder: Path, tmp_path: Path) -> None:
    keep(founder, TOLD[2:])
    peer = keep(tmp_path / "peer", changed(2, parent=held(9).digest)[2:])
    (finding,) = found_in(founder, peer)
    assert (finding.invariant, finding.slot) == ("I1", 11)
    assert f"{peer / FILE_NAME} has a certificate of step 3 in epoch 3, which does not follow" in finding.sentence


@pytest.mark.parametrize("place", [0, 30, -40, -1])
def test_a_byte_that_was_changed_in_a_file_is_found(founder: Path, place: int) -> None:
    path = keep(founder, TOLD) / FILE_NAME
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    (finding,) = found_in(founder)
    assert finding.invariant == "I9"


def test_without_the_runs_keys_the_seals_are_not_checked_and_that_is_said(tmp_path: Path) -> None:
    folder = keep(write_journal(tmp_path / "copy", history()), chain(history(), keys=OTHERS))
    audited = audit_run([folder])
    assert audited.holds, audited.findings
    assert "seals          not checked: none of these folders knows the run's authorities" in render_audit(audited)


def test_the_keys_that_a_peer_was_told_are_as_good_as_the_founders_secret(tmp_path: Path) -> None:
    folder = write_journal(tmp_path / "copy", history())
    terms = RunTerms(
        run_id=RUN_ID,
        manifest=b"{}",
        data_digest="",
        authorities=(b"of no matter here",),
    )
    with PeerFolder(tmp_path / "peer") as peer:
        remember_membership(peer, terms, ["somewhere:1"])
    keep(tmp_path / "peer", [TOLD[0].sealed(OTHERS.of_the_run)])
    (finding,) = found_in(folder, tmp_path / "peer")
    assert finding.invariant == "I9"


def test_certificates_of_a_run_that_was_in_this_folder_before_are_not_judged(founder: Path) -> None:
    keep(founder, [certificate(3, 4, 7, 8, keys=OTHERS)])
    audited = audit_run([founder])
    assert audited.holds, audited.findings
    assert [item.num_looked_at for item in audited.verdicts if item.check == "certificates"] == [0]


# -------------------------------------------------------------------------------------------------------- checkpoints


def certified_state(keys: Keys = KEYS) -> tuple[list[Record], Certificate]:
    """A history whose step 2 is a state that can be saved, and the certificate of that."""
    records = [signed(item) if isinstance(item, CommitRecord) else item for item in with_state(2, digest_of(2))]
    return records, next(item for item in chain(records, keys) if item.made.outer_step == 2)


def test_a_checkpoint_with_the_certificate_of_its_state_holds(tmp_path: Path) -> None:
    records, certificate = certified_state()
    founder = know(write_journal(tmp_path / "founder", records))
    path = save(founder, 2, certificate=encode_certificate(certificate))
    assert audit_run([founder]).holds
    assert load_checkpoint(path).meta.certificate == encode_certificate(certificate)


@pytest.mark.parametrize("lie", ["another state", "another run", "no certificate"])
def test_a_checkpoint_whose_certificate_proves_something_else_or_nothing_is_found(tmp_path: Path, lie: str) -> None:
    records, certificate = certified_state(OTHERS if lie == "another run" else KEYS)
    founder = know(write_journal(tmp_path / "founder", records))
    content = encode_certificate(chain(records)[0] if lie == "another state" else certificate)
    save(founder, 2, certificate=b"none" if lie == "no certificate" else content)
    (finding,) = findings(audit_run([founder]), "checkpoints")
    assert finding.invariant == "I9"
    assert ("the run's keys do not prove" if lie == "another run" else "of another state") in finding.sentence


# ----------------------------------------------------------------------------------------------------- a lost journal


def rebuilt(known: Certificate) -> list[Record]:
    """The run goes on from this commit, by the word of A, and gets no further."""
    record = RebuildRecord(epoch=1000, certificate=known, testified=(A,), insisted=False)
    return [
        record,
        replace(view(1001, known.made.outer_step, 1), view=replace(view(1001, 2, 1).view, digest=known.digest)),
    ]


def test_certificates_of_before_the_journal_was_rebuilt_are_explained_by_that(tmp_path: Path) -> None:
    folder = know(write_journal(tmp_path / "founder", rebuilt(TOLD[1])))
    keep(folder, TOLD)  # the last one of them was given up
    assert found_in(folder) == ()


def test_another_certificate_of_the_round_that_the_journal_was_rebuilt_from_is_found(tmp_path: Path) -> None:
    folder = know(write_journal(tmp_path / "founder", rebuilt(TOLD[1])))
    keep(folder, changed(1, parent=held(9).digest))
    (finding,) = found_in(folder)
    assert (finding.invariant, finding.slot) == ("I1", 0)
    assert "the journal was rebuilt from another one" in finding.sentence


def test_a_journal_that_was_rebuilt_from_a_certificate_without_the_runs_seal_is_found(tmp_path: Path) -> None:
    folder = know(write_journal(tmp_path / "founder", rebuilt(TOLD[1].sealed(OTHERS.of_the_run))))
    (finding,) = found_in(folder)
    assert (finding.invariant, finding.slot) == ("I9", 0)
