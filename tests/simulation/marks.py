# SPDX-License-Identifier: Apache-2.0
"""Which rules a seed has exercised: marks that the checkers and nodes hit, and a list of those that must be hit.

A rule that no seed ever reaches is a rule that nothing tests. The machines count what their fences drop; the rest can
be read off the records, the messages and the effects. `fault: ...` says how often what was injected.
"""

from collections import Counter
from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerRef, View
from isthmus.elastic.core.events import BecomeLearner, Finish, InstallStaged
from isthmus.elastic.core.messages import CoordinatorMessage, Evicted, LeaseGrant, Refused, Welcome
from isthmus.elastic.core.records import (
    CommitRecord,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    ViewRecord,
)

if TYPE_CHECKING:
    from tests.simulation.coordinator_node import CoordinatorNode
    from tests.simulation.peer import PeerNode

CAUSES = (
    "joined",
    "goes on without",
    "left at once",
    "left",
    "evicted",
    "started again",
    "round failed, one more try",
    "votes differ",
    "dropped",
)
"""What the cause of a view may say; the first that fits counts."""


class Marks(Counter[str]):
    """How often each mark was hit in one seed."""

    def __init__(self) -> None:
        super().__init__()
        self._founders: set[PeerRef] = set()
        self._grants_told: set[tuple[PeerRef, int]] = set()
        self._next = 0  # first sample that was never given
        self._recovered = False  # the coordinator has a journal from before, and no view of its own yet
        self._has_written = True

    # ------------------------------------------------------------------------ the coordinator

    def coordinator_started(self, num_records: int) -> None:
        self._recovered = num_records > 0
        self._has_written = False

    def coordinator_ended(self, node: "CoordinatorNode") -> None:
        if node.machine is not None:
            self.counted("coordinator", node.machine.counters)

    def persisted(self, record: Record, before: View | None, quorum: int) -> None:
        match record:
            case ViewRecord(view=view):
                self._view(record, before, quorum)
                self._recovered = False
                self["view: empty"] += not view.members
            case CommitRecord():
                self["recovery: the view went on"] += self._recovered
                self["commit: final"] += record.final
                self._recovered = False
            case LeaseRecord():
                self["lease: freed samples given again"] += any(item.start < self._next for item in record.ranges)
                self._next = max(self._next, *(item.stop for item in record.ranges), 0)
            case RebuildRecord(certificate=certificate, insisted=insisted):
                how = "by few" if insisted else "by a majority"
                self["journal: made anew from nothing" if certificate is None else f"journal: made anew {how}"] += 1
            case RollbackRecord(certificate=certificate):
                self["the run went back" + (" to its beginning" if certificate is None else "")] += 1
            case ReleaseRecord():
                self["recovery: leases of a cut journal released"] += not self._has_written
            case _:
                pass
        self._has_written = True

    def _view(self, record: ViewRecord, before: View | None, quorum: int) -> None:
        for part in record.cause.split("; "):
            cause = next((cause for cause in CAUSES if cause in part), None)
            if cause is not None:
                self[f"view: {cause}"] += 1
                few = before is not None and before.epoch > 0 and before.world_size < quorum
                self["view: joined while nobody could commit"] += cause == "joined" and few

    def told(self, to: PeerRef, message: CoordinatorMessage) -> None:
        match message:
            case Welcome(found=True):
                self["founder: replaced"] += bool(self._founders - {to}) and to not in self._founders
                self._founders.add(to)
            case LeaseGrant(serial=serial):
                self["lease: grant repeated"] += (to, serial) in self._grants_told
                self._grants_told.add((to, serial))
            case Evicted(reason="nobody holds the state"):
                self["view: nobody holds the state"] += 1
            case Refused(code=code):
                self[f"refused: {code}"] += 1
            case _:
                pass

    # ------------------------------------------------------------------------ the peers

    def admitted(self, num_behind: int) -> None:
        """A learner became a member, so many commits behind."""
        behind = {0: "with the newest state", 1: "one commit behind"}
        self[f"admitted: {behind.get(num_behind, 'several commits behind')}"] += 1

    def peer_ended(self, node: "PeerNode") -> None:
        if node.machine is not None:
            self.counted("member", node.machine.counters)
        self["wire: frame dropped"] += node.gate.dropped
        self["wire: frame held back"] += node.gate.num_held_back

    def learner(self, effect: BecomeLearner) -> None:
        self["member: overruled"] += "another result than this peer's" in effect.reason

    def finished(self, effect: Finish) -> None:
        late = ", without an answer" if "without an answer" in effect.reason else ""
        copied = ", copied" if "copy" in effect.reason else ""
        self[f"exit: {effect.code}{late}{copied}"] += 1

    def installed(self, effect: InstallStaged) -> None:
        self["install: learnt from a view"] += effect.position is None

    def counted(self, who: str, counters: Counter[str]) -> None:
        """What a machine counted until it ended."""
        for reason, number in counters.items():
            self[f"{who}: {reason}"] += number


KNOWN = frozenset(
    (
        "admitted: one commit behind",
        "admitted: several commits behind",
        "admitted: with the newest state",
        "commit: final",
        "coordinator: belated_word",
        "coordinator: blamed",
        "coordinator: dropped: connection lost, and a member waits for it",
        "coordinator: dropped: did not come back",
        "coordinator: dropped: does not hear",
        "coordinator: dropped: has not voted although nobody keeps it waiting",
        "coordinator: dropped: it is at odds with one member about numbers that are too large",
        "coordinator: dropped: makes no progress",
        "coordinator: dropped: members could not finish the round with it",
        "coordinator: dropped: said what is not true",
        "coordinator: dropped: silent",
        "coordinator: dropped: silent, and a member waits for it",
        "coordinator: dropped: voted long after most others",
        "coordinator: excused",
        "coordinator: forged_certificate",
        "coordinator: learner_spoke_as_member",
        "coordinator: parted",
        "coordinator: leased_enough",
        "coordinator: newer_certificate_given_up",
        "coordinator: old_lease_request",
        "coordinator: old_round",
        "coordinator: older_incarnation",
        "coordinator: sent_home",
        "coordinator: stranger",
        "coordinator: weights_disputed",
        "coordinator: woken_late",
        "course: began in the midst of a delay",
        "course: followed the others",
        "course: hurried for others that wait",
        "course: missed a step, and more were out",
        "course: several rounds a step",
        "course: several steps out",
        "disk: lost",
        "disk: torn",
        "disk: whole",
        "end: everybody left",
        "end: final",
        "end: goes on",
        "end: halted for its integrity",
        "end: lost, and said so",
        "end: waits for a quorum",
        "exit: 0",
        "exit: 4",
        "exit: 5",
        "exit: 5, copied",
        "exit: 7",
        "exit: 9",
        "exit: 20",
        "exit: 20, without an answer",
        "fault: burst",
        "fault: clock jump",
        "fault: clone",
        "fault: coordinator crash",
        "fault: coordinator pause",
        "fault: crash",
        "fault: cut",
        "fault: disk loss",
        "fault: hang",
        "fault: hung absorb",
        "fault: leave",
        "fault: evict",
        "fault: leave of the last",
        "fault: leave without an answer",
        "fault: link break",
        "fault: partition",
        "fault: one-way dials",
        "fault: pause",
        "fault: reset",
        "fault: slow",
        "fault: store away",
        "fault: swizzle",
        "fault: takeover",
        "fault: undialable",
        "weights: odd",
        "founder: replaced",
        "install: learnt from a view",
        "journal: died, and the record was lost",
        "journal: died, and the record was written",
        "journal: made anew by a majority",
        "journal: made anew by few",
        "journal: made anew from nothing",
        "journal: read from a snapshot on",
        "lease: freed samples given again",
        "lease: grant repeated",
        "leave: handed over",
        "liar: named for a certificate",
        "leave: of the last holders",
        "leave: stays for the state",
        "member: old_certificate",
        "member: old_epoch",
        "member: old_exchange",
        "member: old_grant",
        "member: overruled",
        "recovery: leases of a cut journal released",
        "recovery: the view went on",
        "fault: power cut",
        "refused: 0",
        "refused: 5",
        "refused: 7",
        "refused: 9",
        "the run went back",
        "the run went back to its beginning",
        "store: another one has written",
        "transfer: asked another donor",
        "transfer: failed",
        "transfer: fetched a snapshot",
        "transfer: replayed commits",
        "view: dropped",
        "view: empty",
        "view: evicted",
        "view: goes on without",
        "view: joined",
        "view: joined while nobody could commit",
        "view: left",
        "view: left at once",
        "view: nobody holds the state",
        "view: round failed, one more try",
        "view: started again",
        "view: votes differ",
        "wire: frame dropped",
        "wire: frame held back",
    )
)
"""What enough seeds, together with the files of scenarios/, must have hit."""

DEFENCES = frozenset(
    (
        "coordinator: lease_clipped",
        "coordinator: lease_shredded",
        "member: broken_chain",
        "member: forged_certificate",
        "member: leases_wanted_by_learner",
        "member: payload_of_another_step",
        "member: payload_of_no_member",
        "transfer: not what was asked for",
    )
)
"""What only a peer that breaks the protocol, or a shell that breaks its contract, can hit. These peers do neither."""
