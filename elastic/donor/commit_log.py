# SPDX-License-Identifier: Apache-2.0
"""The newest committed results, for learners that are only a few steps behind.

Rules: entries are consecutive steps, newest last; a gap or a step back empties the log first, because a learner can
only use an unbroken chain. Bounded by bytes, but the newest `MIN_ENTRIES` stay whatever their size: a learner that has
just fetched a snapshot must find the commit which was made meanwhile. Nothing here knows what a result means.
"""

from collections import deque

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.state.replica import CommitEntry

MIN_ENTRIES = 2
"""Entries that are kept whatever their size."""


class CommitLog:
    """Bounded memory of the newest committed results."""

    def __init__(self, max_nbytes: int) -> None:
        if max_nbytes < 0:
            raise ValueError(f"max_nbytes must not be negative: {max_nbytes}")
        self._max_nbytes = max_nbytes
        self._entries: deque[CommitEntry] = deque()
        self._nbytes = 0

    def append(self, entry: CommitEntry) -> None:
        """Add the newest commit; the oldest go until the bound holds. A commit already here is ignored."""
        if self._entries:
            newest = self._entries[-1]
            if (entry.outer_step, entry.digest) == (newest.outer_step, newest.digest):
                return
            if entry.outer_step != newest.outer_step + 1:
                self.clear()
        self._entries.append(entry)
        self._nbytes += entry.nbytes
        while self._nbytes > self._max_nbytes and len(self._entries) > MIN_ENTRIES:
            self._nbytes -= self._entries.popleft().nbytes

    def get(self, outer_step: OuterStep) -> CommitEntry | None:
        """The commit that made this step, or None if it is not kept (any more)."""
        if not self._entries:
            return None
        index = outer_step - self._entries[0].outer_step
        return self._entries[index] if 0 <= index < len(self._entries) else None

    def sizes_from(self, outer_step: OuterStep) -> tuple[int, ...]:
        """Bytes of the results of this step and all after it; nothing if this one is not kept."""
        if self.get(outer_step) is None:
            return ()
        return tuple(entry.nbytes for entry in self._entries if entry.outer_step >= outer_step)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded results."""
        return self._nbytes

    @property
    def span(self) -> range:
        """The steps whose commits are kept."""
        if not self._entries:
            return range(0)
        return range(self._entries[0].outer_step, self._entries[-1].outer_step + 1)
