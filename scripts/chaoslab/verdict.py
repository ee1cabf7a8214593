# SPDX-License-Identifier: Apache-2.0
"""What must hold, checked against the evidence: every check returns sentences about what does not.

    digests     whoever says a digest of an outer step says the journal's
    steps       the journal is a chain without a gap, goes back by one at most for each power cut of all, was never
                lost and made anew (no fault here takes it), and has every commit that a peer has seen
    leases      every sample is leased, returned and consumed in turn; none is in two places, none is nowhere
    waits       every operation that can be seen from outside ends within its deadline and OVERTIME_S
    gaps        no GAP_LIMIT_S without a commit while enough healthy peers and a healthy coordinator are there
    honest      nobody was called a liar: nobody lies here
    ends        no process ends unless it was asked or killed; nothing is left behind
    recovery    the 99th percentile of every class is within its limit
    faults      something was done at all

Rules: pure; from the evidence alone, which does not know what the processes believe.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import assert_never

from isthmus.collective.core.types import RoundKey
from isthmus.elastic.audit.beginning import Beginning, beginning_in
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    ReleaseRecord,
    RollbackRecord,
    SnapshotRecord,
    TicketRecord,
    ViewRecord,
)
from isthmus.elastic.core.run_state import RunState
from scripts.chaoslab.evidence import COORDINATOR, Event, Evidence, Log, wall_s
from scripts.chaoslab.recovery import table

OVERTIME_S = 1.0
GAP_LIMIT_S = 30.0
ROUND_LIMIT_S = 20.0
"""An attempt to exchange: whoever it waits for is dropped after `members.stall_timeout` at the latest."""
CATCH_UP_LIMIT_S = 30.0
"""A snapshot of 300 KB at the slowest line that a donor bears (`Pace.floor_bytes_per_s`), and its patience."""

POWER_CUT = "power"
"""The kind of a fault that kills everybody at once: the one thing that a run may go back after."""

_ENDS_OF_A_ROUND = frozenset({"vote", "round_aborted", "commit", "learner", "leave", "log_opened"})
_ENDS_OF_A_CATCH_UP = frozenset({"catch_up", "catch_up_started", "learner", "leave", "log_opened"})


def check_digests(evidence: Evidence) -> list[str]:
    """See the module."""
    committed = {record.key: record for record in evidence.records if isinstance(record, CommitRecord)}
    digests: dict[int, set[str]] = {}  # several of a step that the run has made again
    for record in committed.values():
        digests.setdefault(record.outer_step, set()).add(record.digest.hex())
    if (begins := _beginning(evidence)) is not None:
        digests.setdefault(begins.outer_step, set()).add(begins.digest.hex())
    made = {(key.epoch, record.outer_step): record.digest.hex() for key, record in committed.items()}
    wrong = []
    for log in evidence.logs:
        for event in log.named("commit", "commit_decided", "catch_up"):
            of_round = made.get((event.get("epoch", -1), event["outer_step"]))
            expected = digests.get(event["outer_step"]) if of_round is None else {of_round}
            if expected is not None and event["digest"] not in expected:
                wrong.append(f"{log.folder}: {event['event']} of {event['outer_step']} has another digest")
        for vote in log.named("vote"):
            of_round = made.get((vote["epoch"], vote["outer_step"] + 1))
            if of_round is not None and vote["digest"] != of_round:
                wrong.append(f"{log.folder}: voted for another digest of {vote['outer_step'] + 1}")
    return wrong


def check_steps(evidence: Evidence) -> list[str]:
    """See the module."""
    wrong = []
    try:
        RunState.replay(evidence.records)
    except AssertionError as error:
        wrong.append(f"the journal contradicts itself: {error}")
    wrong += [
        f"the journal was lost, and made anew under epoch {record.epoch}"
        for record in evidence.records
        if isinstance(record, RebuildRecord)
    ]
    begins = _beginning(evidence)
    first = 0 if begins is None else begins.outer_step
    steps = [record.outer_step for record in evidence.records if isinstance(record, CommitRecord)]
    wrong += _gaps_in_steps(evidence, first)
    back = [record for record in evidence.records if isinstance(record, RollbackRecord)]
    num_cuts = sum(fault.kind == POWER_CUT for fault in evidence.faults)
    if len(back) > num_cuts:
        wrong += [f"the run went back from outer step {record.given_up} under epoch {record.epoch}" for record in back]
    wrong += [
        f"the run went back from outer step {record.given_up} to {to}, more than one"
        for record in back
        if record.given_up - (to := _back_to(record, first)) > 1
    ]
    for glimpse in evidence.glimpses:
        rows = evidence.checksums
        if len(rows) < glimpse.num_rows or (glimpse.num_rows and rows[glimpse.num_rows - 1] != glimpse.checksum):
            wrong.append(f"the journal had {glimpse.num_rows} rows once that are not there any more")
    known = set(steps)
    for log in evidence.logs:
        seen = [event["outer_step"] for event in log.named("commit", "commit_decided")]
        wrong += [
            f"{log.folder}: outer step {step} is not in the journal"
            for step in seen
            if step > first and step not in known
        ]
        for start in _starts(log):
            own = [(event["outer_step"], event["epoch"]) for event in start if event["event"] == "commit"]
            wrong += [
                f"{log.folder}: commits {b} after {a}"
                for (a, before), (b, epoch) in pairwise(own)
                if b <= a and not any(before < record.epoch <= epoch for record in back)
            ]
    return wrong


def _back_to(record: RollbackRecord, first: int) -> int:
    return first if record.certificate is None else record.certificate.made.outer_step


def _gaps_in_steps(evidence: Evidence, first: int) -> Iterator[str]:
    at = first
    for record in evidence.records:
        if isinstance(record, RollbackRecord):
            at = _back_to(record, first)
        elif isinstance(record, CommitRecord):
            if record.outer_step != at + 1:
                yield f"outer step {record.outer_step} follows {at}"
            at = record.outer_step


def check_leases(evidence: Evidence) -> list[str]:
    """Index by index, and not with the ledger that is under test."""
    wrong: list[str] = []
    owners: dict[int, tuple[str, int]] = {}
    consumed: set[int] = set()
    free: set[int] = set()
    next_index = first_index = 0
    members: set[tuple[str, int]] = set()
    targets = {_target(record) for record in evidence.records if isinstance(record, RollbackRecord)}
    pasts: dict[RoundKey | None, tuple[set[int], set[int], int]] = {}  # what was consumed, what was not, and the end
    for record in evidence.records:
        match record:
            case Genesis() | RebuildRecord():
                if (begins := beginning_in(record)) is not None:
                    next_index = first_index = begins.position.next_index
                    free = set(_indices(begins.position.unconsumed))
                    key = None if isinstance(record, Genesis) else _target(record)
                    pasts[key] = set(), set(free), next_index
            case RollbackRecord():
                past = pasts.get(_target(record))  # else it is no commit of this journal: the steps' check says so
                consumed, free, next_index = past or (consumed, free | owners.keys(), next_index)
                consumed, free, owners, members = set(consumed), set(free), {}, set()
            case ViewRecord():
                members = {(item.peer_id, item.incarnation) for item in record.view.members}
            case LeaseRecord():
                owner = (record.ref.peer_id, record.ref.incarnation)
                for index in _indices(record.ranges):
                    if index in owners or index in consumed or not (index in free or index >= next_index):
                        wrong.append(f"sample {index} is leased to {owner} but was not to be had")
                    free.discard(index)
                    owners[index] = owner
                next_index = max([next_index, *(item.stop for item in record.ranges)])
            case ReleaseRecord():
                for index in _indices(record.ranges):
                    if owners.pop(index, None) != (record.ref.peer_id, record.ref.incarnation):
                        wrong.append(f"sample {index} comes back from {record.ref.peer_id}, who did not have it")
                    free.add(index)
            case CommitRecord():
                for item in record.contributions:
                    for index in _indices(item.consumed):
                        if owners.pop(index, None) != (item.ref.peer_id, item.ref.incarnation):
                            wrong.append(f"sample {index} is consumed by {item.ref.peer_id}, who did not have it")
                        consumed.add(index)
                if record.key in targets:
                    pasts[record.key] = set(consumed), free | owners.keys(), next_index
            case BarRecord() | TicketRecord() | SnapshotRecord():
                pass
            case _:
                assert_never(record)
    nowhere = set(range(first_index, next_index)) - owners.keys() - consumed - free
    wrong += [f"sample {index} is nowhere" for index in sorted(nowhere)]
    gone = {owner for owner in owners.values() if owner not in members}
    wrong += [f"leases of {peer_id} (start {start}), who is no member, never came back" for peer_id, start in gone]
    return wrong


def check_waits(evidence: Evidence) -> list[str]:
    """See the module. Time in which the peer itself or the coordinator was hit does not count for what it waits for."""
    wrong = [
        f"site {wait.site}: {wait.what} took {wait.seconds:.1f} s, not {wait.limit_s:g} s"
        for wait in evidence.waits
        if wait.seconds - disturbed_s(evidence, wait.site, wait.at_s, wait.at_s + wait.seconds)
        > wait.limit_s + OVERTIME_S
    ]
    for log in evidence.peer_logs():
        for begin, ends, limit_s in (
            ("round_started", _ENDS_OF_A_ROUND, ROUND_LIMIT_S),
            ("catch_up_started", _ENDS_OF_A_CATCH_UP, CATCH_UP_LIMIT_S),
        ):
            for at_s, until_s in _spans(evidence, log, begin, ends):
                seconds = until_s - at_s - disturbed_s(evidence, log.site, at_s, until_s)
                if seconds > limit_s + OVERTIME_S:
                    wrong.append(f"{log.folder}: {begin} at {at_s:.1f} ended after {seconds:.1f} s, not {limit_s:g} s")
    return wrong


def check_gaps(evidence: Evidence) -> list[str]:
    """See the module."""
    commits = sorted(wall_s(event) for log in evidence.peer_logs() for event in log.named("commit"))
    moments = sorted(
        chain(
            ((at_s, "commit") for at_s in commits if evidence.began_s <= at_s <= evidence.ended_s),
            ((at_s, "able" if is_able else "unable") for at_s, is_able in evidence.able),
            [(evidence.ended_s, "end")],
        )
    )
    wrong = []
    since_s: float | None = None  # able, and without a commit
    for at_s, what in moments:
        if at_s > evidence.ended_s:
            break
        if since_s is not None and at_s - since_s > GAP_LIMIT_S:
            wrong.append(
                f"no commit for {at_s - since_s:.1f} s, {since_s - evidence.began_s:.1f} s after the beginning"
            )
        if what == "unable":
            since_s = None
        elif what == "able" or since_s is not None:
            since_s = at_s
    return wrong


def check_honest(evidence: Evidence) -> list[str]:
    """See the module."""
    return [f"{log.folder}: {event}" for log in evidence.logs for event in log.named("lied")]


def check_ends(evidence: Evidence) -> list[str]:
    """See the module."""
    wrong = [
        f"site {end.site} ended with {end.code}:\n{end.words}" for end in evidence.ends if end.code not in end.expected
    ]
    return wrong + evidence.leftovers


def check_recovery(evidence: Evidence) -> list[str]:
    """See the module."""
    return [
        f"{row.what}: {row.p99_s:.2f} s at the 99th percentile of {row.count}, not {row.limit_s:.2f} s"
        for row in table(evidence)
        if not row.holds
    ]


def check_faults(evidence: Evidence) -> list[str]:
    """See the module."""
    return [] if evidence.faults else ["no fault was done: the run was too short"]


CHECKS: dict[str, Callable[[Evidence], list[str]]] = {
    "digests": check_digests,
    "steps": check_steps,
    "leases": check_leases,
    "waits": check_waits,
    "gaps": check_gaps,
    "honest": check_honest,
    "ends": check_ends,
    "recovery": check_recovery,
    "faults": check_faults,
}


def judge(evidence: Evidence) -> dict[str, list[str]]:
    """What is wrong, by check; all lists are empty if all is well."""
    return {name: check(evidence) for name, check in CHECKS.items()}


def disturbed_s(evidence: Evidence, site: int, at_s: float, until_s: float) -> float:
    """For how long between the two this site or the coordinator was being hit."""
    spans = sorted(
        (max(at_s, fault.at_s), min(until_s, math.inf if fault.over_s is None else fault.over_s))
        for fault in evidence.faults
        if fault.over_s is not None and {site, COORDINATOR} & set(fault.victims)
    )
    total, reached = 0.0, at_s
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _starts(log: Log) -> Iterator[list[Event]]:
    """The events of each start in this folder."""
    current: list[Event] = []
    for event in log.events:
        if event["event"] == "log_opened" and current:
            yield current
            current = []
        current.append(event)
    yield current


def _spans(evidence: Evidence, log: Log, begin: str, ends: frozenset[str]) -> Iterator[tuple[float, float]]:
    """When such operations began and ended; one that its process did not survive ended with it."""
    since_s: float | None = None
    for event in log.events:
        name, at_s = event["event"], wall_s(event)
        if since_s is not None and (name in ends or (name == "fault" and event.get("kind") == "round_broke")):
            died_s = min(
                (end.at_s for end in evidence.ends if end.site == log.site and end.at_s > since_s), default=at_s
            )
            yield since_s, min(at_s, died_s)
            since_s = None
        if name == begin:
            since_s = at_s
    if since_s is not None:
        deaths_s = [end.at_s for end in evidence.ends if end.site == log.site and end.at_s > since_s]
        yield since_s, min([evidence.ended_s, *deaths_s])


def _target(record: RebuildRecord | RollbackRecord) -> RoundKey | None:
    """The round that made the state from which the run goes on; None for its beginning."""
    return None if record.certificate is None else record.certificate.key


def _beginning(evidence: Evidence) -> Beginning | None:
    return next((begins for record in evidence.records if (begins := beginning_in(record)) is not None), None)


def _indices(ranges: Iterable[IndexRange]) -> Iterator[int]:
    return chain.from_iterable(range(item.start, item.stop) for item in ranges)
