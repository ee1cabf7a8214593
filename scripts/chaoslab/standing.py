# SPDX-License-Identifier: Apache-2.0
"""Members that stand still behind a beating heart: their workers do not answer, or they do not vote.

Rules: see hand.py. `faults.py` has the list.
"""

import asyncio
import random
import signal
import sys

from scripts.chaoslab import mute
from scripts.chaoslab.evidence import now_s, wall_s
from scripts.chaoslab.hand import Hand
from scripts.chaoslab.process import Process, children, send
from scripts.chaoslab.roles import HANG_TIMEOUT_S

_FOUND_LIMIT_S = HANG_TIMEOUT_S + 15.0
"""The daemon looks at intervals, and waits longer where this kind of answer took long before."""


class Standing(Hand):
    """See the module."""

    async def hung(self, rng: random.Random) -> None:
        """See faults.py."""
        (site,) = self._pick(rng, 1)
        process, is_for_good = self._world.processes[site], rng.random() < 0.5
        workers, seconds = children(process.popen.pid), rng.uniform(1.0, 15.0)
        with self._ailing("hung", site):
            detail = "has workers that stop " + ("for good" if is_for_good else f"for {seconds:.1f} s")
            fault = self._note("hung", (site,), detail, is_for_good=is_for_good)
            send(workers, signal.SIGSTOP)
            try:
                if is_for_good:
                    await self._until_found(process, fault.at_s)
                else:
                    await asyncio.sleep(seconds)
            finally:
                send(workers, signal.SIGCONT)
            fault.over_s = now_s()

    async def silent(self, rng: random.Random) -> None:
        """See faults.py. The member is one that was started for this, in place of the site's own.

        Who has not voted stays out for minutes; its operator starts it again.
        """
        world = self._world
        (site,) = self._pick(rng, 1)
        seconds = rng.uniform(5.0, 40.0)
        with self._holding(site):
            await world.leave(site)
            process = world.start(site, program=(sys.executable, mute.__file__))
            await self._until_up(process)
            fault = self._note("silent", (site,), f"does not vote for {seconds:.1f} s")
            (process.folder / mute.MUTE).touch()
            await asyncio.sleep(seconds)
            (process.folder / mute.MUTE).unlink()
            await world.leave(site)
            fault.over_s = now_s()
            await self._come_back(site, rng)

    async def _until_found(self, process: Process, at_s: float) -> None:
        world = self._world

        def is_found() -> bool:
            faults = world.logs[process.folder].named("fault")
            return any(event.get("kind") == "worker_hung" and wall_s(event) > at_s for event in faults)

        await world.until(lambda: is_found() or not process.is_running, _FOUND_LIMIT_S + 2.0)
        world.note("hung workers are found", process.site, at_s, _FOUND_LIMIT_S)
