"""One seed: real machines in a simulated world, first under faults, then healed.

Safety phase: whatever the options allow strikes at random; the checkers watch every step. Then everything heals,
what is down comes up (or stays down for good), and the run must go on: `NUM_LIVE_COMMITS` further commits by all
peers that are up, within `LIVENESS_S` of virtual time (checkers.py). A run that nobody can continue, because every
holder of the committed state is gone for good, must say so to everybody within the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from collective.core.types import PeerRef
from elastic.core.config import CoordinatorConfig
from elastic.core.events import Connected, Disconnected
from elastic.core.messages import CoordinatorMessage, Join, PeerMessage
from elastic.core.records import CommitRecord, ViewRecord
from tests.simulation.checkers import Checkers
from tests.simulation.coordinator_node import CoordinatorNode
from tests.simulation.exchange import Frame
from tests.simulation.faults import FaultInjector
from tests.simulation.network import COORDINATOR, ControlConnection, Network
from tests.simulation.options import Options
from tests.simulation.parts import Parts
from tests.simulation.peer import PeerNode
from tests.simulation.rebuilds import forge
from tests.simulation.symbols import State
from tests.simulation.transfer import Transfer
from tests.simulation.world import OutOfBudget, Violation, World

MAX_EVENTS = 120_000
MAX_CPU_S = 30.0
ORPHAN_TIMEOUT_S = 40.0
LINK_RENEWAL_S = 0.1


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
        self.options = options if options is not None else Options.draw(self.world.rng)
        self.parts = parts if parts is not None else Parts()
        self.check_machines = check_machines
        self.manifest = bytes(32)
        self.seal_key = b"\5" * 32
        self.coordinator_config = CoordinatorConfig(
            manifest_digest=self.manifest,
            seal_key=self.seal_key,
            rebuild_grace_s=2.0,
            outer_steps=self.options.outer_steps,
            min_peers=self.options.min_peers,
            stall_floor_s=3.0,
            stall_initial_s=6.0,
            recover_grace_s=3.0,
            orphan_timeout_s=ORPHAN_TIMEOUT_S,
        )
        self.network = Network(self.world, self.options)
        self.network.on_keepalive.append(self._on_keepalive)
        self.network.on_redialled.append(self._on_redialled)
        self.coordinator = CoordinatorNode(self)
        names = [f"{index + 1:016x}" for index in range(self.options.num_peers)]
        self.peers = {peer_id: PeerNode(self, peer_id) for peer_id in names}
        self._speed = {peer_id: self.world.rng.choice((1.0, 1.0, 1.5)) for peer_id in self.peers}
        self._wrong = list(self.peers)[-1] if self.options.wrong_manifest and len(self.peers) > 1 else None
        self.checkers = Checkers(self)
        self.world.say("options:", self.options)

    # ------------------------------------------------------------------------ phases

    def run(self) -> Outcome:
        """Both phases. A violation ends the run and is part of the outcome."""
        outcome = Outcome(seed=self.world.seed)
        try:
            self.start()
            FaultInjector(self).arm()
            self.world.run_until(self.options.safety_s)
            outcome.end = self.heal_and_converge()
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
        return outcome

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
        self.coordinator.insist()
        rng = self.world.rng
        everybody_back = rng.random() < 0.5
        for node in self.peers.values():
            node.resume(now=True)
            if node.hung and rng.random() < 0.5:
                node.hung = False
            if not node.alive and (everybody_back or rng.random() < 0.5):
                node.start()
        # As many as the run needs, and somebody who has its state, as long as there is anybody.
        for node in self.peers.values():
            core = self.core()
            holder_up = any(self.checkers.holds_newest(item) for item in core)
            if len(core) < self.options.min_peers or not holder_up:
                node.hung = False
                node.start()
        return self.checkers.converge()

    def core(self) -> list[PeerNode]:
        """The peers that have to be members in the end."""
        return [
            node for node in self.peers.values() if node.is_up and not node.hung and not self.has_wrong_manifest(node)
        ]

    # ------------------------------------------------------------------------ who is how

    def has_wrong_manifest(self, node: PeerNode) -> bool:
        return node.peer_id == self._wrong

    def speed_of(self, node: PeerNode) -> float:
        return self._speed[node.peer_id]

    # ------------------------------------------------------------------------ control connections

    def dial(self, node: PeerNode) -> None:
        """The peer's process dials the coordinator until it answers."""
        node.later(self.network.latency_s(node.peer_id, COORDINATOR), "dial", self._try_to_connect, node)

    def _try_to_connect(self, node: PeerNode) -> None:
        if node.exit is not None or node.connection is not None:
            return
        if not self.coordinator.alive or self.network.is_broken(node.peer_id, COORDINATOR):
            node.later(self.world.rng.uniform(0.1, 0.4), "redial", self._try_to_connect, node)
            return
        connection = ControlConnection(node.peer_id, node.start_number, self.coordinator.start_number)
        node.connection = connection
        for ref in [ref for ref in self.coordinator.connections if ref == node.ref]:
            self.coordinator.connections[ref].up_at_coordinator = False
        self.coordinator.connections[node.ref] = connection
        node.feed(Connected())

    def hang_up(self, node: PeerNode) -> None:
        """The peer's end closes its connection in an orderly way."""
        self.break_connection(node, notice_peer=False)

    def break_connection(self, node: PeerNode, *, notice_peer: bool = True, notice_coordinator: bool = True) -> None:
        """The connection of the running start of this peer is gone."""
        connection = node.connection
        if connection is None:
            return
        node.connection = None
        connection.up_at_peer = False
        if notice_peer:
            node.later(0.0, "disconnected", self._on_disconnected, node)
        if notice_coordinator and self.coordinator.start_number == connection.coordinator_start:
            ref = node.ref
            delay_s = self.network.latency_s(node.peer_id, COORDINATOR)
            self.world.after(delay_s, f"lost {node.peer_id}", self._coordinator_loses, connection, ref)

    def _coordinator_loses(self, connection: ControlConnection, ref: PeerRef) -> None:
        connection.up_at_coordinator = False
        self.coordinator.run(connection.coordinator_start, self.coordinator.on_lost, connection, ref)

    def _on_disconnected(self, node: PeerNode) -> None:
        node.feed(Disconnected())
        self.dial(node)

    def coordinator_died(self, connections: list[ControlConnection]) -> None:
        """Its process is gone: the peers' ends notice, by a reset or when they are kept waiting."""
        for connection in connections:
            node = self.peers[connection.peer_id]
            delay_s = self.world.rng.uniform(0.0, 1.0)
            self.world.after(delay_s, f"reset {node.peer_id}", self._peer_loses, node, connection)

    def _peer_loses(self, node: PeerNode, connection: ControlConnection) -> None:
        if node.connection is connection:
            self.break_connection(node, notice_coordinator=False)

    def _on_keepalive(self, source: str, target: str) -> None:
        """A cut lasted too long for the connections across it."""
        if COORDINATOR in (source, target):
            self.break_connection(self.peers[target if source == COORDINATOR else source])

    def peer_died(self, node: PeerNode, *, silently: bool) -> None:
        """Its process is gone: the coordinator's end gets a reset, or nothing at all."""
        self.break_connection(node, notice_peer=False, notice_coordinator=not silently)

    # ------------------------------------------------------------------------ control messages

    def send_to_coordinator(self, node: PeerNode, message: PeerMessage) -> None:
        connection = node.connection
        if connection is None:
            return
        is_certified = isinstance(message, Join) and message.certificate is not None
        if is_certified and self.network.chance(self.options.forged_certificates):
            message = msgspec.structs.replace(message, certificate=forge(message.certificate))
        self.world.say(node.peer_id, "->", message)
        for delay_s in self._delays(node.peer_id, COORDINATOR):
            arrival = self.world.now + delay_s
            if not self.options.control_reorders:
                arrival = connection.last_to_coordinator = max(arrival, connection.last_to_coordinator)
            label = f"{type(message).__name__} of {node.peer_id}"
            self.world.at(arrival, label, self._arrive_at_coordinator, connection, node.ref, message)

    def _arrive_at_coordinator(self, connection: ControlConnection, sender: PeerRef, message: PeerMessage) -> None:
        if not self.network.is_cut(sender.peer_id, COORDINATOR):
            self.coordinator.run(connection.coordinator_start, self.coordinator.on_said, connection, sender, message)

    def send_to_peer(self, sender: CoordinatorNode, to: PeerRef, message: CoordinatorMessage) -> None:
        self.world.say("coordinator ->", to.peer_id, to.incarnation, message)
        connection = sender.connections.get(to)
        if connection is None:
            return
        for delay_s in self._delays(COORDINATOR, to.peer_id):
            arrival = self.world.now + delay_s
            if not self.options.control_reorders:
                arrival = connection.last_to_peer = max(arrival, connection.last_to_peer)
            label = f"{type(message).__name__} to {to.peer_id}"
            self.world.at(arrival, label, self._arrive_at_peer, connection, message)

    def _arrive_at_peer(self, connection: ControlConnection, message: CoordinatorMessage) -> None:
        node = self.peers[connection.peer_id]
        if connection.up_at_peer and not self.network.is_cut(COORDINATOR, node.peer_id):
            node.run(connection.peer_start, node.on_told, connection, message)

    def _delays(self, source: str, target: str) -> list[float]:
        """When each copy of a control message arrives: none if it is lost, two if it is doubled."""
        chance = self.network.chance
        if self.network.is_cut(source, target) or chance(self.options.control_loss):
            return []
        delays = [self.network.latency_s(source, target)]
        if chance(self.options.control_reorders):
            delays[0] += self.world.rng.uniform(0.0, 1.0)
        if chance(self.options.control_duplicates):
            delays.append(delays[0] + self.world.rng.uniform(0.0, 2.0))
        return delays

    # ------------------------------------------------------------------------ bulk links

    def send_frame(self, node: PeerNode, to: PeerRef, frame: Frame) -> None:
        """On the link between two peers: in time, twice, or lost together with the link."""
        network = self.network
        generation = network.generation(node.peer_id, to.peer_id)
        latency_s = network.latency_s(node.peer_id, to.peer_id)
        label = f"{frame.kind} {node.peer_id}>{to.peer_id}"
        arrive = (self._frame_arrives, node, node.start_number, to, generation, frame)
        self.world.after(latency_s, label, *arrive)
        if network.chance(self.options.bulk_duplicates):
            self.world.after(latency_s + self.world.rng.uniform(0.0, 1.0), label, *arrive)

    def _frame_arrives(self, sender: PeerNode, sender_start: int, to: PeerRef, generation: int, frame: Frame) -> None:
        network, target = self.network, self.peers[to.peer_id]
        if network.is_cut(sender.peer_id, target.peer_id):
            # TCP sends again until the cut ends or the connection does.
            if sender.start_number == sender_start and sender.alive:
                self.world.after(
                    0.3, f"again {frame.kind}", self._frame_arrives, sender, sender_start, to, generation, frame
                )
            return
        if generation != network.generation(sender.peer_id, target.peer_id):
            return  # it was on a link that broke
        if not target.alive or target.ref != to:
            if not target.died_silently:
                sender.run(sender_start, sender.on_refused, frame.key, to)
            return
        if network.chance(self.options.bulk_corrupt):
            self.break_link(sender, target)  # the reader's checksum finds it
            return
        target.run(target.start_number, target.on_frame_arrived, frame)

    def break_link(self, one: PeerNode, other: PeerNode) -> None:
        """The link between two peers breaks, with all that is on it, and is made anew."""
        self.network.renew(one.peer_id, other.peer_id)
        self.world.say("link breaks between", one.peer_id, "and", other.peer_id)
        self._renew_link(one, other)

    def _on_redialled(self, source: str, target: str) -> None:
        if COORDINATOR not in (source, target):
            self._renew_link(self.peers[source], self.peers[target])

    def _renew_link(self, one: PeerNode, other: PeerNode) -> None:
        one.later(LINK_RENEWAL_S, "renewed", one.on_link_renewed, other.peer_id)
        other.later(LINK_RENEWAL_S, "renewed", other.on_link_renewed, one.peer_id)

    # ------------------------------------------------------------------------ state transfer

    def ask_for_state(self, node: PeerNode, donor: PeerRef, transfer: Transfer, attempt: int) -> None:
        latency_s = self.network.latency_s(node.peer_id, donor.peer_id)
        self.world.after(
            latency_s, f"ask {donor.peer_id}", self._donor_answers, node, node.start_number, donor, transfer, attempt
        )

    def _donor_answers(self, node: PeerNode, start: int, donor: PeerRef, transfer: Transfer, attempt: int) -> None:
        target = self.peers[donor.peer_id]
        if self.network.is_cut(node.peer_id, donor.peer_id):
            return
        state: State | None = None
        if target.alive and target.ref == donor:
            if self.world.now < target.paused_until:
                return
            state = target.state
        elif target.died_silently:
            return
        latency_s = self.network.latency_s(donor.peer_id, node.peer_id)
        self.world.after(
            latency_s, f"offer to {node.peer_id}", node.run, start, transfer.on_offer, donor, state, attempt
        )

    def still_serves(self, node: PeerNode, donor: PeerRef) -> bool:
        """Whether bytes of this donor still arrive."""
        target = self.peers[donor.peer_id]
        reaches = not self.network.is_broken(donor.peer_id, node.peer_id)
        return target.alive and target.ref == donor and self.world.now >= target.paused_until and reaches


def where(error: Exception) -> str:
    """What a machine raised, and where."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return f"{error} ({place})"
