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

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import assert_never

from isthmus.collective.core.types import Instant, PeerId, PeerRef
from isthmus.elastic.core.admission import Admission
from isthmus.elastic.core.attendance import Attendance
from isthmus.elastic.core.closing import Closing
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.elastic.core.doorkeeper import Doorkeeper
from isthmus.elastic.core.events import CoordinatorEffect, CoordinatorEvent, Ordered, PeerConnectionLost, PeerSaid, Tick
from isthmus.elastic.core.failures import Failures
from isthmus.elastic.core.handover import Handover
from isthmus.elastic.core.holders import Holders
from isthmus.elastic.core.meetings import Meetings
from isthmus.elastic.core.messages import (
    Heartbeat,
    Held,
    Join,
    LeaseRequest,
    Leave,
    Met,
    PeerMessage,
    RoundFailed,
    Synced,
    Vote,
)
from isthmus.elastic.core.news import News
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.peer_fence import PeerFence, Void
from isthmus.elastic.core.rebuild import Proofs, Rebuild
from isthmus.elastic.core.reception import Reception
from isthmus.elastic.core.records import Record
from isthmus.elastic.core.rendezvous import Rendezvous
from isthmus.elastic.core.rollback import Rollback
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views
from isthmus.elastic.core.watch import Watch

STORY_LENGTH = 512


class CoordinatorMachine:
    """See the module's docstring. Drive it by `handle`, and by a `Tick` whenever `next_deadline` has passed."""

    rebuild_type: type[Rebuild] = Rebuild

    def __init__(self, config: CoordinatorConfig) -> None:
        self._start(config, RunState())

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        self.config, self.state = config, state
        self._rebuild: Rebuild | None = None  # while the journal is lost and not made anew yet
        self._deadline: Instant | None = None  # found after each event: looking costs as much as deciding
        self._promised: Instant | None = None  # when the last event expected the next one at the latest
        self._story: deque[tuple[Instant, CoordinatorEvent]] = deque(maxlen=STORY_LENGTH)
        # - What is known
        self._turn = turn = Turn(state)
        self._roster = roster = Roster(config, turn)
        self._holders = holders = Holders(turn, roster, config.max_peers)
        self._round = open_round = OpenRound(config)
        self._pauses = pauses = Pauses(config.max_peers)
        self._rendezvous = rendezvous = Rendezvous(config.rebuild_grace_s)
        # - What is told, and how the membership changes
        self._news = news = News(config.sealer, turn, holders, open_round)
        self._views = views = Views(turn, roster, news, open_round)
        # - Who takes words in
        self._fence = PeerFence(turn, news, holders)
        self._proofs = Proofs(config, turn)
        self._reception = Reception(config, turn, roster, news, views)
        self._attendance = Attendance(config, turn, news, views, open_round)
        # - Who decides
        self._doorkeeper = Doorkeeper(config, turn, roster, views)
        self._watch = Watch(config, turn, roster, views, open_round, pauses)
        self._handover = Handover(config, turn, roster, holders, news, views)
        self._meetings = Meetings(config, turn, roster, views, pauses)
        self._admission = Admission(
            *(config, turn, roster, news, views),
            holders=holders,
            handover=self._handover,
            meetings=self._meetings,
            pauses=pauses,
            rendezvous=rendezvous,
            watch=self._watch,
        )
        self._closing = Closing(
            *(config, turn, roster, news, views),
            open_round=open_round,
            pauses=pauses,
            admission=self._admission,
            failures=Failures(config, turn, roster, views, open_round=open_round, pauses=pauses),
        )
        self._rollback = Rollback(
            *(config, turn, roster, news, views),
            holders=holders,
            open_round=open_round,
            rendezvous=rendezvous,
        )

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
        machine._turn.begin(now)
        if state.committed is not None:
            machine._handover.expect(now + config.recover_grace_s)
        if rebuild is not None and state.committed is None and state.rebuilt is None:
            machine._begin_rebuild(rebuild)
        machine._roster.recover()
        machine._promised = machine._deadline = machine._look_ahead()
        return machine

    def _begin_rebuild(self, rule: RebuildRule) -> None:
        self._rebuild = self.rebuild_type(self.config, self._turn, self._news, self._rendezvous, rule)

    # -------------------------------------------------------------------------------- the machine

    def handle(self, event: CoordinatorEvent, now: Instant) -> Sequence[CoordinatorEffect]:
        """Take one event in. The effects are carried out in order, each `Persist` durably before the next effect."""
        self._story.append((now, event))
        self._turn.begin(now)
        if self._promised is not None and now > self._promised + self.config.lateness_s:
            self._forgive(now)
        if self._rebuild is None:
            self._let_go()  # before the event: another view must not name a member that was put out
        match event:
            case PeerSaid():
                self._on_said(event.sender, event.message)
            case PeerConnectionLost(sender=sender):
                session = self._roster.sessions.get(sender.peer_id)
                if session is not None and session.ref == sender and not session.disconnected:
                    session.lost(now, self.config.reconnect_grace_s)
            case Ordered():
                self._doorkeeper.obey(event)
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._rebuild is not None and self._rebuild.settled():
            self._rebuild = None
        if self._rebuild is None:
            self._settle()
        self._deadline = deadline = self._look_ahead()
        self._promised = None if deadline is None else max(deadline, now)
        return self._turn.effects

    def _forgive(self, now: Instant) -> None:
        """This process did not run: nobody was silent, late or away for that long. What was said may lie unread."""
        self._turn.counters["woken_late"] += 1
        self._round.forgive(now)
        self._handover.expect(now + self.config.heartbeat_timeout_s)
        for session in self._roster.sessions.values():
            session.forgive(now)
        self._rendezvous.forgive(now)
        self._rollback.forgive(now)
        self._meetings.forgive(now)
        self._admission.forgive(now)
        if self._rebuild is not None:
            self._rebuild.forgive(now)

    def next_deadline(self) -> Instant | None:
        """When to feed a `Tick`, if nothing else happens before."""
        return self._deadline

    def _look_ahead(self) -> Instant | None:
        deadlines = self._watch.deadlines()
        if self._rebuild is not None:
            deadlines += self._rebuild.deadlines()
        elif not self._roster.over:
            deadlines += [*self._admission.deadlines(), *self._closing.deadlines(), *self._rollback.deadlines()]
            deadlines += [*self._meetings.deadlines(), *self._handover.deadlines()]
        if not deadlines:
            return None
        # Were the clock looked at only when something is due, an absence that ends just then would be no absence.
        return min(*deadlines, self._turn.now + self.config.lateness_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        state, view, roster, known = self.state, self.state.view, self._roster, self._round
        ids = [member.peer_id for member in view.members]
        assert len(set(ids)) == len(ids), "a peer is in the view twice"
        assert all(peer_id in ids for peer_id in (*known.votes, *known.reports)), "a stranger voted"
        assert [member.ref for member in view.members] == list(state.admitted), "membership is told in two ways"
        assert roster.over or all(ref.peer_id in roster.sessions for ref in state.excused), "excused, no session"
        if view.members:
            assert state.committed == Held(view.outer_step, view.digest), "the view names another state"
        if view.members and not roster.over:
            assert [session.ref.peer_id for session in roster.members()] == ids, "a member without a session"
            assert self._holders.members(), "nobody holds the view's state"
        state.leases.check_invariants()

    @property
    def voted(self) -> tuple[PeerId, ...]:
        """The members whose vote on the round in progress is here."""
        return tuple(self._round.votes)

    @property
    def counters(self) -> Counter[str]:
        """What was dropped by the fence and why peers were given up, by reason."""
        return self._turn.counters

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
        """Whoever is put out, a run that is halted and a journal that is lost come first; then the fence."""
        roster = self._roster
        if self._doorkeeper.turn_away(sender):
            return
        if isinstance(message, Join):
            self._doorkeeper.introduce(sender)
        if roster.halted is not None:
            self._turn.send(sender, roster.halted)
            return
        if self._rebuild is None and isinstance(message, Join) and self._proofs.is_lost(message):
            self._begin_rebuild(RebuildRule.MAJORITY)
            for item in list(roster.sessions.values()):
                roster.close(item)  # whatever they say next is answered with the question what they hold
        if self._rebuild is not None:
            self._rebuild.heard(sender, message)
            return
        if isinstance(message, Join) and self._proofs.resigns(sender, message):
            return
        session = roster.sessions.get(sender.peer_id)
        is_stranger = session is None or session.ref != sender
        void = self._fence.why_void(sender, message, session)
        if session is not None and not is_stranger:
            session.heard(self._turn.now)
        elif isinstance(message, Join) and void is not Void.OLDER_START and self._reception.refuses(sender, message):
            return
        if void is not None:
            self._fence.answer(void, sender, message, session)
        else:
            self._take(sender, message, None if is_stranger else session)
        if is_stranger and roster.sessions.get(sender.peer_id) is not session:
            self._meetings.ask_all()
        elif session is not None and not is_stranger and isinstance(message, Heartbeat) and not roster.over:
            self._meetings.ask(session)

    def _take(self, sender: PeerRef, message: PeerMessage, session: Session | None) -> None:
        """A word that counts, of a stranger if there is no session."""
        match message:
            case Leave():
                self._handover.asked(sender, message, session)
            case Join() if session is None:
                self._reception.join(sender, message)
            case _ if session is None:
                raise AssertionError("the fence lets strangers join and leave")
            case Met():
                self._meetings.heard(session, message)
            case Join() | Heartbeat() | Synced() if self.state.standing_since(sender) is None:
                self._reception.learner(session, message)
            case Join() | Synced():
                self._attendance.holds(session, message)
            case Heartbeat():
                self._attendance.beats(session, message)
            case Vote() | RoundFailed():
                self._attendance.judges(session, message)
            case LeaseRequest():
                self._attendance.wants_data(session, message)
            case _:
                assert_never(message)

    # -------------------------------------------------------------------------------- decisions

    def _settle(self) -> None:
        """Decide everything that the known facts decide."""
        roster, views = self._roster, self._views
        views.release_leases_of_strangers()
        self._let_go()
        self._watch.settle()
        if self.state.view.members and not roster.over and not self._holders.members():
            views.change(out={}, cause="nobody holds the state")
        self._closing.settle()
        if not roster.over:
            self._admission.between_commits()
            self._handover.settle()
            self._admission.found()
            self._rollback.settle()
            self._meetings.send_home()
            self._meetings.make_way()

    def _let_go(self) -> None:
        """Do what a coordinator that died had journalled and not yet done: see whoever was put out off."""
        self._doorkeeper.settle()
        self._views.let_go_of_the_struck()
