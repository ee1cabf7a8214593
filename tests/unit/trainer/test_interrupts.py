# SPDX-License-Identifier: Apache-2.0
"""The first interrupt leaves, the second stops, from the first line of the work on."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from isthmus.trainer.errors import ConfigError, ExitCode
from isthmus.trainer.run.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _heeds_hangups() -> Iterator[None]:
    """Also where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def wait_for_signal(number: int) -> None:
    """Send it to ourselves and let the loop see it."""
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.01)


class Work:
    """Leaves when it is asked to, if it may."""

    def __init__(self, *, leaves: bool = True) -> None:
        self.is_leaving = asyncio.Event()
        self.num_left = 0
        self.interrupts = Interrupts()
        self._leaves = leaves

    def leave(self) -> None:
        self.num_left += 1
        if self._leaves:
            self.is_leaving.set()

    async def live(self, *numbers: int, start: Callable[[Interrupts], None]) -> int:
        start(self.interrupts)
        for number in numbers:
            await wait_for_signal(number)
        await self.is_leaving.wait()
        return int(ExitCode.LEFT)


def can_leave(work: Work) -> Callable[[Interrupts], None]:
    def start(interrupts: Interrupts) -> None:
        interrupts.leave = work.leave

    return start


async def test_work_that_is_not_interrupted_ends_with_its_own_code() -> None:
    async def work() -> int:
        return 7

    assert await Interrupts().guard(work()) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_leaves_in_order(number: int) -> None:
    work = Work()
    assert await work.interrupts.guard(work.live(number, start=can_leave(work))) == ExitCode.LEFT
    assert work.num_left == 1


async def test_the_second_signal_stops_at_once() -> None:
    work = Work(leaves=False)
    numbers = (signal.SIGTERM, signal.SIGINT)
    assert await work.interrupts.guard(work.live(*numbers, start=can_leave(work))) == ExitCode.FORCED
    assert work.num_left == 1


async def test_a_terminal_that_ends_twice_leaves_in_order() -> None:
    work = Work(leaves=False)
    numbers = (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    assert await work.interrupts.guard(work.live(*numbers, start=can_leave(work))) == ExitCode.FORCED
    assert work.num_left == 1, "the second one stops nothing, the signal after it does"


async def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        work = Work()
        numbers = (signal.SIGHUP, signal.SIGTERM)
        assert await work.interrupts.guard(work.live(*numbers, start=can_leave(work))) == ExitCode.LEFT
        assert work.num_left == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_signal_before_there_is_anything_to_leave_ends_the_work() -> None:
    work = Work()
    assert await work.interrupts.guard(work.live(signal.SIGTERM, start=lambda _: None)) == ExitCode.LEFT
    assert work.num_left == 0


async def test_the_old_handlers_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    work = Work()
    await work.interrupts.guard(work.live(signal.SIGTERM, start=can_leave(work)))
    assert signal.getsignal(signal.SIGTERM) == before


async def test_errors_of_the_work_come_through() -> None:
    async def work() -> int:
        raise ConfigError("wrong")

    with pytest.raises(ExceptionGroup) as group:
        await Interrupts().guard(work())
    assert all(isinstance(error, ConfigError) for error in group.value.exceptions)
