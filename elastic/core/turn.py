# SPDX-License-Identifier: Apache-2.0
"""The coordinator's turn at one event: when that happened, and what was decided in it, in the order of the effects.

Journal first: `persist` is the only way to change the durable state. Whatever tells of a record is sent after it.
"""

from collections import Counter

from isthmus.collective.core.types import Instant, PeerRef
from isthmus.elastic.core.events import CoordinatorEffect, Persist, SendToPeer
from isthmus.elastic.core.messages import CoordinatorMessage, Evicted, Rebuilt
from isthmus.elastic.core.records import Record
from isthmus.elastic.core.run_state import RunState


class Turn:
    """One event after the other; what is counted is counted over all of them."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.now: Instant = 0.0
        self.effects: list[CoordinatorEffect] = []
        self.counters: Counter[str] = Counter()
        self.sent_away_at: Instant = float("-inf")
        """When somebody was told last that it is out, or that the run goes back: it comes with a Join."""

    def begin(self, now: Instant) -> None:
        """The next event."""
        self.now, self.effects = now, []

    def persist(self, record: Record) -> None:
        """Write a decision down, and only so make it true."""
        self.effects.append(Persist(record=record))
        self.state.apply(record)

    def order(self, effect: CoordinatorEffect) -> None:
        """Have something else done."""
        self.effects.append(effect)

    def send(self, to: PeerRef, message: CoordinatorMessage) -> None:
        """Tell a peer, if it is connected."""
        if isinstance(message, Evicted | Rebuilt):
            self.sent_away_at = self.now
        self.effects.append(SendToPeer(to=to, message=message))
