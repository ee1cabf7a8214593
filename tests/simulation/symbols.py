# SPDX-License-Identifier: Apache-2.0
"""Shared state and payloads as symbols: what they are made of instead of what they are.

A payload is who made it and when; a chunk of a result is the sorted tuple of the payloads that are in it, with their
weights; a state is the hash of its predecessor and the result that was absorbed. So a checker can read off a committed
state who is in it, and how often.
"""

import hashlib
from dataclasses import dataclass

from isthmus.collective.core.types import OuterStep, PeerRef
from isthmus.elastic.core.messages import Held, IndexRange

MOST_SAID = 1e15
"""A weight beyond it is no message."""


NOTHING = Held(OuterStep(0), b"")


FAR_TOO_MUCH = 1000.0
"""A liar's numbers, where an honest member's are 1, and how many times its weight."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What one peer gives to the outer step after `outer_step`."""

    ref: PeerRef
    serial: int
    outer_step: int
    weight: float
    consumed: tuple[IndexRange, ...]
    size: float = 1.0
    """Root mean square of its numbers."""
    works: tuple[tuple[int, tuple[IndexRange, ...]], ...] = ()
    """By round: its fragment, and the samples whose work it holds for that."""
    base: Held = NOTHING
    """The state that its work was begun from."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.ref.peer_id}.{self.ref.incarnation}.{self.serial}"


COMMIT_LOG = 64
"""How many commits a donor can replay. It has to cover those made during one snapshot transfer, or who joins a fast
run over a slow line never arrives."""

Share = tuple[str, float]
"""Payload name and weight."""
ChunkValue = tuple[Share, ...]
"""Everything that was added up in a chunk, sorted."""
FALSE: Share = ("nothing true", 1.0)
"""What a liar adds to a sum."""
FALSE_SIZE = 1e9
"""Of such a sum: beyond what any difference of work excuses."""
Result = tuple[ChunkValue, ...]


@dataclass(frozen=True, slots=True)
class State:
    """A shared state. `lineage` holds the digests of its newest predecessors, newest last, as a commit log would."""

    held: Held
    lineage: tuple[bytes, ...] = ()

    def after(self, result: tuple[object, ...], *, flaw: str = "") -> "State":
        """The state once this result is absorbed. A `flaw` stands for bits that came out wrong."""
        text = self.held.digest.hex() + repr(result) + flaw
        digest = hashlib.sha256(text.encode()).digest()
        return State(Held(OuterStep(self.held.outer_step + 1), digest), (*self.lineage, self.held.digest)[-COMMIT_LOG:])


def first_state(founder: PeerRef) -> State:
    """What a founder makes. Two founders never make the same."""
    text = f"founded by {founder.peer_id}.{founder.incarnation}"
    return State(Held(OuterStep(0), hashlib.sha256(text.encode()).digest()))


def name(ref: PeerRef) -> str:
    return f"{ref.peer_id[-2:]}.{ref.incarnation}"
