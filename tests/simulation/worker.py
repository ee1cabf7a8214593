# SPDX-License-Identifier: Apache-2.0
"""A simulated peer's trainer: the real course (optim/course.py) in a shell as trainer/engine/training_loop.py is one.

Inner steps take time and samples; everything else happens at once, between two of them. What is out goes on beside.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.events import LeasesWanted, Progressed, RoundReady
from isthmus.elastic.core.leases import count, merged, without
from isthmus.elastic.core.messages import IndexRange
from isthmus.optim.course import Course, Done, Emit, Follow, Land, Train, Wait
from tests.simulation.methods import Met, after_private, begun_private, rounds_of, samples_per_step
from tests.simulation.symbols import FAR_TOO_MUCH, MOST_SAID, Payload, State
from tests.simulation.tally import Flight, Ranges, Tally

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode

PROGRESS_S = 0.5
ALL_SAMPLES = 2**31
"""As many as a request may ask for."""
_WITH_WORK_IN_HAND = 0.2
"""Who has missed a round hands in what it has as soon as the others wait; with a whole round more it would be late
again, and again (seed 67535)."""


class Worker:
    """The trainer of one start of a peer."""

    course_type: type[Course] = Course

    def __init__(self, node: "PeerNode") -> None:
        self.node = node
        self.course: Course | None = None
        self.base: State | None = None
        self.private = b""
        self.flights: dict[int, Flight] = {}
        self.tally = Tally()
        self._states: dict[int, State] = {}  # here, and not landed
        self._serial = 0
        self._training = 0  # token of the inner step in progress; 0 = none
        self._trainings = 0
        self._asked_in = 0
        self._is_late = False  # what it gave to a round did not count
        self._is_behind = False
        self._has_followed = False  # with work that it has not given yet
        self._may_hand_in = False
        self._num_fresh = 0  # inner steps since it has emitted

    # ------------------------------------------------------------------------ the membership

    def begin(self, state: State) -> None:
        """This peer is active, and was not standing: it starts from the shared state."""
        options, plan = self.node.sim.options, self.node.sim.plan
        step = state.held.outer_step
        self.course = self.course_type(plan, begins_from=step, last=options.outer_steps)
        self.flights.clear()
        leases = self.tally.leases
        self.tally = Tally(leases=leases, since=dict.fromkeys(range(options.num_fragments), ()))
        self.base = state
        self.private = begun_private(state.held.digest)
        self._states.clear()
        self._num_fresh = 0
        self._is_late = self._has_followed = False
        self._is_behind = step > 0
        if not self.node.sim.checkers.may_be_large(self.node.peer_id):
            self.node.moments = 0
        self.node.sim.checkers.began(self.node, self.course.base_step, step)

    def stop(self) -> None:
        """The membership is lost, and with it payloads, leases and work."""
        self.course = None
        self.flights.clear()
        self.tally = Tally()
        self._training = 0

    def lease(self, ranges: Iterable[IndexRange]) -> None:
        """These may be trained on."""
        self.tally.leases = merged((*self.tally.leases, *ranges))
        self._asked_in = 0  # what came may be less than it takes

    # ------------------------------------------------------------------------ what comes next

    def go_on(self) -> None:
        """Do what comes next, up to the next inner step, unless one is under way."""
        while (course := self.course) is not None and not self._training:
            self._look(course)
            self._may_hand_in = True
            match course.next():
                case Train() if self._must_hurry():
                    course.hurry()
                case Train():
                    self._train()
                case Emit(outer_step=step):
                    self._emit(course, step)
                case Land(outer_step=step, counted=counted):
                    self._land(course, step, counted=counted)
                case Follow(outer_step=step):
                    self._has_followed |= self._num_fresh > 0
                    self.node.sim.marks["course: followed the others"] += 1
                    self._land(course, step, counted=False)
                case Wait() | Done():
                    return
                case other:
                    assert_never(other)

    def hand_in(self) -> None:
        """The next step, if one is ready. Nobody looks in the midst of an inner step."""
        step = None if self.course is None or not self._may_hand_in else self.course.to_hand_in
        self._may_hand_in = False
        if self.course is None or step is None:
            return
        self.course.handed_in(step)
        sim, flight = self.node.sim, self.flights[step]
        weight = count(flight.works[0][1]) * sim.weight_of(self.node)
        weight *= FAR_TOO_MUCH if sim.lie_of(self.node.peer_id) == "weight" else 1.0
        flight.payload = replace(
            flight.payload, weight=min(weight, MOST_SAID), consumed=flight.consumed, works=tuple(flight.works)
        )
        self.node.payload = payload = flight.payload
        self.node.sim.checkers.handed_in(self.node, payload)
        self.node.feed(
            RoundReady(
                outer_step=OuterStep(payload.outer_step),
                fragment=rounds_of(self.node.sim.plan, step)[0].fragment,
                weight=payload.weight,
                num_tokens=count(payload.consumed),
                consumed=payload.consumed,
            )
        )

    def committed(self, made: State, met: Met) -> None:
        """What was handed in is committed, and installed."""
        if self.course is None:
            return
        step = made.held.outer_step
        flight = self.flights[step]
        flight.digest, flight.met = made.held.digest, met
        self.settle(flight.payload.consumed)
        self._states[step] = made
        self._is_behind = False
        self.course.committed(step)

    def settle(self, consumed: Ranges) -> None:
        """A commit holds these."""
        self.tally.consumed = without(self.tally.consumed, consumed)
        for flight in self.flights.values():
            flight.consumed = without(flight.consumed, consumed)

    def missed(self) -> None:
        """What was handed in was too late."""
        assert self.course is not None
        self.course.missed()

    def _look(self, course: Course) -> None:
        """Take in a state that the others made."""
        state = self.node.state
        if state is not None and state.held.outer_step > course.live_step:
            self._states[state.held.outer_step] = state
            course.advanced(state.held.outer_step)
            self._is_behind = True

    def _must_hurry(self) -> bool:
        """Whether the others wait for what this peer has."""
        is_awaited = self._is_behind and self.node.sim.options.hurries and self.node.is_awaited
        self.node.sim.marks["course: hurried for others that wait"] += is_awaited
        return self._has_followed or is_awaited

    # ------------------------------------------------------------------------ outer steps

    def _emit(self, course: Course, step: int) -> None:
        sim, base = self.node.sim, self.base
        assert base is not None
        rounds = rounds_of(sim.plan, step)
        works = tuple(self.tally.give(round_.fragment) for round_ in rounds)
        self._serial += 1
        self.node.moments += 1
        payload = Payload(
            ref=self.node.ref,
            serial=self._serial,
            outer_step=step - 1,
            weight=0.0,
            consumed=self.behind({round_.fragment for round_ in rounds}),
            size=FAR_TOO_MUCH if sim.lie_of(self.node.peer_id) == "size" else self.node.size,
            works=tuple((round_.fragment, work) for round_, work in zip(rounds, works, strict=True)),
            base=base.held,
        )
        self.flights[step] = Flight(payload, payload.consumed, list(payload.works))
        self._is_late = self._has_followed = False
        self._num_fresh = 0
        sim.marks["course: several steps out"] += len(self.flights) > 1
        sim.marks["course: several rounds a step"] += len(rounds) > 1
        sim.checkers.emitted(self.node, payload, course.inner_step)
        course.emitted(step)

    def _land(self, course: Course, step: int, *, counted: bool) -> None:
        flight = self.flights.pop(step, None)
        self.base = self._states.pop(step, self.base)
        if flight is not None:
            self._is_late |= not counted
            self.take_back(flight, counted=counted)
            self.remember(flight, counted=counted)
        sim = self.node.sim
        sim.marks["course: missed a step, and more were out"] += (
            flight is not None and not counted and bool(self.flights)
        )
        sim.marks["course: began in the midst of a delay"] += flight is None and counted
        sim.checkers.landed(self.node, step, flight.met if flight is not None else None, counted=counted)
        course.landed(step)

    def remember(self, flight: Flight, *, counted: bool) -> None:
        """What becomes of the private state."""
        if counted:
            self.private = after_private(self.private, flight.digest, flight.met)

    def take_back(self, flight: Flight, *, counted: bool) -> None:
        """What became no part of the shared state is to be given again."""
        for fragment, work in flight.works if not counted or not flight.weighs else ():
            self.carry(fragment, work)

    def carry(self, fragment: int, work: Ranges) -> None:
        """It did not count: it goes with the fragment's next payload."""
        self.tally.owe(fragment, work)

    def behind(self, fragments: set[int]) -> Ranges:
        """The samples behind a payload of these: those of an earlier one that is out go with that, or a later one."""
        out = [flight.consumed for flight in self.flights.values() if fragments & {item[0] for item in flight.works}]
        return without(self.tally.consumed, merged(item for ranges in out for item in ranges))

    # ------------------------------------------------------------------------ inner steps

    @property
    def _samples_per_step(self) -> int:
        return samples_per_step(self.node.sim.options)

    def _train(self) -> None:
        """One inner step; it takes a while."""
        self._trainings += 1
        self._training = self._trainings
        node, options = self.node, self.node.sim.options
        duration_s = node.sim.world.rng.uniform(*options.train_s) / options.steps_per_round * node.sim.speed_of(node)
        if self._is_late:
            duration_s *= _WITH_WORK_IN_HAND
        has_samples = count(self.tally.leases) >= self._samples_per_step
        wait_s = min(PROGRESS_S, duration_s) if self._num_fresh and has_samples else 0.0
        node.later(wait_s, "train", self._tick, self._training, node.clock.now() + duration_s)

    def _tick(self, training: int, until: float) -> None:
        node = self.node
        if training != self._training:
            return
        if node.hung:
            node.later(PROGRESS_S, "hang", self._tick, training, until)
            return
        is_short = count(self.tally.leases) < self._samples_per_step
        if is_short and self._asked_in != training:
            self._asked_in = training
            is_greedy = node.sim.options.hoards and node.peer_id == list(node.sim.peers)[-1]
            wanted = ALL_SAMPLES if is_greedy else node.sim.options.samples_per_round - count(self.tally.leases)
            node.feed(LeasesWanted(num_samples=wanted))
        starving = is_short and node.clock.now() >= until
        node.progress += not starving
        node.inner_steps += not starving
        node.feed(Progressed(progress=node.progress, blocked=starving, inner_steps=node.inner_steps))
        if training != self._training:
            return
        if node.clock.now() >= until and not starving:
            self._stepped()
        else:
            wait_s = min(PROGRESS_S, max(0.02, until - node.clock.now()))
            node.later(wait_s, "train", self._tick, training, until)

    def _stepped(self) -> None:
        assert self.course is not None
        self._training = 0
        self._num_fresh += 1
        taken = self.tally.take(self._samples_per_step)
        self.course.stepped()
        self.node.sim.checkers.trained(self.node, self.course.inner_step, taken)
        self.go_on()
        self.hand_in()
