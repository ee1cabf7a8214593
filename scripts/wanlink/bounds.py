# SPDX-License-Identifier: Apache-2.0
"""How fast an exchange could be at best on a given network.

Rules: pure arithmetic; no overhead is counted (headers, losses, computation), so nothing can be faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BISECTIONS = 100  # far beyond the precision of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """The best time, and the slices that reach it.

    Attributes:
        seconds: no butterfly all-reduce on this network takes less.
        shares: [peer], the part of the tensor that the peer reduces; they sum to 1.
    """

    seconds: float
    shares: tuple[float, ...]


def lower_bound(
    nbytes: float,
    up_bytes_per_s: Sequence[float],
    down_bytes_per_s: Sequence[float],
    *,
    one_way_s: float = 0.0,
    trips: int = 2,
) -> LowerBound:
    """The least time of a butterfly all-reduce of `nbytes` (4 per fp32 element) between N peers.

    Peer i reduces a share s_i of the tensor, Σ s_i = 1. It sends its own contribution to everybody else's slices,
    nbytes · (1 − s_i), and its finished slice to the N − 1 others; it receives as much:

        out_i = in_i = nbytes · ((1 − s_i) + (N − 1) · s_i) = nbytes · (1 + (N − 2) · s_i)

    A finished slice needs contributions that were under way once, and is under way once itself:

        T = min over s of max over i of max(out_i / up_i, in_i / down_i), plus two one-way trips

    Two peers can swap their tensors and both add them up: as many bytes, and a single trip.

    For a given T, s_i can be at most (T · rate_i / nbytes − 1) / (N − 2), with rate_i the lesser of the two rates; T
    can be met if no such bound is negative and they sum to 1 or more. Both are monotone in T: hence a bisection.

    Args:
        nbytes: size of the tensor as it is sent, > 0.
        up_bytes_per_s, down_bytes_per_s: [peer], > 0; N ≥ 2 of each.
        one_way_s: delay between two peers; the least of them, where they differ.
        trips: how often that is waited for.

    Raises:
        ValueError: an argument is out of these ranges.
    """
    if len(up_bytes_per_s) != len(down_bytes_per_s) or len(up_bytes_per_s) < 2:
        raise ValueError("give an up and a down rate for each of at least two peers")
    rates = [min(pair) for pair in zip(up_bytes_per_s, down_bytes_per_s, strict=True)]
    if nbytes <= 0 or min(rates) <= 0 or one_way_s < 0:
        raise ValueError("nbytes and every rate must be above 0, and the delay not below")
    too_short = nbytes / max(rates)  # less than this, and nobody could send even its own contribution
    # A slice as large as the tensor is the most anybody can have: then all are at their bound of 1.
    enough = nbytes * (len(rates) - 1) / min(rates)
    for _ in range(BISECTIONS):
        middle = (too_short + enough) / 2
        if _most_shares(middle, nbytes, rates) is None:
            too_short = middle
        else:
            enough = middle
    most = _most_shares(enough, nbytes, rates)
    assert most is not None, "the upper end of the bisection can be met"
    total = sum(most)
    return LowerBound(seconds=enough + trips * one_way_s, shares=tuple(share / total for share in most))


def _most_shares(seconds: float, nbytes: float, rates: Sequence[float]) -> list[float] | None:
    """The largest share each peer can have within the time; None if that does not cover the tensor."""
    others = len(rates) - 2
    most = []
    for rate in rates:
        room = seconds * rate / nbytes - 1.0
        if room < 0:
            return None
        most.append(min(1.0, room / others) if others else 1.0)
    return most if sum(most) >= 1.0 else None
