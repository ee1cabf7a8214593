# SPDX-License-Identifier: Apache-2.0
"""NoLoCo: no all-reduce. Every H inner steps workers meet in random pairs, and no value is ever equal everywhere.

Worker i has slow weights φ_i, from which it set out, and fast ones θ_i, which it trains. It meets worker j:

    m_i <- mu * m_i + lr * (mean(θ_i, θ_j) - φ_i);   φ_i <- φ_i + m_i;   θ_i <- φ_i

The released code sends two tensors, θ - φ and φ, and adds lr * (mean(φ_i, φ_j) - φ_i), the pull to each other, to
lr * mean(θ - φ), the pull of the gradient. With one factor for both, as its settings have it, the φ of the pair cancel:
θ alone is enough, half the bytes. The paper's general form, another factor for each, would need both.

It is heavy-ball, whatever the paper calls it: the mean of a pair moves as one worker that feels the mean of both. There
is no shared state and no common result: average the workers when the run ends. A joiner starts from its donor's
own parameters. Weights of the members are not read: a pair is one half each.

The payload is the parameters themselves, not a difference: a codec must be right to a small part of the largest value.
8 bits or more; a sparse one would set most parameters to zero.

Source: NoLoCo (arXiv:2506.10911), section 3, and its released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.diloco import MOMENTUM, DiLoCo
from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import PARAM, Emitted, Op, Outer, Round, Settled, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work

SLOW: Final = "slow"
"""Name, in private state, of the slow weights φ."""

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)


@register("noloco")
@dataclass(frozen=True, slots=True, kw_only=True)
class NoLoCo(Outer):
    """NoLoCo's settings; defaults are a pair's plain mean. Private state: slow weights and momentum.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float = 1.0
    """Outer learning rate and pull of a pair to its mean, in (0, 2 * (1 + momentum)). Beyond, a pair drives apart. The
    released code: 0.7."""
    momentum: float = 0.0
    """Outer heavy-ball momentum, in [0, 1). The released code: 0.5; in short runs that does harm."""
    inner_steps: int = 50
    """H, inner steps between meetings, >= 1."""

    def __post_init__(self) -> None:
        DiLoCo(lr=self.lr, momentum=self.momentum, inner_steps=self.inner_steps)  # the same ranges
        if self.lr >= 2.0 * (1.0 + self.momentum):
            raise ValueError(f"lr must be less than 2 * (1 + momentum), got lr={self.lr}, momentum={self.momentum}")

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """One fragment: the whole flat vector."""
        return (table.whole(),)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Nothing is shared."""
        require_flat(value, fragment.numel, "the initial value")
        return {}

    def init_private(self, _fragment: Fragment, _shared: Tensors, value: Tensor, /) -> Tensors:
        """Slow weights: a copy of the value. Momentum: zeros."""
        return {SLOW: value.clone(), MOMENTUM: torch.zeros_like(value)}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking meeting after every H-th inner step; who meets whom is the collective's to draw."""
        if inner_step == 0 or inner_step % self.inner_steps:
            return ()
        return (Round(fragment=_WHOLE, op=Op.PAIR, inner_step=inner_step, keeps_value=True),)

    def emit(
        self, _round: Round, value: Tensor, _shared: Tensors, private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The fast weights, as they are."""
        numel = private[SLOW].numel()
        require_flat(value, numel, "the local value")
        require_flat(out, numel, "the payload buffer")
        return Emitted(payload=out.copy_(value))

    def step(self, _round: Round, _result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Nothing shared moves."""
        del out
        return shared

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """A step towards the mean of the pair.

        The worker's own part is what it sent before the codec: closer to the truth than what the other decoded. Who met
        nobody trains on; the slow weights stay, so the next meeting has these steps too.

        Raises:
            ValueError: if `out` shares memory with the private state.
        """
        mine, result = outcome.contribution, outcome.result
        if result is None or mine is None:
            return Settled.untouched(outcome.private)
        out = successor(outcome.private, out)
        slow, momentum = outcome.private[SLOW], out[MOMENTUM]
        # Whichever tensor of `out` may be `result.value`: it is read once, here.
        torch.add(result.value, mine.payload, out=momentum)
        momentum.mul_(0.5).sub_(slow).mul_(self.lr)
        momentum.add_(outcome.private[MOMENTUM], alpha=self.momentum)  # private: its rounding is nobody else's
        torch.add(slow, momentum, out=out[SLOW])
        return Settled.replaced(out, out[SLOW])
