# SPDX-License-Identifier: Apache-2.0
"""The audit of a run that went back: what it gave up is free again, and nobody can make it go back against the rule."""

from collections.abc import Sequence

import msgspec
import pytest

from isthmus.collective.core.types import View
from isthmus.elastic.audit import audit
from isthmus.elastic.audit.coverage import used_up
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import DataPosition
from isthmus.elastic.core.records import Genesis, RebuildRecord, Record, ReleaseRecord, RollbackRecord, ViewRecord
from isthmus.elastic.core.run_state import RunState
from tests.unit.elastic.machines import certificate, held, key, member
from tests.unit.elastic.test_audit import (
    A,
    B,
    Change,
    all_findings,
    changed,
    commit,
    dropped,
    inserted,
    lease,
    part,
    ranges,
    signed,
    view,
)

A2 = msgspec.structs.replace(A, incarnation=2)
OTHER = bytes([9]) * 32
replace = msgspec.structs.replace


def back(known: Certificate | None, epoch: int, step: int) -> Record:
    """From this step to the certificate's, or to the beginning."""
    return RollbackRecord(epoch=epoch, certificate=known, given_up=step, holders=(A2,))


def told(records: Sequence[Record]) -> Certificate:
    """The certificate of the newest commit of these."""
    known = RunState.replay(records).certificate
    assert known is not None
    return known


def after(epoch: int, step: int, digest: bytes) -> ViewRecord:
    """The view of A's newer start alone."""
    return replace(view(epoch, step, 1), view=View(epoch, step, digest, (member(1, 2),)))


def before() -> list[Record]:
    """Two peers make three steps, then both lose power."""
    return [
        Genesis(outer_step=0, digest=held(0).digest, next_index=0),
        view(1, 0, 1, 2),
        lease(A, 1, (0, 10)),
        lease(B, 1, (10, 20)),
        commit(1, 1, part(A, (0, 4)), part(B, (10, 14))),
        lease(A, 2, (20, 30)),
        commit(2, 1, part(A, (4, 10)), part(B, (14, 16))),
        commit(3, 1, part(A, (20, 22)), part(B)),
    ]


def went_back() -> list[Record]:
    """Only A comes back, with step 1: it makes step 2 again, of other samples, and the same ones."""
    return [
        *before(),
        back(told(before()[:5]), 2, 3),
        after(3, 1, held(1).digest),
        lease(A2, 1, (4, 10), (14, 24)),
        signed(replace(commit(2, 3, part(A2, (4, 10), (14, 18))), digest=OTHER)),
    ]


def test_a_run_that_went_back_is_one_that_the_coordinator_accepts_and_is_clean() -> None:
    RunState.replay(went_back())
    proved = audit(went_back(), samples_per_data_epoch=9)
    assert proved.holds, all_findings(proved)
    assert [(item.check, item.num_looked_at) for item in proved.verdicts] == [
        ("chain", 4),
        ("views", 2),
        ("contributions", 7),
        ("rollbacks", 1),
        ("snapshots", 0),
        ("leases", 24),
    ]


@pytest.mark.parametrize("length", range(len(went_back()) + 1))
def test_a_run_that_went_back_is_clean_wherever_its_journal_ends(length: int) -> None:
    assert audit(went_back()[:length]).holds


def test_what_the_run_gave_up_is_told_and_counts_for_nobody() -> None:
    proved = audit(went_back(), samples_per_data_epoch=9)
    (lost,) = proved.account.given_up
    assert (lost.epoch, lost.from_step, lost.to_step, lost.num_commits) == (2, 3, 1, 2)
    assert (lost.num_tokens, lost.num_samples) == (32, 10)
    account, count = proved.account, proved.samples
    assert (account.outer_step, account.num_commits, account.epoch) == (2, 2, 3)
    assert [(item.peer_id, item.num_commits, item.num_tokens, item.num_samples) for item in account.shares] == [
        (A.peer_id, 2, 16, 14),
        (B.peer_id, 1, 8, 4),
    ]
    assert account.departures == (), "who lost power was put out by nobody"
    assert audit(went_back()[:9]).account.epoch == 2
    assert count.exactly_once
    assert (count.num_given, count.num_used_up, count.num_uses, count.num_given_up) == (24, 18, 18, 10)
    assert (count.num_leased, count.num_free, count.num_returns, count.next_index) == (6, 0, 0, 24)
    assert count.data_epochs is not None
    assert (count.data_epochs.num_complete, count.data_epochs.begun) == (2, ())


def test_samples_are_free_again_the_moment_the_run_goes_back() -> None:
    count = audit(went_back()[:9]).samples
    assert (count.num_given, count.num_used_up, count.num_free, count.num_leased) == (20, 8, 12, 0)
    assert count.next_index == 20
    assert used_up(went_back(), 7) == ranges((0, 16), (20, 22))
    assert used_up(went_back(), 8) == ranges((0, 4), (10, 14))
    assert used_up(went_back(), 11) == ranges((0, 18))


STEP_1, STEP_2 = told(before()[:5]), told(before()[:7])

WRONG: dict[str, tuple[Change, str, int, str]] = {
    "before the beginning": (
        lambda records: records.__setitem__(slice(None), records[8:9]),
        "I3",
        0,
        "the run goes back before it began",
    ),
    "after the last commit": (changed(7, final=True), "I3", 8, "goes back after its last commit (record 7)"),
    "from another step": (changed(8, given_up=2), "I3", 8, "goes back from step 2, committed was step 3"),
    "not back": (changed(8, certificate=told(before())), "I3", 8, "goes back to step 3, committed is 3"),
    "forward": (
        changed(8, certificate=certificate(1, 6, 1, 2)),
        "I3",
        8,
        "the run goes back to step 7, committed is 3",
    ),
    "to another round": (changed(8, certificate=replace(STEP_1, key=key(7, 0))), "I3", 8, "step 1 of epoch 7, the"),
    "to the beginning by a certificate": (
        changed(8, certificate=replace(STEP_1, key=key(0, -1))),
        "I3",
        8,
        "the run goes back to step 0 of epoch 0, the journal does not hold it",
    ),
    "to another state": (changed(8, certificate=replace(STEP_1, digest=OTHER)), "I1", 8, "step 1 in epoch 1 as 0909"),
    "from another start": (changed(8, certificate=replace(STEP_1, previous=OTHER)), "I1", 8, "that started from 0909"),
    "to other work": (
        changed(8, certificate=replace(STEP_1, contributors=STEP_1.contributors[1:])),
        "I2",
        8,
        "of other work than the journal's",
    ),
    "to an end": (changed(8, certificate=replace(STEP_1, final=True)), "I3", 8, "as the last one, the journal says"),
    "to another next sample": (
        changed(8, certificate=replace(STEP_1, position=DataPosition(30, STEP_1.position.unconsumed))),
        "I7",
        8,
        "names other samples",
    ),
    "to other samples": (
        changed(8, certificate=replace(STEP_1, position=DataPosition(20, ranges((3, 10), (14, 20))))),
        "I7",
        8,
        "names other samples as used up than the journal",
    ),
    "to another chain": (changed(8, certificate=replace(STEP_1, parent=OTHER)), "I1", 8, "does not follow the one"),
    "held by nobody": (changed(8, holders=()), "I3", 8, "to a state that nobody holds"),
    "held twice by one": (changed(8, holders=(A2, A2)), "I3", 8, "0000000000000001 holds the state that the run goes"),
    "held by an older start": (
        changed(8, holders=(replace(A, incarnation=0),)),
        "I8",
        8,
        "an older start of 0000000000000001 (0) holds than was a member (1)",
    ),
    "under an old epoch": (changed(8, epoch=1), "I8", 8, "goes back under epoch 1 after epoch 1"),
    "view of the rollback's epoch": (changed(9, view=after(2, 1, held(1).digest).view), "I8", 9, "epoch 2 is decided"),
    "view of what was given up": (changed(9, view=after(3, 3, held(3).digest).view), "I1", 9, "starts from step 3"),
    "excused before": (changed(9, excused=(B,)), "I2", 9, "which was no member before"),
    "commit without a view": (dropped(9), "I2", 10, "no member of its view"),
    "commit of the old epoch": (changed(11, key=key(1, 1)), "I8", 11, "made in epoch 1, the view is 3"),
    "commit after what was given up": (
        changed(11, outer_step=4, key=key(3, 3), previous=held(3).digest),
        "I1",
        11,
        "step 4 starts from",
    ),
    "commit of the old members": (
        inserted(9, commit(2, 2, part(A), part(B))),
        "I2",
        9,
        "holds work of 0000000000000001 (1), no member of its view",
    ),
    "work of old leases": (
        dropped(10),
        "I7",
        10,
        "step 2 uses up 10 samples (4-9, 14-17) for 0000000000000001, which does not own them",
    ),
    "given though it is used up": (
        changed(10, ranges=ranges((3, 10), (14, 24))),
        "I7",
        10,
        "is given sample 3, which step 1 had used up",
    ),
    "passed over": (changed(10, ranges=ranges((4, 10), (14, 18), (22, 24))), "I7", 10, "2 samples (20-21) never were"),
    "passed over before it went back": (
        changed(5, ranges=ranges((20, 22), (25, 33))),
        "I7",
        5,
        "3 samples (22-24) never",
    ),
    "leases of before come back": (
        inserted(9, ReleaseRecord(ref=B, epoch=2, ranges=ranges((16, 20)))),
        "I7",
        9,
        "0000000000000002 returns 4 samples (16-19) without owning them",
    ),
    "leases of before come back under an old epoch": (
        inserted(9, ReleaseRecord(ref=B, epoch=1, ranges=ranges((16, 20)))),
        "I7",
        9,
        "returns samples in epoch 1, the view is 2",
    ),
    "leases for who is no member yet": (inserted(9, lease(A2, 0, (4, 5))), "I7", 9, "is given samples and is no"),
    "leases for who is no member any more": (inserted(9, lease(A, 3, (4, 5))), "I7", 9, "is given samples and is no"),
    "leases of who was gone before": (
        lambda records: records.__setitem__(
            slice(7, 8), [view(2, 2, 2), replace(commit(3, 2, part(B)), previous=held(2).digest)]
        ),
        "I7",
        8,
        "step 3 is committed and 0000000000000001, gone by then, owns 10 samples (20-29)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rollback_against_the_rule_and_what_must_not_follow_one_are_found(name: str) -> None:
    change, invariant, slot, said = WRONG[name]
    records = went_back()
    change(records)
    found = all_findings(audit(records))
    assert any(item.invariant == invariant and item.slot == slot and said in item.sentence for item in found), found
    assert all(len(item.sentence) < 200 and "\n" not in item.sentence for item in found)


@pytest.mark.parametrize(
    "name", ["after the last commit", "to other work", "to another chain", "held by nobody", "from another step"]
)
def test_one_fault_of_a_rollback_is_told_once(name: str) -> None:
    records = went_back()
    WRONG[name][0](records)
    assert len(all_findings(audit(records))) == 1


def test_a_run_may_go_back_to_its_beginning() -> None:
    records = [
        *before(),
        back(None, 2, 3),
        after(3, 0, held(0).digest),
        lease(A2, 1, (0, 4)),
        commit(1, 3, part(A2, (0, 4))),
    ]
    RunState.replay(records)
    proved = audit(records)
    assert proved.holds, all_findings(proved)
    assert (proved.samples.num_used_up, proved.samples.num_given_up, proved.samples.next_index) == (4, 18, 4)


def test_a_run_may_go_back_twice_and_never_to_what_it_gave_up() -> None:
    again = told(went_back())
    records = [*went_back(), replace(commit(3, 3, part(A2, (18, 20))), previous=OTHER)]
    records += [back(again, 4, 3), after(5, 2, OTHER), lease(A2, 1, (18, 22))]
    RunState.replay(records)
    proved = audit(records)
    assert proved.holds, all_findings(proved)
    assert [(item.from_step, item.to_step, item.num_samples) for item in proved.account.given_up] == [
        (3, 1, 10),
        (3, 2, 2),
    ]
    records[13] = replace(records[13], certificate=STEP_2)
    found = all_findings(audit(records))
    assert any("step 2 of epoch 1, the journal does not hold it" in item.sentence for item in found)


def test_a_rebuilt_run_goes_back_to_the_certificate_that_it_was_rebuilt_from_and_not_behind_it() -> None:
    known = certificate(4, 6, 1, 2)
    made = known.made
    records: list[Record] = [
        RebuildRecord(epoch=1000, certificate=known, testified=(A, B), insisted=False),
        replace(view(1001, 7, 1, 2), view=replace(view(1001, 7, 1, 2).view, digest=known.digest)),
        replace(commit(8, 1001, part(A), part(B)), previous=known.digest),
        back(known, 1002, 8),
        after(1003, made.outer_step, known.digest),
    ]
    RunState.replay(records)
    proved = audit(records)
    assert proved.holds, all_findings(proved)
    assert proved.account.outer_step == 7
    records[3] = back(None, 1002, 8)
    found = all_findings(audit(records))
    assert any("and not to the certificate that the journal was rebuilt from" in item.sentence for item in found), found
