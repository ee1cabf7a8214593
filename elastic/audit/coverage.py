# SPDX-License-Identifier: Apache-2.0
"""Which samples are used up, as ranges: at any record, and how far that is through the data.

Ranges here are sorted, disjoint and maximal, so that equal sets are equal tuples.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from isthmus.elastic.audit.beginning import beginning_at
from isthmus.elastic.audit.findings import MAX_KEPT
from isthmus.elastic.audit.lineage import given_up_in
from isthmus.elastic.core.leases import merged
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import CommitRecord, Genesis, RebuildRecord, Record, SnapshotRecord


class DataEpoch(msgspec.Struct, frozen=True):
    """One pass over the data that is not complete."""

    number: int
    num_consumed: int


class DataEpochs(msgspec.Struct, frozen=True, kw_only=True):
    """Passes over the data: `num_samples` samples each; all of them used up in `num_complete`, some in `begun`."""

    num_samples: int
    num_complete: int
    begun: tuple[DataEpoch, ...]


def count_data_epochs(used: Iterable[IndexRange], num_samples: int) -> DataEpochs:
    """How far these ranges reach. `num_samples`: of one pass over the data, at least 1."""
    num_complete = 0
    parts: Counter[int] = Counter()
    for item in used:
        first, last = item.start // num_samples, (item.stop - 1) // num_samples
        if first == last:
            parts[first] += len(item)
        else:
            parts[first] += (first + 1) * num_samples - item.start
            parts[last] += item.stop - last * num_samples
            num_complete += last - first - 1
    num_complete += sum(number == num_samples for number in parts.values())
    begun = sorted((epoch, number) for epoch, number in parts.items() if number < num_samples)
    return DataEpochs(
        num_samples=num_samples,
        num_complete=num_complete,
        begun=tuple(DataEpoch(*item) for item in begun[:MAX_KEPT]),
    )


def used_up(records: Sequence[Record], slot: int) -> tuple[IndexRange, ...]:
    """The samples that were used up once the record in `slot` was written, those before the run's beginning included.

    What a commit used up that the run had gone back behind by then is not.
    """
    seen = records[: slot + 1]
    given_up = given_up_in(seen)
    ranges: list[IndexRange] = []
    for at, record in enumerate(seen):
        match record:
            case Genesis() | RebuildRecord() | SnapshotRecord():
                if (begins := beginning_at(at, record)) is not None:
                    ranges += all_but(begins.position.unconsumed, begins.position.next_index)
            case CommitRecord() if at not in given_up:
                ranges += (item for contribution in record.contributions for item in contribution.consumed)
            case _:
                pass
    return merged(ranges)


def all_but(ranges: Iterable[IndexRange], stop: int) -> tuple[IndexRange, ...]:
    """What these ranges leave of `[0, stop)`."""
    rest: list[IndexRange] = []
    start = 0
    for item in merged(ranges):
        if start < item.start:
            rest.append(IndexRange(start, min(item.start, stop)))
        start = item.stop
    rest.append(IndexRange(start, stop))
    return tuple(item for item in rest if len(item))
