# SPDX-License-Identifier: Apache-2.0
"""How large the numbers are that each member brings into a round, as this member sees them.

A member sees the others' parts where it adds them up, beside its own. It sees the sum of each root, beside its own
part at that place. A weighted mean is never larger than the largest part of it. So a sum that is larger than every part
seen is the root's own doing, or holds a part that only the root has seen: the root says which.

Rules: nothing is judged here. Whoever compares the sizes that all members tell knows what is too large.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

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
        """Of the parts. See RoundStats.sizes."""
        sizes = [part.size for part in self._parts]
        sizes[self._rank] = sizes[self._rank] or self._whole.size  # where nothing is added up here
        return tuple(sizes)

    def sums(self) -> tuple[float, ...]:
        """Of the sums that are larger than every part. See RoundStats.sums."""
        sizes, whole = self.by_rank(), self._whole.size
        own, largest = sizes[self._rank], max(sizes)
        found = []
        for total, beside in zip(self._sums, self._beside, strict=True):
            seen = 0.0
            if total.size >= HUGE:
                seen = HUGE
            elif total.numel and own > 0.0:
                # Where we have hardly moved, others may have: by as much as we did elsewhere.
                seen = own * (total.size / max(beside.size, whole))
            found.append(min(seen, HUGE) if seen > _BY_CHANCE * largest or seen >= HUGE > largest else 0.0)
        return tuple(found)

    @property
    def _whole(self) -> Measure:
        """All of our own part that was measured."""
        whole = Measure()
        for part in (*self._beside, self._parts[self._rank]):
            whole.squares, whole.numel = whole.squares + part.squares, whole.numel + part.numel
        return whole


class Seen(NamedTuple):
    """What a member has seen of others, by rank; 0 is not known."""

    sizes: Sequence[float]
    sums: Sequence[float]


def with_further(first: Seen, further: Seen) -> Seen:
    """One size a member, and one of its sums, of several rounds that hold other things.

    Beside the first round's numbers those of a further one, and what goes with a payload, count by the square root of
    how much larger they are than the others': moments are squares. What is usual the parts say, of sums as well.
    """
    known, base = ([size for size in seen.sizes if size > 0.0] for seen in (first, further))
    if not known or not base:
        sums = tuple(map(max, first.sums, further.sums))
        return Seen(tuple(first.sizes if known else further.sizes), sums)
    usual, base_usual = statistics.median_low(known), statistics.median_low(base)

    def larger(values: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
        both = zip(values, more, strict=True)
        return tuple(min(HUGE, max(value, usual * math.sqrt(other / base_usual))) for value, other in both)

    return Seen(larger(first.sizes, further.sizes), larger(first.sums, further.sums))
