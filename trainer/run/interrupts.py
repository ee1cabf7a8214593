# SPDX-License-Identifier: Apache-2.0
"""What SIGINT, SIGTERM and SIGHUP do to a process: the first one leaves in order, the second one stops at once.

Rules: they count from the first line of the work on, also while there is nothing to leave yet: then the first one
ends the work, since nobody knows of this process. SIGHUP, the end of a terminal, comes from its shell and from the
kernel, so it never counts as the second one; under `nohup` it is ignored. Must not know what leaving means.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine

from isthmus.trainer.errors import ExitCode

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Guards one piece of work, in the main thread.

    Attributes:
        leave: begins to leave in order; None while there is nothing to leave. The work sets it.
    """

    def __init__(self) -> None:
        self.leave: Callable[[], None] | None = None
        self._num_signals = 0
        self._code: ExitCode | None = None
        self._task: asyncio.Task[int] | None = None

    async def guard(self, work: Coroutine[object, object, int]) -> int:
        """Run it; returns its exit code, LEFT if it was interrupted before it could leave, FORCED if it was stopped.

        What the work raises comes in an exception group.
        """
        loop = asyncio.get_running_loop()
        numbers = list(_SIGNALS)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._task = tasks.create_task(work)
                try:
                    return await self._task
                except asyncio.CancelledError:
                    if self._code is None:
                        raise
                    return self._code
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self._num_signals:
            return
        self._num_signals += 1
        if self._num_signals == 1 and self.leave is not None:
            log.info("leaving; interrupt again to stop at once")
            self.leave()
            return
        self._code = ExitCode.LEFT if self._num_signals == 1 else ExitCode.FORCED
        if self._task is not None:
            self._task.cancel()
