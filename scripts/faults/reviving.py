# SPDX-License-Identifier: Apache-2.0
"""One fault after another: each is followed until the survivors have finished an operation without its victim.

The moment is spread over the whole operation: half of the faults are the victim's own, when a random part of its
results is in place, the other half come from outside, after a random part of what the shortest operation takes.

What a revival's seconds are made of: until the kernel has closed the killed process's descriptors, which it does after
it has freed its memory (`ended`), until the first survivor gives up (`felt`), until the server has sent the next view
(`view`), until all survivors have installed it (`installed`), and the operation itself (`operation`). Where the
survivors finished in the view of the fault there are no parts: the victim had given all it owed.
"""

import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.faults.attempts import Fault, Outcome, Site
from scripts.faults.keeper import FaultBenchError
from scripts.faults.views import ViewServer
from scripts.faults.words import Mode, SelfFault

KINDS = ("kill", "freeze", "blackhole")
_FELT_WITHIN_S = 30.0
_MAX_TOLD = 6
"""Attempts in the message of a series that cannot go on."""
_MAX_RETURNS = 3
"""Views in which the world must be whole again after a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revival:
    """One fault and what came of it."""

    seconds: float
    """From the fault to the moment when the last survivor had its next result."""
    parts: dict[str, float] = field(default_factory=dict)


class Reviver:
    """See the module.

    Args:
        server: without peers yet.
        mode: of all operations.
        world_size: from 2 up.
        rng: chooses victims and moments.
    """

    def __init__(self, server: ViewServer, mode: Mode, world_size: int, rng: random.Random) -> None:
        self._server = server
        self._mode = mode
        self._world_size = world_size
        self._rng = rng
        self.typical_s = 0.0
        """Of an undisturbed operation."""
        self._shortest_s = 0.0
        self.put_out_again: list[str] = []
        """Of every healthy peer that was put out of the first view with it after a fault: what was tried."""

    async def warm_up(self) -> None:
        """Start the peers, and measure."""
        await self._fill_up()
        seconds = []
        for _ in range(5):
            outcome = await self._server.step(self._mode)
            seconds.append(outcome.finished_at - outcome.attempts[-1].posted_at)
        self.typical_s, self._shortest_s = statistics.median(seconds[1:]), min(seconds)

    async def revive(self, kind: str) -> Revival:
        """One fault of one of KINDS in the middle of an operation; afterwards the world is whole again."""
        victim = self._rng.choice(self._server.living())
        fault = self._fault(kind, victim)
        outcome = await self._server.step(self._mode, fault)
        fault.strike()  # an operation that was faster than usual has got away
        assert fault.at is not None
        if kind == "freeze" and victim in outcome.sites:
            # It stopped with nothing left to do: between operations it is not this layer that finds out.
            self._server.thaw(victim)
            await self._server.settle(victim)
            return await self.revive(kind)
        story = [*outcome.attempts]
        while victim in outcome.sites or outcome.finished_at <= fault.at:
            if time.monotonic() > fault.at + _FELT_WITHIN_S:
                told = "\n".join([*map(str, story[:_MAX_TOLD]), *self._server.tally.notes])
                raise FaultBenchError(f"{victim} is still a member {_FELT_WITHIN_S:g} s after its {kind}\n{told}")
            outcome = await self._server.step(self._mode)
            story += outcome.attempts
        revival = Revival(
            seconds=outcome.finished_at - fault.at,
            parts=_parts(outcome, fault.at, victim.ended_at),
        )
        await self._restore(kind, victim)
        return revival

    def _fault(self, kind: str, victim: Site) -> Fault:
        server = self._server
        acts: dict[str, Callable[[Site], float]] = {
            "kill": server.kill,
            "freeze": server.freeze,
            "blackhole": server.cut,
        }
        signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
        fault = Fault(site=victim, act=lambda: acts[kind](victim), delay_s=self._rng.uniform(0.0, self._shortest_s))
        if kind in signals and self._rng.random() < 0.5:
            after_numel = self._rng.randint(1, server.nbytes // 4)
            fault.by_itself = SelfFault(signal=signals[kind], after_numel=after_numel)
        return fault

    async def _restore(self, kind: str, victim: Site) -> None:
        server = self._server
        if kind == "freeze":
            server.thaw(victim)
        elif kind == "blackhole":
            server.heal(victim)
        if kind != "kill":
            await server.step(self._mode)  # the victim is back, but not in this view
        for _ in range(_MAX_RETURNS):
            await self._fill_up()
            outcome = await server.step(self._mode)
            if len(outcome.sites) == self._world_size:
                return
            self.put_out_again.append("\n".join(map(str, outcome.attempts)))
        raise FaultBenchError(f"{victim} cannot come back after its {kind}:\n" + "\n".join(self.put_out_again))

    async def _fill_up(self) -> None:
        for number in range(self._world_size):
            site = self._server.sites.get(number)
            if site is None or not site.is_alive:
                site = await self._server.launch(number)
            await self._server.readmit(site)


def _parts(outcome: Outcome, fault_at: float, ended_at: float) -> dict[str, float]:
    if len(outcome.attempts) < 2:
        return {}
    first, last = outcome.attempts[0], outcome.attempts[-1]
    felt_at = min([report.at for report in first.aborts() if report.suspects], default=last.posted_at)
    installed_at = max(report.posted_at for report in last.reports.values())
    ended_at = min(max(fault_at, ended_at), felt_at)
    return {
        "ended": ended_at - fault_at,
        "felt": felt_at - ended_at,
        "view": last.posted_at - felt_at,
        "installed": installed_at - last.posted_at,
        "operation": outcome.finished_at - installed_at,
    }
