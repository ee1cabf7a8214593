# SPDX-License-Identifier: Apache-2.0
"""The power goes for all at once, and all the same commands are given again.

Rules: see hand.py. `faults.py` has the list.
"""

import asyncio
import random

from scripts.chaoslab.evidence import COORDINATOR
from scripts.chaoslab.hand import Hand
from scripts.chaoslab.watch import START_LIMIT_S


class Power(Hand):
    """See the module."""

    async def power(self, rng: random.Random) -> None:
        """See faults.py. Two processes import at once: this machine would be as slow with seven of them."""
        world = self._world
        sites = (COORDINATOR, *rng.sample(world.peers, len(world.peers)))
        with self._holding(*sites):
            at_s, took_s = world.cut_power()
            fault = self._note("power", sites, f"lose their power, within {1000 * took_s:.0f} ms", at_s)
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            for site in sites:
                await world.until(world.may_start, START_LIMIT_S)
                world.start(site)
            fault.over_s = world.processes[sites[-1]].began_s
            async with asyncio.TaskGroup() as tasks:
                for site in world.peers:
                    tasks.create_task(self._until_up(world.processes[site]))
