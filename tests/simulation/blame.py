# SPDX-License-Identifier: Apache-2.0
"""I5: who is put out because a round could not be finished with it. Judged by what the members said.

A member that a commit has held work of is not put out on the word of newcomers, and half of the last commit's members
are never put out by accusations alone. Nor does a round go on without the late if newcomers alone are left. One voice
never outweighs members who reach each other: who goes alone has at least as many broken links as any who stay, be it
among the members or with those, too, who went since the last commit.
"""

from collections import defaultdict

from isthmus.collective.core.apart import are_apart
from isthmus.collective.core.types import PeerId, PeerRef, View
from isthmus.elastic.core.messages import RoundFailed
from isthmus.elastic.core.records import CommitRecord, RebuildRecord, RollbackRecord, ViewRecord
from tests.simulation.symbols import name
from tests.simulation.world import demand

BLAMED = "members could not finish the round with it"


class Blame:
    """Books of who has accused whom since the last commit, and whose work is in one."""

    def __init__(self) -> None:
        self._proven: set[PeerId] = set()  # a commit holds work of it
        self._standing: set[PeerRef] = set()  # and it has been a member, or excused, ever since
        self._last: set[PeerRef] = set()  # whose work the last commit holds
        self._accused: defaultdict[PeerId, set[PeerRef]] = defaultdict(set)  # by whom
        self._complained: defaultdict[PeerRef, set[PeerId]] = defaultdict(set)  # about whom; itself if about nobody
        self._view: View | None = None
        self._said: dict[PeerRef, tuple[PeerId, ...]] = {}  # in this view, about whom
        self._told: dict[PeerRef, PeerId] = {}  # in this view, by whom
        self._broken: set[tuple[PeerId, PeerId]] = set()  # links that were judged since the last commit

    def coordinator_started(self) -> None:
        """What was said is forgotten with the process that heard it."""
        self._said.clear()
        self._told.clear()
        self._broken.clear()

    def reported(self, sender: PeerRef, report: RoundFailed) -> None:
        """A report has arrived. What its sender was told by another member is no word of its own.

        It may count as one against the member that is said to have told it, if that one does not say so.
        """
        view, told_by = self._view, report.told_by
        if view is not None and view.holds(sender) and report.key.epoch == view.epoch:
            self._said[sender] = report.suspects if told_by is None else ()
            self._told.pop(sender, None)
            if told_by is not None:
                self._told[sender] = told_by
        for suspect in (report.suspects if told_by is None else (told_by,)) or (sender.peer_id,):
            self._accused[suspect].add(sender)
            self._complained[sender].add(suspect)

    def committed(self, record: CommitRecord) -> None:
        self._said.clear()
        self._told.clear()
        self._broken.clear()
        self._last = {item.ref for item in record.contributions}
        self._standing |= self._last
        self._proven |= {ref.peer_id for ref in self._last}
        self._accused.clear()
        self._complained.clear()

    def rebuilt(self, record: RebuildRecord | RollbackRecord) -> None:
        """A journal that was made anew knows whose work its certificate holds; one that went back still knows all."""
        self._view = None
        self._said.clear()
        self._told.clear()
        self._broken.clear()
        self._last, self._standing = set(), set()
        if isinstance(record, RebuildRecord):
            known = () if record.certificate is None else record.certificate.contributors
            self._proven = {item.peer_id for item in known}

    def view_decided(self, record: ViewRecord, before: View | None) -> None:
        now = {member.ref for member in record.view.members}
        blamed = {PeerId(part.split(" ")[0]) for part in record.cause.split("; ") if part.endswith(BLAMED)}
        out = [member.ref for member in (before.members if before else ()) if member.peer_id in blamed]
        proven = [ref for ref in out if ref.peer_id in self._proven]
        for ref in proven:
            voices = {voice for voice in self._accused[ref.peer_id] if voice.peer_id in self._proven}
            demand(
                bool(voices or self._complained[ref] & self._proven),
                "I5",
                f"{name(ref)} is put out on the word of newcomers",
            )
        if "goes on without" in record.cause:
            alone = not now & self._standing and bool(set(record.excused) & self._standing)
            demand(not alone, "I5", "a round goes on with newcomers alone")
        self._judge_links(record, before, blamed)
        self._standing &= now | set(record.excused)
        if proven and self._last:
            demand(2 * len(self._last & now) >= len(self._last), "I5", "accusations put out most of the last commit")

    def _judge_links(self, record: ViewRecord, before: View | None, blamed: set[PeerId]) -> None:
        """Who goes alone, against all who stay and have said something, or of whom something was said, in this view."""
        members = {member.peer_id for member in before.members} if before is not None else set()
        now = {(ref.peer_id, peer) for ref, peers in self._said.items() for peer in peers if peer in members}
        now = {link for link in now if before is None or not _is_apart(before, *link)}
        if "round failed, one more try" in record.cause or blamed:
            self._broken |= now
        spoke = {ref.peer_id for ref in self._said if ref not in self._told}
        tales = (
            {(ref.peer_id, teller) for ref, teller in self._told.items() if teller not in spoke} if before else set()
        )
        if len(blamed) == 1:
            (out,) = blamed
            stay = {peer for link in now for peer in link} - blamed
            everybody = members.union(*self._broken)
            for peer in stay & {member.peer_id for member in record.view.members}:
                is_fewer = any(
                    self._num_broken(peer, known, links) <= self._num_broken(out, known, links)
                    for known in (members, everybody)
                    for links in (self._broken, self._broken | tales)
                )
                demand(is_fewer, "I5", f"{out} is put out, and {peer} stays with more broken links")
        self._said.clear()
        self._told.clear()
        self._view = record.view

    def _num_broken(self, peer: PeerId, known: set[PeerId], links: set[tuple[PeerId, PeerId]]) -> int:
        """Links with those. What newcomers say of each other counts, and of others it does not."""
        others = {other for link in links if peer in link for other in link if other != peer} & known
        return len(others & self._proven if peer in self._proven else others)


def _is_apart(view: View, one: PeerId, other: PeerId) -> bool:
    """Whether the view has no link between them: neither can say anything of it."""
    rank, other_rank = view.rank_of(one), view.rank_of(other)
    return rank is not None and other_rank is not None and are_apart(frozenset(view.apart), rank, other_rank)
