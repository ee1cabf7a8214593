# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: the others for this peer's next step (`Patience`), this peer for its last one (`HandIn`)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from isthmus.elastic.errors import ElasticError


class Patience:
    """Says when the others have waited so long that the inner steps missing here cost more than they give.

    Args:
        factor: for how many times this peer's own work of a round it lets them wait.
        work_s: how long the inner steps before an outer step take here; None: not known.
        others_wait: whether other members stand in the exchange that this peer has not begun.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        factor: float,
        work_s: Callable[[int], float | None],
        others_wait: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._factor = factor
        self._work_s = work_s
        self._others_wait = others_wait
        self._clock = clock
        self._awaited_since: float | None = None
        self.is_behind = False
        """Whether the others go on from where this peer is not yet: then it hands in what it has."""

    def handed_in(self) -> None:
        """The others have what they wait for."""
        self._awaited_since = None

    def is_over(self, outer_step: int, *, has_work: bool) -> bool:
        """Whether this outer step is to be handed in as it is. `has_work`: there is something in it."""
        if not self._others_wait():
            self._awaited_since = None
            return False
        now = self._clock()
        self._awaited_since = self._awaited_since or now
        if self.is_behind:
            return True
        work_s = self._work_s(outer_step)
        if work_s is None or not has_work:
            return False
        return now - self._awaited_since > self._factor * work_s


class HandIn:
    """The one outer step that is out for its commit, beside whatever the workers do; and how long they stand still.

    Args:
        on_blocked: told when this peer begins and ceases to stand still.
        clock: monotonic seconds.
    """

    def __init__(self, on_blocked: Callable[[bool], None], clock: Callable[[], float]) -> None:
        self._on_blocked = on_blocked
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._blocked_since: float | None = None

    @property
    def is_out(self) -> bool:
        """Whether there is one."""
        return self._task is not None

    @property
    def blocked_s(self) -> float:
        """For how long the workers have stood still for it."""
        return 0.0 if self._blocked_since is None else self._clock() - self._blocked_since

    def begin(self, commit: Coroutine[None, None, None]) -> None:
        """See a step committed."""
        self._task = asyncio.ensure_future(commit)

    def look(self) -> None:
        """Take its end in, if it has ended, and raise what it has raised."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def ended(self) -> None:
        """Wait until it has ended: `look` takes it in."""
        assert self._task is not None, "nothing is out"
        await asyncio.wait([self._task])

    async def stand_still(self, meanwhile: Callable[[asyncio.Future[None]], Awaitable[None]]) -> None:
        """The workers have nothing to do until it has ended; what else they may do until then is in `meanwhile`."""
        assert self._task is not None, "nothing is out"
        self._blocked_since = self._clock()
        self._on_blocked(True)
        await meanwhile(self._task)
        await self.ended()
        self._unblock()

    def _unblock(self) -> None:
        if self._blocked_since is not None:
            self._blocked_since = None
            self._on_blocked(False)

    async def close(self) -> None:
        """Nothing is handed in any more when this returns. Raises what was no fault of the membership."""
        task, self._task = self._task, None
        self._unblock()
        if task is not None:
            await asyncio.sleep(0)  # what has ended is taken in
            task.cancel()
            await asyncio.wait([task])
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, ElasticError):
                raise error  # else whoever waited for it has left for the same reason
