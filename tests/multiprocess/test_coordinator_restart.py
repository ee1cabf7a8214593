# SPDX-License-Identifier: Apache-2.0
"""The coordinator is killed for real, at moments nobody chose, and started again on its port and journal."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from isthmus.elastic.core.records import CommitRecord, ViewRecord
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.state.digest import Hasher
from tests.unit.elastic.harness import CHUNK_NBYTES, RUN_ID, until
from tests.unit.elastic.peers import CoordinatorHost, audit, running

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
NUM_KILLS = 8


class ProcessHost(CoordinatorHost):
    """The coordinator in a process of its own."""

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        command = [sys.executable, "-m", "tests.multiprocess.coordinator_process", str(self.path), self.address]
        self.process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        async with asyncio.timeout(120):
            line = await self.process.stdout.readline()
        assert line, "the coordinator did not start"
        self.address = line.decode().strip()

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        assert await self.process.wait() == -signal.SIGKILL
        self.process._transport.close()


@pytest.fixture
def hasher():
    hasher = Hasher(num_threads=1, chunk_nbytes=CHUNK_NBYTES)
    yield hasher
    hasher.close()


@pytest.mark.timeout(600)
async def test_no_committed_step_is_lost_or_made_twice_when_the_coordinator_is_killed_again_and_again(
    tmp_path, hasher, record_property
):
    path, rng = tmp_path / "journal.sqlite", random.Random(7)
    host = ProcessHost(path, min_peers=2)
    resumed_s = []
    async with running(host, hasher) as run:
        peers = [run.peer(number) for number in (1, 2, 3)]
        await run.gather(*peers)
        for peer in peers:
            await peer.allow(10**9)
        for _ in range(NUM_KILLS):
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            await host.stop()
            await host.start(run.tasks)
            back, step = time.monotonic(), max(peer.step for peer in peers)
            await until(lambda step=step: all(peer.step > step + 3 for peer in peers), timeout_s=60)
            resumed_s.append(time.monotonic() - back)
        for peer in peers:
            await peer.allow(max(peer.step for peer in peers) + 1)
        await run.reach(max(peer.step for peer in peers) + 3)
    journal = Journal(path, run_id=RUN_ID)
    records = journal.replay()
    journal.close()
    record_property("resumed_s", max(resumed_s))
    assert audit(records, peers) >= 3 * NUM_KILLS
    assert len({peer.replica.held() for peer in peers}) == 1
    # Nobody lost its membership or its work by a coordinator that was away.
    assert [peer.lost for peer in peers] == [[], [], []]
    last_join = max(slot for slot, record in enumerate(records) if isinstance(record, ViewRecord))
    assert sum(isinstance(record, CommitRecord) for record in records[last_join:]) >= 3 * NUM_KILLS
    assert max(resumed_s) < 60.0  # a dial may time out, and pauses between dials grow to two seconds
