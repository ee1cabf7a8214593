# SPDX-License-Identifier: Apache-2.0
"""What becomes of a run whose committed state nobody holds any more.

All processes may lose power at once, and what a peer's disk can replay may end one commit before the newest. Then the
run goes back, openly: to the newest commit that somebody holds who is here, under a new epoch, by a record. Rules:

* Nothing is given up while a member, or a learner that is here, holds the committed state.
* A new start that alone says so, and serves nobody, is not believed for ever: half of the members of the newest commit
  are here without the state and have got no further for `handover_timeout_s`, or have not fetched it for
  `orphan_timeout_s`. Then it is dropped, and the run goes back. One peer could keep all others as learners, and they
  asked it in vain for as long as it lived.
* If all members of the newest commit are back in newer starts, and whoever else was seen to hold it is back without,
  nobody can ever bring it: the run goes back as soon as they had time to say what they hold.
* Half of them are enough after `recover_s`: a machine that does not come back must not end the run.
* Fewer wait for `orphan_timeout_s`: most of the run may be alive behind a broken line.
* If nobody holds any commit that the journal remembers, the peers are sent home then.

The price of the rules that give something up: whoever held the newest commit and comes later, or can be reached by
nobody, loses it.
"""

from collections.abc import Sequence

from isthmus.collective.core.types import Epoch, Instant, PeerId, PeerRef
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.exit_codes import NO_STATE
from isthmus.elastic.core.holders import Holders, SoleClaim
from isthmus.elastic.core.messages import Refused
from isthmus.elastic.core.news import News
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.past import Past
from isthmus.elastic.core.records import RollbackRecord
from isthmus.elastic.core.rendezvous import Rendezvous
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views


class Rollback:
    """Decides when the run goes back. Holds only since when nobody holds the state."""

    def __init__(
        self,
        config: CoordinatorConfig,
        turn: Turn,
        roster: Roster,
        news: News,
        views: Views,
        *,
        holders: Holders,
        open_round: OpenRound,
        rendezvous: Rendezvous,
    ) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._news, self._views, self._holders = news, views, holders
        self._round, self._rendezvous = open_round, rendezvous
        self._orphaned_since: Instant | None = None
        self._complete_since: Instant | None = None  # all who could bring the state are here, and do not

    def settle(self) -> None:
        """Go back, or send everybody home, if it is time."""
        state, now, learners = self._state, self._turn.now, self._learners()
        holders = [item.ref for item in learners if item.synced == state.committed]
        for ref in holders:
            self._holders.note(ref)
        self._disbelieve(learners)
        holders = [ref for ref in holders if ref.peer_id in self._roster.sessions]
        if state.committed is None or state.view.members or holders or not self._roster.sessions:
            self._orphaned_since = self._complete_since = None
            return
        if self._orphaned_since is None:
            self._orphaned_since = now
        if self._num_missing():
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = now
        at = self._newest_of(learners)
        if now < self._due_at(is_possible=at is not None):
            return
        self._orphaned_since = self._complete_since = None
        if at is not None:
            self._go_back(at, learners)
        else:
            self._send_home()

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        learners, claim, result = self._learners(), self._holders.claim, list[Instant]()
        vain_at = None if claim is None else self._vain_at(claim, self._waiting(claim, learners))
        if vain_at is not None:
            result.append(vain_at)
        if self._orphaned_since is not None:
            result.append(self._due_at(is_possible=self._newest_of(learners) is not None))
        return result

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could bring the state meanwhile.

        Without this it sent the waiting learners home when it woke (scenarios/clock_jumps_while_nobody_holds.toml).
        """
        if self._orphaned_since is not None:
            self._orphaned_since = now
        if self._complete_since is not None:
            self._complete_since = now
        claim = self._holders.claim
        if claim is not None and claim.waiting_since is not None:
            claim.waiting_since = now

    def _disbelieve(self, learners: Sequence[Session]) -> None:
        """Drop who alone says that it holds the state and has served nobody, and go back."""
        claim = self._holders.look_for_a_claim()
        if claim is None:
            return
        waiting = self._waiting(claim, learners)
        if not waiting:
            claim.waiting_since = None
        elif claim.waiting_since is None:
            claim.waiting_since = self._turn.now
        vain_at, at = self._vain_at(claim, waiting), self._newest_of(waiting)
        if vain_at is None or at is None or self._turn.now < vain_at:
            return
        self._views.drop({claim.ref: "alone says that it holds the state, and serves nobody"})
        self._orphaned_since = self._complete_since = None
        self._go_back(at, waiting)

    def _waiting(self, claim: SoleClaim, learners: Sequence[Session]) -> list[Session]:
        """Who is here without the claimed state; nobody, if these are too few to give it up."""
        stands = self._state.standing_since
        here = [
            item
            for item in learners
            if item.ref != claim.ref and not item.disconnected and not item.leaving and stands(item.ref) is None
        ]
        num_named = sum(item.ref.peer_id in claim.named for item in here)
        return here if 2 * num_named >= len(claim.named) else []

    def _vain_at(self, claim: SoleClaim, waiting: Sequence[Session]) -> Instant | None:
        """When these have waited for the claimed state in vain, as things stand; None if they have nothing to go to."""
        config, at = self._config, self._newest_of(waiting)
        if claim.waiting_since is None or at is None or at.held.outer_step >= self._state.outer_step:
            return None
        moved_at = [max(item.progressed_at, item.grew_at) for item in waiting]
        stands_at = max([claim.waiting_since, *moved_at]) + config.handover_timeout_s
        return min(stands_at, claim.waiting_since + config.orphan_timeout_s)

    def _learners(self) -> list[Session]:
        return [session for session in self._roster.sessions.values() if session.synced is not None]

    def _due_at(self, *, is_possible: bool) -> Instant:
        assert self._orphaned_since is not None, "somebody holds the state"
        config = self._config
        due_at = self._orphaned_since + config.orphan_timeout_s
        if not is_possible:
            return due_at
        if self._complete_since is not None:
            return min(due_at, self._complete_since + config.rebuild_grace_s)
        certificate = self._state.certificate
        num_named = 0 if certificate is None else len(certificate.contributors) + len(self._others(certificate))
        if 2 * self._num_missing() <= num_named:
            due_at = min(due_at, self._orphaned_since + config.recover_s)
        return due_at

    def _num_missing(self) -> int:
        """Members of the newest commit that have not come back in a newer start: what they staged may live."""
        certificate = self._state.certificate
        if certificate is None:
            return 0
        named = [self._is_back(item.peer_id, item.incarnation) for item in certificate.contributors]
        return sum(not is_back for is_back in (*named, *map(self._is_here, self._others(certificate))))

    def _others(self, certificate: Certificate) -> list[PeerRef]:
        """Peers that were seen to hold the committed state, beside the members of its commit."""
        members = {item.peer_id for item in certificate.contributors}
        return [ref for ref in self._holders.seen() if ref.peer_id not in members]

    def _is_here(self, ref: PeerRef) -> bool:
        """Whether this peer is back. Asked only where nobody who is back holds the state."""
        session = self._roster.sessions.get(ref.peer_id)
        return session is not None and not session.disconnected and session.synced is not None

    def _is_back(self, peer_id: PeerId, incarnation: int) -> bool:
        session = self._roster.sessions.get(peer_id)
        return session is not None and not session.disconnected and session.ref.incarnation > incarnation

    def _newest_of(self, learners: Sequence[Session]) -> Past | None:
        """The newest commit of this journal that one of these holds."""
        found = [self._state.past(item.synced) for item in learners if item.synced and not item.disconnected]
        return max((at for at in found if at is not None), key=lambda at: at.held.outer_step, default=None)

    def _go_back(self, at: Past, learners: Sequence[Session]) -> None:
        state, now = self._state, self._turn.now
        holders = tuple(session.ref for session in learners if session.synced == at.held)
        # Under the seal: the journal is read back by rules that know no other certificate, and peers believe no other.
        known = None if at.certificate is None else self._news.sealed(at.certificate)
        record = RollbackRecord(
            epoch=Epoch(state.epoch + 1), certificate=known, given_up=state.outer_step, holders=holders
        )
        self._turn.persist(record)
        for ref in holders:
            self._holders.note(ref)
        self._round.begin(now, grew_at={}, is_cut_short=True)
        self._turn.counters["rolled_back"] += 1
        self._rendezvous.call([ref.peer_id for ref in holders], now)
        for session in list(self._roster.sessions.values()):
            self._news.tell_rebuilt(session.ref)
            self._roster.close(session)

    def _send_home(self) -> None:
        reason = f"nobody who holds outer step {self._state.outer_step} came back: found the run anew from a checkpoint"
        refused = Refused(code=NO_STATE, reason=reason)
        if self._state.excused:
            self._views.change(out=dict.fromkeys(self._state.excused, refused), cause=reason)
        for session in list(self._roster.sessions.values()):
            self._turn.send(session.ref, refused)
            self._roster.close(session)
