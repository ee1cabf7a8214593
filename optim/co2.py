# SPDX-License-Identifier: Apache-2.0
"""CO2: heavy-ball momentum on parameters that were averaged during the block before.

After every tau inner steps, block k of them, with anchor_k where it began:

    mean of the local parameters x_k                     is sent
    momentum <- mu * momentum + (anchor_(k-1) - mean x_(k-1)) / penalty
    momentum <- clamp(momentum, -clip, clip)
    anchor   <- anchor - lr * momentum;   local <- anchor

We send anchor_k - x_k instead of x_k: its mean is what the formula needs, no earlier anchor has to be kept, and an
aborted round can be carried as in delayed DiLoCo, of which this is one with another outer step.

Shared state: anchor and momentum. Private state: what is carried, zeros but after an abort.

Source: CO2 (arXiv:2401.16265).

On purpose unlike the released code:
    * Its clip computes clamped values and discards them, so nothing is clipped. Ours clips. What it cuts off is lost.
    * Its averaging works on the parameters while they are being trained. Ours takes what they were after the block.
    * A mean is compared with the anchor of its own block. With the newest one, even and odd blocks would, at momentum 0
      and lr 1, be two runs that never meet.

Like the released code, the penalty is a constant. The paper's follows the staleness gap from block to block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isthmus.optim.delayed import Delayed
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.flat import require_flat
from isthmus.optim.outer import ANCHOR, elementwise, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from isthmus.optim.outer import Result, Round, Tensors


@register("co2")
@dataclass(frozen=True, slots=True, kw_only=True)
class CO2(Delayed):
    """CO2's settings; defaults are the released code's, but for the momentum, and for its clip, which is off there.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float | None = 1.0
    """Outer learning rate, > 0 and constant. None: DiLoCo's."""
    momentum: float = 0.0
    """Outer momentum, in [0, 1). The released code: 0.5, its example 0.2; in short runs any does harm."""
    inner_steps: int = 48
    """tau, inner steps between exchanges and inner steps that one may take, >= 1."""
    penalty: float = 1.0
    """Lambda, by which stale differences are divided, >= 1 and constant."""
    clip: float = 1.0
    """phi, the largest magnitude of an element of the momentum, > 0; infinity: no clip."""

    def __post_init__(self) -> None:
        Delayed.__post_init__(self)
        if not 1.0 <= self.penalty < float("inf"):
            raise ValueError(f"penalty must be finite and at least 1, got {self.penalty}")
        if not self.clip > 0.0:
            raise ValueError(f"clip must be positive, got {self.clip}")

    @elementwise
    def step(self, _round: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """One heavy-ball step. The workers begin the next block at the new anchor.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        out = successor(shared, out)
        require_flat(result.value, shared[ANCHOR].numel(), "the mean")
        # Separately rounded operations, the same bits everywhere. First, as `out` may be the memory of the mean.
        step = torch.div(result.value, self.penalty)
        momentum = torch.mul(shared[MOMENTUM], self.momentum, out=out[MOMENTUM])
        torch.add(momentum, step, out=momentum)
        torch.clamp(momentum, min=-self.clip, max=self.clip, out=momentum)
        torch.mul(momentum, self.lr_of(result), out=step)
        torch.sub(shared[ANCHOR], step, out=out[ANCHOR])
        return out
