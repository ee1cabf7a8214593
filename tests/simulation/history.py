# SPDX-License-Identifier: Apache-2.0
"""I1, I3, I5, I8: what the run has decided, and who holds what of it."""

from typing import TYPE_CHECKING

from isthmus.collective.core.types import Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import InstallStaged
from isthmus.elastic.core.messages import Commit, CoordinatorMessage, Held, LeaseGrant, NewView, Welcome
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    SnapshotRecord,
    TicketRecord,
    ViewRecord,
)
from tests.simulation.symbols import State, name
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


class Lineage:
    """The commits that count, oldest first.

    Who rebuilds a lost journal goes back along them; who does it twice may come back to what was given up the first
    time, if nothing was committed in between (seed 21648).
    """

    def __init__(self) -> None:
        self.genesis: Genesis | None = None
        self.commits: tuple[CommitRecord, ...] = ()
        self._ways: dict[RoundKey, tuple[Genesis | None, tuple[CommitRecord, ...]]] = {}

    def committed(self, record: CommitRecord) -> None:
        self.commits = (*self.commits, record)
        self._ways[record.key] = self.genesis, self.commits

    def rebuilt(self, record: RebuildRecord) -> None:
        certificate = record.certificate
        known = None if certificate is None else self._ways.get(certificate.key)  # a journal alone does not know it
        self.genesis, self.commits = known or (None, ())

    def rolled_back(self, record: RollbackRecord) -> None:
        """The journal is whole, and so is what it knows up to this commit."""
        keys = [commit.key for commit in self.commits]
        certificate = record.certificate
        is_known = certificate is None or certificate.key in keys
        demand(is_known, "I3", "the run went back to a commit that is none of its own")
        self.commits = () if certificate is None else self.commits[: keys.index(certificate.key) + 1]


class History:
    """I3, I8: what is journaled grows by whole steps, and nothing else is ever told or installed."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.states: dict[int, bytes] = {}  # outer step -> digest
        self.commits: dict[RoundKey, CommitRecord] = {}
        self.superseded_at: dict[int, float] = {}
        self.lineage = Lineage()
        self.grants: set[tuple[PeerRef, int]] = set()
        self.newest: Held | None = None
        self.final = False
        self.has_begun = False
        """Whether the state that the run goes on from is of a commit."""
        self.rebuilt_epoch = 0
        self._epoch = 0  # the newest one in the journal
        self.put_out: dict[PeerId, Incarnation] = {}
        """The newest start of a peer that the journal keeps out."""
        self.was_put_out: set[tuple[PeerId, Incarnation]] = set()
        """The same, also by journals that were lost since."""
        self.given_up: set[Held] = set()  # committed, and proved by nobody when the journal was lost
        self.has_given_up_the_end = False
        self._coordinator = (0, 0)

    def may_be_refused(self, ref: PeerRef) -> bool:
        """Whether this start was put out by an operator, in this journal or in one that was lost."""
        return any(peer_id == ref.peer_id and ref.incarnation <= newest for peer_id, newest in self.was_put_out)

    def persisted(self, record: Record, now: float) -> None:
        match record:
            case Genesis():
                demand(self.newest is None, "I3", "a second genesis")
                self.newest = Held(record.outer_step, record.digest)
                self.states[record.outer_step] = record.digest
                self.lineage.genesis = record
            case RebuildRecord(certificate=certificate):
                self._rebuilt(record)
                self.has_begun = certificate is not None
            case RollbackRecord(certificate=certificate):
                self._rolled_back(record)
                self.has_begun = certificate is not None
            case ViewRecord(view=view):
                demand(view.epoch > self._epoch, "I8", "epoch {} is not newer", view.epoch)
                self._epoch = view.epoch
                demand(not self.final, "I3", "a view after the final commit")
                for member in view.members:
                    is_out = member.incarnation <= self.put_out.get(member.peer_id, 0)
                    demand(not is_out, "doors", "{} is a member after it was put out", member.ref)
                self.views.append(view)
            case CommitRecord():
                demand(self.newest is not None, "I3", "a commit before the genesis")
                assert self.newest is not None
                step = record.outer_step
                demand(step == self.newest.outer_step + 1, "I3", f"step {step} after {self.newest.outer_step}")
                demand(record.previous == self.newest.digest, "I1", f"step {step} does not continue the chain")
                self.superseded_at[self.newest.outer_step] = now
                self.newest = Held(step, record.digest)
                self.states[step] = record.digest
                self.commits[record.key] = record
                self.lineage.committed(record)
                self.final, self.has_begun = record.final, True
            case LeaseRecord():
                self.grants.add((record.ref, record.serial))
            case BarRecord(bar=bar):
                self.put_out[bar.peer_id] = max(bar.incarnation, self.put_out.get(bar.peer_id, Incarnation(0)))
                self.was_put_out.add((bar.peer_id, bar.incarnation))
            case ReleaseRecord() | TicketRecord() | SnapshotRecord():
                pass

    def _rolled_back(self, record: RollbackRecord) -> None:
        demand(record.epoch > self._epoch, "I8", "the run went back into epoch {}", record.epoch)
        demand(self.newest is not None, "I3", "a run that has not begun went back")
        assert self.newest is not None
        step = self.newest.outer_step
        demand(record.given_up == step, "I3", f"the run says that it gives up {record.given_up}, it is at {step}")
        self.rebuilt_epoch = self._epoch = record.epoch
        self.lineage.rolled_back(record)
        genesis = self.lineage.genesis
        if record.certificate is not None:
            self.newest = record.certificate.made
        elif genesis is not None:
            self.newest = Held(genesis.outer_step, genesis.digest)
        demand(self.newest.outer_step < step, "I3", "the run went back to where it was")
        self._give_up_the_rest()
        self.has_given_up_the_end |= self.final
        self.final = False

    def _rebuilt(self, record: RebuildRecord) -> None:
        """What was committed after the certificate is given up, and nothing else."""
        epoch, certificate = record.epoch, record.certificate
        self.put_out = {}
        self.rebuilt_epoch = self._epoch = epoch
        # Epochs of a lost journal are nobody's once all who have heard of them have started again.
        self._coordinator = (0, 0)
        self.newest = None if certificate is None else certificate.made
        self.lineage.rebuilt(record)
        self._give_up_the_rest()
        self.has_given_up_the_end |= self.final and (certificate is None or not certificate.final)
        self.final = certificate is not None and certificate.final

    def _give_up_the_rest(self) -> None:
        """Only what is in the lineage counts."""
        before = {Held(OuterStep(step), digest) for step, digest in self.states.items()}
        self.states = {commit.outer_step: commit.digest for commit in self.lineage.commits}
        if self.lineage.genesis is not None:
            self.states[self.lineage.genesis.outer_step] = self.lineage.genesis.digest
        if self.newest is not None:
            self.states[self.newest.outer_step] = self.newest.digest
        counts = {Held(OuterStep(step), digest) for step, digest in self.states.items()}
        self.given_up = (self.given_up | before) - counts

    def was_in_a_commit(self, peer_id: str) -> bool:
        """Whether the members have reached this peer once."""
        return any(item.ref.peer_id == peer_id for made in self.lineage.commits for item in made.contributions)

    def is_newcomer(self, peer_id: str) -> bool:
        """Whether the run can do without this peer: it goes on, and never had it."""
        return bool(self.lineage.commits) and not self.was_in_a_commit(peer_id)

    def members(self) -> tuple[Member, ...]:
        """Of the newest view, unless the run went back since."""
        return self.views[-1].members if self.views and self.views[-1].epoch == self._epoch else ()

    def newcomers(self) -> list[PeerId]:
        """Members whom nobody has exchanged with yet."""
        return [member.peer_id for member in self.members() if not self.was_in_a_commit(member.peer_id)]

    def told(self, to: PeerRef, message: CoordinatorMessage) -> None:
        """Journal first: a message that tells of a decision finds it on the disk."""
        match message:
            case Commit():
                known = self.commits.get(message.certificate.key)
                demand(known is not None, "I3", "told {} of a commit that is not in the journal", to)
            case NewView(view=view):
                known_view = any(view.epoch == mine.epoch and view.members == mine.members for mine in self.views[::-1])
                demand(known_view, "I8", "told {} of view {} that is not in the journal", to, view.epoch)
                self._known(Held(view.outer_step, view.digest), "a view")
            case Welcome(target=target) if target is not None:
                self._known(target, "a welcome")
            case LeaseGrant():
                demand((to, message.serial) in self.grants, "I7", "told of leases that are not in the journal")
            case _:
                pass

    def installed(self, node: "PeerNode", effect: InstallStaged) -> None:
        has_not_heard = effect.held in self.given_up and effect.key.epoch <= self.rebuilt_epoch
        if not has_not_heard:
            self._known(effect.held, "an install")
        # Of who weighed nothing an attempt with it and one without it make the same state.
        is_made = has_not_heard or self.states.get(effect.held.outer_step) == effect.held.digest
        demand(effect.key in self.commits or is_made, "I3", "{} installs a round that is not committed", node.ref)

    def coordinator_settled(self, machine: CoordinatorMachine) -> None:
        if machine.is_rebuilding:
            return  # it knows nothing, and says so
        now = (machine.state.epoch, machine.state.outer_step)
        demand(now >= self._coordinator, "I8", "the coordinator went back from {} to {}", self._coordinator, now)
        self._coordinator = now

    def _known(self, held: Held, where: str) -> None:
        demand(self.states.get(held.outer_step) == held.digest, "I3", "{} names a state that is not committed", where)


class SharedState:
    """I1, I5: whoever holds an outer step, by whatever way, holds the same bits; it never goes back."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._newest: dict[PeerRef, int] = {}

    def holds(self, node: "PeerNode", state: State) -> None:
        step, digest = state.held.outer_step, state.held.digest
        if state.held in self._history.given_up:
            return  # it has not heard yet
        known = self._history.states.get(step)
        # A founder holds its state before it is the run's.
        demand(known == digest or (known is None and step == 0), "I1", f"{name(node.ref)} holds another step {step}")
        demand(step >= self._newest.get(node.ref, 0), "I3", f"{name(node.ref)} went back to step {step}")
        self._newest[node.ref] = step

    def rebuilt(self, record: RebuildRecord | RollbackRecord) -> None:
        """What was made after the certificate is given up: whoever held it goes back."""
        rest = 0 if record.certificate is None else record.certificate.made.outer_step
        self._newest = {ref: min(step, rest) for ref, step in self._newest.items()}

    def active(self, node: "PeerNode", view: View) -> None:
        held = node.state.held if node.state is not None else None
        demand(held == Held(view.outer_step, view.digest), "I5", f"{name(node.ref)} is active from another state")


class Admissions:
    """I5: only who has caught up is admitted: it holds the view's state, or the commit before it."""

    def __init__(self, history: History, sim: "Simulator") -> None:
        self._history = history
        self._sim = sim

    def view_decided(self, view: View, before: View | None) -> None:
        for member in view.members:
            if before is not None and before.holds(member.ref):
                continue
            node = self._sim.peers[member.peer_id]
            if not node.alive or node.ref != member.ref:
                continue
            held = node.state.held if node.state is not None else None
            demand(held is not None, "I5", f"{name(member.ref)} is admitted without a state")
            assert held is not None
            known = self._history.states.get(held.outer_step) == held.digest
            demand(known, "I5", f"{name(member.ref)} is admitted with a state that is not the run's")
            step = held.outer_step
            lag_s = self._sim.coordinator_config.admission_lag_s / self._sim.coordinator.clock.rate + 1e-6
            lag_s += self._sim.coordinator.held_s / self._sim.coordinator.clock.rate
            recent = self._history.superseded_at.get(step, self._sim.world.now) >= self._sim.world.now - lag_s
            fits = step >= view.outer_step - 1 or recent
            self._sim.marks.admitted(view.outer_step - step)
            demand(fits, "I5", f"{name(member.ref)} is admitted at step {step} into step {view.outer_step}")
