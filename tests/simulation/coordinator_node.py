# SPDX-License-Identifier: Apache-2.0
"""The coordinator's process: the real machine, a journal that survives, and crashes between any two effects."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from isthmus.collective.core.types import Instant, PeerId, PeerRef
from isthmus.elastic.core.config import RebuildRule
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import (
    Answered,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnect,
    Expose,
    Ordered,
    PeerConnectionLost,
    PeerSaid,
    Persist,
    PutOut,
    Resign,
    SendToPeer,
    Tick,
)
from isthmus.elastic.core.messages import PeerMessage
from isthmus.elastic.core.records import CommitRecord, Record
from isthmus.elastic.shell.alarm import HeldClock
from isthmus.elastic.wire import decode, encode
from tests.simulation.network import COORDINATOR, ControlConnection
from tests.simulation.process import Process
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator


STORE_AWAY, STORE_AWAY_S = 0.05, (3.0, 15.0)
"""How often a slow store answers very late, and how late."""

HEALED_STORE_S = 0.05
"""The longest that a record takes when all faults have ended."""

_RECORDS: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def _read_back(record: Record) -> Record:
    """As a journal's bytes hold it."""
    return decode(_RECORDS, encode(record))


class CoordinatorNode(Process):
    """One coordinator, start after start, over one journal."""

    def __init__(self, sim: "Simulator") -> None:
        super().__init__(sim.world, COORDINATOR)
        self.sim = sim
        self.journal: list[Record] = []
        self.base = 0
        """Where the next start begins to read: what came before this snapshot is in an archive."""
        self._dice = random.Random(f"snapshots of {sim.options}")
        self.rule: RebuildRule | None = None
        """How a journal that was lost is made anew; None as long as it never was."""
        self.machine: CoordinatorMachine | None = None
        self.connections: dict[PeerRef, ControlConnection] = {}
        self.dies_after: Callable[[CoordinatorEffect], bool] | None = None
        """For scenarios: crash right after the first effect for which this is true, once."""
        self.time = HeldClock(self.clock.now)
        self.is_writing: Record | None = None
        """What is on its way to the store."""
        self._wrote_s, self._writes_since = 0.0, 0.0
        self._end_write: Callable[[], None] = lambda: None
        self._events: deque[CoordinatorEvent] = deque()
        self._effects: deque[CoordinatorEffect] = deque()  # of the event handled last, not carried out yet
        self._survives: bool | None = None  # that event's end, unless it has come

    @property
    def leads(self) -> bool:
        """Whether nobody else does."""
        return self.sim.coordinator is self

    def awake_s(self) -> float:
        """This process's time without what the store took: nobody's silence in that counts."""
        return (self.clock.now() if self.is_writing is None else self._writes_since) - self._wrote_s

    def successor(self) -> "CoordinatorNode":
        """Another site over the same store."""
        other = CoordinatorNode(self.sim)
        other.journal, other.rule, other.start_number = self.journal, self.rule, self.start_number
        other.base = self.base
        other.clock.rate = self.clock.rate
        return other

    def start(self) -> None:
        """A new process that reads the journal."""
        if self.alive or not self.leads:
            return
        self.born()
        self.connections = {}
        self._events, self._effects, self._survives = deque(), deque(), None
        self.is_writing, self._wrote_s, self.time = None, 0.0, HeldClock(self.clock.now)
        config = replace(self.sim.coordinator_config, rebuild_salt=1000 * self.start_number)
        self.machine = self.sim.parts.coordinator.recover(
            config,
            [_read_back(record) for record in self.journal[self.base :]],
            self.time.now(),
            rebuild=self.rule,
        )
        self.sim.world.say("coordinator starts with", len(self.journal) - self.base, "records")
        self.sim.marks["journal: read from a snapshot on"] += self.base > 0
        self.sim.checkers.coordinator_started(self.machine)
        self.arm()

    def crash(self) -> None:
        """The process is gone, with everything but the journal."""
        if not self.alive:
            return
        self.sim.world.say("coordinator crashes")
        self.sim.marks.coordinator_ended(self)
        on_its_way, self.is_writing = self.is_writing, None
        self.gone()
        if on_its_way is not None:
            self._leave_half_written(on_its_way)
        self.machine = None
        self.sim.control.coordinator_died(list(self.connections.values()))
        self.connections = {}
        if self.leads and not self.sim.network.healed:
            self.sim.world.after(self.sim.world.rng.uniform(0.2, 4.0), "coordinator restarts", self.start)

    def lose_disk(self) -> None:
        """Process and journal are gone; whoever starts it again knows that."""
        self.crash()
        self.sim.world.say("the journal is lost, with", len(self.journal), "records")
        self.journal, self.base = [], 0
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
            if self.leads:
                self.sim.checkers.arrived(sender)
            self.feed(PeerSaid(sender=sender, message=message))

    def on_lost(self, connection: ControlConnection, sender: PeerRef) -> None:
        if self.connections.get(sender) is connection:
            del self.connections[sender]
            if self.leads:
                self.sim.checkers.went(sender)
            self.feed(PeerConnectionLost(sender=sender))

    def store_is_back(self) -> None:
        """All faults end: what is on its way to the store is soon there, also if the store was away (seed 2093)."""
        if self.is_writing is not None:
            self.later(HEALED_STORE_S, "written", self._end_write)

    # ------------------------------------------------------------------------ as the shell does it

    def feed(self, event: CoordinatorEvent) -> None:
        """Hand the machine an event, once what came before is carried out and written down."""
        if self.machine is not None:
            self._events.append(event)
            self._go_on()

    def _go_on(self) -> None:
        """Event after event, effect after effect, until none is left or a record is on its way to the store."""
        while self.machine is not None and not self.is_writing:
            if self._effects:
                self._carry_out(self._effects.popleft())
            elif self._survives is not None:
                self._end_event(survives=self._survives)
            elif self._events:
                self._handle(self.machine, self._events.popleft())
            else:
                break

    def _handle(self, machine: CoordinatorMachine, event: CoordinatorEvent) -> None:
        """What comes of it, or as much of that as happens before the process dies."""
        if isinstance(event, PeerSaid) and self.leads:
            self.sim.checkers.brought(event.sender, event.message)
        elif isinstance(event, PeerConnectionLost) and self.leads:
            self.sim.checkers.lost(event.sender)
        effects = self.sim.parts.arrange(machine.handle(event, self.time.now()))
        if effects and self.sim.looks_into_machines():
            machine.check_invariants()
        if self.leads:
            self.sim.checkers.decided(effects)
        survives = len(effects)
        for index in range(len(effects)):
            if self.sim.network.chance(self.sim.options.coordinator_crash_per_effect):
                survives = index
                break
        self._effects.extend(effects[:survives])
        self._survives = survives == len(effects)

    def _end_event(self, *, survives: bool) -> None:
        self._survives = None
        if not survives:
            self.crash()
            if self.sim.network.healed:
                self.start()  # it was to die before all faults ended
        elif self.machine is not None:
            if self.leads:
                self.sim.checkers.coordinator_settled(self.machine)
                self._compact(self.machine)
            self.arm()

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Persist() if self.sim.options.store_s > 0:
                self._write_slowly(effect)
                return
            case Persist(record=record):
                if not self._write(record):
                    return
            case SendToPeer(to=to, message=message):
                self.sim.checkers.told(to, message, leads=self.leads)
                self.sim.control.send_to_peer(self, to, message)
            case Disconnect(peer_id=peer_id, up_to=up_to):
                self.sim.control.put_out(self, peer_id, up_to)
            case Answered():
                pass
            case Expose(ref=ref, cause=cause):
                demand(ref in self.sim.control.forgers, "liars", f"{ref.peer_id} is named: {cause}")
                self.sim.marks["liar: named for a certificate"] += 1
            case Resign(reason=reason):
                assert not self.leads, f"the only coordinator resigns: {reason}"
                self.crash()
                return
        self._is_carried_out(effect)

    def _is_carried_out(self, effect: CoordinatorEffect) -> None:
        if self.dies_after is not None and self.dies_after(effect):
            self.dies_after = None
            self.crash()

    def _write_slowly(self, effect: Persist) -> None:
        """The store takes its time, now and then a long one. Meanwhile the machine's time stands still."""
        rng, is_healed = self.sim.world.rng, self.sim.network.healed
        store_s = min(self.sim.options.store_s, HEALED_STORE_S) if is_healed else self.sim.options.store_s
        is_away = not is_healed and rng.random() < STORE_AWAY
        self.sim.marks["fault: store away"] += is_away
        self.is_writing, self._writes_since = effect.record, self.clock.now()
        self.sim.parts.hold(self.time)
        duration_s = rng.uniform(*STORE_AWAY_S) if is_away else rng.uniform(0.5 * store_s, store_s)
        self._end_write = partial(self._written, effect)
        self.later(duration_s, "written", self._end_write)

    def _written(self, effect: Persist) -> None:
        if self.is_writing is not effect.record:
            return  # it was away when all faults ended
        self._wrote_s, self.is_writing = self.clock.now() - self.awake_s(), None
        self.sim.parts.release(self.time)
        if self._write(effect.record):
            self._is_carried_out(effect)
            self._go_on()

    def _write(self, record: Record) -> bool:
        """Make the record durable. False if the process dies meanwhile: then it is on the disk, or it is not."""
        if self.sim.parts.fences and not self.leads:  # who leads is looked at in the store, with the slot
            self.sim.marks["store: another one has written"] += 1
            self.crash()
            return False
        dies = self.sim.network.chance(self.sim.options.coordinator_crash_in_persist)
        if dies:
            self._leave_half_written(record)
            self.crash()
            return False
        self._append(record)
        if isinstance(record, CommitRecord):
            chance = self.sim.options.coordinator_crash_at_commit
            chance *= (
                1 if all(item.agreed for item in record.contributions) else 4
            )  # nobody knows yet that it was wrong
            if self.sim.network.chance(chance):
                self.crash()
                return False
        return True

    def _append(self, record: Record) -> None:
        self.journal.append(record)
        self.sim.checkers.persisted(record)

    def _compact(self, machine: CoordinatorMachine) -> None:
        """Now and then, between two events. It may die before what the snapshot makes unnecessary is dropped."""
        if machine.state.committed is None or self._dice.random() >= self.sim.options.compaction:
            return
        if self.sim.parts.fences and not self.leads:
            return
        self._append(self.sim.parts.snapshot(machine.state))
        if self._dice.random() < 0.8:
            self.base = len(self.journal) - 1

    def _leave_half_written(self, record: Record) -> None:
        is_written = self.sim.world.rng.random() < 0.5
        if is_written and self.leads:
            self._append(record)
        self.sim.marks[f"journal: died, and the record was {'written' if is_written else 'lost'}"] += 1

    def deadline(self) -> Instant | None:
        """By the process's clock; the machine's is behind it by what the store took."""
        deadline = self.machine.next_deadline() if self.machine is not None and not self.is_writing else None
        return None if deadline is None else deadline + self.held_s

    @property
    def held_s(self) -> float:
        """How long the machine's time has stood still in this process."""
        return self.clock.now() - self.time.now()

    def on_deadline(self) -> None:
        self.feed(Tick())
