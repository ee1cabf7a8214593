# SPDX-License-Identifier: Apache-2.0
"""A token bucket: at most `rate` units a second in the long run, `burst` at once.

Caps bytes for all links of a process, and connections at the door. Rules: one number of state, the instant at which
the bucket is full again, so nothing drifts and nothing has to be refilled. Time is the caller's and never goes back.
A piece larger than the burst is not starved: it goes when the bucket is full and leaves a debt that the next ones
wait for.

Bound: if every `take(now, n)` comes when `delay_s(now, n)` is 0, then in any `t` seconds at most
`rate · (t + 1 µs) + max(burst, largest n)` units are taken. Delays under a microsecond count as none, because a clock
that has grown large cannot express them and a caller would wait for ever.
"""

import math

from isthmus.collective.core.types import Instant

_NO_DELAY_S = 1e-6


class TokenBucket:
    """See the module.

    Args:
        rate: units a second, finite and above 0.
        burst: units that a full bucket holds, at least 1. It starts full.
    """

    def __init__(self, rate: float, burst: float) -> None:
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"a rate must be a finite number above 0, not {rate}")
        if not (math.isfinite(burst) and burst >= 1):
            raise ValueError(f"a burst must be a finite number of at least 1, not {burst}")
        self.rate = rate
        self.burst = burst
        self._full_at: Instant = -math.inf

    def available(self, now: Instant) -> int:
        """Whole units that may be taken without waiting, 0 while there is a debt."""
        return max(0, math.floor(self.burst - self.rate * max(0.0, self._full_at - now)))

    def delay_s(self, now: Instant, count: float = 0) -> float:
        """Seconds until `count` units may be taken. With 0: until there is no debt.

        A caller that learns only afterwards how much it moved (a socket) asks for 0 or 1, moves, and takes that.
        """
        missing = min(count, self.burst) - self.burst
        delay_s = self._full_at - now + missing / self.rate
        return delay_s if delay_s > _NO_DELAY_S else 0.0

    def take(self, now: Instant, count: float) -> None:
        """Take `count` units, whether they are there or not."""
        self._full_at = max(self._full_at, now) + count / self.rate

    def give_back(self, count: float) -> None:
        """Undo a `take` that turned out not to count."""
        self._full_at -= count / self.rate
