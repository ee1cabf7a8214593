# SPDX-License-Identifier: Apache-2.0
"""Several ways to the same end, tried side by side with head starts (RFC 8305): the first that gets there counts.

Rules: the ways begin in order, each a head start after the one before or as soon as an earlier one has failed. Nothing
goes on after the winner is known; what got there as well is let go. No deadline of its own: every attempt has one.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from isthmus.collective.errors import CollectiveError

T = TypeVar("T")


async def race(
    ways: Sequence[str],
    attempt: Callable[[str], Awaitable[T]],
    *,
    head_start_s: float,
    let_go: Callable[[T], None],
    causes: dict[str, CollectiveError],
) -> tuple[str, T] | None:
    """The way that got there first, and what it gave; None if none did.

    Args:
        ways: their names, each once, the best first.
        attempt: goes one; raises CollectiveError when it leads nowhere.
        head_start_s: of each over the next.
        let_go: takes what a slower one gave after all.
        causes: filled with what happened on ways that led nowhere.
    """
    rest = deque(ways)
    running: dict[asyncio.Task[T | CollectiveError], str] = {}

    async def outcome(way: str) -> T | CollectiveError:
        try:
            return await attempt(way)
        except CollectiveError as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        try:
            while rest or running:
                if rest:
                    way = rest.popleft()
                    running[tasks.create_task(outcome(way))] = way
                timeout_s = head_start_s if rest else None
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    way, result = running.pop(task), task.result()
                    if not isinstance(result, CollectiveError):
                        return way, result
                    causes[way] = result
            return None
        finally:
            for task in running:
                if task.done():
                    _clear_away(task, let_go)
                else:
                    task.cancel()
                    task.add_done_callback(lambda ended: _clear_away(ended, let_go))


def _clear_away(ended: "asyncio.Task[T | CollectiveError]", let_go: Callable[[T], None]) -> None:
    """Two got there in the same instant, and one was faster."""
    if ended.cancelled() or ended.exception() is not None:
        return
    result = ended.result()
    if not isinstance(result, CollectiveError):
        let_go(result)
