# SPDX-License-Identifier: Apache-2.0
"""One seed: real machines in a simulated world, first under faults, then healed.

Safety phase: whatever the options allow strikes at random; the checkers watch every step. Then everything heals,
what is down comes up (or stays down for good), and the run must go on: `NUM_LIVE_COMMITS` further commits by all
peers that are up, within `LIVENESS_S` of virtual time (endings.py). A run that nobody can continue, because every
holder of the committed state is gone for good, must say so to everybody within the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from tests.keys import Keys
from tests.simulation.bulk import Bulk
from tests.simulation.checkers import Checkers
from tests.simulation.control import Control
from tests.simulation.coordinator_node import CoordinatorNode
from tests.simulation.endings import Endings
from tests.simulation.faults import FaultInjector
from tests.simulation.marks import Marks
from tests.simulation.methods import plan_of, samples_per_round
from tests.simulation.network import Network
from tests.simulation.options import PATIENT_S, Options
from tests.simulation.parts import Parts
from tests.simulation.peer import PeerNode
from tests.simulation.world import OutOfBudget, Violation, World

MAX_EVENTS = 120_000
MAX_CPU_S = 30.0
ORPHAN_TIMEOUT_S = 40.0
RECOVER_S = 10.0
ODD_WEIGHTS = (1 / 3, 0.1, 0.7)
"""None is exact in few bits, and no two add up to a third."""
HANDOVER_TIMEOUT_S = 20.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of one seed."""

    seed: int
    violation: Violation | None = None
    num_commits: int = 0
    num_views: int = 0
    num_events: int = 0
    virtual_s: float = 0.0
    trace_hash: int = 0
    end: str = ""
    counters: dict[str, int] = field(default_factory=dict)


class Simulator:
    """Everything of one seed, and the wires between the nodes."""

    def __init__(
        self,
        seed: int,
        *,
        options: Options | None = None,
        parts: Parts | None = None,
        echo: Callable[[str], None] | None = None,
        check_machines: bool = True,
    ) -> None:
        self.world = World(seed, max_events=MAX_EVENTS, max_cpu_s=MAX_CPU_S, echo=echo)
        self.options = options if options is not None else Options.of_seed(seed)
        self.parts = parts if parts is not None else Parts()
        self.plan = plan_of(self.options)
        self.check_machines = check_machines
        self._looks = 0
        self.manifest = bytes(32)
        self.keys = Keys()
        self.coordinator_config = CoordinatorConfig(
            manifest_digest=self.manifest,
            sealer=self.keys.of_the_run,
            rebuild_grace_s=2.0,
            outer_steps=self.options.outer_steps,
            round_inner_steps=2,
            min_peers=self.options.min_peers,
            start_peers=self.options.start_peers,
            stall_floor_s=self.options.stall_floor_s,
            stall_initial_s=2 * self.options.stall_floor_s,
            recover_grace_s=3.0,
            recover_s=RECOVER_S,
            orphan_timeout_s=ORPHAN_TIMEOUT_S,
            handover_timeout_s=HANDOVER_TIMEOUT_S,
            grace_floor_s=self.options.grace_floor_s,
            grace_initial_s=6.0,
            weight_per_sample=1.0,
            samples_per_round=samples_per_round(self.options),
        )
        self.marks = Marks()
        self.network = Network(self.world, self.options)
        self.control = Control(self)
        self.bulk = Bulk(self)
        self.coordinator = CoordinatorNode(self)
        names = [f"{index + 1:016x}" for index in range(self.options.num_peers)]
        self.peers = {peer_id: PeerNode(self, peer_id) for peer_id in names}
        self.ghosts: list[PeerNode] = []
        self._newest_starts: dict[str, int] = {}  # also of those that are over (seed 9289)
        """Older starts that live on beside the copy of their folder."""
        self.were_copied: set[PeerNode] = set()
        self._speed = {peer_id: self.world.rng.choice((1.0, 1.0, 1.5)) for peer_id in self.peers}
        if self.options.clock_drift:
            for site in (self.coordinator, *self.peers.values()):
                site.clock.rate = 1.0 + self.options.clock_drift * self.world.rng.uniform(-1.0, 1.0)
        self._wrong = list(self.peers)[-1] if self.options.wrong_manifest and len(self.peers) > 1 else None
        self._liar = list(self.peers)[len(self.peers) // 2] if self.options.lie and len(self.peers) > 1 else None
        self.checkers = Checkers(self)
        self.world.say("options:", self.options)

    # ------------------------------------------------------------------------ phases

    def run(self, plot: Callable[[], str] | None = None) -> Outcome:
        """What the seed's faults make of it, or a `plot`. A violation ends the run and is part of the outcome."""
        outcome = Outcome(seed=self.world.seed)
        try:
            outcome.end = plot() if plot is not None else self.both_phases()
        except Violation as violation:
            outcome.violation = violation
        except OutOfBudget as error:
            outcome.violation = Violation("I4", f"the run does not come to rest: {error}")
        except AssertionError as error:
            outcome.violation = Violation("assertion", where(error))
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            outcome.violation = Violation("crash", f"{type(error).__name__}: {where(error)}")
        records = self.coordinator.journal
        outcome.num_commits = sum(isinstance(record, CommitRecord) for record in records)
        outcome.num_views = sum(isinstance(record, ViewRecord) for record in records)
        outcome.num_events = self.world.num_events
        outcome.virtual_s = self.world.now
        outcome.trace_hash = self.world.trace_hash
        outcome.counters = self._marks(outcome.end)
        return outcome

    def _marks(self, end: str) -> dict[str, int]:
        self.marks.coordinator_ended(self.coordinator)
        for node in self.peers.values():
            if node.alive:
                self.marks.peer_ended(node)
        self.marks[f"end: {end}"] += 1
        self.marks["weights: odd"] += self.options.has_odd_weights
        return {mark: number for mark, number in self.marks.items() if number}

    def both_phases(self) -> str:
        """Faults, then none. The legitimate end that the run has come to."""
        self.start()
        FaultInjector(self).arm()
        self.world.run_until(self.options.safety_s)
        return self.heal_and_converge()

    def start(self) -> None:
        """The coordinator, then the peers: most at once, the late ones during the run."""
        self.coordinator.start()
        nodes = list(self.peers.values())
        num_early = len(nodes) - self.options.num_late
        for index, node in enumerate(nodes):
            delay_s = self.world.rng.uniform(0.0, 0.5 if index < num_early else self.options.safety_s)
            self.world.after(delay_s, f"start {node.peer_id}", node.start)

    def heal_and_converge(self) -> str:
        """End of the faults: the run must go on, or end in a way that is told to everybody."""
        self.world.say("---- all faults end")
        self.network.heal()
        self.coordinator.start()
        self.coordinator.resume(now=True)
        self.coordinator.store_is_back()
        self.coordinator.insist()
        self.checkers.patience.healed()
        rng = self.world.rng
        everybody_back = rng.random() < 0.5
        for ghost in self.ghosts:
            ghost.resume(now=True)
            if ghost.is_up:
                self.peers[ghost.peer_id].start()
        for node in self.peers.values():
            node.resume(now=True)
            if node.hung and rng.random() < 0.5:
                node.hang(False)
            # Whoever stays silent costs the others a deadline each time it is a member again.
            if not node.votes and (rng.random() < 0.5 or self.options.stall_floor_s > PATIENT_S):
                node.hang_absorb(False)
            node.next_undialled_by = frozenset()
            if node.undialled_by and (rng.random() < 0.5 or not self._can_do_without(node)):
                self.bulk.becomes_dialable(node)
            if not node.alive and (everybody_back or rng.random() < 0.5):
                node.start()
        # As many as the run needs, and somebody who has its state, as long as there is anybody.
        for node in self.peers.values():
            core = self.core()
            holder_up = any(self.checkers.holds_newest(item) for item in core)
            if len(core) < self.quorum or not holder_up:
                node.hang(False)
                if not node.votes:
                    node.hang_absorb(False)
                self.bulk.becomes_dialable(node)
                node.start()
        # Who stands still must be fewer than those who work: two silent ones of three keep the third out (seed 1587),
        # and four that hang of six cost more deadlines than this run has time for (seed 2712).
        up = [node for node in self.peers.values() if node.is_up]
        still = [node for node in up if node.stands_still]
        if 2 * len(still) >= len(up):
            for node in still:
                node.hang(False)
                if not node.votes:
                    node.hang_absorb(False)
        if not any(map(self._brings_the_state, self.core())):
            for node in self.peers.values():
                self.bulk.becomes_dialable(node)
        # Who is a member, or dials all others and will be one, may be the last of them: then nobody can fetch from it
        # (seeds 16429, 84379).
        members = {member.ref for member in self.checkers.history.members()}
        first = min((node.peer_id for node in self.peers.values() if node.is_up), default=None)
        for node in self.peers.values():
            if node.undialled_by and (node.ref in members or node.peer_id == first):
                self.bulk.becomes_dialable(node)
        return Endings(self, self.checkers).converge()

    def _can_do_without(self, node: PeerNode) -> bool:
        """Whether this peer may stay out of reach: it gave nothing yet, and nobody else will make way.

        Members that have no link with somebody make way for who came before them. But where the others may be put out
        or stand still, it may be all that is left of the run.
        """
        options = self.options
        others_stay = not (options.evict_rate or options.hang_rate or options.hung_absorb_rate)
        return others_stay and self.checkers.history.is_newcomer(node.peer_id)

    def _brings_the_state(self, node: PeerNode) -> bool:
        """Whether others can go on from this peer. Else a newcomer brings the state, and must be within reach.

        Who fetches dials: from a sole member that nobody can dial nobody gets the state (seeds 3389, 7707, 9447).
        """
        history = self.checkers.history
        members = {member.ref for member in history.members()}
        is_known = history.was_in_a_commit(node.peer_id) and (not members or node.ref in members)
        return is_known and not node.is_leaving and self.checkers.holds_newest(node)

    @property
    def quorum(self) -> int:
        """How many members a commit needs now."""
        options = self.options
        return options.min_peers if self.checkers.history.has_begun else max(options.min_peers, options.start_peers)

    def core(self) -> list[PeerNode]:
        """The peers that have to be members in the end."""
        fit = [node for node in self.peers.values() if node.is_up and not node.stands_still and not node.undialled_by]
        return [node for node in fit if not self.has_wrong_manifest(node)]

    # ------------------------------------------------------------------------ who is how

    def clone(self, node: PeerNode) -> None:
        """Somebody starts a copy of the folder of a running peer. The older start goes on beside it."""
        self.world.say(node.peer_id, "is copied, and the copy starts")
        self.ghosts.append(node)
        self.were_copied.add(node)
        self.peers[node.peer_id] = copy = node.copied()
        copy.start()

    def take_over(self, paused_s: float) -> None:
        """Another coordinator leads from now on; the one before hears of that when it is awake and writes."""
        former = self.coordinator
        if former.alive:
            self.world.say("another coordinator takes over")
            former.pause(paused_s)
            self.coordinator = former.successor()
            self.control.leave_coordinator(former)
            self.coordinator.start()

    def is_over(self, node: PeerNode) -> None:
        """The process of a peer has ended for good. If an older start lives on, that is the peer now."""
        older = [ghost for ghost in self.older_starts(node.peer_id) if ghost.is_up]
        if older and self.peers[node.peer_id] is node:
            self.peers[node.peer_id] = older[-1]
            self.ghosts.remove(older[-1])

    def older_starts(self, peer_id: str) -> list[PeerNode]:
        return [ghost for ghost in self.ghosts if ghost.peer_id == peer_id]

    def number_of_new_start(self, node: PeerNode) -> int:
        """A start's number is the time of day: no two copies of a folder have the same, and the newer is the peer."""
        if node in self.ghosts:
            self.were_copied.add(self.peers[node.peer_id])
            self.ghosts[self.ghosts.index(node)] = self.peers[node.peer_id]
            self.peers[node.peer_id] = node
        number = 1 + max(node.incarnation, self._newest_starts.get(node.peer_id, 0))
        self._newest_starts[node.peer_id] = number
        return number

    def looks_into_machines(self) -> bool:
        """Whether a machine asserts its own invariants now: every third time, since that costs a tenth of a seed."""
        self._looks += 1
        return self.check_machines and self._looks % 3 == 0

    def has_wrong_manifest(self, node: PeerNode) -> bool:
        return node.peer_id == self._wrong

    def lie_of(self, peer_id: str) -> str:
        """What this site says that is not true, as long as there are faults; see Options."""
        views = self.checkers.history.views
        is_pair = not views or views[-1].world_size < 3  # between two nobody can say whose result is right
        if peer_id != self._liar or self.network.healed or (is_pair and self.options.lie in ("digest", "two_results")):
            return ""
        return self.options.lie

    def is_liar(self, peer_id: str) -> bool:
        """Whether this site lies, or did."""
        return peer_id == self._liar

    def weight_of(self, node: PeerNode) -> float:
        """Of one sample."""
        return ODD_WEIGHTS[int(node.peer_id, 16) % len(ODD_WEIGHTS)] if self.options.has_odd_weights else 1.0

    def speed_of(self, node: PeerNode) -> float:
        return self._speed[node.peer_id]


def where(error: Exception) -> str:
    """What a machine raised, and where."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return f"{error} ({place})"
