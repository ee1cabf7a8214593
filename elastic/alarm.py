"""Waiting for a machine's next deadline, which any event may move."""

import asyncio
from collections.abc import Callable

from collective.core.types import Instant


class Alarm:
    """Sleeps until a deadline or until it is woken, whichever comes first. One sleeper."""

    def __init__(self, clock: Callable[[], Instant]) -> None:
        self._clock = clock
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """The deadline may have moved: look again."""
        self._woken.set()

    async def sleep_until(self, deadline: Instant | None) -> bool:
        """Returns whether the deadline has passed; None means that there is none now."""
        timeout_s = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()
        return deadline is not None and self._clock() >= deadline
