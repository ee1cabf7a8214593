# SPDX-License-Identifier: Apache-2.0
"""One seed of the collective layer alone: peers with operations in flight under a simple view server, with faults.

Safety phase: whatever the options allow strikes at random. Then everything heals, what is down comes up, and the run
must go on: `NUM_LIVE_COMMITS` further steps by a view of all peers within `LIVENESS_S` of virtual time.
"""

import random
from collections.abc import Callable, Mapping

from isthmus.collective.core.apart import Pair
from isthmus.collective.core.slices import SlicePlan
from isthmus.collective.core.types import PeerId, View
from tests.simulation.rounds.checker import LIVENESS_S, NUM_LIVE_COMMITS, RoundChecker
from tests.simulation.rounds.faults import RoundFaults
from tests.simulation.rounds.network import Network
from tests.simulation.rounds.options import RoundOptions
from tests.simulation.rounds.parts import RoundParts
from tests.simulation.rounds.peer import Peer
from tests.simulation.rounds.server import ViewServer
from tests.simulation.simulator import Outcome, where
from tests.simulation.world import OutOfBudget, Violation, World

MAX_EVENTS = 100_000
MAX_CPU_S = 20.0


class RoundSimulator:
    """Everything of one seed. `focus` fixes some of the options that the seed would draw."""

    def __init__(
        self,
        seed: int,
        *,
        options: RoundOptions | None = None,
        parts: RoundParts | None = None,
        focus: Mapping[str, object] | None = None,
        echo: Callable[[str], None] | None = None,
        check_machines: bool = True,
    ) -> None:
        self.world = World(seed, max_events=MAX_EVENTS, max_cpu_s=MAX_CPU_S, echo=echo)
        drawn = options if options is not None else RoundOptions.draw(self.world.rng)
        self.options = drawn.with_(**(focus or {}))
        self.parts = parts if parts is not None else RoundParts()
        self.check_machines = check_machines
        self.network = Network(self.world, self.options)
        self.checker = RoundChecker(self)
        self.server = ViewServer(self)
        self.faults = RoundFaults(self)
        names = [PeerId(f"{index + 1:016x}") for index in range(self.options.num_peers)]
        self.peers = {peer_id: Peer(self, peer_id) for peer_id in names}
        self.network.peers.update({str(peer_id): peer for peer_id, peer in self.peers.items()})
        self._plans: dict[tuple[int, int, tuple[Pair, ...]], SlicePlan] = {}
        self.world.say("options:", self.options)

    def run(self) -> Outcome:
        """Both phases. A violation ends the run and is part of the outcome."""
        outcome = Outcome(seed=self.world.seed)
        try:
            self.start()
            self.faults.arm()
            self.world.run_until(
                self.options.safety_s, stop=lambda: self.server.num_commits >= self.options.max_commits
            )
            self.heal_and_converge()
            outcome.end = "goes on"
        except Violation as violation:
            outcome.violation = violation
        except OutOfBudget as error:
            outcome.violation = Violation("I4", f"the run does not come to rest: {error}")
        except AssertionError as error:
            outcome.violation = Violation("assertion", where(error))
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            outcome.violation = Violation("crash", f"{type(error).__name__}: {where(error)}")
        outcome.num_commits = self.server.num_commits
        outcome.num_views = len(self.server.views)
        outcome.num_events = self.world.num_events
        outcome.virtual_s = self.world.now
        outcome.trace_hash = self.world.trace_hash
        outcome.counters = dict(self.checker.counters)
        return outcome

    def start(self) -> None:
        """All peers, then the first view."""
        for peer in self.peers.values():
            self.world.after(self.world.rng.uniform(0.0, 0.1), "start", peer.start)
        self.server.start()

    def heal_and_converge(self) -> None:
        """End of the faults: the steps must go on with everybody."""
        self.world.say("---- all faults end")
        self.network.heal()
        for peer in self.peers.values():
            peer.paused_until = min(peer.paused_until, self.world.now)
            peer.resume()
            peer.jammed_until = min(peer.jammed_until, self.world.now)
            peer.unjam()
            peer.start()
        first_commit = -1

        def goes_on() -> bool:
            nonlocal first_commit
            everybody = {peer.ref for peer in self.peers.values()}
            if not self.server.views or {member.ref for member in self.server.view.members} != everybody:
                first_commit = -1
            elif first_commit < 0:
                first_commit = self.server.num_commits
            return first_commit >= 0 and self.server.num_commits >= first_commit + NUM_LIVE_COMMITS

        if not self.world.run_until(self.world.now + LIVENESS_S, stop=goes_on):
            running = [item.name for peer in self.peers.values() for item in peer.rounds.values()]
            raise Violation(
                "I4", f"healed, but it does not go on: {running} under way in view {self.server.view.epoch}"
            )
        self.checker.at_rest()

    def plan_of(self, view: View, fragment: int) -> SlicePlan:
        """The same at everybody: it follows from the view."""
        name = (view.world_size, fragment, view.apart)
        if name not in self._plans:
            rng = random.Random(f"{self.world.seed} {name}")
            self._plans[name] = self.options.draw_plan(
                self.options.plans[fragment], view.world_size, rng, frozenset(view.apart)
            )
        return self._plans[name]
