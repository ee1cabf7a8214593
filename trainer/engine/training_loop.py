# SPDX-License-Identifier: Apache-2.0
"""One peer's training, from the anchor to the next commit and on.

    start from the anchor ─► inner steps on leased samples ─► emit ─► hand in ─┬─ exchange, vote, commit ─┬─►
                                    ▲                                          └─ inner steps, if delayed ─┘ │
                                    └────────────────────────── land on the outcome ◄────────────────────────┘

What follows what is optim/course.py's to say, what a membership's work is stint.py's; this module brings the two
together with the membership. Several outer steps may be on their way; they are handed in one at a time, in their order.

Rules: work is handed in exactly once, by the vote of the step it went into; when the membership is lost, so are
payloads, leases and the inner steps since the last commit, also if it is won again before this loop looks: what was
begun as a member of one view's admission is never handed in after the next (`_require`). It must not know connections,
views' reasons or how workers compute.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from isthmus.collective.core.types import OuterStep, View
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.messages import DataPosition
from isthmus.elastic.errors import NotAMember, RoundMissed, RunFinished
from isthmus.elastic.shell.member import Membership
from isthmus.optim.course import Done, Emit, Follow, Land, Train, Wait
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.outer_step_runner import OuterStepRunner
from isthmus.trainer.engine.progress import Progress
from isthmus.trainer.engine.sample_feed import LeasesLost, SampleFeed
from isthmus.trainer.engine.speed import Speed
from isthmus.trainer.engine.stint import Arrival, Flight, Stint
from isthmus.trainer.engine.tally import Trained
from isthmus.trainer.engine.waiting import HandIn, Patience
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.workers.ipc import BackwardDone, StepDone

_LOOK_S = 0.05
"""Between two looks whether a state that the others have is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What this peer did in one committed round. `loss` is the mean of its inner steps, None if it knows of none."""

    view: View
    outer_step: int
    digest: bytes
    final: bool
    inner_step: int
    num_tokens: int
    loss: float | None
    train_s: float
    wait_s: float
    """How long the workers stood still for it."""
    work: Trained
    """What it was, with what the workers say of their time."""
    position: DataPosition | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTerms:
    """What the configuration asks of a peer's training.

    Attributes:
        batch_size: samples of one inner step.
        outer_steps: after which the run is done: nobody goes on while the last step is out.
        patience: for how many times its own work of a round a peer lets the others wait before it hands in what it has.
        follows_speed: whether a slower peer leaves inner steps out, so that all come together.
    """

    batch_size: int
    outer_steps: int
    patience: float
    follows_speed: bool


class Overseer(Protocol):
    """Who is told how the training goes, and knows what is around it."""

    def others_wait(self) -> bool:
        """Whether other members stand in the exchange that this peer has not begun."""

    def stepped(self, inner_step: int, done: BackwardDone | StepDone) -> None:
        """An inner step is done, with this global number, or that half of it whose gradient is exchanged."""

    def blocked(self, is_blocked: bool, /) -> None:
        """This peer begins or ceases to stand still for the others."""

    async def idle(self, until: asyncio.Future[None], /) -> None:
        """The workers stand still until this is done: they may do something else, in parts that do not take long."""

    def committed(self, report: RoundReport) -> None:
        """A commit holds payloads of this peer. Told at once."""

    async def landed(self, report: RoundReport) -> None:
        """The workers are about to go on from its outcome; they may be asked to judge it first."""

    async def replace_workers(self, crash: WorkerCrashed) -> None:
        """Get others in the place of those that hang or died, or raise."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingLoop:
    """Trains whenever this peer is a member.

    Attributes:
        membership: says when we are a member, and what became of a step.
        runner: exchanges, and installs what was committed.
        state: the shared state.
        plan: which rounds make which outer step.
        values: the workers.
        feed: leased sample indices; whoever observes the membership resets it.
        progress: where the run is; whoever observes the membership tells it of commits.
        terms: the configuration's.
        overseer: is told.
    """

    membership: Membership
    runner: OuterStepRunner
    state: OuterState
    plan: OuterPlan
    values: WorkerValues
    feed: SampleFeed
    progress: Progress
    terms: LoopTerms
    overseer: Overseer
    _clock: Callable[[], float] = field(init=False)
    _speed: Speed = field(init=False)
    _patience: Patience = field(init=False)
    _hand_in: HandIn = field(init=False)
    _stint: Stint = field(init=False)

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._speed = Speed(self.plan, self._clock)
        self._patience = Patience(self.terms.patience, self._speed.work_s, self.overseer.others_wait, self._clock)
        self._hand_in = HandIn(self.overseer.blocked, self._clock)

    async def run(self) -> None:
        """Train until the final commit or the end of the membership. What workers report of themselves comes through.

        Who hangs or dies takes the work since the last commit along, and nothing else: the leases stay.
        """
        with contextlib.suppress(RunFinished):
            while True:
                admitted = await self.membership.activated()
                try:
                    with contextlib.suppress(LeasesLost, NotAMember):
                        await self._train_as_member(admitted)
                        return
                except WorkerCrashed as crash:
                    self.feed.take_back()
                    await self.overseer.replace_workers(crash)

    async def _train_as_member(self, admitted: View) -> None:
        """Until the run's last commit. `admitted` is the view in which this peer became active."""
        self._require(admitted)
        await self.values.start_from(self.state.pin())
        terms, values = self.terms, self.values
        self._stint = Stint(
            self.plan,
            self.state,
            values,
            progress=self.progress,
            batch_size=terms.batch_size,
            last=terms.outer_steps,
        )
        # A fresh member may come in the middle of the others' round: then it hands in what it has. Not in the run's
        # first round, which all begin together. So does who has missed a round, or it would be late again and again.
        self._patience.is_behind = values.base.manifest.outer_step > 0
        self._speed.begin()
        try:
            while not await self._act(admitted):
                pass
        except WorkerCrashed:
            if self._hand_in.is_out:  # it may still be committed
                await self._hand_in.ended()
                self._look()
            raise
        finally:
            try:
                await self._hand_in.close()
            finally:
                self._stint.release()

    def _require(self, admitted: View) -> None:
        """Raise NotAMember unless what this peer does has counted without a break since it was admitted."""
        if self.membership.active_view is not admitted:
            raise NotAMember("put out of the view while it trained")

    # -------------------------------------------------------------------------------- what comes next

    async def _act(self, admitted: View) -> bool:
        """Do what comes next. Returns whether that was all.

        Raises:
            NotAMember, LeasesLost: the membership ended; nothing of what is out counts.
        """
        self._look()
        stint = self._stint
        match stint.course.next():
            case Land(counted=True):
                # It is committed: who leaves with it, or has judged until the run was over, lands it too.
                is_member = self.membership.active_view is admitted
            case _:
                self._require(admitted)
                is_member = True
        if is_member:
            self._begin_hand_in()
        match stint.course.next():
            case Train(until=until):
                if not self._leaves_steps_out(stint.course.emitted_step + 1):
                    await self._train(until)
                elif stint.num_asked:
                    await self._finish_step(self._clock())
                else:
                    stint.course.hurry()
            case _ if stint.num_asked:  # payloads and landings find the workers at rest
                await self._finish_step(self._clock())
            case Emit(outer_step=step):
                await stint.emit(step, self.feed.consumed())
                self._speed.emitted(step)
            case Wait():
                began = self._clock()
                await self._hand_in.stand_still(self.overseer.idle)
                self._speed.stood_still(self._clock() - began)
            case Land(outer_step=step, counted=True):
                report = await stint.land(step)
                if report is not None:
                    await self.overseer.landed(report)
                    return report.final
            case Land(outer_step=step) | Follow(outer_step=step):
                await stint.catch_up(step, partial(self._require, admitted))
            case Done():
                return True
        return False

    def _look(self) -> None:
        """Take in what happened beside: the end of a hand-in, a state that the others made."""
        self._hand_in.look()
        if not self._hand_in.is_out and self.state.live.manifest.outer_step > self._stint.course.live_step:
            self._stint.advanced(self.state.pin())
            self._patience.is_behind = True

    def _leaves_steps_out(self, outer_step: int) -> bool:
        """Whether this outer step is to be made of what is done: the others are, or will be, there first."""
        stint = self._stint
        if not self.plan.steps_may_differ:
            return False
        if self._patience.is_over(outer_step, has_work=bool(stint.tally.unsettled.inner_steps)):
            return True
        return self._follows_speed and stint.has_work_for(outer_step) and self._speed.is_enough(outer_step)

    @property
    def _follows_speed(self) -> bool:
        return self.terms.follows_speed and self.plan.steps_may_differ

    async def _train(self, until: int) -> None:
        """Until an inner step is done. The next one is with the workers by then, if there is one before `until`."""
        began = self._clock()
        stint, batch_size = self._stint, self.terms.batch_size
        if not stint.num_asked:
            stint.ask(await self.feed.take(batch_size))
        has_next = stint.course.inner_step + stint.num_asked < until and self.feed.has(batch_size)
        if self._follows_speed and self._speed.is_enough(stint.course.emitted_step + 1, num_asked=stint.num_asked):
            has_next = False
        if has_next and stint.may_ask and not self.overseer.others_wait():
            stint.ask(await self.feed.take(batch_size))
        await self._finish_step(began)

    async def _finish_step(self, began_s: float) -> None:
        """Until the oldest of the inner steps that are with the workers is done."""
        done = await self._stint.stepped()
        self.overseer.stepped(self._stint.course.inner_step, done)
        taken_s = self._clock() - began_s
        self._stint.tally.took(taken_s)
        self._speed.trained(taken_s)

    # -------------------------------------------------------------------------------- what is out

    def _begin_hand_in(self) -> None:
        """Hand the next step in, if one is ready, beside whatever the workers do."""
        step = self._stint.course.to_hand_in
        if step is None or self._hand_in.is_out:
            return
        self._stint.course.handed_in(step)
        self._patience.handed_in()
        self._hand_in.begin(self._commit(step, self._stint.flights[step]))

    async def _commit(self, outer_step: int, flight: Flight) -> None:
        """See a step committed, by this peer's vote or without it."""
        stint = self._stint
        work = stint.tally.work_in(flight.emission)
        ready = RoundReady(
            outer_step=OuterStep(outer_step - 1),
            fragment=flight.emission.places[0],
            weight=float(flight.emission.shares[0].num_tokens),
            num_tokens=work.num_tokens,
            consumed=flight.consumed,
        )
        self.runner.offer(flight.payloads, planned_s=self._speed.planned_s)
        try:
            committed = await self.membership.commit_round(ready)
        except RoundMissed:
            if self.state.live.manifest.outer_step < outer_step:
                await asyncio.sleep(_LOOK_S)  # it is on its way
            stint.course.missed()
            return
        self._speed.heard(self.runner.speeds)
        live = self.state.pin()
        assert committed.held == live.held, "another state is installed than was committed"
        self.feed.settle(ready.consumed)
        report = RoundReport(
            view=committed.view,
            outer_step=committed.held.outer_step,
            digest=committed.held.digest,
            final=committed.final,
            inner_step=self.plan.inner_step(outer_step),
            num_tokens=work.num_tokens,
            loss=work.mean_loss,
            train_s=work.train_s,
            wait_s=self._hand_in.blocked_s,
            work=work,
            position=committed.position,
        )
        weights = self.runner.own_weights or tuple(0.0 for _ in flight.payloads)
        outcomes = self.runner.take_outcomes()
        stint.committed(outer_step, Arrival(version=live, outcomes=outcomes, weights=weights, report=report))
        self._patience.is_behind = False
        self.overseer.committed(report)
