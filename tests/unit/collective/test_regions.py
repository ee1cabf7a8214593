# SPDX-License-Identifier: Apache-2.0
"""Who is near whom, and which lines are shared."""

from math import inf

import pytest

from isthmus.collective.core.link_table import LinkTable, Trunk
from isthmus.collective.core.regions import guess_trunks, regions


def make_table(latency_s, rate=lambda a, b: inf, size=8, upload=inf):
    everybody = range(size)
    return LinkTable(
        latency_s=tuple(tuple(0.0 if a == b else latency_s(a, b) for b in everybody) for a in everybody),
        rate=tuple(tuple(0.0 if a == b else rate(a, b) for b in everybody) for a in everybody),
        upload=(upload,) * size,
        download=(upload,) * size,
    )


def test_two_sites_far_apart_are_two_regions():
    table = make_table(lambda a, b: 0.001 if a // 4 == b // 4 else 0.08)
    assert regions(table) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_regions_need_not_be_in_order_nor_of_one_size():
    place = [2, 0, 2, 1, 0, 2, 2, 0]
    table = make_table(lambda a, b: 0.004 if place[a] == place[b] else 0.04 + 0.001 * (a + b))
    assert regions(table) == ((0, 2, 5, 6), (1, 4, 7), (3,))


def test_a_region_may_be_a_chain_of_neighbours():
    """Single linkage: the ends of a region may be far from each other."""
    at = [0, 10, 20, 30, 200, 210, 220, 230]
    table = make_table(lambda a, b: abs(at[a] - at[b]) / 1000)
    assert regions(table) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_the_widest_gap_counts():
    """Machines in cities on two continents: 2 ms, 20 ms (ten times), 70 ms (three and a half times)."""
    table = make_table(lambda a, b: 0.002 if a // 2 == b // 2 else 0.02 if a // 4 == b // 4 else 0.07)
    assert regions(table) == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    "latency_s",
    [
        lambda a, b: 0.05,
        lambda a, b: 0.02 + 0.005 * abs(a - b),
        lambda a, b: 0.02 if a // 4 == b // 4 else 0.055,
        lambda a, b: 0.00005 if a // 4 == b // 4 else 0.0009,  # one site: below a millisecond nothing is far
        lambda a, b: inf,
    ],
    ids=["equal", "even", "not three times", "one site", "unreachable"],
)
def test_without_a_gap_all_are_one_region(latency_s):
    assert regions(make_table(latency_s)) == (tuple(range(8)),)
    assert regions(LinkTable.unknown(8)) == (tuple(range(8)),)


def test_the_slower_direction_decides():
    table = make_table(lambda a, b: 0.08 if a < 4 <= b else 0.001)
    assert regions(table) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("size", [0, 1, 2])
def test_up_to_two_members_are_one_region(size):
    table = make_table(lambda a, b: 0.3, size=size)
    assert [len(region) for region in regions(table)] == [size]


SITES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("upload", [inf, 1250.0], ids=["seen inside", "known"])
def test_pairs_that_are_all_slower_than_their_ends_are_taken_to_share_a_line(upload):
    table = make_table(lambda a, b: 0.04, rate=lambda a, b: 1250.0 if a // 4 == b // 4 else 125.0 - a, upload=upload)
    assert guess_trunks(table, SITES) == (
        Trunk(senders=SITES[0], receivers=SITES[1], rate=125.0),
        Trunk(senders=SITES[1], receivers=SITES[0], rate=121.0),
    )


def test_pairs_that_their_ends_hold_back_share_nothing():
    """Homes on two continents: each pair reaches what the uplink gives."""
    table = make_table(lambda a, b: 0.04, rate=lambda a, b: 24.0 if a // 4 == b // 4 else 23.0, upload=25.0)
    assert guess_trunks(table, SITES) == ()


def test_one_fast_pair_shows_that_the_line_is_not_the_limit():
    table = make_table(
        lambda a, b: 0.04, rate=lambda a, b: 1250.0 if a // 4 == b // 4 or (a, b) == (2, 5) else 125.0, upload=1250.0
    )
    assert guess_trunks(table, SITES) == (Trunk(senders=SITES[1], receivers=SITES[0], rate=125.0),)


def test_nothing_is_guessed_from_nothing():
    assert guess_trunks(LinkTable.unknown(8), SITES) == ()
