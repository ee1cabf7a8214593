# SPDX-License-Identifier: Apache-2.0
"""One peer's training, from the anchor to the next commit and on.

    start from the anchor ─► inner steps on leased samples ─► emit ─► hand in ─┬─ exchange, vote, commit ─┬─►
                                    ▲                                          └─ inner steps, if delayed ─┘ │
                                    └────────────────────────── land on the outcome ◄────────────────────────┘

What follows what is optim/course.py's to say; this module carries it out. Several outer steps may be on their way; they
are handed in one at a time, in their order.

Rules: which rounds come next follows from the global outer step, never from a local count; work is handed in exactly
once, by the vote of the step it went into; when the membership is lost, so are payloads, leases and the inner steps
since the last commit, also if it is won again before this loop looks: what was begun as a member of one view's
admission is never handed in after the next (`_require`). When a step is committed without this peer, because it was
late, its work is kept: the workers are moved along with the anchor, and go on; its samples go with the next step, and
the fragments' differences with the fragments' next. It must not know connections, views' reasons or how workers
compute.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from isthmus.collective.core.types import OuterStep, View
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.leases import without
from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.errors import ElasticError, NotAMember, RoundMissed, RunFinished
from isthmus.elastic.shell.member import Membership
from isthmus.optim.course import Course, Done, Emit, Follow, Land, Train, Wait
from isthmus.optim.outer import GRAD, Work
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.outer_state import OuterState, RoundOutcome
from isthmus.trainer.engine.round_exchange import Payload
from isthmus.trainer.engine.round_runner import RoundRunner
from isthmus.trainer.engine.sample_feed import LeasesLost, SampleFeed
from isthmus.trainer.engine.state_version import Version
from isthmus.trainer.engine.tally import Emission, Tally
from isthmus.trainer.engine.worker_values import Given, WorkerValues
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
    position: DataPosition | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """An outer step of this peer that was emitted and has not landed."""

    emission: Emission
    consumed: tuple[IndexRange, ...]
    """The samples behind it that no commit holds yet."""
    payloads: list[Payload] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arrival:
    """An outer step that is committed and installed here, and has not landed. `version` is pinned."""

    version: Version
    outcomes: tuple[RoundOutcome, ...] = ()
    weights: tuple[float, ...] = ()
    report: RoundReport | None = None
    """None if the others made it."""


class TrainingLoop:
    """Trains whenever this peer is a member.

    Args:
        membership: says when we are a member, and what became of a step.
        runner: exchanges, and installs what was committed.
        state: the shared state.
        plan: which rounds make which outer step.
        values: the workers.
        feed: leased sample indices; whoever observes the membership resets it.
        batch_size: samples of one inner step.
        outer_steps: after which the run is done: nobody goes on while the last step is out.
        others_wait: whether other members stand in the exchange that this peer has not begun.
        patience: for how many times its own work of a round this peer lets them, before it hands in what it has.
        on_round: told of every commit that holds payloads of this peer, at once.
        on_landed: told of it again before the workers go on from its outcome; may have them judge it.
        on_inner_step: told of every inner step (global number, loss, tokens), for progress.
        on_blocked: told when this peer begins and ceases to stand still for the others.
        replace_workers: gets others in the place of those that hang or died, or raises.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        runner: RoundRunner,
        state: OuterState,
        plan: OuterPlan,
        values: WorkerValues,
        feed: SampleFeed,
        batch_size: int,
        outer_steps: int,
        others_wait: Callable[[], bool],
        patience: float,
        on_round: Callable[[RoundReport], None],
        on_landed: Callable[[RoundReport], Awaitable[None]],
        on_inner_step: Callable[[int, float | None, int], None],
        on_blocked: Callable[[bool], None],
        replace_workers: Callable[[WorkerCrashed], Awaitable[None]],
    ) -> None:
        self._membership = membership
        self._runner = runner
        self._state = state
        self._plan = plan
        self._values = values
        self._feed = feed
        self._batch_size = batch_size
        self._outer_steps = outer_steps
        self._others_wait = others_wait
        self._patience = patience
        self._on_round = on_round
        self._on_landed = on_landed
        self._on_inner_step = on_inner_step
        self._on_blocked = on_blocked
        self._replace_workers = replace_workers
        self._clock = asyncio.get_running_loop().time
        self._course: Course
        self._tally = Tally()
        self._flights: dict[int, _Flight] = {}
        self._arrivals: dict[int, _Arrival] = {}
        self._halves: dict[int, int] = {}  # by outer step: the inner step whose gradient waits for it
        self._handing: asyncio.Task[None] | None = None
        self._moved_at: dict[int, int] = {}  # by place: own inner steps when a round last moved the fragment
        self._is_behind = False
        self._stretch = (0, 0.0)  # inner steps since the last emission, and the seconds they took
        self._pace_s: float | None = None  # of an inner step, as the last stretch's were
        self._awaited_since: float | None = None
        self._blocked_since: float | None = None

    async def run(self) -> None:
        """Train until the final commit or the end of the membership. What workers report of themselves comes through.

        Who hangs or dies takes the work since the last commit along, and nothing else: the leases stay.
        """
        with contextlib.suppress(RunFinished):
            while True:
                admitted = await self._membership.activated()
                try:
                    with contextlib.suppress(LeasesLost, NotAMember):
                        await self._train_as_member(admitted)
                        return
                except WorkerCrashed as crash:
                    self._feed.take_back()
                    await self._replace_workers(crash)

    async def _train_as_member(self, admitted: View) -> None:
        """Until the run's last commit. `admitted` is the view in which this peer became active."""
        self._require(admitted)
        self._tally = Tally()
        self._moved_at.clear()
        self._flights.clear()
        self._halves.clear()
        await self._values.start_from(self._state.pin())
        begins_from = self._values.base.manifest.outer_step
        self._course = Course(self._plan, begins_from=begins_from, last=self._outer_steps)
        # A fresh member may come in the middle of the others' round: then it hands in what it has. Not in the run's
        # first round, which all begin together. So does who has missed a round, or it would be late again and again.
        self._is_behind = begins_from > 0
        self._stretch = (0, 0.0)
        async with self._owning_what_is_out():
            try:
                while not await self._act(admitted):
                    pass
            except WorkerCrashed:
                if self._handing is not None:  # what is out may still be committed
                    await self._wait()
                raise

    @contextlib.asynccontextmanager
    async def _owning_what_is_out(self) -> AsyncIterator[None]:
        """When the body is left nothing is handed in any more, and no version pinned for what did not land."""
        try:
            yield
        finally:
            task, self._handing = self._handing, None
            for arrival in self._arrivals.values():
                arrival.version.release()
            self._arrivals.clear()
            self._unblock()
            if task is not None:
                await asyncio.sleep(0)  # what has ended is taken in
                task.cancel()
                await asyncio.wait([task])
                error = None if task.cancelled() else task.exception()
                if error is not None and not isinstance(error, ElasticError):
                    raise error  # else the body has left for the same reason

    def _require(self, admitted: View) -> None:
        """Raise NotAMember unless what this peer does has counted without a break since it was admitted."""
        if self._membership.active_view is not admitted:
            raise NotAMember("put out of the view while it trained")

    # -------------------------------------------------------------------------------- what comes next

    async def _act(self, admitted: View) -> bool:
        """Do what comes next. Returns whether that was all.

        Raises:
            NotAMember, LeasesLost: the membership ended; nothing of what is out counts.
        """
        self._look()
        self._require(admitted)
        self._hand_in()
        course = self._course
        match course.next():
            case Train():
                if self._must_hurry():
                    course.hurry()
                else:
                    await self._train()
            case Emit(outer_step=step):
                await self._emit(step)
            case Wait():
                self._block()
                await self._wait()
                self._unblock()
            case Land(outer_step=step, counted=True):
                return await self._land(step)
            case Land(outer_step=step) | Follow(outer_step=step):
                await self._catch_up(step, admitted)
            case Done():
                return True
        return False

    def _look(self) -> None:
        """Take in what happened beside: the end of a hand-in, a state that the others made."""
        if self._handing is not None and self._handing.done():
            task, self._handing = self._handing, None
            task.result()
        live = self._state.live.manifest.outer_step
        if self._handing is None and live > self._course.live_step:
            self._arrivals[live] = _Arrival(version=self._state.pin())
            self._course.advanced(live)
            self._is_behind = True

    # -------------------------------------------------------------------------------- work

    async def _train(self) -> None:
        """One inner step; of one whose gradient is exchanged the half before that."""
        began = self._clock()
        indices = await self._feed.take(self._batch_size)
        inner_step = self._course.inner_step + 1
        half_of = self._gradient_step(inner_step)
        done: BackwardDone | StepDone
        if half_of is None:
            done = await self._values.step(indices, inner_step=inner_step)
        else:
            done = await self._values.backward(indices, inner_step=inner_step)
            self._halves[half_of] = inner_step
        self._course.stepped()
        self._tally.stepped(done.loss, done.num_tokens)
        self._on_inner_step(self._course.inner_step, done.loss, done.num_tokens)
        taken_s = self._clock() - began
        self._tally.took(taken_s)
        self._stretch = (self._stretch[0] + 1, self._stretch[1] + taken_s)

    def _gradient_step(self, inner_step: int) -> int | None:
        """The outer step that exchanges the gradient of this inner step, if there is one."""
        outer_step = self._course.emitted_step + 1
        is_now = self._plan.inner_step(outer_step) == inner_step
        return outer_step if is_now and self._exchanges_gradient(outer_step) else None

    def _exchanges_gradient(self, outer_step: int) -> bool:
        return any(item.fragment.kind == GRAD for item in self._plan.rounds(outer_step))

    async def _finish_half(self, outer_step: int) -> None:
        """The gradient has come: make the second half of its inner step."""
        inner_step = self._halves.pop(outer_step, None)
        if inner_step is not None:
            await self._values.update(inner_step=inner_step)

    async def _emit(self, outer_step: int) -> None:
        """Make the payloads of this step of what the workers have now."""
        rounds = self._plan.rounds(outer_step)
        emission = self._tally.emit([self._state.places[round_.fragment] for round_ in rounds])
        numbers = [self._tally.inner_steps - self._moved_at.get(place, 0) for place in emission.places]
        works = [Work(inner_steps=number, samples=float(number * self._batch_size)) for number in numbers]
        flight = self._flights[outer_step] = _Flight(emission=emission, consumed=self._feed.consumed())
        flight.payloads = await self._values.emit(rounds, works)
        self._course.emitted(outer_step)
        num_steps, seconds = self._stretch
        if num_steps:
            self._pace_s = seconds / num_steps
        self._stretch = (0, 0.0)

    def _must_hurry(self) -> bool:
        """Whether the others wait for so long that the steps missing here cost more than they give."""
        if not self._others_wait():
            self._awaited_since = None
            return False
        now = self._clock()
        self._awaited_since = self._awaited_since or now
        step = self._course.emitted_step
        if self._exchanges_gradient(step + 1):
            return False  # without its inner step there is nothing to give
        if self._is_behind:
            return True
        if self._pace_s is None or not self._tally.unsettled.inner_steps:
            return False
        length = self._plan.inner_step(step + 1) - self._plan.inner_step(step)
        return now - self._awaited_since > self._patience * length * self._pace_s

    # -------------------------------------------------------------------------------- what is out

    def _hand_in(self) -> None:
        """Hand the next step in, if one is ready, beside whatever the workers do."""
        step = self._course.to_hand_in
        if step is None or self._handing is not None:
            return
        self._course.handed_in(step)
        self._awaited_since = None
        self._handing = asyncio.ensure_future(self._commit(step, self._flights[step]))

    async def _commit(self, outer_step: int, flight: _Flight) -> None:
        """See a step committed, by this peer's vote or without it."""
        work = self._tally.work_in(flight.emission)
        ready = RoundReady(
            outer_step=OuterStep(outer_step - 1),
            fragment=flight.emission.places[0],
            weight=float(flight.emission.shares[0].num_tokens),
            num_tokens=work.num_tokens,
            consumed=flight.consumed,
        )
        self._runner.offer(flight.payloads)
        try:
            committed = await self._membership.commit_round(ready)
        except RoundMissed:
            if self._state.live.manifest.outer_step < outer_step:
                await asyncio.sleep(_LOOK_S)  # it is on its way
            self._course.missed()
            return
        live = self._state.pin()
        assert committed.held == live.held, "another state is installed than was committed"
        self._feed.settle(ready.consumed)
        self._tally.settle(flight.emission)
        for later in self._flights.values():
            later.consumed = without(later.consumed, ready.consumed)
        report = RoundReport(
            view=committed.view,
            outer_step=committed.held.outer_step,
            digest=committed.held.digest,
            final=committed.final,
            inner_step=self._plan.inner_step(outer_step),
            num_tokens=work.num_tokens,
            loss=work.mean_loss,
            train_s=work.train_s,
            wait_s=0.0 if self._blocked_since is None else self._clock() - self._blocked_since,
            position=committed.position,
        )
        weights = self._runner.own_weights or tuple(0.0 for _ in flight.payloads)
        self._arrivals[outer_step] = _Arrival(
            version=live, outcomes=self._runner.outcomes, weights=weights, report=report
        )
        self._course.committed(outer_step)
        self._is_behind = False
        self._on_round(report)

    async def _wait(self) -> None:
        """Until what is out has ended."""
        assert self._handing is not None, "nothing is out"
        await asyncio.wait([self._handing])
        self._look()

    def _block(self) -> None:
        self._blocked_since = self._clock()
        self._on_blocked(True)

    def _unblock(self) -> None:
        if self._blocked_since is not None:
            self._blocked_since = None
            self._on_blocked(False)

    # -------------------------------------------------------------------------------- outcomes

    async def _land(self, outer_step: int) -> bool:
        """Bring the workers to the outcome of this step. Returns whether it was the run's last."""
        arrival, flight = self._arrivals.pop(outer_step, None), self._flights.pop(outer_step, None)
        if arrival is None or flight is None:  # it was made before this peer came
            await self._settle_without(outer_step, None)
            return False
        if not flight.emission.shares[0].num_tokens:  # it weighed nothing: nothing of it was counted in any round
            self._tally.missed(flight.emission, [later.emission for later in self._flights.values()])
        given = Given(payloads=flight.payloads, weights=arrival.weights)
        self._moved(await self._values.land(arrival.version, arrival.outcomes, given, self._newer()))
        await self._finish_half(outer_step)
        self._course.landed(outer_step)
        report = arrival.report
        assert report is not None, "a step that counted has a report"
        await self._on_landed(report)
        return report.final

    async def _catch_up(self, outer_step: int, admitted: View) -> None:
        """The others made this step without us: what we gave to it is ours again, and the workers move along."""
        flight, arrival = self._flights.pop(outer_step, None), self._arrivals.pop(outer_step, None)
        if arrival is not None:
            await self._values.follow(arrival.version, lambda: self._require(admitted))
        if flight is None:
            await self._finish_half(outer_step)
            self._course.landed(outer_step)
        else:
            self._tally.missed(flight.emission, [later.emission for later in self._flights.values()])
            await self._settle_without(outer_step, flight)

    async def _settle_without(self, outer_step: int, flight: _Flight | None) -> None:
        """Land a step that holds nothing of this peer's, whatever it gave to it."""
        base = self._values.base
        base.pins += 1
        given = None if flight is None else Given(payloads=flight.payloads, weights=[0.0] * len(flight.payloads))
        self._moved(await self._values.land(base, self._nothing_given(outer_step), given, self._newer()))
        await self._finish_half(outer_step)
        self._course.landed(outer_step)

    def _newer(self) -> list[Payload]:
        """What was emitted and has not landed."""
        return [payload for flight in self._flights.values() for payload in flight.payloads]

    def _moved(self, places: Sequence[int]) -> None:
        self._moved_at |= dict.fromkeys(places, self._tally.inner_steps)

    def _nothing_given(self, outer_step: int) -> list[RoundOutcome]:
        """What the rounds of a step come to for a worker whose payload they do not hold."""
        base = self._values.base
        places = [(round_, self._state.places[round_.fragment]) for round_ in self._plan.rounds(outer_step)]
        return [
            RoundOutcome(round_=round_, place=place, result=None, before=base.shared(place), after=base.shared(place))
            for round_, place in places
        ]
