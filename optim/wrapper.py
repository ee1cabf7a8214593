# SPDX-License-Identifier: Apache-2.0
"""A method around another one: it answers as that one does, and whoever derives from it changes what it must.

It must not know what is changed.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isthmus.optim.outer import ANCHOR, PARAM, Outer
from isthmus.optim.outer_plan import OuterPlan

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Emitted, Outcome, Result, Round, Settled, Tensors, Work
    from isthmus.optim.run_facts import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper(Outer):
    """See the module."""

    outer: Outer
    """The method."""

    @property
    def counts_from_anchor(self) -> bool:
        """Whether the method's payloads do."""
        return self.outer.counts_from_anchor

    @property
    def steps_may_differ(self) -> bool:
        """Whether they may under the method."""
        return self.outer.steps_may_differ

    @property
    def reads_payloads(self) -> bool:
        """Whether the method does."""
        return self.outer.reads_payloads

    def fitted(self, table: FragmentTable, run: RunFacts | None = None, /) -> Self:
        """The same around the method with all settings known."""
        return dataclasses.replace(self, outer=self.outer.fitted(table, run))

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Those of the method."""
        return self.outer.fragments(table)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """The method's shared state."""
        return self.outer.init(fragment, value)

    def init_private(self, fragment: Fragment, shared: Tensors, value: Tensor, /) -> Tensors:
        """The method's private state."""
        return self.outer.init_private(fragment, shared, value)

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The method's rounds."""
        return self.outer.plan(inner_step)

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The method's payload."""
        return self.outer.emit(round_, value, shared, private, work, out=out)

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """The method's next state."""
        return self.outer.step(round_, result, shared, out=out)

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """What the method does."""
        return self.outer.settle(outcome, out=out)


def without(name: str, state: Tensors) -> dict[str, Tensor]:
    """A state but for one tensor of the wrapper's: what the method sees, in the same memory."""
    return {held: tensor for held, tensor in state.items() if held != name}


def copy_into(state: Tensors, out: Tensors) -> None:
    """Into `out`, what the method did not write there itself."""
    for name, tensor in state.items():
        if tensor is not out[name]:
            out[name].copy_(tensor)


def first_difference(outer: Outer, table: FragmentTable) -> Round:
    """The first round in which a fitted method exchanges parameters, as differences from an anchor.

    Raises:
        ValueError: it has no such rounds.
    """
    fragments = [fragment for fragment in outer.fragments(table) if fragment.kind == PARAM]
    shared = [outer.init(fragment, torch.empty(fragment.numel, device="meta")) for fragment in fragments]
    if not shared or not all(ANCHOR in state for state in shared):
        raise ValueError("it exchanges no differences from a shared anchor")
    plan = OuterPlan(outer)
    rounds = itertools.chain.from_iterable(map(plan.rounds, itertools.count(1)))
    return next(round_ for round_ in rounds if round_.fragment.kind == PARAM)
