"""Says why connections of strangers were ended: each is counted, and one line a kind and minute is logged.

Rules: a flood writes no more than so many lines, and the words of a stranger are never in them: a kind is one of ours.
The table of kinds is bounded. No clock in here: the caller says what time it is.
"""

import logging
import math
from collections import Counter

from collective.core.types import Instant

log = logging.getLogger(__name__)

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

    def ended(self, kind: str, host: str, now: Instant) -> None:
        """A connection from this address was ended for this reason."""
        self._counters[kind] += 1
        if kind not in self._said_at and len(self._said_at) >= _MAX_KINDS:
            return
        if now - self._said_at.get(kind, -math.inf) < _EVERY_S:
            return
        self._said_at[kind] = now
        log.warning(
            "connection_ended host=%r reason=%r so_far=%d", host[:_MAX_LENGTH], kind[:_MAX_LENGTH], self._counters[kind]
        )
