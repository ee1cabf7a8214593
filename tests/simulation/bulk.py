# SPDX-License-Identifier: Apache-2.0
"""The wires between peers: links that carry an exchange's frames, and the transfer of state."""

from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerRef
from tests.simulation.exchange import Frame
from tests.simulation.network import COORDINATOR
from tests.simulation.peer import PeerNode
from tests.simulation.symbols import State
from tests.simulation.transfer import Transfer

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

LINK_RENEWAL_S = 0.1


class Bulk:
    """Between any two peers, one link in time, twice, or lost with all that is on it."""

    def __init__(self, sim: "Simulator") -> None:
        self.sim = sim
        self.world = sim.world
        self.network = sim.network
        sim.network.on_redialled.append(self._on_redialled)

    def send_frame(self, node: PeerNode, to: PeerRef, frame: Frame) -> None:
        """On the link between two peers: in time, twice, or lost together with the link."""
        network = self.network
        if not self.meet(node.peer_id, to.peer_id):
            return
        generation = network.generation(node.peer_id, to.peer_id)
        latency_s = network.latency_s(node.peer_id, to.peer_id)
        label = f"{frame.kind} {node.peer_id}>{to.peer_id}"
        arrive = (self._frame_arrives, node, node.start_number, to, generation, frame)
        self.world.after(latency_s, label, *arrive)
        if network.chance(self.sim.options.bulk_duplicates):
            self.world.after(latency_s + self.world.rng.uniform(0.0, 1.0), label, *arrive)

    def _frame_arrives(self, sender: PeerNode, sender_start: int, to: PeerRef, generation: int, frame: Frame) -> None:
        network, target = self.network, self.sim.peers[to.peer_id]
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
        if network.chance(self.sim.options.bulk_corrupt):
            self.break_link(sender, target)  # the reader's checksum finds it
            return
        target.run(target.start_number, target.on_frame_arrived, frame)

    @property
    def dial_s(self) -> float:
        """How long it takes to make a link, or to find out that there is none."""
        return 2.0 * sum(self.sim.options.latency_s)

    def why_no_link(self, node: PeerNode, other: PeerRef) -> str | None:
        """None if these two starts of peers can have a link now."""
        there = self.sim.peers[other.peer_id]
        if there.ref != other or not there.is_up:
            return "nobody there"
        if not self.meet(node.peer_id, other.peer_id):
            return "refused"
        return "no answer" if self.sim.network.is_broken(node.peer_id, other.peer_id) else None

    def meet(self, one: str, other: str) -> bool:
        """Whether the two can have a link: the one with the smaller id dials, and the other cannot."""
        dialler, target = min(one, other), max(one, other)
        return dialler not in self.sim.peers[target].undialled_by

    def becomes_dialable(self, node: PeerNode) -> None:
        """From now on everybody reaches what it advertises."""
        undialled_by, node.undialled_by = node.undialled_by, frozenset()
        for peer_id in sorted(undialled_by):
            self._renew_link(self.sim.peers[peer_id], node)

    def break_link(self, one: PeerNode, other: PeerNode) -> None:
        """The link between two peers breaks, with all that is on it, and is made anew."""
        self.network.renew(one.peer_id, other.peer_id)
        self.world.say("link breaks between", one.peer_id, "and", other.peer_id)
        self._renew_link(one, other)

    def _on_redialled(self, source: str, target: str) -> None:
        if COORDINATOR not in (source, target):
            self._renew_link(self.sim.peers[source], self.sim.peers[target])

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
        target = self.sim.peers[donor.peer_id]
        if self.network.is_cut(node.peer_id, donor.peer_id) or not self.meet(node.peer_id, donor.peer_id):
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
        target = self.sim.peers[donor.peer_id]
        reaches = not self.network.is_broken(donor.peer_id, node.peer_id)
        return target.alive and target.ref == donor and self.world.now >= target.paused_until and reaches
