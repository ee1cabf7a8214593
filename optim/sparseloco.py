# SPDX-License-Identifier: Apache-2.0
"""SparseLoCo: DiLoCo without outer momentum, whose workers send one element in 64 and remember the others.

    a_r = β e_r + (anchor - local_r)        Δ_r = sent(a_r)        e_r <- a_r - Δ_r
    anchor <- anchor - α · mean over all members of s_r Δ_r;        local_r <- anchor
    s_r = min(1, median norm / norm of Δ_r)                          (norm_guard; else 1)

What is sent are the k largest of each 4096 elements, a block of 64 x 64 of a matrix (optim/blocks.py), as sign and one
of two levels; the exchange does that. It tells what arrived, so the residual holds the errors of quantisation too. The
residual stands in for the outer momentum, which would hurt beside it.

Shared state: anchor, shapes. Private state: residual, in the order of the blocks. It follows only rounds that commit:
of an aborted one nothing remains, and the next difference from the same anchor holds the missed steps.

Where we leave public code on purpose:
    * The mean is over all members, as the paper has it: with equal weights 1/R of the sum. The code divides each
      element by the number of those who sent it, so what one alone sent counts as if all had. Its α of 1 is too short a
      step here, and ours is 3: see the table.
    * A run begins with dense rounds, `dense_steps` long: the mean of all elements, which is plain averaging. What is
      not sent in the first, steep descent is never caught up with. Deep gradient compression (arXiv:1712.01887) raises
      the sparsity slowly for that reason. A dense round with 4 bits sends as much as 4 sparse ones of 8 members, as 9
      of 4.
    * α enters once; the code multiplies by it twice.
    * Small tensors share runs of 4096 (optim/blocks.py). Runs that end with each tensor, whose last keeps its part of
      the k, make the loss 0.6 % higher; the code's rule, that each run however short keeps k, 0.1 % lower with a fifth
      more bytes. A seed makes 0.5 % (three seeds, H 15, 48 rounds, β .9, α 5, a warm start).
    * The guard judges a fragment, not each tensor; what it takes away is not given back to the residual.

Held-out loss against plain averaging, decoder of `scripts/bench convergence`, 4 workers, from its first weights, inner
rate 2e-3 (torch's C++ headers, then Python's library; H x rounds; empty: not run). In the first rows the dense rounds
were gathers of 8 bits, which cost slow links too much; the default's are means of 4 bits. In 40 rounds of 30 that costs
1.5 to 2.7 %:

    dense rounds, k, α          8 x 10           8 x 40           30 x 10           30 x 40
    none, 64, 2             +4.6   +8.0 %    +3.4   +2.1 %    +10.6   +6.0 %
    20, 64, 2               +0.3   +0.1      +0.0   +0.5
    20, 64, 3               +0.3   +0.1      -2.9   -1.0                         -2.4   -0.9 %
    20, 128, 2              +0.3   +0.1      -2.1   -0.7                         -2.6   -0.7
    means of 8 bits:
    20 (5 of H 30), 64, 3   +0.1   +0.0      -2.3   -1.4       +1.6   +1.4       -0.6   +0.9
    means of 4 bits:
    20, 64, 3: the default  -0.1   +0.1      -2.4   -0.6       +0.1   +0.1       +0.3   +0.6

Source: SparseLoCo (arXiv:2508.15706); settings and guard from Covenant-72B (arXiv:2603.08163).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.blocks import SHAPES, block_order, shapes_of, topk_codec
from isthmus.optim.diloco import warm_up_steps
from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import ANCHOR, PARAM, Emitted, Op, Outer, Round, Settled, successor
from isthmus.optim.registry import register
from isthmus.optim.stable import norm

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work

DENSE_CODEC: Final = "e3m0"
"""Of the means with which a run begins."""
RESIDUAL: Final = "residual"
"""Name, in private state, of what this worker wanted to send and could not."""

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)


@register("sparseloco")
@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLoCo(Outer):
    """SparseLoCo's settings; defaults are Covenant-72B's, but for α, which is 3, and for the first rounds.

    Raises:
        ValueError: if a setting is out of its range.
    """

    inner_steps: int = 30
    """H, inner steps between exchanges, >= 1."""
    dense_steps: int | None = None
    """Inner steps at the beginning whose rounds are means of all elements, of 4 bits each, >= 0. None: as long as
    DiLoCo's defaults warm up, 20 rounds and at least 160. Covenant-72B: 0."""
    topk: int = 64
    """k, elements sent of each 4096, from 1 to 4096; all of them travel as they are, without quantisation."""
    beta: float = 0.95
    """Share of the residual that is tried again, in [0, 1]; with 1 nothing is ever lost."""
    alpha: float = 3.0
    """Outer learning rate of the sparse rounds, > 0. Of the dense ones it is 1."""
    late_alpha: float = 1.95
    """Outer learning rate from `late_step` on, > 0."""
    late_step: int | None = None
    """Global inner step, >= 1, when the loss has come to a plateau; None: `alpha` to the end."""
    norm_guard: bool = True
    """Whether a member that goes further than the median one is scaled down to it."""

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps must be at least 1, got {self.inner_steps}")
        if self.dense_steps is not None and self.dense_steps < 0:
            raise ValueError(f"dense_steps must be at least 0, got {self.dense_steps}")
        topk_codec(self.topk)
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must be in [0, 1], got {self.beta}")
        for name, value in (("alpha", self.alpha), ("late_alpha", self.late_alpha)):
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.late_step is not None and self.late_step < 1:
            raise ValueError(f"late_step must be at least 1, got {self.late_step}")

    @property
    def reads_payloads(self) -> bool:
        """Those of sparse rounds."""
        return True

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """One fragment: the whole flat vector."""
        return (table.whole(),)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Anchor: a copy of the value."""
        require_flat(value, fragment.numel, "the initial value")
        return {ANCHOR: value.clone(), SHAPES: shapes_of(fragment)}

    def init_private(self, _fragment: Fragment, _shared: Tensors, value: Tensor, /) -> Tensors:
        """Residual: zeros."""
        return {RESIDUAL: torch.zeros_like(value)}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """After every H-th inner step everybody sends to everybody, and waits. The first rounds are means."""
        if inner_step == 0 or inner_step % self.inner_steps:
            return ()
        if inner_step <= (warm_up_steps(self.inner_steps) if self.dense_steps is None else self.dense_steps):
            return (Round(fragment=_WHOLE, op=Op.MEAN, inner_step=inner_step, codec=DENSE_CODEC),)
        return (Round(fragment=_WHOLE, op=Op.GATHER, inner_step=inner_step, codec=topk_codec(self.topk)),)

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """a = β e + (anchor - value), in the order of the blocks; of a dense round anchor - value."""
        anchor = shared[ANCHOR]
        require_flat(value, anchor.numel(), "the local value")
        if round_.op is Op.MEAN:
            return Emitted(payload=torch.sub(anchor, value, out=out))
        block_order(shared[SHAPES]).to_blocks(anchor - value, out=out)
        return Emitted(payload=out.add_(private[RESIDUAL], alpha=self.beta))

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Descend along the mean of what arrived.

        A gather's result is read row by row: [members, numel] is all that grows with the members.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        out = successor(shared, out)
        anchor = shared[ANCHOR]
        out[SHAPES].copy_(shared[SHAPES])
        if round_.op is Op.MEAN:
            torch.sub(anchor, result.value, out=out[ANCHOR])
            return out
        total, scratch = torch.zeros_like(anchor), torch.empty_like(anchor)
        for row, share in zip(result.value, self._shares(result), strict=True):
            total += torch.mul(row, share, out=scratch)
        step = block_order(shared[SHAPES]).from_blocks(total, out=scratch)
        step *= self._alpha_at(round_.inner_step)
        torch.sub(anchor, step, out=out[ANCHOR])
        return out

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """The worker goes to the new anchor, and remembers what the round did not deliver of its payload.

        What was not counted stays as it is, work and residual, so that the next payload holds all that this one held.
        """
        mine = outcome.contribution
        if outcome.result is None or mine is None or mine.weight == 0.0 or outcome.round_.op is Op.MEAN:
            return Outer.settle(self, outcome)
        out = successor(outcome.private, out)
        mine.read_delivered(out[RESIDUAL])
        torch.sub(mine.payload, out[RESIDUAL], out=out[RESIDUAL])
        return Settled.replaced(out, outcome.after[ANCHOR])

    def _shares(self, result: Result) -> list[float]:
        """What each member's payload is multiplied by: 1/R with equal weights, less for those who go too far."""
        scales = [1.0] * len(result.members)
        if self.norm_guard:
            norms = [norm(row) for row in result.value]
            median = statistics.median(norms)
            scales = [median / length if length > median else 1.0 for length in norms]
        return [scale * weight / result.weight_sum for scale, weight in zip(scales, result.weights, strict=True)]

    def _alpha_at(self, inner_step: int) -> float:
        is_late = self.late_step is not None and inner_step >= self.late_step
        return self.late_alpha if is_late else self.alpha
