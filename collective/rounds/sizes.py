# SPDX-License-Identifier: Apache-2.0
"""How large the numbers are that each member brings into a round, as this member sees them.

A member sees the others' parts where it adds them up, beside its own. It sees the sum of each root, beside its own
part at that place. A weighted mean is never larger than the largest part of it, so a sum larger than every part is the
root's own doing, and then counts as its size.

Rules: nothing is judged here. Whoever compares the sizes that all members tell knows what is too large.
"""

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.collective.core.types import HUGE

_BY_CHANCE = 2.0
"""How many times as large as the largest part seen a sum may be: the parts of its slice were seen elsewhere. Without it
an honest root was named where one part was most of the mean."""
_HALF = (torch.bfloat16, torch.float16)


class Measure:
    """Root mean square of what it was given. A pass over what is in the cache: a tenth of what adding it costs."""

    def __init__(self) -> None:
        self.squares = 0.0
        self.numel = 0

    def take(self, part: Tensor) -> None:
        """Some more numbers, floats."""
        if part.dtype in _HALF:
            part = part.float()
        self.squares += torch.dot(part, part).item()
        self.numel += part.numel()

    @property
    def size(self) -> float:
        """0 of nothing, at most HUGE."""
        if not self.numel:
            return 0.0
        return min(math.sqrt(self.squares / self.numel), HUGE) if self.squares < math.inf else HUGE


class Sizes:
    """What one member sees in one round."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._rank = rank
        self._parts = [Measure() for _ in range(world_size)]
        self._sums = [Measure() for _ in range(world_size)]  # of each root
        self._beside = [Measure() for _ in range(world_size)]  # our own part at the place of that sum

    def saw_part(self, rank: int, part: Tensor | None) -> None:
        """A part that is added up here, or our own at such a place, once. None: it cannot be read."""
        if part is None:
            self._parts[rank].squares, self._parts[rank].numel = math.nan, 1
        else:
            self._parts[rank].take(part)

    def saw_sum(self, root: int, total: Tensor, own: Tensor) -> None:
        """A sum as its root gives it to all, and our own part at the same place."""
        self._sums[root].take(total)
        self._beside[root].take(own)

    def by_rank(self) -> tuple[float, ...]:
        """See RoundStats.sizes."""
        sizes = [part.size for part in self._parts]
        whole = Measure()
        for part in (*self._beside, self._parts[self._rank]):
            whole.squares, whole.numel = whole.squares + part.squares, whole.numel + part.numel
        own = sizes[self._rank] = sizes[self._rank] or whole.size  # where nothing is added up here
        largest = max(sizes)
        for root, (total, beside) in enumerate(zip(self._sums, self._beside, strict=True)):
            seen = 0.0
            if total.size >= HUGE:
                seen = HUGE
            elif total.numel and own > 0.0:
                # Where we have hardly moved, others may have: by as much as we did elsewhere.
                seen = own * (total.size / max(beside.size, whole.size))
            sizes[root] = min(seen, HUGE) if seen > _BY_CHANCE * largest or seen >= HUGE > largest else sizes[root]
        return tuple(sizes)


def with_further(sizes: Sequence[float], further: Sequence[float]) -> tuple[float, ...]:
    """One size a member of several rounds that hold other things; 0 is not known.

    Beside the first round's numbers those of a further one, and what goes with a payload, count by the square root of
    how much larger they are than the others': moments are squares.
    """
    known, base = [size for size in sizes if size > 0.0], [size for size in further if size > 0.0]
    if not known or not base:
        return tuple(sizes if known else further)
    usual, base_usual = statistics.median_low(known), statistics.median_low(base)
    both = zip(sizes, further, strict=True)
    return tuple(min(HUGE, max(size, usual * math.sqrt(more / base_usual))) for size, more in both)
