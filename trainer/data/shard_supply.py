# SPDX-License-Identifier: Apache-2.0
"""The shards of a prepared text on this machine: where they lie, and getting those that are needed, ahead of need.

    folder              its owner's, as `isthmus data prep` wrote it; or
    <dir>/text/<digest> a copy from peers or a URL, one file a shard (text_shelf.py)

A peer needs the shards that its leases touch. They are fetched in the order of the leases, one at a time; those that
the next inner step needs go first. Rules: no shard is used before its digest was right in this start; what is fetched
is bounded, if that is asked for: the shards that were not needed for the longest time go, but never those of the last
leases. Must not know who gives, nor what a lease is for.

Errors: `IntegrityError` (9) for a damaged shard in its owner's folder; what the giver and the shelf raise.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from isthmus.collective.core.types import PeerId
from isthmus.elastic.core.messages import Digest, IndexRange
from isthmus.elastic.state.digest import StateManifest
from isthmus.trainer.data.corpus import CHUNK_NBYTES
from isthmus.trainer.data.prepared import (
    TOKENIZER_NAME,
    Index,
    PreparedText,
    ShardEntry,
    describe_part,
    require_part,
)
from isthmus.trainer.data.samples import SampleOrder, held_out_shards
from isthmus.trainer.data.text_shelf import FOLDER_NAME, TextShelf
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

_POOLS_KEPT: Final = 3
"""Pools of shards that stay whatever the bound: the one that is trained on, the next, and one between leases."""


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


class ShardPlaces:
    """Where parts lie on this machine, if they do. Used by whoever gives them too: from any thread.

    Args:
        text: what they are of.
        folder: this peer's.
    """

    def __init__(self, text: PreparedText, folder: Path) -> None:
        self._text = text
        self._folder = folder
        index = text.index
        self._names = {shard.digest: shard.name for shard in index.shards}
        if index.tokenizer is not None:
            self._names[index.tokenizer] = TOKENIZER_NAME

    def owned(self, digest: str) -> Path | None:
        """In the owner's folder."""
        folder = self._text.folder
        path = None if folder is None else folder / self._names[digest]
        return path if path is not None and path.is_file() else None

    def shelf(self, digest: str) -> TextShelf:
        """For a copy; each call makes another object."""
        return TextShelf(self._folder, digest)

    def find(self, digest: str) -> Path | None:
        """Where the part is, unproved; None if it is not here or no part of the text."""
        if digest not in self._names:
            return None
        copy = self._folder / FOLDER_NAME / digest
        return self.owned(digest) or (copy if copy.is_file() else None)


class GivenPrepared:
    """A prepared text as this peer gives it to others, and the parts of it that are here: `SharedText`."""

    def __init__(self, text: PreparedText, places: ShardPlaces) -> None:
        self._text = text
        self._places = places

    @property
    def manifest(self) -> StateManifest:
        """See `elastic.state.replica.SharedText`."""
        return self._text.manifest

    @property
    def description(self) -> str:
        """See `elastic.state.replica.SharedText`."""
        return self._text.description

    def read(self, side: int, chunk: int) -> memoryview:
        """See `elastic.state.replica.SharedText`."""
        assert side == 0, "an index is one part"
        return memoryview(self._text.index_bytes)[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]

    def part(self, digest: Digest) -> "GivenPrepared | _GivenPart | None":
        """See `elastic.state.replica.SharedText`. A part is hashed when it is asked for."""
        if digest == self._text.manifest.digest:
            return self
        path = self._places.find(digest.hex())
        try:
            manifest = None if path is None else describe_part(path)
        except OSError as error:  # it may have made room just now
            log.debug("part_unreadable cause=%r", str(error))
            return None
        if path is None or manifest is None or manifest.digest != digest:
            return None
        return _GivenPart(path, manifest, self._text.description)


class _GivenPart:
    """A file, mapped: who reads it keeps it, even if it makes room meanwhile."""

    def __init__(self, path: Path, manifest: StateManifest, description: str) -> None:
        self.manifest = manifest
        self.description = description
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def read(self, side: int, chunk: int) -> memoryview:
        """See `elastic.state.replica.SharedText`."""
        assert side == 0, "a part is one file"
        return np.array(self._data[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]).data

    def part(self, digest: Digest) -> "_GivenPart | None":
        """See `elastic.state.replica.SharedText`."""
        return self if digest == self.manifest.digest else None


class ShardSupply:
    """Keeps the shards of a peer's leases on its machine. `run` is its work; everything else returns at once.

    Args:
        text: the run's.
        places: of its parts.
        order: which sample lies where.
        pool: shards that are mixed at a time.
        give: gets what is not here.
        arrived: told of every shard that was fetched.
        limit_nbytes: about how much of what was fetched stays; None: all.
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
        limit_nbytes: int | None = None,
    ) -> None:
        self._text = text
        self._places = places
        self._order = order
        self._keep = _POOLS_KEPT * pool
        self._give = give
        self._arrived = arrived
        self._limit_nbytes = limit_nbytes
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
        """The leases are lost."""
        self._wanted.clear()
        self._needed.clear()

    async def run(self) -> None:
        """Bring what is wanted, for ever.

        Raises:
            IsthmusError: a shard is damaged, nobody gives it, or the disk refuses.
        """
        while True:
            shard = next(iter(self._needed or self._wanted), None)
            if shard is None:
                self._news.clear()
                await self._news.wait()
                continue
            if shard not in self._here:
                await self._bring(shard)
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
            self._arrived(fetched)
        if self._places.owned(entry.digest) is None:
            self._copies[shard] = self._text.index.nbytes(entry)

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
