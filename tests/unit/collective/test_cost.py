# SPDX-License-Identifier: Apache-2.0
"""What a plan costs, by hand; and the shares that cost least, against trying them all."""

import itertools
import random
from math import inf

import pytest

from isthmus.collective.core.cost import Volume, best_shares, paces, predict
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.slices import NOBODY, Route, broadcast, butterfly, gather, ring, star

MBIT = 1e6 / 8
MIB = 2.0**20
RAW = Volume(nbytes_up_raw=64 * MIB, nbytes_up=64 * MIB, nbytes_down=64 * MIB, chunk_nbytes=MIB)
INT8 = Volume(nbytes_up_raw=64 * MIB, nbytes_up=16 * MIB, nbytes_down=16 * MIB, chunk_nbytes=MIB)


def make_table(size, *, latency_s=0.0, rate=inf, upload=None, download=None):
    """The same for every pair, or what a function of the pair says."""

    def matrix(value):
        return tuple(
            tuple(0.0 if a == b else value(a, b) if callable(value) else value for b in range(size))
            for a in range(size)
        )

    return LinkTable(
        latency_s=matrix(latency_s),
        rate=matrix(rate),
        upload=tuple(upload or [inf] * size),
        download=tuple(download or [inf] * size),
    )


def two_hops(size):
    """Everybody is a root; the last two have no link, so what goes from one to the other passes the first."""
    trees = [star(root, size, frozenset({(size - 2, size - 1)}) if size > 2 else frozenset()) for root in range(size)]
    return tuple(Route(root=root, up=tree, down=tree) for root, tree in enumerate(trees))


def equal(routes):
    return (1 / len(routes),) * len(routes)


def predict_equal(routes, volume, table):
    return predict(routes, equal(routes), volume, table)


def test_a_butterfly_of_four_moves_one_and_a_half_buffers_and_waits_for_two_trips():
    rate = 200 * MBIT
    table = make_table(4, latency_s=0.075, upload=[rate] * 4, download=[rate] * 4)
    assert predict_equal(butterfly(4), RAW, table) == pytest.approx(1.5 * 64 * MIB / rate + 2 * 0.075)
    assert predict_equal(butterfly(4), INT8, table) == pytest.approx(1.5 * 16 * MIB / rate + 2 * 0.075)


def test_a_ring_moves_the_same_bytes_and_waits_for_six_trips():
    rate = 200 * MBIT
    table = make_table(4, latency_s=0.075, upload=[rate] * 4, download=[rate] * 4)
    seconds = predict_equal(ring(range(4)), RAW, table)
    assert seconds == pytest.approx(1.5 * 64 * MIB / rate + 6 * 0.075)


def test_a_ring_that_encodes_for_the_root_only_sends_raw_before_it():
    table = make_table(4, upload=[MIB] * 4)
    volume = Volume(nbytes_up_raw=64 * MIB, nbytes_up=16 * MIB, nbytes_down=16 * MIB, chunk_nbytes=0.0)
    # Of three hops up, two end before the root; three hops down are encoded.
    assert predict_equal(ring(range(4)), volume, table) == pytest.approx((2 * 64 + 16 + 3 * 16) / 4)


def test_what_only_gives_costs_one_trip():
    table = make_table(4, latency_s=0.1, upload=[MIB] * 4)
    small = Volume(nbytes_up_raw=4 * MIB, nbytes_up=4 * MIB, nbytes_down=4 * MIB, chunk_nbytes=MIB)
    assert predict_equal(gather(4), small, table) == pytest.approx(3.0 + 0.1)
    assert predict(broadcast(2, 4), [1.0], small, table) == pytest.approx(12.0 + 0.1)


def test_paces_bring_everything_to_its_end_at_the_same_time():
    table = make_table(4, latency_s=0.01, upload=[300 * MBIT] * 3 + [30 * MBIT], download=[300 * MBIT] * 4)
    shares = best_shares(butterfly(4), RAW, table)
    found = paces(butterfly(4), shares, RAW, table)
    seconds = predict(butterfly(4), shares, RAW, table) - 2 * 0.01
    for sender in range(4):
        assert sum(found[sender]) <= table.upload[sender] * (1 + 1e-9)
        assert sum(row[sender] for row in found) <= table.download[sender] * (1 + 1e-9)
        for receiver in range(4):
            nbytes = 0.0 if sender == receiver else (shares[sender] + shares[receiver]) * 64 * MIB
            assert found[sender][receiver] == pytest.approx(nbytes / seconds)
    assert sum(found[3]) == pytest.approx(30 * MBIT)


def test_where_nothing_limits_there_is_no_pace():
    assert paces(butterfly(2), (0.5, 0.5), RAW, make_table(2))[0][1] == inf


def test_one_member_alone_needs_no_time():
    assert predict_equal(butterfly(1), RAW, make_table(1, upload=[1.0])) == 0


CHAIN = Route(root=0, up=(NOBODY, 0, 1), down=(NOBODY, 0, 1))  # 2 -> 1 -> 0 and back
CHAIN_S = {(2, 1): 1.0, (1, 0): 3.0, (0, 1): 2.0, (1, 2): 2.0}  # seconds for a MiB


def chain_table():
    return make_table(3, latency_s=0.1, rate=lambda a, b: MIB / CHAIN_S.get((a, b), 1.0))


def test_one_slice_alone_has_to_fill_its_pipeline():
    """Ten chunks: the slowest hop works for all ten, the others for one."""
    volume = Volume(nbytes_up_raw=10 * MIB, nbytes_up=10 * MIB, nbytes_down=10 * MIB, chunk_nbytes=MIB)
    assert predict([CHAIN], [1.0], volume, chain_table()) == pytest.approx(10 * 3 + (1 + 2 + 2) + 0.4)


def test_a_slice_smaller_than_a_chunk_goes_hop_by_hop():
    volume = Volume(nbytes_up_raw=MIB / 2, nbytes_up=MIB / 2, nbytes_down=MIB / 2, chunk_nbytes=MIB)
    assert predict([CHAIN], [1.0], volume, chain_table()) == pytest.approx((1 + 3 + 2 + 2) / 2 + 0.4)


def test_members_with_other_slices_to_send_do_not_wait_for_the_pipeline_to_fill():
    """A slice in one chunk needs 14 hops round a ring of 8, and in these a member sends 14 slices."""
    volume = Volume(nbytes_up_raw=8 * MIB, nbytes_up=8 * MIB, nbytes_down=8 * MIB, chunk_nbytes=MIB)
    assert predict_equal(ring(range(8)), volume, make_table(8, upload=[MIB] * 8)) == pytest.approx(14.0)


def test_a_slice_without_chunks_costs_no_latency():
    table = make_table(3, latency_s=lambda a, b: 9.0 if (a, b) == (1, 2) else 0.1)
    routes = butterfly(3)
    assert predict(routes, [1.0, 0.0, 0.0], RAW, table) == pytest.approx(0.2)
    assert predict(routes, [0.0, 0.0, 1.0], RAW, table) == pytest.approx(9.1)


def test_a_pair_that_cannot_speak_makes_the_plan_endless_unless_it_is_not_used():
    table = make_table(4, rate=lambda a, b: 0.0 if (a, b) == (0, 1) else MIB)
    assert predict_equal(butterfly(4), RAW, table) == inf
    shares = best_shares(butterfly(4), RAW, table)
    assert shares[:2] == (0.0, 0.0)
    assert predict(butterfly(4), shares, RAW, table) < inf


def test_shares_must_belong_to_the_slices():
    with pytest.raises(ValueError, match="3 shares"):
        predict(butterfly(4), [1.0, 0.0, 0.0], RAW, make_table(4))


# ------------------------------------------------------------------------------------------------ best shares
def test_a_slow_uplink_owns_nothing():
    table = make_table(4, latency_s=0.01, upload=[30 * MBIT] + [300 * MBIT] * 3, download=[300 * MBIT] * 4)
    shares = best_shares(butterfly(4), RAW, table)
    assert shares == pytest.approx((0, 1 / 3, 1 / 3, 1 / 3), abs=1e-5)
    assert shares[0] == 0
    assert predict(butterfly(4), shares, RAW, table) == pytest.approx(64 * MIB / (30 * MBIT) + 2 * 0.01)


def test_a_slow_downlink_owns_nothing_either():
    table = make_table(4, upload=[300 * MBIT] * 4, download=[30 * MBIT] + [300 * MBIT] * 3)
    assert best_shares(butterfly(4), RAW, table) == pytest.approx((0, 1 / 3, 1 / 3, 1 / 3), abs=1e-5)


def test_a_somewhat_slower_uplink_owns_somewhat_less():
    """(1 + 2x) S out of each: the two groups are done at once where (1 + 2x) / 100 = (1 + 2y) / 80, x + y = 1/2."""
    table = make_table(4, upload=[80 * MBIT] * 2 + [100 * MBIT] * 2)
    shares = best_shares(butterfly(4), RAW, table)
    assert shares == pytest.approx((1 / 6, 1 / 6, 1 / 3, 1 / 3), abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
def test_equal_links_and_unknown_links_have_equal_shares(size):
    for table in (
        LinkTable.unknown(size),
        make_table(size, upload=[MIB] * size, download=[2 * MIB] * size),
        make_table(size, rate=MIB, latency_s=0.1),
    ):
        assert best_shares(butterfly(size), INT8, table) == pytest.approx(equal(butterfly(size)), abs=1e-5)


def test_members_that_matter_alike_have_like_shares_although_many_shares_would_do():
    """Only the slow member limits the round; how the others divide the rest is open."""
    table = make_table(6, upload=[MIB] + [1000 * MIB] * 5)
    assert best_shares(butterfly(6), RAW, table) == pytest.approx((0, *[0.2] * 5), abs=1e-5)


def test_a_member_nobody_has_measured_is_not_given_everything():
    """As inf it would look like the best root of all, and be the worst if it is like the others."""
    table = make_table(4, upload=[MIB, MIB, MIB, inf])
    assert max(best_shares(butterfly(4), RAW, table)) == pytest.approx(0.5, abs=1e-4)
    pairs = make_table(4, rate=lambda a, b: inf if 3 in (a, b) else MIB)
    assert max(best_shares(butterfly(4), RAW, pairs)) == pytest.approx(0.5, abs=1e-4)


def test_strangers_share_alike_where_only_others_have_been_measured():
    """Nothing known limits the slices of 2 and 3, so no time is the least."""
    table = make_table(4, rate=lambda a, b: MIB if a + b == 1 else inf)
    assert best_shares(butterfly(4), RAW, table) == pytest.approx((0, 0, 0.5, 0.5), abs=1e-3)


def test_links_whose_ratio_no_float_can_hold_have_shares():
    fast = [1e300] * 3
    slow_up = make_table(4, upload=[1e-299, *fast], download=[*fast, 1e300])
    assert best_shares(gather(4), RAW, slow_up) == pytest.approx((0, 1 / 3, 1 / 3, 1 / 3))
    slow_down = make_table(4, upload=[*fast, 1e300], download=[*fast, 1e-299])
    assert best_shares(gather(4), RAW, slow_down) == (0, 0, 0, 1)


def test_links_of_any_size_have_shares():
    """Seed 8 once left the linear programme without a bound, before ratios were cut off."""
    for seed in range(60):
        source = random.Random(seed)
        size = source.randint(2, 6)

        def some(source=source):
            return 10 ** source.uniform(-300, 300) if source.random() < 0.9 else source.choice([inf, 0.0])

        table = LinkTable(
            latency_s=LinkTable.unknown(size).latency_s,
            rate=tuple(tuple(some() for _ in range(size)) for _ in range(size)),
            upload=tuple(some() for _ in range(size)),
            download=tuple(some() for _ in range(size)),
        )
        volume = Volume(nbytes_up_raw=1e9, nbytes_up=1e9, nbytes_down=1e8, chunk_nbytes=0)
        for routes in (butterfly(size), ring(range(size)), two_hops(size)):
            shares = best_shares(routes, volume, table)
            assert sum(shares) == pytest.approx(1)
            assert min(shares) >= 0
            assert predict(routes, shares, volume, table) <= 1.002 * predict_equal(routes, volume, table)


def test_where_everything_is_unreachable_shares_are_equal():
    table = make_table(3, rate=0.0)
    assert best_shares(butterfly(3), RAW, table) == equal(butterfly(3))


def test_an_empty_buffer_has_equal_shares_and_costs_latency_only():
    nothing = Volume(nbytes_up_raw=0, nbytes_up=0, nbytes_down=0, chunk_nbytes=MIB)
    table = make_table(3, latency_s=0.1, rate=0.0)
    assert best_shares(butterfly(3), nothing, table) == equal(butterfly(3))
    assert predict_equal(butterfly(3), nothing, table) == pytest.approx(0.2)


def seconds_by_counting(routes, shares, volume, table):
    """The bandwidth term, counted hop by hop."""
    edges = {}
    for route, share in zip(routes, shares, strict=True):
        for rank in range(table.world_size):
            if rank != route.root:
                up, down = route.up[rank], route.down[rank]
                nbytes = volume.nbytes_up if up == route.root else volume.nbytes_up_raw
                edges[rank, up] = edges.get((rank, up), 0.0) + share * nbytes
                edges[down, rank] = edges.get((down, rank), 0.0) + share * volume.nbytes_down
    times = [nbytes / table.rate[a][b] for (a, b), nbytes in edges.items()]
    for rank in range(table.world_size):
        times.append(sum(nbytes for (a, _), nbytes in edges.items() if a == rank) / table.upload[rank])
        times.append(sum(nbytes for (_, b), nbytes in edges.items() if b == rank) / table.download[rank])
    return max(times)


def all_shares(size, parts):
    for cuts in itertools.combinations_with_replacement(range(parts + 1), size - 1):
        borders = (0, *cuts, parts)
        yield [(after - before) / parts for before, after in itertools.pairwise(borders)]


def random_table(source, size):
    def some():
        return inf if source.random() < 0.2 else MIB * 10 ** source.uniform(-1.5, 1.5)

    return make_table(
        size,
        rate=lambda a, b: some(),
        upload=[min(some(), 100 * MIB) for _ in range(size)],  # known, so that no share is capped
        download=[some() for _ in range(size)],
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "routes",
    [butterfly(3), butterfly(4), ring([0, 2, 1]), ring([0, 3, 1, 2]), two_hops(4), gather(4)[:0]],
    ids=["butterfly3", "butterfly4", "ring3", "ring4", "two_hops", "mixed"],
)
def test_no_shares_tried_by_brute_force_are_better(routes, seed):
    source = random.Random(seed)
    routes = routes or (butterfly(4)[0], ring(range(4))[1], two_hops(4)[1])
    size = len(routes[0].up)
    table = random_table(source, size)
    volume = Volume(nbytes_up_raw=64.0, nbytes_up=source.choice([8.0, 16.0, 64.0]), nbytes_down=16.0, chunk_nbytes=0.0)
    found = best_shares(routes, volume, table)
    seconds = seconds_by_counting(routes, found, volume, table)
    assert predict(routes, found, volume, table) == pytest.approx(seconds)
    tried = min(
        seconds_by_counting(routes, shares, volume, table) for shares in all_shares(len(routes), 60 - 10 * len(routes))
    )
    assert seconds <= tried * 1.002


# ------------------------------------------------------------------------------------------------ link table
def test_a_table_is_square_and_holds_numbers():
    with pytest.raises(ValueError, match="rate must be 2 x 2"):
        LinkTable(latency_s=((0.0, 1.0), (1.0, 0.0)), rate=((1.0,),), upload=(1.0, 1.0), download=(1.0, 1.0))
    with pytest.raises(ValueError, match="upload has 1"):
        LinkTable(latency_s=((0.0, 1.0), (1.0, 0.0)), rate=((1.0,) * 2,) * 2, upload=(1.0,), download=(1.0, 1.0))
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="latency_s"):
            make_table(2, latency_s=wrong)
        with pytest.raises(ValueError, match="download"):
            make_table(2, download=[1.0, wrong])


def test_two_digits_of_a_measurement_count():
    noisy = make_table(2, latency_s=0.07512, rate=25_049_000.0, upload=[9.96e6, inf])
    clean = noisy.quantised()
    assert clean.latency_s[0][1] == 0.075
    assert clean.rate[1][0] == 2.5e7
    assert clean.upload == (1e7, inf)
    assert clean.quantised() == clean


def test_a_table_says_nothing_only_if_nothing_is_known():
    assert LinkTable.unknown(3).says_nothing
    assert not make_table(3, latency_s=lambda a, b: 0.1 if (a, b) == (2, 0) else 0.0).says_nothing
    assert not make_table(3, upload=[inf, 1.0, inf]).says_nothing
