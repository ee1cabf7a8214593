# SPDX-License-Identifier: Apache-2.0
"""What members saw of each other's parts of a round, and whose part or word it was that does not fit.

Every vote says with which weight its sender counted each member's part, and how large that part's numbers were where
the sender added them up. It marks the sums that it was given, and says how large they were. A member that tells others
different weights, gives them different sums, or sends numbers far out of the others' range, is seen by those others.
But a vote may lie too. So what one member says of another counts against both of them, as with broken links
(failures.py), and one voice alone proves nothing:

* Whoever is at odds with two others has lied. Two honest members are never at odds, so with one liar only it can be.
* Of one pair that is at odds about a weight nobody can say who lies. The round is tried again, with the weights that
  each member has told the coordinator, whatever they say to each other.
* Of one pair that is at odds about a sum that one has given to the other the votes decide, as ever; but to be overruled
  is then no strike.
* Of one pair that is at odds about a size the part is left out: to count it may ruin the state. Its sender goes without
  being called a liar. Who points at a second one next time is at odds with two. If it points at the same one again, it
  goes itself, and so on by turns. Of two members alone the newer one goes, whoever points: there is no third. If the
  other one could commit nothing without it, that one goes the next time: its payload may be what is wrong (seed 9379).

A sum that is larger than all parts which its taker has seen counts as a part of its maker. But the maker may have got
parts that no other has seen: a member that sent large numbers to one other alone used to make that one the liar. So the
maker's vote explains its sum if it says that the part of a third one, neither its own nor the taker's, was as large. If
that part is too large the maker points at its sender itself; and whom it points at has no say about its sum.

A part is too large if its numbers are more than `limit` times as large as is usual for the others, as each member saw
them. Differences grow no faster than the work behind them, so who has done more may send more, in proportion, up to
sixteen times the work: how much that is only its leases say. With less work nobody's are larger. What was usual in the
last rounds counts as well, since newcomers may all send little. So does what this member itself has sent in rounds that
were committed: a veteran is not too large because all others are new. Both come from the journal (sizes.py).

Rules: values only. It decides nothing about the membership (closing.py).
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from isthmus.collective.core.types import HUGE, PeerId
from isthmus.elastic.core.messages import Vote
from isthmus.elastic.core.sizes import Sizes

_MAX_LINKS = 1024
_NO_HISTORY: Mapping[PeerId, int] = MappingProxyType({})
_WHILE_UNKNOWN = 10.0
"""How many times wider the limit is before the first commit, and after the journal was lost."""
_MOST_WORK = 16.0
"""How many times the others' work widens the limit at most, however much more a vote claims. A machine that is twenty
times as fast as the others sends numbers twenty times as large at most: an eighth of the limit then."""
_AS_LARGE = 2.0
"""So many times a part explains a sum: the two were seen by different members, and through a codec."""
_OWN_FACTOR = 2.0
"""How many times its own earlier numbers a member's may be, whatever the others send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What does not fit, and what follows from it: liars, or parts that are left out, or another try with `weights`.

    With none of these the members `at_odds` had other results, and nobody can say whose fault that is.
    """

    liars: dict[PeerId, str] = field(default_factory=dict)
    """What each did that only a liar does, as the end of a sentence that begins with its name."""
    left_out: dict[PeerId, str] = field(default_factory=dict)
    """Whose part cannot be counted, and why."""
    weights: tuple[float, ...] = ()
    """What the parts weigh when the round is tried again."""
    at_odds: tuple[PeerId, ...] = ()
    """Whose words differ."""


class Witnesses:
    """See the module.

    Args:
        limit: how many times larger than usual a part's numbers may be; infinite: as large as they like.
        sizes: of the parts of earlier rounds.
    """

    def __init__(self, limit: float, sizes: Sizes) -> None:
        self._limit, self._sizes = limit, sizes
        self._at_odds: deque[frozenset[PeerId]] = deque(maxlen=_MAX_LINKS)  # pairs, over all rounds
        self._went: dict[frozenset[PeerId], PeerId] = {}  # which of a pair at odds about a size, the last time
        self._left: PeerId | None = None  # which of two members alone went last, since the last commit

    def judge(
        self,
        members: Sequence[PeerId],
        votes: Mapping[PeerId, Vote],
        told: tuple[float, ...],
        since: Mapping[PeerId, int] = _NO_HISTORY,
    ) -> Verdict | None:
        """What the votes of all members say of their parts; None: nothing against anybody.

        Args:
            members: by rank.
            votes: one of each.
            told: what the coordinator has said that the parts weigh, by rank; empty if it has left it to the members.
            since: from which outer step on commits hold work of a member; those without are the newest.
        """
        ballots = [votes[member] for member in members]
        if not any(ballot.weights for ballot in ballots):
            return None  # such members do not look
        return (
            self._judge_words(members, ballots, told)
            or self._judge_weights(members, ballots)
            or self._judge_sizes(members, ballots, since)
            or self._judge_results(members, ballots)
        )

    def committed(self) -> None:
        """A round counts: whoever went last of two was not why none did."""
        self._left = None

    def usual(self, members: Sequence[PeerId], votes: Mapping[PeerId, Vote]) -> float:
        """How large parts of a round were as the member in the middle saw them; 0 if nobody could compare.

        Who is alone says how large its own part is: without that a founder that had trained alone was left out as soon
        as the first newcomer, which warms up, had given to one round (tests/netns/test_behind_nats.py).
        Of two always the smaller, among parts as among members: the other may be the liar's (seeds 1006, 6348).
        """
        seen = [[size for size in votes[member].sizes if size > 0.0] for member in members]
        alone = len(members) == 1  # else a single size is nobody's middle
        middles = [statistics.median_low(sizes) for sizes in seen if len(sizes) > 1 or (sizes and alone)]
        return statistics.median_low(middles) if middles else 0.0

    def in_range(self, members: Sequence[PeerId], votes: Mapping[PeerId, Vote]) -> dict[PeerId, float]:
        """How large each member's numbers were in the others' eyes, unless they were too large beside those."""
        largest: dict[PeerId, float] = {}
        weights = [votes[member].weight for member in members]
        for member in members:
            sizes = votes[member].sizes
            for rank, factor in self._compared(sizes, weights):
                if members[rank] != member and factor <= self._limit_now:
                    largest[members[rank]] = max(sizes[rank], largest.get(members[rank], 0.0))
        return largest

    @property
    def _limit_now(self) -> float:
        return self._limit * (1.0 if self._sizes.usual else _WHILE_UNKNOWN)

    # -------------------------------------------------------------------------------- what one vote says

    def _judge_words(self, members: Sequence[PeerId], ballots: list[Vote], told: tuple[float, ...]) -> Verdict | None:
        """Whoever contradicts itself, or the coordinator, needs no other witness."""
        liars: dict[PeerId, str] = {}
        for rank, (member, ballot) in enumerate(zip(members, ballots, strict=True)):
            are_whole = len(ballot.sizes) in (0, len(members)) and len(ballot.sums) in (0, len(ballot.sizes))
            if len(ballot.weights) != len(members) or not are_whole:
                liars[member] = "does not say what it has seen of the others' parts"
            elif ballot.weights[rank] != ballot.weight:
                liars[member] = f"says weight {ballot.weight:g} and has counted its part with {ballot.weights[rank]:g}"
            elif told and (ballot.weights != told or ballot.weight != told[rank]):
                liars[member] = "has counted with other weights than it was told to"
        return Verdict(liars=liars) if liars else None

    # -------------------------------------------------------------------------------- what they say of each other

    def _judge_weights(self, members: Sequence[PeerId], ballots: list[Vote]) -> Verdict | None:
        declared = tuple(ballot.weight for ballot in ballots)
        points = [
            (member, other)
            for member, ballot in zip(members, ballots, strict=True)
            if ballot.weights != declared
            for other, seen, said in zip(members, ballot.weights, declared, strict=True)
            if seen != said
        ]
        if not points:
            return None
        liars = self._at_odds_with_two(points)
        if liars:
            return Verdict(liars=dict.fromkeys(liars, "says different weights to different members, or claims so"))
        return Verdict(weights=declared, at_odds=points[0])

    def _judge_sizes(
        self, members: Sequence[PeerId], ballots: list[Vote], since: Mapping[PeerId, int]
    ) -> Verdict | None:
        points: list[tuple[PeerId, PeerId]] = []
        factors: dict[PeerId, float] = {}
        for place, rank, factor in self._pointed_at(members, ballots):
            points.append((members[place], members[rank]))
            factors[members[rank]] = max(factor, factors.get(members[rank], 0.0))
        if not points:
            return None
        liars = self._at_odds_with_two(points)
        if liars:
            sent = {
                liar: f"has sent numbers {factors[liar]:.3g} times as large as the others'"
                if liar in factors
                else "says of others that their numbers are too large"
                for liar in liars
            }
            return Verdict(liars=sent)
        goes, pointed_at = self._who_goes(members, points, since)
        if goes == pointed_at:
            reason = f"its numbers are said to be {factors[goes]:.3g} times as large as the others'"
        else:
            reason = f"says alone, and not for the first time or of its only partner, that {pointed_at} sends too much"
        return Verdict(left_out={goes: reason})

    def _pointed_at(self, members: Sequence[PeerId], ballots: Sequence[Vote]) -> list[tuple[int, int, float]]:
        """Which member finds whose part, or whose unexplained sum, too large, and by what factor."""
        weights = [ballot.weight for ballot in ballots]
        parts = {
            (place, rank): factor
            for place, ballot in enumerate(ballots)
            for rank, factor in self._too_large(members, ballot.sizes, weights)
            if rank != place
        }
        found = [(place, rank, factor) for (place, rank), factor in parts.items()]
        for place, ballot in enumerate(ballots):
            for root, size in enumerate(ballot.sums):
                # Whom the root itself points at is at odds with it already, and has no say who of the two began.
                is_answered = root == place or (root, place) in parts
                if size > 0.0 and not is_answered and not self._is_explained(ballots, place, root):
                    beside = [size if rank == root else other for rank, other in enumerate(ballot.sizes)]
                    large = self._too_large(members, beside, weights)
                    found += [(place, rank, factor) for rank, factor in large if rank == root]
        return found

    def _is_explained(self, ballots: Sequence[Vote], place: int, root: int) -> bool:
        """Whether the root says that a third member's part was as large as the sum that it gave to the one at `place`.

        That one has measured the sum by its own numbers, which may be smaller where the root adds up.
        """
        parts, own, size = ballots[root].sizes, ballots[place].sizes[place], ballots[place].sums[root]
        thirds = [part for rank, part in enumerate(parts) if rank not in (root, place)]
        if not thirds:
            return False
        scale = min(1.0, parts[place] / own) if own > 0.0 and parts[place] > 0.0 else 1.0
        return _AS_LARGE * max(thirds) >= size * scale

    def _who_goes(
        self, members: Sequence[PeerId], points: Sequence[tuple[PeerId, PeerId]], since: Mapping[PeerId, int]
    ) -> tuple[PeerId, PeerId]:
        """Of one pair at odds about a size, and at whom is pointed: of two that point at each other the newer one."""
        accuser, pointed_at = max(points, key=lambda point: members.index(point[1]))
        pair, never = frozenset((accuser, pointed_at)), max(since.values(), default=0) + 1
        if len(members) == 2:
            older, newer = sorted(members, key=lambda peer: (since.get(peer, never), members.index(peer)))
            self._left = older if self._left == newer else newer
            return self._left, pointed_at
        goes = accuser if self._went.pop(pair, None) == pointed_at else pointed_at
        self._went[pair] = goes
        if len(self._went) > _MAX_LINKS:
            del self._went[next(iter(self._went))]
        return goes, pointed_at

    def _judge_results(self, members: Sequence[PeerId], ballots: list[Vote]) -> Verdict | None:
        """Where results differ, somebody may have given different ones of its own sums to different members."""
        if len({ballot.digest for ballot in ballots}) == 1:
            return None
        marks = {
            member: ballot.results
            for member, ballot in zip(members, ballots, strict=True)
            if len(ballot.results) == len(members)
        }
        points = [
            (member, other)
            for member, seen in marks.items()
            for rank, other in enumerate(members)
            if other in marks and seen[rank] != marks[other][rank]
        ]
        if not points:
            return None
        liars = self._at_odds_with_two(points)
        if liars:
            return Verdict(liars=dict.fromkeys(liars, "gives different sums to different members, or claims so"))
        return Verdict(at_odds=tuple(dict.fromkeys(peer for point in points for peer in point)))

    def _too_large(
        self, members: Sequence[PeerId], sizes: Sequence[float], weights: Sequence[float]
    ) -> list[tuple[int, float]]:
        """The ranks whose parts are out of range, as one member saw them, and by what factor they are larger."""
        found = {
            rank: factor
            for rank, factor in self._compared(sizes, weights)
            if factor > self._limit_now and sizes[rank] > _OWN_FACTOR * self._sizes.own(members[rank])
        }
        # Numbers that cannot be counted need no others beside them, and no guard.
        return [*(found | {rank: HUGE for rank, size in enumerate(sizes) if size >= HUGE}).items()]

    def _compared(self, sizes: Sequence[float], weights: Sequence[float]) -> list[tuple[int, float]]:
        """How many times as large each part is as the others send, or as was usual; of those that can be compared."""
        known = [rank for rank, size in enumerate(sizes) if size > 0.0]
        before = statistics.median(self._sizes.usual) if self._sizes.usual else 0.0
        found = []
        for rank in known:
            beside = [other for other in known if other != rank and weights[other] > 0.0]
            others = [sizes[other] * min(max(1.0, weights[rank] / weights[other]), _MOST_WORK) for other in beside]
            if others:
                # Newcomers that warm up send far less than their work would say (found by chaos: an honest veteran
                # among them was 16 times as large), so what was usual before counts as well.
                found.append((rank, sizes[rank] / max(statistics.median(others), before)))
        return found

    def _at_odds_with_two(self, points: Sequence[tuple[PeerId, PeerId]]) -> list[PeerId]:
        """Who is at odds with the most others, now and before, if these are two or more. Notes who is."""
        now = {frozenset(point) for point in points}
        against: dict[PeerId, set[PeerId]] = {peer: set() for pair in now for peer in pair}
        for pair in (*now, *self._at_odds):
            for peer in pair & against.keys():
                against[peer] |= pair - {peer}
        most = max(len(others) for others in against.values())
        liars = [peer for peer, others in against.items() if len(others) == most >= 2]
        pointed_at = [other for _, other in points if other in liars]
        if len(liars) > 1 and pointed_at:
            liars = [pointed_at[0]]
        if liars:  # it has had its sentence
            kept = [pair for pair in self._at_odds if pair.isdisjoint(liars)]
            self._at_odds = deque(kept, maxlen=_MAX_LINKS)
        else:
            self._at_odds.extend(pair for pair in sorted(now, key=sorted) if pair not in self._at_odds)
        return liars
