# SPDX-License-Identifier: Apache-2.0
"""One-step delayed DiLoCo: the mean travels during the whole next outer round.

After every H inner steps, block k of them:

    delta_k = mean over workers of (anchor - local)               is sent
    anchor <- Nesterov(anchor, delta_(k-1));   local <- anchor    with the mean that was sent a block ago

The first block finds no mean and only sends its workers back; it is as if a round of zeros had been sent at inner step
0, and that is what `plan` does. Workers never wait unless the network takes longer than a block.

A payload is the only copy of its block, for its worker goes back to the anchor. So when a round is aborted its payload
is carried: added to what the worker sends next. Both belong together. Only going back would lose the block, only
carrying would send it twice.

So is the payload of a worker that the others went on without. Where it was in the middle of a block, that ends there:
what it has done of the block is the payload, and the next one begins (optim/course.py).

Shared state: anchor and momentum. Private state: what is carried, zeros but after an abort.

Source: PCCL's asynchronous DiLoCo, and arXiv:2502.12996, algorithm 2. Untuned it is much worse than DiLoCo: at 500M and
H = 30 a loss of 3.01 instead of 2.67, and 2.73 with a lower learning rate.

On purpose unlike public code: a joiner needs no second copy of the state when the round in flight lands. It settles it
like everybody, without a contribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import ANCHOR, PARAM, Emitted, Op, Round, Settled, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment
    from isthmus.optim.outer import Outcome, Tensors, Work

CARRIED: Final = "carried"
"""Name, in private state, of the work of an aborted round, which the next payload takes along."""

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)


@register("delayed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed(DiLoCo):
    """Settings of delayed DiLoCo.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float | None = 1.0
    """Outer learning rate, > 0 and constant: 1 without momentum is plain averaging. The paper: 0.4 with 0.9. None: what
    is best without delay (see DiLoCo)."""
    momentum: float = 0.0
    """Outer Nesterov momentum, in [0, 1). The paper: 0.9, for thousands of rounds; in short runs any does harm."""
    inner_steps: int = 30
    """H, inner steps between exchanges and inner steps that one may take, >= 1."""
    overlap: bool = True
    """Whether the workers go on during an exchange. False: they wait, which is DiLoCo."""

    def init_private(self, _fragment: Fragment, _shared: Tensors, value: Tensor, /) -> Tensors:
        """Nothing is carried."""
        return {CARRIED: torch.zeros_like(value)}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A mean after every H-th inner step, due H later; the first, of zeros, before all training."""
        if inner_step % self.inner_steps or (inner_step == 0 and not self.overlap):
            return ()
        delay = self.inner_steps if self.overlap else 0
        return (Round(fragment=_WHOLE, op=Op.MEAN, inner_step=inner_step, delay=delay),)

    def emit(
        self, _round: Round, value: Tensor, shared: Tensors, private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """How far the worker went in this block, and what is carried."""
        start = self.start(shared, private)
        require_flat(value, start.numel(), "the local value")
        require_flat(out, start.numel(), "the payload buffer")
        return Emitted(payload=torch.sub(start, value, out=out).add_(private[CARRIED]))

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """The workers begin the next block where it starts, and take along what was not counted.

        What was carried until now is in the payload that is in flight.

        Raises:
            ValueError: if `out` shares memory with the private state.
        """
        if outcome.result is None and not outcome.round_.delay:
            return Settled.untouched(outcome.private)
        private = self.next_private(outcome, successor(outcome.private, out))
        return Settled.replaced(private, self.start(outcome.after, private))

    def next_private(self, outcome: Outcome, out: Tensors) -> Tensors:
        """The private state after a round, in `out`, which is returned."""
        if outcome.result is None and outcome.contribution is not None:
            out[CARRIED].copy_(outcome.contribution.payload)
        else:
            out[CARRIED].zero_()
        return out

    def start(self, shared: Tensors, _private: Tensors) -> Tensor:
        """Where this worker begins a block, [numel], read-only."""
        return shared[ANCHOR]
