# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while a peer joins: it or its donor is killed, its donor leaves, nobody can dial it, or it is a copy.

Rules: see hand.py. `faults.py` has the list.
"""

import asyncio
import random
import sys

from scripts.chaoslab import walled
from scripts.chaoslab.hand import Hand
from scripts.chaoslab.process import NOBODY_REACHABLE, REFUSED, Process
from scripts.chaoslab.watch import START_LIMIT_S

_SLOW_MBIT = 2.0
"""Download of a joiner that is watched: its snapshot takes a second or two then."""
_STATE_NBYTES = 200_000
"""About what it fetches."""
NOBODY = "127.0.0.1:9"
HOME_LIMIT_S = START_LIMIT_S
"""Its own start, and the time in which it and the members have to meet."""


class Joining(Hand):
    """See the module."""

    async def donor(self, rng: random.Random) -> None:
        """See faults.py."""
        world = self._world
        (joiner,) = self._pick(rng, 1)
        with self._holding(joiner):
            await world.leave(joiner)
            process = await self._start_slowly(joiner)
            carried = world.network.carried_to(joiner, len(world.peers) + 1)
            wanted = rng.uniform(0.05, 0.8) * _STATE_NBYTES
            donor = rng.choice(world.healthy() or [0])

            def is_served() -> bool:
                nonlocal donor
                now = world.network.carried_to(joiner, len(world.peers) + 1)
                if now is None or carried is None:
                    return True  # nobody counts: any member may be serving
                gained = {site: now[site] - carried[site] for site in world.healthy()}
                if gained:
                    donor = max(gained, key=lambda site: gained[site])
                return sum(gained.values()) >= wanted or bool(world.times(process, "catch_up"))

            await world.until(is_served, 20.0)
            if donor in world.healthy():
                with self._holding(donor):
                    at_s = world.kill(donor)
                    served = "has served" if world.times(process, "catch_up") else "serves"
                    self._note("donor", (donor,), f"is killed while it {served} peer {joiner}", at_s)
                    world.network.limit_download(joiner, 0)
                    await self._until_up(process)
                    await self._come_back(donor, rng)
            world.network.limit_download(joiner, 0)
            await self._until_up(process)

    async def joiner(self, rng: random.Random) -> None:
        """See faults.py."""
        world = self._world
        (site,) = self._pick(rng, 1)
        with self._holding(site):
            await world.leave(site)
            moment, seconds = rng.choice(
                [("", 4.0), ("started", 1.0), ("catch_up_started", 1.5), ("catch_up", 0.3), ("join", 0.5)]
            )
            seconds *= rng.random()
            process = await self._start_slowly(site, after=moment)
            await asyncio.sleep(seconds)
            if process.is_running:
                at_s = world.kill(site)
                self._note("joiner", (site,), f"is killed {seconds:.2f} s after {moment or 'its command'}", at_s)
            world.network.limit_download(site, 0)
            await self._come_back(site, rng)

    async def stranger(self, rng: random.Random) -> None:
        """See faults.py."""
        world = self._world
        (site,) = self._pick(rng, 1)
        with self._holding(site):
            await world.leave(site)
            program = (sys.executable, walled.__file__)
            process = world.start(site, fresh=True, flags=("--advertise", NOBODY), program=program)
            process.expected.add(NOBODY_REACHABLE)
            self._note("stranger", (site,), f"joins as {NOBODY}, and reaches nobody but its coordinator")
            await world.until(lambda: process.is_up or not process.is_running, HOME_LIMIT_S + 2.0)
            world.note("strangers that nobody can dial go home", site, process.began_s, HOME_LIMIT_S)
            if process.is_running:
                world.kill(site)
            await self._come_back(site, rng)

    async def clone(self, rng: random.Random) -> None:
        """See faults.py. The copy stays: the older start ends as soon as the copy is heard of."""
        world = self._world
        (site,) = self._pick(rng, 1)
        with self._holding(site):
            older = world.copy(site)
            newer = world.processes[site]
            older.expected.add(REFUSED)
            await world.until(lambda: not older.is_running or not newer.is_running, START_LIMIT_S + 2.0)
            world.note("the older of two starts ends", site, newer.began_s, START_LIMIT_S)
            ended_s = next(iter(world.times(older, "leave")), None)
            self._note("clone", (site,), "is started once more, from a copy of its folder, and ends", ended_s)
            if older.is_running:
                world.mourn(site, older.kill())
            await self._until_up(newer)

    async def handover(self, rng: random.Random) -> None:
        """See faults.py."""
        world = self._world
        holder, joiner, *others = rng.sample(world.peers, len(world.peers))
        with self._holding(*world.peers):
            async with asyncio.TaskGroup() as tasks:
                for site in (joiner, *others):
                    tasks.create_task(world.leave(site))
            await self._start_slowly(joiner)
            fault = self._note("handover", tuple(world.peers), f"but {world.name(holder)} have left, which is to go")
            await world.leave(holder, by_command=True)
            world.network.limit_download(joiner, 0)
            for site in (holder, *others):
                await world.until(world.may_start, START_LIMIT_S)
                world.start(site)
            fault.over_s = world.processes[(holder, *others)[-1]].began_s
            async with asyncio.TaskGroup() as tasks:
                for site in world.peers:
                    tasks.create_task(self._until_up(world.processes[site]))

    async def _start_slowly(self, site: int, *, after: str = "catch_up_started") -> Process:
        """Start a peer that nobody knows, on a line on which its snapshot takes a while; returns after this event."""
        world = self._world
        world.network.limit_download(site, _SLOW_MBIT)
        process = world.start(site, fresh=True)
        if after:
            await world.until(lambda: bool(world.times(process, after)) or not process.is_running, START_LIMIT_S)
        return process
