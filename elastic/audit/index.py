# SPDX-License-Identifier: Apache-2.0
"""The records by what others call them, to compare what somebody else wrote down with the journal."""

from collections.abc import Sequence

from isthmus.collective.core.types import PeerId, RoundKey, View
from isthmus.elastic.audit.beginning import beginning_at, kept_commits, leading
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


class RecordIndex:
    """Look-ups in a journal. Every value begins with its slot.

    Args:
        records: from slot 0 on.
        is_whole: False if there were more of them, and only these are known.
    """

    def __init__(self, records: Sequence[Record], *, is_whole: bool) -> None:
        self.states: dict[int, list[tuple[int, bytes]]] = {}
        """Digests by outer step, that of the beginning included; several where the run went back, the newest last."""
        self.rounds: dict[int, tuple[int, CommitRecord]] = {}
        """The newest commit by the outer step that it made."""
        self.commits: dict[RoundKey, tuple[int, CommitRecord]] = {}
        """Commit by round, those too that the run has given up since."""
        self.rollbacks: dict[int, tuple[int, RollbackRecord]] = {}
        """By epoch."""
        self.views: dict[int, tuple[int, View]] = {}
        """By epoch."""
        self.grants: set[tuple[PeerId, int, int]] = set()
        """Peer, serial, number of samples."""
        self.returns: set[tuple[PeerId, int, int]] = set()
        """Peer, epoch, number of samples."""
        self.is_whole = is_whole
        self.rebuilt_epoch = 0
        """Words of older epochs are of a journal that was lost before this one, and prove nothing."""
        self.kept = {certificate.key: certificate for _, certificate in kept_commits(records)}
        """Certificates of commits before the first record; of others from then nothing is known."""
        self.since = (0, -1)
        """Epoch and outer step of what the first record stands for, if that is a snapshot; words of before prove
        nothing, unless they are of a commit that it keeps."""
        if (snapshot := leading(records)) is not None:
            self.since = snapshot.view.epoch, snapshot.view.outer_step
            self.views[snapshot.view.epoch] = (0, snapshot.view)
            if isinstance(snapshot.rebuilt, RebuildRecord):
                self.rebuilt_epoch = snapshot.rebuilt.epoch
        for slot, record in enumerate(records):
            match record:
                case Genesis() | RebuildRecord() | SnapshotRecord():
                    self.rebuilt_epoch = record.epoch if isinstance(record, RebuildRecord) else self.rebuilt_epoch
                    if (begins := beginning_at(slot, record)) is not None:
                        self.states.setdefault(begins.outer_step, []).append((slot, begins.digest))
                case ViewRecord(view=view):
                    self.views[view.epoch] = (slot, view)
                case CommitRecord():
                    self.states.setdefault(record.outer_step, []).append((slot, record.digest))
                    self.rounds[record.outer_step] = self.commits[record.key] = (slot, record)
                case RollbackRecord(epoch=epoch):
                    self.rollbacks[epoch] = (slot, record)
                case LeaseRecord(ref=ref, serial=serial, ranges=ranges):
                    self.grants.add((ref.peer_id, serial, sum(len(item) for item in ranges)))
                case ReleaseRecord(ref=ref, epoch=epoch, ranges=ranges):
                    self.returns.add((ref.peer_id, epoch, sum(len(item) for item in ranges)))
                case BarRecord() | TicketRecord():
                    pass  # they say nothing of what the run has done
