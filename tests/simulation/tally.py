# SPDX-License-Identifier: Apache-2.0
"""The samples of a simulated peer: what it may train on, what no commit holds, and what is in which payload."""

from dataclasses import dataclass, field

from isthmus.elastic.core.leases import merged
from isthmus.elastic.core.messages import IndexRange
from tests.simulation.methods import Met
from tests.simulation.symbols import Payload

Ranges = tuple[IndexRange, ...]


@dataclass(slots=True)
class Flight:
    """An outer step that was emitted and has not landed."""

    payload: Payload
    consumed: Ranges
    """The samples behind it that no commit held when it was emitted, nor holds now."""
    works: list[tuple[int, Ranges]]
    """By round: its fragment and the samples for it, also of missed steps."""
    digest: bytes = b""
    """Of the state that it has made, once it counted."""
    met: Met = ()
    """The payloads that came in pairs."""

    @property
    def weighs(self) -> bool:
        """Whether anything of it can have been added up."""
        return self.payload.weight > 0.0


@dataclass(slots=True)
class Tally:
    """Samples since this peer became a member: see trainer/engine/tally.py and trainer/engine/sample_feed.py."""

    leases: Ranges = ()
    """Not trained on yet."""
    consumed: Ranges = ()
    """Trained on, and in no commit."""
    since: dict[int, Ranges] = field(default_factory=dict)
    """By fragment: trained on since its newest payload, or in one that was missed."""

    def take(self, number: int) -> Ranges:
        """Train on so many."""
        taken: list[IndexRange] = []
        rest: list[IndexRange] = []
        for item in self.leases:
            use = min(number, len(item))
            number -= use
            if use:
                taken.append(IndexRange(item.start, item.start + use))
            if use < len(item):
                rest.append(IndexRange(item.start + use, item.stop))
        self.leases = tuple(rest)
        self.consumed = merged((*self.consumed, *taken))
        for fragment, ranges in self.since.items():
            self.since[fragment] = merged((*ranges, *taken))
        return tuple(taken)

    def give(self, fragment: int) -> Ranges:
        """What goes into a payload of this fragment."""
        given, self.since[fragment] = self.since[fragment], ()
        return given

    def owe(self, fragment: int, missed: Ranges) -> None:
        """A payload of this fragment did not count."""
        self.since[fragment] = merged((*self.since[fragment], *missed))
