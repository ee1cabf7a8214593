"""The coordinator's process: the real machine, a journal that survives, and crashes between any two effects."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.core.types import PeerRef
from elastic.core.config import RebuildRule
from elastic.core.coordinator import CoordinatorMachine
from elastic.core.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    PeerConnectionLost,
    PeerSaid,
    Persist,
    Resign,
    SendToPeer,
    Tick,
)
from elastic.core.messages import PeerMessage
from elastic.core.records import Record

if TYPE_CHECKING:
    from tests.simulation.network import ControlConnection
    from tests.simulation.simulator import Simulator


class CoordinatorNode:
    """One coordinator, start after start, over one journal."""

    def __init__(self, sim: "Simulator") -> None:
        self.sim = sim
        self.journal: list[Record] = []
        self.rule: RebuildRule | None = None
        """How a journal that was lost is made anew; None as long as it never was."""
        self.start_number = 0
        self.alive = False
        self.paused_until = 0.0
        self.machine: CoordinatorMachine | None = None
        self.connections: dict[PeerRef, ControlConnection] = {}
        self.dies_after: Callable[[CoordinatorEffect], bool] | None = None
        """For scenarios: crash right after the first effect for which this is true, once."""
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tick_at: float | None = None

    def start(self) -> None:
        """A new process that reads the journal."""
        if self.alive:
            return
        self.start_number += 1
        self.alive = True
        self.connections = {}
        self._backlog = []
        self._tick_at = None
        self.paused_until = 0.0
        machine = self.sim.parts.coordinator
        self.machine = machine.recover(
            self.sim.coordinator_config, list(self.journal), self.sim.world.now, rebuild=self.rule
        )
        self.sim.world.say("coordinator starts with", len(self.journal), "records")
        self.sim.checkers.coordinator_started(self.machine)
        self._arm()

    def crash(self) -> None:
        """The process is gone, with everything but the journal."""
        if not self.alive:
            return
        self.sim.world.say("coordinator crashes")
        self.alive = False
        self.start_number += 1
        self.machine = None
        self.sim.coordinator_died(list(self.connections.values()))
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

    def pause(self, duration_s: float) -> None:
        self.paused_until = max(self.paused_until, self.sim.world.now + duration_s)
        self.sim.world.say(f"coordinator paused for {duration_s:.2f}")
        self.sim.world.after(duration_s, "coordinator resumes", self.resume)

    def resume(self, *, now: bool = False) -> None:
        if now:
            self.paused_until = 0.0
        if self.sim.world.now < self.paused_until:
            return
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run(self.start_number, action, *args)

    def run(self, start: int, action: Callable[..., None], *args: Any) -> None:
        """Do something in this process, if it is still the same one; later, if it is paused."""
        if start != self.start_number or not self.alive:
            return
        if self.sim.world.now < self.paused_until:
            self._backlog.append((action, args))
            return
        action(*args)

    def on_said(self, connection: "ControlConnection", sender: PeerRef, message: PeerMessage) -> None:
        if connection.up_at_coordinator:
            self.feed(PeerSaid(sender=sender, message=message))

    def on_lost(self, connection: "ControlConnection", sender: PeerRef) -> None:
        if self.connections.get(sender) is connection:
            del self.connections[sender]
            self.feed(PeerConnectionLost(sender=sender))

    def feed(self, event: CoordinatorEvent) -> None:
        """Hand the machine an event and carry out what it orders, or die in between."""
        machine = self.machine
        if machine is None:
            return
        effects = self.sim.parts.arrange(machine.handle(event, self.sim.world.now))
        if self.sim.check_machines:
            machine.check_invariants()
        survives = len(effects)
        for index in range(len(effects)):
            if self.sim.network.chance(self.sim.options.coordinator_crash_per_effect):
                survives = index
                break
        for effect in effects[:survives]:
            match effect:
                case Persist(record=record):
                    self.journal.append(record)
                    self.sim.checkers.persisted(record)
                case SendToPeer(to=to, message=message):
                    self.sim.checkers.told(to, message)
                    self.sim.send_to_peer(self, to, message)
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
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.next_deadline() if self.machine is not None else None
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.sim.world.at(deadline, "tick coordinator", self.run, self.start_number, self._tick, deadline)

    def _tick(self, due: float) -> None:
        if self._tick_at != due:
            return
        self._tick_at = None
        deadline = self.machine.next_deadline() if self.machine is not None else None
        if deadline is not None and deadline <= self.sim.world.now:
            self.feed(Tick())
        else:
            self._arm()
