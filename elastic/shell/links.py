# SPDX-License-Identifier: Apache-2.0
"""Making links with peers that may become members with this one, beside whatever it does.

Rules: one attempt at a time for each start of a peer, as a task of the member's TaskGroup; it ends with one event. Must
not know how a link is made.
"""

import asyncio
from collections.abc import Callable, Sequence

from isthmus.collective.core.types import Member, PeerRef
from isthmus.elastic.core.events import LinkMade
from isthmus.elastic.shell.exchange import RoundRunner


class Links:
    """Owns the attempts under way.

    Args:
        runner: makes them.
        tasks: where they run.
        done: takes the one event of each.
    """

    def __init__(self, runner: RoundRunner, tasks: asyncio.TaskGroup, *, done: Callable[[LinkMade], None]) -> None:
        self._runner = runner
        self._tasks = tasks
        self._done = done
        self._running: dict[PeerRef, asyncio.Task[None]] = {}

    def make(self, peers: Sequence[Member]) -> None:
        """Try these, but for those that are being tried."""
        for member in peers:
            if member.ref not in self._running:
                self._running[member.ref] = self._tasks.create_task(self._make(member))

    def stop(self) -> None:
        """Cancel what runs."""
        for task in self._running.values():
            task.cancel()

    async def _make(self, member: Member) -> None:
        try:
            cause = await self._runner.meet(member)
        finally:
            del self._running[member.ref]
        self._done(LinkMade(ref=member.ref, cause=cause))
