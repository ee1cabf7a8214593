# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints beside the training: pins the shared state, saves it from a thread, lets it go.

Rules: training never waits for the disk, except for the last checkpoint of a run; while one is being written, a new one
is skipped rather than queued; a full disk is told and never ends a run. Must not know when a checkpoint is due.
"""

import asyncio
from collections.abc import Callable

from isthmus.trainer.checkpoint.checkpoint import CheckpointMeta, CheckpointStore
from isthmus.trainer.engine.state_version import Version
from isthmus.trainer.errors import CheckpointFailed
from isthmus.trainer.threads import in_thread


class Checkpointer:
    """Saves pinned versions of the shared state, one at a time.

    Args:
        store: where to.
        on_saved: told (outer step, seconds) of every checkpoint on the disk.
        on_failed: told of every one that could not be written.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        on_saved: Callable[[int, float], None],
        on_failed: Callable[[CheckpointFailed], None],
    ) -> None:
        self._store = store
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._due: asyncio.Queue[tuple[CheckpointMeta, Version]] = asyncio.Queue(1)
        self._is_busy = False

    def offer(self, meta: CheckpointMeta, version: Version) -> bool:
        """Save this version soon; False if another one is not on the disk yet. It is pinned until it is saved."""
        if self._is_busy:
            return False
        self._is_busy = True
        version.pins += 1
        self._due.put_nowait((meta, version))
        return True

    async def run(self) -> None:
        """Saves what is offered until cancelled."""
        while True:
            await self._save(*await self._due.get())  # in a frame of its own: until the next one nothing is held here
            self._is_busy = False
            self._due.task_done()

    async def _save(self, meta: CheckpointMeta, version: Version) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await in_thread(self._store.save, meta, version.tensors)
            self._on_saved(meta.outer_step, clock() - began)
        except CheckpointFailed as failure:
            self._on_failed(failure)
        finally:
            version.release()

    async def drain(self) -> None:
        """Wait until everything offered is on the disk or has failed."""
        await self._due.join()
