# SPDX-License-Identifier: Apache-2.0
"""QSR: workers average their parameters, the less often the lower the inner learning rate is.

    a round that begins after t inner steps lasts   H = max(H_base, floor((alpha / lr_t)^2))   inner steps
    anchor <- mean of local;   local <- anchor

It lasts H_base while the rate warms up, and no longer than to the end of the run. So the whole plan follows from the
schedule, and an aborted round moves no later one. It is DiLoCo with outer learning rate 1, no momentum, and rounds of
uneven length. Shared state: anchor, and a momentum that stays what the mean difference was. Private state: none.

A run is so many rounds long, and its schedule stretches with its inner steps. `fitted` finds the inner steps at which
the rule makes just these rounds.

Source: Quadratic Synchronization Rule (arXiv:2310.14423) and its code, github.com/hmgxr128/QSR, which may average the
inner optimizer's moments too; here they stay with their worker. For language models a secondary account of AutoLoCo
(2026) finds it too aggressive: loss 2.8793 with 41 rounds, against 2.8020 with DiLoCo's 100 and 2.7233 data parallel.

On purpose unlike public code: (alpha / lr)^power is taken a billionth larger before it is rounded down, so that 0.0003
and 0.0001 make 9 steps and not 8, and the last bit of a cosine decides nothing where such figures meet.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import PARAM, Op, Round
from isthmus.optim.registry import register
from isthmus.optim.schedule import ScheduleType, build_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from isthmus.optim.fragments import FragmentTable
    from isthmus.optim.run_facts import RunFacts
    from isthmus.optim.schedule import Schedule

MAX_STEPS: Final = 1 << 24
"""Inner steps of the longest run that `fitted` finds."""

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)
_FORGIVEN: Final = 1e-9
"""Relative error of alpha / lr that still gives the whole number meant."""


@register("qsr")
@dataclass(frozen=True, slots=True, kw_only=True)
class QSR(DiLoCo):
    """QSR's settings. From `peak_lr` on they are the inner schedule's: None stands for the run's own (see `fitted`).

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float | None = 1.0
    """Outer learning rate, > 0. 1 without momentum is the mean of the workers, as in the paper. None: DiLoCo's."""
    momentum: float | None = 0.0
    """Outer Nesterov momentum, in [0, 1). None: DiLoCo's."""
    inner_steps: int = 4
    """H_base, inner steps of the shortest round, >= 1. The paper, with AdamW: 4."""
    alpha: float | None = None
    """Growth, >= 0, in the unit of the learning rate. 0: all rounds last H_base. None: peak_lr * H_base^(1 / power), so
    that rounds last H_base at the peak and grow as soon as the rate falls. So they do in the paper's own example: with
    AdamW, peak 0.008 and H_base 4 it has 0.0175, and this is 0.016."""
    power: int = 2
    """Of alpha / lr, 1 to 3. The rule's own is 2."""
    peak_lr: float | None = field(default=None, metadata={"fitted": True})
    """The inner optimizer's highest learning rate, > 0."""
    total_steps: int | None = field(default=None, metadata={"fitted": True})
    """Inner steps of the whole run, >= 1. If it goes on beyond, learning rate and H stay what they were at its end."""
    schedule: str | None = field(default=None, metadata={"fitted": True})
    """Type of the inner learning-rate schedule: "constant", "cosine" or "wsd"."""
    warmup_steps: int | None = field(default=None, metadata={"fitted": True})
    """Of the schedule."""
    min_ratio: float | None = field(default=None, metadata={"fitted": True})
    """Of the schedule: its last factor. A constant one has none."""
    decay_steps: int | None = field(default=None, metadata={"fitted": True})
    """Of the schedule "wsd" only."""

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.alpha is not None and not 0.0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and not negative, got {self.alpha}")
        if self.power not in (1, 2, 3):
            raise ValueError(f"power must be 1, 2 or 3, got {self.power}")
        if self.peak_lr is not None and not 0.0 < self.peak_lr < math.inf:
            raise ValueError(f"peak_lr must be positive and finite, got {self.peak_lr}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        known = typing.get_args(ScheduleType)
        if self.schedule is not None and self.schedule not in known:
            raise ValueError(f"schedule must be one of {', '.join(known)}, got {self.schedule!r}")
        if not self._missing():
            self.lr_factor()

    def fitted(self, _table: FragmentTable, run: RunFacts | None = None, /) -> Self:
        """The same settings with the schedule known; `total_steps` is where the last of the run's outer steps ends.

        Raises:
            ValueError: if neither settings nor run tell the schedule, if they contradict each other, or if no length
                up to `MAX_STEPS` has so many rounds.
        """
        if run is None:
            self.lr_factor()
            return self
        total_steps = self._length_in(run) if self.total_steps is None else self.total_steps
        fitted = self._within(run, total_steps)
        for name in ("peak_lr", "schedule", "warmup_steps", "min_ratio", "decay_steps"):
            given, theirs = getattr(self, name), getattr(fitted, name)
            if given is not None and given != theirs:
                raise ValueError(f"{name} is {given} here and {theirs} in the run that it belongs to: leave it out")
        if fitted._num_rounds(run.outer_steps + 1) != run.outer_steps:
            cure = "shorten warm-up and decay, or lower alpha" if self.total_steps is None else "leave total_steps out"
            raise ValueError(f"{run.outer_steps} rounds do not end after {total_steps} inner steps: {cure}")
        return fitted

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking mean at the end of every round of the rule.

        Raises:
            ValueError: if the schedule is not known.
        """
        total_steps = _known(self).total_steps
        if inner_step > total_steps:
            due = (inner_step - total_steps) % self.round_length(total_steps) == 0
        else:
            due = inner_step in _boundaries(self)
        return (Round(fragment=_WHOLE, op=Op.MEAN, inner_step=inner_step),) if due else ()

    def round_length(self, inner_step: int) -> int:
        """H of a round that begins after `inner_step` steps, as if the run had no end; at most `total_steps`."""
        known = _known(self)
        return self.inner_steps if inner_step < known.warmup_steps else self._steps_at(known.factor(inner_step))

    def lr_factor(self) -> Schedule:
        """The inner learning rate after a number of finished inner steps, as a factor on the peak.

        Raises:
            ValueError: if the schedule is not known.
        """
        return _known(self).factor

    def _steps_at(self, factor: float) -> int:
        """max(H_base, floor((alpha / lr)^power)), and no more than `total_steps`: a rate of 0 would wait for ever."""
        known = _known(self)
        lr = known.peak_lr * factor
        ratio = known.alpha / lr if lr > 0.0 else math.inf if known.alpha else 0.0
        steps = math.prod([ratio] * self.power) * (1.0 + _FORGIVEN)
        return max(self.inner_steps, math.floor(min(steps, float(known.total_steps))))

    def _missing(self) -> list[str]:
        """Settings of the schedule that are not known."""
        needed = ["peak_lr", "total_steps", "schedule", "warmup_steps"]
        needed += ["min_ratio"] * (self.schedule != "constant") + ["decay_steps"] * (self.schedule == "wsd")
        return [name for name in needed if getattr(self, name) is None]

    def _within(self, run: RunFacts, total_steps: int) -> Self:
        """The same rule under the run's schedule, if it had so many inner steps."""
        return dataclasses.replace(
            self,
            peak_lr=run.peak_lr,
            total_steps=total_steps,
            schedule=run.schedule,
            warmup_steps=run.warmup(total_steps),
            min_ratio=run.min_ratio,
            decay_steps=run.decay(total_steps),
        )

    def _length_in(self, run: RunFacts) -> int:
        """The most inner steps that need no more than the run's rounds. A longer run has more rounds, not fewer."""
        # No round is shorter than H_base, and no run than its warm-up and decay.
        low, high = run.outer_steps * self.inner_steps, MAX_STEPS
        if run.schedule != "constant":
            low = max(low, (run.warmup_steps or 0) + (run.decay_steps or 0) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if self._within(run, middle)._num_rounds(run.outer_steps + 1) > run.outer_steps:
                high = middle
            else:
                low = middle
        return low

    def _num_rounds(self, limit: int) -> int:
        """How many rounds there are to the end of the run; counted no further than `limit`."""
        return sum(1 for _ in itertools.islice(_ends(self), limit))


class _Known(NamedTuple):
    """Settings that are known, of those that may not be."""

    alpha: float
    peak_lr: float
    total_steps: int
    warmup_steps: int
    factor: Schedule


@functools.lru_cache(maxsize=16)
def _known(rule: QSR) -> _Known:
    if missing := rule._missing():
        raise ValueError(
            f"rounds that grow follow the inner learning rate: set {', '.join(missing)}, or call fitted(table, run)"
        )
    peak_lr, total_steps, warmup_steps = cast(
        "tuple[float, int, int]", (rule.peak_lr, rule.total_steps, rule.warmup_steps)
    )
    return _Known(
        alpha=peak_lr * rule.inner_steps ** (1.0 / rule.power) if rule.alpha is None else rule.alpha,
        peak_lr=peak_lr,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        factor=build_schedule(
            cast("ScheduleType", rule.schedule),
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            min_ratio=1.0 if rule.min_ratio is None else rule.min_ratio,
            decay_steps=rule.decay_steps,
        ),
    )


def _ends(rule: QSR) -> Iterator[int]:
    """The inner steps after which a round ends, up to the end of the run."""
    total_steps, start = _known(rule).total_steps, 0
    while start < total_steps:
        start = min(start + rule.round_length(start), total_steps)
        yield start


@functools.lru_cache(maxsize=16)
def _boundaries(rule: QSR) -> frozenset[int]:
    """All of them; one walk through the run serves all calls of `plan`."""
    return frozenset(_ends(rule))
