# SPDX-License-Identifier: Apache-2.0
"""One membership's work: what this peer trains from its admission on, emits, and brings back to its workers.

What follows what is optim/course.py's to say; this module carries out what needs no membership. Rules: which rounds
come next follows from the global outer step, never from a local count; nothing of one stint counts in another. When a
step is committed without this peer, because it was late, its work is kept: the workers are moved along with the anchor,
and go on; its samples go with the next step, and the fragments' differences with the fragments' next. Where that is out
already, work and samples go with the one after it.

It must not know votes, connections or how workers compute.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.elastic.core.leases import without
from isthmus.elastic.core.messages import IndexRange
from isthmus.optim.course import Course
from isthmus.optim.outer import GRAD, Work
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.outer_state import OuterState, RoundOutcome
from isthmus.trainer.engine.progress import Progress
from isthmus.trainer.engine.round_exchange import Payload
from isthmus.trainer.engine.state_version import Version
from isthmus.trainer.engine.tally import Emission, Tally
from isthmus.trainer.engine.worker_values import Given, WorkerValues
from isthmus.trainer.workers.ipc import BackwardDone, StepDone
from isthmus.trainer.workers.link import WINDOW

if TYPE_CHECKING:
    from isthmus.trainer.engine.training_loop import RoundReport


_Asked = asyncio.Future[BackwardDone] | asyncio.Future[StepDone]


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """An outer step of this peer that was emitted and has not landed."""

    emission: Emission
    consumed: tuple[IndexRange, ...]
    """The samples behind it that no commit holds yet."""
    payloads: list[Payload] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """An outer step that is committed and installed here, and has not landed. `version` is pinned."""

    version: Version
    outcomes: tuple[RoundOutcome, ...] = ()
    weights: tuple[float, ...] = ()
    report: "RoundReport | None" = None
    """None if the others made it."""


class Stint:
    """See the module. The workers have been loaded with the state that it begins from.

    Args:
        plan: which rounds make which outer step.
        state: the shared state.
        values: the workers.
        progress: where the run is, which the learning rate follows.
        batch_size: samples of one inner step.
        last: outer steps of the run.
    """

    def __init__(
        self,
        plan: OuterPlan,
        state: OuterState,
        values: WorkerValues,
        *,
        progress: Progress,
        batch_size: int,
        last: int,
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._places = state.places
        self._values = values
        self._batch_size = batch_size
        self.course = Course(plan, begins_from=values.base.manifest.outer_step, last=last)
        self.tally = Tally()
        self.flights: dict[int, Flight] = {}
        """By outer step."""
        self._arrivals: dict[int, Arrival] = {}
        self._asked: deque[_Asked] = deque()
        self._has_stepped = False
        self._halves: dict[int, int] = {}  # by outer step: the inner step whose gradient waits for it
        self._moved_at: dict[int, int] = {}  # by place: own inner steps when a round last moved the fragment

    # -------------------------------------------------------------------------------- work

    @property
    def num_asked(self) -> int:
        """Inner steps that are with the workers."""
        return len(self._asked)

    @property
    def may_ask(self) -> bool:
        """Whether another inner step may be with the workers by now: they begin it as soon as they can.

        Before the first is done nobody knows how long one takes, nor that it fits into memory. One whose gradient is
        exchanged is asked for alone.
        """
        if self._asked and (not self._has_stepped or self.num_asked == WINDOW):
            return False
        following = self.course.inner_step + self.num_asked + 1
        return not self._asked or not self._is_half(following)

    def ask(self, indices: Sequence[int]) -> None:
        """Give the workers another inner step; of one whose gradient is exchanged the half before that."""
        inner_step = self.course.inner_step + self.num_asked + 1
        position = self._progress.position(inner_step - 1)
        task: _Asked
        if self._is_half(inner_step):
            task = asyncio.ensure_future(self._half(indices, inner_step, position))
        else:
            task = asyncio.ensure_future(self._values.step(indices, inner_step=inner_step, position=position))
        task.add_done_callback(_seen)
        self._asked.append(task)

    async def stepped(self) -> BackwardDone | StepDone:
        """The oldest of them is done."""
        done = await self._asked[0]
        self._asked.popleft()
        self._has_stepped = True
        if isinstance(done, StepDone):
            await self._values.rest()
            self.tally.measured(done)
        self.course.stepped()
        self.tally.stepped(done.loss, done.num_tokens)
        return done

    async def _half(self, indices: Sequence[int], inner_step: int, position: float) -> BackwardDone:
        done = await self._values.backward(indices, inner_step=inner_step, position=position)
        self._halves[self.course.emitted_step + 1] = inner_step
        return done

    def _is_half(self, inner_step: int) -> bool:
        outer_step = self.course.emitted_step + 1
        return self._plan.inner_step(outer_step) == inner_step and self._gives_gradient(outer_step)

    def _gives_gradient(self, outer_step: int) -> bool:
        """Whether it exchanges a gradient: its payloads are made in the middle of its inner step."""
        return any(round_.fragment.kind == GRAD for round_ in self._plan.rounds(outer_step))

    def has_work_for(self, outer_step: int) -> bool:
        """Whether what would be handed in now weighs anything."""
        return self.tally.weighs(self._places[self._plan.rounds(outer_step)[0].fragment])

    async def emit(self, outer_step: int, consumed: tuple[IndexRange, ...]) -> None:
        """Make the payloads of this step of what the workers have now."""
        rounds = self._plan.rounds(outer_step)
        emission = self.tally.emit([self._places[round_.fragment] for round_ in rounds])
        numbers = [self.tally.inner_steps - self._moved_at.get(place, 0) for place in emission.places]
        works = [Work(inner_steps=number, samples=float(number * self._batch_size)) for number in numbers]
        for earlier in self.flights.values():
            if not set(emission.places).isdisjoint(earlier.emission.places):
                # They go with that one; if it is missed, with what is emitted next.
                consumed = without(consumed, earlier.consumed)
        flight = self.flights[outer_step] = Flight(emission=emission, consumed=consumed)
        flight.payloads = await self._values.emit(rounds, works)
        self.course.emitted(outer_step)

    # -------------------------------------------------------------------------------- outcomes

    def committed(self, outer_step: int, arrival: Arrival) -> None:
        """A step is committed with this peer's vote."""
        flight = self.flights[outer_step]
        self.tally.settle(flight.emission)
        settled = flight.consumed
        for later in self.flights.values():
            later.consumed = without(later.consumed, settled)
        self._arrivals[outer_step] = arrival
        self.course.committed(outer_step)

    def advanced(self, version: Version) -> None:
        """The others have made steps without this peer; the newest one's state is this pinned one."""
        outer_step = version.manifest.outer_step
        self._arrivals[outer_step] = Arrival(version=version)
        self.course.advanced(outer_step)

    async def land(self, outer_step: int) -> "RoundReport | None":
        """Bring the workers to the outcome of this step. Returns its report; None if it is older than this stint."""
        arrival, flight = self._arrivals.pop(outer_step, None), self.flights.pop(outer_step, None)
        if arrival is None or flight is None:
            await self._settle_without(outer_step, None)
            return None
        if not flight.emission.shares[0].num_tokens:  # it weighed nothing: nothing of it was counted in any round
            self._missed(flight)
        given = Given(payloads=flight.payloads, weights=arrival.weights)
        await self._land(outer_step, arrival.version, arrival.outcomes, given)
        assert arrival.report is not None, "a step that counted has a report"
        return arrival.report

    async def catch_up(self, outer_step: int, require: Callable[[], None]) -> None:
        """The others made this step without us: what we gave to it is ours again, and the workers move along.

        Args:
            outer_step: which one.
            require: raises if nothing of this stint counts any more.
        """
        flight, arrival = self.flights.pop(outer_step, None), self._arrivals.pop(outer_step, None)
        if arrival is not None:
            await self._values.follow(arrival.version, require)
        if flight is None:
            await self._landed(outer_step)
        else:
            self._missed(flight)
            await self._settle_without(outer_step, flight)

    def release(self) -> None:
        """The stint is over: nobody waits for its steps, and no version stays pinned for what did not land."""
        for task in self._asked:
            task.cancel()  # the workers make the step all the same, before whatever they are asked next
        self._asked.clear()
        for arrival in self._arrivals.values():
            arrival.version.release()
        self._arrivals.clear()

    def _missed(self, flight: Flight) -> None:
        self.tally.missed(flight.emission, [later.emission for later in self.flights.values()])

    async def _settle_without(self, outer_step: int, flight: Flight | None) -> None:
        """Land a step that holds nothing of this peer's, whatever it gave to it."""
        base = self._values.base
        base.pins += 1
        given = None if flight is None else Given(payloads=flight.payloads, weights=[0.0] * len(flight.payloads))
        places = [(round_, self._places[round_.fragment]) for round_ in self._plan.rounds(outer_step)]
        unmoved = [
            RoundOutcome(round_=round_, place=place, result=None, before=base.shared(place), after=base.shared(place))
            for round_, place in places
        ]
        await self._land(outer_step, base, unmoved, given)

    async def _land(
        self, outer_step: int, version: Version, outcomes: Sequence[RoundOutcome], given: Given | None
    ) -> None:
        newer = [payload for flight in self.flights.values() for payload in flight.payloads]
        places = await self._values.land(version, outcomes, given, newer)
        self._moved_at |= dict.fromkeys(places, self.tally.inner_steps)
        await self._landed(outer_step)

    async def _landed(self, outer_step: int) -> None:
        """If the gradient of this step's inner step has come, make the second half of that."""
        inner_step = self._halves.pop(outer_step, None)
        if inner_step is not None:
            position = self._progress.position(inner_step - 1)
            self.tally.measured(await self._values.update(inner_step=inner_step, position=position))
        self.course.landed(outer_step)


def _seen(task: _Asked) -> None:
    """Whoever waits for it may have gone; then nobody else hears that it failed, and whoever asks next does."""
    if not task.cancelled():
        task.exception()
