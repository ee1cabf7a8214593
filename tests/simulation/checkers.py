# SPDX-License-Identifier: Apache-2.0
"""What must never happen, and what must: one object per concern (history.py, work.py), each naming its invariants.

The checkers see what the nodes do (install, stage, make payloads, end) and what the coordinator writes and tells. They
keep their own, deliberately simple books and never ask a machine whether it is right.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import BecomeLearner, CoordinatorEffect, Finish, InstallStaged, MemberEvent, Persist
from isthmus.elastic.core.messages import (
    CoordinatorMessage,
    Goodbye,
    Held,
    IndexRange,
    Join,
    LeaseGrant,
    LeaseRequest,
    PeerMessage,
    Refused,
    RoundFailed,
    Synced,
    Vote,
)
from isthmus.elastic.core.records import (
    CommitRecord,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    ViewRecord,
)
from tests.simulation.blame import Blame
from tests.simulation.courses import Courses
from tests.simulation.entries import Entries
from tests.simulation.history import Admissions, History, SharedState
from tests.simulation.leavers import Leavers, Patient
from tests.simulation.lies import Lies
from tests.simulation.methods import Met, samples_per_round
from tests.simulation.patience import Patience
from tests.simulation.reasons import Reasons
from tests.simulation.rebuilds import Certificates
from tests.simulation.symbols import Payload, Result, State, name
from tests.simulation.words import Words
from tests.simulation.work import Contributions, Leases
from tests.simulation.world import Violation, demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


MOST_ROUNDS = 30
"""No peer is given the work of so many rounds at once."""


class Checkers:
    """The nodes tell this one; it tells the others. endings.py judges the end of a seed."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self.history = History()
        self._state = SharedState(self.history)
        self._work = Contributions(self.history)
        self.leases = Leases(MOST_ROUNDS * samples_per_round(sim.options))
        self._courses = Courses(sim)
        self._lies = Lies(sim)
        self._admissions = Admissions(self.history, sim)
        self.certificates = Certificates(sim)
        self._blame = Blame()
        self._words = Words(self.history)
        self._entries = Entries(
            lambda: sim.quorum,
            sim.coordinator_config.rebuild_grace_s,
            sim.coordinator_config.meet_timeout_s,
            sim.coordinator_config.orphan_timeout_s,
        )
        self._reasons = Reasons(sim.coordinator_config, lambda: sim.coordinator.awake_s())
        self.patience = Patience(
            sim.world,
            sim.options,
            quorum=lambda: sim.quorum,
            work_of=lambda ref: sim.peers[ref.peer_id].work_of(ref),
            round_work=sim.coordinator_config.round_inner_steps,
        )
        self._epochs: dict[PeerRef, int] = {}
        self.exits: list[tuple[PeerRef, Finish]] = []
        self.halted = False
        self._said_to_hold: dict[PeerRef, Held] = {}  # to the coordinator's process that runs now
        self._had: defaultdict[PeerRef, set[bytes]] = defaultdict(set)  # what each start has held or staged
        self.leavers = Leavers(sim, self.history, self._had)
        self._patient = Patient(sim)
        self.news = True  # something happened that may end the seed

    # ------------------------------------------------------------------------ the coordinator

    def coordinator_started(self, machine: CoordinatorMachine) -> None:
        self.history.coordinator_settled(machine)
        self.certificates.coordinator_started()
        self._said_to_hold.clear()
        self._words.coordinator_started()
        self.leavers.coordinator_started()
        self._blame.coordinator_started()
        self._entries.coordinator_started()
        self._lies.coordinator_started()
        self._reasons.coordinator_started(machine.state.outer_step)
        self.halted = False  # a halt is no record: whoever starts everything again wants the run to go on
        self._sim.marks.coordinator_started(len(self._sim.coordinator.journal))

    def coordinator_settled(self, machine: CoordinatorMachine) -> None:
        self.history.coordinator_settled(machine)
        self._entries.looked(self._sim.coordinator.awake_s())

    def persisted(self, record: Record) -> None:
        self.news = True
        views = self.history.views
        before, quorum = views[-1] if views else None, self._sim.quorum
        self.history.persisted(record, self._sim.world.now)
        self.certificates.persisted(record)
        self._sim.marks.persisted(record, before, quorum)
        match record:
            case ViewRecord(view=view, excused=excused):
                self._sim.world.say("view", view.epoch, [name(member.ref) for member in view.members], record.cause)
                self._lies.view_decided(record)
                self._work.view_decided(view, excused)
                self.leases.view_decided(view, excused)
                self.patience.view_decided(view, excused)
                self._admissions.view_decided(view, before)
                self._blame.view_decided(record, before)
                self._words.view_decided(record)
                self._entries.view_decided(record, before, self._sim.coordinator.awake_s())
                self._reasons.persisted(record)
            case CommitRecord():
                self._sim.world.say("commit", record.key, record.digest.hex()[:6])
                demand(before is not None and before.epoch == record.key.epoch, "I8", "a commit of another epoch")
                assert before is not None
                few = len(record.contributions) < quorum
                demand(not few, "quorum", f"committed by {len(record.contributions)}")
                payloads = self._work.committed(record, before)
                self._courses.committed(record, payloads)
                self._lies.committed(record, before, payloads)
                self.leases.consumed(record)
                self.patience.committed(record)
                self._blame.committed(record)
                self._words.committed(record)
                self._entries.committed(record)
            case LeaseRecord():
                self.leases.granted(record)
            case ReleaseRecord():
                self.leases.released(record)
            case (RebuildRecord(epoch=epoch) | RollbackRecord(epoch=epoch)) as record:
                witnesses = record.testified if isinstance(record, RebuildRecord) else record.holders
                self._sim.world.say("goes back", epoch, self.history.newest, [name(ref) for ref in witnesses])
                self._state.rebuilt(record)
                self._work.rebuilt(record)
                self._lies.rebuilt()
                self.leases.rebuilt(self.history.lineage.commits)
                self._courses.rebuilt(self.history.lineage.commits)
                self.patience.rebuilt()
                self._blame.rebuilt(record)
                self._words.rebuilt()
                self._entries.rebuilt(record, self._sim.coordinator.awake_s())
                self._reasons.persisted(record)
            case _:
                pass

    def arrived(self, sender: PeerRef) -> None:
        """A word is in the coordinator's process; its machine may hear it later."""
        self._words.arrived(sender, self._sim.coordinator.awake_s())

    def went(self, sender: PeerRef) -> None:
        """Its connection was lost, as the coordinator's process sees it."""
        self._words.went(sender, self._sim.coordinator.awake_s())

    def lost(self, sender: PeerRef) -> None:
        """The machine is about to hear that this connection is gone."""
        self._reasons.lost(sender)
        self._entries.lost(sender)
        self.leavers.connection_lost(sender)

    def decided(self, effects: Sequence[CoordinatorEffect]) -> None:
        """What the coordinator is about to do."""
        self._reasons.decided(effects)
        self.leavers.decided(effects)
        for effect in effects:
            match effect:
                case Persist(record=ViewRecord() as record):
                    self._words.decided(record, self._sim.coordinator.awake_s())
                case Persist(record=RollbackRecord() as record):
                    self._demand_nothing_newer(record)
                case _:
                    pass

    def brought(self, sender: PeerRef, message: PeerMessage) -> None:
        self.certificates.brought(sender, message)
        self._words.brought(sender, message)
        self.leavers.brought(sender, message)
        self._entries.brought(sender, message)
        self._reasons.brought(sender, message)
        match message:
            case Vote():
                self.patience.voted(sender, message)
            case RoundFailed():
                self._blame.reported(sender, message)
                self._lies.reported(sender, message)
            case LeaseRequest():
                self.leases.requested(sender, message)
            case Join(held=held) | Synced(held=held) if held is not None:
                self._said_to_hold[sender] = held
            case _:
                pass

    def _demand_nothing_newer(self, record: RollbackRecord) -> None:
        """Whoever is here when the run is to go back, and has said that it holds a newer commit, has saved it."""
        members = self.history.members()
        demand(not members, "I3", "the run goes back, and {} hold its state", len(members))
        certificate = record.certificate
        target = min(self.history.states, default=0) if certificate is None else certificate.made.outer_step
        for node in self._sim.peers.values():
            said = self._said_to_hold.get(node.ref)
            connection = node.connection
            is_here = node.alive and connection is not None and connection.up_at_coordinator and connection.up_at_peer
            if said is None or not is_here or node.died_silently:
                continue
            is_newer = said.outer_step > target and self.history.states.get(said.outer_step) == said.digest
            demand(not is_newer, "I3", f"{name(node.ref)} has brought step {said.outer_step} in vain")
        commits = self.history.lineage.commits
        if commits:
            self._entries.goes_back(commits[-1], self._sim.coordinator.awake_s())

    def told(self, to: PeerRef, message: CoordinatorMessage, *, leads: bool = True) -> None:
        if not leads:  # it may say what it knew, and nothing that it could not write
            if not self.history.rebuilt_epoch:
                self.history.told(to, message)
            return
        self.history.told(to, message)
        self.leavers.told(to, message)
        self.certificates.told(message)
        self._words.told(to, message)
        sessions = [] if (machine := self._sim.coordinator.machine) is None else machine._roster.sessions.values()
        self._entries.told(to, message, {session.ref for session in sessions if not session.disconnected})
        if isinstance(message, Goodbye):
            self._said_to_hold.pop(to, None)  # it takes that with it, and may
        if isinstance(message, LeaseGrant):
            self.leases.told(to, message)
        if isinstance(message, Refused) and "by the operator" in message.reason:
            self.certificates.turned_away(to)
        if isinstance(message, Refused) and "results differ" in message.reason:
            self.halted = True
        self._sim.marks.told(to, message)
        self._lies.told(to, message, self.history.views[-1] if self.history.views else None)

    # ------------------------------------------------------------------------ the peers

    def heard(self, node: "PeerNode", message: CoordinatorMessage) -> None:
        self.certificates.heard(node, message)

    def feels(self, node: "PeerNode", event: MemberEvent) -> None:
        """Its machine is about to hear of this."""
        self._patient.feels(node, event)

    def knows(self, node: "PeerNode", message: CoordinatorMessage) -> None:
        """Its machine has heard this, and all that follows is done."""
        self.certificates.knows(node, message)

    def started(self, node: "PeerNode") -> None:
        self.news = True
        self.certificates.started(node)
        self._epochs[node.ref] = -1
        if node.state is not None:
            self._had[node.ref].add(node.state.held.digest)

    def stopped(self, node: "PeerNode") -> None:
        self.news = True
        self._work.gone(node.ref)
        self._courses.gone(node.ref)
        self._sim.marks.peer_ended(node)

    def finished(self, node: "PeerNode", effect: Finish) -> None:
        self.news = True
        self._sim.marks.finished(effect)
        self.exits.append((node.ref, effect))
        is_copied = node in self._sim.were_copied and "copy" in effect.reason
        wrong = self._sim.has_wrong_manifest(node)
        may_be_refused = wrong or is_copied or self.history.may_be_refused(node.ref)
        demand(effect.code != 5 or may_be_refused, "I4", f"{name(node.ref)} ends with {effect}")
        demand(not wrong or effect.code in (5, 9, 20), "I4", f"{name(node.ref)} ends with {effect}")
        if effect.code == 9:
            may_differ = self._sim.options.wrong_result > 0 or self._sim.options.lie in ("digest", "two_results")
            demand(may_differ or self._sim.is_liar(node.peer_id), "I1", f"{name(node.ref)} ends with {effect}")
        if effect.code == 0:
            is_over = self.history.final or self.history.has_given_up_the_end
            demand(is_over, "I4", f"{name(node.ref)} is done before the run is")
        # A joiner that the others could not exchange with is sent home, unless its address was right before; a journal
        # that was made anew does not know that (seed 310).
        was_reached = self.history.was_in_a_commit(node.peer_id) and not self.history.rebuilt_epoch
        is_told_so = "cannot exchange with" in effect.reason or "have no link with you" in effect.reason
        is_unreached = is_told_so and not was_reached
        demand(effect.code != 4 or is_unreached, "I4", f"{name(node.ref)} ends with {effect}")
        if effect.code == 7:
            # When the journal is lost before a commit nobody can prove a state (seeds 66978, 83319).
            is_unproved = "nobody has brought a certificate" in effect.reason and not self.history.lineage.commits
            newest = None if is_unproved else self.history.newest
            had = self._had[node.ref]
            # Who held a later commit that nobody could prove has written over this one (seed 23934).
            went_on = newest is not None and any(
                held.digest in had for held in self.history.given_up if held.outer_step > newest.outer_step
            )
            had_it = newest is not None and newest.digest in had and not went_on
            demand(not had_it, "I3", "{} had the state that nobody has, and did not die", node.ref)
            holder = next((item for item in self._sim.core() if self.holds_newest(item)), None)
            demand(holder is None or newest is None, "I4", f"{name(node.ref)} is sent home although there is a holder")

    def view_installed(self, node: "PeerNode", view: View) -> None:
        demand(view.epoch > self._epochs[node.ref], "I8", f"{name(node.ref)} goes back to epoch {view.epoch}")
        self._epochs[node.ref] = view.epoch

    def became_active(self, node: "PeerNode", view: View) -> None:
        self.news = True
        if self._sim.has_wrong_manifest(node):
            raise Violation("I5", f"{name(node.ref)} has another manifest")
        self._state.active(node, view)

    def hangs_or_not(self) -> None:
        self.news = True

    def became_learner(self, node: "PeerNode", effect: BecomeLearner) -> None:
        self.news = True
        self._sim.marks.learner(effect)
        self._work.given_up(node, self._epochs[node.ref])
        self._courses.gone(node.ref)

    def began(self, node: "PeerNode", landed: int, step: int) -> None:
        self._courses.began(node, landed, step)

    def trained(self, node: "PeerNode", inner_step: int, taken: Iterable[IndexRange]) -> None:
        self._courses.trained(node, inner_step, taken)

    def emitted(self, node: "PeerNode", payload: Payload, inner_step: int) -> None:
        self._courses.emitted(node, payload, inner_step)

    def landed(self, node: "PeerNode", step: int, met: Met | None, *, counted: bool) -> None:
        self._courses.landed(node, step, met, counted=counted)

    def handed_in(self, node: "PeerNode", payload: Payload) -> None:
        self._courses.handed_in(node, payload)
        self._work.made(node, payload)
        self.patience.made(node.ref)

    def carried_over(self, node: "PeerNode") -> None:
        self._work.carried_over(node)

    def staged(
        self,
        node: "PeerNode",
        key: RoundKey,
        made: State,
        result: Result,
        *,
        flawed: bool,
        sizes: tuple[float, ...],
        sums: tuple[float, ...],
    ) -> None:
        self._had[node.ref].add(made.held.digest)
        self._work.staged(node, key, made, result, flawed=flawed)
        self._lies.staged(node, key, sizes, sums)

    def may_be_large(self, peer_id: PeerId) -> bool:
        """See Lies."""
        return self._lies.may_be_large(peer_id)

    def installed(self, node: "PeerNode", effect: InstallStaged, made: State, result: Result) -> None:
        demand(made.held == effect.held, "I1", f"{name(node.ref)} installs something else than what is committed")
        self.history.installed(node, effect)
        self._sim.marks.installed(effect)
        self._work.installed(node, effect.key, result)
        self._state.holds(node, made)

    def founded(self, node: "PeerNode", state: State) -> None:
        self._had[node.ref].add(state.held.digest)

    def caught_up(self, node: "PeerNode", state: State) -> None:
        self._had[node.ref].add(state.held.digest)
        self._state.holds(node, state)

    # ------------------------------------------------------------------------ the end

    def holds_newest(self, node: "PeerNode") -> bool:
        """Whether this site can bring the committed state into the run."""
        newest = self.history.newest
        if newest is None:
            return True
        if not node.alive:
            return node.disk.state is not None and node.disk.state.held == newest
        states = [node.state, node.staged[1] if node.staged is not None else None]
        return any(state is not None and state.held == newest for state in states)
