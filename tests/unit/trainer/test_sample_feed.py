# SPDX-License-Identifier: Apache-2.0
"""Leased indices: handed out once, reported once, never kept beyond the membership."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import pytest

from isthmus.elastic.core.leases import count
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.errors import NotAMember, RunFinished
from isthmus.trainer.engine.sample_feed import LeasesLost, SampleFeed

STOCK = 8


class Lessor:
    """Grants when the test says so; the next new index, in pieces if the test wants."""

    def __init__(self) -> None:
        self.active_view: object | None = object()
        self.asked: deque[tuple[int, asyncio.Future[Sequence[IndexRange]]]] = deque()
        self.next_index = 0
        self.is_over = False
        self._activation: asyncio.Event = asyncio.Event()

    async def activated(self) -> object:
        while self.active_view is None:
            if self.is_over:
                raise RunFinished(0, "over")
            self._activation.clear()
            await self._activation.wait()
        return self.active_view

    async def take_leases(self, num_samples: int, /) -> Sequence[IndexRange]:
        await self.activated()
        answer: asyncio.Future[Sequence[IndexRange]] = asyncio.get_running_loop().create_future()
        self.asked.append((num_samples, answer))
        return await answer

    def grant(self, *sizes: int) -> None:
        """Answer the oldest request; without sizes with just what it asked for."""
        num_samples, answer = self.asked.popleft()
        ranges = []
        for size in sizes or (num_samples,):
            ranges.append(IndexRange(self.next_index, self.next_index + size))
            self.next_index += size + (1 if sizes else 0)  # with a gap, so that pieces cannot merge
        answer.set_result(tuple(ranges))

    def lose(self) -> None:
        self.active_view = None
        for _, answer in self.asked:
            answer.set_exception(NotAMember("evicted"))
        self.asked.clear()

    def admit(self) -> None:
        self.active_view = object()
        self._activation.set()

    def end(self) -> None:
        self.active_view, self.is_over = None, True
        for _, answer in self.asked:
            answer.set_exception(RunFinished(0, "over"))
        self.asked.clear()
        self._activation.set()


async def settled() -> None:
    """Everything that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def feeding(stock: int = STOCK) -> AsyncIterator[tuple[SampleFeed, Lessor]]:
    lessor = Lessor()
    feed = SampleFeed(lessor, stock=stock)
    task = asyncio.ensure_future(feed.run())
    await settled()
    try:
        yield feed, lessor
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def test_the_stock_is_filled_before_anybody_asks_and_refilled_when_half_is_gone() -> None:
    async with feeding() as (feed, lessor):
        assert [asked for asked, _ in lessor.asked] == [STOCK]
        lessor.grant()
        await settled()
        assert feed.available == STOCK
        assert await feed.take(4) == (0, 1, 2, 3)
        await settled()
        assert not lessor.asked  # half is left
        assert await feed.take(1) == (4,)
        await settled()
        assert [asked for asked, _ in lessor.asked] == [5]


async def test_whoever_finds_too_few_waits_for_the_grants_however_small_they_are() -> None:
    async with feeding() as (feed, lessor):
        taking = asyncio.ensure_future(feed.take(4))
        for _ in range(3):
            await settled()
            assert not taking.done()
            lessor.grant(1)
        await settled()
        lessor.grant(1, 1)
        assert await taking == (0, 2, 4, 6)
        assert feed.available == 1
        assert count(feed.consumed()) == 4


async def test_samples_are_taken_at_once_if_they_are_there() -> None:
    async with feeding() as (feed, lessor):
        lessor.grant()
        await settled()
        taking = feed.take(2)
        with pytest.raises(StopIteration) as taken:
            taking.send(None)
        assert taken.value.value == (0, 1)


async def test_more_than_can_ever_be_there_is_not_waited_for() -> None:
    async with feeding() as (feed, _):
        with pytest.raises(ValueError, match="stock of twice as many"):
            await feed.take(STOCK // 2 + 1)


async def test_what_was_handed_out_is_reported_until_it_is_settled() -> None:
    async with feeding() as (feed, lessor):
        lessor.grant(3, 5)
        await settled()
        await feed.take(4)
        voted = feed.consumed()
        assert voted == (IndexRange(0, 3), IndexRange(4, 5))
        await feed.take(2)
        feed.settle(voted)
        assert feed.consumed() == (IndexRange(5, 7),)
        feed.settle(voted)  # a commit that is told twice
        assert feed.consumed() == (IndexRange(5, 7),)


async def test_who_waits_when_the_membership_is_lost_is_told() -> None:
    async with feeding() as (feed, lessor):
        taking = asyncio.ensure_future(feed.take(2))
        await settled()
        feed.reset()
        lessor.lose()
        with pytest.raises(LeasesLost):
            await taking
        assert (feed.available, feed.consumed()) == (0, ())


async def test_nothing_of_the_lost_membership_is_handed_out_in_the_next() -> None:
    async with feeding() as (feed, lessor):
        lessor.grant()
        await settled()
        await feed.take(2)
        feed.reset()
        lessor.lose()
        await settled()
        lessor.admit()
        await settled()
        lessor.grant()
        assert await feed.take(2) == (8, 9)
        assert feed.consumed() == (IndexRange(8, 10),)


async def test_a_grant_that_came_just_before_the_loss_is_not_used() -> None:
    async with feeding() as (feed, lessor):
        lessor.grant()
        # The grant is on its way to the feed; before it arrives the membership is lost and won again.
        feed.reset()
        lessor.lose()
        lessor.admit()
        await settled()
        assert feed.available == 0
        lessor.grant()
        await settled()
        assert await feed.take(1) == (8,)


async def test_losing_a_membership_that_had_no_leases_yet_costs_no_lease_of_the_next() -> None:
    lessor = Lessor()
    lessor.lose()
    feed = SampleFeed(lessor, stock=STOCK)
    task = asyncio.ensure_future(feed.run())
    await settled()
    feed.reset()  # a member that had not caught up was put out again
    lessor.admit()
    await settled()
    lessor.grant()
    await settled()
    assert feed.available == STOCK
    task.cancel()
    await asyncio.wait([task])


async def test_the_feed_ends_with_the_run_and_so_does_whoever_waits() -> None:
    lessor = Lessor()
    feed = SampleFeed(lessor, stock=STOCK)
    task = asyncio.ensure_future(feed.run())
    taking = asyncio.ensure_future(feed.take(2))
    await settled()
    lessor.end()
    await task
    with pytest.raises(LeasesLost):
        await taking


class Storehouse:
    """A supply that has what the test says."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.told: list[IndexRange] = []
        self.num_forgotten = 0
        self.listener = lambda: None

    def leased(self, ranges: Iterable[IndexRange], /) -> None:
        self.told += ranges

    def is_here(self, ranges: Iterable[IndexRange], /) -> bool:
        return {index for one in ranges for index in range(one.start, one.stop)} <= self.here

    def forget(self) -> None:
        self.num_forgotten += 1

    def listen(self, listener: Callable[[], None], /) -> None:
        self.listener = listener

    def bring(self, *indices: int) -> None:
        self.here |= set(indices)
        self.listener()


async def test_samples_are_handed_out_when_what_they_consist_of_is_here_and_lost_leases_end_the_wait() -> None:
    lessor, house = Lessor(), Storehouse()
    feed = SampleFeed(lessor, stock=STOCK, supply=house)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(feed.run())
        await settled()
        lessor.grant(3, 5)
        taken = tasks.create_task(feed.take(4))
        await settled()
        assert house.told == [IndexRange(0, 3), IndexRange(4, 9)]
        house.bring(0, 1, 2)
        await settled()
        assert not taken.done()
        assert feed.consumed() == ()
        house.bring(4)
        assert await taken == (0, 1, 2, 4)
        assert feed.consumed() == (IndexRange(0, 3), IndexRange(4, 5))

        waiting = asyncio.ensure_future(feed.take(2))
        await settled()
        feed.reset()
        with pytest.raises(LeasesLost):
            await waiting
        assert house.num_forgotten == 1
        work.cancel()
