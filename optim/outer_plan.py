# SPDX-License-Identifier: Apache-2.0
"""Which rounds make which outer step: a method's plan, counted.

The n-th plan that is not empty, in the order of inner steps, makes outer step n, all its rounds together. It follows
from the method's settings alone, so a learner, a member and a resumed run agree on it without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from isthmus.optim.outer import Outer, Round

_MAX_STRETCH: Final = 1 << 22
"""Inner steps without a round after which a method is taken to have none any more."""


class OuterPlan:
    """The rounds of every outer step, counted from 1.

    Args:
        outer: the method, fitted; its `plan` is pure.
    """

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self._steps: list[tuple[Round, ...]] = []
        self._scanned = -1

    @property
    def steps_may_differ(self) -> bool:
        """Whether a worker may leave inner steps out between outer steps, see `Outer`."""
        return self._outer.steps_may_differ

    def rounds(self, outer_step: int) -> tuple[Round, ...]:
        """The rounds that make this outer step, >= 1, out of the one before.

        Raises:
            ValueError: the method plans no such step, or rounds that cannot make one.
        """
        while len(self._steps) < outer_step:
            self._steps.append(self._next())
        return self._steps[outer_step - 1]

    def inner_step(self, outer_step: int) -> int:
        """Global inner steps behind what this outer step is made of: whoever begins from it trains the next one."""
        return 0 if outer_step == 0 else self.rounds(outer_step)[0].inner_step

    def due_step(self, outer_step: int) -> int:
        """The global inner step after which its outcome reaches the workers."""
        return 0 if outer_step == 0 else self.rounds(outer_step)[0].due_step

    def _next(self) -> tuple[Round, ...]:
        for inner_step in range(self._scanned + 1, self._scanned + 1 + _MAX_STRETCH):
            rounds = self._outer.plan(inner_step)
            if rounds:
                self._scanned = inner_step
                if self.steps_may_differ:
                    _require_no_gradient(rounds)
                return _checked(rounds)
        raise ValueError(f"{self._outer} plans no round in {_MAX_STRETCH} inner steps")


def _require_no_gradient(rounds: tuple[Round, ...]) -> None:
    from isthmus.optim.outer import GRAD  # here, since the simulator plans without torch

    if any(round_.fragment.kind == GRAD for round_ in rounds):
        raise ValueError("a method that exchanges gradients must say that inner steps may not differ")


def _checked(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    if len({round_.delay for round_ in rounds}) > 1:
        raise ValueError(f"rounds of one plan are due together; these have several delays: {rounds}")
    if len({round_.fragment for round_ in rounds}) < len(rounds):
        raise ValueError(f"rounds of one plan are of different fragments: {rounds}")
    return rounds
