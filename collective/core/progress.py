# SPDX-License-Identifier: Apache-2.0
"""Who stands still? A pure watch over counters that only grow while bytes move.

Three questions. Is its host there: what we send, signs of life too, is acknowledged by its kernel, also while its
process computes or hangs; so whoever is cut off is found, whatever it was at. The other two are for members in the
round. Is it there: they send signs of life, so one from which nothing at all comes is gone or hung. Does it move: where
it owes what depends on nobody else, or has not taken what we sent, chunks that a round needs must get through, and
nothing else counts. (What else it owes may depend on a third one.) Only time in which it owed counts: two that have
waited for a third one have moved nothing for long, and then owe each other a chunk at once.

Rules: whether a member that has not opened the round still computes or hangs is not ours to judge. The limit follows
the measured chunk time of a slow link, never below a floor.
"""

from dataclasses import dataclass

from isthmus.collective.core.types import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """When silence becomes suspicion."""

    floor_s: float = 4.0
    """Shortest silence that counts; longer than a garbage collection, a page-in, a few lost packets."""
    chunk_times: float = 8.0
    """Or so many times what a chunk from this member takes, whichever is longer."""
    ceiling_s: float = 30.0
    """Never longer than this, however slow the link."""

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.ceiling_s or self.chunk_times < 0:
            raise ValueError(f"stall limits must be positive: {self}")


class ProgressWatch:
    """Silence and standstill of one member, in one round."""

    def __init__(self, limits: StallLimits, now: Instant) -> None:
        self._limits = limits
        self._heard = -1
        self._heard_at = now
        self._answered_at = now
        self._moved = -1
        self._moved_at = now  # or began to owe, whichever is later
        self._owes_now = False
        self._chunk_s = 0.0

    def observe(
        self, *, heard: int, moved: int, host_silent_s: float, chunk_s: float, owes_now: bool, now: Instant
    ) -> None:
        """What the links to this member say.

        Args:
            heard: a counter that grows with every byte from it.
            moved: a counter that grows with every byte of a needed chunk from it, or of one to it and acknowledged.
            host_silent_s: how long its host has acknowledged nothing; 0.0 is unknown.
            chunk_s: how long a chunk from it takes, from its first byte to its last.
            owes_now: bytes must be moving between us: what is owed depends on nobody else.
            now: the time.
        """
        self._chunk_s = chunk_s
        if heard > self._heard:
            self._heard_at = now
        self._heard = heard  # less, if a link broke with bytes that nobody had read
        self._answered_at = max(self._answered_at, self._heard_at, now - host_silent_s)
        is_moving = moved > self._moved  # less, if a link broke, is no movement
        if is_moving or not self._owes_now:
            self._moved = max(moved, self._moved)
            self._moved_at = now
        self._owes_now = owes_now

    @property
    def limit_s(self) -> float:
        """How long this member may stand still."""
        return min(max(self._limits.floor_s, self._limits.chunk_times * self._chunk_s), self._limits.ceiling_s)

    def is_cut_off(self, now: Instant, *, share: float = 1.0) -> bool:
        """Whether its host has answered to nothing for this share of the limit."""
        return now - self._answered_at > share * self.limit_s

    def is_stalled(self, now: Instant, *, owes: bool, share: float = 1.0) -> bool:
        """Whether it is a suspect.

        Args:
            now: the time.
            owes: it has opened the round, and the round cannot end without it.
            share: of the limit.
        """
        is_silent = now - self._heard_at > share * self.limit_s
        stands_still = self._owes_now and now - self._moved_at > share * self.limit_s
        return owes and (is_silent or stands_still)

    def forgive(self, seconds: float) -> None:
        """Time in which this process did not run is not held against others."""
        self._heard_at += seconds
        self._answered_at += seconds
        self._moved_at += seconds
