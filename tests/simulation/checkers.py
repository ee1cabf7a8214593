"""What must never happen, and what must: one object per concern, each naming the invariant it guards.

The checkers see what the nodes do (install, stage, make payloads, end) and what the coordinator writes and tells. They
keep their own, deliberately simple books and never ask a machine whether it is right.
"""

from typing import TYPE_CHECKING

from collective.core.types import PeerRef, RoundKey, View
from elastic.core.coordinator import CoordinatorMachine
from elastic.core.events import Finish, InstallStaged
from elastic.core.member import Phase
from elastic.core.messages import Commit, CoordinatorMessage, Held, LeaseGrant, NewView, Welcome
from elastic.core.records import CommitRecord, Genesis, LeaseRecord, RebuildRecord, Record, ReleaseRecord, ViewRecord
from tests.simulation.rebuilds import Certificates
from tests.simulation.symbols import Payload, Result, State
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


LIVENESS_S = 120.0
"""Virtual time in which a healed run must have shown that it goes on."""
NUM_LIVE_COMMITS = 3


def demand(holds: bool, invariant: str, what: str) -> None:
    """Raise a violation unless it holds."""
    if not holds:
        raise Violation(invariant, what)


def name(ref: PeerRef) -> str:
    return f"{ref.peer_id[-2:]}.{ref.incarnation}"


class History:
    """I3, I8: what is journaled grows by whole steps, and nothing else is ever told or installed."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.states: dict[int, bytes] = {}  # outer step -> digest
        self.commits: dict[RoundKey, CommitRecord] = {}
        self.superseded_at: dict[int, float] = {}
        self.grants: set[tuple[PeerRef, int]] = set()
        self.newest: Held | None = None
        self.final = False
        self.rebuilt_epoch = 0
        self.given_up: set[Held] = set()  # committed, and proved by nobody when the journal was lost
        self.has_given_up_the_end = False
        self._coordinator = (0, 0)

    def persisted(self, record: Record, now: float) -> None:
        match record:
            case Genesis():
                demand(self.newest is None, "I3", "a second genesis")
                self.newest = Held(record.outer_step, record.digest)
                self.states[record.outer_step] = record.digest
            case RebuildRecord(epoch=epoch, certificate=certificate):
                demand(not self.views or epoch > self.views[-1].epoch, "I8", f"rebuilt under epoch {epoch}")
                self.rebuilt_epoch = epoch
                self.newest = None if certificate is None else certificate.made
                rest = -1 if certificate is None else certificate.made.outer_step
                self.given_up |= {Held(step, digest) for step, digest in self.states.items() if step > rest}
                self.states = {step: digest for step, digest in self.states.items() if step <= rest}
                self.has_given_up_the_end |= self.final and (certificate is None or not certificate.final)
                self.final = certificate is not None and certificate.final
            case ViewRecord(view=view):
                demand(not self.views or view.epoch > self.views[-1].epoch, "I8", f"epoch {view.epoch} is not newer")
                demand(not self.final, "I3", "a view after the final commit")
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
                self.final = record.final
            case LeaseRecord():
                self.grants.add((record.ref, record.serial))
            case ReleaseRecord():
                pass

    def told(self, to: PeerRef, message: CoordinatorMessage) -> None:
        """Journal first: a message that tells of a decision finds it on the disk."""
        match message:
            case Commit():
                known = self.commits.get(message.certificate.key)
                demand(known is not None, "I3", f"told {name(to)} of a commit that is not in the journal")
            case NewView(view=view):
                known_view = any(view.epoch == mine.epoch and view.members == mine.members for mine in self.views)
                demand(known_view, "I8", f"told {name(to)} of view {view.epoch} that is not in the journal")
                self._known(Held(view.outer_step, view.digest), f"view {view.epoch}")
            case Welcome(target=target) if target is not None:
                self._known(target, "a welcome")
            case LeaseGrant():
                demand((to, message.serial) in self.grants, "I7", "told of leases that are not in the journal")
            case _:
                pass

    def installed(self, node: "PeerNode", effect: InstallStaged) -> None:
        if effect.held not in self.given_up or effect.key.epoch > self.rebuilt_epoch:
            self._known(effect.held, f"an install at {name(node.ref)}")
        demand(effect.key in self.commits, "I3", f"{name(node.ref)} installs a round that is not committed")

    def coordinator_settled(self, machine: CoordinatorMachine) -> None:
        if machine.is_rebuilding:
            return  # it knows nothing, and says so
        now = (machine.state.epoch, machine.state.outer_step)
        demand(now >= self._coordinator, "I8", f"the coordinator went back from {self._coordinator} to {now}")
        self._coordinator = now

    def _known(self, held: Held, where: str) -> None:
        demand(self.states.get(held.outer_step) == held.digest, "I3", f"{where} names a state that is not committed")


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

    def rebuilt(self, record: RebuildRecord) -> None:
        """What was made after the certificate is given up: whoever held it goes back."""
        rest = 0 if record.certificate is None else record.certificate.made.outer_step
        self._newest = {ref: min(step, rest) for ref, step in self._newest.items()}

    def active(self, node: "PeerNode", view: View) -> None:
        held = node.state.held if node.state is not None else None
        demand(held == Held(view.outer_step, view.digest), "I5", f"{name(node.ref)} is active from another state")


class Contributions:
    """I2, I3, I6: a committed result holds every member of its view once; no payload is lost or used twice."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._payloads: dict[str, Payload] = {}
        self._open: dict[PeerRef, Payload] = {}  # made, neither committed nor given up
        self._staged: dict[RoundKey, dict[PeerRef, tuple[Held, Result, bool]]] = {}
        self._committed: dict[str, RoundKey] = {}
        self._evictions: dict[PeerRef, int] = {}  # newest epoch that dropped it

    def made(self, node: "PeerNode", payload: Payload) -> None:
        lost = self._open.get(node.ref)
        demand(lost is None, "I6", f"{name(node.ref)} replaced a payload whose outcome is not known")
        self._payloads[payload.name] = payload
        self._open[node.ref] = payload

    def staged(self, node: "PeerNode", key: RoundKey, made: State, result: Result, *, flawed: bool) -> None:
        self._staged.setdefault(key, {})[node.ref] = (made.held, result, flawed)

    def view_decided(self, view: View, before: View | None) -> None:
        for member in before.members if before is not None else ():
            if not view.holds(member.ref):
                self._evictions[member.ref] = view.epoch

    def rebuilt(self, record: RebuildRecord) -> None:
        """Payloads are void: what the lost journal has given to their owners cannot be known."""
        self._evictions |= dict.fromkeys(self._open, record.epoch)

    def committed(self, record: CommitRecord, view: View) -> None:
        refs = {member.ref for member in view.members}
        demand({item.ref for item in record.contributions} == refs, "I2", "the commit names others than the view")
        staged = self._staged.get(record.key, {})
        voters = [ref for ref in refs if ref in staged and staged[ref][0].digest == record.digest]
        demand(2 * len(voters) > len(refs), "I1", "committed a digest that no strict majority has staged")
        demand(all(ref in staged for ref in refs), "I2", "committed without a result of every member")
        weights = {item.ref: item.weight for item in record.contributions}
        payloads: dict[PeerRef, Payload] = {}
        for chunk in staged[voters[0]][1]:
            owners = [self._payloads[share[0]].ref for share in chunk]
            demand(len(owners) == len(set(owners)), "I2", f"a contribution is in {record.key} twice")
            demand(set(owners) == refs, "I2", f"a contribution is missing in {record.key}, or a stranger's is in")
            for share_name, weight in chunk:
                payload = self._payloads[share_name]
                demand(payloads.setdefault(payload.ref, payload) is payload, "I2", "two payloads of one member")
                demand(weight == payload.weight == weights[payload.ref], "I2", "counted with another weight")
                demand(payload.outer_step == record.key.outer_step, "I2", f"{share_name} is work from another anchor")
                first = self._committed.setdefault(share_name, record.key)
                demand(first == record.key, "I3", f"{share_name} was applied twice")
        for item in record.contributions:
            demand(
                item.consumed == payloads[item.ref].consumed,
                "I7",
                f"{name(item.ref)} trained on samples it does not own",
            )

    def installed(self, node: "PeerNode", key: RoundKey, result: Result) -> None:
        payload = self._open.pop(node.ref, None)
        demand(payload is not None, "I6", f"{name(node.ref)} installs without a payload")
        assert payload is not None
        for chunk in result:
            demand(payload.name in [share[0] for share in chunk], "I6", f"the work of {name(node.ref)} is not in it")

    def given_up(self, node: "PeerNode", epoch: int) -> None:
        """The peer forgets its payload: only its own eviction is a reason."""
        payload = self._open.pop(node.ref, None)
        if payload is not None:
            evicted = self._evictions.get(node.ref, -1) > epoch or payload.name in self._committed
            demand(evicted, "I6", f"{name(node.ref)} lost its work in epoch {epoch} without being evicted")

    def gone(self, ref: PeerRef) -> None:
        self._open.pop(ref, None)


class Leases:
    """I7: every sample has one place, and is consumed once. Kept sample by sample, without ranges."""

    def __init__(self) -> None:
        self._owner: dict[int, PeerRef] = {}
        self._consumed: dict[int, int] = {}  # by which step
        self._members: set[PeerRef] = set()

    def view_decided(self, view: View) -> None:
        self._members = {member.ref for member in view.members}

    def granted(self, record: LeaseRecord) -> None:
        demand(record.ref in self._members, "I7", f"leases for {name(record.ref)}, who is no member")
        for index in (i for item in record.ranges for i in range(item.start, item.stop)):
            demand(index not in self._consumed, "I7", f"sample {index} is given again after it was consumed")
            demand(index not in self._owner, "I7", f"sample {index} has two owners")
            self._owner[index] = record.ref

    def consumed(self, record: CommitRecord) -> None:
        for contribution in record.contributions:
            for index in (i for item in contribution.consumed for i in range(item.start, item.stop)):
                demand(self._owner.get(index) == contribution.ref, "I7", f"sample {index} is consumed by a stranger")
                demand(index not in self._consumed, "I7", f"sample {index} is consumed twice")
                self._consumed[index] = record.outer_step
                del self._owner[index]

    def released(self, record: ReleaseRecord) -> None:
        demand(record.ref not in self._members, "I7", f"leases of the member {name(record.ref)} are released")
        for index in (i for item in record.ranges for i in range(item.start, item.stop)):
            demand(self._owner.pop(index, None) == record.ref, "I7", f"sample {index} is released by a stranger")

    def rebuilt(self, record: RebuildRecord) -> None:
        """Only what the commits that are left have consumed is consumed."""
        rest = -1 if record.certificate is None else record.certificate.made.outer_step
        self._consumed = {index: step for index, step in self._consumed.items() if step <= rest}
        self._owner.clear()
        self._members = set()

    def at_rest(self, next_index: int, free: int) -> None:
        """Nothing is lost: whatever was given is owned by a member, consumed, or free again."""
        strangers = [ref for ref in self._owner.values() if ref not in self._members]
        demand(not strangers, "I7", "somebody who is gone still owns samples")
        places = len(self._owner) + len(self._consumed) + free
        demand(places == next_index, "I7", f"{next_index - places} samples are nowhere")


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
            recent = self._history.superseded_at.get(step, self._sim.world.now) >= self._sim.world.now - 2.0
            fits = step >= view.outer_step - 1 or recent
            demand(fits, "I5", f"{name(member.ref)} is admitted at step {step} into step {view.outer_step}")


class Checkers:
    """The nodes tell this one; it tells the others. It also judges the end of a seed (I4)."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self.history = History()
        self._state = SharedState(self.history)
        self._work = Contributions(self.history)
        self._leases = Leases()
        self._admissions = Admissions(self.history, sim)
        self._certificates = Certificates(sim)
        self._epochs: dict[PeerRef, int] = {}
        self._exits: list[tuple[PeerRef, Finish]] = []
        self._halted = False

    # ------------------------------------------------------------------------ the coordinator

    def coordinator_started(self, machine: CoordinatorMachine) -> None:
        self.history.coordinator_settled(machine)

    def coordinator_settled(self, machine: CoordinatorMachine) -> None:
        self.history.coordinator_settled(machine)

    def persisted(self, record: Record) -> None:
        views = self.history.views
        before = views[-1] if views else None
        self.history.persisted(record, self._sim.world.now)
        self._certificates.persisted(record)
        match record:
            case ViewRecord(view=view):
                self._sim.world.say("view", view.epoch, [name(member.ref) for member in view.members], record.cause)
                self._work.view_decided(view, before)
                self._leases.view_decided(view)
                self._admissions.view_decided(view, before)
            case CommitRecord():
                self._sim.world.say("commit", record.key, record.digest.hex()[:6])
                demand(before is not None and before.epoch == record.key.epoch, "I8", "a commit of another epoch")
                assert before is not None
                self._work.committed(record, before)
                self._leases.consumed(record)
            case LeaseRecord():
                self._leases.granted(record)
            case ReleaseRecord():
                self._leases.released(record)
            case RebuildRecord(epoch=epoch, testified=testified):
                self._sim.world.say("rebuilt", epoch, self.history.newest, [name(ref) for ref in testified])
                self._state.rebuilt(record)
                self._work.rebuilt(record)
                self._leases.rebuilt(record)
            case _:
                pass

    def told(self, to: PeerRef, message: CoordinatorMessage) -> None:
        self.history.told(to, message)
        self._certificates.told(message)

    # ------------------------------------------------------------------------ the peers

    def heard(self, node: "PeerNode", message: CoordinatorMessage) -> None:
        self._certificates.heard(node, message)

    def started(self, node: "PeerNode") -> None:
        self._certificates.started(node)
        self._epochs[node.ref] = -1

    def stopped(self, node: "PeerNode") -> None:
        self._work.gone(node.ref)

    def finished(self, node: "PeerNode", effect: Finish) -> None:
        self._exits.append((node.ref, effect))
        wrong = self._sim.has_wrong_manifest(node)
        demand((effect.code == 5) == wrong or effect.code in (9, 20), "I4", f"{name(node.ref)} ends with {effect}")
        if effect.code == 9:
            demand(self._sim.options.wrong_result > 0, "I1", f"{name(node.ref)} ends with {effect}")
            self._halted = True
        if effect.code == 0:
            demand(
                self.history.final or self.history.has_given_up_the_end,
                "I4",
                f"{name(node.ref)} is done before the run is",
            )
        demand(effect.code != 4, "I4", f"{name(node.ref)} ends with {effect}")
        if effect.code == 7:
            holder = next((item for item in self._sim.core() if self.holds_newest(item)), None)
            demand(holder is None, "I4", f"{name(node.ref)} is sent home although there is a holder")

    def view_installed(self, node: "PeerNode", view: View) -> None:
        demand(view.epoch > self._epochs[node.ref], "I8", f"{name(node.ref)} goes back to epoch {view.epoch}")
        self._epochs[node.ref] = view.epoch

    def became_active(self, node: "PeerNode", view: View) -> None:
        demand(not self._sim.has_wrong_manifest(node), "I5", f"{name(node.ref)} has another manifest")
        self._state.active(node, view)

    def became_learner(self, node: "PeerNode") -> None:
        self._work.given_up(node, self._epochs[node.ref])

    def payload_made(self, node: "PeerNode", payload: Payload) -> None:
        self._work.made(node, payload)

    def staged(self, node: "PeerNode", key: RoundKey, made: State, result: Result, *, flawed: bool) -> None:
        self._work.staged(node, key, made, result, flawed=flawed)

    def installed(self, node: "PeerNode", effect: InstallStaged, made: State, result: Result) -> None:
        demand(made.held == effect.held, "I1", f"{name(node.ref)} installs something else than what is committed")
        self.history.installed(node, effect)
        self._work.installed(node, effect.key, result)
        self._state.holds(node, made)

    def caught_up(self, node: "PeerNode", state: State) -> None:
        self._state.holds(node, state)

    # ------------------------------------------------------------------------ the end

    def holds_newest(self, node: "PeerNode") -> bool:
        """Whether this site can bring the committed state into the run."""
        newest = self.history.newest
        if newest is None:
            return True
        if not node.alive:
            return node.disk is not None and node.disk.held == newest
        states = [node.state, node.staged[1] if node.staged is not None else None]
        return any(state is not None and state.held == newest for state in states)

    def converge(self) -> str:
        """I4: the healed run goes on, or tells everybody why it cannot."""
        first = len(self.history.commits)
        end = ""

        def has_come_to_an_end() -> bool:
            nonlocal end
            end = self._end(first)
            return bool(end)

        sim = self._sim
        if not sim.world.run_until(sim.world.now + LIVENESS_S, stop=has_come_to_an_end):
            phases = {name(node.ref): node.machine.phase.value if node.machine else "-" for node in sim.peers.values()}
            num_commits = len(self.history.commits) - first
            raise Violation("I4", f"healed, but it does not go on: {num_commits} commits, {phases}")
        if end in ("goes on", "waits for a quorum"):
            machine = sim.coordinator.machine
            assert machine is not None, "nothing strikes the coordinator any more"
            leases = machine.state.leases
            self._leases.at_rest(leases.next_index, sum(len(item) for item in leases.free))
        return end

    def _end(self, first: int) -> str:
        """In which legitimate end the run has come to rest; empty while it has not."""
        sim, core, newest = self._sim, self._sim.core(), self.history.newest
        if self.history.final or self._halted or not core:
            if any(node.is_up and not node.hung and node not in core for node in sim.peers.values()) or core:
                return ""  # somebody has not been told yet
            if self.history.final or self._halted:
                return "final" if self.history.final else "halted for its integrity"
            codes = {effect.code for ref, effect in self._exits if sim.peers[ref.peer_id].ref == ref}
            demand(codes <= {5, 7, 20}, "I4", f"a run without peers ended with {codes}")
            return "lost, and said so" if 7 in codes else "everybody left"
        if not all(node.machine is not None and node.machine.phase is Phase.ACTIVE for node in core):
            return ""
        if len(core) < sim.options.min_peers:
            return "waits for a quorum"  # somebody left for good
        refs = {node.ref for node in core}
        assert newest is not None, "active members have a state"
        records = list(self.history.commits.values())[first:]
        joint = [record for record in records if refs <= {item.ref for item in record.contributions}]
        return "goes on" if len(joint) >= NUM_LIVE_COMMITS else ""
