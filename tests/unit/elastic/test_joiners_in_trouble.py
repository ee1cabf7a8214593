# SPDX-License-Identifier: Apache-2.0
"""A joiner that dies or freezes on its way to the state: the members commit on, and nothing of theirs is held."""

import asyncio

import pytest

from isthmus.collective.transport import FrameType, Purpose
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from tests.unit.elastic.harness import peer_id, records_of, until
from tests.unit.elastic.peers import CoordinatorHost, audit, running

NUM_CHUNKS = 4
"""Of a state of two tensors of 1,600 bytes."""


class Stopping:
    """A state connection on which the joiner reads no more after so many chunks."""

    def __init__(self, channel, joiner):
        self._channel, self._joiner = channel, joiner
        self.hello = channel.hello

    async def send(self, *args, **kwargs):
        await self._channel.send(*args, **kwargs)

    async def receive(self, **kwargs):
        if self._joiner.num_chunks >= self._joiner.stops_after:
            self._joiner.stopped.set()
            await asyncio.Event().wait()
        frame = await self._channel.receive(**kwargs)
        self._joiner.num_chunks += frame.type is FrameType.STATE_CHUNK
        return frame

    def close(self):
        self._channel.close()


class Trouble:
    """Makes a peer stop reading state after so many chunks of a snapshot."""

    def __init__(self, peer, stops_after):
        self.stops_after, self.num_chunks, self.stopped = stops_after, 0, asyncio.Event()
        dial = peer._dial

        async def stopping(address, purpose):
            channel = await dial(address, purpose)
            return Stopping(channel, self) if purpose is Purpose.STATE else channel

        peer._dial = stopping


@pytest.mark.parametrize("stops_after", range(NUM_CHUNKS), ids=["0 %", "25 %", "50 %", "the last chunk"])
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "freezes"])
async def test_a_joiner_in_trouble_disturbs_nobody(tmp_path, hasher, stops_after, dies):
    path = tmp_path / "journal.sqlite"
    async with running(CoordinatorHost(path), hasher) as run, asyncio.timeout(30):
        members = [run.peer(1), run.peer(2)]
        run.start(*members)
        await run.reach(3)
        late = run.peer(3)
        trouble = Trouble(late, stops_after)
        run.start(late)
        await trouble.stopped.wait()
        if dies:
            await run.kill(late)
        else:
            run.peers.remove(late)
        await run.reach(20)
        if dies:
            await until(lambda: all(peer.replica.num_pins == 0 for peer in members))
    records = records_of(path)
    assert audit(records, members) == 20
    assert [peer.lost for peer in members] == [[], []]
    assert all(peer.runner.num_aborted == 0 for peer in members)
    views = [record.view for record in records if isinstance(record, ViewRecord)]
    assert not any(member.peer_id == peer_id(3) for view in views for member in view.members)
    contributors = {c.ref.peer_id for r in records if isinstance(r, CommitRecord) for c in r.contributions}
    assert contributors == {peer_id(1), peer_id(2)}
