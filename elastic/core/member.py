# SPDX-License-Identifier: Apache-2.0
"""One peer's part in the run: from its first Join to its exit code.

A deterministic machine without IO; `Phase` says where it stands:

    JOINING --Welcome--> LEARNING --NewView--> SYNCING --holds the view's state--> ACTIVE
       ^                    |                     |                                  |
       +------ Evicted -----+------ Evicted ------+------------- Evicted ------------+      any --> FINISHED

    ACTIVE --NewView without it, but excused--> EXCUSED --NewView with it--> SYNCING or ACTIVE

Rules (elastic/README.md has the reasons):
* Only who holds exactly the view's outer step and digest is active; anybody else catches up and never votes.
* A payload is kept until its outcome is known: committed, or this peer itself was evicted. A new view of the same
  outer step starts its exchange again. If its step was committed without it, because this peer was late and excused,
  it is carried over: the work goes into the next payload.
* What is staged is installed by a Commit that names its key and digest, or by a view that names its digest, be it as
  the state it starts from or as the newest one with this peer's work. Who is put out keeps it until another state is
  named: also a Welcome may name this one.
* What waits for an answer is said again on one timer (line.py).
* Only a commit whose certificate continues the chain is believed, and no word that is older than what is known
  (coordinator_fence.py).

It must not know what the state is, how it is exchanged or how it is fetched.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import assert_never

from isthmus.collective.core.types import Instant, Member, OuterStep, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.chain import Chain
from isthmus.elastic.core.config import MemberConfig
from isthmus.elastic.core.coordinator_fence import CoordinatorFence
from isthmus.elastic.core.events import (
    BecomeActive,
    CatchUpFailed,
    CaughtUp,
    Connected,
    CoordinatorSaid,
    Disconnected,
    ExchangeDone,
    ExchangeFailed,
    Finish,
    KeepCertificate,
    LeasesWanted,
    LeaveRequested,
    LinkMade,
    MakeLinks,
    MemberEffect,
    MemberEvent,
    Progressed,
    RoundReady,
    TakeLeases,
    Tick,
)
from isthmus.elastic.core.exit_codes import UNREACHABLE
from isthmus.elastic.core.farewell import LeavesAfter
from isthmus.elastic.core.line import Line
from isthmus.elastic.core.messages import (
    Commit,
    CoordinatorMessage,
    Evicted,
    Goodbye,
    Held,
    LeaseGrant,
    Meet,
    Met,
    NewView,
    Rebuilding,
    Rebuilt,
    Refused,
    Trust,
    Unmet,
    Welcome,
)
from isthmus.elastic.core.notary import Signer
from isthmus.elastic.core.place import Phase, Place

STORY_LENGTH = 512


def went_back(rebuilt: Rebuilt) -> str:
    """What has happened to the run, for people."""
    if not rebuilt.given_up:
        return "the coordinator's journal was lost, and rebuilt from the members' certificates"
    step = 0 if rebuilt.certificate is None else rebuilt.certificate.made.outer_step
    return f"nobody holds outer step {rebuilt.given_up} any more: the run goes on from outer step {step}"


class MemberMachine:
    """See the module's docstring. Drive it by `handle`, and by a `Tick` whenever `next_deadline` has passed.

    Args:
        config: how often it speaks and how long it waits.
        me: this start of this peer.
        address: where others reach it.
        manifest_digest: of the run, as this peer knows it.
        held: the state it starts with, from its disk.
        aside: what an earlier start of this peer voted for, if that is staged: the round, and the state that would be.
        signer: signs as this peer, and knows who may seal.
        certificate: the newest one that an earlier start of this peer has kept.
    """

    place_type: type[Place] = Place

    def __init__(
        self,
        config: MemberConfig,
        me: PeerRef,
        address: str,
        manifest_digest: bytes,
        held: Held | None = None,
        *,
        aside: tuple[RoundKey, Held] | None = None,
        signer: Signer,
        certificate: Certificate | None = None,
    ) -> None:
        self.config, self.me = config, me
        self.counters: Counter[str] = Counter()
        self._place = self.place_type(me, held, config.catch_up_retry_s, self.counters, signer.sign)
        self._place.round.laid_aside = aside
        self._fence = CoordinatorFence(self._place, Chain(signer, certificate, self.counters), self.counters)
        self._line = Line(config, address, manifest_digest, self._place, self._fence)
        self._farewell = self._line.farewell
        self._now: Instant = 0.0
        self._story: deque[tuple[Instant, MemberEvent]] = deque(maxlen=STORY_LENGTH)

    # -------------------------------------------------------------------------------- the machine

    @property
    def phase(self) -> Phase:
        """Where this peer stands."""
        return self._place.phase

    @property
    def is_standing(self) -> bool:
        """Whether what this peer has done since the last commit counts: as an active member, or excused."""
        return self._place.is_standing

    @property
    def view(self) -> View | None:
        """The view it is a member of, advanced by the commits it has installed."""
        return self._place.view

    @property
    def held(self) -> Held | None:
        """The committed state it holds."""
        return self._place.held

    @property
    def leaves_after(self) -> LeavesAfter | None:
        """What keeps this peer that wants to go; None if it does not want to."""
        return self._farewell.waits_for

    @property
    def certificate(self) -> Certificate | None:
        """The newest commit that it can prove."""
        return self._fence.chain.newest

    @property
    def story(self) -> Sequence[tuple[Instant, MemberEvent]]:
        """The newest events, for a crash report."""
        return tuple(self._story)

    def handle(self, event: MemberEvent, now: Instant) -> Sequence[MemberEffect]:
        """Take one event in; the effects are to be carried out in order."""
        self._story.append((now, event))
        self._now = now
        effects = self._place.effects = []
        if self._place.phase is Phase.FINISHED:
            return effects
        self._line.begin(now)
        match event:
            case CoordinatorSaid():
                self._on_message(event.message)
            case Connected():
                self._line.up()
            case Disconnected():
                self._line.down()
            case RoundReady():
                self._on_round_ready(event)
            case ExchangeDone() | ExchangeFailed():
                if self._place.round.ended(event):
                    self._line.say_outstanding()
                else:
                    self.counters["old_exchange"] += 1
            case CaughtUp() | CatchUpFailed():
                self._on_catch_up(event)
            case Progressed():
                self._place.progressed(event)
            case LinkMade(ref=ref, cause=None):
                self._line.say(Met(peers=(ref,)))
            case LinkMade(ref=ref, cause=cause):
                self._line.say(Met(unmet=(Unmet(ref, (cause or "")[:160]),)))
            case LeasesWanted():
                self._on_leases_wanted(event.num_samples)
            case LeaveRequested():
                if self._farewell.request(event, now):
                    self._line.say_outstanding()
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        if any(isinstance(effect, BecomeActive) for effect in effects):
            self._line.ask_for_leases()
        return effects

    def next_deadline(self) -> Instant | None:
        """When to feed a `Tick`, if nothing else happens before."""
        if self._place.phase is Phase.FINISHED:
            return None
        deadlines = [*self._line.deadlines(), self._place.pursuit.retry_at, self._farewell.by]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        place = self._place
        place.round.check_invariants()
        if place.phase is Phase.FINISHED:
            return
        place.check_invariants()
        assert place.view is None or place.view.epoch == self._fence.epoch, "not in the newest view heard of"

    def _on_tick(self) -> None:
        if self._farewell.is_overdue(self._now):
            self._finish(self._farewell.end("left without an answer from the coordinator"))
        elif self._line.is_given_up:
            waited = f"{self.config.coordinator_timeout_s:.0f} s"
            self._finish(Finish(code=UNREACHABLE, reason=f"the coordinator could not be reached for {waited}"))
        else:
            self._place.effects += self._place.pursuit.wake(self._now)
            self._line.tick()

    # -------------------------------------------------------------------------------- what the coordinator says

    def _on_message(self, said: CoordinatorMessage) -> None:
        line, fence, newest, epoch = self._line, self._fence, self._fence.chain.newest, self._fence.epoch
        line.is_asked = isinstance(said, Rebuilding) or (line.is_asked and isinstance(said, Trust))
        message = fence.admit(said)
        if fence.chain.newest is not None and fence.chain.newest is not newest:
            self._place.effects.append(KeepCertificate(certificate=fence.chain.newest))
        match message:
            case None:
                pass
            case Welcome():
                self._on_welcome(message)
            case NewView():
                self._on_new_view(message)
            case Commit():
                self._on_commit(message.certificate)
            case Evicted():
                self._lose_membership(message.reason)
                self._join_again()
            case Rebuilding():  # the timer repeats the Join
                self._farewell.stay(self._now + self.config.coordinator_timeout_s)
            case Rebuilt() if fence.epoch > epoch:
                self._on_rebuilt(message)
            case Rebuilt():  # said again: what this peer holds is newer, and nobody has proved it
                self._place.pursuit.give_up(after=OuterStep(-1), but=None)
                line.say_outstanding()
            case Trust():
                pass  # whose connections are taken is decided elsewhere
            case Refused():
                self._finish(Finish(code=message.code, reason=message.reason))
            case LeaseGrant():
                self._on_lease_grant(message)
            case Meet(peers=peers):
                self._place.effects.append(MakeLinks(peers=tuple(peer for peer in peers if peer.ref != self.me)))
            case Goodbye():
                self._on_goodbye(message)
            case _:
                assert_never(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        leaves = self._farewell.word is not None
        self._lose_membership("stays until another peer holds the state" if leaves else "welcomed as a learner")
        self._place.phase = Phase.LEARNING
        if welcome.found:
            self._place.effects += self._place.pursuit.found()
        if welcome.target is not None:
            self._aim(welcome.target, welcome.donors)
            if welcome.target == self.held:
                self._farewell.stay(self._now + self.config.coordinator_timeout_s)

    def _on_new_view(self, message: NewView) -> None:
        if self.me in message.excused:
            self._place.excuse(message.view, message.contributed)
            self._farewell.limit(self._now)
        else:
            self._farewell.await_boundary()
            self._place.enter(message)

    def _on_commit(self, certificate: Certificate) -> None:
        place, made = self._place, certificate.made
        if certificate.key == place.round.staged_key and place.install_if_staged(made, certificate):
            if certificate.final:
                self._bid_farewell()
            return
        if place.round.key == certificate.key:
            place.overrule(made)
        if certificate.final:
            self._bid_farewell()  # also if it was made without this peer, in a view that it has not heard of
        elif place.view is None and place.phase in (Phase.LEARNING, Phase.EXCUSED):
            # A learner lives through commits, or it would never arrive. So does who is excused.
            self._aim(made)

    def _aim(self, target: Held, donors: Sequence[Member] | None = None) -> None:
        if self._place.aim(target, donors):
            self._line.say_outstanding()

    def _on_rebuilt(self, rebuilt: Rebuilt) -> None:
        """All that was told since this certificate is void."""
        place, chain, certificate = self._place, self._fence.chain, rebuilt.certificate
        # This commit may be staged here, and nowhere else.
        if certificate is not None and place.install_if_staged(certificate.made, certificate) and certificate.final:
            self._bid_farewell()
        place.drop_staged()
        if certificate is not None:
            place.pursuit.give_up(after=certificate.made.outer_step, but=rebuilt.committed)
        elif chain.newest is not None:
            place.pursuit.give_up(after=OuterStep(-1), but=rebuilt.committed)
        if certificate is not None and certificate != chain.newest:
            place.effects.append(KeepCertificate(certificate=certificate))
        chain.go_back_to(certificate)
        self._lose_membership(went_back(rebuilt))
        self._join_again()

    def _join_again(self) -> None:
        self._place.phase = Phase.JOINING
        self._line.say_outstanding()

    def _on_lease_grant(self, grant: LeaseGrant) -> None:
        ranges = self._place.leases.take(grant)
        if ranges is None:
            self.counters["old_grant"] += 1
            return
        self._place.effects.append(TakeLeases(ranges=ranges))
        self._place.has_leases()
        self._on_leases_wanted(0)

    # -------------------------------------------------------------------------------- what happens at home

    def _on_round_ready(self, payload: RoundReady) -> None:
        # The run's last step may have been made without it.
        if not self._farewell.is_final and self._place.take_payload(payload):
            # The others' grace for the late begins when the quorum has handed in.
            self._line.beat()

    def _on_catch_up(self, event: CaughtUp | CatchUpFailed) -> None:
        place = self._place
        place.catch_up_ended(event, self._now)
        if place.view is None:
            if place.phase in (Phase.LEARNING, Phase.EXCUSED):
                self._line.say_outstanding()
            place.go_on()

    def _on_leases_wanted(self, num_samples: int) -> None:
        if not self._place.is_standing:
            self.counters["leases_wanted_by_learner"] += 1
            return
        request = self._place.leases.want(num_samples, self._fence.epoch)
        if request is not None:
            self._line.say(request)

    # -------------------------------------------------------------------------------- leaving

    def _lose_membership(self, reason: str) -> None:
        self._place.lose_membership(reason)
        self._farewell.limit(self._now)

    def _bid_farewell(self) -> None:
        if self._farewell.bid(self._now):
            self._line.say_outstanding()

    def _on_goodbye(self, goodbye: Goodbye) -> None:
        word = self._farewell.word
        if word is None or not (word.now or self.held in (None, goodbye.held)):
            return
        where = f"outer step {goodbye.outer_step}"
        if goodbye.alone:
            where += ", which nobody else holds: start this peer again to go on from there"
        self._finish(self._farewell.end(f"left at {where}"))

    def _finish(self, finish: Finish) -> None:
        self._place.end()
        self._place.effects.append(finish)
