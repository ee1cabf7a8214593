# SPDX-License-Identifier: Apache-2.0
"""Which rounds make which outer step: a method's plan, counted.

The n-th plan that is not empty, in the order of inner steps, makes outer step n, all its rounds together. It follows
from the method's settings alone, so a learner, a member and a resumed run agree on it without a word.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from isthmus.optim.fragments import FragmentKey
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

    def again(self, outer_step: int) -> int:
        """The newest outer step that gives a fragment of this one anew before this one's outcome reaches the workers.

        This one itself if there is none, as where a round's delay is shorter than the time to its fragment's next turn.
        """
        rounds, newest = self.rounds(outer_step), outer_step
        while _is_out(rounds, self.inner_step(newest + 1)):
            newest += 1
        return newest if _fragments(self.rounds(newest)) & _fragments(rounds) else outer_step

    def _next(self) -> tuple[Round, ...]:
        for inner_step in range(self._scanned + 1, self._scanned + 1 + _MAX_STRETCH):
            rounds = self._outer.plan(inner_step)
            if rounds:
                self._scanned = inner_step
                if self.steps_may_differ:
                    _require_no_gradient(rounds)
                self._require_all_again(rounds)
                return _checked(rounds)
        raise ValueError(f"{self._outer} plans no round in {_MAX_STRETCH} inner steps")

    def _require_all_again(self, rounds: tuple[Round, ...]) -> None:
        """If a fragment is given anew before it lands, each step out gives all: its vote names what its payloads hold.

        What a missed payload held goes with the one after the next, for all fragments alike.
        """
        at, fragments = rounds[0].inner_step, _fragments(rounds)
        out = [_fragments(earlier) for earlier in takewhile(lambda item: _is_out(item, at), reversed(self._steps))]
        if any(fragments & others for others in out) and any(fragments != others for others in out):
            raise ValueError(f"a fragment is given again before it has landed, so all must be in every plan: {rounds}")


def _fragments(rounds: tuple[Round, ...]) -> set[FragmentKey]:
    return {round_.fragment for round_ in rounds}


def _is_out(rounds: tuple[Round, ...], inner_step: int) -> bool:
    return rounds[0].due_step >= inner_step


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
