# SPDX-License-Identifier: Apache-2.0
"""Which plan is chosen where, and how long it is said to take."""

import random
from itertools import permutations
from math import inf

import pytest

from isthmus.collective.core.cost import Volume, best_shares, predict
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.planner import choose
from isthmus.collective.core.slices import butterfly, ring

MBIT = 1e6 / 8
MIB = 2.0**20
RAW = Volume(nbytes_up_raw=64 * MIB, nbytes_up=64 * MIB, nbytes_down=64 * MIB, chunk_nbytes=MIB)
INT8 = Volume(nbytes_up_raw=64 * MIB, nbytes_up=16 * MIB, nbytes_down=16 * MIB, chunk_nbytes=MIB)


def make_table(size, latency_s, *, rate=lambda a, b: inf, upload=inf, slow=None):
    everybody = range(size)
    limits = tuple((slow or {}).get(rank, upload) for rank in everybody)
    return LinkTable(
        latency_s=tuple(tuple(0.0 if a == b else latency_s(a, b) for b in everybody) for a in everybody),
        rate=tuple(tuple(0.0 if a == b else rate(a, b) for b in everybody) for a in everybody),
        upload=limits,
        download=(upload,) * size,
    )


def test_alike_homes_far_apart_use_a_butterfly():
    """Issue, case b: 4 peers, 64 MiB, 150 ms there and back, 200 Mbit/s."""
    rate = 200 * MBIT
    choice = choose(make_table(4, lambda a, b: 0.075, upload=rate), RAW)
    assert choice.name == "butterfly"
    assert choice.shares == (0.25,) * 4
    assert choice.routes == butterfly(4)
    assert choice.predicted_s == pytest.approx(1.5 * 64 * MIB / rate + 0.15)
    ((rejected, seconds),) = choice.rejected
    assert rejected == "ring"
    assert seconds == pytest.approx(1.5 * 64 * MIB / rate + 6 * 0.075)


def test_a_slow_uplink_only_sends_its_own_part():
    """Issue, case c: 4 peers, 300 Mbit/s, one with 30 Mbit/s up, 20 ms there and back."""
    choice = choose(make_table(4, lambda a, b: 0.01, upload=300 * MBIT, slow={2: 30 * MBIT}), RAW)
    assert choice.name == "butterfly"
    assert choice.shares == pytest.approx((1 / 3, 1 / 3, 0, 1 / 3), abs=1e-5)
    assert choice.predicted_s == pytest.approx(64 * MIB / (30 * MBIT) + 0.02)


def test_homes_on_two_continents_use_a_butterfly():
    """Nothing but the uplinks limits them, and before the root parts travel as fp32."""
    rate = 200 * MBIT
    table = make_table(8, lambda a, b: 0.01 if a // 4 == b // 4 else 0.06, rate=lambda a, b: rate, upload=rate)
    choice = choose(table, INT8)
    assert choice.name == "butterfly"
    assert dict(choice.rejected).keys() == {"ring"}


def test_where_most_pairs_cannot_speak_a_ring_goes_round_by_those_that_can():
    order = (0, 3, 1, 4, 2)
    neighbours = {frozenset((a, b)) for a, b in zip(order, [*order[1:], 0], strict=True)}
    table = make_table(5, lambda a, b: 0.05, rate=lambda a, b: 100 * MBIT if frozenset((a, b)) in neighbours else 0.0)
    choice = choose(table, RAW)
    assert choice.name == "ring"
    assert choice.predicted_s < inf
    assert dict(choice.rejected)["butterfly"] == inf
    for route in choice.routes:
        for rank in set(range(5)) - {route.root}:
            assert {frozenset((rank, route.up[rank])), frozenset((rank, route.down[rank]))} <= neighbours


def six(across):
    """100 Mbit/s to the members one step away, 10 ms further, and so many Mbit/s to all others."""
    return make_table(
        6,
        lambda a, b: 0.02 if abs(a - b) in (1, 5) else 0.01,
        rate=lambda a, b: (100 if abs(a - b) in (1, 5) else across) * MBIT,
    )


def test_a_ring_goes_by_the_fast_pairs_rather_than_the_near_ones():
    table = six(5)
    choice = choose(table, RAW, only="ring")
    assert all(
        abs(rank - route.up[rank]) in (1, 5) for route in choice.routes for rank in range(6) if rank != route.root
    )
    assert choose(table, RAW).name == "ring"


def test_a_ring_that_is_hardly_faster_does_not_replace_the_butterfly():
    """It comes when it saves five per cent, not two."""
    chosen = {}
    for tenths in range(150, 250, 2):
        choice = choose(six(tenths / 10), RAW)
        predicted = {choice.name: choice.predicted_s, **dict(choice.rejected)}
        chosen[predicted["ring"] / predicted["butterfly"]] = choice.name
    assert any(0.95 < ratio < 0.97 for ratio in chosen)
    assert any(0.93 < ratio < 0.95 for ratio in chosen)
    assert all((name == "ring") == (ratio < 0.95) for ratio, name in chosen.items())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nbytes", [0.5 * MIB, 64 * MIB])
def test_the_ring_chosen_is_about_the_fastest_of_all_rings(seed, nbytes):
    """Half a MiB is a matter of latency, 64 MiB one of bandwidth."""
    source = random.Random(seed)
    table = make_table(5, lambda a, b: source.uniform(0.01, 0.1), rate=lambda a, b: source.uniform(100, 400) * MBIT)
    volume = Volume(nbytes_up_raw=nbytes, nbytes_up=nbytes / 4, nbytes_down=nbytes / 4, chunk_nbytes=MIB / 4)
    choice = choose(table, volume, only="ring")
    rings = [ring((0, *rest)) for rest in permutations(range(1, 5))]
    assert choice.predicted_s <= 1.1 * min(predict(routes, (0.2,) * 5, volume, table) for routes in rings)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nothing_known_means_a_butterfly_with_equal_shares_and_no_prediction(size):
    choice = choose(LinkTable.unknown(size), RAW)
    assert (choice.name, choice.predicted_s, choice.rejected) == ("butterfly", None, ())
    assert choice.routes == butterfly(size)
    assert choice.shares == (1 / size,) * size


def test_a_ring_can_be_asked_for_before_anything_is_known():
    choice = choose(LinkTable.unknown(4), RAW, only="ring")
    assert choice.name == "ring"
    assert choice.routes[0].up == (-1, 2, 3, 0)


@pytest.mark.parametrize("name", ["butterfly", "ring"])
def test_the_plan_asked_for_is_the_plan(name):
    table = six(5)
    choice = choose(table, RAW, only=name)
    assert choice.name == name
    assert choice.rejected == ()
    free = choose(table, RAW)
    assert choice.predicted_s == {free.name: free.predicted_s, **dict(free.rejected)}[name]


@pytest.mark.parametrize("size", [1, 2])
def test_one_or_two_members_have_nothing_to_choose(size):
    choice = choose(make_table(size, lambda a, b: 0.1, upload=MBIT), RAW)
    assert choice.name == "butterfly"
    assert choice.rejected == ()


def test_where_nobody_can_speak_the_butterfly_stands_and_says_so():
    choice = choose(make_table(3, lambda a, b: 0.1, rate=lambda a, b: 0.0), RAW)
    assert (choice.name, choice.predicted_s) == ("butterfly", inf)


def test_equal_shares_are_kept_where_longer_slices_would_have_to_be_waited_for():
    """Slices of one chunk: less for the slow member is more bandwidth, and a longer chunk goes round for longer."""
    table = make_table(8, lambda a, b: 0.0, upload=MBIT, slow={3: 0.95 * MBIT})
    small = Volume(nbytes_up_raw=MIB, nbytes_up=MIB, nbytes_down=MIB, chunk_nbytes=MIB)
    choice = choose(table, small, only="ring")
    assert choice.shares == (1 / 8,) * 8
    assert predict(choice.routes, best_shares(choice.routes, small, table), small, table) > 1.01 * choice.predicted_s


def test_a_plan_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="tree"):
        choose(LinkTable.unknown(3), RAW, only="tree")
    with pytest.raises(ValueError, match="0 members"):
        choose(LinkTable.unknown(0), RAW)
