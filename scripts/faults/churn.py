# SPDX-License-Identifier: Apache-2.0
"""Peers come and go while the others never stop: the longest gap between two operations, and what a survivor holds.

Rules: peer 0 is never killed. Everything else is drawn at random: an action every 0.5 to 2 s, three starts to two
kills, whoever is free or alive. The modes take turns. Memory is compared between two like moments: peer 0 is alone,
after having worked with everybody.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

from scripts.faults.values import MAX_PEERS
from scripts.faults.views import ViewServer
from scripts.faults.words import Mode, Weight

_PAUSE_S = (0.5, 2.0)
_START_SHARE = 0.6
_STEPS_TO_SETTLE = 4


@dataclass(slots=True)
class Churn:
    """What happened."""

    seconds: float = 0.0
    steps: int = 0
    starts: int = 0
    kills: int = 0
    longest_gap_s: float = 0.0
    """Between the ends of two operations that follow each other."""
    world_sizes: dict[int, int] = field(default_factory=dict)
    """How many operations were finished by so many members."""
    before: Weight | None = None
    after: Weight | None = None


async def churn(
    server: ViewServer, seconds: float, rng: random.Random, *, max_peers: int = MAX_PEERS, practice_s: float = 10.0
) -> Churn:
    """Let peers come and go for so long; see the module.

    Args:
        server: without peers yet.
        seconds: of churn; warming up and settling down come on top.
        rng: draws the actions.
        max_peers: that live at once, from 2 up.
        practice_s: churn before memory is weighed for the first time, so that everything has been needed once.
    """
    server.trusts_ends = True
    for number in range(max_peers):
        await server.launch(number)
    await _come_and_go(server, practice_s, rng, Churn(), max_peers)
    before = await _weigh_alone(server)
    story = Churn(before=before)
    await _come_and_go(server, seconds, rng, story, max_peers)
    story.after = await _weigh_alone(server)
    return story


async def _come_and_go(server: ViewServer, seconds: float, rng: random.Random, story: Churn, max_peers: int) -> None:
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        actions = tasks.create_task(_act(server, rng, story, max_peers))
        await _operate(server, story, started + seconds)
        actions.cancel()
    story.seconds = time.monotonic() - started


async def _operate(server: ViewServer, story: Churn, until: float) -> None:
    modes = tuple(Mode)
    last = time.monotonic()
    while last < until:
        outcome = await server.step(modes[story.steps % len(modes)])
        story.steps += 1
        story.longest_gap_s = max(story.longest_gap_s, outcome.finished_at - last)
        last = outcome.finished_at
        world_size = len(outcome.sites)
        story.world_sizes[world_size] = story.world_sizes.get(world_size, 0) + 1
        for site in list(server.sites.values()):
            await server.readmit(site)  # a machine this busy makes a good peer look lost


async def _act(server: ViewServer, rng: random.Random, story: Churn, max_peers: int) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*_PAUSE_S))
        alive = {number for number, site in server.sites.items() if site.is_alive}
        absent, mortal = sorted(set(range(max_peers)) - alive), sorted(alive - {0})
        if absent and (rng.random() < _START_SHARE or not mortal):
            await server.launch(rng.choice(absent))
            story.starts += 1
        else:
            server.kill(server.sites[rng.choice(mortal)])
            story.kills += 1


async def _weigh_alone(server: ViewServer) -> Weight:
    """Peer 0's weight after it has worked with everybody and is alone again."""
    for _ in range(_STEPS_TO_SETTLE):
        await _step_of_each(server)
    for number, site in server.sites.items():
        if number:
            server.kill(site)
    for _ in range(_STEPS_TO_SETTLE):
        await _step_of_each(server)
    return await server.weigh(server.sites[0])


async def _step_of_each(server: ViewServer) -> None:
    for mode in Mode:
        await server.step(mode)
