# SPDX-License-Identifier: Apache-2.0
"""What outlives a peer's process: its newest checkpoints, unless the power went away while they were written."""

from tests.simulation.options import Options
from tests.simulation.symbols import State
from tests.simulation.world import World

NUM_KEPT = 2


class Disk:
    """A checkpoint is a file written beside the old one and renamed: it is there whole, or its damage is found."""

    def __init__(self, world: World, options: Options) -> None:
        self._world = world
        self._options = options
        self._files: list[tuple[float, State]] = []  # from when on it is durable, oldest first

    @property
    def state(self) -> State | None:
        """The newest checkpoint that can be read."""
        return self._files[-1][1] if self._files else None

    def copied(self) -> "Disk":
        """A copy of what can be read by now."""
        copy = Disk(self._world, self._options)
        copy._files = [item for item in self._files if item[0] <= self._world.now]
        return copy

    def write(self, state: State, *, flush: bool = False) -> None:
        """Begin to write a checkpoint; `flush` waits for it."""
        durable_at = self._world.now + (0.0 if flush else self._options.disk_lag_s)
        if self._files and self._files[-1][1] is state:
            self._files.pop()
        self._files = [*self._files[1 - NUM_KEPT :], (durable_at, state)]

    def crash(self, *, power_lost: bool) -> str:
        """The process is gone: what was still being written is lost. Says what became of the files."""
        kept = [item for item in self._files if item[0] <= self._world.now]
        lost = len(self._files) - len(kept)
        self._files = kept
        if power_lost and kept and self._world.rng.random() < self._options.torn_write:
            # Written, renamed, and never on the platter. Its checksum says so.
            self._files = kept[: self._world.rng.randrange(len(kept))]
            return "torn"
        return "lost" if lost else "whole"
