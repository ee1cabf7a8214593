# SPDX-License-Identifier: Apache-2.0
"""How long a plan takes over known links, and how to size its slices.

A slice of share x moves x · (whole buffer) over each edge of its two trees: `nbytes_up` if the hop ends in the root,
`nbytes_up_raw` if it ends before it, `nbytes_down` on the way back. With all slices together

    bandwidth = max of  bytes out of a member / upload
                        bytes into a member   / download
                        bytes from a to b     / rate[a][b]
    latency   = the longest way up to the root and the longest way down from it
    alone     = m chunks through the hops of these ways, of t_1 .. t_k seconds each:  Σ t_j + (m − 1) max t_j,
                where t is a chunk's bytes / speed of the pair
    time      = max over slices of  latency + max(bandwidth, alone)

A butterfly of n has 2 hops of latency, a ring 2(n − 1). Filling the pipeline costs what `alone` is above `bandwidth`:
mostly nothing, as a member that waits for one slice has another to send. Not in the model: processors, the start of
TCP, a member that is late, and the way of the last chunk behind the slowest link. What is not known (`inf`) does not
limit, so a prediction from few measurements is a lower bound.

Rules: floats in a fixed order, so that every machine finds the same bits; no plan is made or preferred here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from isthmus.collective.core.link_table import LinkTable, Matrix
from isthmus.collective.core.slices import NOBODY, Route

_SLACK = 1e-6
"""How far above the least time shares may lie to be more alike."""
_TINY = 1e-3
"""A share below this part of an equal one is 0: its chunks would cost more than they carry."""
_STEEPEST = 1e7
"""A slice that is slower than this alone, against 1 of a good one, gets nothing anyway."""
_TRUST = 2.0
"""Times an equal share: the most for a root of whose sending nothing is known. A newcomer may be slow."""
_CERTAIN = 1e-9
"""Relative rounding error that the linear programme is forgiven."""
_PIVOTS_A_VARIABLE = 20
"""Far above what is needed (about 2); beyond it the corner reached, which is a valid answer, is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes of the WHOLE buffer in each form that crosses a hop.

    Attributes:
        nbytes_up_raw: fp32, on hops towards the root that end before it.
        nbytes_up: encoded, on hops that end in the root.
        nbytes_down: the encoded result, on hops from the root.
        chunk_nbytes: fp32 bytes of the longest chunk. A slice smaller than this is one chunk.
    """

    nbytes_up_raw: float
    nbytes_up: float
    nbytes_down: float
    chunk_nbytes: float


def predict(routes: Sequence[Route], shares: Sequence[float], volume: Volume, table: LinkTable) -> float:
    """Seconds that the plan takes (formula above); inf if it needs a pair that cannot speak.

    Args:
        routes: the trees of each slice.
        shares: for each slice its part of the buffer; they sum to 1.
    """
    if len(shares) != len(routes) or not any(shares):
        raise ValueError(f"{len(shares)} shares for {len(routes)} slices, of which some must be above 0")
    bandwidth_s = max((_dot(limit, shares) for limit in _limits(routes, volume, table)), default=0.0)
    if bandwidth_s == inf:
        return inf
    sized = [(route, share) for route, share in zip(routes, shares, strict=True) if share > 0]
    return max(_slice_s(route, share, bandwidth_s, volume, table) for route, share in sized)


def paces(routes: Sequence[Route], shares: Sequence[float], volume: Volume, table: LinkTable) -> Matrix:
    """At what speed each member sends to each other one if everything is to arrive at the same time: [from][to].

    Bytes/s; inf where nothing that is known limits the plan.
    """
    bandwidth_s = max((_dot(limit, shares) for limit in _limits(routes, volume, table)), default=0.0)
    everybody = range(table.world_size)
    nbytes = [[0.0] * table.world_size for _ in everybody]
    for route, share in zip(routes, shares, strict=True):
        for hop in _up_hops(route, volume) + _down_hops(route, volume):
            nbytes[hop.sender][hop.receiver] += share * hop.nbytes
    return tuple(tuple(moved / bandwidth_s if bandwidth_s > 0 else inf for moved in row) for row in nbytes)


def best_shares(routes: Sequence[Route], volume: Volume, table: LinkTable) -> tuple[float, ...]:
    """The shares that make the bandwidth term least (within 0.2 %), and among those the ones most alike.

    Two linear programmes: the least time T in which all bytes fit through all limits, then the least largest share
    within T. A slice whose root only slows the others gets 0; one whose root's sending is unknown at most twice an
    equal share; with nothing known all are equal.

    Returns:
        One share for each slice, from 0 up; they sum to 1.
    """
    num_slices = len(routes)
    limits = _limits(routes, volume, table)
    blocked = {slice_ for limit in limits for slice_, seconds in limit.items() if seconds == inf}
    open_ = [slice_ for slice_ in range(num_slices) if slice_ not in blocked]
    if not open_ or not limits:
        return (1 / num_slices,) * num_slices
    rows = [[limit.get(slice_, 0.0) for slice_ in open_] for limit in limits]
    most = max(_TRUST / num_slices, 1 / len(open_))
    caps = [most if _is_stranger(routes[slice_].root, table) else 1.0 for slice_ in open_]
    shares = [0.0] * num_slices
    for slice_, share in zip(open_, _most_alike(rows, caps), strict=True):
        shares[slice_] = share
    return tuple(shares)


def _is_stranger(rank: int, table: LinkTable) -> bool:
    others = [other for other in range(table.world_size) if other != rank]
    return table.upload[rank] == inf and all(table.rate[rank][other] == inf for other in others)


def _limits(routes: Sequence[Route], volume: Volume, table: LinkTable) -> list[Mapping[int, float]]:
    """All that bytes must go through: for each slice that does, the seconds it would take as the whole buffer."""
    edges: dict[tuple[int, int], dict[int, float]] = {}
    for slice_, route in enumerate(routes):
        for hop in _up_hops(route, volume) + _down_hops(route, volume):
            _add(edges.setdefault((hop.sender, hop.receiver), {}), {slice_: hop.nbytes})
    everybody = range(table.world_size)
    sent: list[dict[int, float]] = [{} for _ in everybody]
    received: list[dict[int, float]] = [{} for _ in everybody]
    limits: list[Mapping[int, float]] = []
    for (sender, receiver), loads in edges.items():
        rate = table.rate[sender][receiver]
        if rate < min(table.upload[sender], table.download[receiver]):  # else one of the two holds it already
            limits.append(_seconds(loads, rate))
        _add(sent[sender], loads)
        _add(received[receiver], loads)
    limits.extend(_seconds(sent[rank], table.upload[rank]) for rank in everybody)
    limits.extend(_seconds(received[rank], table.download[rank]) for rank in everybody)
    return [limit for limit in limits if any(limit.values())]


class _Hop(NamedTuple):
    """The edge of a tree between a member and its parent."""

    member: int
    parent: int
    sender: int
    receiver: int
    nbytes: float
    """If the slice were the whole buffer."""


def _up_hops(route: Route, volume: Volume) -> list[_Hop]:
    return [
        _Hop(rank, parent, rank, parent, volume.nbytes_up if parent == route.root else volume.nbytes_up_raw)
        for rank, parent in enumerate(route.up)
        if parent != NOBODY
    ]


def _down_hops(route: Route, volume: Volume) -> list[_Hop]:
    return [
        _Hop(rank, parent, parent, rank, volume.nbytes_down)
        for rank, parent in enumerate(route.down)
        if parent != NOBODY
    ]


def _add(total: dict[int, float], loads: Mapping[int, float]) -> None:
    for slice_, nbytes in loads.items():
        total[slice_] = total.get(slice_, 0.0) + nbytes


def _seconds(loads: Mapping[int, float], rate: float) -> dict[int, float]:
    return {slice_: _time(nbytes, rate) for slice_, nbytes in loads.items()}


def _time(nbytes: float, rate: float) -> float:
    if nbytes == 0:
        return 0.0
    return nbytes / rate if rate > 0 else inf


def _dot(limit: Mapping[int, float], shares: Sequence[float]) -> float:
    return sum(seconds * shares[slice_] for slice_, seconds in limit.items() if shares[slice_] > 0)


# ------------------------------------------------------------------------------------------------ one slice's way
def _slice_s(route: Route, share: float, bandwidth_s: float, volume: Volume, table: LinkTable) -> float:
    """Seconds until the last member has the slice, if all slices together need `bandwidth_s`."""
    whole = volume.nbytes_up_raw
    part = min(volume.chunk_nbytes / whole, share) if whole > 0 else 0.0
    num_chunks = share / part if part > 0 else 1.0
    latency_s = chunk_s = slowest_s = 0.0
    for hops in (_up_hops(route, volume), _down_hops(route, volume)):
        chunks = [_time(part * hop.nbytes, table.speed(hop.sender, hop.receiver)) for hop in hops]
        latency_s += _longest(hops, [table.latency_s[hop.sender][hop.receiver] for hop in hops])
        chunk_s += _longest(hops, chunks)
        slowest_s = max([slowest_s, *chunks])
    return latency_s + max(bandwidth_s, chunk_s + (num_chunks - 1) * slowest_s)


def _longest(hops: Sequence[_Hop], seconds: Sequence[float]) -> float:
    """The longest way between the root and a member of the tree."""
    own = {hop.member: (hop.parent, own_s) for hop, own_s in zip(hops, seconds, strict=True)}
    whole: dict[int, float] = {}
    for hop in hops:
        steps = []
        member = hop.member
        while member in own and member not in whole:
            steps.append(member)
            member = own[member][0]
        for step in reversed(steps):
            parent, own_s = own[step]
            whole[step] = whole.get(parent, 0.0) + own_s
    return max(whole.values(), default=0.0)


# ------------------------------------------------------------------------------------------------ the linear programmes
def _most_alike(rows: Sequence[Sequence[float]], caps: Sequence[float]) -> list[float]:
    """Shares x with 0 ≤ x ≤ caps and Σx = 1 that minimise max(rows · x), the largest of them as small as can be.

    Both programmes have the form: maximise Σu with  A u ≤ 1,  (B − T) u ≤ 0,  u ≥ 0;  then x = u / Σu has the least
    max(A x) under B x ≤ T. First A holds the rows, then A is the identity and B holds the rows. Caps are in B.
    """
    num_slices = len(caps)
    equal_s = max(sum(row) / num_slices for row in rows)
    alone_s = [max(row[column] for row in rows) for column in range(num_slices) if caps[column] == 1]
    scale = min([equal_s, *(seconds for seconds in alone_s if seconds > 0)])
    if scale == 0 or equal_s == inf:
        return [1 / num_slices] * num_slices
    floor = _TINY / num_slices  # a time that is not improved on; above it without caps, as some share is ≥ 1 / n
    scaled = [[min(seconds / scale, _STEEPEST) for seconds in row] for row in rows]
    scaled = [[floor] * num_slices, *(row for row in scaled if max(row) > floor)]
    identity = [[float(row == column) for column in range(num_slices)] for row in range(num_slices)]
    capped = [_less(row, cap) for row, cap in zip(identity, caps, strict=True) if cap < 1]

    def least_time(active: list[list[float]]) -> tuple[list[float], float]:
        totals = _maximise_sum(active + capped, [1.0] * len(active) + [0.0] * len(capped))
        return _to_shares(totals), 1 / sum(totals)

    best = _with_cuts(scaled, least_time)[1] * (1 + _SLACK)

    def alike(active: list[list[float]]) -> tuple[list[float], float]:
        within = capped + [_less(row, best) for row in active]
        return _to_shares(_maximise_sum(identity + within, [1.0] * num_slices + [0.0] * len(within))), best

    return _cleaned(_with_cuts(scaled, alike)[0])


def _less(row: Sequence[float], level: float) -> list[float]:
    return [value - level for value in row]


def _with_cuts(
    rows: list[list[float]], solve: Callable[[list[list[float]]], tuple[list[float], float]]
) -> tuple[list[float], float]:
    """Solve with the rows that matter: begin with the heaviest, add those that the answer exceeds, until none is left.

    Of the n² pairs of a large world only a few bind; a programme with all of them would be slow.
    """
    num_slices = len(rows[0])
    by_weight = sorted(range(len(rows)), key=lambda index: (-sum(rows[index]), index))
    bounding = {max(by_weight, key=lambda index: rows[index][column]) for column in range(num_slices)}
    active = sorted(bounding.union(by_weight[:num_slices]))
    while True:
        shares, level = solve([rows[index] for index in active])
        loads = [sum(map(float.__mul__, row, shares)) for row in rows]
        above = [index for index in range(len(rows)) if loads[index] > level * (1 + _CERTAIN)]
        added = sorted(set(above) - set(active), key=lambda index: (-loads[index], index))[:num_slices]
        if not added:
            return shares, level
        active += added


def _to_shares(totals: Sequence[float]) -> list[float]:
    whole = sum(totals)
    return [total / whole for total in totals] if whole > 0 else [1 / len(totals)] * len(totals)


def _cleaned(shares: Sequence[float]) -> list[float]:
    return _to_shares([share if share * len(shares) >= _TINY else 0.0 for share in shares])


def _maximise_sum(rows: Sequence[Sequence[float]], bounds: Sequence[float]) -> list[float]:
    """The u ≥ 0 with the largest Σu under rows · u ≤ bounds, by the simplex method (Dantzig 1947) on a dense table.

    Args:
        bounds: from 0 up, so that u = 0 is a corner to begin at. The rows must bound every variable.
    """
    num_variables = len(rows[0])
    table = [[*row, bound] for row, bound in zip(rows, bounds, strict=True)]
    gain = [1.0] * num_variables + [0.0]
    outside = list(range(num_variables))  # which variable a column is: those that are 0 now
    inside = [num_variables + index for index in range(len(rows))]  # which variable a row is
    stands_still = False
    for _ in range(_PIVOTS_A_VARIABLE * (num_variables + len(rows))):
        better = [column for column in range(num_variables) if gain[column] > _CERTAIN]
        if not better:
            break
        # Bland's rule (1977) ends the circles that steps of length 0 can go in; otherwise the steepest way is shorter.
        column = min(better, key=lambda at: (0.0 if stands_still else -gain[at], outside[at]))
        candidates = [row for row in range(len(table)) if table[row][column] > _CERTAIN]
        if not candidates:
            raise ValueError("the rows do not bound every variable")
        step, _, row = min((table[at][-1] / table[at][column], inside[at], at) for at in candidates)
        stands_still = step < _CERTAIN
        _pivot(table, gain, row, column)
        outside[column], inside[row] = inside[row], outside[column]
    found = [0.0] * num_variables
    for variable, line in zip(inside, table, strict=True):
        if variable < num_variables:
            found[variable] = line[-1]
    return found


def _pivot(table: list[list[float]], gain: list[float], row: int, column: int) -> None:
    """Exchange the variables of this row and this column."""
    pivot = table[row][column]
    line = [value / pivot for value in table[row]]
    line[column] = 1 / pivot
    table[row] = line
    for other in [*table, gain]:
        factor = other[column]
        if other is line or factor == 0:
            continue
        other[column] = 0.0
        other[:] = [value - factor * step for value, step in zip(other, line, strict=True)]
        if other is not gain:
            other[-1] = max(0.0, other[-1])  # rounding only: the row was chosen so that none falls below
