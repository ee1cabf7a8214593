# SPDX-License-Identifier: Apache-2.0
"""The wires of the simulated world: latency, jitter, cuts (also one-way), slow pairs, resets.

Sites are peer ids; the coordinator's site is `COORDINATOR`. Control connections are between a start of a peer and a
start of the coordinator. Bulk links are between two peers and carry a generation: a broken link takes everything that
was on it with it, as TCP does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.options import Options
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.coordinator_node import CoordinatorNode
    from tests.simulation.peer import PeerNode

COORDINATOR = "coordinator"
KEEPALIVE_S = (3.0, 7.0)
"""A cut this long breaks the connections across it, with a notice on both sides."""


class Network:
    """Who reaches whom, and how fast."""

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.options = options
        self.healed = False
        self._base: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], float] = {}
        self._cut_since: dict[tuple[str, str], float] = {}
        self._generation: dict[tuple[str, str], int] = {}
        self._dead: list[tuple[str, str]] = []
        self.on_keepalive: list[Callable[[str, str], None]] = []
        """Called when a cut has lasted too long for the connections across it."""
        self.on_redialled: list[Callable[[str, str], None]] = []
        """Called when such a cut has ended."""

    def latency_s(self, source: str, target: str) -> float:
        """One way, this time."""
        pair = (source, target)
        if pair not in self._base:
            self._base[pair] = self.world.rng.uniform(*self.options.latency_s)
        base = self._base[pair] * self._slow.get(pair, 1.0)
        return base + (self.world.rng.uniform(0.0, self.options.jitter_s) if self.options.jitter_s else 0.0)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from source to target."""
        return (source, target) in self._cut_since

    def is_broken(self, one: str, other: str, for_s: float = 0.0) -> bool:
        """Whether a connection between the two cannot live, since at least `for_s`."""
        since = [self._cut_since[pair] for pair in ((one, other), (other, one)) if pair in self._cut_since]
        return bool(since) and self.world.now - min(since) >= for_s

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target any more."""
        if (source, target) in self._cut_since:
            return
        self._cut_since[source, target] = since = self.world.now
        self.world.say("cut", source, "->", target)
        delay_s = self.world.rng.uniform(*KEEPALIVE_S)
        self.world.after(delay_s, f"keepalive {source} {target}", self._keepalive, source, target, since)

    def mend(self, source: str, target: str) -> None:
        """It does again."""
        if self._cut_since.pop((source, target), None) is None:
            return
        self.world.say("mend", source, "->", target)
        if pair_of(source, target) in self._dead and not self.is_broken(source, target):
            self._dead.remove(pair_of(source, target))
            for notify in self.on_redialled:
                notify(source, target)

    def slow_down(self, source: str, target: str, factor: float) -> None:
        """This direction takes `factor` times as long; 1 ends it."""
        self._slow[source, target] = factor

    def mend_all(self) -> None:
        """Everybody reaches everybody again."""
        for source, target in list(self._cut_since):
            self.mend(source, target)

    def heal(self) -> None:
        """End of all faults."""
        self.mend_all()
        self._slow.clear()
        self.healed = True

    def chance(self, probability: float) -> bool:
        """Whether a fault of the wire strikes now."""
        return not self.healed and probability > 0 and self.world.rng.random() < probability

    def generation(self, one: str, other: str) -> int:
        """Number of the link between two peers."""
        return self._generation.get(pair_of(one, other), 0)

    def renew(self, one: str, other: str) -> None:
        """The link between two peers broke; the next one has another number."""
        self._generation[pair_of(one, other)] = self.generation(one, other) + 1

    def _keepalive(self, source: str, target: str, since: float) -> None:
        if self._cut_since.get((source, target)) == since:
            self._dead.append(pair_of(source, target))
            self.renew(source, target)
            for notify in self.on_keepalive:
                notify(source, target)


def pair_of(one: str, other: str) -> tuple[str, str]:
    """The same for both orders."""
    return (one, other) if one < other else (other, one)


@dataclass(slots=True, eq=False)
class ControlConnection:
    """Between one start of a peer and one start of the coordinator. Each side learns by itself that it is over."""

    node: "PeerNode"
    coordinator: "CoordinatorNode"
    peer_start: int
    coordinator_start: int
    up_at_peer: bool = True
    up_at_coordinator: bool = True
    last_to_peer: float = 0.0
    last_to_coordinator: float = 0.0
