# SPDX-License-Identifier: Apache-2.0
"""A run that went back begins with whoever was there then: who came first would go on alone, and the others wait."""

from collections.abc import Collection

from isthmus.collective.core.types import Instant, PeerId


class Rendezvous:
    """Who is to be in the first view of a rebuilt run, and by when.

    Args:
        grace_s: how long they are awaited.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._awaited: Collection[PeerId] = ()
        self._until: Instant = 0.0

    def call(self, peers: Collection[PeerId], now: Instant) -> None:
        """The run goes back: these are awaited."""
        self._awaited, self._until = peers, now + self._grace_s

    def waits(self, present: Collection[PeerId], now: Instant) -> bool:
        """Whether anybody else is awaited. Once nobody is, that is over."""
        if now < self._until and not set(present).issuperset(self._awaited):
            return True
        self._awaited = ()
        return False

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could come back."""
        self._until = max(self._until, now + self._grace_s)

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        return [self._until] if self._awaited else []
