# SPDX-License-Identifier: Apache-2.0
"""Where the run went back, and which commits count no more since then.

A rollback names the state that the run goes on from. What was committed after it is given up, whatever was leased is
free again, and the next commit follows that state. Here is only how the records hang together by their outer steps;
whether a rollback was allowed is judged in rollbacks.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from isthmus.elastic.audit.beginning import beginning_in, first_state, kept_states, slot_of_beginning
from isthmus.elastic.core.records import CommitRecord, Record, RollbackRecord


class Rollback(NamedTuple):
    """The record in `slot` took the run back.

    Attributes:
        slot: of the rollback.
        newest: slot of what had made the committed state until then, a commit or the beginning; None before that.
        back_to: slot of what made the state that the run goes on from; `newest` if the record names no older one, -1
            if there is none. What a leading snapshot keeps has slots too (beginning.py).
        given_up: slots of the commits that counted until then and do no more, oldest first.
    """

    slot: int
    newest: int | None
    back_to: int
    given_up: tuple[int, ...]


def rollbacks_in(records: Sequence[Record]) -> list[Rollback]:
    """All of them, oldest first. Where one names a step that is not there, the newest one before that step is meant."""
    found: list[Rollback] = []
    # Slot and outer step of the beginning and of all commits that count.
    line = [(slot, begins.outer_step) for slot, begins in kept_states(records)]
    beginning = line[0][0] if line else slot_of_beginning(records)
    for slot, record in enumerate(records):
        if isinstance(record, CommitRecord):
            line.append((slot, record.outer_step))
        elif isinstance(record, RollbackRecord):
            newest = line[-1][0] if line else None
            given_up: list[int] = []  # newest first
            step = -1 if record.certificate is None else record.certificate.made.outer_step
            while line and line[-1][1] > step and line[-1][0] != beginning:
                popped, _ = line.pop()
                if popped >= 0 and isinstance(records[popped], CommitRecord):  # else nothing is known of its samples
                    given_up.append(popped)
            found.append(Rollback(slot, newest, line[-1][0] if line else -1, tuple(given_up[::-1])))
        elif slot == beginning and (begins := beginning_in(record)) is not None:
            line.append((slot, begins.outer_step))
    return found


def given_up_in(records: Sequence[Record]) -> frozenset[int]:
    """The slots of all commits that count no more at the end of these records."""
    return frozenset(slot for rollback in rollbacks_in(records) for slot in rollback.given_up)


def state_after(record: RollbackRecord, records: Sequence[Record]) -> tuple[int, bytes]:
    """Outer step and digest of the state that the run goes on from, as the rollback says."""
    if record.certificate is not None:
        return record.certificate.made.outer_step, record.certificate.digest
    kept = next((begins for _, begins in kept_states(records)), None)
    begins = first_state(records) if kept is None else kept
    return (0, b"") if begins is None else (begins.outer_step, begins.digest)
