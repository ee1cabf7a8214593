# SPDX-License-Identifier: Apache-2.0
"""Work in a thread ends before its caller does."""

import asyncio
import contextvars
import threading

import pytest

from isthmus.trainer.threads import in_thread


async def test_the_caller_gets_what_the_function_returns_or_raises() -> None:
    assert await in_thread(int, "ff", base=16) == 255
    with pytest.raises(ValueError, match="invalid literal"):
        await in_thread(int, "x")


async def test_the_function_sees_the_context_of_its_caller() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    variable.set("mine")
    assert await in_thread(variable.get) == "mine"


@pytest.mark.parametrize("num_cancellations", [1, 2, 5])
@pytest.mark.parametrize("fails", [False, True])
async def test_however_often_it_is_cancelled_the_caller_waits_for_the_thread(
    num_cancellations: int, fails: bool
) -> None:
    loop = asyncio.get_running_loop()
    has_begun, may_end = asyncio.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        may_end.wait(30.0)
        ended.append(True)
        if fails:
            raise OSError("too late to be heard")

    caller = asyncio.ensure_future(in_thread(work))
    await has_begun.wait()
    try:
        for _ in range(num_cancellations):
            caller.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not caller.done()
        assert not ended
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended
