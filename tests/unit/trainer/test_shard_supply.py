# SPDX-License-Identifier: Apache-2.0
"""The shards that leases touch are on a machine ahead of need: from its owner's folder, a URL or peers, and right."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.state.wire import ChunkMap, TextOffer
from isthmus.trainer.data.givers import UrlPlace
from isthmus.trainer.data.places import GivenPrepared, ShardPlaces
from isthmus.trainer.data.prep.preparing import Settings, prepare
from isthmus.trainer.data.prepared import PreparedText, load_prepared
from isthmus.trainer.data.samples import SampleOrder
from isthmus.trainer.data.shard_supply import Fetched, Given, ShardSupply, bring_first
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import IntegrityError, NobodyReachable
from tests.unit.trainer.prep_rig import documents, write_jsonl

SEQ_LEN = 16
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    folder = tmp_path_factory.mktemp("text")
    source = write_jsonl(folder / "lines.jsonl", documents(400))
    return prepare(
        Settings(sources=((source, 1.0),), out=folder / "out", shard_nbytes=4 << 10, validation_fraction=0.05),
        lambda _progress: None,
    )


def elsewhere(text: PreparedText) -> PreparedText:
    """The same, as a peer knows it that has nothing but the index."""
    return PreparedText.of(text.index_bytes, folder=None, description="text", where=None)


class Owner:
    """Gives parts as a peer does, without a network."""

    def __init__(self, text: PreparedText) -> None:
        self.given = GivenPrepared(text, ShardPlaces(text, Path("nowhere")))
        self.asked: list[str] = []

    async def give(self, shelf: TextShelf, digest: str) -> Given:
        self.asked.append(digest)
        part = self.given.part(bytes.fromhex(digest))
        assert part is not None
        await shelf.begin(TextOffer(part.manifest, part.description))
        chunks = ChunkMap(part.manifest)
        for index in range(len(chunks)):
            await shelf.put(index, part.read(*chunks.place(index)))
        shelf.finish_part()
        return Given(url=None, peers=())


class Peer:
    """A supply at work."""

    def __init__(self, text: PreparedText, folder: Path, owner: Owner, *, limit_nbytes: int | None = None) -> None:
        self.order = SampleOrder(text.shard_lengths, SEQ_LEN, 0, pool=1)
        self.places = ShardPlaces(text, folder)
        self.came: list[Fetched] = []
        self.supply = ShardSupply(
            text, self.places, self.order, pool=1, give=owner.give, arrived=self.came.append, limit_nbytes=limit_nbytes
        )

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self.supply.run())
            yield
            work.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        news = asyncio.Event()
        self.supply.listen(news.set)
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                news.clear()
                await news.wait()


async def test_shards_come_in_the_order_of_the_leases_and_what_is_needed_now_comes_first(
    text: PreparedText, tmp_path: Path
) -> None:
    owner = Owner(text)
    peer = Peer(elsewhere(text), tmp_path, owner)
    num_samples = peer.order.num_samples
    first, last = IndexRange(0, num_samples // 2), IndexRange(num_samples - 1, num_samples)
    peer.supply.leased([first])
    wanted = peer.order.shards_in(first.start, first.stop)
    assert len(wanted) > 4
    assert not peer.supply.is_here([last])
    async with peer.working():
        await peer.until(lambda: len(peer.came) == len(wanted) + 1)
    names = [text.index.train[shard].name for shard in peer.order.shards_in(last.start, last.stop) + wanted]
    assert [fetched.shard.name for fetched in peer.came] == names
    assert peer.supply.is_here([last])
    assert peer.supply.is_here([IndexRange(0, 20)])
    assert len(owner.asked) == len(names), "others are not asked for"

    # The next start finds them.
    again = Peer(elsewhere(text), tmp_path, owner)
    again.supply.leased([first])
    async with again.working():
        await again.until(lambda: again.supply.is_here([IndexRange(0, 20)]))
    assert not again.came


async def test_a_bound_makes_old_shards_go_and_they_come_again_when_they_are_needed(
    text: PreparedText, tmp_path: Path
) -> None:
    peer = Peer(elsewhere(text), tmp_path, Owner(text), limit_nbytes=12 << 10)
    async with peer.working():
        for start in range(0, peer.order.num_samples, 100):
            lease = IndexRange(start, min(start + 100, peer.order.num_samples))
            peer.supply.leased([lease])
            await peer.until(lambda lease=lease: peer.supply.is_here([lease]))  # type: ignore[misc]
            assert len([path for path in (tmp_path / "text").iterdir() if len(path.name) == 64]) <= 6
        assert len(peer.came) == len(peer.order.shards_in(0, peer.order.num_samples))
        first = IndexRange(0, 1)
        assert not peer.supply.is_here([first])
        await peer.until(lambda: peer.supply.is_here([first]))


async def test_a_damaged_shard_is_named_in_its_owners_folder_and_fetched_again_where_it_is_a_copy(
    text: PreparedText, tmp_path: Path
) -> None:
    owner = Owner(text)
    peer = Peer(elsewhere(text), tmp_path / "a", owner)
    lease = IndexRange(0, 1)
    async with peer.working():
        await peer.until(lambda: peer.supply.is_here([lease]))
    (copy,) = [path for path in (tmp_path / "a" / "text").iterdir() if len(path.name) == 64]
    copy.write_bytes(bytes(copy.stat().st_size))
    again = Peer(elsewhere(text), tmp_path / "a", owner)
    async with again.working():
        await again.until(lambda: again.supply.is_here([lease]))
    assert len(again.came) == 1

    assert text.folder is not None
    own = tmp_path / "own"
    own.mkdir()
    for path in text.folder.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    for shard in text.index.train:
        (own / shard.name).write_bytes(bytes(text.index.nbytes(shard)))
    owned = Peer(load_prepared(own), tmp_path / "b", owner)
    assert not owned.supply.is_here([lease])
    with pytest.raises(IntegrityError, match="is damaged"):
        await asyncio.wait_for(owned.supply.run(), PATIENCE_S)


async def test_from_a_url_come_the_parts_of_the_index_and_nothing_else_is_believed(
    text: PreparedText, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    assert text.folder is not None
    for path in text.folder.iterdir():
        store.pipe(f"/texts/{path.name}", path.read_bytes())
    place = UrlPlace("memory://texts/")
    there = place.load()
    assert there.digest == text.digest
    shard = there.index.train[0]
    store.pipe(f"/texts/{shard.name}", bytes(there.index.nbytes(shard)))
    places = ShardPlaces(there, tmp_path)
    fetched = await bring_first(there, places, SEQ_LEN, place.giver(there, None))
    assert {one.given.url for one in fetched} == {"memory://texts"}
    with pytest.raises(NobodyReachable, match="has another train-"):
        await place.giver(there, None)(places.shelf(shard.digest), shard.digest)
    # Where the URL fails, peers give it.
    owner = Owner(text)
    await place.giver(there, owner.give)(places.shelf(shard.digest), shard.digest)
    assert owner.asked == [shard.digest]
    assert places.find(shard.digest) is not None
    assert places.find("0" * 64) is None
