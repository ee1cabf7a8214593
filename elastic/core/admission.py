# SPDX-License-Identifier: Apache-2.0
"""How the membership changes between two rounds: leavers go, learners become members. And who makes the first state.

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
from collections.abc import Mapping, Sequence

from isthmus.collective.core.types import Epoch, Instant, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.handover import Handover
from isthmus.elastic.core.holders import Holders
from isthmus.elastic.core.meetings import Meetings
from isthmus.elastic.core.messages import CoordinatorMessage, Evicted, Goodbye, Held
from isthmus.elastic.core.news import News
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.rendezvous import Rendezvous
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views
from isthmus.elastic.core.watch import Watch
from isthmus.elastic.core.work import MAX_STRIKES

MAX_COMMITS_BEHIND = 64
"""Whatever the clock says, a donor's commit log does not reach back further than this."""


class Admission:
    """Decides who comes in and who goes. Holds which states were the newest a moment ago, and one clock."""

    def __init__(
        self,
        config: CoordinatorConfig,
        turn: Turn,
        roster: Roster,
        news: News,
        views: Views,
        *,
        holders: Holders,
        handover: Handover,
        meetings: Meetings,
        pauses: Pauses,
        rendezvous: Rendezvous,
        watch: Watch,
    ) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._news, self._views, self._holders, self._handover = news, views, holders, handover
        self._meetings, self._pauses, self._rendezvous, self._watch = meetings, pauses, rendezvous, watch
        self._without_known_since: Instant | None = None  # only newcomers hold the state
        self._superseded: deque[tuple[Instant, Held]] = deque(maxlen=MAX_COMMITS_BEHIND)

    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        """A commit was just made: leavers and deviants go, learners and whoever was excused come in."""
        state, now = self._state, self._turn.now
        epoch, step = Epoch(state.epoch + 1), state.outer_step
        evicted: dict[PeerRef, CoordinatorMessage] = {
            ref: Evicted(epoch=epoch, reason=f"other result at outer step {step}")
            if state.strikes.of(ref.peer_id) < MAX_STRIKES
            else self._news.sends_home(ref, f"had another result at outer step {step}")
            for ref in deviants
        }
        for ref, reason in self._watch.overdue().items():
            self._turn.counters[f"dropped: {reason}"] += 1
            evicted[ref] = Evicted(epoch=epoch, reason=reason)
        evicted |= self._meetings.unreached()
        stays = [item for item in self._roster.members() if not item.leaving and item.ref not in evicted]
        if state.previous is not None:
            self._superseded.append((now, state.previous))
        enough = [state.committed]
        if stays:  # with no member left to replay from, it must hold the state itself
            recent = now - self._config.admission_lag_s
            enough += [state.previous, *(held for since, held in self._superseded if since >= recent)]
        into = [
            session
            for session in self._roster.learners()
            if session.synced is not None and session.synced in enough and session.ref not in evicted
            if self._pauses.is_over(session.ref, step, now)
        ]
        self._cross(evicted, self._meetings.have_met(into, stays))

    def between_commits(self) -> None:
        """Nobody can commit: take in whoever holds the committed state."""
        roster, state, now = self._roster, self._state, self._turn.now
        since, self._without_known_since = self._without_known_since, None
        if state.committed is None or state.view.world_size >= roster.quorum:
            return
        into = self._meetings.have_met(roster.arrived(), roster.members())
        if self._rendezvous.waits([session.ref.peer_id for session in into], now):
            return
        # Who hands the state over has been reached by those that have fetched it.
        is_known = any(map(self._is_known, (*into, *self._holders.keepers())))
        if into and not is_known and not state.view.members and state.certificate is not None:
            # Those whose work was committed have a while to come back: a newcomer that nobody could dial went on
            # alone, and nobody could fetch what it had committed (seed 289).
            self._without_known_since = now if since is None else since
            if now < self._without_known_since + self._config.recover_s:
                return
            self._without_known_since = None
            into = self._known_rather(roster.arrived())
        self._cross({}, into)

    def _cross(self, evicted: Mapping[PeerRef, CoordinatorMessage], into: Sequence[Session]) -> None:
        """Change the view between two rounds: who wants to leave goes, these come in. No change, no view."""
        step = self._state.outer_step
        leavers = [session for session in self._roster.members() if session.leaving and session.ref not in evicted]
        if not evicted and not leavers and not into:
            return
        keeper = self._handover.keeper_among(leavers, evicted) if leavers else None
        out: dict[PeerRef, CoordinatorMessage | None] = dict(evicted)
        causes = [f"{session.ref.peer_id} joined" for session in into]
        causes += [f"{ref.peer_id} evicted" for ref in out]
        for session in leavers:
            causes.append(f"{session.ref.peer_id} left")
            if session is keeper:
                out[session.ref] = None
                causes[-1] += f", and serves outer step {step} until another peer holds it"
            else:
                out[session.ref] = Goodbye(
                    outer_step=step,
                    alone=self._holders.is_last(session, leavers),
                    held=self._state.committed,
                )
        self._views.change(out=out, into=into, cause="; ".join(causes))
        if keeper is not None:
            self._handover.stay(keeper)

    def _known_rather(self, arrived: Sequence[Session]) -> list[Session]:
        """Those that have met each other: a known peer that works and whom it has met, and then newcomers.

        They had time to meet. A newcomer that nobody could dial took the place of a peer that held the state as well,
        and those that could reach that one never came in again (seed 916). Who has stood still as a member goes before
        nobody (seed 49).
        """
        step, now = self._state.outer_step, self._turn.now
        works = [item for item in arrived if self._is_known(item) and self._pauses.is_over(item.ref, step, now)]
        return self._meetings.have_met([*works, *(item for item in arrived if item not in works)], ())

    def _is_known(self, session: Session) -> bool:
        """Whether a commit has held work of this peer."""
        return session.ref.peer_id in self._state.reached

    def found(self) -> None:
        """Ask one learner for the first state; another one if it is lost or stuck."""
        order = list(self._roster.sessions.values())
        if self._state.committed is not None or not order:
            return
        current = self._founder()
        if current is not None and (len(order) == 1 or self._turn.now < current.stalls_at(self._config)):
            return
        place = order.index(current) + 1 if current is not None else 0
        self._news.ask_to_found(order[place % len(order)])

    def _founder(self) -> Session | None:
        return next((item for item in self._roster.sessions.values() if item.ref == self._news.founder), None)

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could come back."""
        if self._without_known_since is not None:
            self._without_known_since = now

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        result = self._rendezvous.deadlines()
        if self._without_known_since is not None:
            result.append(self._without_known_since + self._config.recover_s)
        if (
            self._state.committed is None
            and len(self._roster.sessions) > 1
            and (founder := self._founder()) is not None
        ):
            result.append(founder.stalls_at(self._config))
        return result
