"""What a journal begins with: the run's first state, or, where the journal before it was lost, the newest commit that
the peers could prove."""

from collections.abc import Sequence

import msgspec

from collective.core.types import OuterStep
from elastic.core.messages import DataPosition
from elastic.core.records import Genesis, RebuildRecord, Record


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


def slot_of_beginning(records: Sequence[Record]) -> int:
    """Where the beginning belongs: first, or second where nothing was proved when the journal was lost."""
    return int(bool(records) and isinstance(records[0], RebuildRecord) and records[0].certificate is None)


def first_state(records: Sequence[Record]) -> Beginning | None:
    """What the journal begins with, wherever it says so; None if it does not."""
    return next((begins for record in records if (begins := beginning_in(record)) is not None), None)
