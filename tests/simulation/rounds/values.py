# SPDX-License-Identifier: Apache-2.0
"""What travels in the round simulator: frames, and chunks that are made of who is in them.

A part names its member, its round and its chunk; a sum is a tuple of parts. A result also carries the number of its
making: two results of the same parts that were made twice stand for sums with other rounding.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from isthmus.collective.core.types import Incarnation, PeerId, PeerRef, RoundKey

OPEN, PART, RESULT, ABORT, ENDED, SIGN = "open", "part", "result", "abort", "ended", "sign"


class Part(NamedTuple):
    """One member's numbers of one chunk in one attempt, times its weight."""

    ref: PeerRef
    key: RoundKey
    chunk: int
    weight: float


Sum = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished chunk."""

    parts: Sum
    weight_sum: float
    making: int


Value = Sum | Result
NOISE = PeerRef(PeerId("noise"), Incarnation(-1))
"""In whose name the parts of a damaged chunk are."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one peer says to another about a round. `value` of a part is a sum; of a result, a result.

    `ended` are the rounds of its view that have ended at the sender; said when a connection was made anew.
    """

    kind: str
    sender: PeerRef
    key: RoundKey | None = None
    chunk: int = -1
    value: Value = ()
    weight: float = 0.0
    suspects: tuple[str, ...] = ()
    ended: tuple[RoundKey, ...] = ()
    is_corrupt: bool = False


def damaged(frame: Frame) -> Frame:
    """The same after some bits were turned over on the way."""
    value = frame.value
    if frame.key is not None and frame.chunk >= 0:
        noise = (Part(NOISE, frame.key, frame.chunk, 0.0),)
        value = Result(noise, 0.0, -1) if isinstance(value, Result) else noise
    return replace(frame, value=value, is_corrupt=True)


def weight_of(ref: PeerRef, step: int, fragment: int) -> float:
    """Every member has another weight, in every operation."""
    return float(int(ref.peer_id, 16) + 10 * (ref.incarnation + step) + 1000 * fragment)
