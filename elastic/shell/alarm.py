# SPDX-License-Identifier: Apache-2.0
"""A machine's time: waiting for its next deadline, which any event may move, and a clock that can be held."""

import asyncio
from collections.abc import Callable

from isthmus.collective.core.types import Instant


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


class HeldClock:
    """A clock that stands still as long as anybody holds it, and goes on where it stood."""

    def __init__(self, clock: Callable[[], Instant]) -> None:
        self._clock = clock
        self._lost_s = 0.0
        self._held_at: Instant | None = None
        self._num_holds = 0

    @property
    def is_held(self) -> bool:
        """Whether it stands still."""
        return self._num_holds > 0

    def now(self) -> Instant:
        """Monotonic seconds without those it was held for."""
        return (self._clock() if self._held_at is None else self._held_at) - self._lost_s

    def hold(self) -> None:
        """Stand still until this is released as often as it was held."""
        if self._num_holds == 0:
            self._held_at = self._clock()
        self._num_holds += 1

    def release(self) -> None:
        """The counterpart of one `hold`."""
        self._num_holds -= 1
        if self._held_at is not None and self._num_holds == 0:
            self._lost_s += self._clock() - self._held_at
            self._held_at = None
