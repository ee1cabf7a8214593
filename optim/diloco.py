# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: H inner steps, then one Nesterov step on the mean of how far the workers went.

    delta  = mean over workers of (anchor - local)
    anchor <- Nesterov(anchor, delta);   local <- anchor

The state of the inner optimizer stays with its worker and is never averaged. One fragment holds all parameters.
Shared state: anchor and momentum. Private state: none.

Without settings of its own a run begins with plain averaging (learning rate 1, no momentum). While it warms up (see
`warm_up_steps`) it goes, in a line, to a momentum of 0.7 and the learning rate of those who give. The paper has 0.7 and
0.9 from the first step; optim/README.md, "Defaults", has what was measured.

Source: DiLoCo (arXiv:2311.08105), algorithm 1; learning rates by number of workers from its scaling laws
(arXiv:2503.09799); a momentum that warms up from Pier (arXiv:2511.17849).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.nesterov import nesterov_step
from isthmus.optim.outer import ANCHOR, PARAM, Emitted, Op, Outer, Round, elementwise, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Result, Tensors, Work

MOMENTUM: Final = "momentum"
"""Name of the outer momentum in shared state."""

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)

_WARM_UP_ROUNDS: Final = 20
_LEAST_WARM_UP_STEPS: Final = 160
DEFAULT_MOMENTUM: Final = 0.7

_BEST_LR: Final = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))
"""(workers, best outer learning rate) for models from 335M parameters up: arXiv:2503.09799."""


@register("diloco")
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(Outer):
    """DiLoCo's settings; defaults are the paper's, but for learning rate, momentum and H.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float | None = None
    """Outer learning rate, > 0 and constant; the paper: 0.7. None: `default_outer_lr` of those who give to a round,
    reached as the momentum is: what is good for three takes a single one, whose work is noisier, too far."""
    momentum: float | None = None
    """Outer Nesterov momentum, in [0, 1) and constant; the paper: 0.9, for thousands of rounds. None: it rises from 0
    to 0.7 over the first 20 rounds of the run, and at least 160 inner steps."""
    inner_steps: int = 100
    """H, inner steps between exchanges, >= 1; the paper: 500. Smaller is like data parallel and costs more bytes."""

    def __post_init__(self) -> None:
        if self.lr is not None and not 0.0 < self.lr < float("inf"):
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps must be at least 1, got {self.inner_steps}")

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """One fragment: the whole flat vector."""
        return (table.whole(),)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Anchor: a copy of the value. Momentum: zeros."""
        require_flat(value, fragment.numel, "the initial value")
        return anchor_and_momentum(value)

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking mean after every H-th inner step."""
        if inner_step == 0 or inner_step % self.inner_steps:
            return ()
        return (Round(fragment=_WHOLE, op=Op.MEAN, inner_step=inner_step),)

    def emit(
        self, _round: Round, value: Tensor, shared: Tensors, _private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The pseudo-gradient, anchor - value."""
        anchor = shared[ANCHOR]
        require_flat(value, anchor.numel(), "the local value")
        require_flat(out, anchor.numel(), "the payload buffer")
        return Emitted(payload=torch.sub(anchor, value, out=out))

    @elementwise
    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """One Nesterov step. The workers go to the new anchor: see `Outer.settle`.

        `out["momentum"]` may be `result.value`, or `out["anchor"]` may be.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        lr, momentum = self.rates(round_, result)
        return step_anchor(shared, result.value, lr=lr, momentum=momentum, out=out)

    def rates(self, round_: Round, result: Result) -> tuple[float, float]:
        """Outer learning rate and momentum of a round: as set, or what follows from its inner step and its members."""
        lr = self.lr_of(result)
        if self.momentum is not None:
            return lr, self.momentum
        warmth = self.warmth(round_)
        if self.lr is None:
            lr = 1.0 - warmth * (1.0 - lr)
        return lr, warmth * DEFAULT_MOMENTUM

    def warmth(self, round_: Round) -> float:
        """How far the run has warmed up at a round: from 0 to 1, where it stays. 1 where a momentum is set."""
        return 1.0 if self.momentum is not None else min(1.0, round_.inner_step / warm_up_steps(self.inner_steps))

    def lr_of(self, result: Result) -> float:
        """The outer learning rate for what these members have given, when all is warm."""
        return default_outer_lr(effective_number(result)) if self.lr is None else self.lr


def warm_up_steps(inner_steps: int) -> int:
    """Inner steps until the defaults are what they stay, where a round has so many: 20 rounds, and at least 160.

    Without it short runs end up to 5 % worse; with 160 steps alone those of long rounds do (optim/README.md).
    """
    return max(_LEAST_WARM_UP_STEPS, _WARM_UP_ROUNDS * inner_steps)


def anchor_and_momentum(value: Tensor) -> dict[str, Tensor]:
    """Shared state of methods that step an anchor: a copy of the value, [numel], and zeros."""
    return {ANCHOR: value.clone(), MOMENTUM: torch.zeros_like(value)}


def step_anchor(shared: Tensors, delta: Tensor, *, lr: float, momentum: float, out: Tensors | None) -> Tensors:
    """The state after one Nesterov step of its anchor.

    Args:
        shared: with anchor and momentum; not written.
        delta: [numel], the averaged pseudo-gradient. It may be a tensor of `out`.
        lr: outer learning rate.
        momentum: in [0, 1).
        out: see `Outer.step`; None allocates. Its other tensors are left unset.

    Raises:
        ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
    """
    out = successor(shared, out)
    nesterov_step(
        anchor=shared[ANCHOR],
        momentum=shared[MOMENTUM],
        delta=delta,
        lr=lr,
        mu=momentum,
        anchor_out=out[ANCHOR],
        momentum_out=out[MOMENTUM],
    )
    return out


def effective_number(result: Result) -> float:
    """How many members of equal weight would make a mean as noisy: (Σw)² / Σw², from 1 to their number.

    The same bits on every machine. Source: Kish, Survey Sampling (1965).
    """
    if not result.weights:
        return float(len(result.members))
    heaviest = max(result.weights)
    shares = [weight / heaviest for weight in result.weights]
    total = math.fsum(shares)  # times itself: a power's last bit is the library's
    return max(1.0, total * total / math.fsum(share * share for share in shares))


def default_outer_lr(num_peers: float) -> float:
    """The best outer learning rate for a number of peers: 0.4 for one, 0.6 for two to four, 0.8 from eight on.

    Linear between, in plain arithmetic rather than logarithms, so that every peer computes the same number.

    Raises:
        ValueError: if num_peers < 1.

    Source: arXiv:2503.09799, models from 335M parameters up, momentum 0.9, H = 30.
    """
    if num_peers < 1:
        raise ValueError(f"num_peers must be at least 1, got {num_peers}")
    for (low, low_lr), (high, high_lr) in itertools.pairwise(_BEST_LR):
        if num_peers <= high:
            share = (num_peers - low) / (high - low)
            return low_lr * (1.0 - share) + high_lr * share
    return _BEST_LR[-1][1]
