# SPDX-License-Identifier: Apache-2.0
"""Who may have samples, whichever they are: what a single record may say of its peer (I7)."""

from collections.abc import Iterator, Sequence
from typing import assert_never

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.audit.beginning import beginning_in
from isthmus.elastic.audit.findings import Finding
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    SnapshotRecord,
    TicketRecord,
    ViewRecord,
)


def lease_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """What a record may say of its peer, whichever the samples."""
    members: frozenset[PeerRef] = frozenset()
    epoch = 0
    serials: dict[PeerRef, int] = {}
    for slot, record in enumerate(records):
        wrong: list[str] = []
        match record:
            case ViewRecord(view=view, excused=excused):
                members, epoch = frozenset((*(member.ref for member in view.members), *excused)), view.epoch
            case Genesis() | RebuildRecord():
                wrong += _free_before(record)
            case RollbackRecord():
                # All leases are void, and nobody is a member; whoever comes back asks anew.
                members, epoch, serials = frozenset(), record.epoch, {}
            case LeaseRecord(ref=ref, ranges=ranges):
                wrong += _order(f"the lease of {ref.peer_id}", ranges)
                if ref not in members:
                    wrong.append(f"{ref.peer_id} is given samples and is no member")
                if record.serial <= serials.get(ref, -1):
                    wrong.append(f"request {record.serial} of {ref.peer_id} is granted after {serials[ref]}")
                serials[ref] = record.serial
            case ReleaseRecord(ref=ref, ranges=ranges):
                wrong += _order(f"the return of {ref.peer_id}", ranges)
                if ref in members:
                    wrong.append(f"{ref.peer_id} returns samples and is a member")
                if record.epoch != epoch:
                    wrong.append(f"{ref.peer_id} returns samples in epoch {record.epoch}, the view is {epoch}")
            case CommitRecord():
                for item in record.contributions:
                    wrong += _order(f"the work of {item.ref.peer_id}", item.consumed)
            case SnapshotRecord(view=view) if slot == 0:
                members, epoch = frozenset(ref for ref, _ in (*record.admitted, *record.excused)), view.epoch
                serials = {item.ref: item.serial for item in record.granted}
            case BarRecord() | TicketRecord() | SnapshotRecord():
                pass
            case _:
                assert_never(record)
        for sentence in wrong:
            yield Finding(invariant="I7", slot=slot, sentence=sentence)


def _free_before(record: Genesis | RebuildRecord) -> list[str]:
    begins = beginning_in(record)
    if begins is None:
        return []
    end, free = begins.position.next_index, begins.position.unconsumed
    wrong = _order("the run's beginning", free)
    if any(item.stop > end for item in free):
        wrong.append(f"samples from {end} on are free again before they were ever given")
    return wrong


def _order(what: str, ranges: Sequence[IndexRange]) -> list[str]:
    end = -1
    for item in ranges:
        if item.start < end or item.stop <= item.start:
            return [f"{what} does not list samples in order, each once"]
        end = item.stop
    return []
