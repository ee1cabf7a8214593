"""When what is done: one kind after the other from a shuffled bag, mostly with a breath between, sometimes without.

A breath ends when the run has made two more commits. So most faults meet a run that goes on, with whoever was hit
before still on its way back; about one in four meets the one before in full swing.

Rules: kinds, moments and details come from the seed; what a moment finds does not, for processes run as they run.
"""

import asyncio
import functools
import random
from collections.abc import Iterator, Sequence

from scripts.chaoslab.evidence import now_s
from scripts.chaoslab.faults import Faults
from scripts.chaoslab.world import World

_TOGETHER = 0.25
_BREATH_LIMIT_S = 20.0
_ROOM_LIMIT_S = 30.0
_TURN_S = 0.1


async def inject(world: World, faults: Faults, kinds: Sequence[str], *, seed: int, seconds: float) -> None:
    """Do faults for so long; returns when the last one is over."""
    rng = random.Random(f"{seed} moments")
    until_s = now_s() + seconds
    methods = faults.kinds()
    async with asyncio.TaskGroup() as tasks:
        for number, kind in enumerate(_bag(rng, kinds)):
            could = functools.partial(faults.could, kind)
            await world.until(could, min(_ROOM_LIMIT_S, max(0.0, until_s - now_s())))
            if now_s() >= until_s:
                return
            if not could():
                continue
            before = world.outer_step
            tasks.create_task(methods[kind](random.Random(f"{seed} {number} {kind}")))
            await asyncio.sleep(_TURN_S)  # it has picked its victims
            if rng.random() < _TOGETHER:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            else:
                await world.until(functools.partial(_has_advanced, world, before + 2), _BREATH_LIMIT_S)
                await asyncio.sleep(rng.uniform(1.0, 8.0))


def _has_advanced(world: World, outer_step: int) -> bool:
    return world.outer_step >= outer_step


def _bag(rng: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    """All kinds in random order, again and again."""
    while True:
        yield from rng.sample(kinds, len(kinds))
