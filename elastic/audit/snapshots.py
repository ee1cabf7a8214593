# SPDX-License-Identifier: Apache-2.0
"""Does a snapshot say what the records before it say? Whoever restarted from it knew nothing else.

This check alone uses the coordinator's own state (run_state.py), for it asks whether going on from a snapshot is the
same as reading everything; whether what the records say is allowed the other checks judge, without it. Where a record
breaks a rule that this state demands, they say so, and later snapshots are not compared: there is nothing to compare
them with.
"""

from collections.abc import Iterator, Sequence

import msgspec

from isthmus.elastic.audit.findings import Finding, Verdict, judge
from isthmus.elastic.core.records import Record, SnapshotRecord
from isthmus.elastic.core.run_state import RunState


def audit_snapshots(records: Sequence[Record]) -> Verdict:
    """I3, I7, I8: what a restart from a snapshot knows is what the records before it tell."""
    number = sum(isinstance(record, SnapshotRecord) for record in records[1:])
    findings = _findings(records) if number else ()
    return judge("snapshots", ("I3", "I7", "I8"), findings, num_looked_at=number, unit="snapshots")


def _findings(records: Sequence[Record]) -> Iterator[Finding]:
    state = RunState()
    for slot, record in enumerate(records):
        if slot and isinstance(record, SnapshotRecord):
            due = msgspec.structs.asdict(state.snapshot())
            wrong = [name for name, value in msgspec.structs.asdict(record).items() if value != due[name]]
            if wrong:
                said = f"the snapshot tells {', '.join(wrong)} otherwise than the records before it"
                yield Finding(invariant="I3", slot=slot, sentence=said)
            continue
        try:
            state.apply(record)
        except AssertionError:
            return
