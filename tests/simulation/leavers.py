# SPDX-License-Identifier: Apache-2.0
"""I3, I4: who leaves in order takes the committed state away from nobody in the run, and goes in a bounded time.

The books are kept from what is said: who is in the run as the coordinator has told it, and who has asked to go.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.core.events import (
    Connected,
    CoordinatorEffect,
    CoordinatorSaid,
    Disconnected,
    Finish,
    LeaveRequested,
    MemberEvent,
    SendToPeer,
)
from isthmus.elastic.core.exit_codes import LEFT
from isthmus.elastic.core.messages import (
    CoordinatorMessage,
    Evicted,
    Goodbye,
    Held,
    Leave,
    NewView,
    PeerMessage,
    Rebuilding,
    Rebuilt,
    Refused,
    Welcome,
)
from tests.simulation.history import History
from tests.simulation.symbols import name
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator

ANSWER_S = 9.5
"""In which a leaver has its answer, or is gone: its timeout, by the slowest clock, and a little more."""


class Patient:
    """I4: who wants to go, and knows of nothing to wait for, goes by itself."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self._asked_at: dict[PeerRef, float] = {}
        self._at_once: set[PeerRef] = set()
        self._connected: set[PeerRef] = set()
        self._hopes_at: dict[PeerRef, float] = {}  # as a member, for the next commit
        self._stays: set[PeerRef] = set()  # it was told that it is needed, or may have been

    def feels(self, node: "PeerNode", event: MemberEvent) -> None:
        """Something happens to it."""
        ref, now = node.ref, self._sim.world.now
        is_member = node.machine is not None and node.machine.view is not None
        if ref in self._connected and is_member and ref not in self._at_once:
            self._hopes_at[ref] = now
        asked_at = self._asked_at.get(ref)
        if asked_at is not None and ref not in self._stays:
            waits_s = now - max(asked_at, self._hopes_at.get(ref, 0.0), node.awake_since)
            demand(waits_s <= ANSWER_S, "I4", "{} wants to go, and waits in vain for {:.1f} s", ref, waits_s)
        match event:
            case LeaveRequested(now=at_once) if asked_at is None or (at_once and ref not in self._at_once):
                self._asked_at[ref] = now
                if at_once:
                    self._at_once.add(ref)
                    self._stays.discard(ref)
            case Connected():
                self._connected.add(ref)
            case Disconnected():
                self._connected.discard(ref)
            case CoordinatorSaid(message=Welcome() | Rebuilding()) if asked_at is not None:
                if ref not in self._at_once:
                    self._stays.add(ref)
            case _:
                pass


class Leavers:
    """Judges every Goodbye. `had`: digests of the states that each start has held or staged."""

    def __init__(self, sim: "Simulator", history: History, had: Mapping[PeerRef, set[bytes]]) -> None:
        self._sim = sim
        self._history = history
        self._had = had
        self._in_run: set[PeerRef] = set()
        self._sent_away: set[PeerRef] = set()  # since it was last told that it is in the run
        self._leaving: set[PeerRef] = set()
        self._hasty: set[PeerRef] = set()
        self._stays_since: dict[PeerRef, float] = {}
        self._judged: dict[PeerRef, list[PeerRef]] = {}  # who went in order, and who held the state then
        self._num_void_views = 0
        self._here: set[PeerRef] = set()  # the coordinator's process has heard them, and knows of no lost connection
        self._here_then: dict[PeerRef, Collection[PeerRef]] = {}  # when it was decided to let this one go

    def coordinator_started(self) -> None:
        """It knows nobody; whom it has told to stay it may have to tell again."""
        self._in_run.clear()
        self._here.clear()

    def connection_lost(self, sender: PeerRef) -> None:
        """The coordinator hears that a connection is gone."""
        self._here.discard(sender)

    def decided(self, effects: Sequence[CoordinatorEffect]) -> None:
        """Who is here is what is known now; the word may be told later."""
        for effect in effects:
            if isinstance(effect, SendToPeer) and isinstance(effect.message, Goodbye):
                self._here_then[effect.to] = frozenset(self._here)

    def brought(self, sender: PeerRef, message: PeerMessage) -> None:
        self._here.add(sender)
        if isinstance(message, Leave):
            (self._hasty if message.now else self._leaving).add(sender)

    def told(self, to: PeerRef, message: CoordinatorMessage) -> None:
        match message:
            case Welcome():
                self._enters(to)
                if to in self._leaving and to not in self._stays_since:
                    self._stays_since[to] = self._sim.world.now
                    self._sim.marks["leave: stays for the state"] += 1
            case NewView():
                self._enters(to)
            case Goodbye():
                self._judged.pop(to, None)  # an older one may not have been heard
                if self._obeys(to, message):
                    self._judge(to)
                self._in_run.discard(to)
            case Rebuilt():  # membership ended with the journal, or with the commits that were given up (seed 23719)
                self._num_void_views = len(self._history.views)
            case Evicted(reason="a learner, no member"):
                pass  # it spoke as the member that it was; it has a session all the same
            case Evicted() | Refused():
                self._in_run.discard(to)
                self._sent_away.add(to)
            case Rebuilding():
                self._in_run.clear()
            case _:
                pass

    def lost(self, exits: Sequence[tuple[PeerRef, Finish]]) -> None:
        """Nobody can bring the state back: then nobody who went in order had it, or it was there again since.

        Who was told that nobody else holds the state waited in vain, or nobody was there; its operator knows. Not
        judged is who leaves while the journal is lost: who rebuilds lets everybody go (a gap: seed 2528).
        """
        newest = self._history.newest
        if newest is None or any(
            "nobody else holds" in effect.reason and newest.digest in self._had[ref] for ref, effect in exits
        ):
            return
        for ref, effect in exits:
            went_in_order = effect.code == LEFT and ref in self._judged
            went_in_order = went_in_order and "nobody else holds" not in effect.reason
            # Where it was handed over to somebody that has ended since, that one is judged, or crashed (seed 18977).
            went_in_order = went_in_order and all(map(self._is_alive, self._judged[ref]))
            if went_in_order and newest.digest in self._had[ref]:
                demand(
                    self._sim.peers[ref.peer_id].ref != ref, "I3", f"{name(ref)} left in order, and the state is lost"
                )

    def _has(self, ref: PeerRef, newest: Held) -> bool:
        """Whether this start has held or staged it, from a round, from others, from its disk, or as the founder."""
        node = self._sim.peers[ref.peer_id]
        is_here = node.alive and node.ref == ref and self._sim.checkers.holds_newest(node)
        return is_here or newest.digest in self._had[ref]

    def _is_alive(self, ref: PeerRef) -> bool:
        node = self._sim.peers[ref.peer_id]
        return node.alive and node.ref == ref

    def _enters(self, ref: PeerRef) -> None:
        """A newer start of a peer takes the place of the older one."""
        self._in_run = {item for item in self._in_run if item.peer_id != ref.peer_id} | {ref}
        self._sent_away.discard(ref)

    def _is_older(self, ref: PeerRef) -> bool:
        """Whether a newer start of this peer was a member: this one lives on beside a copy of its folder."""
        known = (member for view in self._history.views for member in view.members)
        return any(member.peer_id == ref.peer_id and member.incarnation > ref.incarnation for member in known)

    def _obeys(self, to: PeerRef, goodbye: Goodbye) -> bool:
        """Whether it answers the last Leave. Who holds another state since then ignores it (seed 70963)."""
        machine = self._sim.peers[to.peer_id].machine
        return machine is None or machine.held in (None, goodbye.held)

    def _judge(self, to: PeerRef) -> None:
        newest, node = self._history.newest, self._sim.peers[to.peer_id]
        is_here = node.alive and node.ref == to and self._sim.checkers.holds_newest(node)
        machine = self._sim.coordinator.machine
        is_lost = machine is None or machine.is_rebuilding
        if newest is None or is_lost or self._history.final or not is_here:
            return
        if to in self._hasty or self._is_older(to):
            return
        self._judged[to] = []
        # A restarted coordinator knows the members from its journal, before it has told them anything.
        views = self._history.views
        members = [{member.ref for member in view.members} for view in views[-2:]]
        others = self._in_run.union(*members[-1:] if len(views) > self._num_void_views else ()) - self._sent_away
        others = {ref for ref in others if ref.peer_id != to.peer_id}  # its older start
        # The view may have changed just now, and one of those that go together stays.
        holders = others.union(*members).intersection(self._here_then[to]) - {to}
        self._judged[to] = [ref for ref in holders if self._has(ref, newest)]
        if self._judged[to] or others <= self._leaving | self._hasty:
            self._sim.marks["leave: handed over"] += to in self._stays_since
            return
        config, clock = self._sim.coordinator_config, self._sim.coordinator.clock
        waited_s = self._sim.world.now - self._stays_since.get(to, self._sim.world.now)
        patience_s = config.handover_timeout_s / clock.rate - 1e-6
        names = [name(ref) for ref in others]
        demand(waited_s >= patience_s, "I3", f"{name(to)} leaves in order with the state that {names} still need")
