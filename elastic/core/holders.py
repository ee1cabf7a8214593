# SPDX-License-Identifier: Apache-2.0
"""Who holds the committed state, who can serve it, and who was seen to hold it. It only knows; it decides nothing.

That a peer holds the state is its own word, but for those whose vote the commit has and those who have fetched it: then
somebody else holds it, too. A new start of a peer that alone says so may be wrong, or lie: its claim (`SoleClaim`).
"""

from collections.abc import Collection
from dataclasses import dataclass

from isthmus.collective.core.types import Instant, Member, OuterStep, PeerId, PeerRef
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn


@dataclass(slots=True)
class SoleClaim:
    """One start of a peer says that it holds the committed state, alone, and nothing proves it."""

    ref: PeerRef
    outer_step: OuterStep
    named: frozenset[PeerId]
    """Whom the newest commit named then."""
    waiting_since: Instant | None = None
    """Since when half of these have been here without that state."""


class Holders:
    """See the module.

    Args:
        max_peers: of how many it is remembered that they were seen to hold the state.
    """

    def __init__(self, turn: Turn, roster: Roster, max_peers: int) -> None:
        self._state, self._roster, self._max_peers = turn.state, roster, max_peers
        self._borne: Held | None = None
        self._bearers: dict[PeerId, PeerRef] = {}  # who was seen to hold that state, here or not
        self.claim: SoleClaim | None = None
        """As `look_for_a_claim` has left it."""

    def members(self) -> tuple[Member, ...]:
        """Members that hold the committed state, or have it staged."""
        sessions = (self._roster.sessions[one.peer_id] for one in self._state.view.members)
        return tuple(session.member for session in sessions if session.holds_state is not False)

    def keepers(self) -> list[Session]:
        """Leavers that are no members any more and stay for the state."""
        standing_since = self._state.standing_since
        return [item for item in self._roster.sessions.values() if item.leaving and standing_since(item.ref) is None]

    def donors(self) -> tuple[Member, ...]:
        """Who can serve the committed state: an excused peer only where nobody else can (seed 200156)."""
        keepers = tuple(item.member for item in self.keepers() if self.holds(item))
        late = tuple(item.member for item in self._roster.excused() if self.holds(item))
        return (*self.members(), *keepers) or late

    def holds(self, session: Session) -> bool:
        """Whether it is here, and is known to hold the committed state or to have it staged."""
        committed = self._state.committed
        if session.disconnected or session.awaited_until is not None or committed is None:
            return False
        return session.holds_state is True if self._roster.is_member(session) else session.synced == committed

    def is_held(self) -> bool:
        """Whether anybody is known to hold the committed state."""
        return any(self.holds(item) for item in self._roster.sessions.values())

    def is_last(self, session: Session, going: Collection[Session] = ()) -> bool:
        """Whether this session's peer holds the committed state and nobody else is known to but those that go, too."""
        others = (item for item in self._roster.sessions.values() if item is not session and item not in going)
        return self.holds(session) and not any(self.holds(item) for item in others)

    def look_for_a_claim(self) -> SoleClaim | None:
        """Of the only peer that says it holds the state; kept while nobody else is seen to hold it, or a newer one.

        Commits that it makes alone are no proof.
        """
        state, claim = self._state, self.claim
        bearers = [item.ref for item in self._roster.sessions.values() if self._says_so(item)]
        if len(bearers) != 1 or state.certificate is None or state.final:
            self.claim = None
        elif claim is None or bearers != [claim.ref]:
            made = {PeerRef(item.peer_id, item.incarnation) for item in state.certificate.contributors}
            named = frozenset(ref.peer_id for ref in made)
            is_proven = bearers[0] in made or bearers[0] in state.contributed
            self.claim = None if is_proven else SoleClaim(bearers[0], state.outer_step, named)
        elif any(self._has_fetched(item, claim) for item in self._roster.sessions.values()):
            self.claim = None
        return self.claim

    def _says_so(self, session: Session) -> bool:
        is_member = self._roster.is_member(session)
        return session.holds_state is not False if is_member else session.synced == self._state.committed

    def _has_fetched(self, session: Session, claim: SoleClaim) -> bool:
        return session.ref != claim.ref and session.synced is not None and session.synced.outer_step >= claim.outer_step

    def note(self, ref: PeerRef) -> None:
        """This peer has said that it holds the committed state."""
        if self._borne != self._state.committed:
            self._borne, self._bearers = self._state.committed, {}
        if ref.peer_id in self._bearers or len(self._bearers) < self._max_peers:
            self._bearers[ref.peer_id] = ref

    def seen(self) -> list[PeerRef]:
        """Peers that have said so, and may be gone or hold something else by now."""
        return list(self._bearers.values()) if self._borne == self._state.committed else []
