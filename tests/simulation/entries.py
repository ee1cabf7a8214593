# SPDX-License-Identifier: Apache-2.0
"""I5: who comes in, and when.

Whoever becomes a member has links with all others, as both ends have said, but for the pairs that the view names: these
have tried in vain, or have been asked to for long, and had no link in the view before, or one of them could not finish
a round over it. Whom the others waited for in
vain several times in a row stays out for twice as many commits each time. A run that went back begins with all who hold
its state.
"""

from collections.abc import Callable, Collection

from isthmus.collective.core.types import PeerId, PeerRef, View
from isthmus.elastic.core.messages import (
    CoordinatorMessage,
    Evicted,
    Goodbye,
    Held,
    Join,
    Leave,
    Meet,
    Met,
    PeerMessage,
    Rebuilt,
    Refused,
    RoundFailed,
    Synced,
    Welcome,
)
from isthmus.elastic.core.records import CommitRecord, RebuildRecord, RollbackRecord, ViewRecord
from tests.simulation.symbols import name
from tests.simulation.world import demand

LOOKS_EVERY_S = 2.1
"""A coordinator that has slept for less than this is not sure to notice it."""


class Entries:
    """Books of links, of waits in vain, and of who is awaited.

    Args:
        quorum: so many members a commit needs now; with fewer nobody pauses.
        patience_s: how long a run that went back waits for those that hold its state.
        meet_s: how long two have to make a link.
        orphan_s: how long it waits for them while fewer than half of those that made its newest commit are here.
    """

    def __init__(self, quorum: Callable[[], int], patience_s: float, meet_s: float, orphan_s: float) -> None:
        self._quorum = quorum
        self._patience_s = patience_s
        self._meet_s = meet_s
        self._orphan_s = orphan_s
        self._met: set[tuple[PeerRef, PeerRef]] = set()  # as the first one says
        self._unmet: set[tuple[PeerRef, PeerRef]] = set()  # likewise, at any time
        self._accused: set[frozenset[PeerId]] = set()  # one could not finish a round for the other, at any time
        self._asked: dict[tuple[PeerRef, PeerRef], float] = {}  # when the first one was asked to meet the other
        self._apart: set[frozenset[PeerRef]] = set()  # had no link in some view
        self._together: set[frozenset[PeerRef]] = set()  # were in one view
        self._members: set[PeerRef] = set()
        self._here: set[PeerRef] = set()  # have said something, and no connection of theirs was lost since
        self._held: set[tuple[PeerRef, Held]] = set()  # as they have said
        self._learners: set[PeerRef] = set()  # welcome, and not sent away since
        self._leaving: set[PeerRef] = set()  # will be no members any more
        self._waits: dict[PeerRef, int] = {}  # in vain, in a row
        self._excused: dict[PeerRef, int] = {}  # after how many commits
        self._num_commits = 0
        self._awaited: tuple[set[PeerId], float] | None = None
        self._looked_at: float | None = None
        self._without_s = 0.0  # so long there are no members; a gap in which the coordinator slept is a short one

    def coordinator_started(self) -> None:
        """Its own patience is forgotten with it."""
        self._met.clear()
        self._learners.clear()
        self._here.clear()
        self._held.clear()
        self._waits.clear()
        self._excused.clear()
        self._awaited, self._looked_at, self._without_s = None, None, 0.0

    def looked(self, now: float) -> None:
        """The coordinator has handled an event."""
        gap_s, self._looked_at = now - (now if self._looked_at is None else self._looked_at), now
        self._without_s += min(max(gap_s, 0.0), LOOKS_EVERY_S)

    def _hold(self, sender: PeerRef, held: Held | None) -> None:
        if held is not None:
            self._held.add((sender, held))

    def lost(self, sender: PeerRef) -> None:
        """A connection of it is gone. That may be an older one: then it goes on speaking (seed 1735)."""
        self._here.discard(sender)

    def brought(self, sender: PeerRef, message: PeerMessage) -> None:
        self._here.add(sender)
        match message:
            case Join(held=held):
                self._hold(sender, held)
            case Synced(held=held):
                self._hold(sender, held)
            case Met():
                self._met |= {(sender, peer) for peer in message.peers}
                self._unmet |= {(sender, item.ref) for item in message.unmet}
            case RoundFailed(told_by=told_by, suspects=suspects):
                named = suspects if told_by is None else (*suspects, told_by)
                self._accused |= {frozenset((sender.peer_id, peer)) for peer in named}
            case Leave():
                self._leaving.add(sender)
                if self._awaited is not None:
                    self._awaited[0].discard(sender.peer_id)  # it serves the state, and is no member
            case _:
                pass

    def told(self, to: PeerRef, message: CoordinatorMessage, connected: Collection[PeerRef]) -> None:
        """The coordinator says this, and has connections with these."""
        match message:
            case Welcome():
                self._learners = {ref for ref in self._learners if ref.peer_id != to.peer_id} | {to}
            case Meet(peers=peers):
                for peer in peers:
                    self._asked.setdefault((to, peer.ref), self._looked_at or 0.0)
                self._demand_calls(to, {peer.ref for peer in peers}, connected)
            case Evicted(reason="a learner, no member"):
                pass
            case Evicted() | Refused() | Goodbye() | Rebuilt():
                self._learners.discard(to)
            case _:
                pass

    def _demand_calls(self, to: PeerRef, named: set[PeerRef], connected: Collection[PeerRef]) -> None:
        """Who is asked to meet others also calls those again that have not met it, though it has met them."""
        others = self._learners if to in self._members else self._members
        for other in others.intersection(connected) - {to} - named - self._leaving:
            is_one_sided = (to, other) in self._met and (other, to) not in self._met
            is_known = frozenset((to, other)) in self._together
            is_known |= self._is_accused(to, other)
            demand(not is_one_sided or is_known, "I5", "{} is not asked to meet {} again", to, other)

    def _is_accused(self, one: PeerRef, other: PeerRef) -> bool:
        return frozenset((one.peer_id, other.peer_id)) in self._accused

    def committed(self, record: CommitRecord) -> None:
        self._num_commits += 1
        for item in record.contributions:
            self._waits.pop(item.ref, None)

    def goes_back(self, given_up: CommitRecord, now: float) -> None:
        """The run is to give up a commit. Who has fetched it since counts like those that made it."""
        self.looked(now)
        made = {item.ref.peer_id for item in given_up.contributions}
        named = made | {ref.peer_id for ref, held in self._held if held.digest == given_up.digest}
        num_here = len(named & {ref.peer_id for ref in self._here})
        is_long = self._without_s >= self._orphan_s - 1e-6
        said = f"{num_here} of {len(named)} are here when their commit is given up"
        demand(2 * num_here >= len(named) or is_long, "I3", f"{said}, {self._without_s:.1f} s after the last member")

    def rebuilt(self, record: RebuildRecord | RollbackRecord, now: float) -> None:
        refs = record.testified if isinstance(record, RebuildRecord) else record.holders
        if isinstance(record, RollbackRecord):
            self.looked(now)
            waited = self._without_s >= self._patience_s - 1e-6
            demand(waited, "I3", f"the run goes back after {self._without_s:.1f} s without members")
        self._here.clear()
        self._awaited = {ref.peer_id for ref in refs}, now
        self._excused.clear()

    def view_decided(self, record: ViewRecord, before: View | None, now: float) -> None:
        members = [member.ref for member in record.view.members]
        if members or (before is not None and before.members):
            self._without_s = 0.0
        self._members, self._learners = set(members), self._learners.difference(members)
        old = {member.ref for member in before.members} if before is not None else set()
        apart = {frozenset((members[one], members[other])) for one, other in record.view.apart}
        is_next = before is not None and record.view.epoch == before.epoch + 1  # else the run has gone back meanwhile
        self._demand_trying(apart, _linked(before) if before is not None and is_next else set(), now)
        for ref in (ref for ref in members if ref not in old):
            self._demand_links(ref, members, apart)
            if len(old) >= self._quorum():
                self._demand_pause(ref)
        pairs = {frozenset((one, other)) for one in members for other in members if one != other}
        self._together |= pairs - apart
        for ref in old.intersection(record.excused):
            self._waits[ref] = self._waits.get(ref, 0) + 1
            self._excused[ref] = self._num_commits
        self._excused = {ref: since for ref, since in self._excused.items() if ref in record.excused}
        if members and self._awaited is not None:
            (awaited, since), self._awaited = self._awaited, None
            missing = awaited - {ref.peer_id for ref in members}
            is_early = now < since + self._patience_s - 1e-6
            demand(not (missing and is_early), "I5", f"the run begins again without {sorted(missing)}")

    def _demand_links(self, ref: PeerRef, members: list[PeerRef], apart: set[frozenset[PeerRef]]) -> None:
        for other in members:
            pair = frozenset((ref, other))
            if other != ref and pair not in self._together | apart:
                both = (ref, other) in self._met and (other, ref) in self._met
                demand(both, "I5", f"{name(ref)} and {name(other)} are members, and have not both said that they met")

    def _demand_trying(self, apart: set[frozenset[PeerRef]], linked: set[frozenset[PeerRef]], now: float) -> None:
        for one, other in map(tuple, apart - self._apart):
            both = (one, other) in self._unmet and (other, one) in self._unmet
            asked_at = [self._asked.get(pair, now) for pair in ((one, other), (other, one))]
            has_tried = both or now >= max(asked_at) + self._meet_s - LOOKS_EVERY_S
            if self._is_accused(one, other):
                continue
            names = f"{name(one)} and {name(other)}"
            demand(has_tried, "I5", f"{names} have no link in a view, and have not tried")
            demand(
                frozenset((one, other)) not in linked,
                "I5",
                f"{names} had a link, and the next view says that they have none",
            )
        self._apart |= apart

    def _demand_pause(self, ref: PeerRef) -> None:
        if ref in self._excused:
            out, least = self._num_commits - self._excused[ref], 2 ** (self._waits[ref] - 1)
            demand(out >= least, "I4", f"{name(ref)} was late {self._waits[ref]} times and is back after {out} commits")


def _linked(view: View) -> set[frozenset[PeerRef]]:
    """The pairs of its members that have a link."""
    refs = [member.ref for member in view.members]
    pairs = {(a, b) for b in range(len(refs)) for a in range(b)} - set(view.apart)
    return {frozenset((refs[a], refs[b])) for a, b in pairs}
