# SPDX-License-Identifier: Apache-2.0
"""Sample indices this peer may train on: leased ahead, handed out step by step, reported with the vote.

Rules: an index is handed out only while its lease is held; what was handed out since the last commit is `consumed`
and goes into the next vote, unless the work is lost and not the membership: then it is handed out again (`take_back`).
When the membership is lost, so are all leases (`reset`), whatever was trained. `reset` is called once for each loss, in
the order of what happens: a later one would throw away the leases of the next membership, which nobody else gets while
this peer is there. It must not know text, batches or what a view is.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from isthmus.elastic.core.leases import count, merged, without
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.errors import NotAMember, RunFinished
from isthmus.elastic.shell.member import Membership


class Supply(Protocol):
    """Who sees that what leased samples consist of is on this machine."""

    def leased(self, ranges: Iterable[IndexRange], /) -> None:
        """These will be trained on."""

    def is_here(self, ranges: Iterable[IndexRange], /) -> bool:
        """Whether these can be trained on now; they are next."""

    def forget(self) -> None:
        """All leases are lost."""

    def listen(self, listener: Callable[[], None], /) -> None:
        """Call it whenever more is here."""


class LeasesLost(Exception):
    """The membership ended while somebody waited for samples."""


class SampleFeed:
    """A small stock of leased indices with a refill task.

    Args:
        membership: grants indices.
        stock: refill up to this many indices whenever fewer than half of them are left, so that training goes on
            for a while when the coordinator is away.
        supply: where what samples consist of comes piece by piece; None: all of it is here.
    """

    def __init__(self, membership: Membership, *, stock: int, supply: Supply | None = None) -> None:
        self._membership = membership
        self._supply = supply
        if supply is not None:
            supply.listen(lambda: self._changed.set())
        self._stock = stock
        self._ranges: deque[IndexRange] = deque()
        self._available = 0
        self._consumed: list[IndexRange] = []
        self._generation = 0
        self._changed = asyncio.Event()

    @property
    def available(self) -> int:
        """Indices in stock."""
        return self._available

    def consumed(self) -> tuple[IndexRange, ...]:
        """What was handed out since the last `settle`, as sorted disjoint ranges."""
        return merged(self._consumed)

    def settle(self, consumed: Iterable[IndexRange]) -> None:
        """These ranges are committed: the next vote must not name them again."""
        self._consumed = list(without(self._consumed, consumed))

    def take_back(self) -> None:
        """What was handed out since the last `settle` is to be trained on again: who had it is gone, the leases not."""
        again = merged(self._consumed)
        self._ranges.extendleft(reversed(again))
        self._available += count(again)
        self._consumed.clear()
        if self._supply is not None:
            self._supply.leased(again)
        self._changed.set()

    def reset(self) -> None:
        """The membership is lost and every lease with it."""
        self._generation += 1
        if self._supply is not None:
            self._supply.forget()
        self._ranges.clear()
        self._available = 0
        self._consumed.clear()
        self._changed.set()

    async def take(self, num_samples: int) -> tuple[int, ...]:
        """The next indices, as soon as there are enough and what they consist of is here.

        At once, without giving way to others, if that is so.

        Waits as long as the coordinator is away: how long that may be is the membership's to decide.

        Args:
            num_samples: at most half of the stock: more might never be there.

        Raises:
            LeasesLost: if `reset` is called meanwhile, or the run is over for this peer.
        """
        if 2 * num_samples > self._stock:
            raise ValueError(f"{num_samples} samples at once need a stock of twice as many, not {self._stock}")
        generation = self._generation
        while not self.has(num_samples):
            await self._change()
            if generation != self._generation:
                raise LeasesLost
        indices: list[int] = []
        while len(indices) < num_samples:
            first = self._ranges.popleft()
            stop = min(first.stop, first.start + num_samples - len(indices))
            indices.extend(range(first.start, stop))
            self._consumed.append(IndexRange(first.start, stop))
            if stop < first.stop:
                self._ranges.appendleft(IndexRange(stop, first.stop))
        self._available -= num_samples
        self._changed.set()
        return tuple(indices)

    def has(self, num_samples: int) -> bool:
        """Whether `take` would give so many at once."""
        return self._available >= num_samples and self._is_here(num_samples)

    def _is_here(self, num_samples: int) -> bool:
        return self._supply is None or self._supply.is_here(self._next(num_samples))

    def _next(self, num_samples: int) -> Iterator[IndexRange]:
        """What `take` would hand out."""
        for lease in self._ranges:
            yield IndexRange(lease.start, min(lease.stop, lease.start + num_samples))
            num_samples -= lease.stop - lease.start
            if num_samples <= 0:
                return

    async def run(self) -> None:
        """Keeps the stock filled until the run is over for this peer."""
        with contextlib.suppress(RunFinished):
            while True:
                while self._available * 2 >= self._stock:
                    await self._change()
                await self._refill()
        self.reset()  # whoever still waits for samples waits in vain

    async def _refill(self) -> None:
        while self._membership.active_view is None:
            await self._membership.activated()
        # Noted only as a member: a reset while this waited says nothing about leases that were not asked for yet.
        generation = self._generation
        try:
            ranges = await self._membership.take_leases(self._stock - self._available)
        except NotAMember:
            return
        if generation == self._generation:
            if self._supply is not None:
                self._supply.leased(ranges)
            self._ranges.extend(ranges)
            self._available += count(ranges)
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
