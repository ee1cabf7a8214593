# SPDX-License-Identifier: Apache-2.0
"""What is done to one site: its process killed, frozen or asked to leave, its network cut, its disk full.

Rules: see hand.py. `faults.py` has the list.
"""

import asyncio
import random
import signal

from scripts.chaoslab import host
from scripts.chaoslab.evidence import COORDINATOR, now_s
from scripts.chaoslab.hand import Hand
from scripts.chaoslab.process import ENVIRONMENT, Process, children, send

_END_LIMIT_S = 10.0
_END_BESIDE_OTHERS_LIMIT_S = 30.0
_Path = tuple[int | str, int | str]


class Sites(Hand):
    """See the module."""

    async def kill(self, rng: random.Random) -> None:
        """See faults.py."""
        (site,) = self._pick(rng, 1)
        with self._holding(site):
            at_s = self._world.kill(site)
            self._note("kill", (site,), "is killed", at_s)
            await self._come_back(site, rng)

    async def freeze(self, rng: random.Random) -> None:
        """See faults.py."""
        (site,) = self._pick(rng, 1)
        pid, seconds = self._world.processes[site].popen.pid, rng.uniform(0.5, 15.0)
        has_workers = rng.random() < 0.7
        frozen = [pid, *(children(pid) if has_workers else [])]
        with self._ailing("freeze", site):
            fault = self._note("freeze", (site,), f"stops for {seconds:.1f} s{'' if has_workers else ', alone'}")
            send(frozen, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                send(frozen, signal.SIGCONT)
            fault.over_s = now_s()

    async def coordinator(self, rng: random.Random) -> None:
        """See faults.py."""
        with self._holding(COORDINATOR):
            at_s = self._world.kill(COORDINATOR)
            seconds = rng.uniform(0.0, 4.0)
            fault = self._note("coordinator", (COORDINATOR,), f"is killed, started again after {seconds:.1f} s", at_s)
            await asyncio.sleep(seconds)
            await self._restart_coordinator(fault)

    async def leave(self, rng: random.Random) -> None:
        """See faults.py."""
        (site,) = self._pick(rng, 1)
        with self._holding(site):
            self._note("leave", (site,), "is asked to leave")
            await self._world.leave(site, by_command=True)
            await self._come_back(site, rng)

    # -------------------------------------------------------------------------------- network and disk

    async def cut(self, rng: random.Random) -> None:
        """See faults.py."""
        victims, paths, detail = self._paths(rng)
        seconds = rng.uniform(1.0, 15.0)
        with self._ailing("cut", *victims):
            fault = self._note("cut", victims, f"{detail} for {seconds:.1f} s")
            self._world.network.cut(paths)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._world.network.heal(paths)
            fault.over_s = now_s()

    def _paths(self, rng: random.Random) -> tuple[tuple[int, ...], list[_Path], str]:
        site, other = self._pick(rng, 2)
        source: int = site
        target: int | str = "*"
        victims: tuple[int, ...] = (site,)
        words = ("reaches and hears nobody", "reaches nobody", "hears nobody")
        match rng.choice(["all", "all", "coordinator", "pair", "coordinator itself"]):
            case "coordinator":
                target = COORDINATOR
                words = ("and the coordinator lose each other", "does not reach the coordinator", "does not hear it")
            case "pair":
                target, victims = other, (site, other)
                words = ("lose each other", "lose the way there", "lose the way back")
            case "coordinator itself":
                source, victims = COORDINATOR, (COORDINATOR,)
            case _:
                pass
        there, back = (source, target), (target, source)
        paths: list[list[_Path]] = [[there, back], [there], [back]]
        which = rng.choice([0, 0, 1, 2])
        return victims, paths[which], words[which]

    async def disk(self, rng: random.Random) -> None:
        """See faults.py."""
        world = self._world
        (peer,) = self._pick(rng, 1)
        site = COORDINATOR if rng.random() < 0.4 else peer
        seconds, room_nbytes = rng.uniform(1.0, 8.0), rng.choice([0, 4096, 1 << 16])
        process = world.processes[site]
        with self._holding(site):
            if site == COORDINATOR:
                process.expected.add(ENVIRONMENT)  # it says why, and goes: its memory would be ahead of its journal
            fault = self._note("disk", (site,), f"has {room_nbytes} bytes of disk left for {seconds:.1f} s")
            host.fill_disk(world.disk(site), room_nbytes=room_nbytes)
            try:
                await asyncio.sleep(seconds)
            finally:
                host.free_disk(world.disk(site))
            fault.over_s = now_s()
            if site == COORDINATOR:
                await self._end_or_go_on(process)
                process.expected.discard(ENVIRONMENT)
            if process.has_ended and site == COORDINATOR:
                world.look_into_journal()
                await self._restart_coordinator(fault)

    async def _end_or_go_on(self, process: Process) -> None:
        """A coordinator has its disk again: either it could do without, or it has said its last word."""
        world, freed_s, before = self._world, now_s(), self._world.outer_step
        # Whoever does not vote, or hangs, is awaited for longer than that.
        limit_s = (
            _END_BESIDE_OTHERS_LIMIT_S if any(world.ailing.values()) or world.held - {COORDINATOR} else _END_LIMIT_S
        )
        await world.until(lambda: process.has_ended or world.outer_step >= before + 2, limit_s + 2.0)
        world.note("end of a coordinator without a disk, or the next commit", COORDINATOR, freed_s, limit_s)
