"""The coordinator's process: the real machine, a journal that survives, and crashes between any two effects."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from collective.core.types import Instant, PeerId, PeerRef
from elastic.core.config import RebuildRule
from elastic.core.coordinator import CoordinatorMachine
from elastic.core.events import (
    Answered,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnect,
    Ordered,
    PeerConnectionLost,
    PeerSaid,
    Persist,
    PutOut,
    Resign,
    SendToPeer,
    Tick,
)
from elastic.core.messages import PeerMessage
from elastic.core.records import Record
from tests.simulation.network import COORDINATOR, ControlConnection
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator


class CoordinatorNode(Process):
    """One coordinator, start after start, over one journal."""

    def __init__(self, sim: "Simulator") -> None:
        super().__init__(sim.world, COORDINATOR)
        self.sim = sim
        self.journal: list[Record] = []
        self.rule: RebuildRule | None = None
        """How a journal that was lost is made anew; None as long as it never was."""
        self.machine: CoordinatorMachine | None = None
        self.connections: dict[PeerRef, ControlConnection] = {}
        self.dies_after: Callable[[CoordinatorEffect], bool] | None = None
        """For scenarios: crash right after the first effect for which this is true, once."""

    def start(self) -> None:
        """A new process that reads the journal."""
        if self.alive:
            return
        self.born()
        self.connections = {}
        config = replace(self.sim.coordinator_config, rebuild_salt=1000 * self.start_number)
        self.machine = self.sim.parts.coordinator.recover(
            config, list(self.journal), self.clock.now(), rebuild=self.rule
        )
        self.sim.world.say("coordinator starts with", len(self.journal), "records")
        self.sim.checkers.coordinator_started(self.machine)
        self.arm()

    def crash(self) -> None:
        """The process is gone, with everything but the journal."""
        if not self.alive:
            return
        self.sim.world.say("coordinator crashes")
        self.sim.marks.coordinator_ended(self)
        self.gone()
        self.machine = None
        self.sim.control.coordinator_died(list(self.connections.values()))
        self.connections = {}
        if not self.sim.network.healed:
            self.sim.world.after(self.sim.world.rng.uniform(0.2, 4.0), "coordinator restarts", self.start)

    def lose_disk(self) -> None:
        """Process and journal are gone; whoever starts it again knows that."""
        self.crash()
        self.sim.world.say("the journal is lost, with", len(self.journal), "records")
        self.journal.clear()
        self.rule = RebuildRule.MAJORITY

    def insist(self) -> None:
        """The operator does not wait for more than those who are there."""
        if self.machine is not None and self.machine.is_rebuilding:
            self.rule = RebuildRule.INSIST
            self.crash()
            self.start()

    def evict(self, peer_id: PeerId) -> None:
        """The operator wants whatever there is of this peer to go."""
        connected = [ref.incarnation for ref in self.connections if ref.peer_id == peer_id]
        order = PutOut(
            peer_id=peer_id,
            incarnation=max(connected, default=None),
            certificate=len(self.journal),
            for_ever=False,
            at_s=0,
        )
        self.sim.world.say("the operator evicts", peer_id)
        self.run(self.start_number, self.feed, Ordered(serial=len(self.journal), order=order))

    def on_said(self, connection: ControlConnection, sender: PeerRef, message: PeerMessage) -> None:
        if connection.up_at_coordinator:
            self.sim.checkers.brought(sender, message)
            self.feed(PeerSaid(sender=sender, message=message))

    def on_lost(self, connection: ControlConnection, sender: PeerRef) -> None:
        if self.connections.get(sender) is connection:
            del self.connections[sender]
            self.feed(PeerConnectionLost(sender=sender))

    def feed(self, event: CoordinatorEvent) -> None:
        """Hand the machine an event and carry out what it orders, or die in between."""
        machine = self.machine
        if machine is None:
            return
        effects = self.sim.parts.arrange(machine.handle(event, self.clock.now()))
        if effects and self.sim.looks_into_machines():
            machine.check_invariants()
        survives = len(effects)
        for index in range(len(effects)):
            if self.sim.network.chance(self.sim.options.coordinator_crash_per_effect):
                survives = index
                break
        for effect in effects[:survives]:
            match effect:
                case Persist(record=record):
                    if not self._write(record):
                        return
                case SendToPeer(to=to, message=message):
                    self.sim.checkers.told(to, message)
                    self.sim.control.send_to_peer(self, to, message)
                case Disconnect(peer_id=peer_id, up_to=up_to):
                    self.sim.control.put_out(self, peer_id, up_to)
                case Answered():
                    pass
                case Resign(reason=reason):
                    raise AssertionError(f"the only coordinator resigns: {reason}")
            if self.dies_after is not None and self.dies_after(effect):
                self.dies_after = None
                self.crash()
                return
        if survives < len(effects):
            self.crash()
            return
        self.sim.checkers.coordinator_settled(machine)
        self.arm()

    def _write(self, record: Record) -> bool:
        """Make the record durable. False if the process dies meanwhile: then it is on the disk, or it is not."""
        dies = self.sim.network.chance(self.sim.options.coordinator_crash_in_persist)
        is_written = not dies or self.sim.world.rng.random() < 0.5
        if is_written:
            self.journal.append(record)
            self.sim.checkers.persisted(record)
        if dies:
            self.sim.marks[f"journal: died, and the record was {'written' if is_written else 'lost'}"] += 1
            self.crash()
        return not dies

    def deadline(self) -> Instant | None:
        return self.machine.next_deadline() if self.machine is not None else None

    def on_deadline(self) -> None:
        self.feed(Tick())
