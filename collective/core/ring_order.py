# SPDX-License-Identifier: Apache-2.0
"""The order of a ring: the shortest round trip through all members.

    minimise  max of bottleneck[a][b] + sum of cost[a][b]   over the edges a → b of the round

The first part is what bandwidth costs a ring: all bytes go over every edge, so only the slowest counts. The second is
latency, which adds up. Costs may differ by direction. Up to 10 members the answer is the best there is (Held and Karp
1962); above, the nearest-neighbour round from each of several starts is improved by moving and turning pieces.

Rules: the first of equal answers in a fixed order, so that every machine finds the same one.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, isnan

Matrix = Sequence[Sequence[float]]

_EXACT = 10
"""Members up to which all orders are considered: 2^n n^2 steps, 20 ms."""
_IMPROVED = 4
"""Nearest-neighbour rounds that are improved: the shortest ones."""
_MAX_PIECE = 3
"""Longest run of members that is moved elsewhere at once (Or 1976)."""
_TRIES = 8
_STRICTER = 0.8
"""Above the exact size this many bottlenecks are tried, each at least a fifth below the one found before."""
_GAIN = 1e-9
"""Improvements below this part of the largest cost are rounding."""


def ring_order(cost: Matrix, bottleneck: Matrix | None = None) -> tuple[int, ...]:
    """Every member once, beginning with 0; each sends to the next, the last to 0.

    Args:
        cost: [from][to], added up over the ring; inf for a pair that cannot be used.
        bottleneck: [from][to] in the unit of `cost`; only the largest on the ring counts. Without it, 0.

    Raises:
        ValueError: not square, or a cost that is negative or not a number.
    """
    size = len(cost)
    for matrix in (cost, cost if bottleneck is None else bottleneck):
        if len(matrix) != size or any(len(row) != size for row in matrix):
            raise ValueError(f"costs must be {size} x {size}")
        if any(isnan(value) or value < 0 for row in matrix for value in row):
            raise ValueError("costs must be numbers from 0 up")
    if size <= 2:
        return tuple(range(size))
    if bottleneck is None:
        return _least_sum(cost)
    return _least_sum_and_slowest(cost, bottleneck)


def _least_sum_and_slowest(cost: Matrix, bottleneck: Matrix) -> tuple[int, ...]:
    """Rounds of ever faster slowest edges and ever larger sums, until the sum alone is above the best."""
    everybody = range(len(cost))
    fastest = max(min(bottleneck[a][b] for b in everybody if b != a) for a in everybody)  # each must send to somebody
    allowed = inf
    best: tuple[int, ...] = ()
    best_total = inf
    tries = 0
    while tries < _TRIES or len(cost) <= _EXACT:
        tries += 1
        order = _least_sum([[cost[a][b] if bottleneck[a][b] < allowed else inf for b in everybody] for a in everybody])
        slowest = max(bottleneck[a][b] for a, b in _edges(order))
        total = slowest + _sum(order, cost)
        if not best or total < best_total:
            best, best_total = order, total
        if slowest >= allowed or _sum(order, cost) + fastest >= best_total or slowest <= fastest:
            break
        allowed = slowest if len(cost) <= _EXACT else slowest * _STRICTER
    return best


def _least_sum(cost: Matrix) -> tuple[int, ...]:
    """The round with the least sum. A pair that cannot be used is one that costs more than all others together."""
    everybody = range(len(cost))
    usable = [cost[a][b] for a in everybody for b in everybody if a != b and cost[a][b] < inf]
    forbidden = (1.0 + max(usable, default=0.0)) * len(cost)
    finite = [[min(cost[a][b], forbidden) for b in everybody] for a in everybody]
    return _exact(finite) if len(cost) <= _EXACT else _searched(finite)


def _edges(order: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(order, [*order[1:], order[0]], strict=True))


def _sum(order: Sequence[int], cost: Matrix) -> float:
    return sum(cost[a][b] for a, b in _edges(order))


# -------------------------------------------------------------------------------------------------------------- exact
def _exact(cost: Matrix) -> tuple[int, ...]:
    """Held and Karp: the least cost of the rest of the way, for every set of members left and every place to be.

    Bit k of a set is member k + 1, as member 0 is where the round begins and ends.
    """
    size = len(cost)
    rest = [[row[0] for row in cost]]  # rest[set][at]; nobody left: only the way home
    for left in range(1, 1 << (size - 1)):
        members = [k + 1 for k in range(size - 1) if left >> k & 1]
        ways = [(member, rest[left ^ 1 << (member - 1)][member]) for member in members]
        rest.append([min(cost[at][member] + way for member, way in ways) for at in range(size)])
    order = [0]
    left = (1 << (size - 1)) - 1
    while left:
        at = order[-1]
        members = [k + 1 for k in range(size - 1) if left >> k & 1]
        order.append(min(members, key=lambda member: cost[at][member] + rest[left ^ 1 << (member - 1)][member]))
        left ^= 1 << (order[-1] - 1)
    return tuple(order)


# ----------------------------------------------------------------------------------------------------------- searched
def _searched(cost: Matrix) -> tuple[int, ...]:
    """Nearest neighbours from every start, the shortest rounds improved until nothing helps."""
    rounds = sorted({tuple(_from_zero(_nearest(start, cost))) for start in range(len(cost))})
    rounds.sort(key=lambda order: _sum(order, cost))
    improved = [_from_zero(_improve(list(order), cost)) for order in rounds[:_IMPROVED]]
    sums = [_sum(order, cost) for order in improved]
    return tuple(improved[sums.index(min(sums))])


def _nearest(start: int, cost: Matrix) -> list[int]:
    order = [start]
    left = [member for member in range(len(cost)) if member != start]
    while left:
        row = cost[order[-1]]
        following = min(left, key=lambda member: row[member])
        order.append(following)
        left.remove(following)
    return order


def _from_zero(order: list[int]) -> list[int]:
    at = order.index(0)
    return order[at:] + order[:at]


def _improve(order: list[int], cost: Matrix) -> list[int]:
    least = _GAIN * max(map(max, cost))
    better: list[int] | None = order
    while better is not None:
        order = better
        better = _with_piece_moved(order, cost, least) or _with_piece_turned(order, cost, least)
    return order


def _with_piece_moved(order: list[int], cost: Matrix, least: float) -> list[int] | None:
    """The round with up to three members taken out and put in elsewhere, as they stand; None if none is shorter."""
    size = len(order)
    for length in range(1, _MAX_PIECE + 1):
        for start in range(size):
            turned = order[start:] + order[:start]
            piece, others = turned[:length], turned[length:]
            head, tail = piece[0], piece[-1]
            gap = cost[others[-1]][others[0]]
            gain = cost[others[-1]][head] + cost[tail][others[0]] - gap
            prices = [cost[a][head] + cost[tail][b] - cost[a][b] for a, b in pairwise(others)]
            price = min(prices)
            if gain - price > least:
                place = prices.index(price) + 1
                return others[:place] + piece + others[place:]
    return None


def _with_piece_turned(order: list[int], cost: Matrix, least: float) -> list[int] | None:
    """The round with one piece passed the other way (2-opt; the piece's own edges change as well); None if no gain."""
    along = [0.0, *accumulate(cost[a][b] for a, b in pairwise(order))]
    back = [0.0, *accumulate(cost[b][a] for a, b in pairwise(order))]
    for first in range(1, len(order) - 1):
        before, head = order[first - 1], order[first]
        for last in range(first + 1, len(order)):
            tail, after = order[last], order[(last + 1) % len(order)]
            now = cost[before][head] + along[last] - along[first] + cost[tail][after]
            then = cost[before][tail] + back[last] - back[first] + cost[head][after]
            if now - then > least:
                return order[:first] + order[first : last + 1][::-1] + order[last + 1 :]
    return None
