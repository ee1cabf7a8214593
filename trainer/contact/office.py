# SPDX-License-Identifier: Apache-2.0
"""What an operator can ask of the process where a run's coordinator lives: tickets, who is there, who has to go.

Rules: what is answered with None is in the journal. Must not know how a question travels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.elastic.core.events import PutOut, RevokeTicket
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.trainer.contact.identity import RunIdentity
from isthmus.trainer.contact.ticket import Ticket, make_ticket, next_id
from isthmus.trainer.record.status import CoordinationStatus, MemberStatus, PeerStatus, Status

_TIMEOUT_S = 4.0
"""For the journal. Shorter than the command line's patience."""
_LONGEST_LIFE_S = 366 * 86_400
"""Of a ticket of which only the id is known."""
_CLOCK_AHEAD_S = 10 * _LONGEST_LIFE_S
"""By so much a coordinator's clock may have been ahead when it numbered what is void now. Found before: whoever was
admitted before the clock was set back by an hour came back without a ticket."""


@dataclass(slots=True, kw_only=True)
class Office:
    """See the module.

    Attributes:
        me: this start of this process.
        run: its id and secret.
        addresses: where the run's coordinators listen now, the likeliest first.
        fingerprint: for tickets; empty if nothing is encrypted.
        lifetime_s: of a ticket, if nobody says otherwise.
        coordinator: the run's.
        now_s: the wall clock in Unix seconds.
        program: how a loop of one's own is started, if such loops train here; else None. See `invitation`.
    """

    me: PeerRef
    run: RunIdentity
    addresses: Callable[[], Sequence[str]]
    fingerprint: bytes
    lifetime_s: float
    coordinator: CoordinatorShell
    now_s: Callable[[], float]
    program: tuple[str, ...] | None = None
    _current: Ticket | None = field(default=None, init=False)
    """The newest that is for everybody."""
    _newest_id: bytes = field(default=b"", init=False)

    def ticket(self) -> Ticket:
        """The one that others join with: the same as before while it admits, with the addresses of now."""
        current = self._current
        if current is None or current.expires_at_s <= self.now_s() or self._is_revoked(current):
            return self.new_ticket()
        self._current = current = replace(current, addresses=tuple(self.addresses()))
        return current

    def new_ticket(self, *, is_once: bool = False, lifetime_s: float | None = None) -> Ticket:
        """A new one. What was made before admits as it did."""
        self._newest_id = next_id(max(self._newest_id, self.coordinator.doors.revoked_up_to), now_s=self.now_s())
        made = make_ticket(
            ticket_id=self._newest_id,
            secret=self.run.secret,
            run_id=self.run.run_id,
            addresses=self.addresses(),
            expires_at_s=round(self.now_s() + (self.lifetime_s if lifetime_s is None else lifetime_s)),
            fingerprint=self.fingerprint,
            is_once=is_once,
        )
        if not is_once:
            self._current = made
        return made

    async def revoke(self, ticket_id: bytes | None, expires_at_s: int | None) -> str | None:
        """Let a ticket admit nobody any more, or all that were made so far. None, or why that could not be done."""
        now_s = round(self.now_s())
        order = RevokeTicket(
            ticket_id=self._later_than_all() if ticket_id is None else ticket_id,
            expires_at_s=now_s + _LONGEST_LIFE_S if expires_at_s is None else expires_at_s,
            at_s=now_s,
            and_earlier=ticket_id is None,
        )
        return await self.coordinator.order(order, timeout_s=_TIMEOUT_S)

    async def put_out(self, peer_id: PeerId, *, for_ever: bool) -> str | None:
        """Evict a peer, or ban it. None, or why that could not be done."""
        if peer_id == self.me.peer_id:
            return "the coordinator lives with this peer, and would be put out with it"
        doors = self.coordinator.doors
        void = doors.void_up_to(peer_id)
        newest = void if doors.is_banned(peer_id) else max(round((self.now_s() + _CLOCK_AHEAD_S) * 1000), void + 1)
        order = PutOut(
            peer_id=peer_id,
            incarnation=self.coordinator.newest_start(peer_id),
            certificate=newest,
            for_ever=for_ever,
            at_s=round(self.now_s()),
        )
        return await self.coordinator.order(order, timeout_s=_TIMEOUT_S)

    def _later_than_all(self) -> bytes:
        """An id above those of all tickets that were made so far, by whichever clock; new ones follow it."""
        newest = max(self._newest_id, self.coordinator.doors.revoked_up_to)
        return next_id(newest, now_s=self.now_s() + _CLOCK_AHEAD_S)

    def _is_revoked(self, ticket: Ticket) -> bool:
        return self.coordinator.doors.refusal(ticket.ticket_id, self.me.peer_id) is not None

    def status(self) -> CoordinationStatus:
        """What the coordinator knows of the run."""
        status = self.coordinator.status()
        return CoordinationStatus(
            epoch=status.view.epoch,
            outer_step=status.view.outer_step,
            num_members=status.view.world_size,
            voted=status.voted,
            num_learners=len(status.learners),
            num_late=len(status.excused),
        )

    def of_its_own(self, status: Status) -> Status:
        """The status of a process that has no peer: it is as far as the run is."""
        view = self.coordinator.status().view
        return msgspec.structs.replace(
            status,
            phase=status.phase if status.phase == "leaving" else "coordinating",
            outer_step=view.outer_step,
            epoch=view.epoch,
            members=tuple(
                MemberStatus(peer_id=one.peer_id, incarnation=one.incarnation, address=one.address)
                for one in view.members
            ),
        )

    def peers(self) -> tuple[PeerStatus, ...]:
        """Members by rank, then the late, learners, and who is kept out."""
        status = self.coordinator.status()
        there = [(member.ref, "member") for member in status.view.members]
        there += [(ref, "late") for ref in status.excused]
        there += [(ref, "learner") for ref in status.learners if ref not in status.excused]
        found = [
            PeerStatus(peer_id=ref.peer_id, state=state, incarnation=ref.incarnation, address=status.addresses.get(ref))
            for ref, state in there
        ]
        doors, present = self.coordinator.doors, {ref.peer_id for ref, _ in there}
        found += [
            PeerStatus(peer_id=peer_id, state="banned" if doors.is_banned(peer_id) else "evicted")
            for peer_id in sorted(doors.bars.keys() - present)
        ]
        return tuple(found)
