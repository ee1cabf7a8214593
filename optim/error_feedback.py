# SPDX-License-Identifier: Apache-2.0
"""Error feedback around any method that averages differences: what a codec has lost is sent again.

    payload  = difference + residual
    residual <- payload - what the others decoded from it

Without it a coarse codec loses the same small numbers in every round. With it the sum of what has arrived is the sum of
all differences but for the newest residual, so a codec of two bits may be used (`twobit`).

Private state: the method's, and the residual. It moves with what was counted only: a payload that weighed nothing, or
whose round was given up, leaves the worker with the residual that was in it. The method sees its own difference.

What the members' mean loses when it is encoded once more, for all, comes back to nobody (collective/rounds/coded.py).

Source: 1-bit SGD (Seide et al., Interspeech 2014); why it converges: arXiv:1901.09847.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.outer import GRAD, PARAM, Op, successor
from isthmus.optim.wrapper import Wrapper, copy_into, first_difference, without

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Emitted, Outcome, Outer, Round, Settled, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

RESIDUAL: Final = "residual"
"""Name, in private state, of what this worker has still to send, [numel]: the one that methods with a residual use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """The method with a residual; rounds of other kinds than parameters are left as they are."""

    def fitted(self, table: FragmentTable, run: RunFacts | None = None, /) -> Self:
        """Around the method with all settings known.

        Raises:
            ValueError: the method has a residual of its own, or does not average differences.
        """
        outer = self.outer.fitted(table, run)
        if (problem := misfit(outer, table)) is not None:
            raise ValueError(f"error_feedback does not fit: {problem}; leave it out")
        return dataclasses.replace(self, outer=outer)

    def init_private(self, fragment: Fragment, shared: Tensors, value: Tensor, /) -> Tensors:
        """The method's, and zeros."""
        private = self.outer.init_private(fragment, shared, value)
        return private if fragment.kind != PARAM else {**private, RESIDUAL: torch.zeros_like(value)}

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The difference and the residual."""
        if RESIDUAL not in private:
            return self.outer.emit(round_, value, shared, private, work, out=out)
        emitted = self.outer.emit(round_, value, shared, without(RESIDUAL, private), work, out=out)
        assert emitted.kept is None, "only a method with a residual of its own keeps something"
        residual = private[RESIDUAL]
        emitted.payload.add_(residual)
        # Where the workers go on, an earlier round of the fragment may be settled first and write over it.
        return dataclasses.replace(emitted, kept=residual.clone() if round_.delay else residual)

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """What the method does, and the next residual.

        Raises:
            ValueError: if `out` shares memory with the private state.
        """
        if RESIDUAL not in outcome.private:
            return self.outer.settle(outcome, out=out)
        mine, private = outcome.contribution, successor(outcome.private, out)
        residual = private[RESIDUAL]
        given = None
        if mine is None:
            residual.copy_(outcome.private[RESIDUAL])
        else:
            assert mine.kept is not None, "emit keeps the residual"
            given = dataclasses.replace(mine, payload=mine.payload - mine.kept, kept=None)
            if outcome.result is None or mine.weight == 0.0:
                residual.copy_(mine.kept)
            else:
                mine.read_delivered(residual)
                torch.sub(mine.payload, residual, out=residual)
        bare = dataclasses.replace(outcome, contribution=given, private=without(RESIDUAL, outcome.private))
        settled = self.outer.settle(bare, out=without(RESIDUAL, private))
        copy_into(settled.private, private)
        return dataclasses.replace(settled, private=private)


def misfit(outer: Outer, table: FragmentTable) -> str | None:
    """Why a fitted method cannot have error feedback; None: it can."""
    if any(fragment.kind == GRAD for fragment in outer.fragments(table)):
        return "it exchanges gradients"
    for fragment in outer.fragments(table):
        value = torch.empty(fragment.numel, device="meta")
        if RESIDUAL in outer.init_private(fragment, outer.init(fragment, value), value):
            return "it has a residual of its own"
    try:
        round_ = first_difference(outer, table)
    except ValueError as error:
        return str(error)
    return None if round_.op is Op.MEAN else "its rounds are no means"
