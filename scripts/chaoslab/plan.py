# SPDX-License-Identifier: Apache-2.0
"""What is done in which order, drawn from a seed: kinds from a shuffled bag, and the breath after each.

Each bag has every kind once. What cannot be done now, because too few are well, stays in the bag for a while, so the
order of a bag may change as it is emptied; moments, breaths and each turn's own numbers do not.

Rules: pure; the same seed, kinds and answers of `could` make the same turns.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOGETHER = 0.25
"""Share of the turns after which the next one does not wait for two more commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One fault that is due."""

    kind: str
    seed: str
    """Of its own numbers."""
    is_together: bool
    """The next one follows at once, whatever this one does."""
    breath_s: float
    """Until the next one: from now if they come together, else from the second commit after this one."""


class Plan:
    """Draws turns.

    Args:
        kinds: what there is.
        seed: of everything.
        tell: takes a line for people, whenever a bag is filled.
    """

    def __init__(self, kinds: Sequence[str], *, seed: int, tell: Callable[[str], None]) -> None:
        self._kinds = list(kinds)
        self._seed = seed
        self._tell = tell
        self._rng = random.Random(f"{seed} moments")
        self._number = 0
        self.bag: list[str] = []
        """What is still to come before everything comes again."""

    def fill(self) -> None:
        """Shuffle a new bag if there is nothing in this one."""
        if not self.bag:
            self.bag = self._rng.sample(self._kinds, len(self._kinds))
            self._tell(f"plan         {', '.join(self.bag)}")

    def take(self, could: Callable[[str], bool]) -> Turn | None:
        """The first of the bag that can be done; None if there is none."""
        kind = next(filter(could, self.bag), None)
        if kind is None:
            return None
        self.bag.remove(kind)
        self._number += 1
        is_together = self._rng.random() < TOGETHER
        return Turn(
            kind=kind,
            seed=f"{self._seed} {self._number} {kind}",
            is_together=is_together,
            breath_s=self._rng.uniform(0.0, 1.0) if is_together else self._rng.uniform(1.0, 8.0),
        )

    def give_up(self) -> list[str]:
        """Empty the bag: what is in it cannot be had. Returns that."""
        skipped, self.bag = self.bag, []
        return skipped
