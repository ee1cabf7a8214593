# SPDX-License-Identifier: Apache-2.0
"""Which rounds make which outer step: a method's plan, counted.

The n-th plan that is not empty, in the order of inner steps, makes outer step n, all its rounds together. It follows
from the method's settings alone, so a learner, a member and a resumed run agree on it without a word.
"""

from __future__ import annotations

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
        self._newest: dict[FragmentKey, tuple[Round, ...]] = {}  # the last step of each fragment
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
        """The outer step that gives the fragments of this one anew before this one's outcome reaches the workers.

        This one itself if there is none, as where a round's delay is shorter than the time to its fragment's next turn.
        """
        following = outer_step + 1
        is_out = self.inner_step(following) <= self.due_step(outer_step)
        is_again = is_out and _fragments(self.rounds(following)) & _fragments(self.rounds(outer_step))
        return following if is_again else outer_step

    def _next(self) -> tuple[Round, ...]:
        for inner_step in range(self._scanned + 1, self._scanned + 1 + _MAX_STRETCH):
            rounds = self._outer.plan(inner_step)
            if rounds:
                self._scanned = inner_step
                if self.steps_may_differ:
                    _require_no_gradient(rounds)
                self._require_one_again(rounds)
                return _checked(rounds)
        raise ValueError(f"{self._outer} plans no round in {_MAX_STRETCH} inner steps")

    def _require_one_again(self, rounds: tuple[Round, ...]) -> None:
        """A fragment may be given anew when its last outcome is due, before that lands; then each step gives all.

        A vote names what a member's payloads hold: what a missed one held goes with the one after the next, for all
        fragments alike. With a longer delay a late worker would have to make several payloads before anything lands,
        while the others make as many: it would never catch up.
        """
        at, fragments = rounds[0].inner_step, _fragments(rounds)
        out = [earlier for earlier in self._newest.values() if earlier[0].due_step >= at]
        given_again = [earlier for earlier in out if fragments & _fragments(earlier)]
        due = max((earlier[0].due_step for earlier in given_again), default=at)
        if due > at:
            raise ValueError(
                f"a fragment is given again at inner step {at}, and its last outcome is due after inner step {due}:"
                " a delay may be as long as the time to the fragment's next turn"
            )
        if given_again and any(fragments != _fragments(earlier) for earlier in out):
            raise ValueError(f"a fragment is given again before it has landed, so all must be in every plan: {rounds}")
        self._newest |= dict.fromkeys(fragments, rounds)


def _fragments(rounds: tuple[Round, ...]) -> set[FragmentKey]:
    return {round_.fragment for round_ in rounds}


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
