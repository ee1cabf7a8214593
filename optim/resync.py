# SPDX-License-Identifier: Apache-2.0
"""What methods that exchange gradients share: now and then the parameters themselves are averaged.

    every inner step:            the method's own round of the gradient
    every `resync_steps` steps:  anchor <- mean of the parameters;   local <- anchor;   then the inner step

Workers that take the same steps from the same gradients stay alike; but a device that rounds otherwise, an inner
optimizer that is younger, or a gradient that did not arrive takes one apart, and no gradient brings it back. A joiner
has nothing to begin with but what was last agreed on: the anchor. It is up to `resync_steps` inner steps behind the
others until the next mean. The mean is of the parameters as the step's gradient was computed at them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import ANCHOR, GRAD, PARAM, Emitted, Op, Outer, Round, successor

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Result, Tensors, Work

_PARAMETERS: Final = FragmentKey(kind=PARAM, index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMethod(Outer):
    """See the module. Shared state: the last mean of the parameters, the anchor; of the gradient what a method adds.

    Raises:
        ValueError: if a setting is out of its range.
    """

    resync_steps: int = 50
    """Inner steps between two means of the parameters themselves, which travel exactly, >= 1."""

    def __post_init__(self) -> None:
        if self.resync_steps < 1:
            raise ValueError(f"resync_steps must be at least 1, got {self.resync_steps}")

    @property
    def steps_may_differ(self) -> bool:
        """No: each inner step takes the mean of all workers' gradients, and all take the same step."""
        return False

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """The whole gradient, and all parameters."""
        return (table.whole(GRAD), table.whole(PARAM))

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Anchor: a copy of the parameters. Of the gradient: nothing."""
        require_flat(value, fragment.numel, "the initial value")
        return {ANCHOR: value.clone()} if fragment.kind == PARAM else {}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A round of the gradient in every inner step; of the parameters too when it is time."""
        if inner_step == 0:
            return ()
        gradient = self.gradient_round(inner_step)
        if inner_step % self.resync_steps:
            return (gradient,)
        return (Round(fragment=_PARAMETERS, op=Op.MEAN, inner_step=inner_step, codec="raw"), gradient)

    @abstractmethod
    def gradient_round(self, inner_step: int) -> Round:
        """The method's own round."""

    def emit(
        self, _round: Round, value: Tensor, shared: Tensors, _private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """Of the parameters anchor - value."""
        anchor = shared[ANCHOR]
        require_flat(value, anchor.numel(), "the local value")
        require_flat(out, anchor.numel(), "the payload buffer")
        return Emitted(payload=torch.sub(anchor, value, out=out))

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """The mean of the parameters; a gradient moves nothing that is shared.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        if round_.fragment.kind != PARAM:
            return shared
        out = successor(shared, out)
        require_flat(result.value, shared[ANCHOR].numel(), "the mean of the payloads")
        torch.sub(shared[ANCHOR], result.value, out=out[ANCHOR])
        return out
