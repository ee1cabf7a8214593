# SPDX-License-Identifier: Apache-2.0
"""The newest committed results, for learners that are only a few steps behind: on this peer's disk, or in memory.

Rules: entries are consecutive steps, newest last; a gap or a step back empties the log first, because a learner can
only use an unbroken chain. What the disk holds (`stored`) costs no memory. The rest is bounded by bytes, but the newest
`MIN_ENTRIES` stay whatever their size: a learner that has just fetched a snapshot must find the commit which was made
meanwhile. Nothing here knows what a result means, or how a disk keeps it.
"""

from collections import deque
from itertools import islice
from typing import Protocol

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.state.replica import CommitEntry
from isthmus.elastic.state.wire import MAX_STOCK, CommitHeader

MIN_ENTRIES = 2
"""Entries that are kept whatever their size."""


class OpenResult(Protocol):
    """A stored result that is being read. It stays readable if it is removed meanwhile.

    Its reads block for as long as the disk takes, and raise OSError if the disk does not give what was stored.
    """

    def read_header(self) -> CommitHeader:
        """What goes before the bytes of its chunks. Called first."""
        ...

    def read(self, nbytes: int) -> bytes:
        """The next so many bytes of its chunks, one after the other. The last ones are given only if all were right."""
        ...

    def close(self) -> None:
        """Give it up; a read on another thread ends first."""
        ...


class StoredResult(Protocol):
    """Where a disk holds the result of one commit."""

    @property
    def outer_step(self) -> OuterStep:
        """Which it made."""
        ...

    @property
    def digest(self) -> bytes:
        """Of the state that it made."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its chunks."""
        ...

    def open(self) -> OpenResult:
        """Begin to read it. Cheap enough for the event loop.

        Raises:
            OSError: it is not there any more.
        """
        ...


Kept = CommitEntry | StoredResult


class CommitLog:
    """Which of the newest committed results can be had here.

    Args:
        max_nbytes: of results in memory.
    """

    def __init__(self, max_nbytes: int) -> None:
        if max_nbytes < 0:
            raise ValueError(f"max_nbytes must not be negative: {max_nbytes}")
        self._max_nbytes = max_nbytes
        self._entries: deque[Kept] = deque()

    def append(self, entry: Kept) -> None:
        """Add the newest commit; the oldest go until the bound holds. A commit already here is ignored."""
        if self._entries:
            newest = self._entries[-1]
            if (entry.outer_step, entry.digest) == (newest.outer_step, newest.digest):
                return
            if entry.outer_step != newest.outer_step + 1:
                self.clear()
        self._entries.append(entry)
        while self.memory_nbytes > self._max_nbytes and self._has_old_in_memory():
            self._entries.popleft()

    def stored(self, result: StoredResult) -> None:
        """The disk holds this one: if it is kept, it goes from memory."""
        index = self._index_of(result.outer_step)
        if index is not None and self._entries[index].digest == result.digest:
            self._entries[index] = result

    def forget_before(self, outer_step: int) -> None:
        """Offer none of the earlier steps any more: what is stored of them is about to go."""
        while self._entries and self._entries[0].outer_step < outer_step:
            self._entries.popleft()

    def first_within(self, max_nbytes: int) -> int:
        """The earliest step from which on all results together are no larger, and no more than anybody replays."""
        total = 0
        for number, entry in enumerate(reversed(self._entries)):
            total += entry.nbytes
            if total > max_nbytes or number == MAX_STOCK:
                return entry.outer_step + 1
        return self.span.start

    def get(self, outer_step: OuterStep) -> Kept | None:
        """The commit that made this step, or None if it is not kept (any more)."""
        index = self._index_of(outer_step)
        return None if index is None else self._entries[index]

    def sizes_from(self, outer_step: OuterStep) -> tuple[int, ...]:
        """Bytes of the results of this step and all after it; nothing if this one is not kept."""
        index = self._index_of(outer_step)
        return () if index is None else tuple(entry.nbytes for entry in islice(self._entries, index, None))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    @property
    def memory_nbytes(self) -> int:
        """Bytes of the results that are in memory."""
        return sum(entry.nbytes for entry in self._entries if isinstance(entry, CommitEntry))

    @property
    def span(self) -> range:
        """The steps whose commits are kept."""
        if not self._entries:
            return range(0)
        return range(self._entries[0].outer_step, self._entries[-1].outer_step + 1)

    def _index_of(self, outer_step: int) -> int | None:
        return outer_step - self.span.start if outer_step in self.span else None

    def _has_old_in_memory(self) -> bool:
        old = islice(self._entries, max(0, len(self._entries) - MIN_ENTRIES))
        return any(isinstance(entry, CommitEntry) for entry in old)
