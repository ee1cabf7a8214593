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
* What waits for an answer is said again on one timer, and never because something arrived.
* Only a commit whose certificate continues the chain is believed (chain.py).

It must not know what the state is, how it is exchanged or how it is fetched.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import assert_never

from isthmus.collective.core.types import Epoch, Instant, Member, OuterStep, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.chain import Chain
from isthmus.elastic.core.config import MemberConfig
from isthmus.elastic.core.events import (
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
    SendToCoordinator,
    TakeLeases,
    Tick,
)
from isthmus.elastic.core.farewell import UNREACHABLE_EXIT_CODE, Farewell, LeavesAfter
from isthmus.elastic.core.messages import (
    Commit,
    CoordinatorMessage,
    Evicted,
    Goodbye,
    Held,
    Join,
    LeaseGrant,
    Leave,
    Meet,
    Met,
    NewView,
    PeerMessage,
    Rebuilding,
    Rebuilt,
    Refused,
    Synced,
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
        self.config = config
        self.me = me
        self.counters: Counter[str] = Counter()
        self._address = address
        self._manifest_digest = manifest_digest
        self._chain = Chain(signer, certificate, self.counters)
        newest = self._chain.newest
        self._epoch = Epoch(0) if newest is None else newest.key.epoch  # the newest one heard of
        self._place = self.place_type(me, held, config.catch_up_retry_s, self.counters, signer.sign)
        self._place.attempt.laid_aside = aside
        self._farewell = Farewell(config.farewell_timeout_s, lambda: self._place.view is not None and self._connected)
        # - Connection and timers
        self._connected = False
        self._disconnected_since: Instant | None = None
        self._is_asked = False  # by a coordinator without a journal, what this peer holds
        self._heartbeat_at: Instant = 0.0
        self._resend_at: Instant = 0.0
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
        return self._chain.newest

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
        if not self._connected and self._disconnected_since is None:
            self._disconnected_since = now
        match event:
            case CoordinatorSaid():
                self._on_message(event.message)
            case Connected():
                self._on_connected()
            case Disconnected():
                self._connected = False
                self._disconnected_since = now
                self._farewell.limit(now)
            case RoundReady():
                self._on_round_ready(event)
            case ExchangeDone() | ExchangeFailed():
                if self._place.attempt.ended(event):
                    self._say_outstanding()
                else:
                    self.counters["old_exchange"] += 1
            case CaughtUp() | CatchUpFailed():
                self._on_catch_up(event)
            case Progressed():
                self._place.progressed(event)
            case LinkMade(ref=ref, cause=None):
                self._say(Met(peers=(ref,)))
            case LinkMade(ref=ref, cause=cause):
                self._say(Met(unmet=(Unmet(ref, (cause or "")[:160]),)))
            case LeasesWanted():
                self._on_leases_wanted(event.num_samples)
            case LeaveRequested():
                if self._farewell.request(event, now):
                    self._say_outstanding()
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        return effects

    def next_deadline(self) -> Instant | None:
        """When to feed a `Tick`, if nothing else happens before."""
        if self._place.phase is Phase.FINISHED:
            return None
        deadlines: list[Instant | None] = [self._place.pursuit.retry_at, self._farewell.by]
        if self._connected:
            deadlines.append(self._heartbeat_at)
            if self._outstanding():
                deadlines.append(self._resend_at)
        elif self._disconnected_since is not None:
            deadlines.append(self._disconnected_since + self.config.coordinator_timeout_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        place = self._place
        place.attempt.check_invariants()
        if place.phase is Phase.FINISHED:
            return
        place.check_invariants()
        assert place.view is None or place.view.epoch == self._epoch, "not in the newest view heard of"

    # -------------------------------------------------------------------------------- connection and time

    def _on_connected(self) -> None:
        self._connected = True
        self._disconnected_since = None
        self._heartbeat_at = self._now + self.config.heartbeat_interval_s
        if self._farewell.word is None:
            if self._place.phase is not Phase.JOINING:
                self._say(self._join())  # "I am still here"
        elif self._place.view is not None:
            self._farewell.await_boundary()
        self._say_outstanding()

    def _on_tick(self) -> None:
        if self._farewell.is_overdue(self._now):
            self._finish(self._farewell.end("left without an answer from the coordinator"))
            return
        gone_since = self._disconnected_since
        if gone_since is not None and self._now >= gone_since + self.config.coordinator_timeout_s:
            waited = f"{self.config.coordinator_timeout_s:.0f} s"
            self._finish(
                Finish(code=UNREACHABLE_EXIT_CODE, reason=f"the coordinator could not be reached for {waited}")
            )
            return
        self._place.effects += self._place.pursuit.wake(self._now)
        if not self._connected:
            return
        if self._now >= self._heartbeat_at:
            self._heartbeat_at = self._now + self.config.heartbeat_interval_s
            if self._place.phase is not Phase.JOINING:  # a stranger's heartbeat would only be answered by Evicted
                self._say(self._place.heartbeat(self._epoch))
        if self._now >= self._resend_at:
            self._say_outstanding()

    def _join(self) -> Join:
        return Join(
            epoch=self._epoch,
            address=self._address,
            manifest_digest=self._manifest_digest,
            held=self.held,
            certificate=self._chain.newest,
        )

    def _outstanding(self) -> list[PeerMessage]:
        """What waits for an answer, and is said again until it comes."""
        place = self._place
        leave = self._farewell.word
        if leave is not None and not leave.now:
            leave = Leave(held=self.held, address=self._address)
        messages: list[PeerMessage | None] = [place.attempt.report(), place.leases.request, leave]
        if self._farewell.word is None:
            is_nobody = place.phase is Phase.JOINING or (place.phase is Phase.LEARNING and self.held is None)
            if is_nobody or self._is_asked:
                messages.append(self._join())
            elif place.phase in (Phase.LEARNING, Phase.EXCUSED) and self.held is not None:
                messages.append(Synced(held=self.held))
        return [message for message in messages if message is not None]

    def _say_outstanding(self) -> None:
        self._resend_at = self._now + self.config.resend_interval_s
        for message in self._outstanding():
            self._say(message)

    def _say(self, message: PeerMessage) -> None:
        if self._connected:
            self._place.effects.append(SendToCoordinator(message=message))

    # -------------------------------------------------------------------------------- what the coordinator says

    def _on_message(self, message: CoordinatorMessage) -> None:
        self._is_asked = isinstance(message, Rebuilding) or (self._is_asked and isinstance(message, Trust))
        match message:
            case Welcome():
                self._on_welcome(message)
            case NewView():
                self._on_new_view(message)
            case Commit():
                self._on_commit(message.certificate)
            case Evicted():
                self._on_evicted(message)
            case Rebuilding():
                pass  # the timer repeats the Join
            case Rebuilt():
                self._on_rebuilt(message)
            case Trust():
                pass  # whose connections are taken is decided elsewhere
            case Refused():
                self._finish(Finish(code=message.code, reason=message.reason))
            case LeaseGrant():
                self._on_lease_grant(message)
            case Meet(peers=peers):
                self._place.effects.append(MakeLinks(peers=tuple(peer for peer in peers if peer.ref != self.me)))
            case Goodbye():
                if self._farewell.word is not None:
                    where = f"outer step {message.outer_step}"
                    if message.alone:
                        where += ", which nobody else holds: start this peer again to go on from there"
                    self._finish(self._farewell.end(f"left at {where}"))
            case _:
                assert_never(message)

    def _is_stale(self, epoch: Epoch) -> bool:
        """The fence for words about membership: older than what is known, or about the view that holds this peer."""
        view = self._place.view
        if epoch < self._epoch or (view is not None and epoch == view.epoch):
            self.counters["old_epoch"] += 1
            return True
        return False

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._is_stale(welcome.epoch):
            return
        self._epoch = welcome.epoch
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
        view, mine = message.view, self._place.view
        if view.epoch < self._epoch or (
            mine is not None and (view.epoch, view.outer_step) <= (mine.epoch, mine.outer_step)
        ):
            self.counters["old_epoch"] += 1
            return
        if self.me in message.excused:
            self._on_excused(message)
            return
        if not view.holds(self.me):
            self._on_evicted(Evicted(epoch=view.epoch, reason="not in the new view"))
            return
        self._epoch = view.epoch
        self._farewell.await_boundary()
        self._place.enter(message)

    def _on_excused(self, message: NewView) -> None:
        self._epoch = message.view.epoch
        self._place.excuse(message.view, message.contributed)
        self._farewell.limit(self._now)

    def _on_commit(self, certificate: Certificate) -> None:
        if not self._believes(certificate):
            return
        place, made = self._place, certificate.made
        if certificate.key == place.attempt.staged_key and place.install_if_staged(made, certificate):
            if certificate.final:
                self._bid_farewell()
            return
        if place.attempt.key == certificate.key:
            place.overrule(made)
        if certificate.final:
            self._bid_farewell()  # also if it was made without this peer, in a view that it has not heard of
        elif place.view is None and place.phase in (Phase.LEARNING, Phase.EXCUSED):
            # A learner lives through commits, or it would never arrive. So does who is excused.
            self._aim(made)

    def _aim(self, target: Held, donors: Sequence[Member] | None = None) -> None:
        if self._place.aim(target, donors):
            self._say_outstanding()

    def _believes(self, certificate: Certificate) -> bool:
        """Whether the commit continues the chain of the run as this peer knows it. If it does, it is kept."""
        place, aside = self._place, self._place.attempt.laid_aside
        known = [place.held, place.pursuit.target, place.view_state, None if aside is None else aside[1]]
        if certificate.key.epoch < self._epoch and certificate.made not in known:
            # A coordinator with an old journal may know commits of its own.
            self.counters["old_epoch"] += 1
            return False
        before = self._chain.newest
        if not self._chain.take(certificate):
            return False
        if certificate != before:
            self._place.effects.append(KeepCertificate(certificate=certificate))
        return True

    def _on_evicted(self, evicted: Evicted) -> None:
        if self._is_stale(evicted.epoch):
            return
        if self._place.phase is Phase.JOINING and evicted.epoch == self._epoch:
            return  # it is being answered already; the timer repeats the Join
        self._epoch = evicted.epoch
        self._lose_membership(evicted.reason)
        self._place.phase = Phase.JOINING
        self._say_outstanding()

    def _on_rebuilt(self, rebuilt: Rebuilt) -> None:
        """All that was told since this certificate is void."""
        certificate = rebuilt.certificate
        if rebuilt.epoch == self._epoch and self._holds_what_nobody_proved(rebuilt.committed):
            self._place.pursuit.give_up(after=OuterStep(-1), but=None)
            self._say_outstanding()
            return
        if rebuilt.epoch <= self._epoch:
            self.counters["old_epoch"] += 1
            return
        if certificate is not None and not self._chain.is_genuine(certificate):
            return
        place = self._place
        # This commit may be staged here, and nowhere else.
        if certificate is not None and place.install_if_staged(certificate.made, certificate) and certificate.final:
            self._bid_farewell()
        place.drop_staged()
        if certificate is not None:
            place.pursuit.give_up(after=certificate.made.outer_step, but=rebuilt.committed)
        elif self._chain.newest is not None:
            place.pursuit.give_up(after=OuterStep(-1), but=rebuilt.committed)
        if certificate is not None and certificate != self._chain.newest:
            place.effects.append(KeepCertificate(certificate=certificate))
        self._chain.go_back_to(certificate)
        self._epoch = rebuilt.epoch
        self._lose_membership(went_back(rebuilt))
        place.phase = Phase.JOINING
        self._say_outstanding()

    def _holds_what_nobody_proved(self, committed: Held | None) -> bool:
        """Whether the state that we hold is newer than the rebuilt run's and we have no certificate of it either."""
        held, newest = self._place.pursuit.held, self._chain.newest
        if held is None or committed is None or held.outer_step <= committed.outer_step:
            return False
        return newest is None or newest.made != held

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
            self._say(self._place.heartbeat(self._epoch))

    def _on_catch_up(self, event: CaughtUp | CatchUpFailed) -> None:
        place = self._place
        place.catch_up_ended(event, self._now)
        if place.view is None:
            if place.phase in (Phase.LEARNING, Phase.EXCUSED):
                self._say_outstanding()
            place.go_on()

    def _on_leases_wanted(self, num_samples: int) -> None:
        if not self._place.is_standing:
            self.counters["leases_wanted_by_learner"] += 1
            return
        request = self._place.leases.want(num_samples, self._epoch)
        if request is not None:
            self._say(request)

    # -------------------------------------------------------------------------------- leaving

    def _lose_membership(self, reason: str) -> None:
        self._place.lose_membership(reason)
        self._farewell.limit(self._now)

    def _bid_farewell(self) -> None:
        if self._farewell.bid(self._now):
            self._say_outstanding()

    def _finish(self, finish: Finish) -> None:
        self._place.end()
        self._place.effects.append(finish)
