# SPDX-License-Identifier: Apache-2.0
"""What travels when a peer catches up: never more than the cheaper of the missing commits and the differing chunks."""

import asyncio

import msgspec
import numpy as np
import pytest

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.types import OuterStep
from isthmus.collective.transport import FrameType
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.donor.donor import TURN_S, Donor
from isthmus.elastic.errors import NoDonor
from isthmus.elastic.learner.state_sync import StateSync
from isthmus.elastic.state.parity import contents_of, differing, first_difference, missing_nbytes, narrowed, salvage
from isthmus.elastic.state.wire import CommitHeader, Stock
from tests.unit.elastic.harness import (
    CHUNK_NBYTES,
    NUM_CHUNKS,
    QUICK,
    DonorPeer,
    NumberReplica,
    dial_state,
    tampered,
    that_dies,
    totals,
    until,
)

STATE_NBYTES = 16_000
COMMIT_NBYTES = 2_000


def behind(hasher, *, at_step, total_of=totals):
    replica = NumberReplica(hasher)
    replica.found()
    for step in range(1, at_step + 1):
        replica.commit(total_of(step))
    return replica


class Learner:
    """A sync with a counter of the bytes that it verified."""

    def __init__(self, replica, hasher, *, pace=QUICK):
        self.replica = replica
        self.nbytes = 0
        self.sync = StateSync(replica, dial_state, hasher=hasher, pace=pace, advanced=self._advanced)

    def _advanced(self, nbytes):
        self.nbytes += nbytes

    async def catch_up(self, target, *members):
        self.sync.aim(target, members)
        return await self.sync.run()


# -------------------------------------------------------------------------------- which way


@pytest.mark.parametrize("num_missed", [1, 2, 7])
async def test_missed_commits_are_replayed_while_they_are_smaller_than_the_state(hasher, num_missed):
    donor = DonorPeer.at_step(1, hasher, 10)
    learner = Learner(behind(hasher, at_step=10 - num_missed), hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert learner.nbytes == num_missed * COMMIT_NBYTES
    assert donor.replica.num_chunks_read == 0
    assert donor.num_connections == 1


async def test_the_state_is_fetched_when_the_missed_commits_are_larger(hasher):
    donor = DonorPeer.at_step(1, hasher, 10)
    learner = Learner(behind(hasher, at_step=1), hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert learner.replica.replayed == []
    assert learner.nbytes == STATE_NBYTES


def _early_numbers(step):
    """Only the first chunk of the anchor moves, and with it the momentum's."""
    total = totals(step)
    total[128:] = 0
    return total


async def test_chunks_that_never_change_do_not_travel(hasher):
    replica, donor = behind(hasher, at_step=1, total_of=_early_numbers), DonorPeer.at_step(1, hasher, 0)
    for step in range(1, 10):
        donor.replica.commit(_early_numbers(step), donor.log)
    learner = Learner(replica, hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert learner.nbytes == 2 * CHUNK_NBYTES  # eight commits would be 16,000
    assert (replica.tensors["anchor"] == donor.replica.tensors["anchor"]).all()


async def test_the_donor_whose_recorded_commits_are_smallest_is_asked_for_them(hasher):
    """All members record the same bytes; whoever says otherwise is believed in nothing but the order of asking."""
    real, liar = DonorPeer.at_step(1, hasher, 9), DonorPeer.at_step(2, hasher, 9)

    async def on_send(_channel, frame_type, payload, _chunk):
        if frame_type is not FrameType.STATE_HEADER:
            return payload
        try:
            msgspec.msgpack.decode(payload, type=Stock)
        except msgspec.ValidationError:
            return payload
        return msgspec.msgpack.encode(Stock((1,) * 8))

    tampered(liar, on_send)
    learner = Learner(behind(hasher, at_step=1), hasher)
    async with real.serving() as first, liar.serving() as second:
        assert await learner.catch_up(real.held, first, second) == real.held
    assert learner.nbytes == 8 * COMMIT_NBYTES  # no fewer bytes than it would have cost; the bits are right
    assert (learner.replica.tensors["anchor"] == real.replica.tensors["anchor"]).all()


async def test_who_replays_holds_no_pin_at_the_donor(hasher):
    donor = DonorPeer.at_step(1, hasher, 5)
    pins = []
    serve = donor.log.get
    donor.log.get = lambda step: (pins.append(donor.replica.num_pins), serve(step))[1]
    learner = Learner(behind(hasher, at_step=2), hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
        await until(lambda: donor.replica.num_pins == 0)
    assert pins
    assert set(pins[1:]) == {0}  # the first look is for the sizes


async def test_a_commit_that_does_not_lead_to_the_committed_digest_costs_only_the_chunks_it_spoiled(hasher):
    """The held state has one wrong number: the replay diverges, and what is right in its outcome is kept."""
    donor = DonorPeer.at_step(1, hasher, 3)
    replica = behind(hasher, at_step=2)
    replica.tensors["anchor"][300] += 1
    learner = Learner(replica, hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert donor.replica.num_chunks_read == 1
    assert (replica.tensors["anchor"] == donor.replica.tensors["anchor"]).all()


# -------------------------------------------------------------------------------- results on the donor's disk


class Shelf:
    """A disk of results: `StoredResult` and `OpenResult` in one."""

    def __init__(self, entry, *, lost_after=None):
        self.outer_step, self.digest, self.nbytes = entry.outer_step, entry.digest, entry.nbytes
        self.is_gone, self.is_closed, self.reads = False, False, []
        self._entry, self._lost_after = entry, lost_after
        self._data = b"".join(chunk.data for chunk in entry.chunks)

    def open(self):
        if self.is_gone:
            raise FileNotFoundError(self.outer_step)
        return self

    def read_header(self):
        return CommitHeader.of(self._entry)

    def read(self, nbytes):
        start = sum(self.reads)
        self.reads.append(nbytes)
        if self._lost_after is not None and start + nbytes > self._lost_after:
            raise OSError("damaged")
        return self._data[start : start + nbytes]

    def close(self):
        self.is_closed = True


def on_disk(donor, **options):
    """All that this donor keeps of its commits lies there."""
    shelves = {step: Shelf(donor.log.get(step), **options) for step in donor.log.span}
    for shelf in shelves.values():
        donor.log.stored(shelf)
    assert donor.log.memory_nbytes == 0
    return shelves


async def test_commits_are_replayed_from_the_donors_disk(hasher):
    donor = DonorPeer.at_step(1, hasher, 4)
    shelves = on_disk(donor)
    learner = Learner(behind(hasher, at_step=2), hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert (learner.replica.tensors["anchor"] == donor.replica.tensors["anchor"]).all()
    assert learner.replica.replayed == [3, 4]
    assert shelves[3].is_closed
    assert donor.donor.bytes_served == 2 * COMMIT_NBYTES


async def test_a_large_result_is_in_the_donors_memory_piece_by_piece(hasher):
    donor, before = (
        DonorPeer.at_step(number, hasher, number, numel=2_000_000, log_nbytes=1 << 30) for number in (2, 1)
    )
    shelves = on_disk(donor)
    learner = Learner(before.replica, hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert max(shelves[2].reads) == 1 << 20
    assert sum(shelves[2].reads) == shelves[2].nbytes


async def test_a_result_that_is_damaged_on_the_disk_comes_from_another_donor_and_is_offered_no_more(hasher, caplog):
    damaged, whole = DonorPeer.at_step(1, hasher, 5), DonorPeer.at_step(2, hasher, 5)
    shelves = on_disk(damaged, lost_after=0)
    learner = Learner(behind(hasher, at_step=4), hasher)
    async with damaged.serving() as first, whole.serving() as second:
        assert await learner.catch_up(damaged.held, first, second) == whole.held
    assert shelves[5].is_closed
    assert damaged.log.span == range(0)
    assert "result_unreadable outer_step=5" in caplog.text


async def test_a_result_that_is_gone_from_the_disk_is_refused_and_the_state_fetched(hasher):
    donor = DonorPeer.at_step(1, hasher, 5)
    on_disk(donor)[5].is_gone = True
    learner = Learner(behind(hasher, at_step=4), hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert donor.num_connections == 2
    assert donor.replica.num_chunks_read > 0
    assert donor.log.span == range(0)


# -------------------------------------------------------------------------------- broken transfers


async def test_what_a_broken_transfer_brought_counts_when_the_target_has_moved_on(hasher):
    donors = [DonorPeer.at_step(number, hasher, 0) for number in (1, 2)]
    for donor in donors:
        for step in range(1, 10):
            donor.replica.commit(_early_numbers(step), donor.log)
    dying, later = that_dies(donors[0], 12), donors[1]
    learner = Learner(NumberReplica(hasher), hasher)
    async with dying.serving() as first, later.serving() as second:
        with pytest.raises(NoDonor):
            await learner.catch_up(dying.held, first)
        later.replica.commit(_early_numbers(10), later.log)
        assert await learner.catch_up(later.held, second) == later.held
    # Of the twelve chunks that came, the two that changed since and the four that never came.
    assert later.replica.num_chunks_read == 4 + 2
    assert (learner.replica.tensors["anchor"] == later.replica.tensors["anchor"]).all()


async def test_a_transfer_whose_memory_was_taken_begins_again_and_never_writes_there(hasher):
    dying, later = that_dies(DonorPeer.at_step(1, hasher, 3), 12), DonorPeer.at_step(2, hasher, 3)
    learner = Learner(NumberReplica(hasher), hasher)
    async with dying.serving() as first, later.serving() as second:
        with pytest.raises(NoDonor):
            await learner.catch_up(later.held, first)
        taken = learner.replica.begin_restore(later.replica.manifest)
        learner.replica._restoring = None  # a round needed it
        before = bytes(taken[0])
        assert await learner.catch_up(later.held, second) == later.held
    assert bytes(taken[0]) == before
    assert later.replica.num_chunks_read == NUM_CHUNKS


# -------------------------------------------------------------------------------- memory that is not what it was


async def test_a_held_chunk_with_damaged_bits_is_fetched_and_told(hasher, caplog):
    donor = DonorPeer.at_step(1, hasher, 5)
    tensors = {name: array.copy() for name, array in donor.replica.tensors.items()}
    tensors["momentum"][0] ^= 1
    replica = NumberReplica(hasher)
    replica.adopt(5, tensors)
    tensors["anchor"][900] ^= 1 << 20  # after its digests were made
    learner = Learner(replica, hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert donor.replica.num_chunks_read == 2
    assert "memory_damaged chunks=1" in caplog.text
    assert (replica.tensors["anchor"] == donor.replica.tensors["anchor"]).all()


# -------------------------------------------------------------------------------- manifests


def _manifests(hasher, change):
    replica = behind(hasher, at_step=1)
    first = replica.manifest
    tensors = {name: array.copy() for name, array in replica.tensors.items()}
    change(tensors)
    replica.adopt(1, tensors)
    return first, replica.manifest


def test_equal_states_differ_nowhere(hasher):
    first, second = _manifests(hasher, lambda _tensors: None)
    assert differing(first, second) == []
    assert first_difference(first, second) is None
    assert missing_nbytes(first, contents_of(second, first)) == 0


def test_the_first_difference_is_the_first_chunk_in_the_manifests_order(hasher):
    def change(tensors):
        tensors["momentum"][5] ^= 1
        tensors["anchor"][999] ^= 1

    first, second = _manifests(hasher, change)
    where = first_difference(first, second)
    assert (where.tensor, where.start_nbytes, where.stop_nbytes, where.num_chunks) == ("anchor", 7168, 8000, 2)
    assert missing_nbytes(first, contents_of(second, first)) == 832 + 1024
    exact = narrowed(where, bytes(832), memoryview(bytes(800) + b"\1\0\2" + bytes(29)))
    assert (exact.start_nbytes, exact.stop_nbytes) == (7968, 7971)


def test_a_state_of_other_tensors_has_nothing_in_common(hasher):
    first = behind(hasher, at_step=1).manifest
    other = NumberReplica(hasher, numel=999)
    other.found()
    assert differing(first, other.manifest) == list(range(NUM_CHUNKS))
    assert missing_nbytes(first, contents_of(other.manifest, first), contents_of(None, first)) == STATE_NBYTES


async def test_a_claim_about_the_destination_is_believed_only_after_a_look(hasher):
    manifest = behind(hasher, at_step=1).manifest
    destinations = tuple(memoryview(bytearray(8000)) for _ in range(2))
    found = await salvage(manifest, destinations, contents=contents_of(manifest, manifest), live=None, hasher=hasher)
    assert found.present == frozenset()
    assert found.damaged == ()


async def test_only_what_is_called_right_is_hashed(hasher):
    replica = behind(hasher, at_step=1)
    hashed = []
    hash_async = hasher.hash_async

    async def counted(buffers, **kwargs):
        hashed.extend(buffers)
        return await hash_async(buffers, **kwargs)

    hasher.hash_async = counted
    contents = [None] * NUM_CHUNKS
    contents[3] = contents_of(replica.manifest, replica.manifest)[3]
    destinations = tuple(memoryview(bytearray(8000)) for _ in range(2))
    destinations[0][3 * 1024 : 4 * 1024] = replica.tensors["anchor"].tobytes()[3 * 1024 : 4 * 1024]
    found = await salvage(replica.manifest, destinations, contents=contents, live=None, hasher=hasher)
    assert found.present == {3}
    assert len(hashed) == 1


def test_sizes_of_commits_begin_where_they_are_asked_for(hasher):
    donor = DonorPeer.at_step(1, hasher, 5, log_nbytes=3 * COMMIT_NBYTES)
    assert donor.log.sizes_from(OuterStep(4)) == (COMMIT_NBYTES, COMMIT_NBYTES)
    assert donor.log.sizes_from(OuterStep(2)) == donor.log.sizes_from(OuterStep(6)) == ()


async def test_a_target_of_another_history_at_the_held_step_is_fetched_by_its_differing_chunks(hasher):
    donor = DonorPeer.at_step(1, hasher, 2)
    donor.replica.commit(_early_numbers(3), donor.log)
    replica = behind(hasher, at_step=2)
    total = _early_numbers(3)
    total[0] += 1
    replica.commit(total)
    learner = Learner(replica, hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert donor.replica.num_chunks_read == 2


async def test_a_long_absence_in_which_nothing_moved_costs_nothing(hasher):
    donor = DonorPeer.at_step(1, hasher, 0)
    for _ in range(40):
        donor.replica.commit(np.zeros(1000, np.int64), donor.log)
    learner = Learner(behind(hasher, at_step=0), hasher)
    async with donor.serving() as member:
        assert await learner.catch_up(donor.held, member) == donor.held
    assert learner.nbytes == 0
    assert donor.replica.num_chunks_read == 0


# -------------------------------------------------------------------------------- the donor's line


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("isthmus.elastic.donor.donor.asyncio.sleep", self.sleep)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)

    async def sleep(self, delay_s):
        self.now += delay_s


async def test_state_goes_no_faster_than_the_nodes_cap(hasher, monkeypatch):
    cap = TokenBucket(rate=1e6, burst=20_000)
    donor, clock = Donor(NumberReplica(hasher), CommitLog(0), upload=cap), Clock(monkeypatch)
    for _ in range(20):
        await donor.room_for(100_000)
    assert clock.now - 100.0 == pytest.approx(1.9)  # each piece of 0.1 s waits until the one before is paid for


async def test_exchanges_take_first_and_a_learner_is_still_served(hasher, monkeypatch):
    cap = TokenBucket(rate=1e6, burst=20_000)
    donor, clock = Donor(NumberReplica(hasher), CommitLog(0), upload=cap), Clock(monkeypatch)

    async def sleep(delay_s):
        clock.now += delay_s
        while cap.available(clock.now) >= 10_000:  # an exchange takes whatever is there
            cap.take(clock.now, 10_000)

    monkeypatch.setattr("isthmus.elastic.donor.donor.asyncio.sleep", sleep)
    cap.take(clock.now, 20_000)
    await donor.room_for(100_000)
    assert TURN_S <= clock.now - 100.0 <= 2 * TURN_S
    assert cap.available(clock.now) == 0


async def test_state_waits_for_an_exchange_but_not_for_ever(hasher, monkeypatch):
    clock = Clock(monkeypatch)
    ends = clock.now + 0.5
    donor = Donor(NumberReplica(hasher), CommitLog(0), exchanged=lambda: int(1e6 * min(clock.now, ends)))
    clock.now += 0.02
    await donor.room_for(1000)
    assert clock.now == pytest.approx(100.55, abs=0.02)  # 50 ms of silence show that it is over, or waits
    before = clock.now
    await donor.room_for(1000)
    assert clock.now == before
    ends += 1000.0
    clock.now += 1.0
    await donor.room_for(1000)
    assert clock.now == pytest.approx(before + 1.0 + TURN_S, abs=0.03)


async def test_where_exchanges_never_pause_state_goes_a_tenth_of_the_time(hasher, monkeypatch):
    clock = Clock(monkeypatch)
    donor = Donor(NumberReplica(hasher), CommitLog(0), exchanged=lambda: int(1e6 * clock.now))
    for _ in range(10):
        await donor.room_for(1000, piece_s=0.02)
        clock.now += 0.02
    assert clock.now - 100.0 == pytest.approx(10 * 10 * 0.02, rel=0.1)
    capped = Donor(
        NumberReplica(hasher),
        CommitLog(0),
        upload=TokenBucket(rate=1e6, burst=20_000),
        exchanged=lambda: int(1e6 * clock.now),
    )
    before = clock.now
    for _ in range(10):
        clock.now += 0.02
        await capped.room_for(20_000, piece_s=0.0)  # a fiftieth of a second of what the node may send
    assert clock.now - before == pytest.approx(10 * 10 * 0.02, rel=0.1)


async def test_a_commit_waits_for_no_exchange(hasher, monkeypatch):
    """The exchange may wait for the very member that asks for it."""
    clock = Clock(monkeypatch)
    donor = Donor(NumberReplica(hasher), CommitLog(0), exchanged=lambda: int(1e6 * clock.now))
    clock.now += 1.0
    await donor.room_for(1000, is_urgent=True)
    assert clock.now == 101.0


async def test_without_a_cap_nobody_waits(hasher, monkeypatch):
    clock = Clock(monkeypatch)
    await Donor(NumberReplica(hasher), CommitLog(0)).room_for(1 << 30)
    assert clock.now == 100.0


async def test_what_a_learner_fetches_is_taken_from_the_cap(hasher):
    donor = DonorPeer.at_step(1, hasher, 3)
    taken = []
    cap = TokenBucket(rate=1e9, burst=1e9)
    cap.take = lambda _now, nbytes: taken.append(nbytes)
    donor.donor._upload = cap
    learner = Learner(NumberReplica(hasher), hasher)
    async with donor.serving() as member:
        await learner.catch_up(donor.held, member)
    assert sum(taken) == STATE_NBYTES
