# SPDX-License-Identifier: Apache-2.0
"""What a journal begins with: the run's first state, or, where the journal before it was lost, the newest commit that
the peers could prove; or, where it was compacted and its archives are not here, what a snapshot says.

A snapshot among other records begins nothing: it repeats what they say (snapshots.py). The first record of all is
believed instead. The commits that it keeps have slots as if they were records before it, of which the last one is the
snapshot itself: 0, -1, -2 and so on.
"""

from collections.abc import Iterator, Sequence

import msgspec

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.leases import merged
from isthmus.elastic.core.messages import DataPosition
from isthmus.elastic.core.records import BarRecord, Genesis, RebuildRecord, Record, SnapshotRecord, TicketRecord


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the first round of a journal starts from. `final`: there is no such round, the run was over."""

    outer_step: OuterStep
    digest: bytes
    position: DataPosition
    final: bool = False


def beginning_in(record: Record) -> Beginning | None:
    """The beginning that this record tells of, if it tells of one."""
    match record:
        case Genesis():
            position = DataPosition(record.next_index, record.returned)
            return Beginning(outer_step=record.outer_step, digest=record.digest, position=position)
        case RebuildRecord(certificate=certificate) if certificate is not None:
            held = certificate.made
            return Beginning(
                outer_step=held.outer_step,
                digest=held.digest,
                position=certificate.position,
                final=certificate.final,
            )
        case _:
            return None


def leading(records: Sequence[Record]) -> SnapshotRecord | None:
    """The snapshot in place of all records before these; None if these begin with the run."""
    return records[0] if records and isinstance(records[0], SnapshotRecord) else None


def beginning_at(slot: int, record: Record) -> Beginning | None:
    """The same of the record in this slot, which may be the first one of a journal that was compacted."""
    if slot or not isinstance(record, SnapshotRecord) or (held := record.committed) is None:
        return beginning_in(record)
    owned = (item for _, ranges in record.owned for item in ranges)
    position = DataPosition(record.next_index, merged((*record.free, *owned)))
    return Beginning(outer_step=held.outer_step, digest=held.digest, position=position, final=record.is_final)


def kept_commits(records: Sequence[Record]) -> Iterator[tuple[int, Certificate]]:
    """Slot and certificate of all commits that a leading snapshot keeps, oldest first."""
    snapshot = leading(records)
    if snapshot is not None:
        yield from enumerate(snapshot.commits, 1 - len(snapshot.commits))


def kept_states(records: Sequence[Record]) -> Iterator[tuple[int, Beginning]]:
    """The same of all states that it keeps, the run's first one among them if it is not forgotten."""
    snapshot = leading(records)
    if snapshot is not None and snapshot.beginning is not None:
        held, position = snapshot.beginning
        yield -len(snapshot.commits), Beginning(outer_step=held.outer_step, digest=held.digest, position=position)
    for slot, certificate in kept_commits(records):
        made, position = certificate.made, certificate.position
        yield slot, Beginning(outer_step=made.outer_step, digest=made.digest, position=position)


def first_slot(records: Sequence[Record]) -> int:
    """Where what the run did starts. Peers may have been let in or put out before; `len(records)` if that is all."""
    slots = (slot for slot, record in enumerate(records) if not isinstance(record, BarRecord | TicketRecord))
    return next(slots, len(records))


def slot_of_beginning(records: Sequence[Record]) -> int:
    """Where the beginning belongs: first, or second where nothing was proved when the journal was lost."""
    first = first_slot(records)
    record = records[first] if first < len(records) else None
    if isinstance(record, RebuildRecord) and record.certificate is None:
        return first + 1 + first_slot(records[first + 1 :])
    return first


def first_state(records: Sequence[Record]) -> Beginning | None:
    """What the journal begins with, wherever it says so; None if it does not."""
    found = (beginning_at(slot, record) for slot, record in enumerate(records))
    return next((begins for begins in found if begins is not None), None)
