# SPDX-License-Identifier: Apache-2.0
"""When peers are given up that are gone, silent, deaf or stalled (sessions.py measures that)."""

from isthmus.collective.core.types import Instant, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import STANDS_STILL, Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views


class Watch:
    """Gives sessions up when their time is over."""

    def __init__(
        self, config: CoordinatorConfig, turn: Turn, roster: Roster, views: Views, open_round: OpenRound, pauses: Pauses
    ) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._views, self._round, self._pauses = views, open_round, pauses

    def settle(self) -> None:
        """Drop whose time is over, and whose connection is gone while a member waits for it."""
        roster, now = self._roster, self._turn.now
        accused = self._round.accused(self._state.view)
        lost: dict[PeerRef, str] = {}
        for deadline, reason, session in self._each():
            if deadline <= now:
                lost.setdefault(session.ref, reason)
                if reason == STANDS_STILL and roster.is_member(session):
                    self._pauses.missed(session.ref, self._state.outer_step, now)
        for session in roster.members():
            if session.disconnected and accused[session.ref.peer_id]:
                lost.setdefault(session.ref, "connection lost, and a member waits for it")
        self._views.drop(lost)

    def overdue(self) -> dict[PeerRef, str]:
        """The excused that are to be given up, and why. At a boundary: in mid-round it would void an exchange."""
        result: dict[PeerRef, str] = {}
        for session in self._roster.excused():
            for deadline, reason in session.deadlines(self._config, others_wait=True):
                if deadline <= self._turn.now:
                    result.setdefault(session.ref, reason)
        return result

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        return [deadline for deadline, _, _ in self._each()]

    def _each(self) -> list[tuple[Instant, str, Session]]:
        """For every session each instant at which it would be given up, and why."""
        roster, members = self._roster, self._roster.members()
        waiting = [item for item in members if item.blocked or self._round.spoke(item.ref.peer_id)]
        # Who has caught up waits for a commit boundary. If the only member hangs there is nobody else to wait for it,
        # and the learners would sit there for ever (scenarios/hung_sole_member_makes_way.toml).
        waiting += roster.arrived()
        result = []
        for session in roster.sessions.values():
            if not roster.over and roster.is_excused(session) and self._state.view.world_size >= roster.quorum:
                continue  # it keeps nobody waiting: see `overdue`
            # A member keeps the others waiting if there is a waiting one besides itself.
            others_wait = session in members and len(waiting) > (1 if session in waiting else 0)
            for deadline, reason in session.deadlines(self._config, others_wait=others_wait):
                result.append((deadline, reason, session))
        return result
