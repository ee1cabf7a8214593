# SPDX-License-Identifier: Apache-2.0
"""What must hold of a run that real processes have made, whatever happened in it: read from events and journals.

Not a test.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from isthmus.elastic.core.messages import Held
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
from isthmus.elastic.journal import reader as journal_reader
from tests.multiprocess.processes import Process


def assert_same_commits(*processes: Process) -> dict[int, str]:
    """Every outer step has one digest, whoever committed it; returns them."""
    digests: dict[int, str] = {}
    for process in processes:
        for outer_step, digest in process.commits().items():
            assert digests.setdefault(outer_step, digest) == digest, f"{process.name} differs at {outer_step}"
    assert digests
    return digests


def read_journal(directory: Path) -> Sequence[Record]:
    """The records of a run that has ended, those in archives too."""
    reading = journal_reader.read_journal(directory / "journal.sqlite")
    assert (reading.broken, reading.base.slot) == (None, 0)
    assert reading.run_id == json.loads((directory / "run.json").read_bytes())["run_id"]
    return reading.records


@dataclass(slots=True)
class Audit:
    """What a journal proves. Building it checks that commits follow each other and no sample is consumed twice."""

    genesis: Genesis
    commits: list[CommitRecord]
    """Those that count; where the run went back, what it gave up is in `given_up`."""
    consumed: dict[int, int]
    """Outer step of the commit, by sample."""
    returned: dict[str, set[int]]
    """Samples that came back, by peer that was gone."""
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    given_up: list[CommitRecord] = field(default_factory=list)

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Audit":
        (genesis,) = (record for record in records if isinstance(record, Genesis))
        audit = cls(genesis, [], {}, {})
        held, epoch = Held(genesis.outer_step, genesis.digest), 0
        leased: dict[int, str] = {}
        for record in records:
            match record:
                case LeaseRecord():
                    for index in _indices(record.ranges):
                        assert index not in leased, f"sample {index} is leased twice at once"
                        leased[index] = record.ref.peer_id
                case ReleaseRecord():
                    audit.returned.setdefault(record.ref.peer_id, set()).update(_indices(record.ranges))
                    for index in _indices(record.ranges):
                        assert leased.pop(index) == record.ref.peer_id
                case CommitRecord():
                    assert (record.outer_step, record.previous) == (held.outer_step + 1, held.digest)
                    assert record.key.epoch >= epoch
                    held, epoch = Held(record.outer_step, record.digest), record.key.epoch
                    audit.commits.append(record)
                    for contribution in record.contributions:
                        for index in _indices(contribution.consumed):
                            assert audit.consumed.setdefault(index, record.outer_step) == record.outer_step
                            assert leased[index] == contribution.ref.peer_id
                case RollbackRecord():
                    assert record.epoch > epoch
                    assert record.given_up == held.outer_step
                    held, epoch = audit._go_back(record), record.epoch
                    leased = {index: leased[index] for index in audit.consumed}
                case RebuildRecord():
                    raise AssertionError("the journal before this one was lost: there is no whole run to audit")
                case Genesis() | ViewRecord() | BarRecord() | TicketRecord() | SnapshotRecord():
                    pass
                case _:
                    assert_never(record)
        assert sum(len(_indices(c.consumed)) for r in audit.commits for c in r.contributions) == len(audit.consumed)
        return audit

    def _go_back(self, record: RollbackRecord) -> Held:
        """What was committed after the certificate counts no more; returns the state that the run goes on from."""
        begins = Held(self.genesis.outer_step, self.genesis.digest)
        held = begins if record.certificate is None else record.certificate.made
        assert record.holders
        assert held in [begins, *(Held(item.outer_step, item.digest) for item in self.commits)]
        assert held.outer_step < record.given_up
        self.rollbacks.append(record)
        self.given_up += [item for item in self.commits if item.outer_step > held.outer_step]
        self.commits = [item for item in self.commits if item.outer_step <= held.outer_step]
        self.consumed = {index: step for index, step in self.consumed.items() if step <= held.outer_step}
        return held

    def members_at(self, outer_step: int) -> set[str]:
        """Who contributed to the commit that made this outer step."""
        (record,) = (record for record in self.commits if record.outer_step == outer_step)
        return {contribution.ref.peer_id for contribution in record.contributions}


def _indices(ranges: Sequence[Any]) -> set[int]:
    return {index for piece in ranges for index in range(piece.start, piece.stop)}
