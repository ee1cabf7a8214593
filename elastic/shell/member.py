# SPDX-License-Identifier: Apache-2.0
"""The member's shell: one peer's machine, its line to the coordinator, its rounds, and the trainer's questions.

    Membership.run()      owns everything below until the peer's part is over
    ├── line              dials the coordinator, passes messages on, dials again
    ├── time              feeds a Tick when the machine asks for it
    └── work              carries out effects strictly in order; exchanges and catch-ups run beside it as tasks

Rules:
* Words to the coordinator leave at once, past the work queue: a heartbeat must not wait for an installation. They tell
  what the machine knows, and it learns of finished work only by the event that the work ends with.
* All other effects are carried out in order, each one after the one before has ended; exchanges, catch-ups and the
  founding of the state are started in order and end with one event.
* The machine is never kept waiting: events are handled when they come, whatever work is under way.
* What the trainer waits for always ends: with its result, `NotAMember`, or `RunFinished`.

It decides nothing: that is elastic/core/member.py. It knows no tensors.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from isthmus.collective.core.types import Instant, Member, View
from isthmus.collective.errors import HandshakeRefused, PeerUnreachable
from isthmus.collective.transport import Channel
from isthmus.elastic import observation as told
from isthmus.elastic.core.events import (
    AbortExchange,
    BecomeActive,
    BecomeExcused,
    BecomeLearner,
    CarryOver,
    CatchUp,
    Connected,
    CoordinatorSaid,
    Disconnected,
    Finish,
    FoundState,
    InstallStaged,
    InstallView,
    KeepCertificate,
    LeasesWanted,
    LeaveRequested,
    MakeLinks,
    MemberEffect,
    MemberEvent,
    Progressed,
    RoundReady,
    SendToCoordinator,
    StartExchange,
    TakeLeases,
    Tick,
)
from isthmus.elastic.core.exit_codes import REFUSED, TRAINING, UNREACHABLE
from isthmus.elastic.core.farewell import LeavesAfter
from isthmus.elastic.core.member import MemberMachine, went_back
from isthmus.elastic.core.messages import Commit, CoordinatorMessage, IndexRange, Rebuilding, Rebuilt, Trust, Welcome
from isthmus.elastic.errors import NotAMember, RoundMissed, RunFinished
from isthmus.elastic.learner.donors import Dial as DialDonor
from isthmus.elastic.learner.loan import borrow
from isthmus.elastic.learner.state_sync import StateSync
from isthmus.elastic.observation import Observe, ignore
from isthmus.elastic.shell.alarm import Alarm
from isthmus.elastic.shell.control import ControlConnection
from isthmus.elastic.shell.desk import Committed, Desk
from isthmus.elastic.shell.dialler import Dial, Dialler, NobodyAnswers
from isthmus.elastic.shell.exchange import RoundRunner, RunningExchange
from isthmus.elastic.shell.learner import Learner
from isthmus.elastic.shell.links import Links
from isthmus.elastic.shell.whereabouts import Locate, Whereabouts
from isthmus.elastic.state.digest import Hasher
from isthmus.elastic.state.replica import PrivateState, Replica
from isthmus.elastic.state.wire import Pace

__all__ = ["Committed", "Membership", "RoundRunner"]

_log = logging.getLogger(__name__)

_COORDINATOR_MESSAGES: msgspec.msgpack.Decoder[CoordinatorMessage] = msgspec.msgpack.Decoder(CoordinatorMessage)

_MAX_QUEUED_EFFECTS = 1024
"""The machine gives a handful of effects for an event, and waits for the outcome of long ones."""

_STORY_LENGTH = 20
"""Events that are told when the machine fails."""

_ALONE_S, _FROZEN_S = 60.0, 8.0
"""Silence after which the only coordinator is dialled anew, and one of several is left for another. Its signs of life
come every 2 s; but who stays with the only one while it is frozen loses nothing."""


class Membership:
    """One peer's part in the run.

    Args:
        machine: this peer's machine, fresh.
        coordinators: where the coordinator may be, `host:port`, best first.
        dial: opens a connection to an address for a purpose: CONTROL to the coordinator.
        dial_donor: opens a STATE connection to a peer.
        runner: the trainer's half of a round.
        replica: the shared state, for catching up.
        hasher: for what the replica's memory already contains.
        observe: told of everything that happens.
        pace: floors and windows of state transfers.
        private: this peer's own state, which it may borrow before it trains; None: it begins fresh.
        locate: where others reach this peer now; None: where the machine was told.
        first_contact_timeout_s: without any contact for so long the run is given up with exit code 4. Later outages
            are the machine's matter (`MemberConfig.coordinator_timeout_s`).
        clock: monotonic seconds.
        rng: for the pauses between dials.
    """

    def __init__(
        self,
        machine: MemberMachine,
        *,
        coordinators: Sequence[str],
        dial: Dial,
        dial_donor: DialDonor,
        runner: RoundRunner,
        replica: Replica,
        hasher: Hasher,
        observe: Observe = ignore,
        pace: Pace | None = None,
        private: PrivateState | None = None,
        locate: Locate | None = None,
        first_contact_timeout_s: float = 30.0,
        clock: Callable[[], Instant] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._machine = machine
        self._open_to_donor = dial_donor
        self._private = private
        self._pace = pace or Pace()
        self._observe = observe
        self._clock = clock
        self._first_contact_timeout_s = first_contact_timeout_s
        self._silence_timeout_s = _FROZEN_S if len(coordinators) > 1 else _ALONE_S
        self._dialler = Dialler(coordinators, dial, clock=clock, rng=rng or random.Random())
        self._tasks = asyncio.TaskGroup()
        self._exchange = RunningExchange(
            runner,
            self._tasks,
            done=self._feed,
            spoiled=lambda reason: self._end(TRAINING, reason),
            observe=observe,
            clock=clock,
        )
        self._learner = Learner(
            StateSync(
                replica, self._dial_donor, hasher=hasher, pace=self._pace, advanced=self._received, observe=observe
            ),
            runner,
            self._tasks,
            done=self._feed,
            spoiled=lambda reason: self._end(REFUSED, reason),
            observe=observe,
            clock=clock,
            borrow=self._borrow,
        )
        self._links = Links(runner, self._tasks, done=self._feed)
        self._whereabouts = Whereabouts(locate, moved=self._say_where)
        self._desk = Desk()
        self._alarm = Alarm(clock)
        self._connection: ControlConnection[CoordinatorMessage] | None = None
        self._work: asyncio.Queue[MemberEffect] = asyncio.Queue(_MAX_QUEUED_EFFECTS)
        self._round_began: Instant = 0.0
        self._progress = 0
        self._inner_steps = 0
        self._borrowing_progress = 0
        self._blocked = False
        self._went_back_in = 0
        self._asked_last: Rebuilding | None = None

    # -------------------------------------------------------------------------------- the trainer's side

    async def run(self) -> Finish:
        """Take part until this peer's part is over; returns exit code and reason. Cancel it to stop at once."""
        finish = Finish(code=1, reason="stopped")
        try:
            async with self._tasks as tasks:
                line = tasks.create_task(self._stay_connected())
                alarm = tasks.create_task(self._keep_time())
                watch = tasks.create_task(self._whereabouts.watch())
                finish = await self._carry_out()
                self._exchange.stop()
                self._learner.stop()
                self._links.stop()
                line.cancel()
                alarm.cancel()
                watch.cancel()
            self._observe(told.Finished(code=finish.code, cause=finish.reason))
            return finish
        finally:
            self._desk.close(RunFinished(finish.code, finish.reason))

    @property
    def active_view(self) -> View | None:
        """The view in which this peer became active, or None: then it must not train.

        It stays the same object as long as what this peer does counts, through later views and while it is excused.
        """
        return self._desk.active_view

    @property
    def is_excused(self) -> bool:
        """Whether the round goes on without this peer, because it is late. It trains on."""
        return self._desk.is_excused

    async def activated(self) -> View:
        """Wait until this peer is a member and holds the view's state: train from the anchor then.

        Raises:
            RunFinished: it never will be.
        """
        return await self._desk.activation()

    async def commit_round(self, ready: RoundReady) -> Committed:
        """Hand the payload in and wait until the round that holds it is committed and installed.

        However many views it takes. One call at a time; the payload must not change before it returns.

        Raises:
            NotAMember: the membership ended: payload and leases are void. Wait for `activated` and start from the
                anchor.
            RoundMissed: this peer was late, and the others have committed the step without it. Nothing is lost:
                leases and work are still its own, and belong into the next round from the state that is held now.
            RunFinished: this peer's part is over.
        """
        held = self._machine.held
        if self._desk.active_view is None or held is None or not self._machine.is_standing:
            raise NotAMember("this peer is not active")
        if held.outer_step != ready.outer_step:
            raise RoundMissed(ready.outer_step)
        self._round_began = self._clock()
        self._feed(ready)
        return await self._desk.round_outcome()

    async def take_leases(self, num_samples: int) -> tuple[IndexRange, ...]:
        """Sample indices that this peer alone may train on. Waits until it is a member, and while the line is down.

        One call at a time. The coordinator may give more or fewer than asked for.

        Raises:
            NotAMember: the membership ended meanwhile, and with it all leases.
            RunFinished: this peer's part is over.
        """
        await self.activated()
        return await self._desk.leases(lambda: self._feed(LeasesWanted(num_samples=num_samples)))

    def leave(self, *, now: bool = False) -> None:
        """Leave at the next commit boundary, with the steps done so far, or at once. `run` returns when it is done."""
        self._feed(LeaveRequested(now=now))

    @property
    def leaves_after(self) -> LeavesAfter | None:
        """What keeps this peer that wants to go; None if it does not want to."""
        return self._machine.leaves_after

    def progressed(self, progress: int, *, inner_steps: int, blocked: bool) -> None:
        """Something got done: `progress` only grows, and so does the number of `inner_steps` of this start.

        `blocked`: this peer stands still because it waits for others.
        """
        self._progress, self._blocked = max(self._progress, progress), blocked
        self._inner_steps = max(self._inner_steps, inner_steps)
        self._tell_progress()

    # -------------------------------------------------------------------------------- the machine

    def _feed(self, event: MemberEvent) -> None:
        try:
            effects = self._machine.handle(event, self._clock())
        except AssertionError:
            _log.exception("member_failed story=%r", list(self._machine.story)[-_STORY_LENGTH:])
            raise
        for effect in effects:
            match effect:
                case SendToCoordinator(message=message):
                    if self._connection is not None:
                        self._connection.send(self._whereabouts.told_in(message))
                    continue
                case AbortExchange(key=key):
                    self._exchange.void(key)
                case BecomeLearner():
                    self._desk.demoted()
                case KeepCertificate(certificate=certificate):
                    self._observe(told.CertificateKept(certificate=certificate))
                    continue
                case MakeLinks(peers=peers):
                    self._links.make(peers)
                    continue
                case _:
                    pass
            self._work.put_nowait(effect)
        self._alarm.wake()

    def _end(self, code: int, reason: str) -> None:
        """Something that the machine does not see ends this peer's part."""
        self._work.put_nowait(Finish(code=code, reason=reason))

    async def _keep_time(self) -> None:
        while True:
            if await self._alarm.sleep_until(self._machine.next_deadline()):
                self._feed(Tick())

    def _received(self, nbytes: int) -> None:
        self._learner.received_nbytes += nbytes
        self._tell_progress()

    def _borrowing(self, progress: int) -> None:
        self._borrowing_progress += progress
        self._tell_progress()

    def _tell_progress(self) -> None:
        progress = self._progress + self._learner.received_nbytes + self._borrowing_progress
        self._feed(Progressed(progress=progress, blocked=self._blocked, inner_steps=self._inner_steps))

    # -------------------------------------------------------------------------------- line

    async def _stay_connected(self) -> None:
        timeout_s: float | None = self._first_contact_timeout_s
        while True:
            try:
                address, channel = await self._dialler.connect(timeout_s=timeout_s)
            except HandshakeRefused as error:
                self._end(error.code, error.reason)
                return
            except NobodyAnswers as error:
                causes = "; ".join(error.causes.values())
                cure = "check that the run is up and that its address and port can be reached from here"
                self._end(UNREACHABLE, f"nobody answered for {error.waited_s:.0f} s ({causes}); {cure}")
                return
            timeout_s = None
            self._connection = ControlConnection(
                channel, _COORDINATOR_MESSAGES, silence_timeout_s=self._silence_timeout_s
            )
            self._observe(told.CoordinatorConnected(address=address))
            self._whereabouts.look(channel.seen_from)
            self._feed(Connected())
            cause = await self._connection.run(self._heard)
            self._connection = None
            self._observe(told.CoordinatorLost(cause=str(cause)))
            self._feed(Disconnected())

    def _say_where(self) -> None:
        """Connected anew the machine says that it is still here, and in that word is where. It may hear so twice."""
        if self._connection is not None:
            self._feed(Connected())

    def _heard(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Commit):
            made = message.certificate.made
            self._learner.heard_of(made)
            voted = self._exchange.take_vote(message.certificate.key)
            if voted is not None and voted != made.digest:
                self._learner.overruled(made, voted)
        elif isinstance(message, Welcome) and message.target is not None:
            self._learner.heard_of(message.target)  # one that is on its way to an older target may meet it
        elif isinstance(message, Rebuilding) and message != self._asked_last:
            self._asked_last = message  # the same is asked again and again until enough have answered
            self._observe(told.CoordinatorAsks(testified=message.testified, needed=message.needed))
        elif isinstance(message, Rebuilt) and message.epoch > self._went_back_in:
            self._asked_last = None
            self._went_back_in = message.epoch  # it is told again until this peer's answer arrives
            self._learner.went_back()
            step = 0 if message.certificate is None else message.certificate.made.outer_step
            self._observe(told.WentBack(epoch=message.epoch, outer_step=step, cause=went_back(message)))
        elif isinstance(message, Trust):
            self._observe(told.TrustHeard(message))
        self._feed(CoordinatorSaid(message=message))

    async def _dial_donor(self, member: Member) -> Channel:
        channel = await self._open_to_donor(member)
        if channel.hello.ref != member.ref:
            channel.close()
            raise PeerUnreachable(member.address, f"{channel.hello.peer_id} answers there, not {member.peer_id}")
        return channel

    async def _borrow(self, donors: Sequence[Member]) -> None:
        if self._private is not None and self._private.is_wanted:
            await borrow(self._private, donors, self._dial_donor, self._pace, advanced=self._borrowing)
            self._private = None  # who has asked them all in vain begins fresh, rather than late

    # -------------------------------------------------------------------------------- work

    async def _carry_out(self) -> Finish:
        """One effect after the other, until the last."""
        while True:
            effect = await self._work.get()
            match effect:
                case InstallView():
                    await self._exchange.install_view(effect)
                case StartExchange():
                    self._exchange.start(effect)
                case AbortExchange():
                    await self._exchange.abort(effect)
                case InstallStaged():
                    await self._install_staged(effect)
                case FoundState():
                    await self._learner.found()
                case CatchUp():
                    await self._learner.catch_up(effect)
                case BecomeActive(view=view):
                    self._observe(told.BecameActive(**told.view_fields(view)))
                    self._desk.became_active(view)
                case BecomeLearner(reason=reason):
                    self._observe(told.BecameLearner(cause=reason))
                    self._desk.became_learner(reason)
                case BecomeExcused(view=view):
                    self._observe(told.BecameExcused(**told.view_fields(view)))
                    self._desk.excused()
                case CarryOver(outer_step=outer_step, held=held):
                    self._observe(told.WorkCarriedOver(outer_step=held.outer_step))
                    self._desk.carried_over(outer_step)
                case TakeLeases(ranges=ranges):
                    self._desk.took_leases(ranges)
                case Finish():
                    if self._connection is not None:
                        await self._connection.flush(timeout_s=1.0)
                    return effect
                case SendToCoordinator() | KeepCertificate() | MakeLinks():
                    raise AssertionError("this is done at once")
                case _:
                    assert_never(effect)

    async def _install_staged(self, effect: InstallStaged) -> None:
        await self._exchange.install_staged(effect.key, effect.held, final=effect.final)
        view = self._exchange.view
        taken_s = 0.0 if view is None else self._clock() - self._round_began
        fields = told.round_fields(effect.key) | told.state_fields(effect.held)
        self._observe(told.RoundCommitted(**fields, final=effect.final, seconds=taken_s))
        if view is None:  # an earlier start of this peer has exchanged it, and nobody here waits for it
            return
        self._desk.committed(
            Committed(key=effect.key, view=view, held=effect.held, final=effect.final, position=effect.position)
        )
