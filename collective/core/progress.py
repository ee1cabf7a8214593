"""Who stands still? A pure watch over counters that only grow while bytes move.

Liveness is progress, not heartbeats: a hung peer's kernel goes on acknowledging. But a member whose result is
missing may itself be waiting for a third one, so a missing result counts only after twice the time; by then the
member that waited has named the culprit and told us.

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
    """Silence of one member, in one round."""

    def __init__(self, limits: StallLimits, now: Instant) -> None:
        self._limits = limits
        self._moved = -1
        self._moved_at = now
        self._chunk_s = 0.0

    def observe(self, moved: int, chunk_s: float, now: Instant) -> None:
        """What the links to this member say.

        Args:
            moved: a counter that grows with every byte from or to it.
            chunk_s: how long a chunk from it takes, from its first byte to its last.
            now: the time.
        """
        self._chunk_s = chunk_s
        if moved != self._moved:
            self._moved = moved
            self._moved_at = now

    @property
    def limit_s(self) -> float:
        """How long this member may stand still."""
        return min(max(self._limits.floor_s, self._limits.chunk_times * self._chunk_s), self._limits.ceiling_s)

    def is_stalled(self, now: Instant, *, owes: bool, owes_only_results: bool) -> bool:
        """Whether its silence is a suspicion.

        Args:
            now: the time.
            owes: it has opened the round and owes us something, or does not take what we send.
            owes_only_results: all that is missing are results, which may depend on a third member.
        """
        patience = 2.0 if owes_only_results else 1.0
        return owes and now - self._moved_at > patience * self.limit_s
