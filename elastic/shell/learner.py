# SPDX-License-Identifier: Apache-2.0
"""Getting to a state as the machine orders it: founding it, or catching up with the others.

Rules: one of them runs at a time, as a task of the member's TaskGroup, and ends with exactly one event. A newer order
replaces a running one, which then stays silent. What cannot be cured by trying again ends the run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from isthmus.collective.core.types import Instant, Member
from isthmus.elastic.core.events import CatchUp, CatchUpFailed, CaughtUp
from isthmus.elastic.core.messages import Held
from isthmus.elastic.errors import NoDonor, StateMismatch
from isthmus.elastic.learner.state_sync import StateSync
from isthmus.elastic.observation import CatchUpEnded, CatchUpStarted, Observe, state_fields
from isthmus.elastic.shell.exchange import RoundRunner


class Learner:
    """Owns the running catch-up.

    Args:
        sync: fetches and replays.
        runner: founds the state.
        tasks: where it runs.
        done: takes the one event.
        spoiled: takes the reason if this peer's model does not fit the run.
        observe: told of beginning and end.
        clock: monotonic seconds.
        borrow: before this peer is told to have caught up, sees to what else it may want of these donors.
    """

    def __init__(
        self,
        sync: StateSync,
        runner: RoundRunner,
        tasks: asyncio.TaskGroup,
        *,
        done: Callable[[CaughtUp | CatchUpFailed], None],
        spoiled: Callable[[str], None],
        observe: Observe,
        clock: Callable[[], Instant],
        borrow: Callable[[Sequence[Member]], Awaitable[None]],
    ) -> None:
        self._sync = sync
        self._borrow = borrow
        self._runner = runner
        self._tasks = tasks
        self._done = done
        self._spoiled = spoiled
        self._observe = observe
        self._clock = clock
        self._running: asyncio.Task[None] | None = None
        self.received_nbytes = 0
        """Bytes of state that have arrived and are verified."""

    async def found(self) -> None:
        """Make the run's first state."""
        await self._replace()
        self._running = self._tasks.create_task(self._found())

    async def catch_up(self, effect: CatchUp) -> None:
        """Get to the target."""
        await self._replace()
        self._running = self._tasks.create_task(self._catch_up(effect))

    def heard_of(self, committed: Held) -> None:
        """The coordinator names a committed state. A catch-up that begins later may meet it as well."""
        self._sync.heard_of(committed)

    def went_back(self) -> None:
        """The run did, and what was named until now may be void."""
        self._sync.went_back()

    def overruled(self, committed: Held, voted: bytes) -> None:
        """The others agreed on another result than this peer's: the next catch-up finds out where it was wrong."""
        self._sync.overruled(committed, voted)

    def stop(self) -> None:
        """Cancel what runs."""
        if self._running is not None:
            self._running.cancel()

    async def _replace(self) -> None:
        self.stop()
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _found(self) -> None:
        self._done(CaughtUp(held=await self._runner.found()))

    async def _catch_up(self, effect: CatchUp) -> None:
        began, nbytes = self._clock(), self.received_nbytes
        self._observe(CatchUpStarted(outer_step=effect.target.outer_step, donors=len(effect.donors)))
        self._sync.aim(effect.target, effect.donors)
        held, cause = None, ""
        try:
            held = await self._sync.run()
        except NoDonor as error:
            cause = str(error)
        except StateMismatch as error:
            self._spoiled(str(error))
            return
        if held is not None:
            await self._borrow(effect.donors)
        taken_s, nbytes = self._clock() - began, self.received_nbytes - nbytes
        self._observe(CatchUpEnded(**state_fields(held), cause=cause, bytes=nbytes, seconds=taken_s))
        self._done(CaughtUp(held=held) if held is not None else CatchUpFailed(cause=cause))
