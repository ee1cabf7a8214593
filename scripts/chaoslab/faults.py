# SPDX-License-Identifier: Apache-2.0
"""What can be done to a site, and how it is undone.

    kill          SIGKILL of a member; it is started again, in its folder or as a peer that nobody knows
    freeze        SIGSTOP of a member, with or without its workers, for 0.5 to 15 s
    coordinator   SIGKILL of the coordinator; it is started again on its journal
    donor         SIGKILL of the member that serves a joiner most, in the middle of the transfer
    joiner        SIGKILL of a joiner, somewhere between its command and its first commits
    cut           a site loses its network, or one path, one way or both, for 1 to 15 s
    disk          a site's disk is full for 1 to 8 s

Rules: victims are healthy and commit when they are hit. Each fault is told in one line when it happens, and noted with
the time before it was done. A fault is over when its site is what it was; whether others cared is for the logs to say.
"""

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from scripts.chaoslab import host
from scripts.chaoslab.evidence import COORDINATOR, Fault, now_s
from scripts.chaoslab.process import ENVIRONMENT, Process, children, send
from scripts.chaoslab.watch import PULSE_S, START_LIMIT_S
from scripts.chaoslab.world import World

_SLOW_MBIT = 2.0
"""Download of a joiner that is watched: its snapshot takes a second or two then."""
_STATE_NBYTES = 200_000
"""About what it fetches."""
_END_LIMIT_S = 10.0
_Path = tuple[int | str, int | str]


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
        return {
            "kill": self.kill,
            "freeze": self.freeze,
            "coordinator": self.coordinator,
            "donor": self.donor,
            "joiner": self.joiner,
            "cut": self.cut,
            "disk": self.disk,
        }

    def could(self, kind: str) -> bool:
        """Whether there is somebody to whom it can be done without leaving too few."""
        world = self._world
        if not world.is_coordinated():
            return kind == "kill" and self._has_spare(1)
        if kind == "cut" and any("cut" in ailments for ailments in world.ailing.values()):
            return False  # to heal one cut would heal a path of the other
        return self._has_spare(2 if kind == "donor" else 1)

    def _has_spare(self, num_victims: int) -> bool:
        world = self._world
        return len(world.active()) - num_victims >= max(2, len(world.peers) // 2)

    # -------------------------------------------------------------------------------- processes

    async def kill(self, rng: random.Random) -> None:
        """See the module."""
        (site,) = self._pick(rng, 1)
        with self._holding(site):
            at_s = self._world.kill(site)
            self._note("kill", (site,), "is killed", at_s)
            await self._come_back(site, rng)

    async def freeze(self, rng: random.Random) -> None:
        """See the module."""
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
        """See the module."""
        with self._holding(COORDINATOR):
            at_s = self._world.kill(COORDINATOR)
            seconds = rng.uniform(0.0, 4.0)
            fault = self._note("coordinator", (COORDINATOR,), f"is killed, started again after {seconds:.1f} s", at_s)
            await asyncio.sleep(seconds)
            await self._restart_coordinator(fault)

    async def donor(self, rng: random.Random) -> None:
        """See the module."""
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
        """See the module."""
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

    # -------------------------------------------------------------------------------- network and disk

    async def cut(self, rng: random.Random) -> None:
        """See the module."""
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
        """See the module."""
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

    # -------------------------------------------------------------------------------- inside

    def _pick(self, rng: random.Random, count: int) -> list[int]:
        return rng.sample(self._world.active(), count)

    def _note(self, kind: str, victims: tuple[int, ...], detail: str, at_s: float | None = None) -> Fault:
        fault = Fault(kind=kind, victims=victims, detail=detail, at_s=now_s() if at_s is None else at_s)
        self.done.append(fault)
        who = " and ".join(map(self._world.name, victims))
        self._world.tell(f"{kind:<12} {who} {detail}", at_s=fault.at_s)
        return fault

    @contextmanager
    def _holding(self, site: int) -> Iterator[None]:
        """Nobody else starts the site's process, and nothing else is done to it."""
        self._world.held.add(site)
        try:
            yield
        finally:
            self._world.held.discard(site)

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

    async def _end_or_go_on(self, process: Process) -> None:
        """A coordinator has its disk again: either it could do without, or it has said its last word."""
        world, freed_s, before = self._world, now_s(), self._world.outer_step
        await world.until(lambda: process.has_ended or world.outer_step >= before + 2, _END_LIMIT_S + 2.0)
        world.note("end of a coordinator without a disk, or the next commit", COORDINATOR, freed_s, _END_LIMIT_S)

    async def _restart_coordinator(self, fault: Fault) -> None:
        await self._world.join(COORDINATOR, fresh=False)
        started = self._world.times(self._world.processes[COORDINATOR], "started")
        fault.over_s = started[0] if started else None

    async def _start_slowly(self, site: int, *, after: str = "catch_up_started") -> Process:
        """Start a peer that nobody knows, on a line on which its snapshot takes a while; returns after this event."""
        world = self._world
        world.network.limit_download(site, _SLOW_MBIT)
        process = world.start(site, fresh=True)
        if after:
            await world.until(lambda: bool(world.times(process, after)) or not process.is_running, START_LIMIT_S)
        return process

    async def _until_up(self, process: Process) -> None:
        world = self._world
        await world.until(lambda: process.is_up or not process.is_running, START_LIMIT_S + 2.0)
        if process.is_running:
            world.note("membership after a start", process.site, process.began_s, START_LIMIT_S)


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
