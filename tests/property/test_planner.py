# SPDX-License-Identifier: Apache-2.0
"""Whatever the links are: shares are shares, better links are never worse, and names do not matter."""

from dataclasses import replace
from itertools import permutations
from math import inf, isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.core.cost import Volume, best_shares, predict
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.planner import choose
from isthmus.collective.core.ring_order import ring_order
from isthmus.collective.core.slices import Route, butterfly, gather, ring

RATES = st.one_of(st.floats(1e3, 1e9), st.just(inf), st.just(0.0))
"""bytes/s: a modem to ten Gbit/s, unknown, out of reach."""
LATENCIES = st.one_of(st.floats(0.0, 0.5), st.just(0.001), st.just(0.08))
patient = settings(deadline=None, max_examples=40)  # machines are slow at times; pytest bounds the whole


@st.composite
def tables(draw, min_size=1, max_size=6, rates=RATES, limits=RATES):
    size = draw(st.integers(min_size, max_size))

    def row(values):
        return st.tuples(*[values] * size)

    return LinkTable(
        latency_s=draw(row(row(LATENCIES))),
        rate=draw(row(row(rates))),
        upload=draw(row(limits)),
        download=draw(row(limits)),
    )


@st.composite
def volumes(draw):
    raw = draw(st.floats(0.0, 1e10))
    return Volume(
        nbytes_up_raw=raw,
        nbytes_up=raw * draw(st.sampled_from([1.0, 0.5, 0.25])),
        nbytes_down=raw * draw(st.sampled_from([1.0, 0.25])),
        chunk_nbytes=draw(st.sampled_from([0.0, 1e5, 1e6, 1e12])),
    )


@st.composite
def trees(draw, size):
    """Routes of every builder."""
    ranks = draw(st.permutations(range(size)))
    return draw(st.sampled_from([butterfly(size), ring(ranks), gather(size)]))


@st.composite
def plans(draw, **kwargs):
    table = draw(tables(**kwargs))
    routes = draw(trees(table.world_size))
    weights = draw(st.lists(st.integers(0, 9), min_size=len(routes), max_size=len(routes)).filter(any))
    return routes, [weight / sum(weights) for weight in weights], draw(volumes()), table


def equal(routes):
    return (1 / len(routes),) * len(routes)


def with_names(table, order):
    """The table of the same members, numbered anew in this order."""
    return LinkTable(
        latency_s=tuple(tuple(table.latency_s[a][b] for b in order) for a in order),
        rate=tuple(tuple(table.rate[a][b] for b in order) for a in order),
        upload=tuple(table.upload[rank] for rank in order),
        download=tuple(table.download[rank] for rank in order),
    )


def without_chunks(volume):
    return replace(volume, chunk_nbytes=0.0)


def without_latency(table):
    return replace(table, latency_s=LinkTable.unknown(table.world_size).latency_s)


@patient
@given(plans())
def test_best_shares_are_shares_and_not_worse_than_any_others(plan):
    routes, others, volume, table = plan
    shares = best_shares(routes, volume, table)
    assert len(shares) == len(routes)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    if all(limit < inf for limit in table.upload):  # else a stranger's share is held down, whatever it costs
        bytes_only, no_way = without_chunks(volume), without_latency(table)
        best_s = predict(routes, shares, bytes_only, no_way)
        assert best_s <= predict(routes, others, bytes_only, no_way) * 1.002
        assert best_s <= predict(routes, equal(routes), bytes_only, no_way) * 1.002


@patient
@given(tables(rates=st.floats(1e-300, 1e300), limits=st.floats(1e-300, 1e300)), volumes())
def test_links_as_different_as_numbers_can_be_still_have_shares(table, volume):
    shares = best_shares(butterfly(table.world_size), volume, table)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)


@patient
@given(plans(), st.data())
def test_a_faster_or_nearer_link_never_makes_a_plan_slower(plan, data):
    routes, shares, volume, table = plan
    ranks = st.integers(0, table.world_size - 1)
    a, b = data.draw(ranks), data.draw(ranks)
    factor = data.draw(st.sampled_from([1.01, 3.0, 1e6]))

    def changed(matrix, value):
        return tuple(
            tuple(value(old) if (a, b) == (i, j) else old for j, old in enumerate(row)) for i, row in enumerate(matrix)
        )

    def raised(limits):
        return tuple(limit * factor if rank == a else limit for rank, limit in enumerate(limits))

    better = data.draw(
        st.sampled_from(
            [
                replace(table, rate=changed(table.rate, lambda rate: rate * factor)),
                replace(table, latency_s=changed(table.latency_s, lambda latency_s: latency_s / factor)),
                replace(table, upload=raised(table.upload)),
                replace(table, download=raised(table.download)),
            ]
        )
    )
    before, after = predict(routes, shares, volume, table), predict(routes, shares, volume, better)
    assert not isnan(after)
    assert 0 <= after <= before * (1 + 1e-9)


@patient
@given(plans(), st.data())
def test_the_names_of_members_do_not_change_what_a_plan_costs(plan, data):
    routes, shares, volume, table = plan
    order = data.draw(st.permutations(range(table.world_size)))
    place = {rank: new for new, rank in enumerate(order)} | {-1: -1}
    renamed = [
        Route(
            root=place[route.root],
            up=tuple(place[route.up[rank]] for rank in order),
            down=tuple(place[route.down[rank]] for rank in order),
        )
        for route in routes
    ]
    seconds = predict(renamed, shares, volume, with_names(table, order))
    assert seconds == pytest.approx(predict(routes, shares, volume, table))


@patient
@given(tables(limits=st.floats(1e3, 1e9)), volumes().map(without_chunks), st.data())
def test_the_names_of_members_do_not_change_how_fast_the_choice_is(table, volume, data):
    """Known uplinks, no chunks: then a plan's seconds do not hang on which of several best shares is taken."""
    order = data.draw(st.permutations(range(table.world_size)))
    table = without_latency(table)
    seconds = choose(table, volume, only="butterfly").predicted_s
    assert choose(with_names(table, order), volume, only="butterfly").predicted_s == pytest.approx(seconds, rel=3e-3)


@patient
@given(tables(), volumes())
def test_no_choice_is_slower_than_a_butterfly_with_equal_shares(table, volume):
    choice = choose(table, volume)
    if choice.predicted_s is None:
        assert table.says_nothing
        return
    routes = butterfly(table.world_size)
    assert choice.predicted_s <= predict(routes, equal(routes), volume, table)
    assert choice.predicted_s == predict(choice.routes, choice.shares, volume, table)
    assert all(seconds >= choice.predicted_s * 0.95 for _, seconds in choice.rejected)


COSTS = st.one_of(st.floats(0.0, 100.0), st.integers(0, 3).map(float), st.just(inf))


@patient
@given(
    st.integers(3, 6).flatmap(
        lambda size: st.lists(st.lists(COSTS, min_size=size, max_size=size), min_size=2 * size, max_size=2 * size)
    )
)
def test_the_order_of_a_small_ring_is_the_best_of_all(rows):
    size = len(rows) // 2
    cost, bottleneck = rows[:size], rows[size:]

    def edges(order):
        return list(zip(order, [*order[1:], order[0]], strict=True))

    def total(order, slowest=lambda order: 0.0):
        return sum(cost[a][b] for a, b in edges(order)) + slowest(order)

    def slowest(order):
        return max(bottleneck[a][b] for a, b in edges(order))

    rounds = [(0, *rest) for rest in permutations(range(1, size))]
    assert total(ring_order(cost)) == pytest.approx(min(map(total, rounds)))
    best = min(total(order, slowest) for order in rounds)
    assert total(ring_order(cost, bottleneck), slowest) == pytest.approx(best)
