# SPDX-License-Identifier: Apache-2.0
"""Copies checkpoints to a second place, beside the training: one at a time, the newest that is due.

Rules: nobody waits for a copy but the end of this peer's part, for a while; a place that refuses or hangs is told and
ends nothing. The work has a thread of its own, which does not keep the process: a place that hangs cannot be cancelled.
Must not know what a place is.
"""

import asyncio
import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_FAREWELL_S = 300.0
"""What the end of a peer's part waits for the last copy."""


class CheckpointCopier:
    """See the module.

    Args:
        copy: of the checkpoint of this outer step; blocks. Returns whether it was still there to be copied, and raises
            for what went wrong.
        on_copied: told (outer step, seconds).
        on_failed: told the cause, once for each that could not be copied.
    """

    def __init__(
        self,
        copy: Callable[[int], bool],
        *,
        on_copied: Callable[[int, float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._copy = copy
        self._on_copied = on_copied
        self._on_failed = on_failed
        self._due: int | None = None
        self._is_due, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()

    def offer(self, outer_step: int) -> None:
        """Copy this one soon. If one is under way, this is the next, in the place of one that has not begun."""
        self._due = outer_step
        self._is_idle.clear()
        self._is_due.set()

    async def run(self) -> None:
        """Copies what is offered until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            outer_step, began = self._due, clock()
            assert outer_step is not None, "one is due"
            outcome = await self._in_thread(outer_step)
            if isinstance(outcome, Exception):
                self._on_failed(str(outcome) or type(outcome).__name__)
            elif outcome:
                self._on_copied(outer_step, clock() - began)
            if not self._is_due.is_set():
                self._is_idle.set()

    async def drain(self) -> None:
        """Wait until the newest one is copied or has failed, but not for ever."""
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._is_idle.wait()
        except TimeoutError:
            self._on_failed(f"the last one was not there after {_FAREWELL_S:.0f} s")

    async def _in_thread(self, outer_step: int) -> bool | Exception:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool | Exception] = loop.create_future()

        def tell(outcome: bool | Exception) -> None:
            if not done.done():
                done.set_result(outcome)

        def work() -> None:
            outcome: bool | Exception
            try:
                outcome = self._copy(outer_step)
            except Exception as error:  # noqa: BLE001 - a place may fail with anything; it is told
                outcome = error
            try:
                loop.call_soon_threadsafe(tell, outcome)
            except RuntimeError:  # the daemon has ended meanwhile
                log.info("copy_ended_late outer_step=%d", outer_step)

        threading.Thread(target=work, name="checkpoint-copier", daemon=True).start()
        return await done
