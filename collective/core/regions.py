# SPDX-License-Identifier: Apache-2.0
"""Which members are near each other, and which lines between such groups several pairs seem to share.

Rules: follows from the table alone. A guess about a shared line is made only where the measured rates speak for one.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from isthmus.collective.core.link_table import LinkTable, Trunk

_GAP = 3.0
"""A region ends where the next member is this many times farther than the farthest step inside."""
_NEAR_S = 1e-3
"""Below this the distance says nothing: peers of one site."""
_FULL = 0.8
"""A pair that reaches this part of what its two ends can do is held back by the ends, not by the way between."""


def regions(table: LinkTable) -> tuple[tuple[int, ...], ...]:
    """Groups of near peers, found by single linkage on one-way latency.

    Two peers are linked if the slower of their two directions is below a threshold; regions are what hangs together.
    As the threshold rises, groups merge at n - 1 distances. The threshold is laid into the largest ratio between
    neighbouring distances, if that is at least 3; the wider of two equal gaps counts. What nobody has measured (0 s)
    counts as near: it may hide a region but invents none.

    Returns:
        Every rank once, ascending in its region, regions by their first rank. All in one region if there is no gap.
    """
    everybody = range(table.world_size)
    groups = [[rank] for rank in everybody]
    steps = sorted(
        (max(table.latency_s[a][b], table.latency_s[b][a], _NEAR_S), a, b) for a in everybody for b in range(a)
    )
    merges: list[float] = []
    stages: list[list[list[int]]] = [groups]
    for distance, a, b in steps:
        first = next(group for group in groups if a in group)
        second = next(group for group in groups if b in group)
        if first is not second:
            groups = [group for group in groups if group is not first and group is not second]
            groups.append(sorted(first + second))
            merges.append(distance)
            stages.append(groups)
    gaps = [
        (far / near, index)
        for index, (near, far) in enumerate(pairwise(merges), start=1)
        if near < inf and far / near >= _GAP
    ]
    chosen = stages[max(gaps)[1]] if gaps else [list(everybody)]
    return tuple(tuple(group) for group in sorted(chosen))


def guess_trunks(table: LinkTable, found: Sequence[Sequence[int]]) -> tuple[Trunk, ...]:
    """Lines between regions that all their pairs seem to share.

    A pair is measured alone, so a table of pairs cannot show that they share a line. If every pair from one region to
    another is slower than 0.8 of what its two ends reach elsewhere, something between holds all of them back, and they
    are taken to share what the fastest of them reaches. If it is each connection that is held back (loss, a window),
    the guess is wrong by what it costs to send more around inside the regions; the other error costs a factor of the
    number of pairs.
    """
    trunks = []
    for here in found:
        for there in found:
            pairs = [(a, b) for a in here for b in there]
            if here is not there and all(_held_back(table, a, b) for a, b in pairs):
                rate = max(table.rate[a][b] for a, b in pairs)
                trunks.append(Trunk(senders=tuple(here), receivers=tuple(there), rate=rate))
    return tuple(trunks)


def _held_back(table: LinkTable, sender: int, receiver: int) -> bool:
    """Whether both ends can do clearly more than this pair does."""
    others = [rank for rank in range(table.world_size) if rank not in (sender, receiver)]
    reaches = _known(table.upload[sender], [table.rate[sender][rank] for rank in others])
    takes = _known(table.download[receiver], [table.rate[rank][receiver] for rank in others])
    return table.rate[sender][receiver] < _FULL * min(reaches, takes)


def _known(limit: float, rates: Sequence[float]) -> float:
    """What an end can do: its limit, or else the best it was seen to do, or else nothing for certain."""
    if limit < inf:
        return limit
    return max((rate for rate in rates if rate < inf), default=0.0)
