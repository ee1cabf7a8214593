# SPDX-License-Identifier: Apache-2.0
"""An orderly leaver does not take the committed state with it.

Rules:
* Who leaves in order, and would be the last that holds the newest committed state, stays until another peer holds it.
  It is no member meanwhile: no round waits for it, nothing that the others fetch moves on, and it serves as a donor.
* Of several that leave together one stays, the first of them in the view.
* It goes when another one holds the state, when nobody else is in the run, or when those that it waits for have got no
  further for `handover_timeout_s`. Who was told to join afresh, or may be on its way to a restarted coordinator, is
  still in the run for as long as that takes.
* `Leave(now=True)` asks for nothing. The Goodbye says whether anybody who stays holds the state.

Knows sessions, not connections; how views change is the roster's business.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from isthmus.collective.core.types import Instant, Member, PeerRef
from isthmus.elastic.core.messages import Goodbye, Leave
from isthmus.elastic.core.sessions import Session

if TYPE_CHECKING:
    from isthmus.elastic.core.roster import Roster


class Handover:
    """Decides which leaver has to stay, and for how long. Holds only until when somebody is expected back."""

    def __init__(self, roster: "Roster") -> None:
        self._roster = roster
        self._expected_until: Instant = 0.0

    # -------------------------------------------------------------------------------- look-ups

    def keepers(self) -> list[Session]:
        """Leavers that are no members any more and stay for the state."""
        standing_since = self._roster.state.standing_since
        return [item for item in self._roster.sessions.values() if item.leaving and standing_since(item.ref) is None]

    def donors(self) -> list[Member]:
        """Keepers that can serve the committed state."""
        held = [item for item in self.keepers() if self._holds(item)]
        return [Member(item.ref.peer_id, item.ref.incarnation, item.address) for item in held]

    def keeper_among(self, leavers: Sequence[Session], out: Collection[PeerRef]) -> Session | None:
        """Who of these members, that all want to go, has to stay. Who is put `out` now will need the state."""
        stays = [item for item in self._others() if item.ref not in out]
        if any(self._holds(item) for item in (*stays, *self.keepers())) or not self._is_awaited():
            return None
        return next((item for item in leavers if item.holds_state is not False), None)

    def is_last(self, session: Session, going: Collection[Session] = ()) -> bool:
        """Whether this session's peer holds the committed state and nobody else is known to but those that go, too."""
        others = (item for item in self._roster.sessions.values() if item is not session and item not in going)
        return self._holds(session) and not any(self._holds(item) for item in others)

    def is_held(self) -> bool:
        """Whether anybody is known to hold the committed state."""
        return any(self._holds(item) for item in self._roster.sessions.values())

    def is_wanted(self) -> bool:
        """Whether somebody needs the state, and nobody is known to hold it."""
        return self._is_awaited() and not self.is_held()

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        keepers, others = self.keepers(), self._others()
        if not keepers:
            return []
        return [self._gives_up_at(keepers, others) if others else self._expected_until]

    # -------------------------------------------------------------------------------- facts

    def expect(self, until: Instant) -> None:
        """Somebody may join by then that is not here now."""
        self._expected_until = max(self._expected_until, until)

    def asked(self, session: Session, leave: Leave) -> None:
        """A peer that is no member wants to go."""
        roster, held = self._roster, leave.held
        if held is not None and held.outer_step <= roster.state.outer_step:
            known = session.synced  # a word from before the last commit may come after it
            session.synced = held if known is None or held.outer_step >= known.outer_step else known
        session.leaving = True
        self.settle()
        if roster.sessions.get(session.ref.peer_id) is session:
            self._tell(session)

    # -------------------------------------------------------------------------------- decisions

    def stay(self, leaver: Session) -> None:
        """It was put out of the view just now, and is told what it stays for."""
        session = self._roster.open(leaver.ref, leaver.address)
        session.synced, session.leaving = self._roster.state.committed, True
        self._tell(session)

    def settle(self) -> None:
        """Let the keepers go that nobody needs."""
        roster, keepers, others = self._roster, self.keepers(), self._others()
        if not keepers:
            return
        is_safe = any(self._holds(item) for item in others)
        is_vain = not self._is_awaited() or (bool(others) and roster.now >= self._gives_up_at(keepers, others))
        held = [item for item in keepers if item.synced == roster.state.committed]
        held.sort(key=lambda item: not self._holds(item))  # one whose connection broke may be back in a moment
        stays = None if is_safe or is_vain or not held else held[0]
        for session in keepers:
            # One that is on its way back would not hear it, and who came after it may be going (seed 4285).
            is_awaited = stays is not None and session.awaited_until is not None
            if session is not stays and not is_awaited:
                is_last = self.is_last(session)
                roster.close(session)
                roster.send(session.ref, Goodbye(outer_step=roster.state.outer_step, alone=is_last))

    # -------------------------------------------------------------------------------- inner parts

    def _tell(self, keeper: Session) -> None:
        """It forgets what it has staged when it hears that it is no member: first it hears of the commit (seed 3)."""
        self._roster.remind(keeper.ref)
        self._roster.welcome(keeper)

    def _others(self) -> list[Session]:
        return [item for item in self._roster.sessions.values() if not item.leaving]

    def _is_awaited(self) -> bool:
        return bool(self._others()) or self._roster.now < self._expected_until

    def _holds(self, session: Session) -> bool:
        """Whether it is here, and is known to hold the committed state or to have it staged."""
        committed = self._roster.state.committed
        if session.disconnected or session.awaited_until is not None or committed is None:
            return False
        return session.holds_state is True if self._roster.is_member(session) else session.synced == committed

    def _gives_up_at(self, keepers: Sequence[Session], others: Sequence[Session]) -> Instant:
        moved_at = [item.progressed_at for item in keepers]
        moved_at += [max(item.progressed_at, item.grew_at) for item in others]
        return max(moved_at) + self._roster.config.handover_timeout_s
