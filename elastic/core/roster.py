# SPDX-License-Identifier: Apache-2.0
"""Who is in the run, how views change, and what peers are told about it.

The roster holds the durable state (run_state.py), one session per peer (sessions.py) and what was said in the round
in progress (rounds.py), and offers the verbs that keep the three consistent. Every verb journals first and tells
afterwards. When to use which verb is decided in coordinator.py, closing.py and admission.py.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from isthmus.collective.core.types import Epoch, Instant, Member, OuterStep, PeerId, PeerRef, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.edges import Edges
from isthmus.elastic.core.events import CoordinatorEffect, Persist, SendToPeer
from isthmus.elastic.core.grace import Grace
from isthmus.elastic.core.handover import Handover
from isthmus.elastic.core.messages import (
    Commit,
    CoordinatorMessage,
    Evicted,
    Goodbye,
    Held,
    NewView,
    Rebuilt,
    Refused,
    Welcome,
)
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.records import Record, ReleaseRecord, RollbackRecord, ViewRecord
from isthmus.elastic.core.rounds import Rounds
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.work import MAX_STRIKES

REFUSED_EXIT_CODE, INTEGRITY_EXIT_CODE = 5, 9

WRONG = "had another result than the others, or said what is not true"
"""What is said of a peer that was wrong too often, where the last time is not known."""

Departures = Mapping[PeerRef, CoordinatorMessage | None]
"""Members that the next view does without, each with what it is told (None: it is dead, nobody listens)."""


class Roster:
    """The coordinator's picture of the run, and the effects of what was decided in the current event."""

    def __init__(self, config: CoordinatorConfig, state: RunState) -> None:
        self.config = config
        self.state = state
        self.rounds = Rounds()
        self.grace = Grace(config)
        self.pauses = Pauses(config.max_peers)
        self.handover = Handover(self)
        self.sessions: dict[PeerId, Session] = {}  # in the order they came; the view says who is a member
        self.founder: PeerRef | None = None
        self.awaited: set[PeerId] = set()
        """Who is to be in the first view of a rebuilt run, and has not come back yet."""
        self.awaited_until: Instant = 0.0
        self.weights: tuple[float, ...] = ()
        """What the parts weigh in the newest view's first round, if that was said."""
        self.survey_from = OuterStep(0)
        """See `NewView`."""
        self._borne: Held | None = None
        self._bearers: dict[PeerId, PeerRef] = {}  # who was seen to hold that state, here or not
        self.halted: Refused | None = None
        """What everybody hears once the members' results differ for good."""
        self._sealed: Certificate | None = None  # the newest one that was told
        self.now: Instant = 0.0
        self.effects: list[CoordinatorEffect] = []
        self.counters: Counter[str] = Counter()

    # -------------------------------------------------------------------------------- look-ups

    @property
    def over(self) -> bool:
        """Whether the run has ended: peers only go from here on, no view and no commit follows."""
        return self.state.final or self.halted is not None

    @property
    def quorum(self) -> int:
        """How many members a commit needs now: the run's first one waits for `start_peers`."""
        if self.state.certificate is not None:
            return self.config.min_peers
        return max(self.config.min_peers, self.config.start_peers)

    def is_member(self, session: Session) -> bool:
        """Whether this session belongs to a member; else it is a learner's."""
        return self.state.is_member(session.ref)

    def members(self) -> list[Session]:
        """Sessions of the members by rank. Complete unless the run is over."""
        sessions, admitted = self.sessions, self.state.admitted
        known = [sessions[member.peer_id] for member in self.state.view.members if member.peer_id in sessions]
        return [session for session in known if session.ref in admitted]

    def is_excused(self, session: Session) -> bool:
        """Whether this session is of a late member that the round goes on without."""
        return self.state.is_excused(session.ref)

    def learners(self) -> list[Session]:
        """Sessions of whoever may become a member and can be reached: learners, and the excused that have worked."""
        admitted = self.state.admitted
        here = [item for item in self.sessions.values() if item.ref not in admitted and not item.disconnected]
        return [item for item in here if item.comes_back and (not item.leaving or self.is_excused(item))]

    def arrived(self) -> list[Session]:
        """Learners that hold the committed state, and wait for a boundary."""
        return [item for item in self.learners() if item.synced is not None and item.synced == self.state.committed]

    def bears(self, ref: PeerRef) -> None:
        """This peer has said that it holds the committed state."""
        if self._borne != self.state.committed:
            self._borne, self._bearers = self.state.committed, {}
        if ref.peer_id in self._bearers or len(self._bearers) < self.config.max_peers:
            self._bearers[ref.peer_id] = ref

    def bearers(self) -> list[PeerRef]:
        """Peers that have said so, and may be gone or hold something else by now."""
        return list(self._bearers.values()) if self._borne == self.state.committed else []

    def holders(self) -> tuple[Member, ...]:
        """Members that hold the committed state, or have it staged."""
        view = self.state.view
        return tuple(member for member in view.members if self.sessions[member.peer_id].holds_state is not False)

    def donors(self) -> tuple[Member, ...]:
        """Who can serve the committed state."""
        return (*self.holders(), *self.handover.donors())

    def deadlines(self) -> list[tuple[Instant, str, Session]]:
        """For every session each instant at which it would be given up, and why."""
        members = self.members()
        waiting = [item for item in members if item.blocked or self.rounds.spoke(item.ref.peer_id)]
        # Who has caught up waits for a commit boundary. If the only member hangs there is nobody else to wait for it,
        # and the learners would sit there for ever (scenarios/hung_sole_member_makes_way.toml).
        waiting += self.arrived()
        result = []
        for session in self.sessions.values():
            if not self.over and self.is_excused(session) and self.state.view.world_size >= self.quorum:
                continue  # it keeps nobody waiting: see `overdue`
            # A member keeps the others waiting if there is a waiting one besides itself.
            others_wait = session in members and len(waiting) > (1 if session in waiting else 0)
            for deadline, reason in session.deadlines(self.config, others_wait=others_wait):
                result.append((deadline, reason, session))
        return result

    def overdue(self) -> dict[PeerRef, str]:
        """The excused that are to be given up, and why. At a boundary: in mid-round it would void an exchange."""
        result: dict[PeerRef, str] = {}
        for session in filter(self.is_excused, self.sessions.values()):
            for deadline, reason in session.deadlines(self.config, others_wait=True):
                if deadline <= self.now:
                    result.setdefault(session.ref, reason)
        return result

    # -------------------------------------------------------------------------------- sessions

    def open(self, ref: PeerRef, address: str) -> Session:
        """Begin to know this start of a peer, as a learner unless the view holds it."""
        now = self.now
        session = Session(ref=ref, address=address, last_heard=now, progressed_at=now, told_at=now)
        self.sessions[ref.peer_id] = session
        return session

    def close(self, session: Session) -> None:
        """Forget it: whatever it says next, it is a stranger."""
        del self.sessions[session.ref.peer_id]
        for other in self.sessions.values():
            other.met.discard(session.ref)
            other.asked.pop(session.ref, None)

    def drop(
        self,
        lost: Mapping[PeerRef, str],
        last_words: Mapping[PeerRef, Refused] | None = None,
        *,
        struck: Collection[PeerRef] = (),
        counted_as: str = "",
    ) -> None:
        """Give these sessions up, each for its reason; members among them leave the view.

        Whoever has `last_words` hears them instead of `Evicted`, and does not come back. Who is `struck` said what is
        not true. Reasons that say more than a few words could are `counted_as` something shorter.
        """
        out: dict[PeerRef, CoordinatorMessage | None] = {}
        for ref, reason in lost.items():
            session = self.sessions[ref.peer_id]
            self.counters[f"dropped: {counted_as or reason}"] += 1
            if self.state.standing_since(ref) is not None and not self.over:
                self.remind(ref)
                evicted = Evicted(epoch=Epoch(self.state.epoch + 1), reason=reason)
                out[ref] = (last_words or {}).get(ref, evicted)
            else:
                self.close(session)
                self.send(ref, Evicted(epoch=self.state.epoch, reason=reason))
        if out:
            cause = "; ".join(f"{ref.peer_id} dropped: {lost[ref]}" for ref in out)
            self.change_view(out=out, cause=cause, struck=tuple(ref for ref in out if ref in struck))

    def strike(self, liars: Mapping[PeerRef, str]) -> None:
        """Go on without these members, whose words or work were false. Whoever has had its strikes is sent home."""
        out = {ref for ref in liars if self.state.strikes.of(ref.peer_id) + 1 >= MAX_STRIKES}
        last_words = {ref: self.sends_home(ref, liars[ref]) for ref in out}
        self.drop(liars, last_words, struck=tuple(liars), counted_as="said what is not true")

    def let_go_of_the_struck(self) -> None:
        """Send home who has had its strikes: a coordinator died between the last of them and the next view."""
        out = [session.ref for session in self.sessions.values() if self.state.strikes.is_out(session.ref)]
        if out and not self.over:
            self.drop(dict.fromkeys(out, WRONG), {ref: self.sends_home(ref, WRONG) for ref in out}, counted_as=WRONG)

    def sends_home(self, ref: PeerRef, reason: str) -> Refused:
        """What a peer hears that was wrong too often."""
        self.counters["sent_home"] += 1
        said = (
            f"{ref.peer_id} {reason}, {MAX_STRIKES} times in a row: it is put out; look for what is wrong with this "
            "machine, then start it again, and it fetches the state"
        )
        return Refused(code=INTEGRITY_EXIT_CODE, reason=said)

    def put_out(self, session: Session, word: Refused, *, cause: str) -> None:
        """The operator wants it gone: it hears this, and the others go on without it."""
        self.counters["put_out"] += 1
        if self.state.standing_since(session.ref) is not None and not self.over:
            self.change_view(out={session.ref: word}, cause=cause)
        else:
            self.close(session)
            self.send(session.ref, word)

    def forgive(self) -> None:
        """The coordinator itself did not run: nobody was silent, late or away for that long."""
        now, config = self.now, self.config
        self.grace.interrupted(now)
        self.rounds.forgive(judge_at=now + config.report_window_s, now=now)
        if self.awaited:
            self.awaited_until = max(self.awaited_until, now + config.rebuild_grace_s)
        for session in self.sessions.values():
            session.forgive(now)
        self.handover.expect(now + config.heartbeat_timeout_s)

    def halt(self, refused: Refused) -> None:
        """The run cannot go on: tell everybody, whoever speaks from now on as well."""
        self.halted = refused
        for session in self.sessions.values():
            self.send(session.ref, refused)

    # -------------------------------------------------------------------------------- views

    def change_view(
        self,
        *,
        out: Departures,
        into: Sequence[Session] = (),
        excuse: Sequence[Session] = (),
        cause: str,
        struck: tuple[PeerRef, ...] = (),
        weights: tuple[float, ...] = (),
    ) -> None:
        """Journal and announce the next view: without `out`, with `into` at the end. Who is to `excuse` keeps its work.

        Whoever is excused already stays so, unless it is in `out` or `into`. `struck`: see `ViewRecord`; `weights`: see
        `NewView`, for the same members as before.
        """
        committed, epoch = self.state.committed, Epoch(self.state.epoch + 1)
        assert committed is not None, "a view needs a state"
        # What happens after all have handed in does not touch how long that took.
        is_cut_short = not excuse and any(session.ready_at is None for session in self.members())
        out = dict(out)
        stays = [session for session in self.members() if session.ref not in out and session not in excuse]
        edges = Edges(self.state.view)
        together = edges.with_a_hub([*stays, *into], self.state.reached)
        for session in stays:
            if session not in together:
                self.counters["dropped: has no link"] += 1
                self.remind(session.ref)
                out[session.ref] = Evicted(epoch=epoch, reason="has no link with the members that go on")
        stays = [session for session in stays if session in together]
        into = [session for session in into if session in together]
        for session in into:
            session.admit(holds_state=session.synced == committed, now=self.now)
        for session in excuse:
            session.excuse(epoch, committed)
            self.pauses.missed(session.ref, committed.outer_step, self.now)
            for other in stays:  # they were members together, and need not meet again
                if edges.between(session, other):
                    session.met.add(other.ref)
                    other.met.add(session.ref)
                else:
                    session.unmet[other.ref] = other.unmet[session.ref] = "no link before"
        absent = [item for item in self.sessions.values() if self.is_excused(item) and item.ref not in out]
        absent = [*(item for item in absent if item not in into), *excuse]
        if all(session.holds_state is False for session in (*stays, *into)):
            # Everybody is one commit behind and whoever could serve it is gone. As members they would wait for a
            # donor for ever; as learners they wait for any peer that brings the state back.
            for session in stays:
                self.remind(session.ref)
            out |= {session.ref: Evicted(epoch=epoch, reason="nobody holds the state") for session in stays}
            stays, into = [], ()
        by_ref = {member.ref: member for member in self.state.view.members}
        members = [by_ref[session.ref] for session in stays]
        members += [Member(item.ref.peer_id, item.ref.incarnation, item.address) for item in into]
        view = View(
            epoch=epoch,
            outer_step=committed.outer_step,
            digest=committed.digest,
            members=tuple(members),
            apart=edges.pairs_apart([*stays, *into]),
        )
        excused = tuple(session.ref for session in absent)
        self.persist(ViewRecord(view=view, cause=cause[:500], excused=excused, struck=struck))
        self.weights = weights if len(weights) == len(members) else ()
        self.release_leases_of_strangers()
        self.rounds.begin(self.now)
        if is_cut_short:
            self.grace.interrupted(self.now)
        for ref, message in out.items():
            gone = self.sessions.get(ref.peer_id)
            if gone is not None and gone.ref == ref:
                self.close(gone)
            if message is not None:
                self.send(ref, message)
        for session in (*stays, *into, *absent):
            self.expect_news(session)
            self.send(session.ref, self.newest_view(session.ref))

    def cross_boundary(self, *, evicted: Departures, into: Sequence[Session]) -> None:
        """Change the view between two rounds: who wants to leave goes, these come in. No change, no view."""
        step = self.state.outer_step
        leavers = [session for session in self.members() if session.leaving and session.ref not in evicted]
        if not evicted and not leavers and not into:
            return
        keeper = self.handover.keeper_among(leavers, evicted) if leavers else None
        out = dict(evicted)
        causes = [f"{session.ref.peer_id} joined" for session in into]
        causes += [f"{ref.peer_id} evicted" for ref in out]
        for session in leavers:
            if session is keeper:
                out[session.ref] = None
                causes.append(f"{session.ref.peer_id} left, and serves outer step {step} until another peer holds it")
            else:
                out[session.ref] = Goodbye(outer_step=step, alone=self.handover.is_last(session, leavers))
                causes.append(f"{session.ref.peer_id} left")
        self.change_view(out=out, into=into, cause="; ".join(causes))
        if keeper is not None:
            self.handover.stay(keeper)

    def release_leases_of_strangers(self) -> None:
        """Free what former members own. Also repairs a journal that was cut between a view and its releases."""
        leases = self.state.leases
        for ref in leases.owners():
            if self.state.standing_since(ref) is None:
                self.persist(ReleaseRecord(ref=ref, epoch=self.state.epoch, ranges=leases.owned_by(ref)))

    # -------------------------------------------------------------------------------- telling

    def expect_news(self, session: Session) -> None:
        """It is being told something now; from now on it should show that it has heard."""
        session.told_at = self.now
        if session.behind_since is None:
            session.behind_since = self.now

    def tell(self, session: Session) -> None:
        """Say again what a member must know: the newest commit (it may have it staged) and the view."""
        session.told_at = self.now
        self.tell_commit(session.ref)
        if not self.state.final:
            self.send(session.ref, self.newest_view(session.ref))

    def newest_view(self, ref: PeerRef) -> NewView:
        """The view as this peer is told it."""
        state = self.state
        return NewView(
            view=state.view,
            excused=tuple(state.excused),
            contributed=state.contributed.get(ref),
            weights=self.weights,
            survey_from=self.survey_from,
        )

    def remind(self, to: PeerRef) -> None:
        """Say the newest commit to who voted for it, before it hears that it is out and forgets what it has staged.

        That may be the only copy of the committed state: when a commit was written and the line to everybody went,
        all came back as strangers, threw their copies away, and the run was lost with nobody dead
        (scenarios/commit_that_nobody_heard_of.toml).
        """
        certificate = self.state.certificate
        if certificate is not None and any(item.peer_id == to.peer_id for item in certificate.contributors):
            self.tell_commit(to)

    def welcome(self, session: Session) -> None:
        """Tell a learner what to catch up with and from whom, or that it is to found the run."""
        committed = self.state.committed
        welcome = Welcome(
            epoch=self.state.epoch,
            target=committed,
            donors=() if session.synced == committed else self.donors(),
            found=committed is None and session.ref == self.founder,
        )
        self.send(session.ref, welcome)
        self.tell_commit(session.ref)

    def tell_commit(self, to: PeerRef) -> None:
        """The newest commit, for who may have it staged, and for who keeps its certificate."""
        certificate = self.state.certificate
        if certificate is None:
            return
        if self._sealed is None or self._sealed.order != certificate.order:
            self._sealed = self.sealed(certificate)
        self.send(to, Commit(certificate=self._sealed))

    def sealed(self, certificate: Certificate) -> Certificate:
        """Under the seal that it has, whose authority the peers know, or else under ours."""
        return certificate if certificate.seal else certificate.sealed(self.config.sealer)

    def tell_replaced(self, to: PeerRef) -> None:
        """A newer start of the same peer is known. An older one that still speaks lives on a copy of its folder."""
        self.counters["older_incarnation"] += 1
        reason = (
            f"a newer start of {to.peer_id} has taken this one's place: if both run, one of their folders is a copy "
            "of the other; join from an empty folder (--dir)"
        )
        self.send(to, Refused(code=REFUSED_EXIT_CODE, reason=reason))

    def tell_rebuilt(self, to: PeerRef) -> None:
        """The run went back: what it goes on from."""
        record = self.state.rebuilt
        assert record is not None, "only a run that went back says so"
        certificate = record.certificate
        rebuilt = Rebuilt(
            epoch=record.epoch,
            certificate=None if certificate is None else self.sealed(certificate),
            committed=self.state.committed,
            given_up=record.given_up if isinstance(record, RollbackRecord) else OuterStep(0),
        )
        self.send(to, rebuilt)

    def persist(self, record: Record) -> None:
        """Write a decision down, and only so make it true."""
        self.effects.append(Persist(record=record))
        self.state.apply(record)

    def send(self, to: PeerRef, message: CoordinatorMessage) -> None:
        """Tell a peer, if it is connected. Who is told that it is out, or that the run goes back, comes with a Join."""
        if isinstance(message, Evicted | Rebuilt):
            self.handover.expect(self.now + self.config.heartbeat_timeout_s)
        self.effects.append(SendToPeer(to=to, message=message))
