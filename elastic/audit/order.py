# SPDX-License-Identifier: Apache-2.0
"""Do the records follow each other? Three checks: the chain of commits, the views, who is in each commit.

Each walks the journal with the least memory that its rules need, and with none of the coordinator's own state
(run_state.py): where a record breaks a rule, what the record claims is believed from there on, so that one fault is
told once. Rollbacks have a check of their own (rollbacks.py), and so have samples (samples.py).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from isthmus.collective.core.types import PeerId, PeerRef, View
from isthmus.elastic.audit.beginning import beginning_at, first_slot, slot_of_beginning
from isthmus.elastic.audit.findings import Finding, Verdict, judge, short
from isthmus.elastic.audit.lineage import state_after
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    Genesis,
    RebuildRecord,
    Record,
    RollbackRecord,
    SnapshotRecord,
    ViewRecord,
)


def audit_chain(records: Sequence[Record]) -> Verdict:
    """I1, I3: one beginning; every commit starts from the state that the one before it made; none after the last."""
    commits = sum(isinstance(record, CommitRecord) for record in records)
    return judge("chain", ("I1", "I3"), _chain(records), num_looked_at=commits, unit="commits")


def audit_views(records: Sequence[Record]) -> Verdict:
    """I1, I2, I3, I8: epochs grow, starts of peers never go back, a view names the committed state, each peer once."""
    views = sum(isinstance(record, ViewRecord) for record in records)
    return judge("views", ("I1", "I2", "I3", "I8"), _views(records), num_looked_at=views, unit="views")


def audit_contributions(records: Sequence[Record]) -> Verdict:
    """I2: a commit holds exactly the members of its view, each once, with a weight that is a number."""
    parts = sum(len(record.contributions) for record in records if isinstance(record, CommitRecord))
    return judge("contributions", ("I2",), _contributions(records), num_looked_at=parts, unit="contributions")


def _chain(records: Sequence[Record]) -> Iterator[Finding]:
    first = first_slot(records)
    begins_well = Genesis | RebuildRecord if first else Genesis | RebuildRecord | SnapshotRecord
    if first < len(records) and not isinstance(records[first], begins_well):
        yield Finding(invariant="I3", slot=first, sentence="the journal does not begin with the run's first state")
    beginning = slot_of_beginning(records)
    step, digest, final_at = 0, b"", -1
    for slot, record in enumerate(records):
        if isinstance(record, RebuildRecord):
            if slot != first:
                yield Finding(invariant="I3", slot=slot, sentence="the journal was rebuilt after it had begun")
            yield from _testimony(slot, record)
        if (begins := beginning_at(slot, record)) is not None:
            if slot != beginning:
                yield Finding(invariant="I3", slot=slot, sentence=f"the run begins again, at step {begins.outer_step}")
            step, digest = begins.outer_step, begins.digest
            final_at = slot if begins.final else final_at
        elif isinstance(record, RollbackRecord):
            step, digest = state_after(record, records)
            final_at = -1
        elif isinstance(record, CommitRecord):
            made = record.outer_step
            if final_at >= 0:
                yield Finding(
                    invariant="I3",
                    slot=slot,
                    sentence=f"step {made} is committed after the last one (record {final_at})",
                )
            if made != step + 1:
                yield Finding(invariant="I3", slot=slot, sentence=f"step {made} is committed where {step + 1} was due")
            if record.key.outer_step != made - 1:
                yield Finding(
                    invariant="I3",
                    slot=slot,
                    sentence=f"step {made} was made by a round that started from step {record.key.outer_step}",
                )
            if record.previous != digest:
                yield Finding(
                    invariant="I1",
                    slot=slot,
                    sentence=f"step {made} starts from {short(record.previous)}, before it was {short(digest)}",
                )
            step, digest = made, record.digest
            final_at = slot if record.final else final_at


def _testimony(slot: int, record: RebuildRecord) -> Iterator[Finding]:
    """Members of the certificate testify, each once; it counts by their majority, or because somebody insists."""
    certificate = record.certificate
    named = set() if certificate is None else {item.peer_id for item in certificate.contributors}
    times = Counter(ref.peer_id for ref in record.testified)
    for peer_id, number in times.items():
        if peer_id not in named:
            said = f"{peer_id} testified when the journal was rebuilt, and is no member of the commit it goes on from"
            yield Finding(invariant="I3", slot=slot, sentence=said)
        if number > 1:
            said = f"{peer_id} testified {number} times when the journal was rebuilt"
            yield Finding(invariant="I3", slot=slot, sentence=said)
    if record.insisted == (2 * len(times) > len(named)):
        said = f"the journal was rebuilt on the word of {len(times)} of {len(named)} members, "
        said += "though somebody insisted" if record.insisted else "and nobody insisted"
        yield Finding(invariant="I3", slot=slot, sentence=said)


def _views(records: Sequence[Record]) -> Iterator[Finding]:
    epoch, step, digest, final_at = 0, 0, b"", -1
    incarnations: dict[PeerId, int] = {}
    barred: dict[PeerId, int] = {}
    standing: set[PeerRef] = set()
    for slot, record in enumerate(records):
        match record:
            case Genesis() | RebuildRecord():
                if isinstance(record, RebuildRecord):
                    epoch, known = record.epoch, record.certificate
                    if known is not None and known.key.epoch >= epoch:
                        said = f"the journal was rebuilt under epoch {epoch} from a commit of epoch {known.key.epoch}"
                        yield Finding(invariant="I8", slot=slot, sentence=said)
                if (begins := beginning_at(slot, record)) is not None:
                    step, digest = begins.outer_step, begins.digest
                    final_at = slot if begins.final else final_at
            case ViewRecord(view=view, excused=excused):
                if view.epoch <= epoch:
                    yield Finding(
                        invariant="I8", slot=slot, sentence=f"epoch {view.epoch} is decided after epoch {epoch}"
                    )
                if (view.outer_step, view.digest) != (step, digest):
                    yield Finding(
                        invariant="I1",
                        slot=slot,
                        sentence=f"view {view.epoch} starts from step {view.outer_step} ({short(view.digest)}), "
                        f"committed is step {step} ({short(digest)})",
                    )
                if final_at >= 0:
                    yield Finding(
                        invariant="I3",
                        slot=slot,
                        sentence=f"view {view.epoch} is decided after the run's last commit (record {final_at})",
                    )
                yield from _members(slot, view, incarnations)
                yield from _put_out(slot, view, barred)
                yield from _excused(slot, view, excused, standing)
                epoch, standing = view.epoch, {member.ref for member in view.members} | set(excused)
            case CommitRecord():
                if record.key.epoch != epoch:
                    yield Finding(
                        invariant="I8",
                        slot=slot,
                        sentence=f"step {record.outer_step} was made in epoch {record.key.epoch}, the view is {epoch}",
                    )
                step, digest = record.outer_step, record.digest
                final_at = slot if record.final else final_at
            case RollbackRecord():
                if record.epoch <= epoch:
                    said = f"the run goes back under epoch {record.epoch} after epoch {epoch}"
                    yield Finding(invariant="I8", slot=slot, sentence=said)
                yield from _holding(slot, record, incarnations)
                step, digest = state_after(record, records)
                epoch, standing, final_at = record.epoch, set(), -1
            case SnapshotRecord(view=view) if slot == 0:
                epoch, step, digest = view.epoch, view.outer_step, view.digest
                final_at = 0 if record.is_final else -1
                incarnations = {peer_id: known.incarnation for peer_id, known in record.departed}
                incarnations |= {member.peer_id: member.incarnation for member in view.members}
                barred = {bar.peer_id: bar.incarnation for bar in record.bars}
                standing = {ref for ref, _ in (*record.admitted, *record.excused)}
            case BarRecord(bar=bar):
                barred[bar.peer_id] = max(bar.incarnation, barred.get(bar.peer_id, 0))
            case _:
                pass  # leases: samples.py


def _put_out(slot: int, view: View, barred: dict[PeerId, int]) -> Iterator[Finding]:
    for member in view.members:
        if member.incarnation <= barred.get(member.peer_id, -1):
            said = f"{member.peer_id} is in view {view.epoch} after it was put out"
            yield Finding(invariant="I8", slot=slot, sentence=said)


def _members(slot: int, view: View, incarnations: dict[PeerId, int]) -> Iterator[Finding]:
    for peer_id, times in Counter(member.peer_id for member in view.members).items():
        if times > 1:
            yield Finding(invariant="I2", slot=slot, sentence=f"{peer_id} is in view {view.epoch} {times} times")
    for member in view.members:
        newest = incarnations.get(member.peer_id, member.incarnation)
        if member.incarnation < newest:
            yield Finding(
                invariant="I8",
                slot=slot,
                sentence=f"view {view.epoch} has an older start of {member.peer_id} "
                f"({member.incarnation}) than a view before it ({newest})",
            )
        incarnations[member.peer_id] = max(member.incarnation, newest)


def _holding(slot: int, record: RollbackRecord, incarnations: dict[PeerId, int]) -> Iterator[Finding]:
    for ref in record.holders:
        newest = incarnations.get(ref.peer_id, ref.incarnation)
        if ref.incarnation < newest:
            said = f"the run goes back to what an older start of {ref.peer_id} ({ref.incarnation}) holds than "
            said += f"was a member ({newest})"
            yield Finding(invariant="I8", slot=slot, sentence=said)


def _excused(slot: int, view: View, excused: Sequence[PeerRef], standing: set[PeerRef]) -> Iterator[Finding]:
    """Who is late keeps its leases: nobody gets that who was no member, nor twice."""
    for ref in excused:
        if ref not in standing or view.holds(ref):
            what = "is a member of it" if view.holds(ref) else "was no member before"
            said = f"view {view.epoch} goes on without {ref.peer_id} ({ref.incarnation}), which {what}"
            yield Finding(invariant="I2", slot=slot, sentence=said)


def _contributions(records: Sequence[Record]) -> Iterator[Finding]:
    view: View | None = None
    for slot, record in enumerate(records):
        if isinstance(record, ViewRecord) or (isinstance(record, SnapshotRecord) and slot == 0):
            view = record.view
        elif isinstance(record, RollbackRecord):
            view = None  # nobody is a member until the next one
        elif isinstance(record, CommitRecord):
            members = {member.ref for member in view.members} if view is not None else set()
            times = Counter(item.ref for item in record.contributions)
            step = record.outer_step
            for ref, number in times.items():
                if ref not in members:
                    said = f"step {step} holds work of {ref.peer_id} ({ref.incarnation}), no member of its view"
                    yield Finding(invariant="I2", slot=slot, sentence=said)
                if number > 1:
                    said = f"step {step} holds the work of {ref.peer_id} {number} times"
                    yield Finding(invariant="I2", slot=slot, sentence=said)
            for ref in sorted(members - times.keys()):
                said = f"step {step} lacks the work of its member {ref.peer_id}"
                yield Finding(invariant="I2", slot=slot, sentence=said)
            for item in record.contributions:
                if not (math.isfinite(item.weight) and item.weight >= 0):
                    said = f"step {step} weighs the work of {item.ref.peer_id} with {item.weight}"
                    yield Finding(invariant="I2", slot=slot, sentence=said)
            if not record.contributions:
                yield Finding(invariant="I2", slot=slot, sentence=f"step {step} holds nobody's work")
