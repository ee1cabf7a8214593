# SPDX-License-Identifier: Apache-2.0
"""How peers leave, and how an orderly leaver does not take the committed state with it.

Rules:
* A member goes at the next commit boundary, with its last steps committed; at once if it asks for that.
* Who leaves in order, and would be the last that holds the newest committed state, stays until another peer holds it.
  It is no member meanwhile: no round waits for it, nothing that the others fetch moves on, and it serves as a donor.
* Of several that leave together one stays, the first of them in the view.
* It goes when another one holds the state, when nobody else is in the run, or when those that it waits for have got no
  further for `handover_timeout_s`. Who was told to join afresh, or may be on its way to a restarted coordinator, is
  still in the run for as long as that takes.
* `Leave(now=True)` asks for nothing. The Goodbye says whether anybody who stays holds the state.
"""

from collections.abc import Collection, Sequence

from isthmus.collective.core.types import Instant, OuterStep, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.holders import Holders
from isthmus.elastic.core.messages import Goodbye, Held, Leave
from isthmus.elastic.core.news import News
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views


class Handover:
    """Decides which leaver has to stay, and for how long. Holds only until when somebody is expected back."""

    def __init__(
        self, config: CoordinatorConfig, turn: Turn, roster: Roster, holders: Holders, news: News, views: Views
    ) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._holders, self._news, self._views = holders, news, views
        self._expected_until: Instant = 0.0

    # -------------------------------------------------------------------------------- facts

    def expect(self, until: Instant) -> None:
        """Somebody may join by then that is not here now."""
        self._expected_until = max(self._expected_until, until)

    def asked(self, sender: PeerRef, leave: Leave, session: Session | None) -> None:
        """A peer wants to go."""
        if session is None:
            self._asked_by_stranger(sender, leave)
            return
        state, is_standing = self._state, self._state.standing_since(sender) is not None
        alone = not self._roster.over and self._holders.is_last(session)
        goodbye = Goodbye(outer_step=state.outer_step, alone=alone, held=leave.held)
        if self._roster.over or (leave.now and not is_standing):
            self._roster.close(session)
            self._turn.send(sender, goodbye)
        elif leave.now:
            self._views.change(out={sender: goodbye}, cause=f"{sender.peer_id} left at once")
        elif is_standing:
            step = leave.held.outer_step if leave.held is not None else OuterStep(0)
            session.shows(step, state.outer_step, self._turn.now)
            session.leaving = True  # it goes at the next commit boundary, with its last steps committed
        else:
            self._asked_by_no_member(session, leave)

    def _asked_by_stranger(self, sender: PeerRef, leave: Leave) -> None:
        """Somebody without a session wants to go. It may be the only one that holds the committed state."""
        state, held = self._state, leave.held
        before = self._roster.sessions.get(sender.peer_id)
        if before is not None:
            # That start has ended. As the one who still holds the state it let this one take it along (seed 49817).
            self._views.drop({before.ref: "started again"})
        departure = state.departed.get(sender.peer_id)
        is_newest = departure is None or departure.incarnation <= sender.incarnation
        has_newest = held is not None and held == state.committed
        is_wanted = not leave.now and not self._roster.over and is_newest and self._is_wanted()
        if is_wanted and has_newest:
            self._asked_by_no_member(self._roster.open(sender, leave.address), leave)
        elif is_wanted and self._has_staged(sender, held):
            self._news.turn_away(sender, "hear of the commit that you voted for, and say again what you hold")
        else:
            alone = has_newest and not self._roster.over and not self._holders.is_held()
            self._turn.send(sender, Goodbye(outer_step=state.outer_step, alone=alone, held=held))

    def _asked_by_no_member(self, session: Session, leave: Leave) -> None:
        held = leave.held
        if held is not None and held.outer_step <= self._state.outer_step:
            known = session.synced  # a word from before the last commit may come after it
            session.synced = held if known is None or held.outer_step >= known.outer_step else known
        session.leaving = True
        self.settle()
        if self._roster.sessions.get(session.ref.peer_id) is session:
            self._tell(session)

    # -------------------------------------------------------------------------------- decisions

    def keeper_among(self, leavers: Sequence[Session], out: Collection[PeerRef]) -> Session | None:
        """Who of these members, that all want to go, has to stay. Who is put `out` now will need the state."""
        stays = [item for item in self._others() if item.ref not in out]
        if any(map(self._holders.holds, (*stays, *self._holders.keepers()))) or not self._is_awaited():
            return None
        return next((item for item in leavers if item.holds_state is not False), None)

    def stay(self, leaver: Session) -> None:
        """It was put out of the view just now, and is told what it stays for."""
        session = self._roster.open(leaver.ref, leaver.address)
        session.synced, session.leaving = self._state.committed, True
        self._tell(session)

    def settle(self) -> None:
        """Let the keepers go that nobody needs."""
        keepers, others, holds = self._holders.keepers(), self._others(), self._holders.holds
        if not keepers:
            return
        is_vain = not self._is_awaited() or (bool(others) and self._turn.now >= self._gives_up_at(keepers, others))
        held = [item for item in keepers if item.synced == self._state.committed]
        held.sort(key=lambda item: not holds(item))  # one whose connection broke may be back in a moment
        stays = None if any(map(holds, others)) or is_vain or not held else held[0]
        for session in keepers:
            # One that is on its way back would not hear it, and who came after it may be going (seed 4285).
            is_awaited = stays is not None and session.awaited_until is not None
            if session is not stays and not is_awaited:
                is_last = self._holders.is_last(session)
                self._roster.close(session)
                goodbye = Goodbye(outer_step=self._state.outer_step, alone=is_last, held=session.synced)
                self._turn.send(session.ref, goodbye)

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        keepers, others = self._holders.keepers(), self._others()
        if not keepers:
            return []
        return [self._gives_up_at(keepers, others) if others else self._awaited_until()]

    # -------------------------------------------------------------------------------- inner parts

    def _tell(self, keeper: Session) -> None:
        """It forgets what it has staged when it hears that it is no member: first it hears of the commit (seed 3)."""
        self._news.remind(keeper.ref)
        self._news.welcome(keeper)

    def _others(self) -> list[Session]:
        return [item for item in self._roster.sessions.values() if not item.leaving]

    def _is_wanted(self) -> bool:
        """Whether somebody needs the state, and nobody is known to hold it."""
        return self._is_awaited() and not self._holders.is_held()

    def _is_awaited(self) -> bool:
        return bool(self._others()) or self._turn.now < self._awaited_until()

    def _awaited_until(self) -> Instant:
        return max(self._expected_until, self._turn.sent_away_at + self._config.heartbeat_timeout_s)

    def _has_staged(self, sender: PeerRef, held: Held | None) -> bool:
        """Whether it may have the newest commit staged, and not have heard of it."""
        certificate = self._state.certificate
        if certificate is None or held is None or held.outer_step >= certificate.made.outer_step:
            return False
        return sender in [item.ref for item in certificate.contributors]

    def _gives_up_at(self, keepers: Sequence[Session], others: Sequence[Session]) -> Instant:
        moved_at = [item.progressed_at for item in keepers]
        moved_at += [max(item.progressed_at, item.grew_at) for item in others]
        return max(moved_at) + self._config.handover_timeout_s
