# SPDX-License-Identifier: Apache-2.0
"""How learners become members, and who makes the first state.

* Only learners come in that have met all members, and each other (meetings.py).
* At a commit boundary every learner comes in that holds the new state, the one before it, or one that was the newest
  within the last `admission_lag_s`; what it misses it replays from a member. It must not be asked for the newest
  state only: every commit moves that, and a learner that chases it never arrives. One commit of slack is not enough
  where commits come faster than a message and its answer (test_scenarios.py: far learner).
* Whom the others have waited for in vain comes in when its pause is over (pauses.py).
* While the members are too few to commit there is no boundary to wait for: who holds the committed state comes in
  at once, pause or not. This is also how a run goes on after its last member died.
* Without any state, exactly one learner is asked to make it.
* If nobody holds the committed state: rollback.py.
"""

from collections import deque
from collections.abc import Sequence

from isthmus.collective.core.types import Epoch, Instant, PeerRef
from isthmus.elastic.core.meetings import Meetings
from isthmus.elastic.core.messages import CoordinatorMessage, Evicted, Held
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.work import MAX_STRIKES

QUORUM_EXIT_CODE = 7
MAX_COMMITS_BEHIND = 64
"""Whatever the clock says, a donor's commit log does not reach back further than this."""


class Admission:
    """Decides when a roster takes learners in. Holds which states were the newest a moment ago, and one clock."""

    def __init__(self, roster: Roster, meetings: Meetings) -> None:
        self._roster = roster
        self._meetings = meetings
        self._without_known_since: Instant | None = None  # only newcomers hold the state
        self._superseded: deque[tuple[Instant, Held]] = deque(maxlen=MAX_COMMITS_BEHIND)

    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        """A commit was just made: leavers and deviants go, learners and whoever was excused come in."""
        roster = self._roster
        state = roster.state
        epoch = Epoch(state.epoch + 1)
        evicted: dict[PeerRef, CoordinatorMessage] = {
            ref: Evicted(epoch=epoch, reason=f"other result at outer step {state.outer_step}") for ref in deviants
        }
        for ref in deviants:
            if state.strikes.of(ref.peer_id) >= MAX_STRIKES:
                evicted[ref] = roster.sends_home(ref, f"had another result at outer step {state.outer_step}")
        for ref, reason in roster.overdue().items():
            roster.counters[f"dropped: {reason}"] += 1
            evicted[ref] = Evicted(epoch=epoch, reason=reason)
        evicted |= self._meetings.unreached()
        stays = [item for item in roster.members() if not item.leaving and item.ref not in evicted]
        if state.previous is not None:
            self._superseded.append((roster.now, state.previous))
        enough = [state.committed]
        if stays:  # with no member left to replay from, it must hold the state itself
            recent = roster.now - roster.config.admission_lag_s
            enough += [state.previous, *(held for since, held in self._superseded if since >= recent)]
        into = [
            session
            for session in roster.learners()
            if session.synced is not None and session.synced in enough and session.ref not in evicted
            if roster.pauses.is_over(session.ref, state.outer_step, roster.now)
        ]
        into = self._meetings.have_met(into, stays)
        roster.cross_boundary(evicted=evicted, into=into)

    def between_commits(self) -> None:
        """Nobody can commit: take in whoever holds the committed state."""
        roster, state = self._roster, self._roster.state
        since, self._without_known_since = self._without_known_since, None
        if state.committed is None or state.view.world_size >= roster.quorum:
            return
        into = self._meetings.have_met(roster.arrived(), roster.members())
        # Whoever came first would go on alone, and the others would wait for its next commit.
        if roster.awaited - {session.ref.peer_id for session in into} and roster.now < roster.awaited_until:
            return
        roster.awaited.clear()
        # Who hands the state over has been reached by those that have fetched it.
        is_known = any(map(self._is_known, (*into, *roster.handover.keepers())))
        if into and not is_known and not state.view.members and state.certificate is not None:
            # Those whose work was committed have a while to come back: a newcomer that nobody could dial went on
            # alone, and nobody could fetch what it had committed (seed 289).
            self._without_known_since = roster.now if since is None else since
            if roster.now < self._without_known_since + roster.config.recover_s:
                return
            self._without_known_since = None
            into = self._known_rather(roster.arrived())
        roster.cross_boundary(evicted={}, into=into)

    def _known_rather(self, arrived: Sequence[Session]) -> list[Session]:
        """Those that have met each other: a known peer that works and whom it has met, and then newcomers.

        They had time to meet. A newcomer that nobody could dial took the place of a peer that held the state as well,
        and those that could reach that one never came in again (seed 916). Who has stood still as a member goes before
        nobody (seed 49).
        """
        roster = self._roster
        step, now = roster.state.outer_step, roster.now
        works = [item for item in arrived if self._is_known(item) and roster.pauses.is_over(item.ref, step, now)]
        return self._meetings.have_met([*works, *(item for item in arrived if item not in works)], ())

    def _is_known(self, session: Session) -> bool:
        """Whether a commit has held work of this peer."""
        return session.ref.peer_id in self._roster.state.reached

    def found(self) -> None:
        """Ask one learner for the first state; another one if it is lost or stuck."""
        roster = self._roster
        if roster.state.committed is not None or not roster.sessions:
            return
        order = list(roster.sessions.values())
        current = next((session for session in order if session.ref == roster.founder), None)
        if current is not None and (len(order) == 1 or roster.now < current.stalls_at(roster.config)):
            return
        place = order.index(current) + 1 if current is not None else 0
        chosen = order[place % len(order)]
        roster.founder = chosen.ref
        chosen.progressed_at = roster.now
        roster.welcome(chosen)

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could come back."""
        if self._without_known_since is not None:
            self._without_known_since = now

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        roster = self._roster
        result = [roster.awaited_until] if roster.awaited else []
        if self._without_known_since is not None:
            result.append(self._without_known_since + roster.config.recover_s)
        if roster.state.committed is None and len(roster.sessions) > 1 and roster.founder is not None:
            founder = roster.sessions.get(roster.founder.peer_id)
            if founder is not None:
                result.append(founder.stalls_at(roster.config))
        return result
