# SPDX-License-Identifier: Apache-2.0
"""The coordinator: who is a member, what is committed, who trains on which samples.

A deterministic machine without IO. Events only note facts; every decision is made in `_settle`, which runs after
each event and looks at all that is known: drop the dead, judge failed rounds, count votes, admit learners. So it
makes no difference in which order the same facts arrive.

Rules (elastic/README.md has the reasons):
* Journal first: every decision is a record, and its `Persist` stands before the messages that tell of it.
* The membership changes at commit boundaries, when a member is lost or fails, or while no commit is possible.
* A view names the committed state and always has a member that holds it, or no member at all.
* Whoever speaks without a session is answered `Evicted`. Repeats are answered, never initiated: the peers' timers
  drive everything, so that duplicated messages cannot multiply.

It must not know how the state is trained, moved or stored, nor what a connection is.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import assert_never

from isthmus.collective.core.types import Instant, OuterStep, PeerId, PeerRef
from isthmus.elastic.core.admission import Admission
from isthmus.elastic.core.certificate import Certificate, ballot
from isthmus.elastic.core.closing import Closing
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.elastic.core.doorkeeper import Doorkeeper
from isthmus.elastic.core.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    Expose,
    Ordered,
    PeerConnectionLost,
    PeerSaid,
    Resign,
    Tick,
)
from isthmus.elastic.core.meetings import Meetings
from isthmus.elastic.core.messages import (
    Evicted,
    Goodbye,
    Heartbeat,
    Held,
    Join,
    LeaseGrant,
    LeaseRequest,
    Leave,
    Met,
    PeerMessage,
    RoundFailed,
    Synced,
    Vote,
)
from isthmus.elastic.core.rebuild import Rebuild
from isthmus.elastic.core.reception import Reception
from isthmus.elastic.core.records import LeaseRecord, Record
from isthmus.elastic.core.rollback import Rollback
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import STANDS_STILL, Session

STORY_LENGTH = 512


class CoordinatorMachine:
    """See the module's docstring. Drive it by `handle`, and by a `Tick` whenever `next_deadline` has passed."""

    rebuild_type: type[Rebuild] = Rebuild

    def __init__(self, config: CoordinatorConfig) -> None:
        self._start(config, RunState())

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        self.config = config
        self.state = state
        self._roster = Roster(config, state)
        self._rounds = self._roster.rounds
        self._reception = Reception(self._roster)
        self._meetings = Meetings(self._roster)
        self._admission = Admission(self._roster, self._meetings)
        self._closing = Closing(self._roster, self._admission)
        self._rollback = Rollback(self._roster)
        self._doorkeeper = Doorkeeper(self._roster)
        self._rebuild: Rebuild | None = None  # while the journal is lost and not made anew yet
        self._deadline: Instant | None = None  # found after each event: looking costs as much as deciding
        self._promised: Instant | None = None  # when the last event expected the next one at the latest
        self._exposed: deque[PeerRef] = deque(maxlen=config.max_peers)
        self._story: deque[tuple[Instant, CoordinatorEvent]] = deque(maxlen=STORY_LENGTH)

    @classmethod
    def recover(
        cls,
        config: CoordinatorConfig,
        records: Iterable[Record],
        now: Instant,
        *,
        rebuild: RebuildRule | None = None,
    ) -> "CoordinatorMachine":
        """Go on from a journal (oldest record first), under the last epoch and with its members.

        Nobody has lost anything by the restart: members that dial again within `recover_grace_s` find their view
        unchanged and repeat their votes. Learners are forgotten; they are told so and join afresh.

        With a rule for it, an empty journal is a lost one: nobody founds the run, its peers are asked (rebuild.py).
        """
        machine = cls(config)
        machine._start(config, state := RunState.replay(records))
        roster = machine._roster
        roster.now = now
        if state.committed is not None:
            roster.handover.expect(now + config.recover_grace_s)
        if rebuild is not None and state.committed is None and state.rebuilt is None:
            machine._rebuild = machine.rebuild_type(roster, rebuild)
        votes = () if state.last_commit is None else state.last_commit.contributions
        agreed = {item.ref: item.agreed for item in votes}
        for ref in state.excused:
            session = roster.open(ref, "")
            session.last_heard = session.awaited_until = now + config.recover_grace_s
            session.excused_in = state.epoch
        for member in state.view.members:
            session = roster.open(member.ref, member.address)
            session.last_heard = session.awaited_until = now + config.recover_grace_s
            # A member that voted for the last commit holds it or has it staged, and one that was overruled does not.
            # Of the others we learn when they speak. Not knowing is not "no": a view whose voters are all gone is
            # held by others (test_scenarios.py: recovered view without a voter).
            session.holds_state = agreed.get(member.ref)
        machine._promised = machine._deadline = machine._look_ahead()
        return machine

    # -------------------------------------------------------------------------------- the machine

    def handle(self, event: CoordinatorEvent, now: Instant) -> Sequence[CoordinatorEffect]:
        """Take one event in. The effects are carried out in order, each `Persist` durably before the next effect."""
        self._story.append((now, event))
        roster = self._roster
        roster.now, roster.effects = now, []
        if self._promised is not None and now > self._promised + self.config.lateness_s:
            self._forgive()
        if self._rebuild is None:
            self._let_go()  # before the event: another view must not name a member that was put out
        match event:
            case PeerSaid():
                self._on_said(event.sender, event.message)
            case PeerConnectionLost():
                self._on_connection_lost(event.sender)
            case Ordered():
                self._doorkeeper.obey(event)
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._rebuild is None or self._ended(self._rebuild):
            self._settle()
        self._deadline = deadline = self._look_ahead()
        self._promised = None if deadline is None else max(deadline, now)
        return roster.effects

    def _forgive(self) -> None:
        """This process did not run: its clock must not be held against anybody. What was said may lie unread."""
        roster, now = self._roster, self._roster.now
        roster.counters["woken_late"] += 1
        roster.forgive()
        self._rollback.forgive(now)
        self._meetings.forgive(now)
        self._admission.forgive(now)
        if self._rebuild is not None:
            self._rebuild.forgive(now)

    @property
    def voted(self) -> tuple[PeerId, ...]:
        """The members whose vote on the round in progress is here."""
        return tuple(self._rounds.votes)

    def next_deadline(self) -> Instant | None:
        """When to feed a `Tick`, if nothing else happens before."""
        return self._deadline

    def _look_ahead(self) -> Instant | None:
        deadlines = [deadline for deadline, _, _ in self._roster.deadlines()]
        if self._rebuild is not None:
            deadlines += self._rebuild.deadlines()
        elif not self._roster.over:
            deadlines += self._admission.deadlines()
            deadlines += self._closing.deadlines()
            deadlines += self._rollback.deadlines()
            deadlines += self._meetings.deadlines()
            deadlines += self._roster.handover.deadlines()
        if not deadlines:
            return None
        # Were the clock looked at only when something is due, an absence that ends just then would be no absence.
        return min(*deadlines, self._roster.now + self.config.lateness_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        view, roster = self.state.view, self._roster
        ids = [member.peer_id for member in view.members]
        assert len(set(ids)) == len(ids), "a peer is in the view twice"
        assert all(peer_id in ids for peer_id in (*self._rounds.votes, *self._rounds.reports)), "a stranger voted"
        assert [member.ref for member in view.members] == list(self.state.admitted), "membership is told in two ways"
        assert roster.over or all(ref.peer_id in roster.sessions for ref in self.state.excused), "excused, no session"
        if view.members:
            assert self.state.committed == Held(view.outer_step, view.digest), "the view names another state"
        if view.members and not roster.over:
            assert [session.ref.peer_id for session in roster.members()] == ids, "a member without a session"
            assert roster.holders(), "nobody holds the view's state"
        self.state.leases.check_invariants()

    @property
    def counters(self) -> Counter[str]:
        """What was dropped by the fence and why peers were given up, by reason."""
        return self._roster.counters

    @property
    def story(self) -> Sequence[tuple[Instant, CoordinatorEvent]]:
        """The newest events, for a crash report."""
        return tuple(self._story)

    def addresses(self) -> dict[PeerRef, str]:
        """Where peers say that others reach them, by start."""
        return {session.ref: session.address for session in self._roster.sessions.values()}

    @property
    def is_rebuilding(self) -> bool:
        """Whether the journal is lost and the peers' certificates are awaited."""
        return self._rebuild is not None

    @property
    def finished(self) -> bool:
        """Whether the run has ended and everybody has gone."""
        return self._roster.over and not self._roster.sessions

    # -------------------------------------------------------------------------------- facts

    def _on_said(self, sender: PeerRef, message: PeerMessage) -> None:
        roster = self._roster
        if self._doorkeeper.turn_away(sender):
            return
        if isinstance(message, Join):
            self._doorkeeper.introduce(sender)
        if roster.halted is not None:
            roster.send(sender, roster.halted)
            return
        if self._rebuild is None and isinstance(message, Join) and self._has_lost_its_journal(message):
            self._rebuild = self.rebuild_type(roster, RebuildRule.MAJORITY)
            for item in list(roster.sessions.values()):
                roster.close(item)  # whatever they say next is answered with the question what they hold
        if self._rebuild is not None:
            self._rebuild.heard(sender, message)
            return
        if isinstance(message, Join) and (proof := self._proof_of_a_newer_journal(sender, message)) is not None:
            made, ends = proof.made.outer_step, self.state.outer_step
            reason = (
                f"{sender.peer_id} proves outer step {made} of epoch {proof.key.epoch}, this journal ends at {ends}"
            )
            roster.effects.append(Resign(reason=f"{reason} of epoch {self.state.epoch}: it is an old copy"))
            return
        session = roster.sessions.get(sender.peer_id)
        if session is not None and sender.incarnation < session.ref.incarnation:
            roster.tell_replaced(sender)
            return
        if session is None or session.ref != sender:
            self._reception.stranger(sender, message)
            if roster.sessions.get(sender.peer_id) is not session:
                self._meetings.ask_all()
            return
        session.heard(roster.now)
        self._on_session(session, message)
        if isinstance(message, Heartbeat) and not roster.over:
            self._meetings.ask(session)

    def _on_session(self, session: Session, message: PeerMessage) -> None:
        """Somebody spoke that we know, in this start."""
        roster, sender = self._roster, session.ref
        match message:
            case Met():
                self._meetings.heard(session, message)
            case Leave():
                self._on_leave(session, message)
            case Join() | Heartbeat() | Synced() | Vote() | RoundFailed() if roster.is_excused(session):
                self._on_excused(session, message)
            case LeaseRequest() if roster.is_excused(session):
                self._on_lease_request(session, message)
            case Join() | Heartbeat() | Synced() if not roster.is_member(session):
                self._reception.learner(session, message)
            case Vote() | RoundFailed() | LeaseRequest() if not roster.is_member(session):
                roster.counters["learner_spoke_as_member"] += 1
                roster.send(sender, Evicted(epoch=self.state.epoch, reason="a learner, no member"))
            case Join() | Synced():  # it comes back, or missed its admission
                self._shows(session, message.held)
                roster.tell(session)
            case Heartbeat():
                self._on_heartbeat(session, message)
            case Vote() | RoundFailed():
                self._on_round(session, message)
            case LeaseRequest():
                self._on_lease_request(session, message)
            case _:
                assert_never(message)

    def _on_excused(self, session: Session, message: Join | Heartbeat | Synced | Vote | RoundFailed) -> None:
        """A late member spoke: it follows the commits, and need not be a learner for that."""
        roster = self._roster
        if self.state.final:
            roster.tell_commit(session.ref)  # the word of it was lost, and no other will follow (seed 39444)
            return
        match message:
            case Heartbeat():
                self._on_heartbeat(session, message)
            case Join() | Synced():
                if message.held is not None and message.held.outer_step <= self.state.outer_step:
                    session.synced = message.held
                if isinstance(message, Join):
                    session.address = message.address
                    roster.tell(session)
            case Vote() | RoundFailed():
                roster.counters["old_round"] += 1
                roster.tell(session)
            case _:
                assert_never(message)

    def _has_lost_its_journal(self, join: Join) -> bool:
        """A run that has a certificate has begun. So an empty journal is not a new run's: nobody may found it again."""
        state, certificate = self.state, join.certificate
        if state.committed is not None or state.rebuilt is not None or certificate is None:
            return False
        return join.manifest_digest == self.config.manifest_digest and certificate.check(self.config.sealer)

    def _proof_of_a_newer_journal(self, sender: PeerRef, join: Join) -> Certificate | None:
        """A commit that this journal does not hold, told by whoever has the real one. None if there is no proof.

        The members refuse the words of an old journal. They would wait at its coordinator for ever, and it for them.
        """
        state, certificate = self.state, join.certificate
        if certificate is None or join.manifest_digest != self.config.manifest_digest:
            return None
        if state.rebuilt is not None and certificate.key.epoch < state.rebuilt.epoch:
            return None  # of the lost journal, and given up
        if state.certificate is not None and certificate.order <= state.certificate.order:
            return None
        if certificate.check(self.config.sealer):
            return certificate
        self._expose(sender, f"brings a certificate of outer step {certificate.made.outer_step} that nobody has made")
        return None

    def _expose(self, ref: PeerRef, cause: str) -> None:
        """Name a liar, each start of a peer once: it may say the same again every second."""
        self._roster.counters["forged_certificate"] += 1
        if ref not in self._exposed:
            self._exposed.append(ref)
            effect = Expose(ref=ref, outer_step=self.state.outer_step, cause=f"{ref.peer_id} {cause}")
            self._roster.effects.append(effect)

    def _ended(self, rebuild: Rebuild) -> bool:
        if rebuild.settled():
            self._rebuild = None
        return self._rebuild is None

    def _on_heartbeat(self, session: Session, beat: Heartbeat) -> None:
        roster, now = self._roster, self._roster.now
        session.beat(beat, now)
        session.works(beat, self.config.round_inner_steps)
        session.is_aware |= beat.epoch >= self.state.admitted.get(session.ref, math.inf)
        if beat.ready and beat.epoch >= self.state.epoch and beat.outer_step == self.state.outer_step:
            session.hands_in(now)
        if beat.epoch >= self.state.epoch:
            session.shows(beat.outer_step, self.state.outer_step, now)
        if beat.epoch >= self.state.epoch and beat.outer_step >= self.state.outer_step:
            session.behind_since = None
        elif beat.epoch >= self.state.epoch and not beat.blocked:
            session.behind_since = None  # it has the view and is on its way to the view's state
        elif now >= session.told_at + self.config.resend_interval_s:
            roster.tell(session)

    def _on_round(self, session: Session, message: Vote | RoundFailed) -> None:
        roster, peer_id, key = self._roster, session.ref.peer_id, message.key
        if key.epoch != self.state.epoch or key.outer_step != self.state.outer_step:
            # A late vote asks what became of the round: the last commit or the newest view says so.
            roster.counters["old_round"] += 1
            roster.tell(session)
            return
        session.behind_since = None
        session.shows(key.outer_step, self.state.outer_step, roster.now)
        session.hands_in(roster.now)
        session.is_aware = True
        match message:
            case Vote() if not self._is_signed(session.ref, message):
                roster.counters["forged_vote"] += 1
                roster.strike({session.ref: "has not signed what it votes for"})
            case Vote():
                if not self._rounds.vote(peer_id, message, roster.now):
                    roster.counters["vote_after_failure"] += 1
            case RoundFailed():
                self._rounds.report(peer_id, message, judge_at=roster.now + self.config.report_window_s)
            case _:
                assert_never(message)

    def _is_signed(self, ref: PeerRef, vote: Vote) -> bool:
        """Without its signature a vote would make no certificate that anybody believes."""
        assert self.state.committed is not None, "members vote from a committed state"
        if self._rounds.votes.get(ref.peer_id) == vote:
            return True  # said again, and looked at before
        words = ballot(vote.key, self.state.committed.digest, vote.digest, ref, vote.weight)
        return self.config.sealer.is_signed_by(ref.peer_id, words, vote.signature)

    def _on_leave(self, session: Session, message: Leave) -> None:
        roster, is_standing = self._roster, self.state.standing_since(session.ref) is not None
        alone = not roster.over and roster.handover.is_last(session)
        goodbye = Goodbye(outer_step=self.state.outer_step, alone=alone)
        if roster.over or (message.now and not is_standing):
            roster.close(session)
            roster.send(session.ref, goodbye)
        elif message.now:
            roster.change_view(out={session.ref: goodbye}, cause=f"{session.ref.peer_id} left at once")
        elif is_standing:
            self._shows(session, message.held)
            session.leaving = True  # it goes at the next commit boundary, with its last steps committed
        else:
            roster.handover.asked(session, message)

    def _shows(self, session: Session, held: Held | None) -> None:
        """A member told what it holds: after a restart nobody else knows that it was one step behind (seed 4273)."""
        step = held.outer_step if held is not None else OuterStep(0)
        session.shows(step, self.state.outer_step, self._roster.now)

    def _on_lease_request(self, session: Session, request: LeaseRequest) -> None:
        roster, ref, leases = self._roster, session.ref, self.state.leases
        newest = leases.newest_serial(ref)
        since = self.state.standing_since(ref)
        if since is None or request.epoch < since or request.serial < newest:
            roster.counters["old_lease_request"] += 1
            return
        if request.serial > newest:
            ranges = leases.plan(request.num_samples)
            roster.persist(LeaseRecord(ref=ref, serial=request.serial, ranges=ranges))
        roster.send(ref, LeaseGrant(serial=request.serial, ranges=leases.newest_grant(ref)))

    def _on_connection_lost(self, sender: PeerRef) -> None:
        session = self._roster.sessions.get(sender.peer_id)
        if session is not None and session.ref == sender and not session.disconnected:
            session.lost(self._roster.now, self.config.reconnect_grace_s)

    # -------------------------------------------------------------------------------- decisions

    def _settle(self) -> None:
        """Decide everything that the known facts decide."""
        self._roster.release_leases_of_strangers()
        self._let_go()
        self._drop_the_lost()
        if self.state.view.members and not self._roster.over and not self._roster.holders():
            self._roster.change_view(out={}, cause="nobody holds the state")
        self._closing.settle()
        if not self._roster.over:
            self._admission.between_commits()
            self._roster.handover.settle()
            self._admission.found()
            self._rollback.settle()
            self._meetings.send_home()
            self._meetings.make_way()

    def _let_go(self) -> None:
        """Do what a coordinator that died had journalled and not yet done: see whoever was put out off."""
        self._doorkeeper.settle()
        self._roster.let_go_of_the_struck()

    def _drop_the_lost(self) -> None:
        roster = self._roster
        accused = self._rounds.accused(self.state.view)
        lost: dict[PeerRef, str] = {}
        for deadline, reason, session in roster.deadlines():
            if deadline <= roster.now:
                lost.setdefault(session.ref, reason)
                if reason == STANDS_STILL and roster.is_member(session):
                    roster.pauses.missed(session.ref, self.state.outer_step, roster.now)
        for session in roster.members():
            if session.disconnected and accused[session.ref.peer_id]:
                lost.setdefault(session.ref, "connection lost, and a member waits for it")
        roster.drop(lost)
