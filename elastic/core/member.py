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
* What is staged is installed by a Commit that names its key and digest, or by a view that names its digest. Who is put
  out keeps it until another state is named: also a Welcome may name this one.
* What waits for an answer is said again on one timer, and never because something arrived.
* Only a commit whose certificate continues the chain is believed (chain.py).

It must not know what the state is, how it is exchanged or how it is fetched.
"""

import enum
from collections import Counter, deque
from collections.abc import Sequence
from typing import assert_never

import msgspec

from collective.core.types import Epoch, Instant, Member, OuterStep, PeerRef, View
from elastic.core.attempt import Attempt
from elastic.core.certificate import Certificate
from elastic.core.chain import Chain
from elastic.core.config import MemberConfig
from elastic.core.events import (
    BecomeActive,
    BecomeExcused,
    BecomeLearner,
    CarryOver,
    CatchUpFailed,
    CaughtUp,
    Connected,
    CoordinatorSaid,
    Disconnected,
    ExchangeDone,
    ExchangeFailed,
    Finish,
    InstallStaged,
    InstallView,
    KeepCertificate,
    LeasesWanted,
    LeaveRequested,
    MemberEffect,
    MemberEvent,
    Progressed,
    RoundReady,
    SendToCoordinator,
    TakeLeases,
    Tick,
)
from elastic.core.lease_desk import LeaseDesk
from elastic.core.messages import (
    Commit,
    CoordinatorMessage,
    Evicted,
    Goodbye,
    Heartbeat,
    Held,
    Join,
    LeaseGrant,
    Leave,
    NewView,
    PeerMessage,
    Rebuilding,
    Rebuilt,
    Refused,
    Synced,
    Welcome,
)
from elastic.core.pursuit import Pursuit

STORY_LENGTH = 512
DONE_EXIT_CODE, UNREACHABLE_EXIT_CODE, LEFT_EXIT_CODE = 0, 4, 20


class Phase(enum.Enum):
    """Where a peer stands."""

    JOINING = "joining"  # has not been answered
    LEARNING = "learning"  # welcome, but no member: catches up
    SYNCING = "syncing"  # a member that does not hold the view's state yet
    ACTIVE = "active"  # a member that does
    EXCUSED = "excused"  # was active, is late, and will be a member again
    FINISHED = "finished"  # its part is over, for good


class MemberMachine:
    """See the module's docstring. Drive it by `handle`, and by a `Tick` whenever `next_deadline` has passed.

    Args:
        config: how often it speaks and how long it waits.
        me: this start of this peer.
        address: where others reach it.
        manifest_digest: of the run, as this peer knows it.
        held: the state it starts with, from a checkpoint.
        seal_key: of the run's certificates, 32 bytes.
        certificate: the newest one that an earlier start of this peer has kept.
    """

    def __init__(
        self,
        config: MemberConfig,
        me: PeerRef,
        address: str,
        manifest_digest: bytes,
        held: Held | None = None,
        *,
        seal_key: bytes,
        certificate: Certificate | None = None,
    ) -> None:
        self.config = config
        self.me = me
        self.counters: Counter[str] = Counter()
        self._address = address
        self._manifest_digest = manifest_digest
        self._phase = Phase.JOINING
        self._chain = Chain(seal_key, certificate, self.counters)
        newest = self._chain.newest
        self._epoch = Epoch(0) if newest is None else newest.key.epoch  # the newest one heard of
        self._view: View | None = None  # the one this peer is a member of, advanced by installed commits
        self._pursuit = Pursuit(me.peer_id, held, config.catch_up_retry_s)
        self._attempt = Attempt()
        self._leases = LeaseDesk()
        self._standing = False  # what this peer has done since the last commit counts
        # - Leaving
        self._leave: Leave | None = None
        self._leave_by: Instant | None = None
        self._final = False
        # - Connection and timers
        self._connected = False
        self._disconnected_since: Instant | None = None
        self._is_asked = False  # by a coordinator without a journal, what this peer holds
        self._progress = 0
        self._waits = False  # for others, as the trainer says
        self._heartbeat_at: Instant = 0.0
        self._resend_at: Instant = 0.0
        self._now: Instant = 0.0
        self._effects: list[MemberEffect] = []
        self._story: deque[tuple[Instant, MemberEvent]] = deque(maxlen=STORY_LENGTH)

    # -------------------------------------------------------------------------------- the machine

    @property
    def phase(self) -> Phase:
        """Where this peer stands."""
        return self._phase

    @property
    def is_standing(self) -> bool:
        """Whether what this peer has done since the last commit counts: as an active member, or excused."""
        return self._standing

    @property
    def view(self) -> View | None:
        """The view it is a member of, advanced by the commits it has installed."""
        return self._view

    @property
    def held(self) -> Held | None:
        """The committed state it holds."""
        return self._pursuit.held

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
        self._effects = []
        if self._phase is Phase.FINISHED:
            return self._effects
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
                self._limit_farewell()
            case RoundReady():
                self._on_round_ready(event)
            case ExchangeDone() | ExchangeFailed():
                if self._attempt.ended(event):
                    self._say_outstanding()
                else:
                    self.counters["old_exchange"] += 1
            case CaughtUp() | CatchUpFailed():
                self._on_catch_up(event)
            case Progressed():
                self._progress = max(self._progress, event.progress)
                self._waits = event.blocked
            case LeasesWanted():
                self._on_leases_wanted(event.num_samples)
            case LeaveRequested():
                self._on_leave_requested(event)
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        return self._effects

    def next_deadline(self) -> Instant | None:
        """When to feed a `Tick`, if nothing else happens before."""
        if self._phase is Phase.FINISHED:
            return None
        deadlines: list[Instant | None] = [self._pursuit.retry_at, self._leave_by]
        if self._connected:
            deadlines.append(self._heartbeat_at)
            if self._outstanding():
                deadlines.append(self._resend_at)
        elif self._disconnected_since is not None:
            deadlines.append(self._disconnected_since + self.config.coordinator_timeout_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        view, attempt, held = self._view, self._attempt, self.held
        attempt.check_invariants()
        if self._phase is Phase.FINISHED:
            return
        assert (view is not None) == (self._phase in (Phase.SYNCING, Phase.ACTIVE)), "the phase contradicts the view"
        if view is not None:
            assert view.holds(self.me), "in a view without being its member"
            assert view.epoch == self._epoch, "not in the newest view heard of"
        if self._phase is Phase.ACTIVE and view is not None:
            assert held == Held(view.outer_step, view.digest), "active from another state"
            assert not self._pursuit.busy, "active while it catches up"
        assert self._standing or self._phase not in (Phase.ACTIVE, Phase.EXCUSED), "active, and for nothing"
        if attempt.payload is not None:
            assert self._standing, "a payload outside of a membership"
            assert held is not None, "a payload from nowhere"
            assert attempt.payload.outer_step == held.outer_step, "a payload of another step"
        if attempt.key is not None:
            assert view is not None, "an exchange without a view"
            assert attempt.key.epoch == view.epoch, "an exchange of another view"
        if attempt.laid_aside is not None:
            assert view is None, "a member keeps what an older membership has staged"
            assert not self._pursuit.busy, "a state is fetched over what is staged"

    # -------------------------------------------------------------------------------- connection and time

    def _on_connected(self) -> None:
        self._connected = True
        self._disconnected_since = None
        self._heartbeat_at = self._now + self.config.heartbeat_interval_s
        if self._leave is None:
            if self._phase is not Phase.JOINING:
                self._say(self._join())  # "I am still here"
        elif self._view is not None and not self._leave.now:
            self._leave_by = None
        self._say_outstanding()

    def _on_tick(self) -> None:
        if self._leave_by is not None and self._now >= self._leave_by:
            self._part("left without an answer from the coordinator")
            return
        gone_since = self._disconnected_since
        if gone_since is not None and self._now >= gone_since + self.config.coordinator_timeout_s:
            waited = f"{self.config.coordinator_timeout_s:.0f} s"
            self._finish(UNREACHABLE_EXIT_CODE, f"the coordinator could not be reached for {waited}")
            return
        self._effects += self._pursuit.wake(self._now)
        if not self._connected:
            return
        if self._now >= self._heartbeat_at:
            self._heartbeat_at = self._now + self.config.heartbeat_interval_s
            if self._phase is not Phase.JOINING:  # a stranger's heartbeat would only be answered by Evicted
                self._say(self._heartbeat())
        if self._now >= self._resend_at:
            self._say_outstanding()

    def _heartbeat(self) -> Heartbeat:
        held = self.held
        is_ready = self._attempt.payload is not None
        # Who catches up is never blocked: the others must not wait for it without end.
        at_rest = self._phase in (Phase.ACTIVE, Phase.EXCUSED) and self._pursuit.is_at_rest
        return Heartbeat(
            epoch=self._epoch,
            outer_step=held.outer_step if held is not None else OuterStep(0),
            progress=self._progress,
            blocked=at_rest and (is_ready or self._waits),
            ready=at_rest and is_ready,
        )

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
        messages: list[PeerMessage | None] = [self._attempt.report(), self._leases.request, self._leave]
        if self._leave is None:
            is_nobody = self._phase is Phase.JOINING or (self._phase is Phase.LEARNING and self.held is None)
            if is_nobody or self._is_asked:
                messages.append(self._join())
            elif self._phase in (Phase.LEARNING, Phase.EXCUSED) and self.held is not None:
                messages.append(Synced(held=self.held))
        return [message for message in messages if message is not None]

    def _say_outstanding(self) -> None:
        self._resend_at = self._now + self.config.resend_interval_s
        for message in self._outstanding():
            self._say(message)

    def _say(self, message: PeerMessage) -> None:
        if self._connected:
            self._effects.append(SendToCoordinator(message=message))

    # -------------------------------------------------------------------------------- what the coordinator says

    def _on_message(self, message: CoordinatorMessage) -> None:
        self._is_asked = isinstance(message, Rebuilding)
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
            case Refused():
                self._finish(message.code, message.reason)
            case LeaseGrant():
                self._on_lease_grant(message)
            case Goodbye():
                if self._leave is not None:
                    self._part(f"left at outer step {message.outer_step}")
            case _:
                assert_never(message)

    def _is_stale(self, epoch: Epoch) -> bool:
        """The fence for words about membership: older than what is known, or about the view that holds this peer."""
        if epoch < self._epoch or (self._view is not None and epoch == self._view.epoch):
            self.counters["old_epoch"] += 1
            return True
        return False

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._is_stale(welcome.epoch):
            return
        self._epoch = welcome.epoch
        self._lose_membership("welcomed as a learner")
        self._phase = Phase.LEARNING
        if welcome.found:
            self._effects += self._pursuit.found()
        if welcome.target is not None:
            self._aim(welcome.target, welcome.donors)

    def _on_new_view(self, message: NewView) -> None:
        view, mine = message.view, self._view
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
        if self._leave is not None and not self._leave.now:
            self._leave_by = None  # there is a commit boundary to wait for
        self._install_if_staged(Held(view.outer_step, view.digest))
        self._stop_if_spent(message.contributed)
        if mine is None or view.epoch > mine.epoch:
            self._effects += [*self._attempt.abort(), *self._attempt.drop_aside(), InstallView(view=view)]
        self._view = view
        self._take_part()

    def _stop_if_spent(self, contributed: OuterStep) -> None:
        """A commit holds this peer's work, and it did not install that: it is overruled, and has nothing to keep."""
        if self._standing and self.held is not None and contributed > self.held.outer_step:
            self._stop_training(f"outer step {contributed} was committed with another result than this peer's")

    def _on_excused(self, message: NewView) -> None:
        """The round goes on without this peer. Said again, it tells of the newest state."""
        view = message.view
        state = Held(view.outer_step, view.digest)
        self._epoch = view.epoch
        self._install_if_staged(state)
        self._stop_if_spent(message.contributed)
        self._effects += self._attempt.abort()
        self._view = None
        if not self._standing:
            self._phase = Phase.LEARNING  # a coordinator that restarted knows no better: there is nothing to keep
        elif self._phase is not Phase.EXCUSED:
            self._phase = Phase.EXCUSED
            self._effects.append(BecomeExcused(view=view))
        self._aim(state, view.members)
        self._limit_farewell()

    def _take_part(self) -> None:
        """In a view: active if its state is held, else on the way to it."""
        view = self._view
        assert view is not None, "only members take part"
        state = Held(view.outer_step, view.digest)
        if self.held == state and not self._pursuit.busy:
            self._pursuit.rest()
            if self._phase is not Phase.ACTIVE:
                self._phase = Phase.ACTIVE
                self._standing = True
                self._effects.append(BecomeActive(view=view))
            self._effects += self._attempt.start(view)
            return
        self._phase = Phase.SYNCING
        self._effects += self._pursuit.aim(state, view.members)

    def _on_commit(self, certificate: Certificate) -> None:
        if not self._believes(certificate):
            return
        made, aside = certificate.made, self._attempt.laid_aside
        own = self._attempt.key if aside is None else aside[0]
        if own == certificate.key and self._install_if_staged(made, certificate):
            return
        if self._attempt.key == certificate.key:
            self._on_overruled(made)
        if certificate.final:
            self._bid_farewell()  # also if it was made without this peer, in a view that it has not heard of
        elif self._view is None and self._phase in (Phase.LEARNING, Phase.EXCUSED):
            # A learner lives through commits, or it would never arrive. So does who is excused.
            self._aim(made)

    def _aim(self, target: Held, donors: Sequence[Member] | None = None) -> None:
        """As no member, to this committed state. It may have been laid aside here, and perhaps nowhere else."""
        held = self.held
        if self._install_if_staged(target):
            self._say_outstanding()
        elif held is not None and target != held and target.outer_step >= held.outer_step:
            self._effects += self._attempt.drop_aside()
        self._effects += self._pursuit.aim(target, donors)

    def _believes(self, certificate: Certificate) -> bool:
        """Whether the commit continues the chain of the run as this peer knows it. If it does, it is kept."""
        view, aside = self._view, self._attempt.laid_aside
        known = [self.held, self._pursuit.target]
        known += [None if view is None else Held(view.outer_step, view.digest), None if aside is None else aside[1]]
        if certificate.key.epoch < self._epoch and certificate.made not in known:
            # A coordinator with an old journal may know commits of its own.
            self.counters["old_epoch"] += 1
            return False
        before = self._chain.newest
        if not self._chain.take(certificate):
            return False
        if certificate != before:
            self._effects.append(KeepCertificate(certificate=certificate))
        return True

    def _on_overruled(self, made: Held) -> None:
        """The others agreed on something else than what is staged here: fetch what they have.

        As a member, until an `Evicted` says otherwise. To leave the view by oneself would be a view of one's own: a
        coordinator that crashed between commit and eviction still counts on this member
        (scenarios/overruled_member_stays.toml).
        """
        if self._view is not None:
            self._stop_training(f"outer step {made.outer_step} was committed with another result than this peer's")
            self._view = msgspec.structs.replace(self._view, outer_step=made.outer_step, digest=made.digest)
            self._take_part()

    def _on_evicted(self, evicted: Evicted) -> None:
        if self._is_stale(evicted.epoch):
            return
        if self._phase is Phase.JOINING and evicted.epoch == self._epoch:
            return  # it is being answered already; the timer repeats the Join
        self._epoch = evicted.epoch
        self._lose_membership(evicted.reason)
        self._phase = Phase.JOINING
        self._say_outstanding()

    def _on_rebuilt(self, rebuilt: Rebuilt) -> None:
        """The journal was lost, and with it all that was told since this certificate."""
        certificate = rebuilt.certificate
        if rebuilt.epoch <= self._epoch:
            self.counters["old_epoch"] += 1
            return
        if certificate is not None and not self._chain.is_genuine(certificate):
            return
        if certificate is not None:  # this commit may be staged here, and nowhere else
            self._install_if_staged(certificate.made, certificate)
        self._effects += [*self._attempt.forget(), *self._attempt.drop_aside()]
        if certificate is not None:
            self._pursuit.give_up(after=certificate.made.outer_step)
        elif self._chain.newest is not None:
            self._pursuit.give_up(after=OuterStep(-1))
        if certificate is not None and certificate != self._chain.newest:
            self._effects.append(KeepCertificate(certificate=certificate))
        self._chain.go_back_to(certificate)
        self._epoch = rebuilt.epoch
        self._lose_membership("the coordinator's journal was lost, and rebuilt from the members' certificates")
        self._phase = Phase.JOINING
        self._say_outstanding()

    def _on_lease_grant(self, grant: LeaseGrant) -> None:
        ranges = self._leases.take(grant)
        if ranges is None:
            self.counters["old_grant"] += 1
            return
        self._effects.append(TakeLeases(ranges=ranges))
        # It waits for others only until it has what it waited for. A trainer that hangs right then says no more, and
        # would count as waiting for ever (scenarios/hangs_right_after_its_leases.toml).
        self._waits = False
        self._on_leases_wanted(0)

    # -------------------------------------------------------------------------------- what happens at home

    def _on_round_ready(self, payload: RoundReady) -> None:
        if self._final:
            return  # the run's last step was made without it
        if not self._standing or self.held is None:
            self.counters["payload_of_no_member"] += 1
        elif payload.outer_step != self.held.outer_step or self._attempt.payload is not None:
            self.counters["payload_of_another_step"] += 1
        else:
            self._attempt.payload = payload
            if self._view is not None and self._phase is Phase.ACTIVE:
                self._effects += self._attempt.start(self._view)
            self._say(self._heartbeat())  # the others' grace for the late begins when the quorum has handed in

    def _on_catch_up(self, event: CaughtUp | CatchUpFailed) -> None:
        self._pursuit.ended(event, self._now)
        self._carry_over()
        if self._view is not None:
            self._take_part()
            return
        if self._phase in (Phase.LEARNING, Phase.EXCUSED):
            self._say_outstanding()
        if self._pursuit.target is not None:
            self._effects += self._pursuit.aim(self._pursuit.target)

    def _carry_over(self) -> None:
        """The state moved on without the payload."""
        payload, held = self._attempt.payload, self.held
        if payload is not None and held is not None and payload.outer_step != held.outer_step:
            self._effects += self._attempt.forget()
            self._effects.append(CarryOver(outer_step=payload.outer_step, held=held))

    def _on_leases_wanted(self, num_samples: int) -> None:
        if not self._standing:
            self.counters["leases_wanted_by_learner"] += 1
            return
        request = self._leases.want(num_samples, self._epoch)
        if request is not None:
            self._say(request)

    def _install_if_staged(self, made: Held, certificate: Certificate | None = None) -> bool:
        """If this very state is staged, it becomes the held one. Without a certificate it was learnt from a view."""
        final = certificate is not None and certificate.final
        position = certificate.position if certificate is not None else None
        view, key = self._view, self._attempt.take_staged(made)
        if key is None:
            return False
        self._effects.append(InstallStaged(key=key, held=made, final=final, position=position))
        self._pursuit.installed(made)
        if view is not None:
            self._view = msgspec.structs.replace(view, outer_step=made.outer_step, digest=made.digest)
        if final:
            self._bid_farewell()
        return True

    # -------------------------------------------------------------------------------- membership ends

    def _stop_training(self, reason: str) -> None:
        self._standing = False
        self._effects += self._attempt.forget()
        self._leases.forget()
        self._waits = False  # or it would count as waiting when it is back (scenarios/hangs_with_an_old_word.toml)
        self._effects.append(BecomeLearner(reason=reason))

    def _lose_membership(self, reason: str) -> None:
        if self._view is not None or self._standing:
            if self._phase is Phase.ACTIVE:
                self._attempt.lay_aside()
            self._stop_training(reason)
            self._view = None
        self._limit_farewell()

    def _on_leave_requested(self, event: LeaveRequested) -> None:
        if self._leave is None or (event.now and not self._leave.now):
            self._leave = Leave(now=event.now)
            self._limit_farewell()
            self._say_outstanding()

    def _bid_farewell(self) -> None:
        """The run's last state is committed. It is not worth more than a short wait that everybody knows we go."""
        if not self._final:
            self._final = True
            self._leave = Leave(now=True)
            self._limit_farewell()
            self._say_outstanding()

    def _limit_farewell(self) -> None:
        """A leave is awaited without limit only while a commit boundary is to be expected."""
        if self._leave is None or self._leave_by is not None:
            return
        if self._leave.now or self._view is None or not self._connected:
            self._leave_by = self._now + self.config.farewell_timeout_s

    def _part(self, reason: str) -> None:
        if self._final:
            self._finish(DONE_EXIT_CODE, "the run is complete")
        else:
            self._finish(LEFT_EXIT_CODE, reason)

    def _finish(self, code: int, reason: str) -> None:
        self._effects += [*self._attempt.abort(), *self._attempt.drop_aside()]
        self._phase = Phase.FINISHED
        self._effects.append(Finish(code=code, reason=reason))
