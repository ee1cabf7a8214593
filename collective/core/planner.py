# SPDX-License-Identifier: Apache-2.0
"""Which plan a view uses: the butterfly or a ring.

    butterfly   two one-way trips; every pair exchanges, or, where some pairs have no link, all do with those that have
    ring        2(n - 1) trips; each member speaks with two others only

Rules: every member must come to the same choice from the same table, so nothing else is asked: no clock, no chance, no
order of hashing. The trees are made by `slices`, seconds are counted by `cost`; here is only the choosing.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from isthmus.collective.core.apart import Apart, are_apart, hubs
from isthmus.collective.core.cost import Volume, best_shares, paces, predict
from isthmus.collective.core.link_table import LinkTable, Matrix
from isthmus.collective.core.ring_order import ring_order
from isthmus.collective.core.slices import NOBODY, Route, butterfly, ring

PLANS = ("butterfly", "ring")

_WORTH = 0.95
"""A ring must need less than this part of the butterfly's time: it has more hops that can go wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan and what speaks for it.

    Attributes:
        name: one of `PLANS`.
        routes, shares: for each slice its trees and its part of the buffer; shares sum to 1.
        predicted_s: seconds; inf if the plan needs a pair that cannot speak; None if nothing is known of the links.
        rejected: the other plans considered, with their seconds.
        paces: see cost.paces; None if nothing is known of the links.
    """

    name: str
    routes: tuple[Route, ...]
    shares: tuple[float, ...]
    predicted_s: float | None
    rejected: tuple[tuple[str, float], ...] = ()
    paces: Matrix | None = None

    def is_possible(self, apart: Apart) -> bool:
        """Whether nothing goes from one to the other of two members that have no link."""
        sized = [route for route, share in zip(self.routes, self.shares, strict=True) if share > 0]
        trees = [tree for route in sized for tree in (route.up, route.down)]
        hops = ((rank, parent) for tree in trees for rank, parent in enumerate(tree) if parent != NOBODY)
        return not any(are_apart(apart, *hop) for hop in hops)


class _Plan(NamedTuple):
    name: str
    routes: tuple[Route, ...]
    shares: tuple[float, ...]
    predicted_s: float


def choose(table: LinkTable, volume: Volume, *, only: str | None = None) -> Choice:
    """The plan for all members of this table.

    The ring if it saves more than 5 % by prediction, else the butterfly. With nothing known (`LinkTable.unknown`) it
    is the butterfly with equal shares, and no prediction.

    Where some pairs have no link (0 bytes/s), only who has links with all is a root of the butterfly.

    Args:
        only: consider this plan alone.

    Raises:
        ValueError: no members, or an unknown name.
    """
    if table.world_size == 0 or (only is not None and only not in PLANS):
        raise ValueError(f"no plan {only!r} for {table.world_size} members")
    if table.says_nothing:
        name = only or "butterfly"
        routes = _routes(name, table, volume)
        shares = (1 / len(routes),) * len(routes)
        return Choice(name=name, routes=routes, shares=shares, predicted_s=None)
    considered = [only] if only is not None else PLANS if table.world_size > 2 else PLANS[:1]
    tried = [_sized(name, _routes(name, table, volume), volume, table) for name in considered]
    chosen = tried[-1] if tried[-1].predicted_s < _WORTH * tried[0].predicted_s else tried[0]
    return Choice(
        name=chosen.name,
        routes=chosen.routes,
        shares=chosen.shares,
        predicted_s=chosen.predicted_s,
        rejected=tuple((plan.name, plan.predicted_s) for plan in tried if plan is not chosen),
        paces=paces(chosen.routes, chosen.shares, volume, table),
    )


def _routes(name: str, table: LinkTable, volume: Volume) -> tuple[Route, ...]:
    if name == "ring":
        return ring(_order(table, volume))
    return butterfly(table.world_size, hubs(table.world_size, table.apart) or None)


def _order(table: LinkTable, volume: Volume) -> tuple[int, ...]:
    """The ring's order for equal slices: the seconds of its slowest edge, and every latency twice, up and down."""
    size = table.world_size
    everybody = range(size)
    nbytes = (volume.nbytes_up_raw * (size - 2) + volume.nbytes_up + volume.nbytes_down * (size - 1)) / size
    slowest = [[0.0] * size for _ in everybody]
    for a in everybody:
        for b in everybody:
            speed = table.speed(a, b)
            if a != b and nbytes > 0:
                slowest[a][b] = nbytes / speed if speed > 0 else inf
    return ring_order([[2 * latency_s for latency_s in row] for row in table.latency_s], slowest)


def _sized(name: str, routes: tuple[Route, ...], volume: Volume, table: LinkTable) -> _Plan:
    """The plan with the better of best and equal shares: equal ones have the smallest chunks to wait for."""
    equal = (1 / len(routes),) * len(routes)
    plans = [
        _Plan(name, routes, shares, predict(routes, shares, volume, table))
        for shares in (equal, best_shares(routes, volume, table))
    ]
    return min(plans, key=lambda plan: plan.predicted_s)
