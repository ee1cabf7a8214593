# SPDX-License-Identifier: Apache-2.0
"""How fast this peer is, and how many inner steps it makes for an outer step, so that all members come together.

    planned     inner steps that the method has between two outer steps: the fastest member makes all of them
    own         those of a slower one: as many as fit until the fastest is done with all

Members tell each other with every exchange how long one planned inner step takes them, with its part of all that lies
between the steps (payloads, landing, judging the anchor). Who is slower than the fastest by more than a twentieth
leaves inner steps out. Fractions are carried over, so that also rounds of a few steps come out right on average.

Rules: what is measured is this peer's alone, and what is told is not believed beyond a bound: nobody makes less than a
sixteenth of a round because of what others say. It must not know methods, the membership or how workers compute.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from isthmus.optim.outer_plan import OuterPlan

_SLACK: Final = 0.05
"""Share of a round for which the others wait rather than that inner steps are left out. Equal peers differ by less."""
_LEAST_SHARE: Final = 1 / 16
_MEMORY: Final = 5
"""Outer steps over which is measured. The slowest of them does not count: a machine that was busy once is not slow."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """What was done from one outer step to the next."""

    num_steps: int = 0
    """Those that were measured: not the first of all."""
    steps_s: float = 0.0
    num_planned: int = 0
    rest_s: float = 0.0
    """Neither trained nor waited for others."""

    @property
    def planned_s(self) -> float:
        """How long a planned inner step takes at this pace, if none is left out."""
        return self.steps_s / self.num_steps + self.rest_s / self.num_planned


class Speed:
    """Measures one peer, and compares it with what the others say.

    Args:
        plan: how many inner steps lie between outer steps.
        clock: monotonic seconds.
    """

    def __init__(self, plan: OuterPlan, clock: Callable[[], float]) -> None:
        self._plan = plan
        self._clock = clock
        self._known: deque[_Stretch] = deque(maxlen=_MEMORY)
        self._stretch = _Stretch()
        self._began_at = 0.0
        self._idle_s = 0.0
        self._num_done = 0  # of this stretch
        self._is_warm = False
        self._fastest_s: float | None = None
        self._carried = 0.0

    # -------------------------------------------------------------------------------- what happened

    def begin(self) -> None:
        """This peer is a member now: what others said before is old, and its first step takes longer than others."""
        self._open()
        self._is_warm = False
        self._fastest_s, self._carried = None, 0.0

    def trained(self, seconds: float) -> None:
        """An inner step is done."""
        self._num_done += 1
        if self._is_warm:
            self._stretch.num_steps += 1
            self._stretch.steps_s += seconds
        else:
            self._is_warm = True
            self._idle_s += seconds

    def stood_still(self, seconds: float) -> None:
        """So long this peer had nothing to do but to wait for others."""
        self._idle_s += seconds

    def emitted(self, outer_step: int) -> None:
        """The payloads of this outer step are made."""
        stretch = self._stretch
        stretch.num_planned = self._length(outer_step)
        taken_s = self._clock() - self._began_at
        stretch.rest_s = max(0.0, taken_s - stretch.steps_s - self._idle_s)
        missing = self._target(outer_step) - self._num_done
        self._carried = 0.0 if self._share() == 1.0 else min(0.5, max(-0.5, missing))
        if stretch.num_steps:
            self._known.append(stretch)
        self._open()

    def heard(self, told: Iterable[float]) -> None:
        """What the members of an exchange have told of themselves, this peer among them; see `planned_s`."""
        self._fastest_s = min((seconds for seconds in told if 0.0 < seconds < math.inf), default=None)

    # -------------------------------------------------------------------------------- what follows

    @property
    def planned_s(self) -> float:
        """What this peer tells the others: seconds of a planned inner step; 0.0 if it has measured none."""
        mean = self._mean()
        return 0.0 if mean is None else mean.planned_s

    def work_s(self, outer_step: int) -> float | None:
        """How long the inner steps before this outer step take here, none left out; None if that is not known."""
        mean = self._mean()
        return None if mean is None else self._length(outer_step) * mean.steps_s / mean.num_steps

    def is_enough(self, outer_step: int, *, num_asked: int = 0) -> bool:
        """Whether the inner steps that are done for this outer step, and those under way, are as many as fit."""
        return self._num_done + num_asked >= math.floor(self._target(outer_step) + 0.5)

    def _target(self, outer_step: int) -> float:
        return self._length(outer_step) * self._share() + self._carried

    def _share(self) -> float:
        """Of the planned inner steps that this peer makes."""
        mean = self._mean()
        if mean is None or self._fastest_s is None or mean.planned_s <= self._fastest_s * (1.0 + _SLACK):
            return 1.0
        fits = (self._fastest_s - mean.rest_s / mean.num_planned) * mean.num_steps / mean.steps_s
        return min(1.0, max(_LEAST_SHARE, fits))

    def _mean(self) -> _Stretch | None:
        """Of the stretches that are known; None if none is."""
        slowest = max(self._known, key=lambda stretch: stretch.planned_s, default=None)
        counted = [stretch for stretch in self._known if stretch is not slowest] or list(self._known)
        if not counted:
            return None
        return _Stretch(
            num_steps=sum(stretch.num_steps for stretch in counted),
            steps_s=sum(stretch.steps_s for stretch in counted),
            num_planned=sum(stretch.num_planned for stretch in counted),
            rest_s=sum(stretch.rest_s for stretch in counted),
        )

    def _length(self, outer_step: int) -> int:
        return max(1, self._plan.inner_step(outer_step) - self._plan.inner_step(outer_step - 1))

    def _open(self) -> None:
        self._stretch, self._num_done = _Stretch(), 0
        self._began_at, self._idle_s = self._clock(), 0.0
