# SPDX-License-Identifier: Apache-2.0
"""DeMo: data parallelism whose workers keep their momentum and send only its strongest frequencies, at every step.

    d <- decay · d + gradient;    q = sent(DCT(d));    d <- d - IDCT(q)
    per frequency: mean of q over those who sent it;   D = IDCT(mean)
    the inner optimizer steps along sign(D) in place of the gradient

The transform is linear and orthonormal, so we keep d as its coefficients, DCT(d): they are what is sent, and what
arrived is subtracted from them as it is. Blocks of up to 64 x 64 are transformed (optim/blocks.py, optim/dct.py); of
each 4096 coefficients the k largest are sent, by the exchange, which tells what arrived.

The inner optimizer must be plain SGD: parameters <- parameters · (1 - lr · weight decay) - lr · sign(D). d takes the
place of Adam's two moments. No anchor calls the workers back: they stay together because D has the same bits for all,
so all must take every step, and on different hardware the inner optimizer may still round them an ulp apart.

All this is about the gradient; the parameters are averaged now and then, see resync.py. Shared state: the last mean of
the parameters. Private state: shapes, and momentum in the order of the blocks. After an aborted round nobody moves, but
for the weight decay, and the momentum keeps the gradient.

Where we leave public code on purpose: the first `warm_up_steps` send 16 times as many coefficients, for what they
hold back is too old when it is sent (optim/README.md). The learning rate enters once, in the step; in the code also the
gradient is multiplied by it before it is added to d, so with sign only its changes count there, and without sign the
step is lr². Errors of quantisation stay in d. If all coefficients are sent, each worker has sent each of them, zeros
too. A vector's coefficients share the bytes with all others; the code sends 32 of every 64. Sums are in the order of
the members, not in that of a GPU's threads.

Held-out loss against DiLoCo's plain averaging every 8 steps, decoder of `scripts/bench convergence` from its first
weights, 4 workers and, of 80 steps, 2 (rate 2e-3; torch's C++ headers, then Python's library):

    first 160 steps send       80 steps           320 steps          80 steps, 2 workers
    k                       +7.8   +7.0 %     +14.0   +7.2 %
    8 k                     -2.7   +0.3        -4.7   -0.7            -0.3   +4.2 %
    16 k, the default       -4.0   -0.6        -5.9   -3.4            -2.4   +2.3

Source: DeMo (arXiv:2411.19870).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.blocks import ALL, RUN_NUMEL, SHAPES, block_order, shapes_of, topk_codec
from isthmus.optim.dct import dct2, idct2
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import GRAD, PARAM, Emitted, Op, Round, Settled, successor
from isthmus.optim.registry import register
from isthmus.optim.resync import GradientMethod

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

_EARLY_FACTOR: Final = 16
_GRADIENT: Final = FragmentKey(kind=GRAD, index=0)


@register("demo")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeMo(GradientMethod):
    """DeMo's settings; defaults are those of its public code, but for the first steps.

    Raises:
        ValueError: if a setting is out of its range.
    """

    decay: float = 0.999
    """Share of the momentum that a step keeps, in [0, 1]."""
    topk: int = 32
    """k, coefficients sent of each 4096, from 1 to 4096; all of them travel as they are, without quantisation."""
    warm_up_steps: int = 160
    """Inner steps at the beginning that send 16 times as many coefficients, >= 0. The public code: 0."""
    sign: bool = True
    """Whether the step has size lr in every element; else it is lr times the mean of what was sent."""

    def __post_init__(self) -> None:
        GradientMethod.__post_init__(self)
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        topk_codec(self.topk)
        if self.warm_up_steps < 0:
            raise ValueError(f"warm_up_steps must be at least 0, got {self.warm_up_steps}")

    def fitted(self, _table: FragmentTable, run: RunFacts | None = None, /) -> DeMo:
        """The same.

        Raises:
            ValueError: if the run has another inner optimizer than plain SGD.
        """
        if run is not None and run.inner_type not in (None, "sgd"):
            raise ValueError(f"its inner optimizer must be plain SGD (sgd), not inner.type {run.inner_type}")
        return self

    def init_private(self, fragment: Fragment, _shared: Tensors, value: Tensor, /) -> Tensors:
        """Of the gradient momentum, zeros, and shapes."""
        return {} if fragment.kind == PARAM else {MOMENTUM: torch.zeros_like(value), SHAPES: shapes_of(fragment)}

    def gradient_round(self, inner_step: int) -> Round:
        """Everybody sends to everybody."""
        is_early = inner_step <= self.warm_up_steps
        codec = topk_codec(min(_EARLY_FACTOR * self.topk, RUN_NUMEL) if is_early else self.topk)
        return Round(fragment=_GRADIENT, op=Op.GATHER, inner_step=inner_step, codec=codec, keeps_value=True)

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """decay · d + gradient, as coefficients."""
        if round_.fragment.kind == PARAM:
            return GradientMethod.emit(self, round_, value, shared, private, work, out=out)
        momentum = private[MOMENTUM]
        require_flat(out, momentum.numel(), "the payload buffer")
        order = block_order(private[SHAPES])
        gradient = order.to_blocks(value, out=torch.empty_like(momentum))
        for blocks, place in zip(order.batches(gradient), order.batches(out), strict=True):
            dct2(blocks, out=place)
        return Emitted(payload=out.add_(momentum, alpha=self.decay))

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """Take what arrived out of the momentum; the target is the step's direction, in place of the gradient.

        Without a result the momentum keeps this gradient for a later round. Nobody follows it alone: the step has no
        direction.

        Raises:
            ValueError: if `out` shares memory with the private state.
        """
        if outcome.round_.fragment.kind == PARAM:
            return GradientMethod.settle(self, outcome, out=out)
        mine, result = outcome.contribution, outcome.result
        out = successor(outcome.private, out)
        out[SHAPES].copy_(outcome.private[SHAPES])
        momentum = out[MOMENTUM].copy_(outcome.private[MOMENTUM] if mine is None else mine.payload)
        if result is None:
            return Settled.replaced(out, torch.zeros_like(momentum))
        mean, scratch = _mean(result, are_zeros_sent=outcome.round_.codec == ALL)
        if mine is not None and mine.weight > 0.0:
            mine.read_delivered(scratch)
            momentum.sub_(scratch)
        order = block_order(outcome.private[SHAPES])
        for blocks in order.batches(mean):
            idct2(blocks, out=blocks)
        target = order.from_blocks(mean, out=scratch)
        return Settled.replaced(out, target.sign_() if self.sign else target)


def _mean(result: Result, *, are_zeros_sent: bool) -> tuple[Tensor, Tensor]:
    """Per element the mean over those who sent it, 0 if nobody did: [numel]; and as much memory to write to."""
    total, senders = torch.zeros_like(result.value[0]), torch.zeros_like(result.value[0])
    scratch = torch.empty_like(total)
    for row, weight in zip(result.value, result.weights, strict=True):
        total += torch.mul(row, weight, out=scratch)
        senders += weight if are_zeros_sent else scratch.copy_(row != 0.0).mul_(weight)
    return total.div_(senders.masked_fill_(senders == 0.0, 1.0)), scratch
