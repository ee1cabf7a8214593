# SPDX-License-Identifier: Apache-2.0
"""Does what the plan says: mostly with a breath between two faults, sometimes without.

A breath ends some seconds after the run has made two more commits. So most faults meet a run that goes on, with whoever
was hit before still on its way back; about one in four meets the one before in full swing. A power cut waits until all
are well, and nothing else is done until it is over.

Rules: kinds, moments and details come from the seed (plan.py); what a moment finds does not, for processes run as they
run.
"""

import asyncio
import random
from collections.abc import Sequence

from scripts.chaoslab.evidence import now_s
from scripts.chaoslab.faults import Faults
from scripts.chaoslab.plan import Plan
from scripts.chaoslab.watch import PULSE_S
from scripts.chaoslab.world import World

_BREATH_LIMIT_S = 20.0
_ROOM_LIMIT_S = 60.0
"""Until something of the bag can be done; the last one may be the power cut, which waits for all."""
_TURN_S = 2 * PULSE_S


async def inject(world: World, faults: Faults, kinds: Sequence[str], *, seed: int, seconds: float) -> None:
    """Do faults for so long; returns when the last one is over."""
    plan = Plan(kinds, seed=seed, tell=world.tell)
    until_s = now_s() + seconds
    methods = faults.kinds()
    async with asyncio.TaskGroup() as tasks:
        while now_s() < until_s:
            plan.fill()
            await world.until(lambda: any(map(faults.could, plan.bag)), min(_ROOM_LIMIT_S, until_s - now_s()))
            turn = plan.take(faults.could)
            if turn is None:
                world.tell(f"skipped      {', '.join(plan.give_up())}")
                continue
            before = world.outer_step
            tasks.create_task(methods[turn.kind](random.Random(turn.seed)))
            await asyncio.sleep(_TURN_S)  # it has picked its victims
            if not turn.is_together:
                await _until_step(world, before + 2)
            await asyncio.sleep(turn.breath_s)


async def _until_step(world: World, outer_step: int) -> None:
    await world.until(lambda: world.outer_step >= outer_step, _BREATH_LIMIT_S)
