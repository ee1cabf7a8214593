# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: the gradient is averaged in every step. The baseline of all that communicates less.

    every inner step:   g <- mean over workers of g;   then the inner optimizer

Workers that start alike stay alike, since all take the same step. Shared and private state: none. There is no anchor:
the workers' own parameters are the newest there are, and a joiner starts from a donor's.

A worker whose inner optimizer is younger, or whose device rounds otherwise, takes slightly other steps from the same
gradient, and no gradient brings it back. `resync_steps` does, by averaging the parameters now and then.

Source: PyTorch DDP (arXiv:2006.15704). Weights are the engine's: with the sizes of the batches, the mean is the
gradient of the common batch, also where those differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import GRAD, PARAM, Emitted, Op, Outer, Round, Settled
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work


@register("data_parallel")
@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(Outer):
    """Settings of data parallelism.

    Raises:
        ValueError: if a setting is out of its range.
    """

    resync_steps: int = 0
    """Inner steps between averages of the parameters themselves, >= 1, sent exactly; 0: never. Needed where devices
    differ, and where members join whose inner optimizer has moments."""

    def __post_init__(self) -> None:
        if self.resync_steps < 0:
            raise ValueError(f"resync_steps must not be negative, got {self.resync_steps}")

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """The whole gradient; the parameters too if they are averaged."""
        return tuple(table.whole(kind) for kind in ((GRAD, PARAM) if self.resync_steps else (GRAD,)))

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Nothing."""
        require_flat(value, fragment.numel, "the initial value")
        return {}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A mean of the gradient in every inner step, and one of the parameters when it is time."""
        if inner_step == 0:
            return ()
        gradient = Round(fragment=FragmentKey(kind=GRAD, index=0), op=Op.MEAN, inner_step=inner_step, keeps_value=True)
        if not self.resync_steps or inner_step % self.resync_steps:
            return (gradient,)
        whole = FragmentKey(kind=PARAM, index=0)
        return (gradient, Round(fragment=whole, op=Op.MEAN, inner_step=inner_step, codec="raw", keeps_value=True))

    def emit(
        self, _round: Round, value: Tensor, _shared: Tensors, _private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The value itself."""
        require_flat(value, value.numel(), "the local value")
        require_flat(out, value.numel(), "the payload buffer")
        return Emitted(payload=out.copy_(value))

    def step(self, _round: Round, _result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Nothing shared moves."""
        del out
        return shared

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """Everybody takes the mean. A gradient that was not reduced becomes zero: no worker steps on its own, alone.

        That step's samples are lost to the run, as where a failed step is skipped, but no parameter had moved yet. An
        inner optimizer with momentum coasts for this step, with the same motion on all workers.
        """
        del out
        mine = outcome.contribution
        if outcome.result is not None:
            return Settled.replaced(outcome.private, outcome.result.value)
        if outcome.round_.fragment.kind == PARAM or mine is None:
            return Settled.untouched(outcome.private)
        return Settled.replaced(outcome.private, torch.zeros_like(mine.payload))
