# SPDX-License-Identifier: Apache-2.0
"""What the processes of all sites have in common: they start again, are paused, and have clocks."""

from collections.abc import Callable
from typing import Any, Protocol

from isthmus.collective.core.types import Instant
from tests.simulation.world import World

CLOCK_RESOLUTION_S = 1e-9


class Machine(Protocol):
    """What a process drives."""

    def next_deadline(self) -> Instant | None: ...


class Clock:
    """A site's monotonic clock: it runs at a rate of its own, and may jump forward as after a suspend."""

    def __init__(self, world: World) -> None:
        self.rate = 1.0
        self._world = world
        self._ahead_s = 0.0

    def now(self) -> Instant:
        return self._world.now * self.rate + self._ahead_s

    def jump(self, forward_s: float) -> None:
        self._ahead_s += forward_s

    def when(self, instant: Instant) -> float:
        """The time of the world at which this clock will show `instant`, or just after."""
        return (instant - self._ahead_s) / self.rate + CLOCK_RESOLUTION_S


class Process:
    """One process at a site, start after start. What belonged to an older start never happens."""

    def __init__(self, world: World, site: str) -> None:
        self.world = world
        self.site = site
        self.clock = Clock(world)
        self.start_number = 0
        self.alive = False
        self.paused_until = 0.0
        self.awake_since = 0.0
        """Since when nothing that happens to it has waited."""
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tick_at: Instant | None = None

    # ------------------------------------------------------------------------ life

    def born(self) -> None:
        """A new process."""
        self.start_number += 1
        self.alive = True
        self.paused_until = 0.0
        self.awake_since = self.world.now
        self._backlog = []
        self._tick_at = None

    def gone(self) -> None:
        """It is no more, and with it all that waited for it."""
        self.start_number += 1
        self.alive = False
        self.paused_until = 0.0

    def run(self, start: int, action: Callable[..., None], *args: Any) -> None:
        """Do something in this process, if it is still the same one; later, if it is paused."""
        if start != self.start_number or not self.alive:
            return
        if self.world.now < self.paused_until:
            self._backlog.append((action, args))
            return
        action(*args)

    def later(self, delay_s: float, label: str, action: Callable[..., None], *args: Any) -> None:
        """A timer of this process, by its own clock."""
        delay_s /= self.clock.rate
        self.world.after(delay_s, f"{label} {self.site}", self.run, self.start_number, action, *args)

    def pause(self, duration_s: float) -> None:
        """It stands still, as after SIGSTOP: whatever happens to it waits."""
        self.paused_until = max(self.paused_until, self.world.now + duration_s)
        self.world.say(self.site, f"paused for {duration_s:.2f}")
        self.world.after(duration_s, f"resume {self.site}", self.resume)

    def resume(self, *, now: bool = False) -> None:
        """It goes on, if no other pause lasts longer."""
        if now:
            self.paused_until = 0.0
        if self.world.now < self.paused_until:
            return
        self.awake_since = self.world.now
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run(self.start_number, action, *args)

    # ------------------------------------------------------------------------ the machine's deadlines

    def jump(self, forward_s: float) -> None:
        """Its clock jumps: what was to happen until then is due."""
        self.world.say("the clock of", self.site, f"jumps by {forward_s:.2f}")
        self.clock.jump(forward_s)
        if self.alive:
            self._tick_at = None
            self.arm()

    def deadline(self) -> Instant | None:
        """When the machine wants to be woken."""
        raise NotImplementedError

    def on_deadline(self) -> None:
        """Wake it."""
        raise NotImplementedError

    def arm(self) -> None:
        """Wake the machine at its next deadline."""
        deadline = self.deadline()
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            when = self.clock.when(deadline)
            self.world.at(when, f"tick {self.site}", self.run, self.start_number, self._tick, deadline)

    def _tick(self, due: Instant) -> None:
        if self._tick_at != due:
            return
        self._tick_at = None
        deadline = self.deadline()
        if deadline is not None and deadline <= self.clock.now():
            self.on_deadline()
        else:
            self.arm()
