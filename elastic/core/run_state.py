# SPDX-License-Identifier: Apache-2.0
"""What the journal says: the durable state of a run as a fold over its records.

The coordinator changes this state only by `apply`, with a record it persists in the same breath; a restarted one
applies the same records again. So what a restart knows is, by construction, what the journal told everybody else.
All of it can be written down as one record (`snapshot`), from which it comes back in the same order.
Knows nothing of connections, votes or time: those die with the process and may.
"""

from collections.abc import Collection, Iterable
from typing import assert_never

import msgspec

from isthmus.collective.core.types import Epoch, OuterStep, PeerId, PeerRef, View
from isthmus.elastic.core.certificate import Certificate, Contributor, genesis_link
from isthmus.elastic.core.doors import Doors
from isthmus.elastic.core.leases import LeaseLedger
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.past import Past, Pasts
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    Departure,
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
from isthmus.elastic.core.sizes import Sizes
from isthmus.elastic.core.work import Strikes, WorkBook

BLANK_VIEW = View(epoch=Epoch(0), outer_step=OuterStep(0), digest=b"", members=())


def contributors_of(record: CommitRecord) -> tuple[Contributor, ...]:
    """As the certificate of this commit names them, with as many signatures as it takes to prove it."""
    missing, named = len(record.contributions) // 2 + 1, list[Contributor]()
    for item in record.contributions:
        signature = item.signature if missing else b""
        missing -= bool(signature)
        named.append(Contributor(item.ref.peer_id, item.ref.incarnation, item.weight, signature))
    return tuple(named)


class RunState:
    """Epoch, members, committed state and leases of a run, and who is kept out of it."""

    def __init__(self) -> None:
        self.view = BLANK_VIEW
        self.committed: Held | None = None
        self.previous: Held | None = None
        self.last_commit: CommitRecord | None = None
        self.certificate: Certificate | None = None
        """Of the newest commit; sealed by whoever tells of it."""
        self.rebuilt: RebuildRecord | RollbackRecord | None = None
        """Where the run went back last: words from before it are void."""
        self.admitted: dict[PeerRef, Epoch] = {}
        self.excused: dict[PeerRef, Epoch] = {}
        """Late members that the round goes on without, with the epoch of their admission."""
        self.contributed: dict[PeerRef, Held] = {}
        """The newest committed state that holds work of this member or excused peer."""
        self.reached: dict[PeerId, OuterStep] = {}
        """Peers, in whatever start, whose work a commit has held: the others have exchanged with them. Since when."""
        self.departed: dict[PeerId, Departure] = {}
        self.leases = LeaseLedger()
        self.work = WorkBook()
        self.strikes = Strikes()
        self.sizes = Sizes()
        self.doors = Doors()
        self._link = b""  # what the next certificate names as its parent
        self._past = Pasts()
        self._is_blank = True

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

    def past(self, held: Held) -> Past | None:
        """What is known of a state that was committed, unless that is too long ago."""
        return self._past.find(held)

    def apply(self, record: Record) -> None:
        """Take one record in. Asserts what I3 and I8 demand of a journal."""
        is_blank, self._is_blank = self._is_blank, False
        match record:
            case SnapshotRecord() if is_blank:
                self._restore(record)
            case SnapshotRecord():
                assert record == self.snapshot(), "a snapshot says what the records before it say"
            case Genesis():
                held = Held(record.outer_step, record.digest)
                position = LeaseLedger(record.next_index, record.returned).position()
                self._begin(Past(held, position, genesis_link(held, position)))
            case RebuildRecord():
                self._apply_rebuild(record)
            case RollbackRecord():
                self._apply_rollback(record)
            case ViewRecord(view=view, excused=excused, struck=struck):
                self._apply_view(view, excused)
                for ref in struck:
                    self.strikes.add(ref)
            case CommitRecord():
                self._apply_commit(record)
            case LeaseRecord():
                self.leases.grant(record.ref, record.serial, record.ranges)
            case ReleaseRecord():
                self.leases.release(record.ref, record.ranges)
            case BarRecord() | TicketRecord():
                self.doors.apply(record)
            case _:
                assert_never(record)

    def snapshot(self) -> SnapshotRecord:
        """All of this as a record: whoever begins with it goes on as if it had read every record before."""
        begins = [item for item in self._past if item.certificate is None]  # the first one, if any
        return SnapshotRecord(
            view=self.view,
            admitted=tuple(self.admitted.items()),
            excused=tuple(self.excused.items()),
            contributed=tuple(self.contributed.items()),
            reached=tuple(self.reached.items()),
            departed=tuple(self.departed.items()),
            previous=self.previous,
            last_commit=self.last_commit,
            rebuilt=self.rebuilt,
            beginning=(begins[0].held, begins[0].position) if begins else None,
            commits=tuple(item.certificate for item in self._past if item.certificate is not None),
            next_index=self.leases.next_index,
            free=self.leases.free,
            owned=self.leases.owned(),
            granted=self.leases.granted(),
            work=self.work.items(),
            strikes=self.strikes.items(),
            bars=tuple(self.doors.bars.values()),
            tickets=tuple(self.doors.tickets.values()),
            let_in=tuple(self.doors.admitted.values()),
            sizes=self.sizes.known(),
        )

    def _restore(self, record: SnapshotRecord) -> None:
        if record.beginning is not None:
            held, position = record.beginning
            self._past.append(Past(held, position, genesis_link(held, position)))
        for certificate in record.commits:
            self._past.append(Past(certificate.made, certificate.position, certificate.link, certificate))
        newest = self._past.newest
        if newest is not None:
            self.committed, self.certificate, self._link = newest.held, newest.certificate, newest.link
        self.view, self.previous, self.last_commit = record.view, record.previous, record.last_commit
        self.rebuilt = record.rebuilt
        self.admitted, self.excused = dict(record.admitted), dict(record.excused)
        self.contributed, self.departed = dict(record.contributed), dict(record.departed)
        self.reached = dict(record.reached)
        self.leases = LeaseLedger.restored(record)
        self.work, self.strikes = WorkBook.restored(record.work), Strikes(record.strikes)
        self.doors, self.sizes = Doors.restored(record), Sizes(record.sizes)

    def _begin(self, at: Past) -> None:
        assert self.committed is None, "a run begins once"
        self._past.append(at)
        self._go_to(at)
        # The epoch stays: after a lost journal it does not begin at 0.
        self.view = msgspec.structs.replace(self.view, outer_step=at.held.outer_step, digest=at.held.digest)

    def _go_to(self, at: Past) -> None:
        self.committed, self.previous = at.held, None
        self.last_commit, self.certificate = None, at.certificate
        self.leases = LeaseLedger(at.position.next_index, at.position.unconsumed)
        self._link = at.link

    def _apply_rebuild(self, record: RebuildRecord) -> None:
        assert self.committed is None, "a run begins once"
        assert self.rebuilt is None, "a journal is rebuilt before anything else"
        self.rebuilt = record
        self.view = msgspec.structs.replace(self.view, epoch=record.epoch)
        certificate = record.certificate
        if certificate is not None:
            assert record.epoch > certificate.key.epoch, "epochs only grow (I8)"
            self._begin(Past(certificate.made, certificate.position, certificate.link, certificate))
            self.reached = dict.fromkeys(
                (item.peer_id for item in certificate.contributors), certificate.made.outer_step
            )

    def _apply_rollback(self, record: RollbackRecord) -> None:
        assert record.epoch > self.view.epoch, "epochs only grow (I8)"
        assert record.given_up == self.outer_step, "what is given up was committed"
        at = self._past.go_back(record.certificate)
        assert at.held.outer_step < record.given_up, "the run goes back"
        for ref in self.admitted | self.excused:
            self.departed[ref.peer_id] = Departure(ref.incarnation, record.epoch)
        self.admitted, self.excused, self.contributed = {}, {}, {}
        self._go_to(at)
        self.view = View(epoch=record.epoch, outer_step=at.held.outer_step, digest=at.held.digest, members=())
        self.rebuilt = record

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
                self.strikes.add(item.ref)
            elif item.agreed and item.weight > 0.0:  # who gives nothing has shown nothing
                self.strikes.clear(item.ref.peer_id)
        self.previous = self.committed
        self.committed = Held(record.outer_step, record.digest)
        for item in record.contributions:
            self.reached.setdefault(item.ref.peer_id, record.outer_step)
        self.contributed |= {item.ref: self.committed for item in record.contributions}
        self.sizes.committed({item.ref.peer_id: item.size for item in record.contributions}, record.usual_size)
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
            contributors=contributors_of(record),
            final=record.final,
            position=self.leases.position(),
            parent=self._link,
        )
        self._link = self.certificate.link
        self._past.append(Past(self.certificate.made, self.certificate.position, self._link, self.certificate))
