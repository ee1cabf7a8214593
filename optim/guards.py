# SPDX-License-Identifier: Apache-2.0
"""Guards against workers that went astray, EDiT's, around any method that averages pseudo-gradients.

A worker judges its own payload before it sends it. Of a fragment's payload Δ it looks at the stride, its length per
inner step, g = ‖Δ‖ / steps:

    weight     w = exp(-(g / typical g - 1) / T), so the mean of the round is EDiT's softmax of -g / T
    anomaly    g > mean + z * deviation of this worker's own past, after a warm-up, or not finite: w = 0
    clipping   mean Δ <- mean Δ * min(1, max_norm / (‖mean Δ‖ + 1e-6)), before the method steps with it

A fragment without an anomaly goes as it would without guards, but for its weight; one that all members call an anomaly
has no result, and each goes back to the anchor.

Shared state: the typical stride, a running mean of the median over each round's members, whose strides travel as a
note. Private state: mean and variance of the worker's own strides. Both follow from accepted payloads only.

Departures from paper and released code, on purpose:
    * Its weights are softmax(-‖Δ‖ / T). A model whose lengths are ten times as large then has another mean: a round
      with one worker 5% longer than the others would give it almost nothing. The softmax of g / typical g does not
      change with the scale of the model, the learning rate or H. "Typical" is shared, not a worker's own mean, else a
      worker that always goes too far would look normal; and as it is the same for all, it cancels in the mean but for
      that scale. It is of the past: a worker must know its weight before it sees the others.
    * Per step, because a difference that carries an aborted round, or a slow worker's, has other steps. Lengths grow no
      faster than steps, so after a failed round nobody looks like an anomaly for having worked longer.
    * Running statistics begin as plain ones (rate 1/n until that is below the decay); the code begins from zero, so
      its warm-up ends with a mean that is still too small.
    * The code also widens its limit by the deviation of recent z-scores, which is near 1. Here there is a least spread.
    * A worker that is rejected `patience` times in a row begins its statistics anew: its world has changed, and a past
      that only accepted payloads can update would reject it for ever.

Source: EDiT (arXiv:2412.07210), pseudo-gradient penalty, and its released code.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.outer import ANCHOR, Emitted, Op, Outer, Round, Settled, successor
from isthmus.optim.stable import norm
from isthmus.optim.wrapper import copy_into, without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

TYPICAL: Final = "guard_typical"
"""Name, in shared state, of [rounds, running mean of their median stride], [2]."""
HISTORY: Final = "guard_history"
"""Name, in private state, of [accepted rounds, mean, variance of the strides, rejected in a row], [4]."""

_REJECTED: Final = -1.0
"""Note of a payload that its own worker rejected. It has no weight, so no one else reads it."""
_EXCESS: Final = 30.0
"""Bounds a weight to e^±30: when all go astray at once, all weights are small but their mean still exists."""
_LEAST_SPREAD: Final = 0.1
"""A deviation counts as at least this part of the mean, or workers that hardly vary would be rejected for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What is judged, and how strictly. Defaults are EDiT's.

    Raises:
        ValueError: if a setting is out of its range.
    """

    temperature: float = 1.0
    """T, > 0. Infinite: all weigh alike. Small: the shortest alone counts."""
    z_limit: float = 3.0
    """Deviations above its mean at which a stride is an anomaly, > 0. Infinite: never."""
    warmup_rounds: int = 120
    """Accepted rounds of a fragment before a worker calls anything finite an anomaly, >= 1."""
    decay: float = 0.02
    """a, weight of the latest round in the running statistics, in (0, 1]."""
    max_norm: float = 10.0
    """φ, largest length of a fragment's averaged payload, > 0. Infinite: no clipping."""
    patience: int = 10
    """Rejections in a row after which a worker begins its statistics anew, >= 1. Ours."""

    def __post_init__(self) -> None:
        for name in ("temperature", "z_limit", "max_norm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_rounds", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    def is_anomaly(self, stride: float, history: Sequence[float]) -> bool:
        """Whether a stride is not finite or far above this worker's past, as in HISTORY."""
        rounds, mean, variance, _ = history
        if not math.isfinite(stride):
            return True
        spread = max(math.sqrt(variance), _LEAST_SPREAD * mean)
        return rounds >= self.warmup_rounds and stride - mean > self.z_limit * spread

    def weight(self, stride: float, typical: float) -> float:
        """Factor on the weight of a payload: 1 for a typical stride, or while none is known."""
        excess = (stride / typical - 1.0) / self.temperature if typical > 0.0 else 0.0
        return math.exp(-min(max(excess, -_EXCESS), _EXCESS))

    def after_accepted(self, stride: float, history: Sequence[float]) -> list[float]:
        """HISTORY with one more accepted stride."""
        rounds, mean, variance = history[0] + 1.0, history[1], history[2]
        rate = max(self.decay, 1.0 / rounds)
        delta = stride - mean
        return [rounds, mean + rate * delta, (1.0 - rate) * (variance + rate * delta * delta), 0.0]

    def after_rejected(self, history: Sequence[float]) -> list[float]:
        """HISTORY with one more rejection, or empty when patience is over."""
        rejected = history[3] + 1.0
        return [*history[:3], rejected] if rejected < self.patience else [0.0] * 4

    def after_round(self, strides: Sequence[float], typical: Sequence[float]) -> list[float]:
        """TYPICAL after a round whose members had these strides: plain products and sums, rounded alike everywhere."""
        rounds, mean = typical[0] + 1.0, typical[1]
        return [rounds, mean + max(self.decay, 1.0 / rounds) * (statistics.median(strides) - mean)]

    def clipped(self, value: Tensor) -> Tensor:
        """`value`, or if it is too long a shorter copy. [numel] fp32, with the same bits on every machine."""
        factor = self.max_norm / (norm(value) + 1e-6) if self.max_norm < math.inf else 1.0
        return value * factor if factor < 1.0 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded(Outer):
    """Another method with guards: the same fragments, rounds and steps, but payloads are judged and means clipped.

    It sees to it that the method itself never meets the guards' states and notes.
    """

    inner: Outer
    """Any method whose rounds are means of pseudo-gradients and whose anchor is shared."""
    guards: Guards = field(default_factory=Guards)

    def fitted(self, table: FragmentTable, run: RunFacts | None = None, /) -> Guarded:
        """The same guards around the method with all settings known."""
        return dataclasses.replace(self, inner=self.inner.fitted(table, run))

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Those of the method."""
        return self.inner.fragments(table)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """The method's shared state, and an empty running mean.

        Raises:
            ValueError: if the method has no anchor, or guards already.
        """
        shared = self.inner.init(fragment, value)
        if ANCHOR not in shared:
            raise ValueError("guards send a worker that went astray to the anchor: the method must have one")
        if TYPICAL in shared:
            raise ValueError("the method has guards already")
        return {**shared, TYPICAL: torch.zeros(2)}

    def init_private(self, fragment: Fragment, shared: Tensors, value: Tensor, /) -> Tensors:
        """The method's private state, and empty statistics."""
        private = self.inner.init_private(fragment, without(TYPICAL, shared), value)
        return {**private, HISTORY: torch.zeros(4)}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The method's rounds, with one more note.

        Raises:
            ValueError: if one is no mean.
        """
        rounds = self.inner.plan(inner_step)
        if any(round_.op is not Op.MEAN for round_ in rounds):
            raise ValueError("guards weigh payloads: rounds must be means")
        return tuple(dataclasses.replace(round_, num_notes=round_.num_notes + 1) for round_ in rounds)

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The method's payload, weighed. With NaN or infinity in it, it weighs nothing, warm-up or not."""
        bare = without(TYPICAL, shared), without(HISTORY, private)
        emitted = self.inner.emit(_bare_round(round_), value, *bare, work, out=out)
        stride = norm(emitted.payload) / max(1, work.inner_steps)
        if self.guards.is_anomaly(stride, private[HISTORY].tolist()):
            return dataclasses.replace(emitted, weight=0.0, notes=(*emitted.notes, _REJECTED))
        factor = self.guards.weight(stride, shared[TYPICAL][1].item())
        return dataclasses.replace(emitted, weight=emitted.weight * factor, notes=(*emitted.notes, stride))

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Clip the mean, let the method step with it, and take the round into the running mean.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        out = successor(shared, out)
        typical = self.guards.after_round([notes[-1] for notes in result.notes], shared[TYPICAL].tolist())
        judged = self._judged(round_, result)
        stepped = self.inner.step(_bare_round(round_), judged, without(TYPICAL, shared), out=without(TYPICAL, out))
        copy_into(stepped, out)
        out[TYPICAL].copy_(torch.tensor(typical))
        return out

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """What the method does; but a worker whose own payload was rejected goes to the anchor, as if it gave nothing.

        Nothing of what went astray survives. Whoever trained on from there, even where all were rejected and nothing
        moved, would carry it into the next payload and be rejected again.
        """
        mine, history = outcome.contribution, outcome.private[HISTORY].tolist()
        is_rejected = mine is not None and mine.notes[-1] == _REJECTED
        given = None if mine is None or is_rejected else dataclasses.replace(mine, notes=mine.notes[:-1])
        if is_rejected:
            history = self.guards.after_rejected(history)
        elif mine is not None and mine.weight > 0.0 and outcome.result is not None:
            history = self.guards.after_accepted(mine.notes[-1], history)
        private = successor(outcome.private, out)
        bare = dataclasses.replace(
            outcome,
            round_=_bare_round(outcome.round_),
            result=None if outcome.result is None else self._judged(outcome.round_, outcome.result),
            contribution=given,
            before=without(TYPICAL, outcome.before),
            after=without(TYPICAL, outcome.after),
            private=without(HISTORY, outcome.private),
        )
        settled = self.inner.settle(bare, out=without(HISTORY, private))
        copy_into(settled.private, private)
        private[HISTORY].copy_(torch.tensor(history))
        if is_rejected:
            return Settled.replaced(private, outcome.after[ANCHOR])
        return dataclasses.replace(settled, private=private)

    def _judged(self, round_: Round, result: Result) -> Result:
        """The result as the method sees it."""
        notes = tuple(notes[:-1] for notes in result.notes) if round_.num_notes > 1 else ()
        return dataclasses.replace(result, value=self.guards.clipped(result.value), notes=notes)


def _bare_round(round_: Round) -> Round:
    return dataclasses.replace(round_, num_notes=round_.num_notes - 1)
