# SPDX-License-Identifier: Apache-2.0
"""How the round in progress ends: committed, tried once more, or without whoever is silent or late.

Decided from what is known now (rounds.py counts, grace.py measures, sessions.py remembers); what follows for the
membership is the roster's business, who comes in at a commit boundary admission.py's, and what becomes of a round that
a member cannot finish failures.py's. Holds only how long an exchange takes, and what its votes were judged by.
"""

from collections.abc import Collection, Sequence

from isthmus.collective.core.types import Instant, OuterStep, PeerId, PeerRef
from isthmus.elastic.core.admission import Admission
from isthmus.elastic.core.edges import Edges
from isthmus.elastic.core.failures import Failures
from isthmus.elastic.core.leases import merged
from isthmus.elastic.core.messages import Refused, Vote
from isthmus.elastic.core.records import CommitRecord, Contribution
from isthmus.elastic.core.roster import INTEGRITY_EXIT_CODE, Roster
from isthmus.elastic.core.rounds import Agreed, Split
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.witnesses import Verdict, Witnesses


class Closing:
    """Ends rounds, as soon as what is known decides one."""

    def __init__(self, roster: Roster, admission: Admission) -> None:
        self._roster = roster
        self._admission = admission
        self._failures = Failures(roster)
        self._witnesses = Witnesses(roster.config.norm_guard)
        self._weighed: dict[PeerId, Vote] = {}  # those whose weight was looked at
        self._disputed: tuple[PeerId, ...] = ()  # members that are at odds about the round's results
        self._exchange_s = 0.0  # from the last payload to the last vote, of the slowest recent round

    def settle(self) -> None:
        """Judge failures, count votes, go on without the late."""
        for decide in (
            self._drop_the_overweight,
            self._failures.settle,
            self._decide_round,
            self._drop_the_voteless,
            self._excuse_the_late,
        ):
            if not self._roster.over:
                decide()

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        instants = (self._roster.rounds.judge_at, self._closes_at(), self._votes_close_at())
        return [instant for instant in instants if instant is not None]

    def _votes_close_at(self) -> Instant | None:
        """By when every vote must be here; None while nobody waits for votes alone.

        A member that has its result and does not vote, because its trainer hangs in the outer step or because it lies,
        says with every heartbeat that it waits for others. One with a slow line has no result yet, and may be much
        later than the others: while what it exchanges grows it is awaited, but not without end once a majority (or one
        of two) has voted. Its inner steps do not count: methods with a delay train on beside an exchange that hangs.
        """
        roster, rounds = self._roster, self._roster.rounds
        members = roster.members()
        silent = [session for session in members if not rounds.spoke(session.ref.peer_id)]
        if not silent:
            return None
        enough = len(members) // 2 + 1 if len(members) > 2 else 1
        if len(rounds.voted_at) < enough:
            return self._stands_still_at(silent)
        voted_at = sorted(rounds.voted_at.values())[enough - 1]
        taken_s = max(self._exchange_s, self._exchanged_s(voted_at))
        allowed_s = max(roster.config.stall_floor_s, roster.config.stall_factor * taken_s)
        grew_at = max(session.grew_at for session in silent)
        awaited_until = max(voted_at + allowed_s, grew_at + roster.config.stall_floor_s)
        return min(awaited_until, voted_at + roster.config.vote_limit * allowed_s)

    def _stands_still_at(self, silent: Sequence[Session]) -> Instant | None:
        """When a round that all have handed in for stands still, since most members do not vote, or the only one.

        Somebody must wait: who has voted, or a learner that holds the state and can go on without all of them.
        """
        roster, members = self._roster, self._roster.members()
        ready_at = [session.ready_at for session in members if session.ready_at is not None]
        if len(ready_at) < len(members) or len(members) < roster.quorum or roster.rounds.reports:
            return None
        if not roster.rounds.votes and not roster.arrived():
            return None
        moved_at = max([roster.rounds.began_at, *ready_at, *(session.grew_at for session in silent)])
        return moved_at + max(session.stall_timeout_s(roster.config) for session in silent)

    def _exchanged_s(self, until: Instant) -> float:
        """How long the exchange took in this view. What it waited in an older one for a vote teaches nothing."""
        ready_at = [item.ready_at for item in self._roster.members() if item.ready_at is not None]
        return until - max([self._roster.rounds.began_at, *ready_at])

    def _learn(self, taken_s: float) -> None:
        """So long took this exchange, with the outer steps. One that hung teaches no more than twice what is usual.

        When all outer steps hung once and came back, the next hung one was awaited four times as long (seed 1699).
        """
        config, usual_s = self._roster.config, self._exchange_s
        most_s = max(2.0 * usual_s, config.stall_floor_s / config.stall_factor)
        self._exchange_s = max(min(taken_s, most_s), 0.9 * usual_s)

    def _drop_the_voteless(self) -> None:
        """The others have voted, or there are no others, and nobody waits longer for those that have not."""
        roster, close_at = self._roster, self._votes_close_at()
        if close_at is None or roster.now < close_at:
            return
        silent = [item.ref for item in roster.members() if not roster.rounds.spoke(item.ref.peer_id)]
        waited_s = roster.now - min(roster.rounds.voted_at.values(), default=roster.now)
        reasons = dict[PeerRef, str]()
        for ref in silent:
            pause_s = roster.pauses.missed(ref, roster.state.outer_step, roster.now, waited_s=waited_s)
            reasons[ref] = f"has not voted although nobody keeps it waiting; stays out for {pause_s:.0f} s"
        roster.drop(reasons, counted_as="has not voted although nobody keeps it waiting")

    def _closes_at(self) -> Instant | None:
        """When the round goes on without those that have not handed in."""
        roster = self._roster
        members, late = roster.members(), self._late()
        if not late or len(members) - len(late) < roster.quorum or self._leaves_newcomers_alone(members, late):
            return None
        ready_at = [session.ready_at for session in members if session.ready_at is not None]
        stay = [session for session in members if session not in late]
        if stay and not Edges(roster.state.view).hubs_among(stay):
            return None  # they have no links with each other but through who is late
        # Whoever is excused already counts, or every round could do with half of what the one before had left.
        closes_at = roster.grace.closes_at(ready_at, len(members) + len(roster.state.excused))
        if closes_at is None:
            return None
        # The others may have handed in long before it came.
        return max(closes_at, *(session.admitted_at + roster.grace.window_s for session in late))

    def _leaves_newcomers_alone(self, members: Sequence[Session], late: Sequence[Session]) -> bool:
        """Whether only peers would go on that no commit holds work of. Nobody has reached them in an exchange yet.

        A joiner that nobody can dial took the run over so: the founder was late once, and could not fetch from it
        what it had committed alone.
        """
        proven = self._roster.state.contributed
        stay = [session for session in members if session not in late]
        return any(item.ref in proven for item in late) and not any(item.ref in proven for item in stay)

    def _late(self) -> list[Session]:
        """Who has not handed in. Not who is on its way to the view's state: its own limits are shorter than a round."""
        return [item for item in self._roster.members() if item.ready_at is None and item.holds_state is not False]

    def _excuse_the_late(self) -> None:
        """The round has its quorum, and waits no longer for the others: they hand their work in with the next one."""
        roster, closes_at = self._roster, self._closes_at()
        if closes_at is None or roster.now < closes_at:
            return
        late = self._late()
        # Who has not heard that it is a member has nothing to keep, and would wait for ever to be one (seed 1874).
        unaware = [session.ref for session in late if not session.is_aware]
        if unaware:
            roster.drop(dict.fromkeys(unaware, "late, and has not heard that it is a member"))
            return
        roster.counters["excused"] += len(late)
        names = ", ".join(session.ref.peer_id for session in late)
        cause = f"goes on without {names}, late by more than {roster.grace.window_s:.1f} s"
        roster.change_view(out={}, excuse=late, cause=cause)
        roster.grace.was_too_short()

    def _decide_round(self) -> None:
        roster, view = self._roster, self._roster.state.view
        if view.world_size < roster.quorum or not all(roster.rounds.voted(item.peer_id) for item in view.members):
            return
        if self._goes_on_without_a_lie():
            return
        match roster.rounds.outcome(view):
            case None:
                pass
            case Agreed() as agreed:
                self._commit(agreed)
            case Split():
                roster.rounds.splits += 1
                if roster.rounds.splits >= roster.config.max_split_votes:
                    reason = f"outer step {view.outer_step}: the members' results differ, without a majority"
                    roster.halt(Refused(code=INTEGRITY_EXIT_CODE, reason=reason))
                else:
                    roster.change_view(out={}, cause="votes differ without a majority, one more try")

    def _drop_the_overweight(self) -> None:
        """Whoever claims more weight than its leases allow has lied: no work can be behind that."""
        roster, per_sample = self._roster, self._roster.config.weight_per_sample
        if per_sample is None:
            return
        liars: dict[PeerRef, str] = {}
        weighed, self._weighed = self._weighed, dict(roster.rounds.votes)
        for peer_id, vote in self._weighed.items():
            if weighed.get(peer_id) is vote:
                continue
            ref = roster.sessions[peer_id].ref
            leased = roster.state.leases.clip(ref, vote.consumed)
            allowed = per_sample * roster.state.work.num_samples(ref, vote.key.fragment, leased)
            if vote.weight > allowed:
                liars[ref] = f"claims weight {vote.weight:g} where its leases allow {allowed:g}"
        if liars:
            roster.strike(liars)

    def _goes_on_without_a_lie(self) -> bool:
        """All have voted. If what they saw of each other's parts does not fit, the round is tried again accordingly."""
        roster, view = self._roster, self._roster.state.view
        members = [member.peer_id for member in view.members]
        verdict = self._witnesses.judge(members, roster.rounds.votes, roster.weights)
        self._disputed = ()
        if verdict is None:
            return False
        if verdict == Verdict(at_odds=verdict.at_odds):
            self._disputed = verdict.at_odds
            return False
        refs = {member.peer_id: member.ref for member in view.members}
        if verdict.liars:
            roster.strike({refs[peer_id]: reason for peer_id, reason in verdict.liars.items()})
        elif verdict.left_out:
            reasons = {refs[peer_id]: reason for peer_id, reason in verdict.left_out.items()}
            roster.drop(reasons, counted_as="one member finds its numbers too large")
        else:
            roster.counters["weights_disputed"] += 1
            pair = " and ".join(verdict.at_odds)
            cause = f"{pair} differ about a weight, one more try with those that the coordinator was told"
            roster.change_view(out={}, cause=cause, weights=verdict.weights)
        return True

    def _commit(self, agreed: Agreed) -> None:
        roster, state = self._roster, self._roster.state
        assert state.committed is not None, "members vote from a committed state"
        members = roster.members()
        step = OuterStep(agreed.key.outer_step + 1)
        record = CommitRecord(
            key=agreed.key,
            outer_step=step,
            previous=state.committed.digest,
            digest=agreed.digest,
            contributions=self._contributions(members, agreed.deviants),
            final=step >= roster.config.outer_steps,
            disputed=tuple(roster.sessions[peer_id].ref for peer_id in agreed.deviants if peer_id in self._disputed),
        )
        self._witnesses.committed([session.ref.peer_id for session in members], roster.rounds.votes)
        roster.persist(record)
        roster.weights = ()
        roster.rounds.committed()
        ready_at = [session.ready_at for session in members if session.ready_at is not None]
        self._learn(self._exchanged_s(roster.now))
        roster.grace.learn(ready_at, len(members) + len(state.excused), roster.now)
        for session in roster.sessions.values():
            session.ready_at, session.blocked = None, False  # it has what it waited for
        deviants = [session.ref for session in members if session.ref.peer_id in agreed.deviants]
        roster.pauses.contributed(session.ref for session in members if session.ref not in deviants)
        for session in roster.sessions.values():
            roster.tell_commit(session.ref)  # deviants too: it tells them in which round they were overruled
        for session in members:
            session.holds_state = session.ref not in deviants
            roster.expect_news(session)
        if not record.final:
            self._admission.at_boundary(deviants)

    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[Contribution, ...]:
        roster, leases = self._roster, self._roster.state.leases
        votes = [roster.rounds.votes[session.ref.peer_id] for session in members]
        owned = [leases.clip(session.ref, vote.consumed) for session, vote in zip(members, votes, strict=True)]
        result: list[Contribution] = []
        for session, vote, own, consumed in zip(members, votes, owned, leases.bounded(owned), strict=True):
            roster.counters["lease_clipped"] += own != merged(vote.consumed)
            roster.counters["lease_shredded"] += consumed != own
            result.append(
                Contribution(
                    ref=session.ref,
                    weight=vote.weight,
                    num_tokens=vote.num_tokens,
                    consumed=consumed,
                    agreed=session.ref.peer_id not in deviants,
                    signature=b"" if session.ref.peer_id in deviants else vote.signature,
                )
            )
        return tuple(result)
