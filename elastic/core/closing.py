# SPDX-License-Identifier: Apache-2.0
"""How the round in progress ends: committed, tried once more, or without whoever is silent or late.

Decided from what is known now (open_round.py counts, grace.py measures, sessions.py remembers); what follows for the
membership is the business of views.py, who comes in at a commit boundary that of admission.py, and what becomes of a
round that a member cannot finish that of failures.py. Holds only how long an exchange takes, and which members are at
odds.
"""

from collections.abc import Collection, Mapping, Sequence

from isthmus.collective.core.types import Instant, OuterStep, PeerId, PeerRef
from isthmus.elastic.core.admission import Admission
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.edges import Edges
from isthmus.elastic.core.exit_codes import INTEGRITY
from isthmus.elastic.core.failures import Failures
from isthmus.elastic.core.leases import merged
from isthmus.elastic.core.messages import Refused, Vote
from isthmus.elastic.core.news import News
from isthmus.elastic.core.open_round import Agreed, OpenRound, Split, majority_at
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.records import CommitRecord, CommittedPart
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views
from isthmus.elastic.core.witnesses import Verdict, Witnesses


class Closing:
    """Ends rounds, as soon as what is known decides one."""

    def __init__(
        self,
        config: CoordinatorConfig,
        turn: Turn,
        roster: Roster,
        news: News,
        views: Views,
        *,
        open_round: OpenRound,
        pauses: Pauses,
        admission: Admission,
        failures: Failures,
    ) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._news, self._views, self._admission, self._failures = news, views, admission, failures
        self._round, self._grace, self._pauses = open_round, open_round.grace, pauses
        self._witnesses = Witnesses(config.norm_guard, turn.state.sizes)
        self._weighed: dict[PeerId, Vote] = {}  # those whose weight was looked at
        self._disputed: tuple[PeerId, ...] = ()  # members that are at odds about the round's results

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
        instants = (self._round.judge_at, self._closes_at(), self._votes_close_at())
        return [instant for instant in instants if instant is not None]

    def _votes_close_at(self) -> Instant | None:
        """By when every vote must be here; None while nobody waits for votes alone.

        A member that has its result and does not vote, because its trainer hangs in the outer step or because it lies,
        says with every heartbeat that it waits for others. One with a slow line has no result yet, and may be much
        later than the others: while what it exchanges grows it is awaited, but not without end once a majority (or one
        of two) has voted. Its inner steps do not count: methods with a delay train on beside an exchange that hangs.
        """
        silent = [item for item in self._roster.members() if not self._round.spoke(item.ref.peer_id)]
        if not silent:
            return None
        voted_at = self._majority_at(self._round.voted_at)
        if voted_at is None:
            return self._stands_still_at(silent)
        return max(self._votes_until(session, voted_at) for session in silent)

    def _votes_until(self, session: Session, voted_at: Instant) -> Instant:
        """How long the vote of this member is awaited, after most others voted at this time.

        A member that kept the majority waiting in an earlier view of this round has that much less time, but a quarter
        (`stall_factor`) of it in any case, in which one more exchange fits. Without this, a member's 20 s began anew
        when another member died (chaos, seed 74).
        """
        config, allowed_s = self._config, self._allowed_s(voted_at)
        least_s = allowed_s / max(1.0, config.stall_factor)
        used_s = min(self._round.kept_waiting_s.get(session.ref, 0.0), allowed_s - least_s)
        awaited_until = max(voted_at + allowed_s, session.grew_at + config.stall_floor_s) - used_s
        return min(awaited_until, voted_at + config.vote_limit * allowed_s)

    def _majority_at(self, voted_at: Mapping[PeerId, Instant]) -> Instant | None:
        return majority_at(voted_at, len(self._roster.members()))

    def _allowed_s(self, majority_at: Instant) -> float:
        """How much later than the majority a member may vote."""
        taken_s = max(self._round.exchange_s, self._exchanged_s(majority_at))
        return max(self._config.stall_floor_s, self._config.stall_factor * taken_s)

    def _stands_still_at(self, silent: Sequence[Session]) -> Instant | None:
        """When to give up a round for which every member has handed in, and too few of them have voted.

        None if nobody waits: neither a member that has voted, nor a learner that holds the state and can go on alone.
        """
        open_round, members = self._round, self._roster.members()
        ready_at = [session.ready_at for session in members if session.ready_at is not None]
        if len(ready_at) < len(members) or len(members) < self._roster.quorum or open_round.reports:
            return None
        if not open_round.votes and not self._roster.arrived():
            return None
        moved_at = max([open_round.began_at, *ready_at, *(session.grew_at for session in silent)])
        return moved_at + max(session.stall_timeout_s(self._config) for session in silent)

    def _exchanged_s(self, until: Instant) -> float:
        """How long the exchange took in this view. What it waited in an older one for a vote teaches nothing."""
        ready_at = [item.ready_at for item in self._roster.members() if item.ready_at is not None]
        return until - max([self._round.began_at, *ready_at])

    def _learn(self, taken_s: float) -> None:
        """Remember how long this exchange took, outer steps included. One that hung at most doubles the estimate.

        When all outer steps hung once and came back, the next hung one was awaited four times as long (seed 1699).
        """
        config, usual_s = self._config, self._round.exchange_s
        most_s = max(2.0 * usual_s, config.stall_floor_s / config.stall_factor)
        self._round.exchange_s = max(min(taken_s, most_s), 0.9 * usual_s)

    def _put_out_the_last(self, late: Mapping[PeerRef, float]) -> None:
        """Members that the majority waited for so long, and that voted in the end: their work counts, and they pause.

        Otherwise one that votes just before it is given up would make every round as long as that.
        """
        members = {session.ref for session in self._roster.members()}
        reasons = dict[PeerRef, str]()
        for ref, waited_s in late.items():
            pause_s = self._pauses.missed(ref, self._state.outer_step, self._turn.now, waited_s=waited_s)
            if ref in members:
                reasons[ref] = f"voted {waited_s:.0f} s after most others; stays out for {pause_s:.0f} s"
        if len(members) - len(reasons) >= self._roster.quorum:
            self._views.drop(reasons, counted_as="voted long after most others")

    def _drop_the_voteless(self) -> None:
        """Go on without the members that have not voted by the deadline."""
        close_at, open_round, now = self._votes_close_at(), self._round, self._turn.now
        if close_at is None or now < close_at:
            return
        silent = [item.ref for item in self._roster.members() if not open_round.spoke(item.ref.peer_id)]
        first_s = now - min(open_round.voted_at.values(), default=now)
        reasons = dict[PeerRef, str]()
        for ref in silent:
            waited_s = first_s + open_round.kept_waiting_s.get(ref, 0.0)
            pause_s = self._pauses.missed(ref, self._state.outer_step, now, waited_s=waited_s)
            reasons[ref] = f"has not voted although nobody keeps it waiting; stays out for {pause_s:.0f} s"
        self._views.drop(reasons, counted_as="has not voted although nobody keeps it waiting")

    def _closes_at(self) -> Instant | None:
        """When the round goes on without those that have not handed in."""
        members, late, grace = self._roster.members(), self._late(), self._grace
        if not late or len(members) - len(late) < self._roster.quorum or self._leaves_newcomers_alone(members, late):
            return None
        ready_at = [session.ready_at for session in members if session.ready_at is not None]
        stay = [session for session in members if session not in late]
        if stay and not Edges(self._state.view).hubs_among(stay):
            return None  # they have no links with each other but through who is late
        # Whoever is excused already counts, or every round could do with half of what the one before had left.
        closes_at = grace.closes_at(ready_at, len(members) + len(self._state.excused))
        if closes_at is None:
            return None
        # The others may have handed in long before it came.
        return max(closes_at, *(session.admitted_at + grace.window_s for session in late))

    def _leaves_newcomers_alone(self, members: Sequence[Session], late: Sequence[Session]) -> bool:
        """Whether only peers would go on that no commit holds work of. Nobody has reached them in an exchange yet.

        A joiner that nobody can dial took the run over so: the founder was late once, and could not fetch from it
        what it had committed alone.
        """
        proven = self._state.contributed
        stay = [session for session in members if session not in late]
        return any(item.ref in proven for item in late) and not any(item.ref in proven for item in stay)

    def _late(self) -> list[Session]:
        """Who has not handed in. Not who is on its way to the view's state: its own limits are shorter than a round."""
        return [item for item in self._roster.members() if item.ready_at is None and item.holds_state is not False]

    def _excuse_the_late(self) -> None:
        """The round has its quorum, and waits no longer for the others: they hand their work in with the next one."""
        closes_at = self._closes_at()
        if closes_at is None or self._turn.now < closes_at:
            return
        late = self._late()
        # Who has not heard that it is a member has nothing to keep, and would wait for ever to be one (seed 1874).
        unaware = [session.ref for session in late if not session.is_aware]
        if unaware:
            self._views.drop(dict.fromkeys(unaware, "late, and has not heard that it is a member"))
            return
        for session in late:
            self._pauses.missed(session.ref, self._state.outer_step, self._turn.now)
        self._turn.counters["excused"] += len(late)
        names = ", ".join(session.ref.peer_id for session in late)
        cause = f"goes on without {names}, late by more than {self._grace.window_s:.1f} s"
        self._views.change(out={}, excuse=late, cause=cause)
        self._grace.was_too_short()

    def _decide_round(self) -> None:
        view, open_round = self._state.view, self._round
        if view.world_size < self._roster.quorum or not all(open_round.voted(item.peer_id) for item in view.members):
            return
        if self._goes_on_without_a_lie():
            return
        match open_round.outcome(view):
            case None:
                pass
            case Agreed() as agreed:
                self._commit(agreed)
            case Split():
                if open_round.split() >= self._config.max_split_votes:
                    reason = f"outer step {view.outer_step}: the members' results differ, without a majority"
                    self._roster.halt(Refused(code=INTEGRITY, reason=reason))
                else:
                    self._views.change(out={}, cause="votes differ without a majority, one more try")

    def _drop_the_overweight(self) -> None:
        """Whoever claims more weight than its leases allow has lied: no work can be behind that."""
        state, per_sample = self._state, self._config.weight_per_sample
        if per_sample is None:
            return
        liars: dict[PeerRef, str] = {}
        weighed, self._weighed = self._weighed, dict(self._round.votes)
        for peer_id, vote in self._weighed.items():
            if weighed.get(peer_id) is vote:
                continue
            ref = self._roster.sessions[peer_id].ref
            leased = state.leases.clip(ref, vote.consumed)
            allowed = per_sample * state.work.num_samples(ref, vote.key.fragment, leased)
            if vote.weight > allowed:
                liars[ref] = f"claims weight {vote.weight:g} where its leases allow {allowed:g}"
        if liars:
            self._views.strike(liars)

    def _goes_on_without_a_lie(self) -> bool:
        """All have voted. If what they saw of each other's parts does not fit, the round is tried again accordingly."""
        view = self._state.view
        members = [member.peer_id for member in view.members]
        verdict = self._witnesses.judge(members, self._round.votes, self._round.weights, self._state.reached)
        self._disputed = ()
        if verdict is None:
            return False
        if verdict == Verdict(at_odds=verdict.at_odds):
            self._disputed = verdict.at_odds
            return False
        refs = {member.peer_id: member.ref for member in view.members}
        if verdict.liars:
            self._views.strike({refs[peer_id]: reason for peer_id, reason in verdict.liars.items()})
        elif verdict.left_out:
            reasons = {refs[peer_id]: reason for peer_id, reason in verdict.left_out.items()}
            for ref in reasons:
                self._pauses.blamed(ref, self._state.outer_step, self._turn.now)
            self._views.drop(reasons, counted_as="it is at odds with one member about numbers that are too large")
        else:
            self._turn.counters["weights_disputed"] += 1
            pair = " and ".join(verdict.at_odds)
            cause = f"{pair} differ about a weight, one more try with those that the coordinator was told"
            self._views.change(out={}, cause=cause, weights=verdict.weights)
        return True

    def _commit(self, agreed: Agreed) -> None:
        roster, state, now = self._roster, self._state, self._turn.now
        assert state.committed is not None, "members vote from a committed state"
        members = roster.members()
        step = OuterStep(agreed.key.outer_step + 1)
        record = CommitRecord(
            key=agreed.key,
            outer_step=step,
            previous=state.committed.digest,
            digest=agreed.digest,
            contributions=self._contributions(members, agreed.deviants),
            final=step >= self._config.outer_steps,
            disputed=tuple(roster.sessions[peer_id].ref for peer_id in agreed.deviants if peer_id in self._disputed),
            usual_size=self._witnesses.usual([session.ref.peer_id for session in members], self._round.votes),
        )
        self._witnesses.committed()
        majority_at, late = self._majority_at(self._round.settled_at), self._last_voters()
        self._turn.persist(record)
        self._round.committed()
        self._failures.committed()
        ready_at = [session.ready_at for session in members if session.ready_at is not None]
        self._learn(self._exchanged_s(now if majority_at is None else majority_at))
        self._grace.learn(ready_at, len(members) + len(state.excused), now)
        deviants = [session.ref for session in members if session.ref.peer_id in agreed.deviants]
        self._pauses.contributed(session.ref for session in members if session.ref not in deviants)
        for session in roster.sessions.values():
            session.ready_at, session.blocked = None, False  # it has what it waited for
            self._news.tell_commit(session.ref)  # deviants too: it tells them in which round they were overruled
        for session in members:
            session.holds_state = session.ref not in deviants
            self._news.expect(session)
        if not record.final:
            self._admission.at_boundary(deviants)
            self._put_out_the_last(late)

    def _last_voters(self) -> dict[PeerRef, float]:
        """Who has voted later than allowed, and how long a majority waited for it."""
        settled_at = self._round.settled_at
        majority_at = self._majority_at(settled_at)
        if majority_at is None:
            return {}
        waited_s = {self._roster.sessions[peer_id].ref: at - majority_at for peer_id, at in settled_at.items()}
        allowed_s = self._allowed_s(majority_at)
        return {ref: seconds for ref, seconds in waited_s.items() if seconds > allowed_s}

    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[CommittedPart, ...]:
        leases = self._state.leases
        votes = [self._round.votes[session.ref.peer_id] for session in members]
        owned = [leases.clip(session.ref, vote.consumed) for session, vote in zip(members, votes, strict=True)]
        in_range = self._witnesses.in_range([session.ref.peer_id for session in members], self._round.votes)
        result: list[CommittedPart] = []
        for session, vote, own, consumed in zip(members, votes, owned, leases.bounded(owned), strict=True):
            self._turn.counters["lease_clipped"] += own != merged(vote.consumed)
            self._turn.counters["lease_shredded"] += consumed != own
            result.append(
                CommittedPart(
                    ref=session.ref,
                    weight=vote.weight,
                    num_tokens=vote.num_tokens,
                    consumed=consumed,
                    agreed=session.ref.peer_id not in deviants,
                    signature=b"" if session.ref.peer_id in deviants else vote.signature,
                    size=in_range.get(session.ref.peer_id, 0.0),
                )
            )
        return tuple(result)
