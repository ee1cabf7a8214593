# SPDX-License-Identifier: Apache-2.0
"""Courses, and trainers around them, without one of their rules (mutants.py)."""

from isthmus.elastic.core.leases import merged
from isthmus.optim.course import Action, Course, Emit, Land, Train, Wait, _Fate
from isthmus.optim.outer_plan import OuterPlan
from tests.simulation.methods import after_private
from tests.simulation.symbols import State
from tests.simulation.tally import Flight, Ranges
from tests.simulation.worker import Worker


class LandsFirst(Course):
    def next(self) -> Action:
        action = super().next()
        if not isinstance(action, Emit) or not self._steps or self._due > self.inner_step:
            return action
        step, fate = self._steps[0]
        return Wait(step) if fate is _Fate.OUT else Land(step, counted=True)


class LandsBeforeItEmits(Worker):
    course_type = LandsFirst


class HandsInWhateverIsOut(Course):
    @property
    def to_hand_in(self) -> int | None:
        known = max(self.live_step, self._handed_in or 0)
        return next((step for step, _ in self._steps if step > known), None)


class HandsInAhead(Worker):
    course_type = HandsInWhateverIsOut


class TakesMissedForCounted(Course):
    def advanced(self, live_step: int) -> None:
        super().advanced(live_step)
        self._steps = type(self._steps)(
            (step, _Fate.COUNTED if fate is _Fate.MISSED else fate) for step, fate in self._steps
        )


class CountsWhatItMissed(Worker):
    course_type = TakesMissedForCounted


class TakesTwoSteps(Course):
    """To the step that the others made, and there again."""

    _was_there = 0

    def landed(self, outer_step: int) -> None:
        if outer_step > self.emitted_step and self._was_there < outer_step:
            self._was_there = outer_step
        else:
            super().landed(outer_step)


class FollowsTwice(Worker):
    course_type = TakesTwoSteps


class IsLate(Course):
    @property
    def _due(self) -> int:
        return super()._due + 1


class TrainsPastWhatIsDue(Worker):
    course_type = IsLate


class NotesNoHandIn(Course):
    def handed_in(self, outer_step: int) -> None:
        pass

    def committed(self, outer_step: int) -> None:
        self._handed_in = outer_step
        super().committed(outer_step)


class HandsInTwice(Worker):
    course_type = NotesNoHandIn


class LandsTheNewest(Course):
    def next(self) -> Action:
        action = super().next()
        counted = [step for step, fate in self._steps if fate is _Fate.COUNTED]
        return Land(counted[-1], counted=True) if isinstance(action, Land) and action.counted else action


class LandsOutOfOrder(Worker):
    course_type = LandsTheNewest


class NeverRests(Course):
    def next(self) -> Action:
        action = super().next()
        return Train(self.inner_step + 1) if isinstance(action, Wait) and self.emitted_step == self._last else action


class TrainsAfterTheLast(Worker):
    course_type = NeverRests


class RunsToTheNextEmission(Course):
    def hurry(self) -> None:
        self.inner_step = max(self.inner_step, self._plan.inner_step(self.emitted_step + 1))


class HurriesPastWhatIsDue(Worker):
    course_type = RunsToTheNextEmission


class LooksAtTheOldestAlone(Course):
    @property
    def _is_overdue(self) -> bool:
        return self._steps[0][1] is _Fate.MISSED if self._steps else self.base_step < self.live_step


class LandsMissedStepsInTheirTime(Worker):
    course_type = LooksAtTheOldestAlone


class LandsWithoutEmitting(Course):
    @property
    def _must_emit_first(self) -> bool:
        return False


class LandsMissedStepsAtOnce(Worker):
    course_type = LandsWithoutEmitting


class HasLandedAll(Course):
    def __init__(self, plan: OuterPlan, *, begins_from: int, last: int) -> None:
        super().__init__(plan, begins_from=begins_from, last=last)
        self._steps.clear()
        self.base_step = begins_from


class BeginsWithAllLanded(Worker):
    course_type = HasLandedAll


class ForgetsWhatItOwes(Worker):
    def carry(self, fragment: int, work: Ranges) -> None:
        pass


class OwesToWhatIsOut(Worker):
    """To a payload of the fragment that was made before."""

    def carry(self, fragment: int, work: Ranges) -> None:
        for flight in self.flights.values():
            for number, (other, more) in enumerate(flight.works):
                if other == fragment:
                    flight.works[number] = fragment, merged((*more, *work))
                    return
        super().carry(fragment, work)


class ConsumesWhatIsOut(Worker):
    def behind(self, fragments: set[int]) -> Ranges:
        return self.tally.consumed


class ConsumesAgain(Worker):
    def settle(self, consumed: Ranges) -> None:
        flights, self.flights = self.flights, {}
        super().settle(consumed)
        self.flights = flights


class RemembersWhatItMissed(Worker):
    def remember(self, flight: Flight, *, counted: bool) -> None:
        self.private = after_private(self.private, flight.digest, flight.met)


class RemembersItsFormerLife(Worker):
    def begin(self, state: State) -> None:
        private = self.private
        super().begin(state)
        self.private = private or self.private


class EmitsFromWhatIsLive(Worker):
    def _emit(self, course: Course, step: int) -> None:
        base, self.base = self.base, self.node.state
        super()._emit(course, step)
        self.base = base
