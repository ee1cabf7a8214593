"""Votes and failures of the round in progress, and what they amount to.

A round is over for its view when every member has voted, or when somebody reported that it cannot finish. Votes are
for a ballot: the round key and the digest that the shared state would have. All equal: commit. A strict majority:
commit, and the deviants re-sync. Neither: once more in another epoch. Blame for failures rests on how many members
point at whom. Only counting: what follows from it is decided in closing.py.
"""

from dataclasses import dataclass

from collective.core.types import Instant, PeerId, RoundKey, View
from elastic.core.messages import RoundFailed, Vote


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
        self.reports: dict[PeerId, RoundFailed] = {}
        self.judge_at: Instant | None = None
        self.retries = 0
        """How often this outer step was tried again with unchanged members."""
        self.splits = 0
        """Votes without a majority, in a row."""

    def vote(self, peer_id: PeerId, vote: Vote) -> bool:
        """Note a vote. Refused from who has reported that it cannot finish: its staged result is gone."""
        if peer_id in self.reports:
            return False
        self.votes[peer_id] = vote
        return True

    def report(self, peer_id: PeerId, report: RoundFailed, judge_at: Instant) -> None:
        """Note a failure. The first one opens the window in which the others are awaited."""
        self.votes.pop(peer_id, None)
        self.reports[peer_id] = report
        if self.judge_at is None:
            self.judge_at = judge_at

    def forgive(self, judge_at: Instant) -> None:
        """The coordinator itself did not run: the others' words may lie unread, and are awaited anew."""
        if self.judge_at is not None:
            self.judge_at = judge_at

    def void(self) -> None:
        """The view changed: what was said in the old one counts no more."""
        self.votes.clear()
        self.reports.clear()
        self.judge_at = None

    def committed(self) -> None:
        """The outer step is made: the next one starts without a past."""
        self.void()
        self.retries = 0
        self.splits = 0

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

    def accusers(self, view: View) -> dict[PeerId, int]:
        """How many members point at whom. A report that names no other member accuses its own sender."""
        result = dict.fromkeys((member.peer_id for member in view.members), 0)
        for reporter, report in self.reports.items():
            suspects = [peer for peer in dict.fromkeys(report.suspects) if peer in result and peer != reporter]
            for peer in suspects or [reporter]:
                result[peer] += 1
        return result

    def most_accused(self, view: View) -> PeerId:
        """Whom to drop after a repeated failure. Ties go against the highest rank, the newest member."""
        counts = self.accusers(view)
        return max(reversed(view.members), key=lambda member: counts[member.peer_id]).peer_id
