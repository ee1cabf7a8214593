# SPDX-License-Identifier: Apache-2.0
"""Virtual time: a heap of things to happen, one source of chance, one trace.

Everything in a simulated run happens because it was put on this heap, in the order of (time, sequence number), and
every random choice comes from the world's `rng`. So a seed determines a run, and the trace hash proves it.
"""

import ast
import heapq
import random
import re
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

from isthmus.collective.core.types import PeerRef
from tests.simulation.symbols import name

_pack_instant = struct.Struct("<d").pack
_DIGEST = re.compile(r"""b'(?:[^'\\\\]|\\\\.)*'|b"(?:[^"\\\\]|\\\\.)*\"""")


class Violation(Exception):
    """An invariant does not hold. `invariant` is its number in ARCHITECTURE.md §8."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.what = what


def demand(holds: bool, invariant: str, what: str, *details: object) -> None:
    """Raise a violation unless it holds. The words are put together only then."""
    if not holds:
        shown = [name(item) if isinstance(item, PeerRef) else item for item in details]
        raise Violation(invariant, what.format(*shown) if details else what)


class OutOfBudget(Exception):
    """The seed needs too many events or too much of the processor: a message storm, or a loop."""


class World:
    """Clock, chance and trace of one seed."""

    def __init__(self, seed: int, *, max_events: int, max_cpu_s: float, echo: Callable[[str], None] | None = None):
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(seed)
        self.trace_hash = 0
        self.num_events = 0
        self.echo = echo
        self._heap: list[tuple[float, int, str, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._max_events = max_events
        # Time of this process, not of the wall: on a busy machine a seed may get little of it.
        self._deadline = time.process_time() + max_cpu_s
        self._max_cpu_s = max_cpu_s

    def at(self, when: float, label: str, action: Callable[..., None], *args: Any) -> None:
        """Let `action(*args)` happen at this time."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(when, self.now), self._sequence, label, action, args))

    def after(self, delay_s: float, label: str, action: Callable[..., None], *args: Any) -> None:
        """Let `action(*args)` happen in `delay_s`."""
        self.at(self.now + delay_s, label, action, *args)

    def run_until(self, when: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let things happen until this time or until `stop()`; True if it stopped."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            if stop is not None and stop():
                return True
            self.now, _, label, action, args = heapq.heappop(heap)
            self.num_events += 1
            self.trace_hash = zlib.crc32(label.encode(), zlib.crc32(_pack_instant(self.now), self.trace_hash))
            if self.num_events & 255 == 0:
                self._check_budget()
            action(*args)
        self.now = max(self.now, when)
        return stop is not None and stop()

    def _check_budget(self) -> None:
        if self.num_events > self._max_events:
            raise OutOfBudget(f"more than {self._max_events} events")
        if time.process_time() > self._deadline:
            raise OutOfBudget(f"more than {self._max_cpu_s} s of processor time")

    def say(self, *what: object) -> None:
        """One line of the story, for `--trace`."""
        if self.echo is not None:
            line = _DIGEST.sub(lambda match: _short_digest(match[0]), " ".join(str(item) for item in what))
            self.echo(f"{self.now:10.4f}  {line.replace('0' * 14, '')}")


def _short_digest(literal: str) -> str:
    value: bytes = ast.literal_eval(literal)
    return "#" + value.hex()[:6]
