# SPDX-License-Identifier: Apache-2.0
"""What strikes while the safety phase lasts, each fault class on its own clock."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.rounds.network import SERVER
from tests.simulation.rounds.options import ROUND_S

if TYPE_CHECKING:
    from tests.simulation.rounds.peer import Peer
    from tests.simulation.rounds.simulator import RoundSimulator


class RoundFaults:
    """Strikes at random times until the network is healed."""

    def __init__(self, sim: "RoundSimulator") -> None:
        self.sim = sim
        self.rng = sim.world.rng

    def arm(self) -> None:
        options = self.sim.options
        self._every(options.crash_rate, self.crash)
        self._every(options.pause_rate, self.pause)
        self._every(options.jam_rate, self.jam)
        self._every(options.cut_rate, self.cut)
        self._every(options.break_rate, self.break_link)
        self._every(options.view_rate, self.sim.server.change_for_no_reason)
        self._every(options.cancel_rate, self.cancel)

    def _every(self, rate: float, strike: Callable[[], None]) -> None:
        def again() -> None:
            if not self.sim.network.healed:
                strike()
                self.sim.world.after(self.rng.expovariate(rate), "fault", again)

        if rate > 0:
            self.sim.world.after(self.rng.expovariate(rate), "fault", again)

    def _somebody(self) -> "Peer | None":
        alive = [peer for peer in self.sim.peers.values() if peer.alive]
        return self.rng.choice(alive) if alive else None

    def crash(self) -> None:
        peer = self._somebody()
        if peer is not None:
            peer.crash(silently=self.rng.random() < self.sim.options.silent_death)
            self.restart_later(peer)

    def restart_later(self, peer: "Peer") -> None:
        if self.rng.random() < 0.8:
            self.sim.world.after(self.rng.uniform(0.05, 3.0), "restart", self._restart, peer)

    def _restart(self, peer: "Peer") -> None:
        if not self.sim.network.healed:
            peer.start()

    def pause(self) -> None:
        peer = self._somebody()
        if peer is not None:
            peer.pause(self.rng.choice((0.3, 1.0, 2.5)) * self.rng.uniform(0.5, 1.5))

    def jam(self) -> None:
        """Not one after the other: whom nobody can blame, since others' chunks go through it, would hold a round up."""
        peer, since = self._somebody(), self.sim.world.now - ROUND_S / 2
        if peer is not None and all(other.jammed_until < since for other in self.sim.peers.values()):
            peer.jam(self.rng.choice((0.3, 1.0, 2.5)) * self.rng.uniform(0.5, 1.5))

    def cut(self) -> None:
        """Between two sites, in one way or both, or around one site, the server included."""
        network = self.sim.network
        sites = [*self.sim.peers, SERVER]
        one = self.rng.choice(list(self.sim.peers))
        others = [site for site in sites if site != one]
        if self.rng.random() < 0.7:
            others = [SERVER if self.rng.random() < 0.3 else self.rng.choice(others)]
        ways = self.rng.choice(("out", "in", "both"))
        pairs = [(one, other) for other in others if ways != "in"] + [(other, one) for other in others if ways != "out"]
        for source, target in pairs:
            network.cut(source, target)
        self.sim.world.after(self.rng.choice((0.3, 2.0, 5.0)) * self.rng.uniform(0.5, 1.5), "mend", self._mend, pairs)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        for source, target in pairs:
            self.sim.network.mend(source, target)

    def break_link(self) -> None:
        if len(self.sim.peers) > 1:
            one, other = self.rng.sample(list(self.sim.peers), 2)
            self.sim.network.break_link(one, other)

    def cancel(self) -> None:
        peer = self._somebody()
        if peer is not None:
            peer.run(peer.start_number, peer.cancel_something)
