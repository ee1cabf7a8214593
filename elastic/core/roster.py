# SPDX-License-Identifier: Apache-2.0
"""Who is here: one session per peer, and what the durable state makes of it, a member, excused or a learner.

It only knows; views.py changes the membership, and news.py tells of it.
"""

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.messages import Refused
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn


class Roster:
    """The sessions, and whether the run goes on for them."""

    def __init__(self, config: CoordinatorConfig, turn: Turn) -> None:
        self._config, self._state, self._turn = config, turn.state, turn
        self.sessions: dict[PeerId, Session] = {}  # in the order they came; the view says who is a member
        self.halted: Refused | None = None
        """What everybody hears once the members' results differ for good."""

    # -------------------------------------------------------------------------------- look-ups

    @property
    def over(self) -> bool:
        """Whether the run has ended: peers only go from here on, no view and no commit follows."""
        return self._state.final or self.halted is not None

    @property
    def quorum(self) -> int:
        """How many members a commit needs now: the run's first one waits for `start_peers`."""
        if self._state.certificate is not None:
            return self._config.min_peers
        return max(self._config.min_peers, self._config.start_peers)

    def is_member(self, session: Session) -> bool:
        """Whether this session belongs to a member."""
        return self._state.is_member(session.ref)

    def is_excused(self, session: Session) -> bool:
        """Whether this session is of a late member that the round goes on without."""
        return self._state.is_excused(session.ref)

    def members(self) -> list[Session]:
        """Sessions of the members by rank. Complete unless the run is over."""
        sessions, admitted = self.sessions, self._state.admitted
        known = [sessions[member.peer_id] for member in self._state.view.members if member.peer_id in sessions]
        return [session for session in known if session.ref in admitted]

    def excused(self) -> list[Session]:
        """Sessions of the late that the round goes on without."""
        return [item for item in self.sessions.values() if self.is_excused(item)]

    def learners(self) -> list[Session]:
        """Sessions of whoever may become a member and can be reached: learners, and the excused that have worked."""
        admitted = self._state.admitted
        here = [item for item in self.sessions.values() if item.ref not in admitted and not item.disconnected]
        return [item for item in here if item.comes_back and (not item.leaving or self.is_excused(item))]

    def arrived(self) -> list[Session]:
        """Learners that hold the committed state, and wait for a boundary."""
        return [item for item in self.learners() if item.synced is not None and item.synced == self._state.committed]

    # -------------------------------------------------------------------------------- who comes and goes

    def open(self, ref: PeerRef, address: str) -> Session:
        """Begin to know this start of a peer, as a learner unless the view holds it."""
        now = self._turn.now
        session = Session(ref=ref, address=address, last_heard=now, progressed_at=now, told_at=now)
        self.sessions[ref.peer_id] = session
        return session

    def close(self, session: Session) -> None:
        """Forget it: whatever it says next, it is a stranger."""
        del self.sessions[session.ref.peer_id]
        for other in self.sessions.values():
            other.met.discard(session.ref)
            other.asked.pop(session.ref, None)

    def recover(self) -> None:
        """After a restart whoever the journal names has `recover_grace_s` to dial again."""
        state, until = self._state, self._turn.now + self._config.recover_grace_s
        for ref in state.excused:
            session = self.open(ref, "")
            session.last_heard = session.awaited_until = until
            session.excused_in = state.epoch
        votes = () if state.last_commit is None else state.last_commit.contributions
        agreed = {item.ref: item.agreed for item in votes}
        for member in state.view.members:
            session = self.open(member.ref, member.address)
            session.last_heard = session.awaited_until = until
            # A member that voted for the last commit holds it or has it staged, and one that was overruled does not.
            # Of the others we learn when they speak. Not knowing is not "no": a view whose voters are all gone is
            # held by others (test_scenarios.py: recovered view without a voter).
            session.holds_state = agreed.get(member.ref)

    def halt(self, refused: Refused) -> None:
        """The run cannot go on: tell everybody, whoever speaks from now on as well."""
        self.halted = refused
        for session in self.sessions.values():
            self._turn.send(session.ref, refused)
