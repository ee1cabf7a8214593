# SPDX-License-Identifier: Apache-2.0
"""QSR: workers average their parameters, the less often the lower the inner learning rate is.

    a round that begins after t inner steps lasts   H = max(H_base, floor((alpha / lr_t)^2))   inner steps
    anchor <- mean of local;   local <- anchor

It lasts H_base while the rate warms up, and no longer than to the end of the run. So the whole plan follows from the
schedule, and an aborted round moves no later one. It is DiLoCo with outer learning rate 1, no momentum, and rounds of
uneven length. Shared state: anchor, and a momentum that stays what the mean difference was. Private state: none.

Source: Quadratic Synchronization Rule (arXiv:2310.14423) and its code, github.com/hmgxr128/QSR, which may average the
inner optimizer's moments too; here they stay with their worker. For language models a secondary account of AutoLoCo
(2026) finds it too aggressive: loss 2.8793 with 41 rounds, against 2.8020 with DiLoCo's 100 and 2.7233 data parallel.

On purpose unlike public code: (alpha / lr)^power is taken a billionth larger before it is rounded down, so that 0.0003
and 0.0001 make 9 steps and not 8, and the last bit of a cosine decides nothing where such figures meet.
"""

from __future__ import annotations

import functools
import math
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import PARAM, Op, Round
from isthmus.optim.registry import register
from isthmus.optim.schedule import ScheduleType, build_schedule

if TYPE_CHECKING:
    from isthmus.optim.schedule import Schedule

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)
_FORGIVEN: Final = 1e-9
"""Relative error of alpha / lr that still gives the whole number meant."""


@register("qsr")
@dataclass(frozen=True, slots=True, kw_only=True)
class QSR(DiLoCo):
    """QSR's settings. Those of the schedule must be the inner optimizer's own, equal on all members.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float = 1.0
    """Outer learning rate, > 0. 1 without momentum is the mean of the workers, as in the paper."""
    momentum: float = 0.0
    """Outer Nesterov momentum, in [0, 1)."""
    inner_steps: int = 4
    """H_base, inner steps of the shortest round, >= 1. The paper, with AdamW: 4."""
    alpha: float
    """Growth, >= 0, in the unit of the learning rate; about the rate below which rounds grow, times the root of H_base.
    0: all rounds last H_base. The paper, with AdamW, peak 0.008 and H_base 4: 0.0175."""
    power: int = 2
    """Of alpha / lr, 1 to 3. The rule's own is 2."""
    peak_lr: float
    """The inner optimizer's highest learning rate, > 0."""
    total_steps: int
    """Inner steps of the whole run, >= 1. If it goes on beyond, learning rate and H stay what they were at its end."""
    schedule: str = "cosine"
    """Type of the inner learning-rate schedule: "constant", "cosine" or "wsd"."""
    warmup_steps: int = 0
    """Of the schedule."""
    min_ratio: float = 0.1
    """Of the schedule: its last factor."""
    decay_steps: int | None = None
    """Of the schedule "wsd"; None: a tenth of the run."""

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if not 0.0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and not negative, got {self.alpha}")
        if self.power not in (1, 2, 3):
            raise ValueError(f"power must be 1, 2 or 3, got {self.power}")
        if not 0.0 < self.peak_lr < math.inf:
            raise ValueError(f"peak_lr must be positive and finite, got {self.peak_lr}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        known = typing.get_args(ScheduleType)
        if self.schedule not in known:
            raise ValueError(f"schedule must be one of {', '.join(known)}, got {self.schedule!r}")
        self.lr_factor()

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking mean at the end of every round of the rule."""
        if inner_step > self.total_steps:
            due = (inner_step - self.total_steps) % self.round_length(self.total_steps) == 0
        else:
            due = inner_step in _boundaries(self)
        return (Round(fragment=_WHOLE, op=Op.MEAN, inner_step=inner_step),) if due else ()

    def round_length(self, inner_step: int) -> int:
        """H of a round that begins after `inner_step` steps, as if the run had no end; at most `total_steps`."""
        warming = inner_step < self.warmup_steps
        return self.inner_steps if warming else self._steps_at(self.lr_factor()(inner_step))

    def lr_factor(self) -> Schedule:
        """The inner learning rate after a number of finished inner steps, as a factor on the peak."""
        return build_schedule(
            cast("ScheduleType", self.schedule),
            total_steps=self.total_steps,
            warmup_steps=self.warmup_steps,
            min_ratio=self.min_ratio,
            decay_steps=self.decay_steps,
        )

    def _steps_at(self, factor: float) -> int:
        """max(H_base, floor((alpha / lr)^power)), and no more than `total_steps`: a rate of 0 would wait for ever."""
        lr = self.peak_lr * factor
        ratio = self.alpha / lr if lr > 0.0 else math.inf if self.alpha else 0.0
        steps = math.prod([ratio] * self.power) * (1.0 + _FORGIVEN)
        return max(self.inner_steps, math.floor(min(steps, float(self.total_steps))))


@functools.lru_cache(maxsize=16)
def _boundaries(rule: QSR) -> frozenset[int]:
    """The inner steps after which a round ends, up to the end of the run; one walk through it serves all calls."""
    ends: list[int] = []
    start = 0
    while start < rule.total_steps:
        start = min(start + rule.round_length(start), rule.total_steps)
        ends.append(start)
    return frozenset(ends)
