# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: the gradient is averaged in every step. The baseline of all that communicates less.

    every inner step:   g <- mean over workers of g;   then the inner optimizer

Workers that start alike stay alike, since all take the same step; see resync.py for those that do not. Shared state:
the last mean of the parameters. Private state: none.

Source: PyTorch DDP (arXiv:2006.15704). Weights are the engine's: with the sizes of the batches, the mean is the
gradient of the common batch, also where those differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import GRAD, PARAM, Emitted, Op, Round, Settled
from isthmus.optim.registry import register
from isthmus.optim.resync import GradientMethod

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.outer import Outcome, Tensors, Work

_GRADIENT: Final = FragmentKey(kind=GRAD, index=0)


@register("data_parallel")
@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(GradientMethod):
    """Settings of data parallelism.

    Raises:
        ValueError: if a setting is out of its range.
    """

    def gradient_round(self, inner_step: int) -> Round:
        """A mean."""
        return Round(fragment=_GRADIENT, op=Op.MEAN, inner_step=inner_step, keeps_value=True)

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The gradient itself."""
        if round_.fragment.kind == PARAM:
            return GradientMethod.emit(self, round_, value, shared, private, work, out=out)
        require_flat(value, value.numel(), "the gradient")
        require_flat(out, value.numel(), "the payload buffer")
        return Emitted(payload=out.copy_(value))

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """Everybody takes the mean. A gradient that was not reduced becomes zero: no worker steps on its own, alone.

        That step's samples are lost to the run, as where a failed step is skipped, but no parameter had moved yet. An
        inner optimizer with momentum coasts for this step, with the same motion on all workers.
        """
        if outcome.round_.fragment.kind == PARAM:
            return GradientMethod.settle(self, outcome, out=out)
        mine = outcome.contribution
        if outcome.result is not None:
            return Settled.replaced(outcome.private, outcome.result.value)
        if mine is None:
            return Settled.untouched(outcome.private)
        return Settled.replaced(outcome.private, torch.zeros_like(mine.payload))
