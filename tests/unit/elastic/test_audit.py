# SPDX-License-Identifier: Apache-2.0
"""The audit of a journal: a good history is clean, and every single thing that it says can be wrong is found."""

from collections.abc import Callable

import msgspec
import pytest

from isthmus.collective.core.types import View
from isthmus.elastic.audit import Audit, audit
from isthmus.elastic.audit.coverage import DataEpoch, all_but, count_data_epochs, used_up
from isthmus.elastic.audit.findings import MAX_KEPT, Finding, judge
from isthmus.elastic.core.certificate import ballot
from isthmus.elastic.core.messages import Bar, IndexRange
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    CommittedPart,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    TicketRecord,
    ViewRecord,
)
from isthmus.elastic.core.run_state import RunState
from tests.unit.elastic.machines import KEYS, certificate, held, key, member, ref

A, B, C = ref(1), ref(2), ref(3)
Change = Callable[[list[Record]], None]


def ranges(*pairs: tuple[int, int]) -> tuple[IndexRange, ...]:
    return tuple(IndexRange(*pair) for pair in pairs)


def part(who, *used: tuple[int, int], weight: float = 8.0) -> CommittedPart:
    return CommittedPart(who, weight, 8, ranges(*used))


def view(epoch: int, step: int, *numbers: int, cause: str = "") -> ViewRecord:
    return ViewRecord(view=View(epoch, step, held(step).digest, tuple(map(member, numbers))), cause=cause)


def commit(step: int, epoch: int, *parts: CommittedPart, final: bool = False) -> CommitRecord:
    return signed(
        CommitRecord(
            key=key(epoch, step - 1),
            outer_step=step,
            previous=held(step - 1).digest,
            digest=held(step).digest,
            contributions=parts,
            final=final,
        )
    )


def signed(record: CommitRecord) -> CommitRecord:
    """With the ballots of all that agreed."""
    parts = []
    for item in record.contributions:
        words = ballot(record.key, record.previous, record.digest, item.ref, item.weight)
        signature = KEYS.of(item.ref.peer_id).sign(words) if item.agreed else b""
        parts.append(msgspec.structs.replace(item, signature=signature))
    return msgspec.structs.replace(record, contributions=tuple(parts))


def lease(who, serial: int, *given: tuple[int, int]) -> LeaseRecord:
    return LeaseRecord(ref=who, serial=serial, ranges=ranges(*given))


def history() -> list[Record]:
    """Two peers begin, one is lost, its samples return and are given again, a third one comes, the run ends."""
    return [
        Genesis(outer_step=0, digest=held(0).digest, next_index=0),
        view(1, 0, 1, 2, cause=f"{A.peer_id} joined; {B.peer_id} joined"),
        lease(A, 1, (0, 10)),
        lease(B, 1, (10, 20)),
        commit(1, 1, part(A, (0, 4)), part(B, (10, 14))),
        view(2, 1, 1, cause=f"{B.peer_id} dropped: silent"),
        ReleaseRecord(ref=B, epoch=2, ranges=ranges((14, 20))),
        lease(A, 2, (14, 20)),
        commit(2, 2, part(A, (4, 10), (14, 16))),
        view(3, 2, 1, 3, cause=f"{C.peer_id} joined"),
        lease(C, 1, (20, 30)),
        commit(3, 3, part(A, (16, 19)), part(C, (20, 30)), final=True),
    ]


def changed(slot: int, **fields: object) -> Change:
    def change(records: list[Record]) -> None:
        records[slot] = msgspec.structs.replace(records[slot], **fields)

    return change


def dropped(slot: int) -> Change:
    return lambda records: records.__delitem__(slot)


def inserted(slot: int, record: Record) -> Change:
    return lambda records: records.insert(slot, record)


def both(first: Change, second: Change) -> Change:
    def change(records: list[Record]) -> None:
        first(records)
        second(records)

    return change


def all_findings(proved: Audit) -> list[Finding]:
    return [finding for verdict in proved.verdicts for finding in verdict.findings]


def test_a_good_history_is_one_that_the_coordinator_accepts_and_is_clean() -> None:
    RunState.replay(history())
    proved = audit(history(), samples_per_data_epoch=12)
    assert proved.holds
    assert [(item.check, item.num_looked_at) for item in proved.verdicts] == [
        ("chain", 3),
        ("views", 3),
        ("contributions", 5),
        ("rollbacks", 0),
        ("snapshots", 0),
        ("leases", 30),
    ]
    count = proved.samples
    assert count.exactly_once
    assert (count.num_given, count.num_used_up, count.num_uses, count.num_returns) == (30, 29, 29, 6)
    assert (count.num_leased, count.num_free, count.num_passed_over, count.next_index) == (1, 0, 0, 30)
    assert count.data_epochs is not None
    assert count.data_epochs.num_complete == 1
    assert count.data_epochs.begun == (DataEpoch(1, 11), DataEpoch(2, 6))


def test_the_account_says_who_did_how_much_and_who_went_why() -> None:
    account = audit(history()).account
    assert (account.first_step, account.outer_step, account.is_complete) == (0, 3, True)
    assert (account.num_views, account.epoch, account.fewest_members, account.most_members) == (3, 3, 1, 2)
    assert [(item.peer_id, item.num_commits, item.num_tokens, item.num_samples) for item in account.shares] == [
        (A.peer_id, 3, 24, 15),
        (B.peer_id, 1, 8, 4),
        (C.peer_id, 1, 8, 10),
    ]
    (departure,) = account.departures
    assert (departure.peer_id, departure.epoch, departure.outer_step) == (B.peer_id, 2, 1)
    assert departure.cause == "dropped: silent"


@pytest.mark.parametrize("length", range(len(history()) + 1))
def test_a_history_cut_anywhere_is_clean(length: int) -> None:
    assert audit(history()[:length]).holds


DOORS: tuple[Record, ...] = (
    TicketRecord(b"ticket 1", 2, A.peer_id, 1),
    BarRecord(bar=Bar(ref(9).peer_id, ref(9).incarnation, 1)),
)


@pytest.mark.parametrize("slot", range(len(history()) + 1))
def test_who_was_let_in_or_put_out_is_no_part_of_what_a_run_has_done(slot: int) -> None:
    records = history()
    records[slot:slot] = DOORS
    assert audit(records).holds
    assert audit(records).samples == audit(history()).samples
    RunState.replay(records)


def test_a_start_that_was_put_out_is_in_no_later_view() -> None:
    records = history()
    slots = [slot for slot, record in enumerate(records) if isinstance(record, ViewRecord)]
    last = records[slots[-1]]
    assert isinstance(last, ViewRecord)
    member = last.view.members[0]
    records.insert(slots[-1], BarRecord(bar=Bar(member.peer_id, member.incarnation, 1)))
    (finding,) = all_findings(audit(records))
    assert finding.slot == slots[-1] + 1
    assert finding.sentence == f"{member.peer_id} is in view {last.view.epoch} after it was put out"


OTHER = bytes([9]) * 32

WRONG = {
    "no beginning": (dropped(0), "I3", 0, "does not begin with the run's first state"),
    "second beginning": (inserted(5, Genesis(outer_step=1, digest=held(1).digest, next_index=0)), "I3", 5, "again"),
    "step left out": (changed(8, outer_step=3, key=key(2, 2)), "I3", 8, "step 3 is committed where 2 was due"),
    "step made twice": (inserted(5, history()[4]), "I3", 5, "step 1 is committed where 2 was due"),
    "round of another step": (changed(8, key=key(2, 0)), "I3", 8, "a round that started from step 0"),
    "chain torn": (changed(8, previous=OTHER), "I1", 8, "step 2 starts from 090909090909, before it was"),
    "digest forged": (changed(4, digest=OTHER), "I1", 8, "before it was 090909090909"),
    "commit after the last": (changed(4, final=True), "I3", 8, "after the last one (record 4)"),
    "view after the last": (changed(4, final=True), "I3", 5, "view 2 is decided after the run's last commit"),
    "epoch repeated": (changed(5, view=view(1, 1, 1).view), "I8", 5, "epoch 1 is decided after epoch 1"),
    "view of another step": (changed(5, view=view(2, 0, 1).view), "I1", 5, "view 2 starts from step 0"),
    "view of another state": (
        changed(5, view=msgspec.structs.replace(view(2, 1, 1).view, digest=OTHER)),
        "I1",
        5,
        "(090909090909), committed is step 1",
    ),
    "member twice": (changed(9, view=view(3, 2, 1, 1, 3).view), "I2", 9, "is in view 3 2 times"),
    "incarnation goes back": (
        changed(9, view=View(3, 2, held(2).digest, (member(1, 0), member(3)))),
        "I8",
        9,
        "an older start of 0000000000000001 (0) than a view before it (1)",
    ),
    "stranger excused": (changed(5, excused=(C,)), "I2", 5, "goes on without 0000000000000003 (1), which was no"),
    "member excused": (changed(5, excused=(A,)), "I2", 5, "goes on without 0000000000000001 (1), which is a member"),
    "commit of another epoch": (changed(8, key=key(1, 1)), "I8", 8, "made in epoch 1, the view is 2"),
    "work of a stranger": (
        changed(8, contributions=(part(A, (4, 10), (14, 16)), part(C))),
        "I2",
        8,
        "holds work of 0000000000000003 (1), no member of its view",
    ),
    "work twice": (
        changed(8, contributions=(part(A, (4, 10)), part(A, (14, 16)))),
        "I2",
        8,
        "holds the work of 0000000000000001 2 times",
    ),
    "work missing": (changed(4, contributions=(part(A, (0, 4)),)), "I2", 4, "lacks the work of its member"),
    "nobody's work": (changed(8, contributions=()), "I2", 8, "nobody's work"),
    "negative weight": (changed(8, contributions=(part(A, (4, 10), weight=-1.0),)), "I2", 8, "with -1.0"),
    "endless weight": (changed(8, contributions=(part(A, (4, 10), weight=float("inf")),)), "I2", 8, "with inf"),
    "no weight": (changed(8, contributions=(part(A, (4, 10), weight=float("nan")),)), "I2", 8, "with nan"),
    "given twice": (
        changed(3, ranges=ranges((8, 18))),
        "I7",
        3,
        "2 samples (8-9) while 0000000000000001 owns",
    ),
    "given after use": (changed(7, ranges=ranges((12, 20))), "I7", 7, "2 samples (12-13), which step 1 had used up"),
    "used twice": (
        changed(8, contributions=(part(A, (3, 10)),)),
        "I7",
        8,
        "step 2 uses up sample 3, as step 1 did before",
    ),
    "used without a lease": (
        changed(8, contributions=(part(A, (4, 10), (30, 31)),)),
        "I7",
        8,
        "uses up sample 30 for 0000000000000001, which does not own them",
    ),
    "another's used": (
        changed(4, contributions=(part(A, (0, 4), (14, 15)), part(B, (10, 14)))),
        "I7",
        4,
        "uses up sample 14 for 0000000000000001, which does not own them",
    ),
    "returned after use": (
        changed(6, ranges=ranges((13, 20))),
        "I7",
        6,
        "0000000000000002 returns sample 13 without owning them",
    ),
    "another's returned": (changed(6, ranges=ranges((9, 10), (14, 20))), "I7", 6, "returns sample 9 without"),
    "never returned": (
        both(dropped(6), dropped(6)),
        "I7",
        6,
        "step 2 is committed and 0000000000000002, gone by then, owns 4 samples (16-19)",
    ),
    "returned in part": (
        both(changed(6, ranges=ranges((14, 19))), changed(7, ranges=ranges((14, 19)))),
        "I7",
        8,
        "step 2 is committed and 0000000000000002, gone by then, owns sample 19",
    ),
    "passed over": (
        both(changed(10, ranges=ranges((20, 22), (25, 33))), changed(11, contributions=(part(A), part(C, (20, 22))))),
        "I7",
        10,
        "later samples are given, 3 samples (22-24) never were",
    ),
    "lease for a stranger": (changed(7, ref=C), "I7", 7, "0000000000000003 is given samples and is no member"),
    "return of a member": (changed(6, ref=A), "I7", 6, "0000000000000001 returns samples and is a member"),
    "return of another epoch": (changed(6, epoch=1), "I7", 6, "in epoch 1, the view is 2"),
    "request granted twice": (changed(7, serial=1), "I7", 7, "request 1 of 0000000000000001 is granted after 1"),
    "lease out of order": (changed(2, ranges=ranges((5, 10), (0, 5))), "I7", 2, "the lease of 0000000000000001 does"),
    "return out of order": (changed(6, ranges=ranges((17, 20), (14, 17))), "I7", 6, "the return of"),
    "work out of order": (changed(4, contributions=(part(A, (2, 4), (0, 3)), part(B))), "I7", 4, "the work of"),
    "range without samples": (changed(2, ranges=ranges((0, 10), (12, 12))), "I7", 2, "does not list samples in order"),
    "beginning out of order": (
        changed(0, next_index=9, returned=ranges((5, 9), (0, 5))),
        "I7",
        0,
        "the run's beginning does not list",
    ),
    "free before ever given": (changed(0, returned=ranges((40, 50))), "I7", 0, "from 0 on are free again before"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_must_not_be_is_found_where_it_shows(name: str) -> None:
    change, invariant, slot, said = WRONG[name]
    records = history()
    change(records)
    found = all_findings(audit(records))
    assert any(item.invariant == invariant and item.slot == slot and said in item.sentence for item in found), found
    assert all(len(item.sentence) < 200 and "\n" not in item.sentence for item in found)


def test_one_fault_is_told_once() -> None:
    for slot, change in ((8, changed(8, previous=OTHER)), (5, changed(5, view=view(2, 0, 1).view))):
        records = history()
        change(records)
        (finding,) = all_findings(audit(records))
        assert finding.slot == slot


def test_leases_of_who_is_gone_may_return_until_the_next_commit_as_after_a_crash() -> None:
    records = history()
    records[6], records[7] = lease(A, 2, (20, 26)), records[6]
    records[8] = commit(2, 2, part(A, (4, 10)))
    assert audit(records[:9]).holds


def test_who_is_late_keeps_its_leases_while_the_others_go_on() -> None:
    records = [
        *history()[:5],
        msgspec.structs.replace(view(2, 1, 1, cause="goes on without the late"), excused=(B,)),
        commit(2, 2, part(A, (4, 8))),
        view(3, 2, 1, 2),
        commit(3, 3, part(A, (8, 10)), part(B, (14, 18))),
        view(4, 3, 1),
        ReleaseRecord(ref=B, epoch=4, ranges=ranges((18, 20))),
        commit(4, 4, part(A)),
    ]
    RunState.replay(records)
    proved = audit(records)
    assert proved.holds, all_findings(proved)
    assert [item.epoch for item in proved.account.departures] == [4]
    records[5] = msgspec.structs.replace(records[5], excused=())
    found = all_findings(audit(records))
    assert [(item.slot, item.sentence) for item in found] == [
        (6, "step 2 is committed and 0000000000000002, gone by then, owns 6 samples (14-19)")
    ]


def test_a_resumed_run_goes_on_behind_what_its_checkpoint_had_used_up() -> None:
    records = [
        Genesis(outer_step=5, digest=held(5).digest, next_index=100, returned=ranges((40, 50), (90, 100))),
        view(1, 5, 1),
        lease(A, 1, (40, 50), (90, 96)),
        lease(A, 2, (96, 104)),
        commit(6, 1, part(A, (40, 50), (100, 104))),
    ]
    proved = audit(records, samples_per_data_epoch=50)
    assert proved.holds
    assert (proved.samples.first_index, proved.samples.num_used_up, proved.samples.num_leased) == (100, 14, 10)
    assert proved.samples.data_epochs is not None
    assert (proved.samples.data_epochs.num_complete, proved.samples.data_epochs.begun) == (
        1,
        (DataEpoch(1, 40), DataEpoch(2, 4)),
    )
    records[2] = lease(A, 1, (39, 50), (90, 96))
    (finding,) = all_findings(audit(records))
    assert finding.sentence == "0000000000000001 is given sample 39, which step 5 had used up"


def test_samples_that_came_back_and_nobody_has_are_free() -> None:
    count = audit(history()[:7]).samples
    assert (count.num_returns, count.num_free, count.num_leased) == (6, 6, 6)


def test_ranges_of_any_size_cost_the_same() -> None:
    whole = 2**53
    records = [*history()[:2], lease(A, 1, (0, whole)), commit(1, 1, part(A, (0, whole)), part(B))]
    proved = audit(records, samples_per_data_epoch=3)
    assert proved.holds
    assert proved.samples.num_used_up == whole
    assert proved.samples.data_epochs is not None
    assert proved.samples.data_epochs.num_complete == whole // 3


def test_findings_without_end_are_counted_and_the_first_kept() -> None:
    findings = (Finding(invariant="I1", slot=slot, sentence="no") for slot in range(MAX_KEPT + 50))
    verdict = judge("chain", ("I1",), findings, num_looked_at=1, unit="commits")
    assert (verdict.num_findings, len(verdict.findings), verdict.holds) == (MAX_KEPT + 50, MAX_KEPT, False)


def test_data_epochs_are_counted_over_any_ranges() -> None:
    for size in range(1, 12):
        used = ranges((0, 3), (5, 6), (8, 23), (30, 31))
        indices = [index for item in used for index in range(item.start, item.stop)]
        per_epoch = {epoch: sum(index // size == epoch for index in indices) for epoch in range(40)}
        epochs = count_data_epochs(used, size)
        assert epochs.num_complete == sum(number == size for number in per_epoch.values())
        assert [(item.number, item.num_consumed) for item in epochs.begun] == [
            (epoch, number) for epoch, number in per_epoch.items() if 0 < number < size
        ]


def test_what_is_used_up_at_a_record_is_what_the_commits_until_then_name() -> None:
    assert used_up(history(), 4) == used_up(history(), 7) == ranges((0, 4), (10, 14))
    assert used_up(history(), 11) == ranges((0, 19), (20, 30))
    assert all_but(ranges((2, 4), (8, 12)), 10) == ranges((0, 2), (4, 8))
    assert all_but((), 0) == ()


def rebuilt(**fields: object) -> RebuildRecord:
    """From the commit of A, B and C in epoch 4, by A and C."""
    known = certificate(4, 6, 1, 2, 3)
    return msgspec.structs.replace(
        RebuildRecord(epoch=1000, certificate=known, testified=(A, C), insisted=False), **fields
    )


@pytest.mark.parametrize(
    ("record", "invariant", "sentence"),
    [
        (rebuilt(epoch=4), "I8", "the journal was rebuilt under epoch 4 from a commit of epoch 4"),
        (rebuilt(insisted=True), "I3", "on the word of 2 of 3 members, though somebody insisted"),
        (rebuilt(testified=(A,)), "I3", "on the word of 1 of 3 members, and nobody insisted"),
        (
            rebuilt(testified=(A, B, ref(9))),
            "I3",
            f"{ref(9).peer_id} testified when the journal was rebuilt, and is no",
        ),
        (rebuilt(testified=(A, A, B)), "I3", f"{A.peer_id} testified 2 times"),
        (rebuilt(certificate=None, testified=()), "I3", "on the word of 0 of 0 members, and nobody insisted"),
    ],
)
def test_journal_that_was_rebuilt_against_the_rule_is_found(record: Record, invariant: str, sentence: str) -> None:
    (finding,) = [finding for verdict in audit([record]).verdicts for finding in verdict.findings]
    assert (finding.invariant, finding.slot) == (invariant, 0)
    assert sentence in finding.sentence


@pytest.mark.parametrize(
    "record",
    [
        rebuilt(),
        rebuilt(testified=(A,), insisted=True),
        rebuilt(certificate=None, testified=(), insisted=True),
    ],
    ids=["by a majority", "because somebody insisted", "from nothing"],
)
def test_journal_that_was_rebuilt_by_the_rule_is_clean(record: Record) -> None:
    assert audit([record]).holds
    assert audit([*DOORS, record, *DOORS]).holds
