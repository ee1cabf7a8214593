# SPDX-License-Identifier: Apache-2.0
"""How the coordinator receives who is no member: strangers, joiners and learners.

Rules:
* A Join is answered with a Welcome, a refusal with its cure, or `Evicted` if its sender does not know yet that it is
  no member any more.
* A newer start of a peer replaces the older one at once; an older start that still speaks is told so, and ends.
* Whoever else speaks without a session is answered `Evicted`: without an answer it would wait for ever.
* When all places are taken, whoever was in the last commit finds one, and nobody fills the house from one address.
* The first state that anybody holds becomes the state of a run that has none.
"""

from collections import Counter
from typing import assert_never

from isthmus.collective.core.address import candidates_of
from isthmus.collective.core.types import PeerRef
from isthmus.elastic.core.messages import (
    Evicted,
    Goodbye,
    Heartbeat,
    Held,
    Join,
    LeaseRequest,
    Leave,
    Met,
    PeerMessage,
    Refused,
    RoundFailed,
    Synced,
    Vote,
)
from isthmus.elastic.core.records import Genesis
from isthmus.elastic.core.roster import INTEGRITY_EXIT_CODE, REFUSED_EXIT_CODE, WRONG, Roster
from isthmus.elastic.core.sessions import Session

DONE_EXIT_CODE = 0


class Reception:
    """Answers whoever is no member."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def stranger(self, sender: PeerRef, message: PeerMessage) -> None:
        """Somebody without a session spoke."""
        match message:
            case Join():
                self.join(sender, message)
            case Leave():
                self._leave(sender, message)
            case Heartbeat() | Synced() | Vote() | RoundFailed() | LeaseRequest() | Met():
                # Without an answer a dropped peer would wait for ever.
                self._roster.counters["stranger"] += 1
                if self._is_of_the_lost_journal(message):
                    self._roster.tell_rebuilt(sender)
                else:
                    self._turn_away(sender, "no member and no learner")
            case _:
                assert_never(message)

    def _leave(self, sender: PeerRef, leave: Leave) -> None:
        """Somebody without a session wants to go. It may be the only one that holds the committed state."""
        roster, held, committed = self._roster, leave.held, self._roster.state.committed
        before = roster.sessions.get(sender.peer_id)
        if before is not None and before.ref.incarnation < sender.incarnation:
            # That start has ended. As the one who still holds the state it let this one take it along (seed 49817).
            roster.drop({before.ref: "started again"})
        departure = roster.state.departed.get(sender.peer_id)
        is_newest = departure is None or departure.incarnation <= sender.incarnation
        may_stay = not leave.now and not roster.over and is_newest and sender.peer_id not in roster.sessions
        has_newest = held is not None and held == committed
        if may_stay and has_newest and roster.handover.is_wanted():
            roster.handover.asked(roster.open(sender, leave.address), leave)
        elif may_stay and roster.handover.is_wanted() and self._has_staged(sender, held):
            self._turn_away(sender, "hear of the commit that you voted for, and say again what you hold")
        else:
            alone = has_newest and not roster.over and not roster.handover.is_held()
            roster.send(sender, Goodbye(outer_step=roster.state.outer_step, alone=alone))

    def _has_staged(self, sender: PeerRef, held: Held | None) -> bool:
        """Whether it may have the newest commit staged, and not have heard of it."""
        certificate = self._roster.state.certificate
        if certificate is None or held is None or held.outer_step >= certificate.made.outer_step:
            return False
        ends = [(item.peer_id, item.incarnation) for item in certificate.contributors]
        return (sender.peer_id, sender.incarnation) in ends

    def _is_of_the_lost_journal(
        self, message: Join | Heartbeat | Synced | Vote | RoundFailed | LeaseRequest | Met
    ) -> bool:
        """Whether the sender may not have heard yet that the run was rebuilt."""
        rebuilt = self._roster.state.rebuilt
        if rebuilt is None:
            return False
        match message:
            case Synced() | Met():
                return True  # it names no epoch; if it has heard, its heartbeats say so
            case Vote() | RoundFailed():
                return message.key.epoch < rebuilt.epoch
            case Join() | Heartbeat() | LeaseRequest():
                return message.epoch < rebuilt.epoch
            case _:
                assert_never(message)

    def join(self, sender: PeerRef, message: Join) -> None:
        """A start of a peer that has no session wants in."""
        roster = self._roster
        departure = self._roster.state.departed.get(sender.peer_id)
        if departure is not None and sender.incarnation < departure.incarnation:
            roster.tell_replaced(sender)
            return
        refusal = self._refusal(sender, message)
        if refusal is not None:
            roster.send(sender, refusal)
            return
        if self._is_of_the_lost_journal(message):
            # It may have a payload and leases that the lost journal gave it, the newest commit staged, or a state
            # whose commit nobody else has heard of.
            certificate = self._roster.state.certificate
            if message.held is not None and message.held == self._roster.state.committed:
                self._roster.bears(sender)  # it is asked to say so again, and nothing is given up meanwhile
            if message.certificate is not None and certificate is not None:
                self._roster.counters["newer_certificate_given_up"] += message.certificate.order > certificate.order
            roster.tell_rebuilt(sender)
            return
        if departure is not None and sender.incarnation == departure.incarnation and message.epoch < departure.epoch:
            # It believes that it is a member, with a payload and leases that are somebody else's by now. If it were
            # taken as a learner and the Welcome got lost, it would be admitted without ever knowing.
            self._turn_away(sender, "dropped while it was away")
            return
        replaced = roster.sessions.get(sender.peer_id)
        session = roster.open(sender, message.address)
        if replaced is not None and self._roster.state.standing_since(replaced.ref) is not None:
            roster.change_view(out={replaced.ref: None}, cause=f"{sender.peer_id} started again")
        if self._note_held(session, message.held):
            roster.welcome(session)

    def _turn_away(self, sender: PeerRef, reason: str) -> None:
        """Tell it that it is no member, and first of the commit that it may not have heard of."""
        self._roster.remind(sender)
        self._roster.send(sender, Evicted(epoch=self._roster.state.epoch, reason=reason))

    def learner(self, session: Session, message: Join | Heartbeat | Synced) -> None:
        """A learner spoke."""
        roster = self._roster
        if roster.state.final:
            roster.tell_commit(session.ref)  # there is nothing left to wait for
            return
        if self._is_belated(message):
            roster.counters["belated_word"] += 1
            return
        match message:
            case Heartbeat():
                session.beat(message, roster.now)
            case Join():
                session.address = message.address
                if self._note_held(session, message.held):
                    roster.welcome(session)
            case Synced() if roster.state.committed is not None and message.held.outer_step > roster.state.outer_step:
                # Another coordinator leads, and this one does not know yet: the member that it named has gone on. To
                # send it home would be for good (seed 90107).
                roster.counters["ahead_of_the_journal"] += 1
            case Synced():
                if self._note_held(session, message.held) and session.synced != self._roster.state.committed:
                    roster.welcome(session)
            case _:
                assert_never(message)

    def _is_belated(self, message: Join | Heartbeat | Synced) -> bool:
        """Whether a learner said it before it heard that the run was rebuilt, and it comes only now.

        It has a session, so it has joined afresh. Taken for what it holds now, that word would send it home for holding
        what the run gave up (scenarios/belated_word_of_the_lost_journal.toml).
        """
        rebuilt = self._roster.state.rebuilt
        if rebuilt is None:
            return False
        match message:
            case Join() | Heartbeat():
                return message.epoch < rebuilt.epoch
            case Synced():
                return message.held.outer_step > self._roster.state.outer_step
            case _:
                assert_never(message)

    def _note_held(self, session: Session, held: Held | None) -> bool:
        """A learner says what it holds; a run without a state begins with it. False if the peer was refused."""
        if held is None:
            return True
        if self._roster.state.committed is None:
            record = Genesis(
                outer_step=held.outer_step,
                digest=held.digest,
                next_index=self._roster.config.first_index,
                returned=self._roster.config.first_free,
            )
            self._roster.persist(record)
        if held.outer_step <= self._roster.state.outer_step:
            if session.synced is None or held.outer_step >= session.synced.outer_step:
                session.synced = held  # whether it is worth an admission is decided at the boundary
        else:
            if self._roster.state.rebuilt is not None:
                self._roster.tell_rebuilt(session.ref)  # nobody could prove that one
                return False
            newest = self._roster.state.outer_step
            reason = f"you hold outer step {held.outer_step}, this run is at {newest}: start without it"
            self._roster.send(session.ref, Refused(code=REFUSED_EXIT_CODE, reason=reason))
            self._roster.close(session)
            return False
        return True

    def _refusal(self, sender: PeerRef, message: Join) -> Refused | None:
        if message.manifest_digest != self._roster.config.manifest_digest:
            return Refused(code=REFUSED_EXIT_CODE, reason="your run manifest differs from the run's")
        if self._roster.state.final:
            reason = f"the run is complete at outer step {self._roster.state.outer_step}"
            return Refused(code=DONE_EXIT_CODE, reason=reason)
        if self._roster.state.strikes.is_out(sender):
            return self._roster.sends_home(sender, WRONG)  # the word of it was lost
        if message.epoch > self._roster.state.epoch:
            reason = f"you have seen epoch {message.epoch}, this journal ends at {self._roster.state.epoch}: restore it"
            return Refused(code=INTEGRITY_EXIT_CODE, reason=reason)
        sessions = self._roster.sessions
        is_full = len(sessions) >= self._roster.config.max_peers and sender.peer_id not in sessions
        if is_full and not self._makes_room(sender, message.address):
            return Refused(code=REFUSED_EXIT_CODE, reason=f"the run is full: {self._roster.config.max_peers} peers")
        return None

    def _makes_room(self, sender: PeerRef, address: str) -> bool:
        """In a full house a learner gives way to who was in the last commit, or whose host has fewer than others.

        Whoever opens as many sessions as there are places keeps nobody out but itself. Members and the excused stay,
        and so does a learner that was in the last commit: it is on its way back.
        """
        roster = self._roster
        certificate = roster.state.certificate
        returning = set() if certificate is None else {item.peer_id for item in certificate.contributors}
        guests = [
            session
            for peer_id, session in roster.sessions.items()
            if peer_id not in returning
            and roster.state.standing_since(session.ref) is None
            and session.ref != roster.founder
        ]
        if not guests:
            return False
        crowds = Counter(_host_of(session.address) for session in guests)
        last = max(enumerate(guests), key=lambda item: (crowds[_host_of(item[1].address)], item[0]))[1]
        if sender.peer_id not in returning and crowds[_host_of(last.address)] <= crowds[_host_of(address)] + 1:
            return False
        roster.counters["gave_way"] += 1
        reason = f"the run is full: {roster.config.max_peers} peers, and another one came first; try again later"
        roster.send(last.ref, Refused(code=REFUSED_EXIT_CODE, reason=reason))
        roster.close(last)
        return True


def _host_of(address: str) -> str:
    """Of its first candidate: a machine's peers have the same ones."""
    return candidates_of(address)[0].rpartition(":")[0]
