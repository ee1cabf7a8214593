"""What the journal says: the durable state of a run as a fold over its records.

The coordinator changes this state only by `apply`, with a record it persists in the same breath; a restarted one
applies the same records again. So what a restart knows is, by construction, what the journal told everybody else.
Knows nothing of connections, votes or time: those die with the process and may.
"""

from collections.abc import Collection, Iterable
from typing import assert_never

import msgspec

from collective.core.types import Epoch, Incarnation, OuterStep, PeerId, PeerRef, View
from elastic.core.certificate import Certificate, Contributor, genesis_link
from elastic.core.leases import LeaseLedger
from elastic.core.messages import DataPosition, Held
from elastic.core.records import CommitRecord, Genesis, LeaseRecord, RebuildRecord, Record, ReleaseRecord, ViewRecord
from elastic.core.work import Strikes, WorkBook

BLANK_VIEW = View(epoch=Epoch(0), outer_step=OuterStep(0), digest=b"", members=())


class Departure(msgspec.Struct, frozen=True):
    """The newest start of a peer that was a member and is no more, and the first epoch without it."""

    incarnation: Incarnation
    epoch: Epoch


class RunState:
    """Epoch, members, committed state and leases of a run."""

    def __init__(self) -> None:
        self.view = BLANK_VIEW
        self.committed: Held | None = None
        self.previous: Held | None = None
        self.last_commit: CommitRecord | None = None
        self.certificate: Certificate | None = None
        """Of the newest commit; sealed by whoever tells of it."""
        self.rebuilt: RebuildRecord | None = None
        self.admitted: dict[PeerRef, Epoch] = {}
        self.excused: dict[PeerRef, Epoch] = {}
        """Late members that the round goes on without, with the epoch of their admission."""
        self.contributed: dict[PeerRef, Held] = {}
        """The newest committed state that holds work of this member or excused peer."""
        self.reached: set[PeerId] = set()
        """Peers, in whatever start, whose work a commit has held: the others have exchanged with them."""
        self.departed: dict[PeerId, Departure] = {}
        self.leases = LeaseLedger()
        self.work = WorkBook()
        self.strikes = Strikes()
        self._link = b""  # what the next certificate names as its parent

    @classmethod
    def replay(cls, records: Iterable[Record]) -> "RunState":
        """The state after these records, oldest first."""
        state = cls()
        for record in records:
            state.apply(record)
        return state

    @property
    def epoch(self) -> Epoch:
        """Number of the newest view; 0 before the first."""
        return self.view.epoch

    @property
    def outer_step(self) -> OuterStep:
        """Number of the committed state; 0 before the run began."""
        return self.committed.outer_step if self.committed is not None else OuterStep(0)

    @property
    def final(self) -> bool:
        """Whether the run's last outer step is committed."""
        return self.certificate is not None and self.certificate.final

    def is_member(self, ref: PeerRef) -> bool:
        """Whether exactly this start of the peer is in the newest view."""
        return ref in self.admitted

    def is_excused(self, ref: PeerRef) -> bool:
        """Whether this start of the peer is late, and the round goes on without it."""
        return ref in self.excused

    def standing_since(self, ref: PeerRef) -> Epoch | None:
        """Since which epoch what this peer does counts, as a member or excused; None if it does not."""
        return self.admitted.get(ref, self.excused.get(ref))

    def apply(self, record: Record) -> None:
        """Take one record in. Asserts what I3 and I8 demand of a journal."""
        match record:
            case Genesis():
                held = Held(record.outer_step, record.digest)
                self._begin(held, DataPosition(record.next_index, record.returned))
                self._link = genesis_link(held, self.leases.position())
            case RebuildRecord():
                self._apply_rebuild(record)
            case ViewRecord(view=view, excused=excused, struck=struck):
                self._apply_view(view, excused)
                for ref in struck:
                    self.strikes.add(ref.peer_id)
            case CommitRecord():
                self._apply_commit(record)
            case LeaseRecord():
                self.leases.grant(record.ref, record.serial, record.ranges)
            case ReleaseRecord():
                self.leases.release(record.ref, record.ranges)
            case _:
                assert_never(record)

    def _begin(self, held: Held, position: DataPosition) -> None:
        assert self.committed is None, "a run begins once"
        self.committed = held
        self.leases = LeaseLedger(position.next_index, position.unconsumed)
        # The epoch stays: after a lost journal it does not begin at 0.
        self.view = msgspec.structs.replace(self.view, outer_step=held.outer_step, digest=held.digest)

    def _apply_rebuild(self, record: RebuildRecord) -> None:
        assert self.committed is None, "a run begins once"
        assert self.rebuilt is None, "a journal is rebuilt before anything else"
        self.rebuilt = record
        self.view = msgspec.structs.replace(self.view, epoch=record.epoch)
        if record.certificate is not None:
            assert record.epoch > record.certificate.key.epoch, "epochs only grow (I8)"
            self._begin(record.certificate.made, record.certificate.position)
            self.certificate = record.certificate
            self.reached.update(item.peer_id for item in record.certificate.contributors)
            self._link = record.certificate.link

    def _apply_view(self, view: View, excused: Collection[PeerRef]) -> None:
        assert view.epoch > self.view.epoch, "epochs only grow (I8)"
        assert self.committed == Held(view.outer_step, view.digest), "a view names the committed state"
        standing = self.admitted | self.excused
        self.admitted = {member.ref: standing.get(member.ref, view.epoch) for member in view.members}
        assert all(ref in standing and ref not in self.admitted for ref in excused), "only members are excused"
        self.excused = {ref: standing[ref] for ref in excused}
        for ref in standing:
            if self.standing_since(ref) is None:
                self.contributed.pop(ref, None)
                self.work.forget(ref)
                self.departed[ref.peer_id] = Departure(ref.incarnation, view.epoch)
        self.view = view

    def _apply_commit(self, record: CommitRecord) -> None:
        assert self.committed is not None, "nothing is committed before the run began"
        assert record.key.epoch == self.view.epoch, "a commit belongs to the current view"
        assert record.key.outer_step == self.committed.outer_step, "a commit starts from the committed step (I3)"
        assert record.outer_step == self.committed.outer_step + 1, "no step is skipped or made twice (I3)"
        assert record.previous == self.committed.digest, "commits form a chain (I1)"
        for item in record.contributions:
            self.leases.consume(item.ref, item.consumed)
            self.work.committed(item.ref, record.key.fragment, item.consumed)
            if not item.agreed and item.ref not in record.disputed:
                self.strikes.add(item.ref.peer_id)
            elif item.agreed and item.weight > 0.0:  # who gives nothing has shown nothing
                self.strikes.clear(item.ref.peer_id)
        self.previous = self.committed
        self.committed = Held(record.outer_step, record.digest)
        self.reached.update(item.ref.peer_id for item in record.contributions)
        self.contributed |= {item.ref: self.committed for item in record.contributions}
        self.last_commit = record
        self._certify(record)
        # The same view goes on from the new state: no epoch is spent on a commit that changes nobody's membership.
        self.view = msgspec.structs.replace(self.view, outer_step=record.outer_step, digest=record.digest)

    def _certify(self, record: CommitRecord) -> None:
        """The chain's next certificate. It follows from the records alone, bit for bit."""
        self.certificate = Certificate(
            key=record.key,
            previous=record.previous,
            digest=record.digest,
            contributors=tuple(
                Contributor(item.ref.peer_id, item.ref.incarnation, item.weight) for item in record.contributions
            ),
            final=record.final,
            position=self.leases.position(),
            parent=self._link,
        )
        self._link = self.certificate.link
