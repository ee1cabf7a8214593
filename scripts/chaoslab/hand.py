# SPDX-License-Identifier: Apache-2.0
"""What all faults are made of: whom to hit, how to say so, whose site it is meanwhile, and the way back.

Rules: victims are healthy and commit when they are hit. Each fault is told in one line when it happens, and noted with
the time before it was done. A fault is over when its site is what it was; whether others cared is for the logs to say.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.chaoslab.evidence import COORDINATOR, Fault, now_s
from scripts.chaoslab.process import Process
from scripts.chaoslab.watch import START_LIMIT_S
from scripts.chaoslab.world import World


class Hand:
    """Does something to somebody.

    Args:
        world: to whom.
        done: takes what was done, in order.
    """

    def __init__(self, world: World, done: list[Fault]) -> None:
        self._world = world
        self._done = done

    def _pick(self, rng: random.Random, count: int) -> list[int]:
        return rng.sample(self._world.active(), count)

    def _note(
        self, kind: str, victims: tuple[int, ...], detail: str, at_s: float | None = None, *, is_for_good: bool = False
    ) -> Fault:
        fault = Fault(
            kind=kind,
            victims=victims,
            detail=detail,
            at_s=now_s() if at_s is None else at_s,
            is_for_good=is_for_good,
        )
        self._done.append(fault)
        who = " and ".join(map(self._world.name, victims)) if len(victims) <= 2 else "all"
        self._world.tell(f"{kind:<12} {who} {detail}", at_s=fault.at_s)
        return fault

    @contextmanager
    def _holding(self, *sites: int) -> Iterator[None]:
        """Nobody else starts the sites' processes, and nothing else is done to them."""
        self._world.held.update(sites)
        try:
            yield
        finally:
            self._world.held.difference_update(sites)

    @contextmanager
    def _ailing(self, what: str, *sites: int) -> Iterator[None]:
        for site in sites:
            self._world.ailing[site].add(what)
        try:
            yield
        finally:
            for site in sites:
                self._world.ailing[site].discard(what)

    async def _come_back(self, site: int, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0.5, 5.0))
        await self._world.join(site, fresh=rng.random() < 0.4)

    async def _restart_coordinator(self, fault: Fault) -> None:
        await self._world.join(COORDINATOR, fresh=False)
        started = self._world.times(self._world.processes[COORDINATOR], "started")
        fault.over_s = started[0] if started else None

    async def _until_up(self, process: Process) -> None:
        world = self._world
        await world.until(lambda: process.is_up or not process.is_running, START_LIMIT_S + 2.0)
        if process.is_running:
            world.note("membership after a start", process.site, process.began_s, START_LIMIT_S)
