# SPDX-License-Identifier: Apache-2.0
"""When what is done: kinds from a shuffled bag, mostly with a breath between them, sometimes without.

A breath ends some seconds after the run has made two more commits. So most faults meet a run that goes on, with whoever
was hit before still on its way back; about one in four meets the one before in full swing. What cannot be done now,
because too few are well, stays in the bag for a while.

Rules: kinds, moments and details come from the seed; what a moment finds does not, for processes run as they run.
"""

import asyncio
import random
from collections.abc import Sequence

from scripts.chaoslab.evidence import now_s
from scripts.chaoslab.faults import Faults
from scripts.chaoslab.watch import PULSE_S
from scripts.chaoslab.world import World

_TOGETHER = 0.25
_BREATH_LIMIT_S = 20.0
_ROOM_LIMIT_S = 10.0
_TURN_S = 2 * PULSE_S


async def inject(world: World, faults: Faults, kinds: Sequence[str], *, seed: int, seconds: float) -> None:
    """Do faults for so long; returns when the last one is over."""
    rng = random.Random(f"{seed} moments")
    until_s = now_s() + seconds
    methods = faults.kinds()
    bag: list[str] = []
    number = 0
    async with asyncio.TaskGroup() as tasks:
        while now_s() < until_s:
            bag = bag or rng.sample(kinds, len(kinds))
            possible = await _possible(world, faults, bag, min(_ROOM_LIMIT_S, until_s - now_s()))
            if possible is None:
                bag.clear()
                continue
            bag.remove(possible)
            number += 1
            before = world.outer_step
            tasks.create_task(methods[possible](random.Random(f"{seed} {number} {possible}")))
            await asyncio.sleep(_TURN_S)  # it has picked its victims
            if rng.random() < _TOGETHER:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            else:
                await _advance(world, before + 2)
                await asyncio.sleep(rng.uniform(1.0, 8.0))


async def _possible(world: World, faults: Faults, bag: Sequence[str], limit_s: float) -> str | None:
    """The first of the bag that can be done, as soon as there is one."""
    await world.until(lambda: any(map(faults.could, bag)), limit_s)
    return next(filter(faults.could, bag), None)


async def _advance(world: World, outer_step: int) -> None:
    await world.until(lambda: world.outer_step >= outer_step, _BREATH_LIMIT_S)
