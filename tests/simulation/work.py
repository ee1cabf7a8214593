# SPDX-License-Identifier: Apache-2.0
"""I2, I3, I6, I7: whose work is in a commit, and where every sample is."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerRef, RoundKey, View
from isthmus.elastic.core.messages import Held, LeaseGrant, LeaseRequest
from isthmus.elastic.core.records import CommitRecord, LeaseRecord, RebuildRecord, ReleaseRecord, RollbackRecord
from tests.simulation.history import History
from tests.simulation.symbols import FALSE, Payload, Result, State, name
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode


class Contributions:
    """I2, I3, I6: a committed result holds every member of its view once; no payload is lost or used twice."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._payloads: dict[str, Payload] = {}
        self._open: dict[PeerRef, Payload] = {}  # made, neither committed nor given up
        self._void: dict[PeerRef, Payload] = {}  # given up, but its round may be staged still
        self._staged: dict[RoundKey, dict[PeerRef, tuple[Held, Result, bool]]] = {}
        self._committed: dict[str, RoundKey] = {}
        self._evictions: dict[PeerRef, int] = {}  # newest epoch that dropped it
        self._standing: set[PeerRef] = set()  # members and excused
        self._late: dict[PeerRef, Payload] = {}
        self._carried: set[str] = set()
        self._lost_with_a_journal: set[str] = set()

    def made(self, node: "PeerNode", payload: Payload) -> None:
        lost = self._open.get(node.ref)
        demand(lost is None, "I6", f"{name(node.ref)} replaced a payload whose outcome is not known")
        self._late.pop(node.ref, None)
        self._payloads[payload.name] = payload
        self._open[node.ref] = payload

    def carried_over(self, node: "PeerNode") -> None:
        """Its payload came too late: it must be in the next one, and never be committed by itself."""
        payload = self._open.pop(node.ref, None)
        demand(payload is not None, "I6", f"{name(node.ref)} carries over what it has not made")
        assert payload is not None
        demand(payload.name not in self._committed, "I3", f"{name(node.ref)} carries over committed work")
        self._late[node.ref] = payload
        self._carried.add(payload.name)

    def staged(self, node: "PeerNode", key: RoundKey, made: State, result: Result, *, flawed: bool) -> None:
        self._staged.setdefault(key, {})[node.ref] = (made.held, result, flawed)

    def view_decided(self, view: View, excused: Collection[PeerRef]) -> None:
        standing = {member.ref for member in view.members} | set(excused)
        for ref in self._standing - standing:
            self._evictions[ref] = view.epoch
        self._standing = standing

    def rebuilt(self, record: RebuildRecord | RollbackRecord) -> None:
        """Payloads are void: what the lost journal has given to their owners cannot be known.

        So they are where the new epoch is below an owner's too. It is if the owner's answer was lost, and a copy of its
        folder with an old epoch has answered for it.
        """
        self._lost_with_a_journal |= {item.name for item in (*self._open.values(), *self._late.values())}
        self._evictions |= dict.fromkeys((*self._standing, *self._open, *self._late), record.epoch)
        self._standing = set()

    def committed(self, record: CommitRecord, view: View) -> dict[PeerRef, Payload]:
        """Whose payloads it holds."""
        refs = {member.ref for member in view.members}
        demand({item.ref for item in record.contributions} == refs, "I2", "the commit names others than the view")
        staged = self._staged.get(record.key, {})
        voters = [ref for ref in refs if ref in staged and staged[ref][0].digest == record.digest]
        demand(2 * len(voters) > len(refs), "I1", "committed a digest that no strict majority has staged")
        demand(all(ref in staged for ref in refs), "I2", "committed without a result of every member")
        weights = {item.ref: item.weight for item in record.contributions}
        payloads: dict[PeerRef, Payload] = {}
        for chunk in staged[voters[0]][1]:
            demand(FALSE not in chunk, "liars", f"a false sum is in {record.key}")
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
                demand(share_name not in self._carried, "I3", f"{share_name} is in another payload by now")
        for item in record.contributions:
            demand(
                item.consumed == payloads[item.ref].consumed,
                "I7",
                f"{name(item.ref)} trained on samples it does not own",
            )
        return payloads

    def installed(self, node: "PeerNode", key: RoundKey, result: Result) -> None:
        payload = self._open.pop(node.ref, None) or self._void.pop(node.ref, None)
        demand(payload is not None, "I6", f"{name(node.ref)} installs without a payload")
        assert payload is not None
        for chunk in result:
            demand(payload.name in [share[0] for share in chunk], "I6", f"the work of {name(node.ref)} is not in it")

    def given_up(self, node: "PeerNode", epoch: int) -> None:
        """The peer forgets its payload: only its own eviction is a reason."""
        payload = self._open.pop(node.ref, None) or self._late.pop(node.ref, None)
        if payload is not None:
            self._void[node.ref] = payload
            evicted = self._evictions.get(node.ref, -1) > epoch or payload.name in self._committed
            evicted = evicted or payload.name in self._lost_with_a_journal
            evicted = evicted or self._history.final  # it was late for the run's last round
            demand(evicted, "I6", f"{name(node.ref)} lost its work in epoch {epoch} without being evicted")

    def gone(self, ref: PeerRef) -> None:
        self._open.pop(ref, None)
        self._late.pop(ref, None)


class Leases:
    """I7: every sample has one place, and is consumed once. Kept sample by sample, without ranges.

    Args:
        most_given: to anybody at once, however many it asks for.
    """

    def __init__(self, most_given: int) -> None:
        self._most_given = most_given
        self._owner: dict[int, PeerRef] = {}
        self._consumed: dict[int, int] = {}  # by which step
        self._members: set[PeerRef] = set()
        self._serials: set[tuple[PeerRef, int]] = set()
        self._since: dict[PeerRef, int] = {}  # in which epoch it was admitted
        self._asked: dict[tuple[PeerRef, int], int] = {}  # in which epoch it said so

    def view_decided(self, view: View, excused: Collection[PeerRef]) -> None:
        self._members = {member.ref for member in view.members} | set(excused)
        self._since = {ref: self._since.get(ref, view.epoch) for ref in self._members}

    def requested(self, sender: PeerRef, request: LeaseRequest) -> None:
        self._asked[sender, request.serial] = request.epoch

    def granted(self, record: LeaseRecord) -> None:
        demand(record.ref in self._members, "I7", f"leases for {name(record.ref)}, who is no member")
        demand((record.ref, record.serial) not in self._serials, "I7", "{} gets for one request twice", record.ref)
        self._serials.add((record.ref, record.serial))
        num_given = sum(len(item) for item in record.ranges)
        demand(num_given <= self._most_given, "liars", "{} is given {} samples", record.ref, num_given)
        is_old = self._asked.get((record.ref, record.serial), self._since[record.ref]) < self._since[record.ref]
        demand(not is_old, "I7", "{} gets what an older membership of it has asked for", record.ref)
        for index in (i for item in record.ranges for i in range(item.start, item.stop)):
            demand(index not in self._consumed, "I7", "sample {} is given again after it was consumed", index)
            demand(index not in self._owner, "I7", "sample {} has two owners", index)
            self._owner[index] = record.ref

    def told(self, to: PeerRef, grant: LeaseGrant) -> None:
        """A grant is told once more: it is still its receiver's, or used up."""
        for index in (i for item in grant.ranges for i in range(item.start, item.stop)):
            is_its = self._owner.get(index) == to or index in self._consumed
            demand(is_its, "I7", "{} is told that sample {} is its own", to, index)

    def consumed(self, record: CommitRecord) -> None:
        for contribution in record.contributions:
            for index in (i for item in contribution.consumed for i in range(item.start, item.stop)):
                demand(self._owner.get(index) == contribution.ref, "I7", "sample {} is consumed by a stranger", index)
                demand(index not in self._consumed, "I7", "sample {} is consumed twice", index)
                self._consumed[index] = record.outer_step
                del self._owner[index]

    def released(self, record: ReleaseRecord) -> None:
        demand(record.ref not in self._members, "I7", f"leases of the member {name(record.ref)} are released")
        for index in (i for item in record.ranges for i in range(item.start, item.stop)):
            demand(self._owner.pop(index, None) == record.ref, "I7", "sample {} is released by a stranger", index)

    def rebuilt(self, kept: Iterable[CommitRecord]) -> None:
        """Only what the commits that count have consumed is consumed."""
        self._consumed = consumed_by(kept)
        self._owner.clear()
        self._serials.clear()
        self._members, self._since = set(), {}

    def at_rest(self, next_index: int, free: int) -> None:
        """Nothing is lost: whatever was given is owned by a member, consumed, or free again."""
        strangers = [ref for ref in self._owner.values() if ref not in self._members]
        demand(not strangers, "I7", "somebody who is gone still owns samples")
        places = len(self._owner) + len(self._consumed) + free
        demand(places == next_index, "I7", f"{next_index - places} samples are nowhere")


def consumed_by(commits: Iterable[CommitRecord]) -> dict[int, int]:
    """Every sample that these commits have consumed, with the step."""
    return {
        index: commit.outer_step
        for commit in commits
        for item in commit.contributions
        for piece in item.consumed
        for index in range(piece.start, piece.stop)
    }
