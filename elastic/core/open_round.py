# SPDX-License-Identifier: Apache-2.0
"""The round in progress as the coordinator sees it: what its members were told, votes and failures, and what follows.

Votes are for a ballot: the round key and the digest that the shared state would have. All equal: commit. A strict
majority: commit, and the deviants fetch the state. No majority: the round is tried again in a new epoch, and after
`max_split_votes` in a row the run halts. This module only counts. closing.py and failures.py decide, and also go on
without members that are silent, late, or cannot finish the round.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from isthmus.collective.core.apart import are_apart
from isthmus.collective.core.types import Instant, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.grace import Grace
from isthmus.elastic.core.messages import RoundFailed, Vote

_UNSURVEYED = 64
"""So many outer steps are planned without a survey of links after members first planned differently, and each time
twice as many. Such a plan is correct; over unequal links it is slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """This ballot won. `deviants` voted for something else."""

    key: RoundKey
    digest: bytes
    deviants: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Everybody voted and no ballot has a strict majority."""


def majority_at(voted_at: Mapping[PeerId, Instant], num_members: int) -> Instant | None:
    """When a majority of so many members had voted, or one of two. None: it has not."""
    enough = num_members // 2 + 1 if num_members > 2 else 1
    return sorted(voted_at.values())[enough - 1] if len(voted_at) >= enough else None


class OpenRound:
    """What the members of the current view were told of the round from the committed state, and what they said."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.grace = Grace(config)
        self.votes: dict[PeerId, Vote] = {}
        self.voted_at: dict[PeerId, Instant] = {}
        self.settled_at: dict[PeerId, Instant] = {}
        """When each said for the first time what its vote says now. A vote may be given early, and changed."""
        self.reports: dict[PeerId, RoundFailed] = {}
        self.judge_at: Instant | None = None
        self.began_at: Instant = 0.0
        """When the view was decided in which the round is tried."""
        self.kept_waiting_s: dict[PeerRef, float] = {}
        """Seconds for which each member, in earlier views of this round, had not voted after a majority had, and its
        exchange made no progress. They count when the view changes because of another member."""
        self.weights: tuple[float, ...] = ()
        """What the parts weigh in the view's first round, if that was in dispute."""
        self.exchange_s = 0.0
        """From the last payload to a majority's votes, of the slowest recent round."""
        self._splits = 0  # votes without a majority, in a row
        self.survey_from = OuterStep(0)
        """See `NewView`."""
        self._unsurveyed = _UNSURVEYED

    def begin(
        self,
        now: Instant,
        weights: tuple[float, ...] = (),
        *,
        grew_at: Mapping[PeerRef, Instant],
        is_cut_short: bool,
    ) -> None:
        """The view changed: what was said in the old one counts no more, but for who kept it waiting.

        Args:
            weights: of the parts, by rank, if they were in dispute.
            grew_at: of each member of the old view: when what it exchanges was last seen to grow.
            is_cut_short: whether some had not handed in.
        """
        self.kept_waiting_s = self._kept_waiting_s(grew_at, now)
        self.began_at, self.weights = now, weights
        self._void()
        if is_cut_short:
            self.grace.interrupted(now)

    def committed(self) -> None:
        """The outer step is made: the next one starts without a past."""
        self._splits, self.weights = 0, ()
        self.kept_waiting_s.clear()
        self._void()

    def _void(self) -> None:
        self.votes.clear()
        self.voted_at.clear()
        self.settled_at.clear()
        self.reports.clear()
        self.judge_at = None

    def _kept_waiting_s(self, grew_at: Mapping[PeerRef, Instant], now: Instant) -> dict[PeerRef, float]:
        since = majority_at(self.voted_at, len(grew_at))
        result = dict[PeerRef, float]()
        for ref, at in grew_at.items():
            waited_s = 0.0 if since is None or self.spoke(ref.peer_id) else now - max(since, at)
            result[ref] = self.kept_waiting_s.get(ref, 0.0) + max(0.0, waited_s)
        return result

    def split(self) -> int:
        """The votes have no majority, for so many times in a row."""
        self._splits += 1
        return self._splits

    def do_without_a_survey(self, step: OuterStep) -> None:
        """For a while from this step on, twice as long each time."""
        self.survey_from = OuterStep(step + self._unsurveyed)
        self._unsurveyed *= 2

    def vote(self, peer_id: PeerId, vote: Vote, now: Instant) -> bool:
        """Note a vote. Refused from who has reported that it cannot finish: its staged result is gone."""
        if peer_id in self.reports:
            return False
        if self.votes.get(peer_id) != vote:
            self.settled_at[peer_id] = now
        self.votes[peer_id] = vote
        self.voted_at.setdefault(peer_id, now)
        return True

    def report(self, peer_id: PeerId, report: RoundFailed, now: Instant) -> None:
        """Note a failure. The first one opens the window in which the others are awaited."""
        self.votes.pop(peer_id, None)
        self.voted_at.pop(peer_id, None)
        self.settled_at.pop(peer_id, None)
        self.reports[peer_id] = report
        if self.judge_at is None:
            self.judge_at = now + self._config.report_window_s

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: the others' words may lie unread, and are awaited anew."""
        self.voted_at = dict.fromkeys(self.voted_at, now)
        self.settled_at = dict.fromkeys(self.settled_at, now)
        if self.judge_at is not None:
            self.judge_at = now + self._config.report_window_s
        self.grace.interrupted(now)

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

    def accused(
        self, view: View, newcomers: Collection[PeerId] = (), tales: Collection[PeerId] = ()
    ) -> dict[PeerId, int]:
        """How many members point at each, newcomers at newcomers only. Whoever names no other accuses itself."""
        result = dict.fromkeys((member.peer_id for member in view.members), 0)
        for accuser, suspects in self.voices(view, tales).items():
            for peer in suspects or [accuser]:
                result[peer] += accuser not in newcomers or peer in newcomers
        return result

    def voices(self, view: View, tales: Collection[PeerId] = ()) -> dict[PeerId, list[PeerId]]:
        """Whom each member accuses. What it was told is no voice: the member that said it has a report of its own.

        Nobody can accuse a member that it has no link with.

        Args:
            tales: whose `unheard` tales are voices all the same: against the one that is said to have told them.
        """
        ranks = {member.peer_id: rank for rank, member in enumerate(view.members)}
        apart = frozenset(view.apart)
        named = {
            accuser: tuple(dict.fromkeys(report.suspects))
            for accuser, report in self.reports.items()
            if report.told_by is None
        }
        named |= {
            accuser: (teller,) for accuser, teller in self.unheard().items() if accuser in tales or teller in tales
        }
        return {
            accuser: [
                peer
                for peer in suspects
                if peer in ranks and peer != accuser and not are_apart(apart, ranks[accuser], ranks[peer])
            ]
            for accuser, suspects in named.items()
        }

    def unheard(self) -> dict[PeerId, PeerId]:
        """Members that say who told them to give up, where the teller has not said so itself; each with its teller.

        Its word is late, or their link does not work, or one of the two lies.
        """
        tellers = {accuser: report.told_by for accuser, report in self.reports.items() if report.told_by is not None}
        return {accuser: teller for accuser, teller in tellers.items() if not self._is_told_on(accuser, tellers)}

    def _is_told_on(self, listener: PeerId, tellers: Mapping[PeerId, PeerId]) -> bool:
        """Whether the teller has a report of its own, or was told itself, by others than this listener."""
        row = [listener]
        while (teller := tellers.get(row[-1])) is not None:
            if teller in row:
                return teller != listener
            row.append(teller)
        return row[-1] in self.reports or len(row) > 2  # else whoever comes before the last one names it
