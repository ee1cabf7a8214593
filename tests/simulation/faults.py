"""What strikes during the safety phase, each fault class on its own clock."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic.core.events import LeaveRequested
from tests.simulation.network import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


class FaultInjector:
    """Strikes at random times until the network is healed."""

    def __init__(self, sim: "Simulator") -> None:
        self.sim = sim
        self.rng = sim.world.rng

    def arm(self) -> None:
        options = self.sim.options
        self._every(options.crash_rate, "crash", self.crash_peer)
        self._every(options.pause_rate, "pause", self.pause_peer)
        self._every(options.hang_rate, "hang", self.hang_peer)
        self._every(options.leave_rate, "leave", self.leave_peer)
        self._every(options.link_break_rate, "link break", self.break_link)
        self._every(options.reset_rate, "reset", self.reset_connection)
        self._every(options.cut_rate, "cut", self.cut)
        self._every(options.slow_rate, "slow", self.slow_down)
        self._every(options.coordinator_crash_rate, "coordinator crash", self.sim.coordinator.crash)
        self._every(options.disk_loss_rate, "disk loss", self.sim.coordinator.lose_disk)
        self._every(options.coordinator_pause_rate, "coordinator pause", self.pause_coordinator)

    def _every(self, rate: float, label: str, strike: Callable[[], None]) -> None:
        if rate <= 0:
            return

        def again() -> None:
            if not self.sim.network.healed:
                strike()
                self.sim.world.after(self.rng.expovariate(rate), label, again)

        self.sim.world.after(self.rng.expovariate(rate), label, again)

    def _somebody(self) -> "PeerNode | None":
        nodes = [node for node in self.sim.peers.values() if node.alive]
        return self.rng.choice(nodes) if nodes else None

    def _site(self) -> str:
        return self.rng.choice([*self.sim.peers, COORDINATOR])

    def crash_peer(self) -> None:
        node = self._somebody()
        if node is None:
            return
        node.crash(silently=self.rng.random() < self.sim.options.silent_death)
        if self.rng.random() < 0.8:
            self.sim.world.after(self.rng.uniform(0.05, 8.0), f"restart {node.peer_id}", self._restart, node)

    def _restart(self, node: "PeerNode") -> None:
        if not self.sim.network.healed:
            node.start()

    def pause_peer(self) -> None:
        node = self._somebody()
        if node is not None:
            node.pause(self.rng.choice((0.3, 2.0, 4.0, 7.0)) * self.rng.uniform(0.5, 1.2))

    def hang_peer(self) -> None:
        node = self._somebody()
        if node is not None:
            node.hung = True
            self.sim.world.say(node.peer_id, "hangs, but its heart beats")
            if self.rng.random() < 0.5:
                node.later(self.rng.uniform(1.0, 10.0), "unhang", setattr, node, "hung", False)

    def leave_peer(self) -> None:
        node = self._somebody()
        if node is None:
            return
        now = self.rng.random() < self.sim.options.leave_now
        self.sim.world.say(node.peer_id, "wants to leave", "now" if now else "")
        node.run(node.start_number, node.feed, LeaveRequested(now=now))
        if self.rng.random() < 0.7:
            self.sim.world.after(self.rng.uniform(5.0, 15.0), f"return {node.peer_id}", self._restart, node)

    def break_link(self) -> None:
        one, other = self._somebody(), self._somebody()
        if one is not None and other is not None and one is not other:
            self.sim.break_link(one, other)

    def reset_connection(self) -> None:
        node = self._somebody()
        if node is not None:
            self.sim.world.say("control connection of", node.peer_id, "is reset")
            self.sim.break_connection(node)

    def cut(self) -> None:
        """Between two sites, in one or both directions, or around one site."""
        network = self.sim.network
        one = self._site()
        others = [site for site in (*self.sim.peers, COORDINATOR) if site != one]
        if self.rng.random() < 0.6:
            others = [self.rng.choice(others)]
        ways = self.rng.choice(("out", "in", "both", "both"))
        pairs = [(one, other) for other in others if ways != "in"] + [(other, one) for other in others if ways != "out"]
        for source, target in pairs:
            network.cut(source, target)
        self.sim.world.after(self.rng.choice((0.5, 3.0, 10.0)) * self.rng.uniform(0.5, 1.5), "mend", self._mend, pairs)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        for source, target in pairs:
            self.sim.network.mend(source, target)

    def slow_down(self) -> None:
        source, target = self._site(), self._site()
        self.sim.network.slow_down(source, target, self.rng.choice((3.0, 10.0, 30.0)))
        self.sim.world.after(self.rng.uniform(2.0, 8.0), "speed up", self.sim.network.slow_down, source, target, 1.0)

    def pause_coordinator(self) -> None:
        if self.sim.coordinator.alive:
            self.sim.coordinator.pause(self.rng.choice((0.5, 3.0, 8.0)) * self.rng.uniform(0.5, 1.2))
