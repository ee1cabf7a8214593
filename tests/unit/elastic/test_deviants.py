# SPDX-License-Identifier: Apache-2.0
"""A peer whose result the others overrule: named by the first tensor that differs, repaired by what differs alone."""

import asyncio
import logging

import numpy as np
import pytest

from isthmus.elastic.core.records import CommitRecord
from isthmus.elastic.learner.state_sync import StateSync
from isthmus.elastic.observation import Deviated, state_fields
from tests.unit.elastic.harness import (
    CHUNK_NBYTES,
    QUICK,
    DonorPeer,
    NumberReplica,
    dial_state,
    records_of,
    totals,
    until,
)
from tests.unit.elastic.peers import CoordinatorHost, audit, running


class Deviant:
    """A peer at step 4 that has voted for another step 5 than the donors committed."""

    def __init__(self, hasher):
        self.replica = NumberReplica(hasher)
        self.replica.found()
        for step in range(1, 5):
            self.replica.commit(totals(step))
        self.events = []
        self.nbytes = 0
        self.voted = b""
        self.sync = StateSync(
            self.replica, dial_state, hasher=hasher, pace=QUICK, advanced=self._advanced, observe=self.events.append
        )

    def _advanced(self, nbytes):
        self.nbytes += nbytes

    def stage(self, total):
        """Compute step 5 from these numbers, vote, and be overruled."""
        staged = self.replica.staged(total)
        self.voted = staged[1].digest
        self.replica.unwanted = staged

    async def catch_up(self, target, *members, committed=None):
        self.sync.overruled(committed or target, self.voted)
        self.sync.aim(target, members)
        return await self.sync.run()


def _same_bits(deviant, donor):
    return all((deviant.replica.tensors[name] == donor.replica.tensors[name]).all() for name in ("anchor", "momentum"))


def place(event):
    """Where the two states differ first, and in how many chunks they do."""
    return event.tensor, event.start_bytes, event.stop_bytes, event.differing_chunks


async def test_one_wrong_number_is_named_and_only_its_chunks_travel(hasher):
    donor, deviant = DonorPeer.at_step(1, hasher, 5), Deviant(hasher)
    wrong = totals(5)
    wrong[950] += 3  # in the last chunk of the anchor and of the momentum, which has 832 bytes
    deviant.stage(wrong)
    async with donor.serving() as member:
        assert await deviant.catch_up(donor.held, member) == donor.held
    assert _same_bits(deviant, donor)
    assert donor.replica.num_chunks_read == 2
    assert deviant.nbytes == 2 * 832  # the commit has 2,000
    (event,) = deviant.events
    right = donor.replica.tensors["anchor"].tobytes()
    ours = (donor.replica.tensors["anchor"] + np.where(np.arange(1000) == 950, 3, 0)).tobytes()
    places = [place for place, (a, b) in enumerate(zip(right, ours, strict=True)) if a != b]
    assert event == Deviated(
        **state_fields(donor.held),
        voted=deviant.voted.hex(),
        damaged_chunks=0,
        tensor="anchor",
        start_bytes=places[0],
        stop_bytes=places[-1] + 1,
        differing_chunks=2,
    )


async def test_a_flipped_bit_in_held_memory_is_told_from_a_wrong_computation(hasher, caplog):
    donor, deviant = DonorPeer.at_step(1, hasher, 5), Deviant(hasher)
    deviant.replica.tensors["anchor"][700] ^= 1 << 40
    deviant.stage(totals(5))
    with caplog.at_level(logging.ERROR):
        async with donor.serving() as member:
            assert await deviant.catch_up(donor.held, member) == donor.held
    assert _same_bits(deviant, donor)
    assert donor.replica.num_chunks_read == 1  # the momentum does not depend on the anchor
    (event,) = deviant.events
    assert event.damaged_chunks == 1
    assert place(event) == ("anchor", 5605, 5606, 1)
    assert "test this machine's memory" in caplog.text


async def test_a_result_that_is_wrong_everywhere_is_replayed_and_named_by_its_first_chunk(hasher):
    donor, deviant = DonorPeer.at_step(1, hasher, 5), Deviant(hasher)
    deviant.stage(totals(5) + 1)
    async with donor.serving() as member:
        assert await deviant.catch_up(donor.held, member) == donor.held
    assert deviant.replica.replayed == [5]
    assert donor.replica.num_chunks_read == 0
    (event,) = deviant.events
    assert place(event) == ("anchor", 0, CHUNK_NBYTES, 16)


async def test_donors_that_have_gone_on_still_show_what_was_wrong(hasher):
    """They describe step 7 only; the replay of step 5 makes the manifest to compare with."""
    donor, deviant = DonorPeer.at_step(1, hasher, 5), Deviant(hasher)
    committed = donor.held
    wrong = totals(5)
    wrong[300] += 3
    deviant.stage(wrong)
    for _ in range(2):
        donor.advance()
    async with donor.serving() as member:
        assert await deviant.catch_up(donor.held, member, committed=committed) == donor.held
    assert deviant.replica.replayed == [5, 6, 7]
    (event,) = deviant.events
    assert place(event) == ("anchor", 2048, 3072, 2)
    assert (event.outer_step, event.digest) == (committed.outer_step, committed.digest.hex())


async def test_what_nobody_can_describe_any_more_is_told_as_such(hasher):
    donor, deviant = DonorPeer.at_step(1, hasher, 5, log_nbytes=0), Deviant(hasher)
    committed = donor.held
    deviant.stage(totals(5) + 1)
    for _ in range(4):
        donor.advance()
    async with donor.serving() as member:
        assert await deviant.catch_up(donor.held, member, committed=committed) == donor.held
    assert [event.tensor for event in deviant.events] == [None]
    assert _same_bits(deviant, donor)


async def test_a_deviation_is_told_once(hasher):
    donor, deviant = DonorPeer.at_step(1, hasher, 5), Deviant(hasher)
    deviant.stage(totals(5) + 1)
    async with donor.serving() as member:
        await deviant.catch_up(donor.held, member)
        deviant.sync.aim(donor.advance(), [member])
        assert await deviant.sync.run() == donor.held
    assert len(deviant.events) == 1


async def test_repair_that_finds_no_donor_keeps_its_case_for_the_next_try(hasher):
    donor, deviant = DonorPeer.at_step(1, hasher, 5), Deviant(hasher)
    wrong = totals(5)
    wrong[999] += 1
    deviant.stage(wrong)
    with pytest.raises(Exception, match="there is no donor"):
        await deviant.catch_up(donor.held)
    assert deviant.events == []
    async with donor.serving() as member:
        deviant.sync.aim(donor.held, [member])
        assert await deviant.sync.run() == donor.held
    (event,) = deviant.events
    assert event.start_bytes == 7992
    assert donor.replica.num_chunks_read == 2


# -------------------------------------------------------------------------------- whole runs


async def _deviate(path, hasher, spoil):
    """Three members; `spoil` harms the second, and one more step is committed.

    Returns (step before, peers, chunks that its repair read from the others).
    """
    async with running(CoordinatorHost(path, min_peers=2), hasher) as run:
        peers = [run.peer(number) for number in (1, 2, 3)]
        step = await run.gather(*peers)
        spoil(peers[1])
        donors = (peers[0].replica, peers[2].replica)
        chunks_before = sum(replica.num_chunks_read for replica in donors)
        await run.allow(step + 1)
        await until(lambda: any(isinstance(event, Deviated) for event in peers[1].observed))
        read = sum(replica.num_chunks_read for replica in donors) - chunks_before
        await run.admit(peers[1])
        return step, peers, read


async def test_flipped_bit_in_a_members_memory_is_named_repaired_and_the_member_comes_back(tmp_path, hasher):
    """Real sockets, real coordinator: the vote finds it, and one chunk repairs it."""

    def flip(peer):
        peer.replica.tensors["anchor"][150] ^= 1 << 3  # byte 1200, in chunk 1 of the anchor

    path = tmp_path / "journal.sqlite"
    async with asyncio.timeout(40):
        step, peers, read = await _deviate(path, hasher, flip)
    (event,) = [event for event in peers[1].observed if isinstance(event, Deviated)]
    records = records_of(path)
    digests = {record.outer_step: record.digest for record in records if isinstance(record, CommitRecord)}
    assert (event.outer_step, event.digest) == (step + 1, digests[step + 1].hex())
    assert event.voted != event.digest
    assert event.damaged_chunks == 1
    assert (event.tensor, event.differing_chunks) == ("anchor", 1)
    assert event.start_bytes <= 1200 < event.stop_bytes <= 1208
    assert read == 1
    assert not any(isinstance(event, Deviated) for peer in (peers[0], peers[2]) for event in peer.observed)
    assert audit(records, peers) > step + 1


async def test_member_that_computed_a_wrong_sum_is_named_and_comes_back(tmp_path, hasher):
    def miscount(peer):
        peer.runner.spoil = np.eye(1, 200, 77, dtype=np.int64)[0]

    path = tmp_path / "journal.sqlite"
    async with asyncio.timeout(40):
        step, peers, read = await _deviate(path, hasher, miscount)
    (event,) = [event for event in peers[1].observed if isinstance(event, Deviated)]
    assert event.damaged_chunks == 0
    assert event.tensor == "anchor"
    # The commit has 400 bytes, the two chunks 2,048: it is replayed, and the chunk is all that is known.
    assert read == 0
    assert place(event) == ("anchor", 0, CHUNK_NBYTES, 2)
    assert audit(records_of(path), peers) > step + 1
