"""Who stands still? A pure watch over counters that only grow while bytes move.

Two questions, since a member that is well may have nothing to send: what it owes may depend on a third one. Is it
there: members send signs of life while they are in a round, so one from which nothing at all comes is gone or hung (a
hung peer's kernel goes on acknowledging). Does it move: where it owes what depends on nobody else, or has not taken
what we sent, bytes of the round must get through, and signs of life do not count. Only time in which it owed
counts: two that have waited for a third one have moved nothing for long, and then owe each other a chunk at once.

Rules: a member that has not opened the round is still computing, which is not ours to judge. The limit follows the
measured chunk time of a slow link, never below a floor.
"""

from dataclasses import dataclass

from collective.core.types import Instant


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
        self._moved = -1
        self._moved_at = now  # or began to owe, whichever is later
        self._owes_now = False
        self._chunk_s = 0.0

    def observe(self, *, heard: int, moved: int, chunk_s: float, owes_now: bool, now: Instant) -> None:
        """What the links to this member say.

        Args:
            heard: a counter that grows with every byte from it.
            moved: a counter that changes with every byte of a round from it, or to it and acknowledged.
            chunk_s: how long a chunk from it takes, from its first byte to its last.
            owes_now: bytes must be moving between us: what is owed depends on nobody else.
            now: the time.
        """
        self._chunk_s = chunk_s
        if heard != self._heard:
            self._heard = heard
            self._heard_at = now
        is_moving = moved > self._moved  # our own signs of life leave it for a moment
        if is_moving or not self._owes_now:
            self._moved = max(moved, self._moved)
            self._moved_at = now
        self._owes_now = owes_now

    @property
    def limit_s(self) -> float:
        """How long this member may stand still."""
        return min(max(self._limits.floor_s, self._limits.chunk_times * self._chunk_s), self._limits.ceiling_s)

    def is_stalled(self, now: Instant, *, owes: bool) -> bool:
        """Whether it is a suspect.

        Args:
            now: the time.
            owes: it has opened the round, and the round cannot end without it.
        """
        is_silent = now - self._heard_at > self.limit_s
        stands_still = self._owes_now and now - self._moved_at > self.limit_s
        return owes and (is_silent or stands_still)

    def forgive(self, seconds: float) -> None:
        """Time in which this process did not run is not held against others."""
        self._heard_at += seconds
        self._moved_at += seconds
