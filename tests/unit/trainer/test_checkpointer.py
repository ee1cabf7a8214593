# SPDX-License-Identifier: Apache-2.0
"""Checkpoints beside the training: pinned until they are saved, one at a time, and a full disk ends nothing."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from isthmus.elastic.state.digest import Hasher
from isthmus.trainer.checkpoint.checkpoint import CheckpointMeta, CheckpointStore
from isthmus.trainer.checkpoint.checkpointer import Checkpointer
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.state_version import Version
from isthmus.trainer.errors import CheckpointFailed
from tests.unit.trainer.rig import numbers, outer_state, stage_mean


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


def meta(state: OuterState) -> CheckpointMeta:
    held = state.live.held
    return CheckpointMeta(
        run_id="run", outer_step=held.outer_step, digest=held.digest, run_manifest=b"{}", next_index=3
    )


class SlowStore(CheckpointStore):
    """A disk that takes its time until the test lets it go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=10)
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()

    def save(self, *args, **kwargs):
        self.has_begun.set()
        self.may_go_on.wait(30.0)
        return super().save(*args, **kwargs)


class Office:
    """A checkpointer and what it told."""

    def __init__(self, store: CheckpointStore) -> None:
        self.saved: list[int] = []
        self.failed: list[CheckpointFailed] = []
        self.checkpointer = Checkpointer(
            store, on_saved=lambda step, _: self.saved.append(step), on_failed=self.failed.append
        )


@contextlib.asynccontextmanager
async def working(store: CheckpointStore) -> AsyncIterator[Office]:
    office = Office(store)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(office.checkpointer.run())
        yield office
        task.cancel()


async def test_what_was_offered_is_the_checkpoint_whatever_is_committed_meanwhile(
    hasher: Hasher, tmp_path: Path
) -> None:
    store, state = SlowStore(tmp_path), outer_state(hasher)
    await state.found(numbers(0))
    digest = state.live.held.digest
    async with working(store) as office:
        assert office.checkpointer.offer(meta(state), state.live)
        await asyncio.to_thread(store.has_begun.wait, 30.0)
        for step in range(3):
            state.install_staged(await stage_mean(state, numbers(step), {"a": 1.0}))
        store.may_go_on.set()
        await office.checkpointer.drain()
    assert office.saved == [0]
    loaded = outer_state(hasher)
    assert (await loaded.adopt(0, store.load(0).tensors)).digest == digest


class Watched(Version):
    """A version of which is known whether anybody still has it."""


async def test_nobody_has_a_version_any_more_once_it_is_saved(hasher: Hasher, tmp_path: Path) -> None:
    """It was kept until the next one came, for many outer steps: two copies of the parameters."""
    state = outer_state(hasher)
    await state.found(numbers(0))
    live = state.live
    offered = Watched(
        fragments=live.fragments, states=live.states, manifest=live.manifest, when_idle=lambda version: None
    )
    is_there = weakref.ref(offered)
    async with working(CheckpointStore(tmp_path, keep=1)) as office:
        assert office.checkpointer.offer(meta(state), offered)
        del offered
        await office.checkpointer.drain()
        assert office.saved == [0]
        assert is_there() is None


async def test_while_one_is_being_saved_the_next_is_skipped_and_not_pinned(hasher: Hasher, tmp_path: Path) -> None:
    store, state = SlowStore(tmp_path), outer_state(hasher)
    await state.found(numbers(0))
    async with working(store) as office:
        assert office.checkpointer.offer(meta(state), state.live)
        assert not office.checkpointer.offer(meta(state), state.live)
        await asyncio.to_thread(store.has_begun.wait, 30.0)
        assert not office.checkpointer.offer(meta(state), state.live)
        assert state.live.pins == 1
        store.may_go_on.set()
        await office.checkpointer.drain()
        assert state.live.pins == 0
        assert office.checkpointer.offer(meta(state), state.live)
        await office.checkpointer.drain()
    assert office.saved == [0, 0]


async def test_a_disk_that_refuses_is_told_and_the_next_checkpoint_is_tried(hasher: Hasher, tmp_path: Path) -> None:
    state = outer_state(hasher)
    await state.found(numbers(0))
    folder = tmp_path / "checkpoints"
    folder.write_text("a file where the folder should be")
    async with working(CheckpointStore(folder, keep=1)) as office:
        assert office.checkpointer.offer(meta(state), state.live)
        await office.checkpointer.drain()
        assert [failure.path for failure in office.failed] == [folder / "step-00000000"]
        assert state.live.pins == 0
        folder.unlink()
        assert office.checkpointer.offer(meta(state), state.live)
        await office.checkpointer.drain()
    assert office.saved == [0]


async def test_a_cancelled_checkpointer_lets_its_version_go_only_when_the_disk_has_it(
    hasher: Hasher, tmp_path: Path
) -> None:
    store, state = SlowStore(tmp_path), outer_state(hasher)
    await state.found(numbers(0))
    office = Office(store)
    task = asyncio.ensure_future(office.checkpointer.run())
    office.checkpointer.offer(meta(state), state.live)
    await asyncio.to_thread(store.has_begun.wait, 30.0)
    try:
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        assert state.live.pins == 1
    finally:
        store.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state.live.pins == 0
    assert store.load(0).meta.digest == state.live.held.digest


async def test_drain_returns_at_once_if_nothing_was_offered(tmp_path: Path) -> None:
    async with working(CheckpointStore(tmp_path, keep=1)) as office:
        async with asyncio.timeout(5.0):
            await office.checkpointer.drain()
