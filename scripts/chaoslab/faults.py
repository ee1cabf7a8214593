# SPDX-License-Identifier: Apache-2.0
"""What can be done, and when.

    kill          SIGKILL of a member; it is started again, in its folder or as a peer that nobody knows
    freeze        SIGSTOP of a member, with or without its workers, for 0.5 to 15 s
    coordinator   SIGKILL of the coordinator; it is started again on its journal
    donor         SIGKILL of the member that serves a joiner most, in the middle of the transfer
    joiner        SIGKILL of a joiner, somewhere between its command and its first commits
    stranger      a joiner that no member reaches, and that reaches none: it goes home with 4
    clone         a member's folder is copied, as by a disk image, and the copy is started beside it
    leave         `isthmus leave` of a member; it comes back in its folder or as a peer that nobody knows
    handover      all leave in order but one, which is asked to go while a peer that nobody knows fetches its state
    power         SIGKILL of everything within 50 ms; all the same commands are given again
    hung          SIGSTOP of a member's workers for 1 to 15 s, or for good: its daemon has to replace them
    silent        a member exchanges, and keeps its votes to itself for 5 to 40 s, and is started again then
    cut           a site loses its network, or one path, one way or both, for 1 to 15 s
    disk          a site's disk is full for 1 to 8 s

How each is done: sites.py, joining.py, standing.py, power.py.
"""

import random
from collections.abc import Callable, Coroutine

from scripts.chaoslab.evidence import OF_ALL, Fault, now_s
from scripts.chaoslab.joining import Joining
from scripts.chaoslab.power import Power
from scripts.chaoslab.sites import Sites
from scripts.chaoslab.standing import Standing
from scripts.chaoslab.watch import PULSE_S
from scripts.chaoslab.world import World


class Faults:
    """Does them.

    Args:
        world: to whom.

    Attributes:
        done: what was done, in order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.done: list[Fault] = []

    def kinds(self) -> dict[str, Callable[[random.Random], Coroutine[None, None, None]]]:
        """What there is, by name."""
        sites, joining = Sites(self._world, self.done), Joining(self._world, self.done)
        standing = Standing(self._world, self.done)
        return {
            "kill": sites.kill,
            "freeze": sites.freeze,
            "coordinator": sites.coordinator,
            "donor": joining.donor,
            "joiner": joining.joiner,
            "stranger": joining.stranger,
            "clone": joining.clone,
            "leave": sites.leave,
            "handover": joining.handover,
            "power": Power(self._world, self.done).power,
            "hung": standing.hung,
            "silent": standing.silent,
            "cut": sites.cut,
            "disk": sites.disk,
        }

    def could(self, kind: str) -> bool:
        """Whether there is somebody to whom it can be done without leaving too few."""
        world = self._world
        if not world.is_coordinated():
            return kind == "kill" and self._has_spare(1)
        if kind == "cut" and any("cut" in ailments for ailments in world.ailing.values()):
            return False  # to heal one cut would heal a path of the other
        if kind in OF_ALL:  # what else is being done would end in its midst
            return len(world.active()) == len(world.peers)
        return self._has_spare(2 if kind == "donor" else 1)

    def _has_spare(self, num_victims: int) -> bool:
        world = self._world
        return len(world.active()) - num_victims >= max(2, len(world.peers) // 2)


async def settle(world: World, limit_s: float) -> bool:
    """Wait until nothing is being done to anybody, all are members, and all commit; returns whether that came."""

    def is_calm() -> bool:
        return world.is_coordinated() and len(world.healthy()) == len(world.peers)

    def all_commit(since_s: float) -> bool:
        return all(max(world.times(world.processes[site], "commit"), default=0.0) > since_s for site in world.peers)

    deadline = now_s() + limit_s
    if not await world.until(is_calm, limit_s):
        return False
    since_s = now_s() + PULSE_S
    return await world.until(lambda: all_commit(since_s), max(0.0, deadline - now_s()))
