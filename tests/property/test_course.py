# SPDX-License-Identifier: Apache-2.0
"""Any plan, whatever happens beside: a worker emits, hands in and lands every outer step once, in order."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim.course import Action, Course, Done, Emit, Follow, Land, Train, Wait
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import PARAM, Op, Round
from isthmus.optim.outer_plan import OuterPlan

if TYPE_CHECKING:
    from isthmus.optim.outer import Outer


@dataclass(frozen=True)
class Planned:
    """A method that is nothing but its plan."""

    first: int
    """The inner step after which the first outer step is emitted."""
    steps: tuple[tuple[int, int, int], ...]
    """In turn: after so many more inner steps one is emitted, with this delay, of so many rounds."""
    groups: int
    """Of fragments, whose rounds take turns."""
    steps_may_differ: ClassVar = True

    def plan(self, inner_step: int) -> tuple[Round, ...]:
        at = self.first
        for number in itertools.count():
            gap, delay, num_rounds = self.steps[number % len(self.steps)]
            at += gap if number else 0
            if at >= inner_step:
                first = number % self.groups * num_rounds
                of = range(first, first + num_rounds) if at == inner_step else ()
                return tuple(_round(at, delay, index) for index in of)
        raise AssertionError


def _round(inner_step: int, delay: int, index: int) -> Round:
    return Round(fragment=FragmentKey(kind=PARAM, index=index), op=Op.MEAN, inner_step=inner_step, delay=delay)


@dataclass
class Journey:
    """A course, driven as the training loop drives it; `chance` says what happens beside. It judges every action."""

    course: Course
    plan: OuterPlan
    last: int
    chance: Callable[[int], int]
    """A number below this one; 0 once everything goes well."""
    log: list[Action] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    followed: list[int] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)
    handed_in: list[int] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    out: int | None = None
    coming: int | None = None
    """The others have made this step, and its state is not here yet."""
    trained: int = 0
    """Inner steps since the last emission."""
    is_as_planned: bool = True

    def __post_init__(self) -> None:
        self.first = self.course.live_step
        self.counted |= set(range(self.course.base_step + 1, self.first + 1))
        self.first_base = self.course.base_step

    @property
    def on_the_way(self) -> list[int]:
        known = [*range(self.first_base + 1, self.first + 1), *self.emitted]
        return [step for step in known if step not in self.landed]

    def run(self) -> None:
        for _ in range(5000):
            self.beside()
            self.hand_in()
            action = self.course.next()
            assert action == self.course.next(), "asking changes nothing"
            self.log.append(action)
            match action:
                case Train(until=until):
                    self.train(until)
                case Emit(outer_step=step):
                    self.emit(step)
                case Land(outer_step=step, counted=counted):
                    self.land(step, counted=counted)
                case Follow(outer_step=step):
                    self.follow(step)
                case Wait(outer_step=step):
                    self.wait(step)
                case Done():
                    return
        raise AssertionError(f"it does not end: {self.log[-10:]}")

    # -------------------------------------------------------------------------------- beside

    def hand_in(self) -> None:
        step = self.course.to_hand_in
        if step is None or self.coming is not None or self.chance(3) == 2:
            return
        assert self.out is None, "one at a time"
        assert step not in self.handed_in, "handed in twice"
        assert step == max([self.first, *self.handed_in, *self.missed, *self.counted]) + 1, "in order"
        assert self.course.live_step == step - 1, "the state before it is not here"
        assert step in self.emitted, "handed in before it was emitted"
        self.course.handed_in(step)
        self.handed_in.append(step)
        self.out = step

    def beside(self, *, must_end: bool = False) -> None:
        """A commit with this worker's part, commits without it, or nothing."""
        what = self.chance(5)
        most = self.last - self.course.live_step
        if self.coming is not None:
            if must_end or what != 1:
                self.arrive()
        elif what == 1 and not must_end:
            pass
        elif what > 2 and most:
            self.coming = self.course.live_step + 1 + self.chance(min(most, 4))
            if self.out is not None and self.chance(2):
                self.course.missed()
                self.out = None
            else:
                self.arrive()
        elif self.out is not None:
            self.course.committed(self.out)
            self.counted.add(self.out)
            self.out = None

    def arrive(self) -> None:
        assert self.coming is not None
        self.missed |= set(range(self.course.live_step + 1, self.coming + 1))
        self.course.advanced(self.coming)
        self.out = self.coming = None

    # -------------------------------------------------------------------------------- what it does

    def train(self, until: int) -> None:
        course = self.course
        assert course.emitted_step < self.last, "nobody trains when all is emitted"
        assert course.live_step <= course.emitted_step, "trains before it follows what the others made"
        self.demand_nothing_missed()
        assert course.inner_step < until
        assert until <= self.plan.inner_step(course.emitted_step + 1), "trains past an emission"
        for step in self.on_the_way:
            assert until <= self.plan.due_step(step), f"trains past the due step of {step}"
        if self.chance(6) == 5:
            course.hurry()
            assert course.inner_step == until, "it leads to the next thing, not past it"
            self.is_as_planned = False
            return
        self.beside()
        course.stepped()
        self.trained += 1

    def emit(self, step: int) -> None:
        self.demand_nothing_missed()
        assert step == max([self.first, *self.emitted, *self.followed]) + 1, "emitted in order"
        is_made = step <= self.course.live_step
        assert is_made or self.course.inner_step == self.plan.inner_step(step), "emitted after its inner step"
        assert self.course.inner_step <= self.plan.inner_step(step)
        if self.is_as_planned and not is_made:
            assert self.trained == self.plan.inner_step(step) - self.plan.inner_step(step - 1)
        self.trained, self.is_as_planned = 0, True
        self.beside()
        self.emitted.append(step)
        self.course.emitted(step)
        assert self.course.inner_step == self.plan.inner_step(step), "the next block begins where the others' does"

    def land(self, step: int, *, counted: bool) -> None:
        assert step == self.course.base_step + 1, "landed in order"
        assert step in self.on_the_way, "landed, and was not emitted"
        assert step <= self.course.live_step, "landed before its state is here"
        assert counted == (step in self.counted), "landed as it was committed"
        assert counted != (step in self.missed)
        following = self.course.emitted_step + 1
        is_due = any(self.plan.due_step(item) <= self.course.inner_step for item in self.on_the_way)
        if not is_due:
            assert min(self.plan.again(step), self.last) < following, "landed before its fragments are given again"
        if not self.missed & set(range(step, self.last + 1)) - set(self.landed):
            assert is_due or following > self.last, "landed before anything was due"
            emits = following <= self.last and self.plan.inner_step(following) <= self.course.inner_step
            assert not emits, "emit comes before land"
        self.beside()
        self.landed.append(step)
        self.course.landed(step)

    def follow(self, step: int) -> None:
        assert step == self.course.base_step + 1, "followed in order"
        assert not self.on_the_way, "what is on the way lands first"
        assert step in self.missed
        assert self.plan.again(step) == step, "followed where its fragments are given again first"
        self.is_as_planned = False
        self.followed.append(step)
        self.landed.append(step)
        self.course.landed(step)
        self.trained = 0

    def wait(self, step: int) -> None:
        assert step == self.on_the_way[0]
        assert step not in self.counted | self.missed, "waits for what is here"
        is_due = any(self.plan.due_step(item) <= self.course.inner_step for item in self.on_the_way)
        assert is_due or self.course.emitted_step == self.last, "waits although it could train"
        if self.out is None and self.coming is None:
            assert self.course.to_hand_in is not None, "waits, and nothing is on its way"
            return
        self.beside(must_end=True)

    def demand_nothing_missed(self) -> None:
        """It may go on to what must be emitted before anything lands."""
        behind = self.missed - set(self.landed)
        (front, *_) = self.on_the_way or [self.course.base_step + 1]
        is_given_again = self.plan.again(front) > front and min(self.plan.again(front), self.last) > max(
            [self.first, *self.emitted, *self.followed]
        )
        assert not behind or is_given_again, f"goes on before it has landed {sorted(behind)}, which the others made"


_GAPS = st.integers(1, 6)
_ROUNDS = st.integers(1, 3)


@st.composite
def plans(draw: st.DrawFn) -> Planned:
    """One delay for all steps, from none over a whole round to several steps in flight; or any delay for each.

    Several are in flight where fragments take turns; each is due before its fragments' next turn. All fragments at once
    may be given again as they are due.
    """
    num_rounds, groups = draw(_ROUNDS), draw(st.integers(1, 4))
    if draw(st.booleans()):
        gap = draw(_GAPS)
        longest = gap if groups == 1 else groups * gap - 1
        delay = draw(st.one_of(st.integers(0, min(gap, longest)), st.just(longest), st.integers(0, longest)))
        steps = [(gap, delay, num_rounds)]
    else:
        gaps = draw(st.lists(_GAPS, min_size=1, max_size=4))
        turns = [sum(gaps[number % len(gaps)] for number in range(at + 1, at + 1 + groups)) for at in range(len(gaps))]
        delays = [draw(st.integers(0, turn if groups == 1 else turn - 1)) for turn in turns]
        steps = [(gap, delay, num_rounds) for gap, delay in zip(gaps, delays, strict=True)]
    return Planned(draw(st.integers(0, 6)), tuple(steps), groups)


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 12), st.integers(0, 12), st.lists(st.integers(0, 59), max_size=120))
def test_any_plan_and_any_order_beside_lead_every_step_from_emission_to_landing(
    method: Planned, last: int, begins_from: int, chances: list[int]
) -> None:
    plan = OuterPlan(cast("Outer", method))
    luck = iter(chances)
    course = Course(plan, begins_from=min(begins_from, last), last=last)
    journey = Journey(course, plan, last, chance=lambda bound: next(luck, 0) % bound)
    journey.run()
    assert course.base_step == course.live_step == course.emitted_step == last
    assert journey.landed == list(range(journey.first_base + 1, last + 1)), "each landed once, in order"
    assert sorted(journey.emitted + journey.followed) == list(range(journey.first + 1, last + 1))
    assert set(journey.handed_in) <= set(journey.emitted)
    assert set(journey.emitted) - journey.missed <= set(journey.handed_in)


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 8))
def test_who_begins_from_a_step_has_landed_what_a_member_has_landed_by_then(method: Planned, step: int) -> None:
    plan = OuterPlan(cast("Outer", method))
    course = Course(plan, begins_from=0, last=step + 30)
    while (
        course.inner_step < plan.inner_step(step) or course.emitted_step < step or not isinstance(course.next(), Train)
    ):
        match course.next():
            case Train():
                course.stepped()
            case Emit(outer_step=outer_step):
                course.emitted(outer_step)
                while course.to_hand_in is not None:
                    course.handed_in(course.to_hand_in)
                    course.committed(course.live_step + 1)
            case Land(outer_step=outer_step):
                course.landed(outer_step)
            case other:
                raise AssertionError(other)
    joiner = Course(plan, begins_from=step, last=step + 30)
    assert (joiner.inner_step, joiner.next()) == (course.inner_step, course.next())
    assert joiner.base_step == course.base_step
