# SPDX-License-Identifier: Apache-2.0
"""What a journal begins with: the run's first state, or, where the journal before it was lost, the newest commit that
the peers could prove."""

from collections.abc import Sequence

import msgspec

from collective.core.types import OuterStep
from elastic.core.messages import DataPosition
from elastic.core.records import BarRecord, Genesis, RebuildRecord, Record, TicketRecord


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
    return next((begins for record in records if (begins := beginning_in(record)) is not None), None)
