# SPDX-License-Identifier: Apache-2.0
"""What the records did to ranges of samples, and the pieces that all of these cut the samples into."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import NamedTuple

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.audit.beginning import Beginning, beginning_at, kept_states, slot_of_beginning
from isthmus.elastic.audit.lineage import Rollback
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import (
    CommitRecord,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    SnapshotRecord,
)


class Kind(enum.Enum):
    """What can be done to samples."""

    USED_BEFORE = enum.auto()
    """By the run whose checkpoint this one began with; unless they are FREE_BEFORE."""
    FREE_BEFORE = enum.auto()
    GIVEN = enum.auto()
    USED = enum.auto()
    RETURNED = enum.auto()


class Move(NamedTuple):
    """What the record in `slot` did to a range of samples. `step`: the outer step that used them up."""

    span: IndexRange
    slot: int
    kind: Kind
    ref: PeerRef | None = None
    step: int = 0


class Jump(NamedTuple):
    """The record in `slot` gave new samples `[start, stop)`, which begin at or behind all that were given before."""

    start: int
    stop: int
    slot: int


def moves_in(records: Sequence[Record]) -> Iterator[Move]:
    """All of them, oldest first; what a rollback undoes is among them."""
    for slot, state in kept_states(records):
        yield from _before(slot, state)
    for slot, record in enumerate(records):
        match record:
            case Genesis() | RebuildRecord() | SnapshotRecord():
                begins = beginning_at(slot, record)
                if begins is None or slot != slot_of_beginning(records):
                    continue  # there is one; the chain's check says so if not
                yield from _before(slot, begins)
                if isinstance(record, SnapshotRecord):
                    for ref, ranges in record.owned:
                        for item in ranges:
                            yield Move(item, slot, Kind.GIVEN, ref)
            case LeaseRecord(ref=ref):
                for item in record.ranges:
                    yield Move(item, slot, Kind.GIVEN, ref)
            case CommitRecord():
                for part in record.contributions:
                    for item in part.consumed:
                        yield Move(item, slot, Kind.USED, part.ref, record.outer_step)
            case ReleaseRecord(ref=ref):
                for item in record.ranges:
                    yield Move(item, slot, Kind.RETURNED, ref)
            case _:
                pass


def _before(slot: int, begins: Beginning) -> Iterator[Move]:
    end = begins.position.next_index
    yield Move(IndexRange(0, end), slot, Kind.USED_BEFORE, step=begins.outer_step)
    for item in begins.position.unconsumed:
        yield Move(item, slot, Kind.FREE_BEFORE)


def pieces_of(moves: Sequence[Move]) -> Iterator[tuple[IndexRange, list[Move]]]:
    """Cut `[0, the largest index)` at every end of every range: each piece with its moves, oldest first."""
    ends: list[tuple[int, int]] = []
    for number, move in enumerate(moves):
        if len(move.span):
            ends.append((move.span.start, number))
            ends.append((move.span.stop, ~number))
    ends.sort()
    here: set[int] = set()
    at = 0
    for position, number in ends:
        if position > at:
            yield IndexRange(at, position), [moves[index] for index in sorted(here)]
            at = position
        if number >= 0:
            here.add(number)
        else:
            here.remove(~number)


def in_order(moves: Sequence[Move], rollbacks: Sequence[Rollback]) -> Iterator[Move | Rollback]:
    """Both together, oldest first."""
    given: list[Iterable[Move | Rollback]] = [moves, rollbacks]
    return merge(*given, key=lambda item: item.slot)


def jumps_in(moves: Sequence[Move], rollbacks: Sequence[Rollback]) -> list[list[Jump]]:
    """The jumps until each rollback, and those until the end; what the run went back behind is in no later list."""
    jumps = [Jump(0, 0, moves[0].slot - 1 if moves else -1)]
    found: list[list[Jump]] = []
    for move in in_order(moves, rollbacks):
        if isinstance(move, Rollback):
            found.append(jumps)
            jumps = [jump for jump in jumps if jump.slot <= move.back_to] or jumps[:1]
        elif move.kind in (Kind.GIVEN, Kind.USED_BEFORE) and move.span.stop > jumps[-1].stop:
            jumps.append(Jump(max(move.span.start, jumps[-1].stop), move.span.stop, move.slot))
    return [*found, jumps]
