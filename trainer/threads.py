# SPDX-License-Identifier: Apache-2.0
"""Work in a thread that a cancellation cannot leave behind."""

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread and wait until it has ended, however often the caller is cancelled meanwhile.

    `asyncio.to_thread` returns at once then, and its thread goes on writing into memory that is somebody else's by now.
    """
    call = functools.partial(contextvars.copy_context().run, functools.partial(function, *args, **kwargs))
    future: asyncio.Future[T] = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # An aborted round is cancelled twice: when the machine says so, and when its turn in the order comes.
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise
