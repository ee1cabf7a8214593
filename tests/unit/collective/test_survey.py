# SPDX-License-Identifier: Apache-2.0
"""From what members saw of their links to one table."""

import asyncio
import contextlib
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective import BulkOptions
from isthmus.collective.core.progress import StallLimits
from isthmus.collective.core.survey import Observation, table_of
from isthmus.collective.core.types import Incarnation, Member, PeerId, View
from isthmus.collective.errors import OperationAborted, RoundRefused
from isthmus.collective.rounds.supervision import Patience

MBIT = 1e6
SHORT = Patience(stall=StallLimits(floor_s=1.5), first_contact_s=0.5)


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


class Probe:
    """A measurement of the links that lasts until the test says so."""

    def __init__(self, site):
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        site.communicator._meter.probe = self._probe

    async def _probe(self, _members, _seconds):
        self.has_begun.set()
        await self.may_end.wait()


async def test_a_survey_ends_with_the_communicator(sites_running):
    async with sites_running(2) as (early, _late):
        probe = Probe(early)
        survey = asyncio.ensure_future(early.communicator.survey(early.communicator.key(0)))
        await probe.has_begun.wait()
        await early.communicator.close()
        probe.may_end.set()
        with pytest.raises(OperationAborted, match="the communicator was closed"):
            await survey


async def test_who_measures_first_is_known_to_have_come(sites_running, until):
    async with sites_running(2) as (early, late):
        probe = Probe(early)
        key = early.communicator.key(0)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(early.communicator.survey(key))
            await probe.has_begun.wait()
            await until(late.communicator.is_awaited)
            assert not early.communicator.is_awaited()
            with pytest.raises(RoundRefused, match="used before"):
                await early.communicator.survey(key)
            second = tasks.create_task(late.communicator.survey(key))
            probe.may_end.set()
        assert first.result() == second.result()


async def test_a_survey_that_is_cancelled_while_it_measures_keeps_nobody_waiting(sites_running, until):
    async with sites_running(2) as (early, late):
        probe = Probe(early)
        key = early.communicator.key(0)
        surveys = [asyncio.ensure_future(site.communicator.survey(key)) for site in (early, late)]
        await probe.has_begun.wait()
        stashes = early.communicator._engine._stashes
        await until(lambda: any(stash.holds(key.epoch, but=()) for stash in stashes.values()))
        surveys[0].cancel()
        with pytest.raises(OperationAborted, match="ended before it began"):
            await surveys[1]
        with pytest.raises(asyncio.CancelledError):
            await surveys[0]
        assert not early.communicator.is_awaited(), "what came for it is forgotten"
        await asyncio.gather(*(site.communicator.barrier(early.communicator.key(1)) for site in (early, late)))


async def test_a_view_that_comes_while_links_are_measured_ends_the_survey(sites_running, view_of):
    async with sites_running(2) as (early, late):
        probe = Probe(early)
        survey = asyncio.ensure_future(early.communicator.survey(early.communicator.key(0)))
        await probe.has_begun.wait()
        for site in (early, late):
            await site.communicator.install(view_of([early, late], epoch=2))
        probe.may_end.set()
        with pytest.raises(OperationAborted, match="view 2 was installed"):
            await survey
        keys = [site.communicator.key(0) for site in (early, late)]
        tables = await asyncio.gather(
            *(site.communicator.survey(key) for site, key in zip((early, late), keys, strict=True))
        )
        assert tables[0] == tables[1]


@contextlib.asynccontextmanager
async def far_pair(sites_running):
    """Two members whose path counts as long."""
    async with sites_running(2, options=BulkOptions(patience=SHORT, install_grace_s=0.5)) as sites:
        for site in sites:
            site.communicator._meter._is_far = lambda ref, me=site.me: ref != me
            site.communicator._meter._turn = lambda _rank: 0
        yield sites


def padding_ends(site, peer):
    return site.communicator._mesh.bundles[peer.me]._pads_until


async def survey_all(sites, step):
    keys = [site.communicator.key(step) for site in sites]
    tables = await asyncio.gather(*(site.communicator.survey(key) for site, key in zip(sites, keys, strict=True)))
    return tables[0]


async def test_links_that_were_measured_ahead_are_not_measured_by_the_survey(sites_running):
    async with far_pair(sites_running) as sites:
        for site in sites:
            site.communicator.look_ahead(turn_s=0.5)
        await asyncio.wait([site.communicator._looking_ahead for site in sites])
        moved = [site.communicator.bytes_sent for site in sites]
        table = await survey_all(sites, 0)
        assert all(0 < rate < inf for rate in table.upload)
        since = [site.communicator.bytes_sent - before for site, before in zip(sites, moved, strict=True)]
        assert max(since) < 4096, "terms and a row of figures"


async def test_a_look_ahead_dials_what_the_view_had_no_time_for(sites_running, until):
    async with sites_running(2, options=BulkOptions(patience=SHORT, install_grace_s=1e-6)) as sites:
        paths = [next(iter(site.communicator._mesh.bundles.values())) for site in sites]
        assert not any(path.is_whole for path in paths), "and no round has begun that would dial"
        for site in sites:
            site.communicator.look_ahead()
        await until(lambda: all(path.is_whole for path in paths))
        await asyncio.wait([site.communicator._looking_ahead for site in sites])


async def test_a_survey_does_not_wait_for_a_look_ahead_that_takes_long(sites_running):
    async with far_pair(sites_running) as sites:
        for site in sites:
            site.communicator.look_ahead(turn_s=600.0)
        async with asyncio.timeout(10.0):
            table = await survey_all(sites, 0)
        assert all(0 < rate < inf for rate in table.upload)
        assert padding_ends(sites[0], sites[1]) == padding_ends(sites[1], sites[0]) == 0.0


async def test_a_survey_measures_for_those_whose_turn_has_not_come(sites_running, until):
    async with far_pair(sites_running) as sites:
        for site in sites:
            site.communicator._meter._turn = lambda _rank: 1000
            site.communicator.look_ahead(turn_s=600.0)
        await until(lambda: all(site.communicator._meter.awaits_turn for site in sites))
        table = await survey_all(sites, 0)
        assert all(0 < rate < inf for rate in table.upload)
        assert not any(site.communicator._meter.awaits_turn for site in sites)


async def test_a_survey_measures_what_a_look_ahead_has_no_news_of_yet(sites_running):
    async with far_pair(sites_running) as sites:
        for site in sites:
            path = next(iter(site.communicator._mesh.bundles.values()))
            path.shortest_round_trip_s = lambda: 0.5
            site.communicator.look_ahead(turn_s=600.0)
            await asyncio.sleep(0)
            path.shortest_round_trip_s = lambda: 0.0
        table = await survey_all(sites, 0)
        assert all(0 < rate < inf for rate in table.upload)


async def test_the_survey_of_a_former_view_leaves_the_next_look_ahead_alone(sites_running, view_of, until):
    async with far_pair(sites_running) as (dialler, waiter):
        waiter.communicator.look_ahead(turn_s=600.0)
        survey = asyncio.ensure_future(waiter.communicator.survey(waiter.communicator.key(0)))
        await asyncio.sleep(0)
        await waiter.communicator.install(
            view_of([dialler, waiter], epoch=2)
        )  # it has nothing to dial, nor to wait for
        waiter.communicator.look_ahead(turn_s=600.0)
        with pytest.raises(OperationAborted, match="view 2 was installed"):
            await survey
        await until(lambda: padding_ends(waiter, dialler) > 0.0)
        assert not waiter.communicator._looking_ahead.done()


@pytest.mark.parametrize("end", ["install", "close"])
async def test_padding_ends_with_the_view_and_with_the_communicator(sites_running, view_of, until, end):
    async with far_pair(sites_running) as (early, late):
        early.communicator.look_ahead(turn_s=600.0)
        await until(lambda: padding_ends(early, late) > 0.0)
        bundle = early.communicator._mesh.bundles[late.me]
        if end == "install":
            await early.communicator.install(view_of([early, late], epoch=2))
        else:
            await early.communicator.close()
        await until(lambda: bundle._pads_until == 0.0)


async def test_near_members_are_not_padded(sites_running):
    async with sites_running(2) as sites:
        moved = sites[0].communicator.bytes_sent
        sites[0].communicator.look_ahead(turn_s=0.05)
        await asyncio.wait([sites[0].communicator._looking_ahead], timeout=5.0)
        assert sites[0].communicator._looking_ahead.done()
        assert sites[0].communicator.bytes_sent == moved


async def test_who_has_not_connected_is_not_awaited_for_ever(sites_running, view_of):
    async with far_pair(sites_running) as (early, late):
        absent = Member(PeerId("f" * 16), Incarnation(1), "127.0.0.1:1")
        here = view_of([early, late], epoch=2)
        view = View(here.epoch, here.outer_step, here.digest, (*here.members, absent))
        await asyncio.gather(*(site.communicator.install(view) for site in (early, late)))
        for site in (early, late):
            site.communicator.look_ahead(turn_s=0.3)
        async with asyncio.timeout(10.0):
            await asyncio.wait([site.communicator._looking_ahead for site in (early, late)])
        assert early.communicator._meter.observation(view.members).sent_to[1] > 0.0


async def test_a_path_that_only_seemed_far_before_anything_was_sent_is_padded_no_longer(sites_running, until):
    async with far_pair(sites_running) as (early, late):
        early.communicator.look_ahead(turn_s=600.0)
        await until(lambda: padding_ends(early, late) > 0.0)
        early.communicator._meter._is_far = lambda _ref: False
        async with asyncio.timeout(5.0):
            await asyncio.wait([early.communicator._looking_ahead])
        assert padding_ends(early, late) == 0.0
