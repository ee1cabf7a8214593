"""From what members saw of their links to one table."""

import asyncio
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from collective.core.survey import Observation, table_of

MBIT = 1e6


def seen(rank, world_size, *, sent, received, one_way_s=0.01, sent_to=None):
    others = [0.0 if other == rank else one_way_s for other in range(world_size)]
    rates = [0.0 if other == rank else sent / (world_size - 1) for other in range(world_size)]
    return Observation(
        sent=sent, received=received, one_way_s=tuple(others), sent_to=tuple(rates if sent_to is None else sent_to)
    )


def test_a_slow_uplink_is_known_and_nobody_elses_line_is_blamed_for_it():
    world = [seen(rank, 4, sent=300 * MBIT, received=210 * MBIT) for rank in range(3)]
    world.append(seen(3, 4, sent=30 * MBIT, received=290 * MBIT))
    table = table_of(world)
    assert table.upload == (300 * MBIT,) * 3 + (30 * MBIT,)
    assert table.download == (inf,) * 4
    assert all(rate == inf for row in table.rate for rate in row)


def test_a_slow_downlink_is_the_receivers_limit_not_the_pairs():
    world = [
        seen(rank, 4, sent=300 * MBIT, received=250 * MBIT, sent_to=[100 * MBIT] * 3 + [10 * MBIT]) for rank in range(3)
    ]
    world.append(seen(3, 4, sent=300 * MBIT, received=30 * MBIT))
    table = table_of(world)
    assert table.download == (inf, inf, inf, 30 * MBIT)
    assert all(rate == inf for row in table.rate for rate in row)


def test_one_thin_pair_is_the_pairs_limit():
    world = [seen(rank, 3, sent=100 * MBIT, received=100 * MBIT) for rank in range(3)]
    world[0] = seen(0, 3, sent=100 * MBIT, received=100 * MBIT, sent_to=[0.0, 90 * MBIT, 10 * MBIT])
    table = table_of(world)
    assert table.rate[0] == (inf, inf, 10 * MBIT)
    assert table.download == (inf, inf, inf)


def test_nothing_seen_is_nothing_known():
    table = table_of([seen(rank, 3, sent=0.0, received=0.0, one_way_s=0.0) for rank in range(3)])
    assert table.says_nothing


def test_of_two_measured_round_trips_the_shorter_one_counts():
    world = [seen(0, 2, sent=1e6, received=1e6, one_way_s=0.09), seen(1, 2, sent=1e6, received=1e6, one_way_s=0.05)]
    assert table_of(world).latency_s == ((0.0, 0.05), (0.05, 0.0))


numbers = st.floats(allow_nan=True, allow_infinity=True)


def rows_of(size):
    row = st.lists(numbers, min_size=2 + 2 * size, max_size=2 + 2 * size)
    return st.lists(row, min_size=size, max_size=size)


@given(st.integers(1, 6).flatmap(rows_of))
def test_whatever_members_claim_makes_a_table(rows):
    table = table_of([Observation.from_numbers(row) for row in rows])
    assert table.world_size == len(rows)
    assert all(rate >= 0 for row in table.rate for rate in row)


def test_an_observation_survives_the_wire():
    observation = seen(1, 3, sent=5e6, received=7e6)
    assert Observation.from_numbers(observation.to_numbers()) == observation


async def test_members_come_to_the_same_table_and_forget_it_with_the_view(sites_running, view_of):
    async with sites_running(3) as sites:
        key = sites[0].communicator.key
        tables = await asyncio.gather(*(site.communicator.survey(key(0)) for site in sites))
        assert tables[0] == tables[1] == tables[2]
        assert tables[0].world_size == 3
        reports = sites[0].communicator.links()
        assert [report.peer_id for report in reports] == [site.me.peer_id for site in sites[1:]]
        assert all(report.bytes_sent > 0 and report.round_trip_s > 0 for report in reports)
        for site in sites:
            await site.communicator.install(view_of(sites, epoch=2))
        assert all(site.communicator._workplace._table is None for site in sites)
