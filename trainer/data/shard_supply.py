# SPDX-License-Identifier: Apache-2.0
"""The shards of a prepared text that a peer needs: brought to its machine ahead of need.

A peer needs the shards that its leases touch. They are fetched in the order of the leases, one at a time; those that
the next inner step needs go first. Rules: no shard is used before its digest was right in this start; what is fetched
is bounded, if that is asked for: the shards that were not needed for the longest time go, but never those of the last
leases. A shard that nobody gives is asked for again, with growing pauses. That ends the peer only when nothing has come
for long, and the next inner step lacks it. Must not know who gives, nor what a lease is for.

Errors: `IntegrityError` (9) for a damaged shard in its owner's folder; what the giver and the shelf raise.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from isthmus.collective.core.types import Instant, PeerId
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.learner.text_fetch import PATIENCE_S
from isthmus.trainer.data.places import ShardPlaces
from isthmus.trainer.data.prepared import Index, PreparedText, ShardEntry, require_part
from isthmus.trainer.data.samples import SampleOrder, held_out_shards
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import NobodyReachable
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

_POOLS_KEPT: Final = 3
"""Pools of shards that stay whatever the bound: the one that is trained on, the next, and one between leases."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10.0
"""Between two attempts in vain: as long as all of them took until then, within these bounds."""


class Given(NamedTuple):
    """Who gave a part."""

    url: str | None
    peers: tuple[PeerId, ...]


class Fetched(NamedTuple):
    """A shard that has come."""

    shard: ShardEntry
    nbytes: int
    given: Given
    seconds: float


Giver = Callable[[TextShelf, str], Awaitable[Given]]
"""Puts the part with this digest onto its shelf. Raises an `IsthmusError` where nobody gives it."""


class ShardSupply:
    """Keeps the shards of a peer's leases on its machine. `run` is its work; everything else returns at once.

    Args:
        text: the run's.
        places: of its parts.
        order: which sample lies where.
        pool: shards that are mixed at a time.
        give: gets what is not here, or says soon that nobody gives it now.
        arrived: told of every shard that was fetched.
        patience_s: how long it may ask in vain if the next inner step lacks a shard. As long as that has all that it
            needs, it asks without an end.
        limit_nbytes: about how much of what was fetched stays; None: all.
        clock: monotonic seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        text: PreparedText,
        places: ShardPlaces,
        order: SampleOrder,
        *,
        pool: int,
        give: Giver,
        arrived: Callable[[Fetched], None],
        patience_s: float,
        limit_nbytes: int | None = None,
        clock: Callable[[], Instant] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._text = text
        self._places = places
        self._order = order
        self._keep = _POOLS_KEPT * pool
        self._give = give
        self._arrived = arrived
        self._patience_s = patience_s
        self._limit_nbytes = limit_nbytes
        self._clock = clock
        self._pause = pause
        self._in_vain_s = 0.0  # it has asked for so long since anything came
        self._counted_until = clock()
        self._has_warned = False
        self._here: set[int] = set()
        self._needed: dict[int, None] = {}  # by the next inner step
        self._wanted: dict[int, None] = {}  # by leases, in their order
        self._mentioned: dict[int, None] = {}  # of what is here or wanted, latest last
        self._copies: dict[int, int] = {}  # bytes of those that are not their owner's
        self._news = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it whenever a shard has come."""
        self._listeners.append(listener)

    def leased(self, ranges: Iterable[IndexRange]) -> None:
        """These samples will be trained on."""
        for each in ranges:
            for shard in self._order.shards_in(each.start, each.stop):
                self._mention(shard)
                if shard not in self._here:
                    self._wanted[shard] = None
                    self._news.set()

    def is_here(self, ranges: Iterable[IndexRange]) -> bool:
        """Whether these samples can be trained on now; if not, what they lack goes first."""
        shards = {self._order.place(index)[0] for each in ranges for index in range(each.start, each.stop)}
        for shard in shards:
            self._mention(shard)
        missing = shards - self._here
        self._needed = dict.fromkeys(sorted(missing))
        if missing:
            self._news.set()
        return not missing

    def forget(self) -> None:
        """The leases are lost. Whether anybody gives what is being fetched matters no more."""
        self._wanted.clear()
        self._needed.clear()

    def moved(self) -> None:
        """A piece of what is being fetched has come."""
        self._in_vain_s, self._counted_until, self._has_warned = 0.0, self._clock(), False

    async def run(self) -> None:
        """Bring what is wanted, for ever.

        Raises:
            IsthmusError: a shard is damaged, the disk refuses, or nobody has given what is needed for `patience_s`.
        """
        while True:
            shard = next(iter(self._needed or self._wanted), None)
            if shard is None:
                self._news.clear()
                await self._news.wait()
                self._counted_until = self._clock()
                continue
            try:
                if shard not in self._here:
                    await self._bring(shard)
            except NobodyReachable as error:
                if shard in self._needed or shard in self._wanted:
                    await self._hold_out(shard, error)
                continue
            self._counted_until = self._clock()
            self._here.add(shard)
            self._needed.pop(shard, None)
            self._wanted.pop(shard, None)
            await self._make_room()
            for listener in self._listeners:
                listener()

    async def _bring(self, shard: int) -> None:
        entry = self._text.index.train[shard]
        fetched = await bring(self._places, self._text.index, entry, self._give)
        if fetched is not None:
            self.moved()
            self._arrived(fetched)
        if self._places.owned(entry.digest) is None:
            self._copies[shard] = self._text.index.nbytes(entry)

    async def _hold_out(self, shard: int, error: NobodyReachable) -> None:
        """Nobody gives this shard now: wait until it is to be asked for again, or raise if that was in vain for long.

        Found before: its owner was suspended for 40 s, and peers with leases, links and a coordinator ended with 4.
        """
        now = self._clock()
        self._in_vain_s += now - self._counted_until
        self._counted_until = now
        if shard in self._needed and self._in_vain_s >= self._patience_s:
            raise error
        if self._in_vain_s >= PATIENCE_S and not self._has_warned:
            self._has_warned = True
            name = self._text.index.train[shard].name
            log.warning("shard_missing name=%s cause=%r; this peer goes on asking; %s", name, error.problem, error.cure)
        await self._pause(min(max(_FIRST_PAUSE_S, self._in_vain_s), _LONGEST_PAUSE_S))

    async def _make_room(self) -> None:
        """Copies go, those first that nobody has mentioned for the longest time."""
        while self._limit_nbytes is not None and sum(self._copies.values()) > self._limit_nbytes:
            old = list(self._mentioned)[: -self._keep]
            shard = next((shard for shard in old if shard in self._copies and shard not in self._wanted), None)
            if shard is None:
                return
            del self._mentioned[shard], self._copies[shard]
            self._here.discard(shard)
            await in_thread(self._places.shelf(self._text.index.train[shard].digest).remove)

    def _mention(self, shard: int) -> None:
        self._mentioned.pop(shard, None)
        self._mentioned[shard] = None


async def bring(places: ShardPlaces, index: Index, shard: ShardEntry, give: Giver) -> Fetched | None:
    """See that a shard is on this machine and right. What had to come, if it did.

    Raises:
        IsthmusError: see `ShardSupply.run`.
    """
    return await _bring(places, shard.digest, give, shard, index.nbytes(shard))


async def bring_first(text: PreparedText, places: ShardPlaces, seq_len: int, give: Giver) -> list[Fetched]:
    """What every peer has before it takes part: the tokenizer, and the shards that held-out samples are taken from.

    Raises:
        IsthmusError: see `ShardSupply.run`.
    """
    index = text.index
    if index.tokenizer is not None:
        await _bring(places, index.tokenizer, give, None, 0)
    lengths = [shard.num_tokens for shard in index.held_out]
    brought = [await bring(places, index, index.held_out[at], give) for at in held_out_shards(lengths, seq_len)]
    return [fetched for fetched in brought if fetched is not None]


async def _bring(
    places: ShardPlaces, digest: str, give: Giver, shard: ShardEntry | None, nbytes: int
) -> Fetched | None:
    owned = places.owned(digest)
    if owned is not None:
        await in_thread(require_part, owned, digest)
        return None
    shelf = places.shelf(digest)
    if await in_thread(shelf.has):
        return None
    clock = asyncio.get_running_loop().time
    began_at = clock()
    try:
        given = await give(shelf, digest)
    finally:
        shelf.close()
    if shard is None:
        return None
    return Fetched(shard=shard, nbytes=nbytes, given=given, seconds=clock() - began_at)
