# SPDX-License-Identifier: Apache-2.0
"""I4: how a run comes to rest when all faults have ended."""

from math import inf
from typing import TYPE_CHECKING

from isthmus.elastic.core.place import Phase
from tests.simulation.checkers import Checkers
from tests.simulation.options import PATIENT_S
from tests.simulation.symbols import name
from tests.simulation.world import Violation, demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


LIVENESS_S = 120.0
"""Virtual time in which a healed run must have shown that it goes on."""
PAUSE_S = 1200.0
"""Virtual time in which the pause of who was awaited in vain is over: nine times the longest wait."""
NUM_LIVE_COMMITS = 3


class Endings:
    """Lets a healed run go on until it has come to an end that is allowed."""

    def __init__(self, sim: "Simulator", checkers: Checkers) -> None:
        self._sim, self._checkers = sim, checkers

    def converge(self) -> str:
        """I4: the healed run goes on, or tells everybody why it cannot."""
        checkers = self._checkers
        first = len(checkers.history.commits)
        end, paused_at = "", -inf

        def has_come_to_an_end() -> bool:
            nonlocal end, paused_at
            if checkers.news:
                checkers.news = False
                end = self._end(first)
                paused_at = sim.world.now if self._pauses() else paused_at
            return bool(end)

        sim, deadline = self._sim, self._sim.world.now + LIVENESS_S
        if not sim.world.run_until(deadline, stop=has_come_to_an_end):
            # Who was awaited in vain stays out for a while, or did until a moment ago (seed 70234), and where patience
            # with who stands still is long, each wait for it takes its time (seed 60465); the others have to go on
            # meanwhile.
            while (
                (sim.world.now < paused_at + LIVENESS_S or sim.options.stall_floor_s > PATIENT_S)
                and len(checkers.history.commits) > first + NUM_LIVE_COMMITS
                and sim.world.now < deadline + PAUSE_S
            ):
                if sim.world.run_until(sim.world.now + LIVENESS_S, stop=has_come_to_an_end):
                    break
        if not end:
            phases = {name(node.ref): node.machine.phase.value if node.machine else "-" for node in sim.peers.values()}
            num_commits = len(checkers.history.commits) - first
            raise Violation("I4", f"healed, but it does not go on: {num_commits} commits, {phases}")
        if end in ("goes on", "waits for a quorum"):
            machine = sim.coordinator.machine
            assert machine is not None, "nothing strikes the coordinator any more"
            leases = machine.state.leases
            checkers.leases.at_rest(leases.next_index, sum(len(item) for item in leases.free))
        return end

    def _pauses(self) -> bool:
        """Whether somebody is not active because the coordinator lets it pause."""
        machine, history = self._sim.coordinator.machine, self._checkers.history
        if machine is None or history.newest is None:
            return False
        idle = [
            node for node in self._sim.core() if node.machine is not None and node.machine.phase is not Phase.ACTIVE
        ]
        step, now = history.newest.outer_step, self._sim.world.now
        return not all(machine._pauses.is_over(node.ref, step, now) for node in idle)

    def _out_of_reach(self) -> list["PeerNode"]:
        """The members, if nobody can dial any of them: whoever fetches dials, so the others cannot come in again."""
        refs = {member.ref for member in self._checkers.history.members()}
        members = [node for node in self._sim.peers.values() if node.ref in refs and node.is_up]
        return members if all(node.undialled_by and not node.stands_still for node in members) else []

    def _end(self, first: int) -> str:
        """In which legitimate end the run has come to rest; empty while it has not."""
        if any(ghost.is_up for ghost in self._sim.ghosts):
            return ""  # an older start has not been told yet
        sim, core, newest = self._sim, self._out_of_reach() or self._sim.core(), self._checkers.history.newest
        if self._checkers.history.final or self._checkers.halted or not core:
            if any(node.is_up and not node.stands_still and node not in core for node in sim.peers.values()) or core:
                return ""  # somebody has not been told yet
            if self._checkers.history.final or self._checkers.halted:
                return "final" if self._checkers.history.final else "halted for its integrity"
            codes = {effect.code for ref, effect in self._checkers.exits if sim.peers[ref.peer_id].ref == ref}
            demand(codes <= {4, 5, 7, 9, 20}, "I4", f"a run without peers ended with {codes}")
            if 7 in codes:
                self._checkers.leavers.lost(self._checkers.exits)
            return "lost, and said so" if 7 in codes else "everybody left"
        if sim.coordinator.is_writing:
            return ""  # the machine is ahead of its journal
        if newest is None or sim.coordinator.machine is None or sim.coordinator.machine.is_rebuilding:
            return ""  # the journal was lost, and the active ones have not heard yet
        if not all(node.machine is not None and node.machine.phase is Phase.ACTIVE for node in core):
            return ""
        if len(core) < sim.quorum:
            return "waits for a quorum"  # somebody left for good
        refs = {node.ref for node in core}
        records = list(self._checkers.history.commits.values())[first:]
        joint = [record for record in records if refs <= {item.ref for item in record.contributions}]
        return "goes on" if len(joint) >= NUM_LIVE_COMMITS else ""
