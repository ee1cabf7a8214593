# SPDX-License-Identifier: Apache-2.0
"""Says why connections were ended for what came over them: each is counted, and one line a kind and minute is logged.

Rules: a flood writes no more than so many lines. A kind is one of our own words, and what else is in a line is quoted
and short, so that nobody writes lines of his own. The table of kinds is bounded: where it is full of kinds of the last
minute, a new one is counted only. No clock in here: the caller says what time it is.
"""

import logging
import math
from collections import Counter
from typing import Final

from isthmus.collective.core.types import Instant

log = logging.getLogger(__name__)

CLOSED_BEFORE_HELLO: Final = "closed before hello"
"""No news: who tries several addresses of ours side by side hangs up where it lost, and so does every honest peer."""

_EVERY_S = 60.0
_MAX_KINDS = 64
_MAX_LENGTH = 120


class RefusalLog:
    """See the module.

    Args:
        counters: by kind, connections that were ended.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._said_at: dict[str, Instant] = {}

    def ended(self, kind: str, now: Instant, **about: str) -> None:
        """A connection was ended.

        Args:
            kind: why, in words of ours out of a fixed list.
            now: monotonic seconds.
            about: what else the line says: `host` it came from, `peer_id` that it says, `detail`.
        """
        self._counters[kind] += 1
        if now - self._said_at.get(kind, -math.inf) < _EVERY_S:
            return
        if len(self._said_at) >= _MAX_KINDS:
            self._said_at = {other: at for other, at in self._said_at.items() if now - at < _EVERY_S}
            if len(self._said_at) >= _MAX_KINDS:
                return
        self._said_at[kind] = now
        words = "".join(f" {name}={value[:_MAX_LENGTH]!r}" for name, value in about.items() if value)
        level = logging.DEBUG if kind == CLOSED_BEFORE_HELLO else logging.WARNING
        log.log(level, "connection_ended%s reason=%r so_far=%d", words, kind[:_MAX_LENGTH], self._counters[kind])
