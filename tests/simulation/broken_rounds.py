# SPDX-License-Identifier: Apache-2.0
"""Coordinators that judge rounds, work and words without one of their rules (mutants.py)."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from isthmus.collective.core.types import Instant, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.attendance import Attendance
from isthmus.elastic.core.closing import Closing
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.failures import Blame, Failures
from isthmus.elastic.core.grace import Grace
from isthmus.elastic.core.messages import LeaseRequest, PeerMessage, RoundFailed, Vote
from isthmus.elastic.core.open_round import Agreed, OpenRound, Split
from isthmus.elastic.core.peer_fence import PeerFence
from isthmus.elastic.core.records import CommittedPart
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.sizes import Sizes
from tests.simulation.broken_runs import PatchedCoordinator


class WaitsForVotesForEver(Closing):
    def _votes_close_at(self) -> Instant | None:
        return None


class WaitsForTheVoteless(PatchedCoordinator):
    parts = (("_closing", WaitsForVotesForEver),)


class MeasuresItsOwnPatience(Closing):
    def _exchanged_s(self, until: Instant) -> float:
        ready_at = [item.ready_at for item in self._roster.members() if item.ready_at is not None]
        return until - max(ready_at, default=until)

    def _learn(self, taken_s: float) -> None:
        self._round.exchange_s = max(taken_s, 0.9 * self._round.exchange_s)


class WaitsLongerAndLonger(PatchedCoordinator):
    parts = (("_closing", MeasuresItsOwnPatience),)


class WaitsForAMajority(Closing):
    def _stands_still_at(self, silent: Sequence[Session]) -> Instant | None:
        return None


class WaitsForTheFirstVote(PatchedCoordinator):
    parts = (("_closing", WaitsForAMajority),)


class BlamesWhoIsAccused(Blame):
    """One accusation is enough against who made none."""

    def blamed(self, view: View, newcomers: Collection[PeerId]) -> tuple[PeerId, ...]:
        accused = {peer: number for peer, number in self._round.accused(view).items() if number}
        return tuple(sorted(accused, key=lambda peer: accused[peer])[-1:])


class BelievesTheAccuser(PatchedCoordinator):
    parts = (("_closing._failures._blame", BlamesWhoIsAccused),)


class LeavesAnyNumber(Failures):
    def _leaves_half(self, blamed: Collection[PeerId]) -> bool:
        return True


class AccusesAllOut(PatchedCoordinator):
    parts = (("_closing._failures", LeavesAnyNumber),)


class LeavesNewcomersAlone(Closing):
    def _leaves_newcomers_alone(self, members: Sequence[Session], late: Sequence[Session]) -> bool:
        return False


class GoesOnWithNewcomers(PatchedCoordinator):
    parts = (("_closing", LeavesNewcomersAlone),)


class CountsVotesOfAnyEpoch(CoordinatorMachine):
    def _on_said(self, sender: PeerRef, message: PeerMessage) -> None:
        if isinstance(message, Vote | RoundFailed) and self.state.is_member(sender):
            key = RoundKey(self.state.epoch, message.key.outer_step, message.key.fragment)
            message = msgspec.structs.replace(message, key=key)
        super()._on_said(sender, message)


class TakesTheFirstDigest(OpenRound):
    def outcome(self, view: View) -> Agreed | Split | None:
        if super().outcome(view) is None:
            return None
        first = self.votes[view.members[0].peer_id]
        return Agreed(key=first.key, digest=first.digest, deviants=())


class VotesWithoutDigest(PatchedCoordinator):
    parts = (("_round", TakesTheFirstDigest),)


class TrustsHeartbeats(PatchedCoordinator):
    patience = 1e9


class WaitsForEver(Grace):
    def closes_at(self, ready_at: Collection[Instant], num_standing: int) -> Instant | None:
        return None


class HasUnboundedGrace(PatchedCoordinator):
    parts = (("_round.grace", WaitsForEver),)


class ReturnsConsumedLeases(CoordinatorMachine):
    """What a commit consumed stays with its owner, and returns with the rest when that is gone."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)

        def keep(ref: PeerRef, ranges: object) -> None:
            del ref, ranges

        state.leases.consume = keep  # type: ignore[method-assign]


class BelievesEveryWeight(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(dataclasses.replace(config, weight_per_sample=None), state)


class CountsEveryPart(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(dataclasses.replace(config, norm_guard=math.inf), state)


class JudgesNobodyWithoutWork(CoordinatorMachine):
    """Whose part weighs nothing may still make a sum."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        witnesses = self._closing._witnesses
        compare = witnesses._compared

        def of_workers(sizes: Sequence[float], weights: Sequence[float]) -> list[tuple[int, float]]:
            return compare([size * (weight > 0.0) for size, weight in zip(sizes, weights, strict=True)], weights)

        witnesses._compared = of_workers  # type: ignore[method-assign]


class HearsNoRoot(CoordinatorMachine):
    """What a root says of the parts in its sum explains nothing."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._closing._witnesses._is_explained = lambda *_: False  # type: ignore[method-assign]


class ComparesNoWeights(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        witnesses = self._closing._witnesses
        witnesses._judge_words = lambda *_: None  # type: ignore[method-assign]
        witnesses._judge_weights = lambda *_: None  # type: ignore[method-assign]


class ComparesNoSums(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._closing._witnesses._judge_results = lambda *_: None  # type: ignore[method-assign]


class BelievesOneVoice(CoordinatorMachine):
    """Whom one member points at has lied."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        witnesses = self._closing._witnesses
        witnesses._at_odds_with_two = lambda points: [points[0][1]]  # type: ignore[method-assign]


class NothingFirst(Sizes):
    def committed(self, in_range: Mapping[PeerId, float], usual: float) -> None:
        super().committed(in_range if self.usual else {}, usual)


class JudgesTheFirstLikeTheRest(CoordinatorMachine):
    """Its guard does not know what has gone through while nothing was usual. The journal does."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        guarded, commit = NothingFirst(state.sizes.known()), state.sizes.committed
        self._closing._witnesses._sizes = guarded

        def committed(in_range: Mapping[PeerId, float], usual: float) -> None:
            commit(in_range, usual)
            guarded.committed(in_range, usual)

        state.sizes.committed = committed  # type: ignore[method-assign]


class ForgivesForEver(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        state.strikes.of = lambda _: 0  # type: ignore[method-assign, assignment]


class ForgetsToSayGoodbye(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        state.strikes.is_out = lambda _: False  # type: ignore[method-assign, assignment]


class WritesOtherWeights(Closing):
    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[CommittedPart, ...]:
        made = super()._contributions(members, deviants)
        return tuple(msgspec.structs.replace(item, weight=made[0].weight) for item in made)


class WritesTokens(Closing):
    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[CommittedPart, ...]:
        made = super()._contributions(members, deviants)
        return tuple(msgspec.structs.replace(item, weight=float(item.num_tokens)) for item in made)


class TakesTokensForWeights(PatchedCoordinator):
    parts = (("_closing", WritesTokens),)


class RecordsOtherWeights(PatchedCoordinator):
    parts = (("_closing", WritesOtherWeights),)


class TakesEveryRequestForNew(PeerFence):
    def _is_answered(self, sender: PeerRef, request: LeaseRequest) -> bool:
        return False


class GrantsAgain(Attendance):
    def wants_data(self, session: Session, request: LeaseRequest) -> None:
        leases = self._state.leases
        newest = leases.newest_serial
        leases.newest_serial = lambda ref: min(newest(ref), request.serial - 1)  # type: ignore[method-assign]
        super().wants_data(session, request)
        leases.newest_serial = newest  # type: ignore[method-assign]


class GrantsEveryRepeat(PatchedCoordinator):
    parts = (("_fence", TakesEveryRequestForNew), ("_attendance", GrantsAgain))


class GrantsEverything(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(dataclasses.replace(config, samples_per_round=1000), state)


class TakesBackReports(OpenRound):
    def vote(self, peer_id: PeerId, vote: Vote, now: Instant) -> bool:
        self.reports.pop(peer_id, None)
        return super().vote(peer_id, vote, now)


class CountsVotesAfterFailures(PatchedCoordinator):
    parts = (("_round", TakesBackReports),)


class NeedsOnlyOne(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._round.grace.quorum_of = lambda num_standing: config.min_peers  # type: ignore[method-assign]


class LooksAtNoSignature(Attendance):
    def _is_signed(self, ref: PeerRef, vote: Vote) -> bool:
        return True


class TakesUnsignedVotes(PatchedCoordinator):
    parts = (("_attendance", LooksAtNoSignature),)
