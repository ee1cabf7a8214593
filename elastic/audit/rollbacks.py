# SPDX-License-Identifier: Apache-2.0
"""Was the run allowed to go back? The check over rollbacks; their epochs are checked with the views (order.py).

A rollback gives commits up, so whoever could make one freely could take work away. It must name the newest step, which
is not the last one, an older commit as the journal itself knows it, and somebody who holds its state.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from isthmus.elastic.audit.beginning import beginning_at, kept_states
from isthmus.elastic.audit.findings import Finding, Verdict, judge
from isthmus.elastic.audit.lineage import Rollback, rollbacks_in, state_after
from isthmus.elastic.audit.proofs import certificates_at, contradictions
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.records import CommitRecord, Record, RollbackRecord


def audit_rollbacks(records: Sequence[Record]) -> Verdict:
    """I1, I2, I3, I7: the run goes back to an older commit as the journal knows it, and somebody holds that state."""
    rollbacks = rollbacks_in(records)
    findings = _findings(records, rollbacks)
    return judge("rollbacks", ("I1", "I2", "I3", "I7"), findings, num_looked_at=len(rollbacks), unit="rollbacks")


def _findings(records: Sequence[Record], rollbacks: Sequence[Rollback]) -> Iterator[Finding]:
    due = certificates_at(records, {rollback.back_to for rollback in rollbacks})
    for rollback in rollbacks:
        record = records[rollback.slot]
        assert isinstance(record, RollbackRecord)
        for sentence in (*_misplaced(records, rollback, record), *_holders(record)):
            yield Finding(invariant="I3", slot=rollback.slot, sentence=sentence)
        yield from _target(records, rollback, record, due.get(rollback.back_to))


def _misplaced(records: Sequence[Record], rollback: Rollback, record: RollbackRecord) -> Iterator[str]:
    if rollback.newest is None:
        yield "the run goes back before it began"
        return
    newest, final = _made_by(records, rollback.newest)
    if final:
        yield f"the run goes back after its last commit (record {rollback.newest})"
    if record.given_up != newest:
        yield f"the run goes back from step {record.given_up}, committed was step {newest}"


def _holders(record: RollbackRecord) -> Iterator[str]:
    if not record.holders:
        yield "the run goes back to a state that nobody holds"
    for peer_id, number in Counter(ref.peer_id for ref in record.holders).items():
        if number > 1:
            yield f"{peer_id} holds the state that the run goes back to {number} times"


def _target(
    records: Sequence[Record], rollback: Rollback, record: RollbackRecord, due: Certificate | None
) -> Iterator[Finding]:
    """The state that it goes back to is an older one of this journal."""
    certificate, slot = record.certificate, rollback.slot
    if rollback.newest is None:
        return
    newest, _ = _made_by(records, rollback.newest)
    step, _ = state_after(record, records)
    if step >= newest:
        yield Finding(invariant="I3", slot=slot, sentence=f"the run goes back to step {step}, committed is {newest}")
    elif certificate is None:
        if due is not None:
            said = "the run goes back to its beginning, and not to the certificate that the journal was rebuilt from"
            yield Finding(invariant="I3", slot=slot, sentence=said)
    elif due is None or due.key != certificate.key:
        said = f"the run goes back to step {step} of epoch {certificate.key.epoch}, the journal does not hold it"
        yield Finding(invariant="I3", slot=slot, sentence=said)
    else:
        told = f"the run goes back to a certificate of step {step} in epoch {certificate.key.epoch}"
        yield from contradictions(told, certificate, due, slot)


def _made_by(records: Sequence[Record], slot: int) -> tuple[int, bool]:
    """The outer step that this commit or beginning made, and whether it was the last one."""
    if slot < 0:
        return next(begins.outer_step for kept, begins in kept_states(records) if kept == slot), False
    record = records[slot]
    if isinstance(record, CommitRecord):
        return record.outer_step, record.final
    begins = beginning_at(slot, record)
    assert begins is not None, "the run goes back along commits and its beginning"
    return begins.outer_step, begins.final
