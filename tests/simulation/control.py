# SPDX-License-Identifier: Apache-2.0
"""Control connections: how peers reach the coordinator, what is lost, doubled or late on the way, how they break."""

from typing import TYPE_CHECKING, TypeVar

import msgspec

from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.core.events import Connected, Disconnected
from isthmus.elastic.core.messages import CoordinatorMessage, Join, PeerMessage, Vote
from isthmus.elastic.wire import decode, encode
from tests.simulation.coordinator_node import CoordinatorNode
from tests.simulation.network import COORDINATOR, ControlConnection
from tests.simulation.peer import PeerNode
from tests.simulation.rebuilds import forge
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator


_PEER_MESSAGES: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_COORDINATOR_MESSAGES: msgspec.msgpack.Decoder[CoordinatorMessage] = msgspec.msgpack.Decoder(CoordinatorMessage)

_T = TypeVar("_T")


def understood(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    """What honest peers say has to be within what the other side takes."""
    try:
        return decode(decoder, payload)
    except RemoteProtocolError as error:
        raise Violation("I9", f"an honest message is not understood: {error.__cause__}") from error


class Control:
    """The wires between the peers and the coordinator."""

    def __init__(self, sim: "Simulator") -> None:
        self.forgers: set[PeerRef] = set()
        self.sim = sim
        self.world = sim.world
        self.network = sim.network
        sim.network.on_keepalive.append(self._on_keepalive)

    def dial(self, node: PeerNode) -> None:
        """The peer's process dials the coordinator until it answers."""
        node.later(self.network.latency_s(node.peer_id, COORDINATOR), "dial", self._try_to_connect, node)

    def _try_to_connect(self, node: PeerNode) -> None:
        if node.exit is not None or node.connection is not None:
            return
        coordinator = self.sim.coordinator
        if not coordinator.alive or self.network.is_broken(node.peer_id, COORDINATOR):
            node.later(self.world.rng.uniform(0.1, 0.4), "redial", self._try_to_connect, node)
            return
        connection = ControlConnection(node, coordinator, node.start_number, coordinator.start_number)
        node.connection = connection
        for ref in [ref for ref in coordinator.connections if ref == node.ref]:
            coordinator.connections[ref].up_at_coordinator = False
        coordinator.connections[node.ref] = connection
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
        if notice_coordinator and connection.coordinator.start_number == connection.coordinator_start:
            ref = node.ref
            delay_s = self.network.latency_s(node.peer_id, COORDINATOR)
            self.world.after(delay_s, f"lost {node.peer_id}", self._coordinator_loses, connection, ref)

    def put_out(self, coordinator: CoordinatorNode, peer_id: PeerId, up_to: Incarnation) -> None:
        """The coordinator ends connections of a peer: what it said last may get lost, and it hears nothing more."""
        for ref, connection in list(coordinator.connections.items()):
            if ref.peer_id == peer_id and ref.incarnation <= up_to:
                connection.up_at_coordinator = False
                del coordinator.connections[ref]
                delay_s = self.network.latency_s(COORDINATOR, peer_id)
                self.world.after(delay_s, f"put out {peer_id}", self._peer_loses, connection.node, connection)

    def _coordinator_loses(self, connection: ControlConnection, ref: PeerRef) -> None:
        connection.up_at_coordinator = False
        coordinator = connection.coordinator
        coordinator.run(connection.coordinator_start, coordinator.on_lost, connection, ref)

    def _on_disconnected(self, node: PeerNode) -> None:
        node.feed(Disconnected())
        self.dial(node)

    def coordinator_died(self, connections: list[ControlConnection]) -> None:
        """Its process is gone: the peers' ends notice, by a reset or when they are kept waiting."""
        for connection in connections:
            node = connection.node
            delay_s = self.world.rng.uniform(0.0, 1.0)
            self.world.after(delay_s, f"reset {node.peer_id}", self._peer_loses, node, connection)

    def leave_coordinator(self, coordinator: CoordinatorNode) -> None:
        """Another one leads now: the peers find it, one after the other."""
        for connection in coordinator.connections.values():
            delay_s = self.world.rng.uniform(0.0, 2.0)
            self.world.after(delay_s, f"leave {connection.node.peer_id}", self._leave, connection)

    def _leave(self, connection: ControlConnection) -> None:
        if connection.node.connection is connection:
            self.break_connection(connection.node)

    def _peer_loses(self, node: PeerNode, connection: ControlConnection) -> None:
        if node.connection is connection:
            self.break_connection(node, notice_coordinator=False)

    def _on_keepalive(self, source: str, target: str) -> None:
        """A cut lasted too long for the connections across it."""
        if COORDINATOR in (source, target):
            peer_id = target if source == COORDINATOR else source
            for node in (self.sim.peers[peer_id], *self.sim.older_starts(peer_id)):
                self.break_connection(node)

    def peer_died(self, node: PeerNode, *, silently: bool) -> None:
        """Its process is gone: the coordinator's end gets a reset, or nothing at all."""
        self.break_connection(node, notice_peer=False, notice_coordinator=not silently)

    # ------------------------------------------------------------------------ control messages

    def send_to_coordinator(self, node: PeerNode, message: PeerMessage) -> None:
        connection = node.connection
        if connection is None:
            return
        certificate = message.certificate if isinstance(message, Join) else None
        if certificate is not None and self.network.chance(self.sim.options.forged_certificates):
            forged = forge(certificate, node.ref, self.sim.keys.of(node.peer_id))
            message = msgspec.structs.replace(message, certificate=forged)
            self.forgers.add(node.ref)
        if isinstance(message, Vote) and self.sim.lie_of(node.peer_id) == "unsigned":
            message = msgspec.structs.replace(message, signature=self.sim.keys.of(node.peer_id).sign(b"something else"))
        self.world.say(node.peer_id, "->", message)
        payload = encode(message)
        for delay_s in self._delays(node.peer_id, COORDINATOR):
            arrival = self.world.now + delay_s
            if not self.sim.options.control_reorders:
                arrival = connection.last_to_coordinator = max(arrival, connection.last_to_coordinator)
            label = f"{type(message).__name__} of {node.peer_id}"
            self.world.at(arrival, label, self._arrive_at_coordinator, connection, node.ref, payload)

    def _arrive_at_coordinator(self, connection: ControlConnection, sender: PeerRef, payload: bytes) -> None:
        if not self.network.is_cut(sender.peer_id, COORDINATOR):
            message = understood(_PEER_MESSAGES, payload)
            coordinator = connection.coordinator
            coordinator.run(connection.coordinator_start, coordinator.on_said, connection, sender, message)

    def send_to_peer(self, sender: CoordinatorNode, to: PeerRef, message: CoordinatorMessage) -> None:
        self.world.say("coordinator ->", to.peer_id, to.incarnation, message)
        connection = sender.connections.get(to)
        if connection is None:
            return
        payload = encode(message)
        for delay_s in self._delays(COORDINATOR, to.peer_id):
            arrival = self.world.now + delay_s
            if not self.sim.options.control_reorders:
                arrival = connection.last_to_peer = max(arrival, connection.last_to_peer)
            label = f"{type(message).__name__} to {to.peer_id}"
            self.world.at(arrival, label, self._arrive_at_peer, connection, payload)

    def _arrive_at_peer(self, connection: ControlConnection, payload: bytes) -> None:
        node = connection.node
        if connection.up_at_peer and not self.network.is_cut(COORDINATOR, node.peer_id):
            message = understood(_COORDINATOR_MESSAGES, payload)
            node.run(connection.peer_start, node.on_told, connection, message)

    def _delays(self, source: str, target: str) -> list[float]:
        """When each copy of a control message arrives: none if it is lost, two if it is doubled."""
        chance = self.network.chance
        if self.network.is_cut(source, target) or chance(self.sim.options.control_loss):
            return []
        delays = [self.network.latency_s(source, target)]
        if chance(self.sim.options.control_reorders):
            delays[0] += self.world.rng.uniform(0.0, 1.0)
        if chance(self.sim.options.control_duplicates):
            delays.append(delays[0] + self.world.rng.uniform(0.0, 2.0))
        return delays
