# SPDX-License-Identifier: Apache-2.0
"""What strikes during the safety phase, each fault class on its own clock."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.network import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator

RELAPSE_S = 0.25


class FaultInjector:
    """Strikes at random times until the network is healed."""

    def __init__(self, sim: "Simulator") -> None:
        self.sim = sim
        self.rng = sim.world.rng
        self._num_strikes = 0

    def arm(self) -> None:
        options = self.sim.options
        for rate, label, strike in (
            (options.crash_rate, "crash", self.crash_peer),
            (options.pause_rate, "pause", self.pause_peer),
            (options.hang_rate, "hang", self.hang_peer),
            (options.leave_rate, "leave", self.leave_peer),
            (options.last_leave_rate, "leave of the last", self.leave_of_the_last),
            (options.alone_leave_rate, "leave without an answer", self.leave_alone),
            (options.link_break_rate, "link break", self.break_link),
            (options.reset_rate, "reset", self.reset_connection),
            (options.cut_rate, "cut", self.cut),
            (options.slow_rate, "slow", self.slow_down),
            (options.partition_rate, "partition", self.partition),
            (options.swizzle_rate, "swizzle", self.swizzle),
            (options.clock_jump_rate, "clock jump", self.jump_clock),
            (options.coordinator_crash_rate, "coordinator crash", self.crash_coordinator),
            (options.coordinator_pause_rate, "coordinator pause", self.pause_coordinator),
            (options.disk_loss_rate, "disk loss", self.lose_disk),
            (options.burst_rate, "burst", self.burst),
            (options.power_cut_rate, "power cut", self.cut_power),
            (options.hung_absorb_rate, "hung absorb", self.hang_absorb),
            (options.undialable_rate, "undialable", self.move_out_of_reach),
            (options.one_way_rate, "one-way dials", self.move_behind_a_wall),
            (options.clone_rate, "clone", self.clone),
            (options.takeover_rate, "takeover", self.take_over),
            (options.evict_rate, "evict", self.evict_peer),
            (options.lines_rate, "lines", self.cut_lines),
            (options.relapse_rate, "relapse", self.relapse),
        ):
            self._every(rate, label, strike)

    def _every(self, rate: float, label: str, strike: Callable[[], None]) -> None:
        if rate <= 0:
            return

        # Chance of its own: a class that is switched off leaves the others as they were.
        rng = random.Random(f"{label} of {self.sim.world.seed}")

        def again() -> None:
            if not self.sim.network.healed:
                self.rng = rng
                self._strike(label, strike)
                self.sim.world.after(rng.expovariate(rate), label, again)

        self.sim.world.after(rng.expovariate(rate), label, again)

    def _strike(self, label: str, strike: Callable[[], None]) -> None:
        if self._num_strikes < self.sim.options.max_strikes:
            self._num_strikes += 1
            self.sim.marks[f"fault: {label}"] += 1
            strike()

    def burst(self) -> None:
        """Several faults in one instant."""
        kinds: list[tuple[str, Callable[[], None]]] = [
            ("crash", self.crash_peer),
            ("pause", self.pause_peer),
            ("link break", self.break_link),
            ("reset", self.reset_connection),
            ("cut", self.cut),
            ("clock jump", self.jump_clock),
            ("coordinator crash", self.sim.coordinator.crash),
        ]
        for label, strike in self.rng.choices(kinds, k=self.rng.randint(2, 5)):
            self._strike(label, strike)

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

    def cut_power(self) -> None:
        """Of all at once, the coordinator too; most of the machines start again by themselves."""
        for node in self.sim.peers.values():
            if node.alive:
                self.sim.world.after(self.rng.uniform(0.0, 0.05), f"power {node.peer_id}", self._lose_power, node)
            if self.rng.random() < 0.9:
                after_s = self.rng.uniform(0.5, self.sim.options.power_return_s)
                self.sim.world.after(after_s, f"restart {node.peer_id}", self._restart, node)
        self.sim.world.after(self.rng.uniform(0.0, 0.05), "power coordinator", self._lose_coordinator)

    def _lose_power(self, node: "PeerNode") -> None:
        if not self.sim.network.healed:  # the end of all faults may come in the midst of it
            node.crash(silently=True)

    def _lose_coordinator(self) -> None:
        if not self.sim.network.healed:
            self.crash_coordinator()

    def _restart(self, node: "PeerNode") -> None:
        if not self.sim.network.healed and self.sim.peers[node.peer_id] is node:
            node.start()

    def pause_peer(self) -> None:
        node = self._somebody()
        if node is not None:
            node.pause(self.rng.choice((0.3, 2.0, 4.0, 7.0)) * self.rng.uniform(0.5, 1.2))

    def hang_peer(self) -> None:
        node = self._somebody()
        if node is not None:
            node.hang(True)
            self.sim.world.say(node.peer_id, "hangs, but its heart beats")
            if self.rng.random() < 0.5:
                node.later(self.rng.uniform(1.0, 10.0), "unhang", node.hang, False)

    def relapse(self) -> None:
        """One hangs whenever it is a member, and works until it is one again."""
        node = self._somebody()
        if node is not None:
            self.sim.world.say(node.peer_id, "hangs whenever it is a member")
            self._relapse(node, node.start_number)

    def _relapse(self, node: "PeerNode", start: int) -> None:
        if node.start_number != start or node.machine is None:
            return
        node.hang(node.machine.view is not None and not self.sim.network.healed)
        if not self.sim.network.healed:
            self.sim.world.after(RELAPSE_S, "relapse", self._relapse, node, start)

    def hang_absorb(self) -> None:
        """Of one, or of all: what one cannot make anything of the others often cannot either."""
        nodes = [node for node in self.sim.peers.values() if node.alive]
        if nodes and self.rng.random() < 0.4:
            nodes = [self.rng.choice(nodes)]
        hangs_s = self.rng.uniform(1.0, 15.0) if self.rng.random() < 0.5 else None
        for node in nodes:
            node.hang_absorb(True)
            self.sim.world.say(node.peer_id, "votes no more, but its heart beats")
            if hangs_s is not None:
                node.later(hangs_s, "absorb again", node.hang_absorb, False)

    def clone(self) -> None:
        node = self._somebody()
        if node is not None and not self.sim.has_wrong_manifest(node):
            self.sim.clone(node)

    def move_out_of_reach(self) -> None:
        """Somebody starts with an address that nobody can dial."""
        self._move(list(self.sim.peers))

    def move_behind_a_wall(self) -> None:
        """Somebody starts where some of the others cannot dial it. Whoever it has to dial itself it reaches."""
        self._move(self.rng.sample(list(self.sim.peers), self.rng.randint(1, len(self.sim.peers))))

    def _move(self, undialled_by: list[str]) -> None:
        nodes = list(self.sim.peers.values())
        node = self.rng.choice([node for node in nodes if not node.start_number] or nodes)  # joiners first
        node.next_undialled_by = frozenset(undialled_by) - {node.peer_id}
        self.sim.world.say(node.peer_id, "will not be dialled by", sorted(node.next_undialled_by))
        if node.start_number:  # else it has not started yet
            node.crash(silently=False)
            self.sim.world.after(self.rng.uniform(0.05, 3.0), f"restart {node.peer_id}", self._restart, node)

    def leave_peer(self) -> None:
        node = self._somebody()
        if node is None:
            return
        now = self.rng.random() < self.sim.options.leave_now
        self.sim.world.say(node.peer_id, "wants to leave", "now" if now else "")
        node.leave(now=now)
        if self.rng.random() < 0.7:
            self.sim.world.after(self.rng.uniform(5.0, 15.0), f"return {node.peer_id}", self._restart, node)

    def leave_alone(self) -> None:
        """One is asked to go that has lost the coordinator, and does not find it again in time."""
        node = self._somebody()
        if node is None:
            return
        self.sim.world.say(node.peer_id, "has no coordinator, and wants to leave")
        self._cut_for([(node.peer_id, COORDINATOR), (COORDINATOR, node.peer_id)], self.rng.uniform(10.0, 15.0))
        self.sim.control.break_connection(node)
        node.leave(now=self.rng.random() < 0.5)
        self.sim.world.after(self.rng.uniform(15.0, 20.0), f"return {node.peer_id}", self._restart, node)

    def evict_peer(self) -> None:
        node = self._somebody()
        if node is None:
            return
        self.sim.coordinator.evict(node.peer_id)
        if self.rng.random() < 0.8:
            self.sim.world.after(self.rng.uniform(1.0, 8.0), f"return {node.peer_id}", self._restart, node)

    def leave_of_the_last(self, tries: int = 60) -> None:
        """Everybody who holds the committed state leaves in order, as soon as somebody is fetching it."""
        sim = self.sim
        up = [node for node in sim.peers.values() if node.is_up]
        holders = [node for node in up if sim.checkers.holds_newest(node)]
        if holders and any(node.transfer is not None and node not in holders for node in up):
            sim.marks["leave: of the last holders"] += 1
            for node in holders:
                sim.world.say(node.peer_id, "wants to leave, as all who hold the state")
                node.leave(now=False)
        elif tries and not sim.network.healed:
            sim.world.after(0.1, "leave of the last", self.leave_of_the_last, tries - 1)

    def break_link(self) -> None:
        one, other = self._somebody(), self._somebody()
        if one is not None and other is not None and one is not other:
            self.sim.bulk.break_link(one, other)

    def reset_connection(self) -> None:
        node = self._somebody()
        if node is not None:
            self.sim.world.say("control connection of", node.peer_id, "is reset")
            self.sim.control.break_connection(node)

    def cut(self) -> None:
        """Between two sites, in one or both directions, or around one site."""
        one = self._site()
        others = [site for site in (*self.sim.peers, COORDINATOR) if site != one]
        if self.rng.random() < 0.6:
            others = [self.rng.choice(others)]
        ways = self.rng.choice(("out", "in", "both", "both"))
        pairs = [(one, other) for other in others if ways != "in"] + [(other, one) for other in others if ways != "out"]
        self._cut_for(pairs, self.rng.choice((0.5, 3.0, 10.0)) * self.rng.uniform(0.5, 1.5))

    def cut_lines(self) -> None:
        """All among some peers, or all that one of them hears or says; long enough for two attempts at a round."""
        peers = list(self.sim.peers)
        if self.rng.random() < 0.5:
            chosen = peers if self.rng.random() < 0.5 else self.rng.sample(peers, (len(peers) + 2) // 2)
            pairs = [(one, other) for one in chosen for other in chosen if one != other]
        else:
            one = self.rng.choice(self.sim.checkers.history.newcomers() or peers)
            ways = self.rng.choice((("in",), ("in",), ("out",), ("in", "out")))
            others = [other for other in peers if other != one]
            pairs = [(other, one) for other in others if "in" in ways] + [
                (one, other) for other in others if "out" in ways
            ]
        self.sim.world.say("lines cut:", pairs)
        self._cut_for(pairs, self.rng.uniform(4.0, 15.0))

    def partition(self) -> None:
        """All sites in two parts that do not reach each other, but for a bridge that both reach."""
        sites = [*self.sim.peers, COORDINATOR]
        self.rng.shuffle(sites)
        bridge = sites[-1] if len(sites) > 2 and self.rng.random() < 0.3 else None
        size = len(sites) // 2 if self.rng.random() < 0.5 else self.rng.randint(1, len(sites) - 1)
        ones, others = sites[:size], [site for site in sites[size:] if site != bridge]
        self.sim.world.say("partition:", ones, others, "bridge", bridge)
        pairs = [pair for one in ones for other in others for pair in ((one, other), (other, one))]
        self._cut_for(pairs, self.rng.choice((1.0, 5.0, 12.0)) * self.rng.uniform(0.5, 1.5))

    def swizzle(self) -> None:
        """Every link of some sites is cut, one after the other, and healed in another order."""
        sites = [*self.sim.peers, COORDINATOR]
        chosen = self.rng.sample(sites, self.rng.randint(1, len(sites) - 1))
        pairs = [(one, other) for one in chosen for other in sites if one != other]
        self.rng.shuffle(pairs)
        cuts = sorted(self.rng.uniform(0.0, 3.0) for _ in pairs)
        mends = [3.0 + self.rng.uniform(0.0, 6.0) for _ in pairs]
        for pair, cut_in_s, mend_in_s in zip(pairs, cuts, mends, strict=True):
            self.sim.world.after(cut_in_s, "swizzle", self._cut_unless_healed, *pair)
            self.sim.world.after(mend_in_s, "mend", self.sim.network.mend, *pair)

    def _cut_unless_healed(self, source: str, target: str) -> None:
        if not self.sim.network.healed:
            self.sim.network.cut(source, target)

    def _cut_for(self, pairs: list[tuple[str, str]], duration_s: float) -> None:
        for source, target in pairs:
            self.sim.network.cut(source, target)
        self.sim.world.after(duration_s, "mend", self._mend, pairs)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        for source, target in pairs:
            self.sim.network.mend(source, target)

    def slow_down(self) -> None:
        source, target = self._site(), self._site()
        self.sim.network.slow_down(source, target, self.rng.choice((3.0, 10.0, 30.0)))
        self.sim.world.after(self.rng.uniform(2.0, 8.0), "speed up", self.sim.network.slow_down, source, target, 1.0)

    def crash_coordinator(self) -> None:
        self.sim.coordinator.crash()

    def lose_disk(self) -> None:
        self.sim.coordinator.lose_disk()

    def take_over(self) -> None:
        self.sim.take_over(self.rng.choice((0.0, 0.5, 3.0)) * self.rng.uniform(0.5, 1.5))

    def pause_coordinator(self) -> None:
        if self.sim.coordinator.alive:
            self.sim.coordinator.pause(self.rng.choice((0.5, 3.0, 8.0)) * self.rng.uniform(0.5, 1.2))

    def jump_clock(self) -> None:
        """One site's monotonic clock jumps forward, as after a suspend that the others did not take part in."""
        site = self._site()
        process = self.sim.coordinator if site == COORDINATOR else self.sim.peers[site]
        process.jump(self.rng.choice((0.5, 3.0, 10.0, 60.0)) * self.rng.uniform(0.5, 1.5))
