"""How learners become members, and who makes the first state.

* At a commit boundary every learner comes in that holds the new state, the one before it, or one that was the newest
  within the last `admission_lag_s`; what it misses it replays from a member. It must not be asked for the newest
  state only: every commit moves that, and a learner that chases it never arrives. One commit of slack is not enough
  where commits come faster than a message and its answer (test_scenarios.py: far learner).
* While the members are too few to commit there is no boundary to wait for: who holds the committed state comes in
  at once. This is also how a run goes on after its last member died.
* Without any state, exactly one learner is asked to make it.
* If nobody who holds the committed state shows up for `orphan_timeout_s`, the waiting learners are sent home.
"""

from collections import deque
from collections.abc import Sequence

from collective.core.types import Epoch, Instant, PeerRef
from elastic.core.messages import Evicted, Held, Refused
from elastic.core.roster import Roster

QUORUM_EXIT_CODE = 7
MAX_COMMITS_BEHIND = 64
"""Whatever the clock says, a donor's commit log does not reach back further than this."""


class Admission:
    """Decides when a roster takes learners in. Holds only the clock of learners that nobody can serve."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._orphaned_since: Instant | None = None
        self._superseded: deque[tuple[Instant, Held]] = deque(maxlen=MAX_COMMITS_BEHIND)

    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        """A commit was just made: leavers and deviants go, learners and whoever was excused come in."""
        roster = self._roster
        state = roster.state
        epoch = Epoch(state.epoch + 1)
        evicted = {
            ref: Evicted(epoch=epoch, reason=f"other result at outer step {state.outer_step}") for ref in deviants
        }
        for ref, reason in roster.overdue().items():
            roster.counters[f"dropped: {reason}"] += 1
            evicted[ref] = Evicted(epoch=epoch, reason=reason)
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
        ]
        roster.cross_boundary(evicted=evicted, into=into)

    def between_commits(self) -> None:
        """Nobody can commit: take in whoever holds the committed state."""
        roster = self._roster
        committed = roster.state.committed
        if committed is None or roster.state.view.world_size >= roster.quorum:
            return
        # Whoever came first would go on alone, and the others would wait for its next commit.
        back = {session.ref.peer_id for session in roster.learners() if session.synced == committed}
        roster.awaited -= back
        if roster.awaited and roster.now < roster.awaited_until:
            return
        roster.awaited.clear()
        into = [session for session in roster.learners() if session.synced == committed]
        roster.cross_boundary(evicted={}, into=into)

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

    def send_orphans_home(self) -> None:
        """No member, no learner that holds the committed state, and nobody came for a long time: say so."""
        roster = self._roster
        is_held = bool(roster.state.view.members or roster.handover.donors())
        if roster.state.committed is None or is_held or not roster.sessions:
            self._orphaned_since = None
        elif self._orphaned_since is None:
            self._orphaned_since = roster.now
        elif roster.now >= self._orphaned_since + roster.config.orphan_timeout_s:
            self._orphaned_since = None
            step = roster.state.outer_step
            reason = f"nobody who holds outer step {step} came back: found the run anew from a checkpoint"
            refused = Refused(code=QUORUM_EXIT_CODE, reason=reason)
            if roster.state.excused:
                roster.change_view(out=dict.fromkeys(roster.state.excused, refused), cause=reason)
            for session in list(roster.sessions.values()):
                roster.send(session.ref, refused)
                roster.close(session)

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could bring the state meanwhile.

        Without this it sent the waiting learners home when it woke (scenarios/clock_jumps_while_nobody_holds.toml).
        """
        if self._orphaned_since is not None:
            self._orphaned_since = now

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        roster = self._roster
        result = [roster.awaited_until] if roster.awaited else []
        if self._orphaned_since is not None:
            result.append(self._orphaned_since + roster.config.orphan_timeout_s)
        if roster.state.committed is None and len(roster.sessions) > 1 and roster.founder is not None:
            founder = roster.sessions.get(roster.founder.peer_id)
            if founder is not None:
                result.append(founder.stalls_at(roster.config))
        return result
