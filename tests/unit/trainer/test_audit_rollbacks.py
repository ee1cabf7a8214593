# SPDX-License-Identifier: Apache-2.0
"""`isthmus audit` on a run that went back: what its peers kept of the commits it gave up is legal, and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.core.records import CommitRecord, Record, RollbackRecord
from isthmus.elastic.observation import Event, RoundStaged, WentBack
from isthmus.trainer.cli.app import run
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.record.events import RolledBack
from tests.keys import Keys, certified
from tests.unit.elastic.machines import KEYS, OTHERS, held
from tests.unit.elastic.test_audit import A
from tests.unit.elastic.test_audit_rollbacks import OTHER, STEP_1, before, went_back
from tests.unit.trainer.test_audit import (
    audit_run,
    caught_up,
    commit_line,
    digest_of,
    findings,
    save,
    write_journal,
    write_log,
)
from tests.unit.trainer.test_audit_certificates import chain, keep, know

pytestmark = pytest.mark.usefixtures("keys_of_histories")

replace = msgspec.structs.replace


def sealed(records: Sequence[Record], keys: Keys = KEYS) -> list[Record]:
    """The same run, as its coordinator's journal has it."""
    return [
        replace(record, certificate=record.certificate.sealed(keys.of_the_run))
        if isinstance(record, RollbackRecord) and record.certificate is not None
        else record
        for record in records
    ]


ROLLED_BACK = RolledBack(epoch=2, outer_step=1, digest=held(1).digest.hex(), given_up=3, holders=(A.peer_id,))
TRUE_LINES: list[Event] = [
    commit_line(1, 1, held(1).digest),
    commit_line(2, 1, held(2).digest),
    commit_line(3, 1, held(3).digest),
    caught_up(2, held(2).digest),
    caught_up(3, held(3).digest),
    ROLLED_BACK,
    WentBack(epoch=2, outer_step=1, cause="the power went"),
    caught_up(1, held(1).digest),
    commit_line(2, 3, OTHER),
    caught_up(2, OTHER),
]


@pytest.fixture
def founder(tmp_path: Path) -> Path:
    return know(write_journal(tmp_path / "founder", sealed(went_back())))


# ---------------------------------------------------------------------------------------------------------------- logs


def test_peers_may_have_seen_what_the_run_gave_up(founder: Path) -> None:
    write_log(founder, A.peer_id, TRUE_LINES)
    audited = audit_run([founder])
    assert audited.holds, audited.findings


WRONG_LINES: dict[str, tuple[Event, str, int | None, str]] = {
    "given up as another state": (commit_line(3, 1, OTHER), "I1", 7, "saw step 3 committed as 0909"),
    "given up in another epoch": (commit_line(3, 3, held(3).digest), "I3", 7, "in epoch 3 (fragment 0)"),
    "made again as it was": (commit_line(2, 3, held(2).digest), "I1", 11, "saw step 2 committed as 0002"),
    "never committed": (commit_line(4, 1, held(4).digest), "I3", None, "saw step 4 committed as 0004"),
    "caught up to neither state": (
        caught_up(2, held(5).digest),
        "I5",
        11,
        "caught up to step 2 as 0005",
    ),
    "another rollback": (replace(ROLLED_BACK, epoch=5), "I3", None, "in epoch 5, the journal does not"),
    "from another step": (replace(ROLLED_BACK, given_up=4), "I3", 8, "from step 4 in epoch 2, the jour"),
    "to another step": (replace(ROLLED_BACK, outer_step=None), "I3", 8, "the journal tells it otherwise"),
    "told of another rollback": (
        WentBack(epoch=3, outer_step=1, cause="the power went"),
        "I3",
        None,
        "was told that the run went back in epoch 3, the journal does not hold it",
    ),
    "held by others": (replace(ROLLED_BACK, holders=()), "I3", 8, "the journal tells it otherwise"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_what_a_peer_saw_and_the_journal_never_held_is_found(founder: Path, name: str) -> None:
    line, invariant, slot, said = WRONG_LINES[name]
    write_log(founder, A.peer_id, [*TRUE_LINES, line])
    (finding,) = findings(audit_run([founder]), "logs")
    assert (finding.invariant, finding.slot) == (invariant, slot)
    assert said in finding.sentence


def test_who_voted_for_another_state_is_judged_in_the_round_of_its_vote(founder: Path) -> None:
    vote = RoundStaged(epoch=3, outer_step=1, fragment=0, digest=OTHER.hex(), seconds=0.1)
    write_log(founder, A.peer_id, [vote, replace(vote, epoch=1)])
    audited = audit_run([founder])
    (finding,) = findings(audited, "logs")
    assert (finding.invariant, finding.slot) == ("I1", 6)  # A was one of two then
    assert [(item.peer_id, item.outer_step) for item in audited.deviants] == [(A.peer_id, 2)]


# -------------------------------------------------------------------------------------------------------- certificates

TOLD = chain(went_back())
"""Of steps 1, 2 and 3 in epoch 1, of step 1 again, and of step 2 in epoch 3."""


def test_certificates_of_what_the_run_gave_up_are_in_the_journal(founder: Path, tmp_path: Path) -> None:
    keep(founder, TOLD)
    assert [(item.made.outer_step, item.key.epoch) for item in TOLD] == [(1, 1), (2, 1), (3, 1), (1, 1), (2, 3)]
    peer = keep(tmp_path / "peer", TOLD[1:3])
    audited = audit_run([founder, peer])
    assert audited.holds, audited.findings
    assert [item.num_looked_at for item in audited.verdicts if item.check == "certificates"] == [7]


def test_two_certificates_that_follow_the_same_parent_are_found_where_no_rollback_is_between_them(
    tmp_path: Path,
) -> None:
    assert TOLD[1].parent == TOLD[4].parent
    folder = keep(know(write_journal(tmp_path / "founder", before())), TOLD)
    (finding,) = findings(audit_run([folder]), "certificates")
    assert (finding.invariant, finding.slot) == ("I3", None)
    assert "step 2 in epoch 3, the journal does not hold it" in finding.sentence


LIES: dict[str, tuple[Certificate, str, int | None, str]] = {
    "after what was given up": (
        replace(TOLD[2], key=replace(TOLD[2].key, outer_step=3), previous=TOLD[2].digest, parent=TOLD[2].link),
        "I3",
        None,
        "step 4 in epoch 1, the journal does not hold it",
    ),
    "made again behind what was given up": (replace(TOLD[4], parent=TOLD[2].link), "I1", 11, "does not follow the one"),
    "given up as another state": (replace(TOLD[2], digest=OTHER), "I1", 7, "step 3 in epoch 1 as 0909"),
    "samples that were given up": (
        replace(TOLD[4], position=DataPosition(30, (IndexRange(16, 20), IndexRange(22, 30)))),
        "I7",
        11,
        "names other samples as used up",
    ),
    "samples of the second time": (replace(TOLD[1], position=TOLD[4].position), "I7", 6, "names other samples"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_certificate_that_the_journal_never_held_is_found_though_the_run_went_back(founder: Path, name: str) -> None:
    lie, invariant, slot, said = LIES[name]
    keep(founder, [*TOLD, certified(lie, KEYS)])
    (finding,) = findings(audit_run([founder]), "certificates")
    assert (finding.invariant, finding.slot) == (invariant, slot)
    assert said in finding.sentence


def test_a_run_that_went_back_by_a_certificate_without_its_seal_is_found(tmp_path: Path) -> None:
    founder = know(write_journal(tmp_path / "founder", sealed(went_back(), OTHERS)))
    (finding,) = findings(audit_run([founder]), "certificates")
    assert (finding.invariant, finding.slot) == ("I9", 8)
    assert "the run went back to a certificate that the run's keys do not prove" in finding.sentence


# --------------------------------------------------------------------------------------------------------- checkpoints


def with_states(step_2: bytes = OTHER) -> list[Record]:
    """The same run; step 3 that it gave up, and one of the two steps 2, are states that can be saved."""
    known = {held(3).digest: digest_of(3), step_2: digest_of(2)}
    records = []
    for record in went_back():
        if isinstance(record, CommitRecord):
            digest, previous = known.get(record.digest, record.digest), known.get(record.previous, record.previous)
            record = replace(record, digest=digest, previous=previous)
        records.append(record)
    return sealed(records)


UNUSED_AT_3 = (IndexRange(16, 20), IndexRange(22, 30))


def test_a_checkpoint_of_a_step_that_the_run_gave_up_is_as_good_as_others(tmp_path: Path) -> None:
    founder = write_journal(tmp_path / "founder", with_states())
    save(founder, 3, next_index=30, returned=UNUSED_AT_3)
    save(founder, 2, next_index=24, returned=(IndexRange(18, 24),))
    audited = audit_run([founder])
    assert audited.holds, audited.findings


def test_a_checkpoint_of_a_step_that_the_run_has_made_again_since_is_as_good_too(tmp_path: Path) -> None:
    founder = write_journal(tmp_path / "founder", with_states(held(2).digest))
    save(founder, 2, next_index=30, returned=(IndexRange(16, 30),))
    audited = audit_run([founder])
    assert audited.holds, audited.findings


def test_a_checkpoint_of_what_the_run_gave_up_is_judged_by_that(tmp_path: Path) -> None:
    founder = write_journal(tmp_path / "founder", with_states())
    save(founder, 3, next_index=24, returned=(IndexRange(18, 24),))
    (finding,) = findings(audit_run([founder]), "checkpoints")
    assert (finding.invariant, finding.slot) == ("I7", 7)
    assert "names other samples as used up by step 3" in finding.sentence


def test_a_checkpoint_of_a_state_that_the_journal_never_held_is_found_though_the_run_went_back(tmp_path: Path) -> None:
    founder = write_journal(tmp_path / "founder", sealed(went_back()))
    save(founder, 2)
    (finding,) = findings(audit_run([founder]), "checkpoints")
    assert (finding.invariant, finding.slot) == ("I1", 11)
    save(founder, 4)
    found = findings(audit_run([founder]), "checkpoints")
    assert [(item.invariant, item.slot) for item in found] == [("I1", 11), ("I3", None)]


# ---------------------------------------------------------------------------------------------------------- the report


def test_the_report_says_what_the_run_went_back_from_and_what_that_gave_up(
    founder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", str(founder)]) == ExitCode.DONE
    told = capsys.readouterr().out
    assert "outer steps    0 to 2, not complete\n" in told
    assert "went back      from step 3 to step 1 at epoch 2: 10 samples and 32 tokens given up\n" in told
    assert "rollbacks      holds               1 rollback," in told

    assert run(["audit", "--json", str(founder)]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["account"]["given_up"] == [
        {"epoch": 2, "from_step": 3, "to_step": 1, "num_commits": 2, "num_tokens": 32, "num_samples": 10}
    ]
    assert document["samples"]["num_given_up"] == 10
    assert document["exactly_once"]


def test_a_run_that_went_back_to_what_nobody_holds_ends_the_audit_with_9(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = went_back()
    records[8] = replace(records[8], holders=(), certificate=replace(STEP_1, digest=OTHER))
    assert run(["audit", str(write_journal(tmp_path / "run", sealed(records)))]) == ExitCode.INTEGRITY
    assert "the run goes back to a state that nobody holds (I3, record 8)" in capsys.readouterr().out
