# SPDX-License-Identifier: Apache-2.0
"""Which round makes which outer step: the method's plan, counted.

The n-th round of the plan, in the order of inner steps, makes outer step n. It follows from the method's settings
alone, so a learner, a member and a resumed run agree on it without a word.
"""

from isthmus.optim.outer import Outer, Round


class RoundSchedule:
    """Rounds by the outer step they start from.

    Args:
        outer: the method; its `plan` is pure.
    """

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self._rounds: list[Round] = []
        self._scanned = -1

    def round_after(self, outer_step: int) -> Round:
        """The round that starts from `outer_step` and makes `outer_step + 1`."""
        while len(self._rounds) <= outer_step:
            self._scanned += 1
            self._rounds.extend(self._outer.plan(self._scanned))
        return self._rounds[outer_step]

    def inner_step_at(self, outer_step: int) -> int:
        """Global inner steps behind the shared state of `outer_step`: whoever begins from it trains the next one."""
        return 0 if outer_step == 0 else self.round_after(outer_step - 1).inner_step
