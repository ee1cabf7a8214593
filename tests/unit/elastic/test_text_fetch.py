# SPDX-License-Identifier: Apache-2.0
"""Fetching a text from real donors over loopback, as a joiner does that is in no run yet."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import pytest

from isthmus.collective.errors import ConnectionLost
from isthmus.collective.transport import FrameType, Purpose, connect
from isthmus.elastic.donor.donor import refuse
from isthmus.elastic.errors import DonorRefused, NoText
from isthmus.elastic.learner.donor_link import DonorLink
from isthmus.elastic.learner.text_fetch import TextFetch
from isthmus.elastic.state.digest import Hasher, describe_state
from isthmus.elastic.state.wire import Pace, TextOffer
from isthmus.elastic.wire import encode
from tests.unit.elastic.harness import (
    CHUNK_NBYTES,
    QUICK,
    DonorPeer,
    dial_state,
    hello,
    listening,
    peer_id,
    tampered,
    that_dies,
    until,
)

SIDES = (5 * CHUNK_NBYTES + 100, CHUNK_NBYTES + 7)
NUM_CHUNKS = 8
NBYTES = sum(SIDES)


class Text:
    """Random bytes: `elastic.state.replica.SharedText`."""

    description = "some text"

    def __init__(self, hasher: Hasher, seed: int = 1) -> None:
        words = random.Random(seed)
        self.sides = [words.randbytes(nbytes) for nbytes in SIDES]
        parts = hasher.describe([("train", memoryview(self.sides[0])), ("validation", memoryview(self.sides[1]))])
        self.manifest = describe_state(0, parts, chunk_nbytes=hasher.chunk_nbytes)
        self.num_read = 0
        self.parts: dict[bytes, Text] = {}

    @property
    def digest(self) -> bytes:
        return self.manifest.digest

    def read(self, side: int, chunk: int) -> memoryview:
        self.num_read += 1
        start = chunk * CHUNK_NBYTES
        return memoryview(self.sides[side])[start : start + CHUNK_NBYTES]

    def part(self, digest: bytes) -> "Text | None":
        return self if digest == self.digest else self.parts.get(digest)


class Memory:
    """A shelf of `elastic.learner.text_fetch` without a disk."""

    def __init__(self, num_there: int = 0) -> None:
        self.num_there = num_there
        self.chunks: list[bytes] = []
        self.offers: list[TextOffer] = []
        self.is_full_at: int | None = None

    async def begin(self, offer: TextOffer) -> int:
        self.offers.append(offer)
        return self.num_there + len(self.chunks)

    async def put(self, index: int, data: memoryview) -> None:
        assert index == self.num_there + len(self.chunks)
        if index == self.is_full_at:
            raise OSError("the disk is full")
        self.chunks.append(bytes(data))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.elastic.learner.text_fetch._FIRST_PAUSE_S", 0.02)


@pytest.fixture
def text(hasher: Hasher) -> Text:
    return Text(hasher)


def donor_of(text: Text, hasher: Hasher, number: int) -> DonorPeer:
    donor = DonorPeer.at_step(number, hasher, 1)
    donor.donor._text = text
    return donor


@contextlib.asynccontextmanager
async def serving(*donors: DonorPeer) -> AsyncIterator[list[str]]:
    """The addresses of these donors; in the end nobody is connected to them any more."""
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(donor.serving()) for donor in donors]
        yield [member.address for member in members]
        await until(lambda: all(donor.donor.num_connections == 0 for donor in donors))


class Joiner:
    """A fetch and what came of it."""

    def __init__(self, text: Text, *addresses: str, pace: Pace = QUICK, num_there: int = 0, patience_s: float = 5.0):
        self.shelf = Memory(num_there)
        self.found = [list(addresses)]
        self.told: list[tuple[str, int, int]] = []
        self.fetch = TextFetch(
            text.digest,
            self.shelf,
            find=self._find,
            dial=lambda address: connect(address, hello(Purpose.STATE, 99), timeout_s=5.0),
            advanced=lambda *fact: self.told.append(fact),
            clock=time.monotonic,
            pace=pace,
            patience_s=patience_s,
        )

    async def _find(self) -> list[str]:
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def has(self, text: Text) -> bool:
        return b"".join(self.shelf.chunks) == b"".join(text.sides)


async def test_it_comes_from_a_donor_whole_and_is_told_chunk_by_chunk(hasher: Hasher, text: Text) -> None:
    async with serving(donor_of(text, hasher, 1)) as addresses:
        joiner = Joiner(text, *addresses)
        await joiner.fetch.run()
    assert joiner.has(text)
    assert joiner.fetch.givers == (peer_id(1),)
    assert joiner.fetch.fetched_nbytes == NBYTES
    assert len(joiner.told) == NUM_CHUNKS
    assert joiner.told[-1] == (peer_id(1), NBYTES, NBYTES)
    assert joiner.shelf.offers == [TextOffer(text.manifest, "some text")]


async def test_what_an_earlier_start_has_is_not_fetched_again(hasher: Hasher, text: Text) -> None:
    async with serving(donor_of(text, hasher, 1)) as addresses:
        joiner = Joiner(text, *addresses, num_there=6)
        await joiner.fetch.run()
    assert b"".join(joiner.shelf.chunks) == text.sides[1]
    assert text.num_read == 2
    assert joiner.told[0] == (peer_id(1), SIDES[0] + CHUNK_NBYTES, NBYTES)


async def _spoil(_channel, frame_type, payload, chunk):
    return bytes(len(payload)) if frame_type is FrameType.STATE_CHUNK and chunk == 3 else payload


async def _cut_short(_channel, frame_type, payload, chunk):
    return bytes(payload)[:-1] if frame_type is FrameType.STATE_CHUNK and chunk == 3 else payload


async def _add_a_byte(_channel, frame_type, payload, chunk):
    return bytes(payload) + b"!" if frame_type is FrameType.STATE_CHUNK and chunk == 3 else payload


async def _say_another_number(channel, frame_type, payload, chunk):
    if frame_type is FrameType.STATE_CHUNK and chunk == 3:
        await channel.send(frame_type, payload, chunk=4, timeout_s=1.0)
    return payload


@pytest.mark.parametrize(
    "fault",
    [
        lambda donor: tampered(donor, _spoil),
        lambda donor: tampered(donor, _cut_short),
        lambda donor: tampered(donor, _add_a_byte),
        lambda donor: tampered(donor, _say_another_number),
        lambda donor: that_dies(donor, after=3),
    ],
    ids=["wrong bytes", "too short", "too long", "another chunk", "dies"],
)
async def test_a_donor_that_does_it_badly_is_left_for_the_next_which_goes_on_there(hasher, text, fault) -> None:
    rest = Text(hasher)
    async with serving(fault(donor_of(text, hasher, 1)), donor_of(rest, hasher, 2)) as addresses:
        joiner = Joiner(text)
        joiner.found = [[address] for address in addresses]
        await joiner.fetch.run()
    assert joiner.has(text)
    assert joiner.fetch.givers == (peer_id(1), peer_id(2))
    assert rest.num_read == NUM_CHUNKS - 3
    assert joiner.fetch.fetched_nbytes == NBYTES


async def test_a_donor_that_falls_silent_is_given_up_by_what_it_did_before(hasher: Hasher, text: Text) -> None:
    """A chunk may take seconds by the floor, and took no time before."""
    held = asyncio.Event()

    async def fall_silent(_channel, frame_type, payload, chunk):
        if frame_type is FrameType.STATE_CHUNK and chunk == 3:
            await held.wait()
        return payload

    slow = Pace(patience_s=0.3, floor_bytes_per_s=CHUNK_NBYTES / 60, window=3)
    async with serving(tampered(donor_of(text, hasher, 1), fall_silent), donor_of(text, hasher, 2)) as addresses:
        joiner = Joiner(text, *addresses, pace=slow)
        async with asyncio.timeout(20.0):
            await joiner.fetch.run()
        held.set()
    assert joiner.has(text)
    assert joiner.fetch.givers[-1] == peer_id(2)


def test_a_measured_donor_has_no_longer_than_the_floor_gives_it() -> None:
    pace = Pace(patience_s=1.0, floor_bytes_per_s=100.0)
    assert pace.measured(1.0) == pace
    assert pace.measured(1e6).allowance_s(1000) < pace.allowance_s(1000)
    assert pace.measured(1e6).allowance_s(1000) > 1.0


async def test_nothing_of_another_text_is_kept(hasher: Hasher, text: Text) -> None:
    another = Text(hasher, 2)
    another.parts[text.digest] = another  # what it gives out for it
    other, liar = donor_of(another, hasher, 1), donor_of(text, hasher, 2)

    async def describe_less(_channel, frame_type, payload, _chunk):
        if frame_type is FrameType.STATE_HEADER:
            whole = text.manifest
            parts = (whole.tensors[0], type(whole.tensors[1])("validation", 7, whole.tensors[1].chunk_digests[:1]))
            return encode(TextOffer(type(whole)(whole.outer_step, whole.digest, parts, whole.chunk_nbytes), ""))
        return payload

    async with serving(other, tampered(liar, describe_less)) as addresses:
        joiner = Joiner(text, *addresses, patience_s=0.0)
        with pytest.raises(NoText, match=r"of another text.*the root is not the root of its chunks") as caught:
            await joiner.fetch.run()
    assert joiner.shelf.offers == []
    assert len(caught.value.causes) == 2


async def test_a_description_that_would_spoil_a_terminal_is_none(hasher: Hasher, text: Text) -> None:
    text.description = "text\x1b[2J"
    async with serving(donor_of(text, hasher, 1)) as addresses:
        joiner = Joiner(text, *addresses, patience_s=0.0)
        with pytest.raises(NoText, match="not understood"):
            await joiner.fetch.run()


async def test_who_looks_through_a_long_text_first_still_has_its_patience(hasher: Hasher, text: Text) -> None:
    donor = donor_of(text, hasher, 1)
    async with serving(donor) as addresses:
        joiner = Joiner(text, *addresses, patience_s=0.5)
        begin, is_first = joiner.shelf.begin, True

        async def look_through(offer: TextOffer) -> int:
            nonlocal is_first
            if is_first:
                is_first = False
                next(iter(donor.donor._sessions))._channel.close()  # it has waited for too long
                joiner.fetch._moved_at -= 1000.0
            return await begin(offer)

        joiner.shelf.begin = look_through
        await joiner.fetch.run()
    assert joiner.has(text)


async def test_a_donor_that_has_none_is_asked_again_and_others_that_come_are_found(hasher: Hasher, text: Text) -> None:
    poor = DonorPeer.at_step(1, hasher, 1)
    async with serving(poor, donor_of(text, hasher, 2)) as (first, second):
        joiner = Joiner(text, first, patience_s=30.0)
        joiner.found = [[], [first], [first, second]]
        await joiner.fetch.run()
    assert joiner.has(text)
    assert poor.num_connections >= 1


async def test_who_finds_all_donors_busy_with_others_waits_for_its_turn(hasher: Hasher, text: Text) -> None:
    donor = donor_of(text, hasher, 1)
    donor.donor._max_connections = 2
    async with serving(donor) as addresses:
        assert donor.member is not None
        reader = DonorLink(donor.member, await dial_state(donor.member), QUICK)
        await reader.text(text.digest)
        joiner = Joiner(text, *addresses, patience_s=0.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(joiner.fetch.run())
            await until(lambda: donor.num_connections >= 3)  # it was refused, and is back
            reader.close()
    assert joiner.has(text)


async def test_with_nobody_there_it_ends_and_says_so(text: Text) -> None:
    joiner = Joiner(text, patience_s=0.0)
    with pytest.raises(NoText, match="no peer is there"):
        await joiner.fetch.run()


async def test_what_the_disk_refuses_ends_the_fetch_and_lets_the_donor_go(hasher: Hasher, text: Text) -> None:
    async with serving(donor_of(text, hasher, 1)) as addresses:
        joiner = Joiner(text, *addresses)
        joiner.shelf.is_full_at = 4
        with pytest.raises(OSError, match="the disk is full"):
            await joiner.fetch.run()
    assert len(joiner.shelf.chunks) == 4


# -------------------------------------------------------------------------------- the donor's side


async def test_a_part_of_the_text_is_fetched_by_its_own_digest_from_whoever_has_it(hasher: Hasher, text: Text) -> None:
    part = Text(hasher, seed=2)
    whole, partial = donor_of(text, hasher, 1), donor_of(Text(hasher), hasher, 2)
    text.parts[part.digest] = part
    async with serving(whole, partial) as addresses:
        joiner = Joiner(part, *reversed(addresses))
        await joiner.fetch.run()
        assert joiner.has(part)
        lacking = Joiner(Text(hasher, seed=3), *addresses, patience_s=0.0)
        with pytest.raises(NoText, match="this peer does not have it"):
            await lacking.fetch.run()
    assert text.num_read == 0
    assert part.num_read == NUM_CHUNKS


async def test_readers_of_the_text_leave_half_of_the_connections_to_learners(hasher: Hasher, text: Text) -> None:
    donor = donor_of(text, hasher, 1)
    donor.donor._max_connections = 4
    async with serving(donor):
        assert donor.member is not None
        links = [DonorLink(donor.member, await dial_state(donor.member, number=90 + n), QUICK) for n in range(4)]
        for link in links[:2]:
            assert (await link.text(text.digest)).manifest == text.manifest
        with pytest.raises(DonorRefused, match="to as many as it may"):
            await links[2].text(text.digest)
        manifest, _ = await links[2].offer(None)
        assert manifest == donor.replica.manifest
        # A reader that asks for the state is none any more.
        await links[0].offer(None)
        assert (await links[3].text(text.digest)).manifest == text.manifest
        for link in links:
            link.close()
    assert donor.replica.num_pins == 0


async def test_text_waits_for_exchanges_as_a_snapshot_does(hasher: Hasher, text: Text) -> None:
    donor = donor_of(text, hasher, 1)
    room_for, asked = donor.donor.room_for, []

    async def counted(nbytes: int, *, is_urgent: bool, piece_s: float) -> None:
        asked.append((nbytes, is_urgent))
        await room_for(nbytes, is_urgent=is_urgent, piece_s=piece_s)

    donor.donor.room_for = counted
    async with serving(donor) as addresses:
        await Joiner(text, *addresses).fetch.run()
    assert sum(nbytes for nbytes, _ in asked) == NBYTES == donor.donor.bytes_served
    assert not any(is_urgent for _, is_urgent in asked)
    assert donor.donor.fetches() == {}, "nobody's leave waits for it"


async def test_a_donor_without_text_and_a_process_without_a_donor_say_so(hasher: Hasher, text: Text) -> None:
    poor = DonorPeer.at_step(1, hasher, 1)

    async def turn_away(channel):
        await refuse(channel, "nothing here")

    async with serving(poor) as addresses, listening(2, {Purpose.STATE: turn_away}) as listener:
        joiner = Joiner(text, *addresses, listener.address, patience_s=0.0)
        with pytest.raises(NoText, match=r"has no text to give.*nothing here"):
            await joiner.fetch.run()


async def test_chunks_before_a_description_end_the_connection(hasher: Hasher, text: Text) -> None:
    donor = donor_of(text, hasher, 1)
    async with serving(donor):
        assert donor.member is not None
        link = DonorLink(donor.member, await dial_state(donor.member), QUICK)
        await link.ask_chunk(0)
        with pytest.raises(ConnectionLost):
            await link.take_chunk(0, memoryview(bytearray(CHUNK_NBYTES)), bytes(32))
        link.close()
    assert text.num_read == 0
