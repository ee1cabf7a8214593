# SPDX-License-Identifier: Apache-2.0
"""AutoLoCo: DiLoCo whose rounds grow as the inner learning rate falls, with outer steps that know how long they were.

A base round is one at the peak learning rate: H inner steps at factor 1. A round from inner step s to t has

    p = (t - s) / H                                     its length in base rounds
    g = Σ (lr of each of its steps) / (H · peak lr)     how far it could go, in base rounds
    momentum <- mu^p · momentum + delta / g
    anchor   <- anchor - lr · g · (delta / g + mu^p · momentum)        (with the new momentum)

So a long round forgets as much as the base rounds would have that fit into it; momentum is made of what base rounds
would have done; and the outer learning rate still scales what the workers did: without momentum the step is
lr · delta, whatever the round. With a constant learning rate all rounds are base rounds, p = g = 1, and this is DiLoCo
bit for bit. An aborted round makes the next one longer, and it is treated as that.

Shared state: anchor, momentum, and the inner step of the last committed round. Private state: none.

Source: a secondary account of AutoLoCo (2026); its own text was not at hand. From the account: delta is normalised by
the accumulated inner learning rate, the momentum of uneven rounds is mu^p, 73 rounds gave loss 2.7842 where QSR's 41
gave 2.8793 and DiLoCo's 100 gave 2.8020 (215M parameters, C4). Our reading: when rounds end (QSR's rule), what a base
round is, that p counts inner steps, and that g comes back as a factor of the step. Without that factor an outer step
would not shrink with the inner learning rate, and of a long round most work would be thrown away.

Our default learning rate follows the momentum that a round keeps, on the line on which DiLoCo's warm up: 1 without
momentum, the rate of those who give with the whole of it. Rounds of three base rounds and more keep little; to step 0.6
of their mean made the loss up to 3.3 % higher than averaging with as many rounds (optim/README.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.diloco import DiLoCo, step_anchor
from isthmus.optim.qsr import MAX_STEPS, QSR
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment
    from isthmus.optim.outer import Result, Round, Tensors

COMMITTED_AT: Final = "committed_at"
"""Name, in shared state, of the inner step of the last committed round, [1]: exact in fp32 up to 2^24, `MAX_STEPS`."""

_KEPT_BITS: Final = 12


@register("autoloco")
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLoCo(QSR):
    """AutoLoCo's settings: QSR's, with DiLoCo's outer step.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float | None = None
    """Outer learning rate, > 0 and constant. None: DiLoCo's."""
    momentum: float | None = None
    """Outer Nesterov momentum over a base round, mu, in [0, 1). None: DiLoCo's."""
    inner_steps: int = 100
    """H_base, inner steps of the shortest round, >= 1. DiLoCo's; the account names none."""

    def __post_init__(self) -> None:
        QSR.__post_init__(self)
        if self.total_steps is not None and self.total_steps > MAX_STEPS:
            raise ValueError(f"total_steps must be at most {MAX_STEPS}, got {self.total_steps}")

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """DiLoCo's, and step 0."""
        return {**DiLoCo.init(self, fragment, value), COMMITTED_AT: torch.zeros(1)}

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """One Nesterov step that knows how long the round was. The workers go to the new anchor.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        start = int(shared[COMMITTED_AT].item())
        length, reach = self.measures(start, round_.inner_step)
        lr, momentum = self._rates_of(length, *self.rates(round_, result))
        stepped = step_anchor(
            shared,
            result.value if reach == 1.0 else result.value / reach,
            lr=lr * reach,
            momentum=momentum,
            out=out,
        )
        stepped[COMMITTED_AT].fill_(round_.inner_step)
        return stepped

    def _rates_of(self, length: float, lr: float, momentum: float) -> tuple[float, float]:
        """Those of a round of `length` base rounds. A learning rate that nobody set is 1 where no momentum is left."""
        if length == 1.0:
            return lr, momentum
        kept = _rounded(momentum**length)
        if self.lr is None and momentum > 0.0:
            lr = 1.0 - (1.0 - lr) * (kept / momentum)
        return lr, kept

    def measures(self, start: int, stop: int) -> tuple[float, float]:
        """(p, g) of the inner steps from `start` to `stop`; g is positive and has few bits, equal on every machine."""
        base = self._steps_at(1.0)
        factor = self.lr_factor()
        reach = math.fsum(factor(step) for step in range(start, stop)) / base
        return (stop - start) / base, max(_rounded(reach), 2.0**-_KEPT_BITS / base)


def _rounded(value: float) -> float:
    """To a few bits. Libraries differ in the last bit of a cosine or a power; here it would become shared state."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, _KEPT_BITS)), exponent - _KEPT_BITS)
