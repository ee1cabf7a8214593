# SPDX-License-Identifier: Apache-2.0
"""One worker's way through the outer steps: what it does next, and what it hands in. A pure machine.

    Train ─► Emit n ─► Train ─► Land n ─► …          what the worker does, one after the other
               └─ hand in n ─► committed ─┘          beside it, in the order of the steps, one at a time

What has happened is told by calling (`stepped`, `emitted`, `committed`, `missed`, `advanced`, `landed`); `next` says
what follows. Whoever drives it owns time, values and the network: the daemon, or a simulation.

Rules:
    * Steps are emitted, handed in, committed and landed in order; several may be on their way at once, as many as the
      plan's delays ask for.
    * Emit comes before land: a method whose delay is a whole round takes its difference before its anchor moves.
    * A step is handed in when the state before it is committed here, and what was missed before it has landed: the
      work of that may go with it.
    * Nobody trains past the due step of anything that has not landed, in a hurry or not.
    * What the others committed without this worker is landed at once, with all that is out before it, and before
      anything else is emitted: its values follow, and its work goes with the next step.
    * Not so where a fragment is given anew before its outcome lands (`OuterPlan.again`). A payload is the only copy of
      its block there, so nothing lands before its fragments' next payloads are made, and after each of them something
      does. What the others made before this worker had emitted it is emitted at once, of what is done by then. Found
      before: what landed at once took the block along, and the next payload found nothing to land and held two blocks.
    * After the last step nobody trains while it is out.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from isthmus.optim.outer_plan import OuterPlan


@dataclass(frozen=True, slots=True)
class Train:
    """Make one more inner step; the next thing comes after global inner step `until`."""

    until: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Make the payloads of this outer step."""

    outer_step: int


@dataclass(frozen=True, slots=True)
class Land:
    """Bring the workers to the outcome of this outer step; or without `counted` to that of the others."""

    outer_step: int
    counted: bool


@dataclass(frozen=True, slots=True)
class Follow:
    """The others made this outer step before this worker had emitted it: move along."""

    outer_step: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Stand still until this outer step is committed."""

    outer_step: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last outer step has landed."""


Action: TypeAlias = Train | Emit | Land | Follow | Wait | Done


class _Fate(enum.Enum):
    OUT = "out"
    COUNTED = "counted"
    MISSED = "missed"


class Course:
    """See the module.

    Args:
        plan: of the method.
        begins_from: the outer step whose state the worker has been loaded with.
        last: outer steps of the run.
    """

    def __init__(self, plan: OuterPlan, *, begins_from: int, last: int) -> None:
        self._plan = plan
        self._last = last
        self._steps: deque[tuple[int, _Fate]] = deque()  # emitted, not landed
        self._handed_in: int | None = None
        self.inner_step = plan.inner_step(begins_from)
        """Global number of the newest inner step, or of the last one that was left out."""
        self.emitted_step = begins_from
        """The newest outer step that was emitted, or that was made without this worker before it could emit it."""
        self.live_step = begins_from
        """The newest outer step whose state is here."""
        self.base_step = begins_from
        """The outer step that the workers train from."""
        # What landed nowhere yet because it is due later reaches a newcomer too: it gave nothing to it.
        while self.base_step > 0 and plan.due_step(self.base_step) > self.inner_step:
            self._steps.appendleft((self.base_step, _Fate.COUNTED))
            self.base_step -= 1

    # -------------------------------------------------------------------------------- what happened

    def stepped(self) -> None:
        """One inner step is done."""
        self.inner_step += 1

    def hurry(self) -> None:
        """Leave out the inner steps before the next thing that `Train` leads to: others wait for it."""
        if self.emitted_step < self._last:
            self.inner_step = max(self.inner_step, self._until)

    def emitted(self, outer_step: int) -> None:
        """The payloads of this outer step are made. It may have been committed meanwhile without them."""
        assert outer_step == self.emitted_step + 1, "steps are emitted in order"
        self.emitted_step = outer_step
        self.inner_step = max(self.inner_step, self._plan.inner_step(outer_step))
        self._steps.append((outer_step, _Fate.OUT if outer_step > self.live_step else _Fate.MISSED))

    def handed_in(self, outer_step: int) -> None:
        """This step is on its way to its commit."""
        assert outer_step == self.to_hand_in, "steps are handed in in order, one at a time"
        self._handed_in = outer_step

    def committed(self, outer_step: int) -> None:
        """The step that was handed in is committed, and installed."""
        assert outer_step == self._handed_in, "this step was not handed in"
        self._handed_in = None
        self.live_step = outer_step
        self._mark(_Fate.COUNTED)

    def missed(self) -> None:
        """The others committed the step that was handed in, or the one that was to be, without this worker.

        Its state is on its way: see `advanced`.
        """
        self._handed_in = None

    def advanced(self, live_step: int) -> None:
        """The state of this step is here, made by the others."""
        if live_step > self.live_step:
            self.live_step = live_step
            self._handed_in = None
            self._mark(_Fate.MISSED)

    def landed(self, outer_step: int) -> None:
        """The workers train from this step now."""
        assert outer_step == self.base_step + 1, "steps land in order"
        self.base_step = outer_step
        if self._steps and self._steps[0][0] == outer_step:
            self._steps.popleft()
        elif outer_step > self.emitted_step:
            self.emitted_step = outer_step
            self.inner_step = max(self.inner_step, self._plan.inner_step(outer_step))

    # -------------------------------------------------------------------------------- what follows

    @property
    def to_hand_in(self) -> int | None:
        """The outer step that can be handed in now, if there is one."""
        following = self.live_step + 1
        is_out = any(step == following for step, _ in self._steps)
        return following if is_out and self._handed_in is None and not self._is_overdue else None

    def next(self) -> Action:
        """What the worker does now."""
        following = self.emitted_step + 1
        if self._is_overdue:
            if not self._must_emit_first:
                return self._land() if self._steps else Follow(following)
            if following <= self.live_step:
                return Emit(following)
        if following <= self._last and self._plan.inner_step(following) <= self.inner_step:
            return Emit(following)
        if self._steps and (following > self._last or self._due <= self.inner_step):
            return self._land()
        return Done() if following > self._last else Train(self._until)

    def _land(self) -> Land | Wait:
        step, fate = self._steps[0]
        return Wait(step) if fate is _Fate.OUT else Land(step, counted=fate is _Fate.COUNTED)

    @property
    def _is_overdue(self) -> bool:
        """Whether a step that was made without this worker has not landed."""
        return self.live_step > self.emitted_step or any(fate is _Fate.MISSED for _, fate in self._steps)

    @property
    def _must_emit_first(self) -> bool:
        """Whether the next step to land has a fragment that is given anew before, and was not yet."""
        if not self._steps:
            return self._plan.again(self.emitted_step + 1) > self.emitted_step + 1
        return min(self._plan.again(self._steps[0][0]), self._last) > self.emitted_step

    @property
    def _due(self) -> int:
        """The inner step after which the oldest step on its way lands: a later one may be due before it."""
        return min(self._plan.due_step(step) for step, _ in self._steps)

    @property
    def _until(self) -> int:
        """The inner step after which the next thing comes."""
        emitted_at = self._plan.inner_step(self.emitted_step + 1)
        return min(emitted_at, self._due) if self._steps else emitted_at

    def _mark(self, fate: _Fate) -> None:
        self._steps = deque(
            (step, fate if known is _Fate.OUT and step <= self.live_step else known) for step, known in self._steps
        )
