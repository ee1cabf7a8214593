# SPDX-License-Identifier: Apache-2.0
"""How long a round may take once all its members have opened it, by how long such rounds took before.

Standing still is found in seconds (progress.py). What is found here moves, and comes to no end: a member that sends its
parts byte by byte, or keeps back the sums that it owes. Before, such a round lasted until its deadline, half an hour.

Rules: a round is compared with the median of earlier rounds that had all its members and at least half its bytes, so
that one slow round does not raise the limit. Without such rounds, as with a newcomer, whose line may be slow, a round
is given up early only if it would take many times its deadline, or if no chunk moves for long (`unknown_s`). A member
because of which a round took too long is given twice as long in the next: lines may become slow, and then rounds go on
at their pace. A round with it, of at least half the size, that needed no such doubling takes one back. No time in here.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from isthmus.collective.core.types import PeerRef

_ROUNDS_KEPT = 64
_PEERS_KEPT = 1024
_MOST_DOUBLINGS = 3
"""A member that holds every round up does so for eight times as long at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLimits:
    """When a round that moves is too slow."""

    floor_s: float = 20.0
    """No round is too slow before that. A member that has owed something for less than half of it is never named."""
    factor: float = 10.0
    """It may take so many times what is usual."""
    hopeless: float = 8.0
    """Or a round, or a member, is given up if at its rate until now it would need so many times the deadline."""
    unknown_s: float = 120.0
    """Where nothing is known, a round in which no chunk came or went for so long is too slow."""

    def __post_init__(self) -> None:
        if min(self.floor_s, self.factor, self.hopeless, self.unknown_s) <= 0:
            raise ValueError(f"limits must be positive: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimit:
    """How long a round may take."""

    own_s: float
    """Before we give it up; infinite if nothing is known."""
    usual_s: float
    """The same without doublings. Other members may have none, and give up before us: by this we see if they are
    right."""


class RoundTimes:
    """See the module. Seconds are from when all members had opened the round until it ended."""

    def __init__(self, limits: SlowLimits) -> None:
        self._limits = limits
        self._rounds: deque[tuple[frozenset[PeerRef], int, float]] = deque(maxlen=_ROUNDS_KEPT)
        self._doublings: dict[PeerRef, tuple[int, int]] = {}  # how many, and of how large a round

    def limit(self, members: Collection[PeerRef], nbytes: int) -> RoundLimit:
        """How long a round of these members, with so many bytes, may take."""
        usual_s = self._usual_limit_s(members, nbytes)
        return RoundLimit(own_s=usual_s * 2.0 ** max(map(self._num_doublings, members), default=0), usual_s=usual_s)

    def took(self, members: Collection[PeerRef], nbytes: int, seconds: float) -> None:
        """A round of these members has ended well."""
        usual_s = self._usual_limit_s(members, nbytes)
        self._rounds.append((frozenset(members), nbytes, seconds))
        for member in members:
            doublings, of_nbytes = self._doublings.get(member, (0, 0))
            if doublings and 2 * nbytes >= of_nbytes and seconds <= usual_s * 2.0 ** (doublings - 1):
                self._doublings[member] = doublings - 1, of_nbytes

    def too_slow(self, members: Iterable[PeerRef], nbytes: int) -> None:
        """A round was given up because of these."""
        for member in members:
            doublings = min(self._num_doublings(member) + 1, _MOST_DOUBLINGS)
            self._doublings.pop(member, None)
            self._doublings[member] = doublings, nbytes
        while len(self._doublings) > _PEERS_KEPT:
            del self._doublings[next(iter(self._doublings))]

    def _usual_limit_s(self, members: Collection[PeerRef], nbytes: int) -> float:
        present = frozenset(members)
        alike = [seconds for others, size, seconds in self._rounds if present <= others and 2 * size >= nbytes]
        return max(self._limits.floor_s, self._limits.factor * statistics.median(alike)) if alike else math.inf

    def _num_doublings(self, member: PeerRef) -> int:
        return self._doublings.get(member, (0, 0))[0]


def is_hopeless(limits: SlowLimits, *, moved: int, left: int, seconds: float, deadline_s: float) -> bool:
    """Whether what is left cannot come in time at the rate of these seconds, not nearly.

    Args:
        limits: when that may be said.
        moved: bytes, or chunks.
        left: the same, at most.
        seconds: in which it moved.
        deadline_s: of the round.
    """
    return seconds * (moved + left) > limits.hopeless * deadline_s * moved
