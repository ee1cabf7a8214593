# SPDX-License-Identifier: Apache-2.0
"""The verdict of scripts/chaos: a sound run passes, and every check catches what it is there for."""

import msgspec
import pytest

from isthmus.collective.core.types import Epoch, OuterStep, RoundKey
from isthmus.elastic.core.certificate import Certificate, Contributor
from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.core.records import (
    CommitRecord,
    CommittedPart,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    ViewRecord,
)
from isthmus.elastic.core.run_state import RunState
from scripts.chaoslab.evidence import End, Evidence, Fault, Glimpse, Wait, wall_s
from scripts.chaoslab.recovery import calm_round_s, recoveries, table
from scripts.chaoslab.verdict import GAP_LIMIT_S, POWER_CUT, ROUND_LIMIT_S, judge
from tests.unit.scripts.chaos_evidence import BATCH, BEGAN_S, NUM_STEPS, SITES, digest, event, log_of, ref, sound, view


def test_a_sound_run_passes_every_check() -> None:
    evidence = sound()
    evidence.faults = [_fault("kill", 20.2)]
    _remove_after(evidence, 3, 20.2)
    assert _wrong(evidence) == {}


def test_a_run_without_a_fault_shows_nothing() -> None:
    assert list(_wrong(sound())) == ["faults"]


@pytest.mark.parametrize("name", ["commit", "vote"])
def test_a_digest_that_differs_on_one_peer_is_caught(name: str) -> None:
    evidence = _disturbed()
    found = next(one for one in log_of(evidence, 2).named(name) if one["outer_step"] == 7)
    found["digest"] = "ff" * 32
    assert list(_wrong(evidence)) == ["digests"]


def test_a_snapshot_with_other_bits_is_caught() -> None:
    evidence = _disturbed()
    log_of(evidence, 2).events.append(event("catch_up", 30.0, outer_step=9, digest="ff" * 32))
    assert list(_wrong(evidence)) == ["digests"]


def test_a_step_that_is_missing_in_the_journal_is_caught() -> None:
    evidence = _disturbed()
    evidence.records = [one for one in evidence.records if not (_is_commit(one) and one.outer_step == 8)]
    assert "steps" in _wrong(evidence)


def test_a_commit_that_a_peer_saw_and_the_journal_lost_at_its_end_is_caught() -> None:
    evidence = _disturbed()
    last = {"epoch": 1, "outer_step": NUM_STEPS + 1, "digest": "aa"}
    log_of(evidence, 1).events.append(event("commit", NUM_STEPS + 0.4, **last))
    assert list(_wrong(evidence)) == ["steps"]


@pytest.mark.parametrize("seen", [Glimpse(3, b"other"), Glimpse(10_000, b"")])
def test_a_journal_that_went_back_or_was_rewritten_is_caught(seen: Glimpse) -> None:
    evidence = _disturbed()
    evidence.glimpses.append(seen)
    assert list(_wrong(evidence)) == ["steps"]


def test_a_journal_that_was_lost_and_made_anew_is_caught_and_what_follows_is_judged_from_there() -> None:
    evidence = _disturbed()
    commit = next(one for one in evidence.records if isinstance(one, CommitRecord) and one.outer_step == 5)
    known = Certificate(
        key=commit.key,
        previous=commit.previous,
        digest=commit.digest,
        contributors=tuple(
            Contributor(item.ref.peer_id, item.ref.incarnation, item.weight) for item in commit.contributions
        ),
        final=False,
        position=DataPosition(commit.contributions[-1].consumed[-1].stop, ()),
        parent=bytes(32),
    )
    anew = RebuildRecord(epoch=Epoch(5), certificate=known, testified=(ref(1), ref(2)), insisted=False)
    rest = [_with_epoch(one, 10) for one in evidence.records[evidence.records.index(commit) + 1 :]]
    evidence.records = [anew, ViewRecord(view=view(11, 5, *SITES), cause="all joined"), *rest]
    evidence.glimpses.clear()
    assert _wrong(evidence) == {"steps": ["the journal was lost, and made anew under epoch 5"]}
    evidence.records.remove(next(one for one in rest if isinstance(one, ReleaseRecord)))
    assert list(_wrong(evidence)) == ["steps", "leases"]


def test_a_run_that_went_back_after_a_power_cut_passes_and_without_one_is_caught() -> None:
    evidence = _gone_back()
    assert _wrong(evidence) == {}
    evidence.faults = [fault for fault in evidence.faults if fault.kind != POWER_CUT]
    assert _wrong(evidence) == {"steps": [f"the run went back from outer step {NUM_STEPS} under epoch 3"]}


def test_a_run_that_went_back_by_more_than_one_step_is_caught() -> None:
    evidence = _gone_back(NUM_STEPS - 2)
    assert _wrong(evidence) == {"steps": [f"the run went back from outer step {NUM_STEPS} to 58, more than one"]}


def test_what_must_not_follow_where_a_run_went_back_is_caught() -> None:
    evidence = _gone_back()
    last = evidence.records[-1]
    assert isinstance(last, CommitRecord)
    evidence.records = [*evidence.records[:-1], msgspec.structs.replace(last, previous=bytes(32))]
    assert list(_wrong(evidence)) == ["steps"]
    evidence.records = [*evidence.records[:-1], msgspec.structs.replace(last, outer_step=NUM_STEPS + 1)]
    assert "outer step 61 follows 59" in _wrong(evidence)["steps"]

    evidence = _gone_back()
    evidence.records = [*evidence.records, LeaseRecord(ref=ref(2), serial=9, ranges=(IndexRange(0, 4),))]
    assert any("sample 0 is leased" in sentence for sentence in _wrong(evidence)["leases"])

    evidence = _gone_back()
    log_of(evidence, 2).events[-1]["digest"] = digest(NUM_STEPS).hex()  # what it was before the run went back
    assert list(_wrong(evidence)) == ["digests"]


def test_a_commit_that_one_start_of_a_peer_applied_twice_is_caught() -> None:
    evidence = _disturbed()
    log = log_of(evidence, 1)
    log.events.append(dict(log.events[-1]))
    assert list(_wrong(evidence)) == ["steps"]


def test_a_sample_that_two_peers_have_at_once_is_caught() -> None:
    evidence = _disturbed()
    slot = next(slot for slot, one in enumerate(evidence.records) if isinstance(one, LeaseRecord) and one.serial == 5)
    taken = evidence.records[slot]
    assert isinstance(taken, LeaseRecord)
    doubled = LeaseRecord(ref=ref(3), serial=99, ranges=taken.ranges)
    evidence.records = [*evidence.records[: slot + 1], doubled, *evidence.records[slot + 1 :]]
    assert "leases" in _wrong(evidence)


def test_a_sample_that_is_consumed_twice_is_caught() -> None:
    evidence = _disturbed()
    commits = [one for one in evidence.records if isinstance(one, CommitRecord)]
    again = commits[4].contributions[0].consumed
    evidence.records = [_with_consumed(one, again) if one is commits[5] else one for one in evidence.records]
    assert "leases" in _wrong(evidence)


def test_leases_of_a_peer_that_is_gone_and_never_came_back_are_caught() -> None:
    evidence = _disturbed()
    evidence.records = [one for one in evidence.records if not isinstance(one, ReleaseRecord)]
    assert list(_wrong(evidence)) == ["leases"]


def test_a_sample_that_was_skipped_is_nowhere() -> None:
    evidence = _disturbed()
    ahead = LeaseRecord(ref=ref(2), serial=99, ranges=(IndexRange(10_000, 10_001),))
    evidence.records = [*evidence.records, ahead]
    assert any("nowhere" in sentence for sentence in _wrong(evidence)["leases"])


def test_an_operation_past_its_deadline_is_caught_and_one_that_its_own_fault_held_up_is_not() -> None:
    evidence = _disturbed()
    evidence.waits.append(Wait(what="answer", site=2, at_s=BEGAN_S + 10.0, seconds=5.9, limit_s=5.0))
    assert _wrong(evidence) == {}
    evidence.waits.append(Wait(what="answer", site=2, at_s=BEGAN_S + 40.0, seconds=6.1, limit_s=5.0))
    assert list(_wrong(evidence)) == ["waits"]
    evidence.faults.append(Fault(kind="disk", victims=(2,), detail="", at_s=BEGAN_S + 41.0, over_s=BEGAN_S + 42.0))
    assert _wrong(evidence) == {}


def test_an_exchange_that_hangs_is_caught() -> None:
    evidence = _disturbed()
    log = log_of(evidence, 2)
    log.events = [one for one in log.events if not _is_between(one, 11.45, 40)]  # one that began at 11.4
    (sentence,) = _wrong(evidence)["waits"]
    assert f"not {ROUND_LIMIT_S:g} s" in sentence


def test_a_stretch_without_commits_is_caught_only_while_enough_peers_are_healthy() -> None:
    evidence = _disturbed()
    for site in (1, 2, 3):
        log = log_of(evidence, site)
        log.events = [one for one in log.events if one["event"] != "commit" or not _is_between(one, 12, 46)]
    (sentence,) = _wrong(evidence)["gaps"]
    assert f"no commit for {46.1 - 12.1 + 1.0:.1f} s" in sentence
    assert GAP_LIMIT_S == 30.0
    evidence.able += [(BEGAN_S + 30.0, False), (BEGAN_S + 31.0, True)]
    assert "gaps" not in _wrong(evidence)


def test_a_process_that_ended_by_itself_is_caught() -> None:
    evidence = _disturbed()
    evidence.ends.append(End(site=1, at_s=BEGAN_S, code=1, expected=frozenset({-9, 20}), words="Traceback"))
    assert "Traceback" in _wrong(evidence)["ends"][0]


def test_what_was_left_behind_is_caught() -> None:
    evidence = _disturbed()
    evidence.leftovers.append("a process outlived its daemon")
    assert list(_wrong(evidence)) == ["ends"]


def test_survivors_that_take_too_long_are_caught() -> None:
    evidence = _disturbed()  # a kill at 20.2, with a round of 1 s
    for site in (1, 2):
        log = log_of(evidence, site)
        log.events = [one for one in log.events if one["event"] != "commit" or not _is_between(one, 20, 24)]
    (row,) = table(evidence)
    assert (row.what, row.count, row.holds) == ("kill", 1, False)
    assert row.limit_s == pytest.approx(3.0)
    assert row.p99_s == pytest.approx(24.1 - 20.2)
    assert list(_wrong(evidence)) == ["recovery"]


def test_a_commit_for_which_the_victim_had_voted_is_no_recovery() -> None:
    evidence = sound()
    evidence.faults = [_fault("kill", 20.7)]  # it voted for step 21 at 20.5
    _remove_after(evidence, 3, 20.7)
    (recovery,) = recoveries(evidence)
    assert recovery.seconds == pytest.approx(22.1 - 20.7)


def test_recovery_from_a_coordinators_end_counts_from_its_return_and_new_steps_only() -> None:
    evidence = sound()
    evidence.faults = [_fault("coordinator", 20.2, victim=0, over_s=BEGAN_S + 21.05)]
    (recovery,) = recoveries(evidence)
    assert (recovery.what, recovery.is_alone) == ("coordinator", True)
    assert recovery.seconds == pytest.approx(22.1 - 21.05)  # step 21 was decided before


def test_a_cut_peer_is_healed_when_it_commits_a_new_step() -> None:
    evidence = sound()
    evidence.faults = [_fault("cut", 20.2, over_s=BEGAN_S + 26.0)]
    log = log_of(evidence, 3)
    log.events = [one for one in log.events if not _is_between(one, 20, 31)]
    by_class = {recovery.what: recovery.seconds for recovery in recoveries(evidence)}
    assert by_class == {"cut": pytest.approx(21.1 - 20.2), "heal": pytest.approx(31.1 - 26.0)}


def test_a_peer_that_never_comes_back_from_a_cut_is_caught() -> None:
    evidence = sound()
    evidence.faults = [_fault("cut", 20.2, over_s=BEGAN_S + 26.0)]
    _remove_after(evidence, 3, 20.2)
    assert list(_wrong(evidence)) == ["recovery"]


def test_faults_that_meet_are_not_held_against_their_class() -> None:
    evidence = sound()
    evidence.faults = [_fault("kill", 20.2), _fault("freeze", 20.3, victim=2)]
    assert [recovery.is_alone for recovery in recoveries(evidence)] == [False, False]
    assert {row.what for row in table(evidence)} == {"together"}


def test_who_is_cut_off_and_was_missed_later_is_not_held_against_a_fault_that_came_meanwhile() -> None:
    """One that heard nobody voted once more; a joiner's kill after that was said to have cost five seconds."""
    evidence = sound()
    evidence.faults = [_fault("cut", 20.2, over_s=BEGAN_S + 30.0), _fault("kill", 22.3, victim=2)]
    cut, killed = (one for one in recoveries(evidence) if one.what in ("cut", "kill"))
    assert cut.seconds < 1.0
    assert not killed.is_alone
    for log in evidence.logs:
        log.events = [one | {"peer": f"peer-{log.site}"} for one in log.events]
    coordinator = log_of(evidence, 0)
    coordinator.events.append(event("view_decided", 21.5, epoch=2, members=["peer-1", "peer-2"]))
    _, killed = (one for one in recoveries(evidence) if one.what in ("cut", "kill"))
    assert killed.is_alone, "nobody waits for who is out of the view"


def test_the_calm_round_is_measured_before_the_first_fault() -> None:
    assert calm_round_s(sound()) == pytest.approx(1.0)


def _gone_back(to: int = NUM_STEPS - 1) -> Evidence:
    """Everybody loses power after the last step; 2 and 3 come back with an older one, and make the next anew."""
    evidence = _disturbed()
    slot = next(at for at, one in enumerate(evidence.records) if isinstance(one, CommitRecord) and one.outer_step == to)
    known = RunState.replay(evidence.records[: slot + 1]).certificate
    assert known is not None
    start = known.position.next_index
    ranges = (IndexRange(start, start + BATCH),)
    digests = {"digest": "ab" * 32}
    evidence.records = [
        *evidence.records,
        RollbackRecord(epoch=Epoch(3), certificate=known, given_up=OuterStep(NUM_STEPS), holders=(ref(2), ref(3))),
        ViewRecord(view=view(4, to, 2, 3), cause="both joined"),
        LeaseRecord(ref=ref(2), serial=0, ranges=ranges),
        CommitRecord(
            key=RoundKey(Epoch(4), OuterStep(to), 0),
            outer_step=OuterStep(to + 1),
            previous=digest(to),
            digest=bytes.fromhex(digests["digest"]),
            contributions=(CommittedPart(ref(2), 1.0, BATCH, ranges), CommittedPart(ref(3), 1.0, BATCH, ())),
            final=False,
        ),
    ]
    at_s = NUM_STEPS + 0.4
    log_of(evidence, 2).events.append(event("commit", at_s, epoch=4, outer_step=to + 1, fragment=0, **digests))
    evidence.faults.append(_fault(POWER_CUT, at_s))
    return evidence


def _disturbed() -> Evidence:
    evidence = sound()
    evidence.faults = [_fault("kill", 20.2)]
    _remove_after(evidence, 3, 20.2)
    return evidence


def _fault(kind: str, at_s: float, *, victim: int = 3, over_s: float | None = None) -> Fault:
    return Fault(kind=kind, victims=(victim,), detail="", at_s=BEGAN_S + at_s, over_s=over_s)


def _wrong(evidence: Evidence) -> dict[str, list[str]]:
    return {name: sentences for name, sentences in judge(evidence).items() if sentences}


def _remove_after(evidence: Evidence, site: int, at_s: float) -> None:
    log = log_of(evidence, site)
    log.events = [one for one in log.events if not _is_between(one, at_s, 1000.0)]


def _is_between(one: dict[str, object], first_s: float, last_s: float) -> bool:
    return first_s < wall_s(one) - BEGAN_S <= last_s


def _is_commit(record: Record) -> bool:
    return isinstance(record, CommitRecord)


def _with_epoch(record: Record, more: int) -> Record:
    match record:
        case ViewRecord(view=seen):
            return msgspec.structs.replace(record, view=msgspec.structs.replace(seen, epoch=Epoch(seen.epoch + more)))
        case CommitRecord(key=key):
            return msgspec.structs.replace(record, key=msgspec.structs.replace(key, epoch=Epoch(key.epoch + more)))
        case _:
            return record


def _with_consumed(record: Record, consumed: tuple[IndexRange, ...]) -> CommitRecord:
    assert isinstance(record, CommitRecord)
    first = msgspec.structs.replace(record.contributions[0], consumed=consumed)
    return msgspec.structs.replace(record, contributions=(first, *record.contributions[1:]))
