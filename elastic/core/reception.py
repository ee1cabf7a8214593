# SPDX-License-Identifier: Apache-2.0
"""How the coordinator receives who is no member: joiners and learners.

Rules:
* A Join is answered with a Welcome, or a refusal with its cure.
* Whoever has seen a later epoch than the journal is refused; if that was rebuilt, the run goes on above this epoch,
  but only so far beyond where the rebuilt journal began.
* A newer start of a peer replaces the older one at once.
* When all places are taken, whoever was in the last commit finds one, and nobody fills the house from one address.
* The first state that anybody holds becomes the state of a run that has none.
"""

from collections import Counter
from typing import assert_never

from isthmus.collective.core.address import candidates_of
from isthmus.collective.core.types import Epoch, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.exit_codes import DONE, INTEGRITY, REFUSED
from isthmus.elastic.core.messages import Heartbeat, Held, Join, Refused, Synced
from isthmus.elastic.core.news import WRONG, News
from isthmus.elastic.core.rebuild import EPOCHS_A_REBUILD, MAX_EPOCH, MOST_AHEAD
from isthmus.elastic.core.records import Genesis
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views


class Reception:
    """Answers whoever is no member. Void words do not come here (peer_fence.py)."""

    def __init__(self, config: CoordinatorConfig, turn: Turn, roster: Roster, news: News, views: Views) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._news, self._views = news, views

    def refuses(self, sender: PeerRef, join: Join) -> bool:
        """Whether a start of a peer that has no session may not come in, and was told why."""
        refusal = self._refusal(sender, join)
        if refusal is not None:
            self._turn.send(sender, refusal)
        return refusal is not None

    def join(self, sender: PeerRef, join: Join) -> None:
        """A start of a peer that has no session comes in."""
        replaced = self._roster.sessions.get(sender.peer_id)
        session = self._roster.open(sender, join.address)
        if replaced is not None and self._state.standing_since(replaced.ref) is not None:
            self._views.change(out={replaced.ref: None}, cause=f"{sender.peer_id} started again")
        if self._note_held(session, join.held):
            self._news.welcome(session)

    def learner(self, session: Session, message: Join | Heartbeat | Synced) -> None:
        """A learner spoke."""
        match message:
            case Heartbeat():
                session.beat(message, self._turn.now)
            case Join():
                session.address = message.address
                if self._note_held(session, message.held):
                    self._news.welcome(session)
            case Synced():
                if self._note_held(session, message.held) and session.synced != self._state.committed:
                    self._news.welcome(session)
            case _:
                assert_never(message)

    def _note_held(self, session: Session, held: Held | None) -> bool:
        """A learner says what it holds; a run without a state begins with it. False if the peer was refused."""
        state, config = self._state, self._config
        if held is None:
            return True
        if state.committed is None:
            record = Genesis(
                outer_step=held.outer_step,
                digest=held.digest,
                next_index=config.first_index,
                returned=config.first_free,
            )
            self._turn.persist(record)
        if held.outer_step <= state.outer_step:
            if session.synced is None or held.outer_step >= session.synced.outer_step:
                session.synced = held  # whether it is worth an admission is decided at the boundary
            return True
        if state.rebuilt is not None:
            self._news.tell_rebuilt(session.ref)  # nobody could prove that one
            return False
        reason = f"you hold outer step {held.outer_step}, this run is at {state.outer_step}: start without it"
        self._turn.send(session.ref, Refused(code=REFUSED, reason=reason))
        self._roster.close(session)
        return False

    def _refusal(self, sender: PeerRef, message: Join) -> Refused | None:
        state, sessions, most = self._state, self._roster.sessions, self._config.max_peers
        if message.manifest_digest != self._config.manifest_digest:
            return Refused(code=REFUSED, reason="your run manifest differs from the run's")
        if state.final:
            return Refused(code=DONE, reason=f"the run is complete at outer step {state.outer_step}")
        if state.strikes.is_out(sender):
            return self._news.sends_home(sender, WRONG)  # the word of it was lost
        if message.epoch > state.epoch and not self._rises_above(sender, message.epoch):
            reason = f"you have seen epoch {message.epoch}, this journal ends at {state.epoch}: restore it"
            return Refused(code=INTEGRITY, reason=reason)
        is_full = len(sessions) >= most and sender.peer_id not in sessions
        if is_full and not self._makes_room(sender, message.address):
            return Refused(code=REFUSED, reason=f"the run is full: {most} peers")
        return None

    def _rises_above(self, sender: PeerRef, epoch: Epoch) -> bool:
        """Go on above an epoch that a peer has seen and a journal that was rebuilt cannot know. True if that is done.

        Another rebuilt journal gave it, which was lost as well while this peer could not be asked (seed 57649). With a
        newer commit to prove, it would have made this coordinator resign. The others begin the round anew.

        Nobody has to prove what it has seen. So all together lift the run no further than `MOST_AHEAD` beyond the epoch
        where it went back, in steps of a rebuild each: a new start for every lift used the epochs up in minutes.
        """
        state, config = self._state, self._config
        if state.rebuilt is None or state.committed is None or epoch > state.rebuilt.epoch + MOST_AHEAD:
            return False
        if epoch > MAX_EPOCH:
            return False
        above = Epoch(epoch + EPOCHS_A_REBUILD + config.rebuild_salt)  # that journal may come back, too
        self._views.change(out={}, cause=f"{sender.peer_id} has seen epoch {epoch}", above=above)
        return True

    def _makes_room(self, sender: PeerRef, address: str) -> bool:
        """In a full house a learner gives way to who was in the last commit, or whose host has fewer than others.

        Whoever opens as many sessions as there are places keeps nobody out but itself. Members and the excused stay,
        and so does a learner that was in the last commit: it is on its way back.
        """
        roster, certificate = self._roster, self._state.certificate
        returning = set() if certificate is None else {item.peer_id for item in certificate.contributors}
        guests = [
            session
            for peer_id, session in roster.sessions.items()
            if peer_id not in returning
            and self._state.standing_since(session.ref) is None
            and session.ref != self._news.founder
        ]
        if not guests:
            return False
        crowds = Counter(_host_of(session.address) for session in guests)
        last = max(enumerate(guests), key=lambda item: (crowds[_host_of(item[1].address)], item[0]))[1]
        if sender.peer_id not in returning and crowds[_host_of(last.address)] <= crowds[_host_of(address)] + 1:
            return False
        self._turn.counters["gave_way"] += 1
        reason = f"the run is full: {self._config.max_peers} peers, and another one came first; try again later"
        self._turn.send(last.ref, Refused(code=REFUSED, reason=reason))
        roster.close(last)
        return True


def _host_of(address: str) -> str:
    """Of its first candidate: a machine's peers have the same ones."""
    return candidates_of(address)[0].rpartition(":")[0]
