# SPDX-License-Identifier: Apache-2.0
"""The shards that leases touch are on a machine ahead of need: from its owner's folder, a URL or peers, and right."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, View
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.state.wire import ChunkMap, TextOffer
from isthmus.trainer.data import givers, places
from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.givers import UrlPlace
from isthmus.trainer.data.places import GivenPrepared, ShardPlaces
from isthmus.trainer.data.prep.preparing import Settings, prepare
from isthmus.trainer.data.prepared import PreparedText, load_prepared
from isthmus.trainer.data.samples import SampleOrder
from isthmus.trainer.data.shard_supply import Fetched, Given, ShardSupply, bring_first
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import IntegrityError, NobodyReachable
from isthmus.trainer.run.shards import WaysToMembers
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


class Absent(Owner):
    """Is not there for the first attempts, each of which takes five seconds of a clock that nobody waits for.

    Args:
        num_attempts: in vain.
        meanwhile: called in each of them.
    """

    def __init__(self, text: PreparedText, num_attempts: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__(text)
        self.num_attempts = num_attempts
        self.meanwhile = meanwhile
        self.now_s = 0.0
        self.pauses: list[float] = []

    async def give(self, shelf: TextShelf, digest: str) -> Given:
        if len(self.asked) < self.num_attempts:
            self.asked.append(digest)
            self.now_s += 5.0
            self.meanwhile()
            raise NobodyReachable("nobody gives it", cure="start a peer that has it")
        return await super().give(shelf, digest)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


class Peer:
    """A supply at work."""

    def __init__(self, text: PreparedText, folder: Path, owner: Owner, *, limit_nbytes: int | None = None) -> None:
        time = {"clock": lambda: owner.now_s, "pause": owner.pause} if isinstance(owner, Absent) else {}
        self.order = SampleOrder(text.shard_lengths, SEQ_LEN, 0, pool=1)
        self.places = ShardPlaces(text, folder)
        self.came: list[Fetched] = []
        self.supply = ShardSupply(
            text,
            self.places,
            self.order,
            pool=1,
            give=owner.give,
            arrived=self.came.append,
            patience_s=600.0,
            limit_nbytes=limit_nbytes,
            **time,
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


async def test_what_nobody_gives_is_asked_for_again_with_growing_pauses_and_one_warning_says_what_is_missing(
    text: PreparedText, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Absent(text, num_attempts=20)
    peer = Peer(elsewhere(text), tmp_path, owner)
    lease = IndexRange(0, 1)
    assert not peer.supply.is_here([lease])
    async with peer.working():
        await peer.until(lambda: peer.supply.is_here([lease]))
    assert owner.pauses == [5.0] + 19 * [10.0]
    assert 290.0 < owner.now_s < 600.0
    (shard,) = peer.order.shards_in(0, 1)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"shard_missing name={text.index.train[shard].name} cause='nobody gives it';")
    assert "start a peer that has it" in warning


async def test_what_the_next_step_lacks_ends_the_peer_when_it_was_asked_for_in_vain_as_long_as_for_a_coordinator(
    text: PreparedText, tmp_path: Path
) -> None:
    owner = Absent(text, num_attempts=1000)
    peer = Peer(elsewhere(text), tmp_path, owner)
    assert not peer.supply.is_here([IndexRange(0, 1)])
    with pytest.raises(NobodyReachable, match="nobody gives it; start a peer"):
        await asyncio.wait_for(peer.supply.run(), PATIENCE_S)
    assert 600.0 <= owner.now_s < 620.0


async def test_who_has_shards_to_train_on_asks_for_the_next_ones_without_an_end(
    text: PreparedText, tmp_path: Path
) -> None:
    owner = Absent(text, num_attempts=1000)
    peer = Peer(elsewhere(text), tmp_path, owner)
    lease = IndexRange(0, 1)
    peer.supply.leased([lease])
    async with peer.working():
        await peer.until(lambda: bool(peer.came))
    assert owner.now_s > 10_000.0
    assert peer.supply.is_here([lease])


async def test_a_shard_that_is_needed_is_asked_for_before_the_peer_gives_up_over_another(
    text: PreparedText, tmp_path: Path
) -> None:
    first = IndexRange(0, 1)

    class OfAllButOne(Absent):
        async def give(self, shelf: TextShelf, digest: str) -> Given:
            return await (super().give if digest == absent else super(Absent, self).give)(shelf, digest)

    def need_another() -> None:
        if owner.now_s > 1000.0 and not peer.came:
            assert not peer.supply.is_here([last])

    owner = OfAllButOne(text, num_attempts=200, meanwhile=need_another)
    peer = Peer(elsewhere(text), tmp_path, owner)
    last = IndexRange(peer.order.num_samples - 1, peer.order.num_samples)
    absent = text.index.train[peer.order.place(first.start)[0]].digest
    peer.supply.leased([first])
    async with peer.working():
        await peer.until(lambda: bool(peer.came))
    assert peer.supply.is_here([last])
    assert owner.asked[-1] != absent
    assert 1000.0 < owner.now_s < 1020.0


async def test_pieces_that_come_are_no_silence(text: PreparedText, tmp_path: Path) -> None:
    owner = Absent(text, num_attempts=1000, meanwhile=lambda: peer.supply.moved())
    peer = Peer(elsewhere(text), tmp_path, owner)
    lease = IndexRange(0, 1)
    assert not peer.supply.is_here([lease])
    async with peer.working():
        await peer.until(lambda: peer.supply.is_here([lease]))
    assert set(owner.pauses) == {1.0}


async def test_a_peer_that_lost_its_leases_does_not_end_of_a_shard_that_it_wants_no_more(
    text: PreparedText, tmp_path: Path
) -> None:
    def lose() -> None:
        owner.now_s += 1000.0
        peer.supply.forget()

    owner = Absent(text, num_attempts=1, meanwhile=lose)
    peer = Peer(elsewhere(text), tmp_path, owner)
    last = IndexRange(peer.order.num_samples - 1, peer.order.num_samples)
    assert not peer.supply.is_here([IndexRange(0, 1)])
    async with peer.working():
        while not owner.asked:  # noqa: ASYNC110 - it is asked in the next turn of the loop
            await asyncio.sleep(0)
        assert not peer.supply.is_here([last])
        await peer.until(lambda: peer.supply.is_here([last]))
    assert [fetched.shard for fetched in peer.came] == [text.index.train[peer.order.place(last.start)[0]]]


async def test_members_of_the_newest_view_are_asked_and_former_ones_that_may_be_back() -> None:
    def view(*members: Member) -> View:
        return View(Epoch(1), OuterStep(0), b"", members)

    def member(name: str, address: str, incarnation: int = 1) -> Member:
        return Member(PeerId(name), Incarnation(incarnation), address)

    me, one, two = member("me", "me:1"), member("one", "one:1"), member("two", "two:1")
    again = member("one", "one:2", 2)
    dialled: list[str] = []
    connections = SimpleNamespace(
        communicator=SimpleNamespace(view=None),
        dial=lambda address, _purpose: _noted(dialled, f"dial {address}"),
        dial_donor=lambda member: _noted(dialled, f"donor {member.address}"),
    )
    start = SimpleNamespace(me=me.ref, coordinators=("coordinator:1", "one:1"))
    ways = WaysToMembers(start, connections)  # type: ignore[arg-type]
    assert await ways.find() == ("coordinator:1", "one:1")
    connections.communicator.view = view(me, one)
    assert await ways.find() == ("one:1", "coordinator:1")
    connections.communicator.view = view(me, two)
    assert await ways.find() == ("two:1", "one:1", "coordinator:1")
    await ways.dial("two:1")
    await ways.dial("one:1")
    assert dialled == ["donor two:1", "dial one:1"]
    connections.communicator.view = view(me, again)
    assert await ways.find() == ("one:2", "two:1", "coordinator:1", "one:1")
    for number in range(20):
        connections.communicator.view = view(me, member(f"passer-by {number}", f"there:{number}"))
        assert len(await ways.find()) <= 1 + 8 + 2


async def _noted(notes: list[str], note: str) -> None:
    notes.append(note)


def test_a_part_that_makes_room_while_it_is_asked_for_is_not_here(
    text: PreparedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before: it was hashed, removed and then mapped; a peer that is asked over a call of its own ended."""
    there = elsewhere(text)
    digest = text.index.train[0].digest
    assert text.folder is not None
    shelf = ShardPlaces(there, tmp_path).shelf(digest)
    assert shelf.adopt((text.folder / text.index.train[0].name).read_bytes())
    given = GivenPrepared(there, ShardPlaces(there, tmp_path))
    assert given.part(bytes.fromhex(digest)) is not None
    describe_part = places.describe_part

    def describe_and_remove(path: Path) -> object:
        manifest = describe_part(path)
        path.unlink()
        return manifest

    monkeypatch.setattr(places, "describe_part", describe_and_remove)
    assert given.part(bytes.fromhex(digest)) is None


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


def test_a_store_may_give_less_than_it_is_asked_for_but_not_too_little(
    text: PreparedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before: a web server that does not say how long a file is gave the first piece of it, which was refused."""
    now_s = 0.0

    class Drip(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal now_s
            now_s += seconds_each
            return super().read(min(size or 0, 1000))

    library = SimpleNamespace(open=lambda _url, _mode: Drip(text.index_bytes))
    monkeypatch.setattr(givers, "_library", lambda: library)
    monkeypatch.setattr(givers, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(givers, "_MAX_INDEX_NBYTES", len(text.index_bytes))
    assert len(text.index_bytes) > 2000
    seconds_each = 1.0
    assert UrlPlace("store://texts").load().digest == text.digest
    seconds_each = 50.0
    with pytest.raises(DataError, match="TimeoutError: it takes too long"):
        UrlPlace("store://texts").load()
