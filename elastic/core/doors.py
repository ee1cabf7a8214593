# SPDX-License-Identifier: Apache-2.0
"""Who is kept out of a run, and which tickets admit nobody any more: a fold over the journal's records.

A bar keeps out the starts of a peer up to one, and makes its certificates up to a number void. Evicting a peer bars
what there is of it now; with a ticket its next start gets a newer certificate. A ban bars whatever may come
(`FOR_EVER`). Bars only grow, so that whoever hears of them late or twice ends up with the same.

Tickets are remembered when they are revoked or, if they are for one peer, used; until they would have expired. A
ticket's id tells when it was made, so that one record revokes all that were made before. By
which one a peer was let in is remembered as well: who is banned must not come back under another key. Knows no clock:
a record says when it was made.
"""

from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.elastic.core.messages import Bar
from isthmus.elastic.core.records import BarRecord, SnapshotRecord, TicketRecord

FOR_EVER = 2**53
REVOKED = "the ticket was revoked"
MAX_BARS = 1024
"""So many peers may be barred: all of them are told to every member in one message."""
MAX_TICKETS = 4096
MAX_ADMITTED = 4096
"""Of so many peers it is known by which ticket they came, the newest ones."""


class Doors:
    """See the module."""

    def __init__(self) -> None:
        self.bars: dict[PeerId, Bar] = {}
        self.tickets: dict[bytes, TicketRecord] = {}
        """Those that do not admit everybody any more."""
        self.admitted: dict[PeerId, TicketRecord] = {}
        """By which ticket a peer was let in last."""

    @classmethod
    def restored(cls, record: SnapshotRecord) -> "Doors":
        """As a snapshot of the journal says."""
        doors = cls()
        doors.bars = {bar.peer_id: bar for bar in record.bars}
        doors.tickets = {known.ticket_id: known for known in record.tickets}
        doors.admitted = {known.used_by: known for known in record.let_in if known.used_by is not None}
        return doors

    def apply(self, record: BarRecord | TicketRecord) -> None:
        """Take a record in."""
        if isinstance(record, BarRecord):
            self.bars[record.bar.peer_id] = merged(self.bars.get(record.bar.peer_id), record.bar)
            return
        if record.used_by is None or record.is_once:
            self.tickets[record.ticket_id] = record
        if record.and_earlier:
            self.tickets = {key: known for key, known in self.tickets.items() if key >= record.ticket_id}
        if record.used_by is not None:
            self.admitted.pop(record.used_by, None)
            self.admitted[record.used_by] = record
            if len(self.admitted) > MAX_ADMITTED:
                del self.admitted[next(iter(self.admitted))]
        self.tickets = {key: known for key, known in self.tickets.items() if known.expires_at_s > record.at_s}
        self.admitted = {key: known for key, known in self.admitted.items() if known.expires_at_s > record.at_s}

    def keeps_out(self, ref: PeerRef) -> bool:
        """Whether this start of a peer was put out."""
        bar = self.bars.get(ref.peer_id)
        return bar is not None and ref.incarnation <= bar.incarnation

    def void_up_to(self, peer_id: PeerId) -> int:
        """The newest number of a certificate of this peer that is void; 0 if none is."""
        bar = self.bars.get(peer_id)
        return 0 if bar is None else bar.certificate

    def is_banned(self, peer_id: PeerId) -> bool:
        """Whether the peer is kept out whatever it shows."""
        return self.void_up_to(peer_id) >= FOR_EVER

    def num_tickets(self, at_s: int) -> int:
        """How many tickets have to be remembered then."""
        return sum(known.expires_at_s > at_s for known in self.tickets.values())

    @property
    def revoked_up_to(self) -> bytes:
        """The newest ticket that was revoked together with all earlier ones; empty if none was."""
        return max((known.ticket_id for known in self.tickets.values() if known.and_earlier), default=b"")

    def refusal(self, ticket_id: bytes, peer_id: PeerId) -> str | None:
        """Why a ticket does not admit this peer; None if nothing speaks against it here."""
        if ticket_id <= self.revoked_up_to:
            return REVOKED
        known = self.tickets.get(ticket_id)
        if known is None or known.used_by == peer_id:
            return None
        return REVOKED if known.used_by is None else "the ticket was for one peer and has been used"


def merged(known: Bar | None, bar: Bar) -> Bar:
    """What both keep out."""
    if known is None:
        return bar
    incarnation = Incarnation(max(known.incarnation, bar.incarnation))
    return Bar(bar.peer_id, incarnation, max(known.certificate, bar.certificate))
