# SPDX-License-Identifier: Apache-2.0
"""Votes and failures of the round in progress, and what they amount to.

A round is over for its view when every member has voted, or when somebody reported that it cannot finish. Votes are
for a ballot: the round key and the digest that the shared state would have. All equal: commit. A strict majority:
commit, and the deviants re-sync. Neither: once more in another epoch. Blame for failures rests on which links
are broken. Only counting: what follows from it is decided in closing.py.
"""

from collections.abc import Collection
from dataclasses import dataclass

from isthmus.collective.core.types import Instant, PeerId, RoundKey, View
from isthmus.elastic.core.messages import RoundFailed, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """This ballot won. `deviants` voted for something else."""

    key: RoundKey
    digest: bytes
    deviants: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Everybody voted and no ballot has a strict majority."""


class Rounds:
    """What the members of the current view said about the round from the committed state."""

    def __init__(self) -> None:
        self.votes: dict[PeerId, Vote] = {}
        self.voted_at: dict[PeerId, Instant] = {}
        self.reports: dict[PeerId, RoundFailed] = {}
        self.judge_at: Instant | None = None
        self.began_at: Instant = 0.0
        """When the view was decided in which the round is tried."""
        self.retries = 0
        """How often this outer step was tried again with unchanged members."""
        self.splits = 0
        """Votes without a majority, in a row."""
        self._past_links: set[tuple[PeerId, PeerId]] = set()  # that were said to be broken since the last commit

    def remember(self, view: View) -> None:
        """The view is about to change for what was reported: it counts on until something is committed."""
        self._past_links |= {(accuser, peer) for accuser, peers in self._voices(view).items() for peer in peers}

    def vote(self, peer_id: PeerId, vote: Vote, now: Instant) -> bool:
        """Note a vote. Refused from who has reported that it cannot finish: its staged result is gone."""
        if peer_id in self.reports:
            return False
        self.votes[peer_id] = vote
        self.voted_at.setdefault(peer_id, now)
        return True

    def report(self, peer_id: PeerId, report: RoundFailed, judge_at: Instant) -> None:
        """Note a failure. The first one opens the window in which the others are awaited."""
        self.votes.pop(peer_id, None)
        self.voted_at.pop(peer_id, None)
        self.reports[peer_id] = report
        if self.judge_at is None:
            self.judge_at = judge_at

    def forgive(self, judge_at: Instant, now: Instant) -> None:
        """The coordinator itself did not run: the others' words may lie unread, and are awaited anew."""
        self.voted_at = dict.fromkeys(self.voted_at, now)
        if self.judge_at is not None:
            self.judge_at = judge_at

    def begin(self, now: Instant) -> None:
        """The view changed: what was said in the old one counts no more."""
        self.began_at = now
        self._void()

    def _void(self) -> None:
        self.votes.clear()
        self.voted_at.clear()
        self.reports.clear()
        self.judge_at = None

    def committed(self) -> None:
        """The outer step is made: the next one starts without a past."""
        self._void()
        self._past_links.clear()
        self.retries = 0
        self.splits = 0

    def voted(self, peer_id: PeerId) -> bool:
        """Whether this member's vote is here."""
        return peer_id in self.votes

    def spoke(self, peer_id: PeerId) -> bool:
        """Whether this member is done with the round, one way or the other."""
        return peer_id in self.votes or peer_id in self.reports

    def outcome(self, view: View) -> Agreed | Split | None:
        """What the votes decide, or None while a member has not voted."""
        if not view.members or any(member.peer_id not in self.votes for member in view.members):
            return None
        ballots: dict[tuple[RoundKey, bytes], list[PeerId]] = {}
        for member in view.members:
            vote = self.votes[member.peer_id]
            ballots.setdefault((vote.key, vote.digest), []).append(member.peer_id)
        (key, digest), winners = max(ballots.items(), key=lambda item: len(item[1]))
        if 2 * len(winners) <= view.world_size:
            return Split()
        deviants = tuple(member.peer_id for member in view.members if member.peer_id not in winners)
        return Agreed(key=key, digest=digest, deviants=deviants)

    def accused(self, view: View, newcomers: Collection[PeerId] = ()) -> dict[PeerId, int]:
        """How many members point at each, newcomers at newcomers only. Whoever names no other accuses itself."""
        result = dict.fromkeys((member.peer_id for member in view.members), 0)
        for accuser, suspects in self._voices(view).items():
            for peer in suspects or [accuser]:
                result[peer] += accuser not in newcomers or peer in newcomers
        return result

    def known(self, view: View) -> set[PeerId]:
        """The members, and whoever was said to have a broken link since the last commit and is gone."""
        return {member.peer_id for member in view.members}.union(*self._past_links)

    def blamed(self, view: View, newcomers: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Whom to drop after a failure, so that those who stay reach each other.

        An accusation says that a link is broken, not whose fault it is: it counts against both of its ends. So a
        member that reaches nobody goes, however many it accuses, and not those who reach each other. What a newcomer
        says counts against itself alone: it has no commit yet, the others have. Between two ends with as many broken
        links the accused one goes, then the newcomer, then the newest member. What was said since the last commit
        counts on, also against members that are gone: nobody accuses one after the other out.

        Args:
            newcomers: whoever has no commit yet, of the `known` ones. One that was dropped is still a newcomer: without
                that its word, and the next newcomer's, sent a proven member out (seed 101577).
        """
        present = [member.peer_id for member in view.members]
        now = {frozenset((accuser, peer)) for accuser, peers in self._voices(view).items() for peer in peers}
        links = now | {frozenset(link) for link in self._past_links}
        accused = self.accused(view, newcomers)
        blamed: list[PeerId] = []
        while True:
            rest = [peer for peer in present if peer not in blamed]
            broken = [link for link in now if link.issubset(rest)]
            if not broken and (blamed or not any(accused.values())):
                return tuple(blamed)

            def weight(peer: PeerId, rest: list[PeerId] = rest) -> tuple[int, int, bool, int]:
                others = [other for link in links if peer in link for other in link if other not in (peer, *blamed)]
                if peer not in newcomers:
                    others = [other for other in others if other not in newcomers]
                return len(others), accused[peer], peer in newcomers, rest.index(peer)

            ends = [peer for peer in rest if any(peer in link for link in broken)]
            blamed.append(max(ends or [peer for peer in rest if accused[peer]], key=weight))

    def _voices(self, view: View) -> dict[PeerId, list[PeerId]]:
        """Whom each member accuses. What it was told is no voice: the member that said it has a report of its own."""
        present = {member.peer_id for member in view.members}
        return {
            accuser: [peer for peer in dict.fromkeys(report.suspects) if peer in present and peer != accuser]
            for accuser, report in self.reports.items()
            if report.told_by is None
        }
