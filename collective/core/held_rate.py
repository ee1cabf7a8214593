# SPDX-License-Identifier: Apache-2.0
"""What a line carries, from windows of a fraction of a second: what it has held for a while.

While all send, acknowledgements wait in the queues of what goes the other way, and windows of one steady line differ by
30 %. The best of them says too much, and so do the best three in a row: of 24.1 MB/s they showed 21 to 29 in 32
transfers of 5 s, and plans that were paced by that lost two to five times as many packets. The best half of a transfer,
up to eight windows, showed 21 to 25. Padding is sent in turns, and its windows are steady.

Rules: no time in here; windows of a stretch follow each other without a pause, and no mean reaches over its end.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby

_WINDOWS_KEPT = 64
_PADDED = 2
_SHORTEST, _LONGEST = 3, 8
"""Windows of a transfer that are averaged; as many as there are, if there are fewer."""


class HeldRate:
    """See the module. Rates are bytes/s."""

    def __init__(self) -> None:
        self._windows: deque[tuple[int, bool, float]] = deque(maxlen=_WINDOWS_KEPT)  # (stretch, padding?, rate)
        self._stretch = 0

    @property
    def num_windows(self) -> int:
        """How many are known, at most 64."""
        return len(self._windows)

    def window(self, rate: float, *, is_padding: bool) -> None:
        """One more, right after the one before."""
        self._windows.append((self._stretch, is_padding, rate))

    def pause(self) -> None:
        """The next window does not follow the one before."""
        self._stretch += 1

    def most(self) -> float:
        """The largest rate that was held; 0.0 if nothing is known."""
        return max((_held(kind[1], list(run)) for kind, run in groupby(self._windows, _kind)), default=0.0)


def _kind(window: tuple[int, bool, float]) -> tuple[int, bool]:
    stretch, is_padding, _ = window
    return stretch, is_padding


def _held(is_padding: bool, windows: Sequence[tuple[int, bool, float]]) -> float:
    rates = [rate for _, _, rate in windows]
    wanted = _PADDED if is_padding else min(_LONGEST, max(_SHORTEST, len(rates) // 2))
    length = min(wanted, len(rates))
    return max(sum(rates[first : first + length]) / length for first in range(len(rates) - length + 1))
