# SPDX-License-Identifier: Apache-2.0
"""A calm world in which a scenario does one thing on purpose."""

from collections.abc import Callable

from isthmus.elastic.core.place import Phase
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from tests.simulation.options import Options
from tests.simulation.parts import Parts
from tests.simulation.peer import PeerNode
from tests.simulation.simulator import Simulator

CALM = Options(train_s=(0.5, 0.6), latency_s=(0.01, 0.02), jitter_s=0.0)


class Stage:
    """A simulator whose peers start when the scenario says so. The checkers watch as ever."""

    def __init__(
        self,
        num_peers: int,
        *,
        seed: int = 1,
        parts: Parts | None = None,
        echo: Callable[[str], None] | None = None,
        **options: object,
    ) -> None:
        self.sim = Simulator(seed, options=CALM.with_(num_peers=num_peers, **options), parts=parts, echo=echo)
        self.sim.coordinator.start()
        self.peers = list(self.sim.peers.values())

    def start(self, *indices: int) -> None:
        for index in indices or range(len(self.peers)):
            self.peers[index].start()

    def run(self, duration_s: float) -> None:
        self.sim.world.run_until(self.sim.world.now + duration_s)

    def until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Let things happen until the condition holds; how long that took. Fails if it does not within the time."""
        begin = self.sim.world.now
        happened = self.sim.world.run_until(begin + within_s, stop=condition)
        assert happened, f"did not happen within {within_s} s"
        return self.sim.world.now - begin

    def until_active(self, *indices: int, within_s: float = 20.0) -> float:
        return self.until(lambda: all(self.is_active(self.peers[index]) for index in indices), within_s)

    def until_committed(self, more: int = 1, within_s: float = 20.0) -> float:
        goal = len(self.commits) + more
        return self.until(lambda: len(self.commits) >= goal, within_s)

    def is_active(self, node: PeerNode) -> bool:
        return node.machine is not None and node.machine.phase is Phase.ACTIVE

    @property
    def commits(self) -> list[CommitRecord]:
        return [record for record in self.sim.coordinator.journal if isinstance(record, CommitRecord)]

    @property
    def views(self) -> list[ViewRecord]:
        return [record for record in self.sim.coordinator.journal if isinstance(record, ViewRecord)]

    def members(self) -> list[str]:
        return [member.peer_id[-1] for member in self.views[-1].view.members]

    def longest_gap_s(self, duration_s: float) -> float:
        """Let time pass; the longest time without a commit in it."""
        gaps, last = [0.0], len(self.commits)
        begin = changed = self.sim.world.now
        while self.sim.world.now < begin + duration_s:
            self.run(0.05)
            if len(self.commits) != last:
                gaps.append(self.sim.world.now - changed)
                last, changed = len(self.commits), self.sim.world.now
        return max(*gaps, self.sim.world.now - changed)
