# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a round that does not wait for everybody.

The member of rank 0 is the clerk. Everybody tells it that it is ready. Once `min_members` are, the others have
`grace_s` more; then the clerk closes the round and tells all who is in, those who are late too. Whoever is left out
hears it at once when it comes, and can bring what it has to the next round.

Rules: the clerk is always in, so nothing is closed over its head; if it is lost the round ends with an error like any
other. The decision is made once. Time is the caller's.
"""

from dataclasses import dataclass

from isthmus.collective.core.types import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """When a round may begin without everybody.

    Attributes:
        min_members: the round waits for so many, however long that takes.
        grace_s: how long the others may be later than that.
    """

    min_members: int
    grace_s: float

    def __post_init__(self) -> None:
        if self.min_members < 1 or not self.grace_s >= 0.0:
            raise ValueError(f"a quorum needs at least 1 member and a grace from 0 s up: {self}")


class Clerk:
    """Closes one round. Ask `closed` after every change and at `next_look`.

    Args:
        quorum: see Quorum.
        world_size: members of the view; a smaller view lowers the quorum to everybody.
    """

    def __init__(self, quorum: Quorum, world_size: int) -> None:
        self._quorum = quorum
        self._world_size = world_size
        self._ready: set[int] = set()
        self._closes_at: Instant | None = None
        self._closed: tuple[int, ...] | None = None

    def on_ready(self, rank: int, now: Instant) -> None:
        """This member has posted the round."""
        self._ready.add(rank)
        if self._closes_at is None and 0 in self._ready and len(self._ready) >= self._needed:
            self._closes_at = now + self._quorum.grace_s

    def on_gone(self, rank: int) -> None:
        """This member is lost: it will not be in, unless that is decided already."""
        self._ready.discard(rank)
        if len(self._ready) < self._needed:
            self._closes_at = None

    @property
    def next_look(self) -> Instant | None:
        """When the grace ends; None before the quorum is there."""
        return self._closes_at

    def closed(self, now: Instant) -> tuple[int, ...] | None:
        """The ranks that are in, rising, from the moment that this is decided."""
        if self._closed is None and self._closes_at is not None:
            is_over = now >= self._closes_at or len(self._ready) == self._world_size
            self._closed = tuple(sorted(self._ready)) if is_over else None
        return self._closed

    @property
    def _needed(self) -> int:
        return min(self._quorum.min_members, self._world_size)
