# SPDX-License-Identifier: Apache-2.0
"""Broken variants: snapshots of the journal that forget something."""

from collections.abc import Callable

import msgspec

from isthmus.elastic.core.records import SnapshotRecord
from isthmus.elastic.core.run_state import RunState


def without(**forgotten: object) -> Callable[[RunState], SnapshotRecord]:
    """A snapshot that says nothing, or something else, in these fields."""
    return lambda state: msgspec.structs.replace(state.snapshot(), **forgotten)


def with_the_newest_commit_alone(state: RunState) -> SnapshotRecord:
    """Nothing that the run can go back to."""
    snapshot = state.snapshot()
    if not snapshot.commits:
        return snapshot
    return msgspec.structs.replace(snapshot, beginning=None, commits=snapshot.commits[-1:])
