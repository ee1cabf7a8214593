"""What the processes of all sites have in common: they start again, are paused, and nothing outlives them."""

from collections.abc import Callable
from typing import Any

from tests.simulation.world import World


class Process:
    """One process at a site, start after start. What belonged to an older start never happens."""

    def __init__(self, world: World, site: str) -> None:
        self.world = world
        self.site = site
        self.start_number = 0
        self.alive = False
        self.paused_until = 0.0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def born(self) -> None:
        """A new process."""
        self.start_number += 1
        self.alive = True
        self.paused_until = 0.0
        self._backlog = []

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
        """A timer of this process."""
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
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run(self.start_number, action, *args)
