# SPDX-License-Identifier: Apache-2.0
"""How the coordinator puts a peer out at an operator's word, and which tickets it remembers.

Rules: the word is journalled first. With a peer that is banned goes the ticket by which it came. Whoever is put out is
told why, and then its connection ends; the others get their next view and the bar in the same breath. What was asked
for is answered in order, so that the answer means that the record is durable. What is asked for twice is done once and
answered twice.
"""

from typing import assert_never

from isthmus.collective.core.types import Incarnation, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.doors import FOR_EVER, MAX_BARS, MAX_TICKETS, merged
from isthmus.elastic.core.events import Answered, Disconnect, Ordered, PutOut, RevokeTicket, UseTicket
from isthmus.elastic.core.exit_codes import REFUSED
from isthmus.elastic.core.messages import Bar, Refused, Trust
from isthmus.elastic.core.records import BarRecord, TicketRecord
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views

EVICTED = "this peer was evicted by the operator of the run; it may join again with a ticket"
BANNED = "the key of this peer was banned from the run by its operator"


class Doorkeeper:
    """Carries orders out, and turns away whom they put out."""

    def __init__(self, config: CoordinatorConfig, turn: Turn, roster: Roster, views: Views) -> None:
        self._config, self._state, self._turn, self._roster, self._views = config, turn.state, turn, roster, views

    def obey(self, event: Ordered) -> None:
        """Do what is asked for, and answer."""
        match event.order:
            case PutOut() as order:
                refusal = self._put_out(order)
            case UseTicket() as order:
                refusal = self._use(order)
            case RevokeTicket() as order:
                fields = (order.ticket_id, order.expires_at_s, None, order.at_s)
                refusal = self._remember(TicketRecord(*fields, and_earlier=order.and_earlier))
            case _:
                assert_never(event.order)
        self._turn.order(Answered(serial=event.serial, refusal=refusal))

    def turn_away(self, sender: PeerRef) -> bool:
        """Whether this start of a peer is kept out. Then it is told so, and its connection ends."""
        if not self._state.doors.keeps_out(sender):
            return False
        self._turn.counters["kept_out"] += 1
        self._turn.send(sender, self._last_word(sender))
        self._turn.order(Disconnect(peer_id=sender.peer_id, up_to=sender.incarnation))
        return True

    def settle(self) -> None:
        """Let go of everybody who is kept out: also if a coordinator died between that record and the next view."""
        doors = self._state.doors
        for session in [item for item in self._roster.sessions.values() if doors.bars and doors.keeps_out(item.ref)]:
            ref, word = session.ref, self._last_word(session.ref)
            what = "banned" if doors.is_banned(ref.peer_id) else "evicted"
            self._views.put_out(session, word, cause=f"{ref.peer_id} {what}")
            self._turn.order(Disconnect(peer_id=ref.peer_id, up_to=ref.incarnation))

    def introduce(self, to: PeerRef) -> None:
        """Tell a peer whom to believe, if that is more than it was told when it joined."""
        trust = self._trust()
        if trust.barred or len(trust.authorities) > 1:
            self._turn.send(to, trust)

    def _trust(self) -> Trust:
        barred = tuple(sorted(self._state.doors.bars.values()))
        return Trust(authorities=self._config.authorities, barred=barred)

    def _last_word(self, ref: PeerRef) -> Refused:
        banned = self._state.doors.is_banned(ref.peer_id)
        return Refused(code=REFUSED, reason=BANNED if banned else EVICTED)

    def _put_out(self, order: PutOut) -> str | None:
        doors = self._state.doors
        known = Incarnation(FOR_EVER) if order.for_ever else self._newest_start(order)
        if known is None:
            return f"no peer {order.peer_id} is in the run"
        if order.peer_id not in doors.bars and len(doors.bars) >= MAX_BARS:
            return f"{MAX_BARS} peers are barred already, and no more can be"
        certificate = FOR_EVER if order.for_ever else order.certificate
        bar = Bar(order.peer_id, known, certificate)
        if merged(doors.bars.get(order.peer_id), bar) != doors.bars.get(order.peer_id):
            self._turn.persist(BarRecord(bar=bar))
        came_by = doors.admitted.get(order.peer_id)
        if order.for_ever and came_by is not None and came_by.expires_at_s > order.at_s:
            # Another key costs it nothing. If there is no room to remember the ticket, the ban holds all the same.
            self._remember(TicketRecord(came_by.ticket_id, came_by.expires_at_s, None, order.at_s))
        self.settle()
        self._turn.order(Disconnect(peer_id=order.peer_id, up_to=bar.incarnation))
        for other in self._roster.sessions.values():
            self._turn.send(other.ref, self._trust())
        return None

    def _newest_start(self, order: PutOut) -> Incarnation | None:
        """The newest start of the peer that is known; None if none is."""
        session = self._roster.sessions.get(order.peer_id)
        departed = self._state.departed.get(order.peer_id)
        known = (
            order.incarnation,
            None if session is None else session.ref.incarnation,
            None if departed is None else departed.incarnation,
        )
        return max((one for one in known if one is not None), default=None)

    def _use(self, order: UseTicket) -> str | None:
        doors = self._state.doors
        refusal = doors.refusal(order.ticket_id, order.used_by)
        known = doors.admitted.get(order.used_by)
        if refusal is not None or (known is not None and known.ticket_id == order.ticket_id):
            return refusal
        used = TicketRecord(order.ticket_id, order.expires_at_s, order.used_by, order.at_s, order.is_once)
        return self._remember(used)

    def _remember(self, record: TicketRecord) -> str | None:
        doors = self._state.doors
        known = doors.tickets.get(record.ticket_id)
        if known is not None and known.used_by is None and known.and_earlier >= record.and_earlier:
            return None
        # One that goes with all earlier ones makes room.
        is_kept = (record.used_by is None or record.is_once) and not record.and_earlier
        if known is None and is_kept and doors.num_tickets(record.at_s) >= MAX_TICKETS:
            return f"{MAX_TICKETS} tickets are remembered already; they are forgotten when they have expired"
        self._turn.persist(record)
        return None
