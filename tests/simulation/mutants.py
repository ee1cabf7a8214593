# SPDX-License-Identifier: Apache-2.0
"""The test of the tests: broken variants of the protocol, each of which the simulator has to catch.

Every mutant is the real thing with one rule taken out, by subclassing or patching from here. Production code has no
flag for any of them.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from collective.core.types import Epoch, Instant, OuterStep, PeerId, PeerRef, RoundKey, View
from elastic.alarm import HeldClock
from elastic.core.admission import Admission
from elastic.core.attempt import Attempt
from elastic.core.certificate import Certificate
from elastic.core.closing import Closing
from elastic.core.config import CoordinatorConfig, RebuildRule
from elastic.core.coordinator import CoordinatorMachine
from elastic.core.doorkeeper import Doorkeeper
from elastic.core.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    ExchangeDone,
    MemberEffect,
    MemberEvent,
    Persist,
    PutOut,
    SendToPeer,
    StartExchange,
)
from elastic.core.grace import Grace
from elastic.core.handover import Handover
from elastic.core.member import MemberMachine
from elastic.core.messages import Evicted, Heartbeat, Held, Join, LeaseRequest, NewView, PeerMessage, RoundFailed, Vote
from elastic.core.place import Phase, Place
from elastic.core.rebuild import Rebuild
from elastic.core.reception import Reception
from elastic.core.records import Contribution, Record
from elastic.core.rollback import Rollback
from elastic.core.rounds import Agreed, Rounds, Split
from elastic.core.run_state import Past, RunState
from elastic.core.sessions import Session
from tests.simulation.exchange import Frame, FrameGate
from tests.simulation.parts import Parts

# ------------------------------------------------------------------------ members


class InstallsWithoutCommit(MemberMachine):
    def handle(self, event: MemberEvent, now: Instant) -> Sequence[MemberEffect]:
        effects = list(super().handle(event, now))
        place = self._place
        key, staged = place.attempt.key, place.attempt.staged
        if isinstance(event, ExchangeDone) and key is not None and staged is not None:
            place.effects = effects
            place.install_if_staged(Held(OuterStep(key.outer_step + 1), staged))
        return effects


class ForgetsItsPayload(MemberMachine):
    def _on_new_view(self, message: NewView) -> None:
        place, view = self._place, message.view
        if place.view is not None and view.epoch > place.view.epoch and place.attempt.staged is None:
            had_payload = place.attempt.payload is not None
            place.effects += place.attempt.forget()
            super()._on_new_view(message)
            if had_payload and place.view is not None:
                place._stop_training("starts over in the new view")
                place.phase = Phase.SYNCING
                place._take_part()
        else:
            super()._on_new_view(message)


class CausesWithoutEnd(Attempt):
    """It repeats what it was told as often as it likes."""

    def report(self) -> Vote | RoundFailed | None:
        word = super().report()
        return msgspec.structs.replace(word, cause=word.cause * 100) if isinstance(word, RoundFailed) else word


class SaysTooMuch(MemberMachine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._place.attempt = CausesWithoutEnd()


class CallsBytesSteps(Place):
    def heartbeat(self, epoch: Epoch) -> Heartbeat:
        beat = super().heartbeat(epoch)
        return msgspec.structs.replace(beat, inner_steps=beat.progress)


class CountsBytesAsWork(MemberMachine):
    place_type = CallsBytesSteps


# ------------------------------------------------------------------------ coordinators


class PatchedCoordinator(CoordinatorMachine):
    """The real one with another part, or another patience."""

    rounds_type: type[Rounds] = Rounds
    admission_type: type[Admission] = Admission
    reception_type: type[Reception] = Reception
    rollback_type: type[Rollback] = Rollback
    closing_type: type[Closing] = Closing
    patience: float = 1.0

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        stall = dataclasses.replace(
            config,
            stall_floor_s=config.stall_floor_s * self.patience,
            stall_initial_s=config.stall_initial_s * self.patience,
        )
        super()._start(stall, state)
        self._rounds = self._roster.rounds = self.rounds_type()
        self._admission = self.admission_type(self._roster, self._meetings)
        self._closing = self.closing_type(self._roster, self._admission)
        self._reception = self.reception_type(self._roster)
        self._rollback = self.rollback_type(self._roster)


class WaitsForVotesForEver(Closing):
    def _votes_close_at(self) -> Instant | None:
        return None


class WaitsForTheVoteless(PatchedCoordinator):
    closing_type = WaitsForVotesForEver


class MeasuresItsOwnPatience(Closing):
    def _exchanged_s(self, until: Instant) -> float:
        ready_at = [item.ready_at for item in self._roster.members() if item.ready_at is not None]
        return until - max(ready_at, default=until)


class WaitsLongerAndLonger(PatchedCoordinator):
    closing_type = MeasuresItsOwnPatience


class WaitsForAMajority(Closing):
    def _stands_still_at(self, silent: Sequence[Session]) -> Instant | None:
        return None


class WaitsForTheFirstVote(PatchedCoordinator):
    closing_type = WaitsForAMajority


class BlamesWhoIsAccused(Rounds):
    """One accusation is enough against who made none."""

    def blamed(self, view: View, newcomers: Collection[PeerId]) -> tuple[PeerId, ...]:
        accused = {peer: number for peer, number in self.accused(view).items() if number}
        return tuple(sorted(accused, key=lambda peer: accused[peer])[-1:])


class BelievesTheAccuser(PatchedCoordinator):
    rounds_type = BlamesWhoIsAccused


class LeavesAnyNumber(Closing):
    def _leaves_half(self, blamed: Collection[PeerId]) -> bool:
        return True


class AccusesAllOut(PatchedCoordinator):
    closing_type = LeavesAnyNumber


class LeavesNewcomersAlone(Closing):
    def _leaves_newcomers_alone(self, members: Sequence[Session], late: Sequence[Session]) -> bool:
        return False


class GoesOnWithNewcomers(PatchedCoordinator):
    closing_type = LeavesNewcomersAlone


class TellsNoOlderStart(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._roster.tell_replaced = lambda to: None  # type: ignore[method-assign]


class HearsOlderStarts(CoordinatorMachine):
    """What an older start says counts as said by the newer one."""

    def _on_said(self, sender: PeerRef, message: PeerMessage) -> None:
        session = self._roster.sessions.get(sender.peer_id)
        is_older = session is not None and sender.incarnation < session.ref.incarnation
        super()._on_said(session.ref if session is not None and is_older else sender, message)


class CountsVotesOfAnyEpoch(CoordinatorMachine):
    def _on_round(self, session: Session, message: Vote | RoundFailed) -> None:
        key = RoundKey(self.state.epoch, message.key.outer_step, message.key.fragment)
        super()._on_round(session, msgspec.structs.replace(message, key=key))


class TakesEverybodyForAware(Reception):
    def join(self, sender: PeerRef, message: Join) -> None:
        super().join(sender, msgspec.structs.replace(message, epoch=self._roster.state.epoch))


class WelcomesTheUnaware(PatchedCoordinator):
    reception_type = TakesEverybodyForAware


class TurnsNobodyAway(Doorkeeper):
    def turn_away(self, sender: PeerRef) -> bool:
        return False

    def settle(self) -> None:
        pass

    def _put_out(self, order: PutOut) -> str | None:
        refusal = super()._put_out(order)
        super().settle()
        return refusal


class LetsBackWhoWasPutOut(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._doorkeeper = TurnsNobodyAway(self._roster)


class TakesTheFirstDigest(Rounds):
    def outcome(self, view: View) -> Agreed | Split | None:
        if super().outcome(view) is None:
            return None
        first = self.votes[view.members[0].peer_id]
        return Agreed(key=first.key, digest=first.digest, deviants=())


class VotesWithoutDigest(PatchedCoordinator):
    rounds_type = TakesTheFirstDigest


class AdmitsWhoeverWaits(Admission):
    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        for session in self._roster.learners():
            session.synced = self._roster.state.committed
        super().at_boundary(deviants)


class CountsLearnersEarly(PatchedCoordinator):
    admission_type = AdmitsWhoeverWaits


class AdmitsOnlyTheNewest(Admission):
    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        for session in self._roster.learners():
            if session.synced != self._roster.state.committed:
                session.synced = None
        super().at_boundary(deviants)


class LetsLearnersChase(PatchedCoordinator):
    admission_type = AdmitsOnlyTheNewest


class TrustsHeartbeats(PatchedCoordinator):
    patience = 1e9


class WaitsForEver(Grace):
    def closes_at(self, ready_at: Collection[Instant], num_standing: int) -> Instant | None:
        return None


class HasUnboundedGrace(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._roster.grace = WaitsForEver(config)


class LetsEverybodyGo(Handover):
    def _is_awaited(self) -> bool:
        return False


class LeavesWithTheState(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._roster.handover = LetsEverybodyGo(self._roster)


class ThrowsLateWorkAway(Place):
    def _carry_over(self) -> None:
        """As who was put out does."""
        payload, held = self.attempt.payload, self.held
        if payload is not None and held is not None and payload.outer_step != held.outer_step:
            self._stop_training("late")


class ForgetsLateWork(MemberMachine):
    place_type = ThrowsLateWorkAway


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


class ForgivesForEver(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        state.strikes.of = lambda _: 0  # type: ignore[method-assign, assignment]


class AnswersNoStranger(CoordinatorMachine):
    def handle(self, event: CoordinatorEvent, now: Instant) -> Sequence[CoordinatorEffect]:
        effects = super().handle(event, now)
        return [item for item in effects if not (isinstance(item, SendToPeer) and isinstance(item.message, Evicted))]


class BelievesEverybody(Rebuild):
    def is_genuine(self, certificate: Certificate) -> bool:
        return True


class ChecksNoCertificate(CoordinatorMachine):
    rebuild_type = BelievesEverybody


class GoesBackTooFar(Rollback):
    def _newest_of(self, learners: Sequence[Session]) -> Past | None:
        found = [self._roster.state.past(item.synced) for item in learners if item.synced]
        return min((at for at in found if at is not None), key=lambda at: at.held.outer_step, default=None)


class RollsBackTooFar(PatchedCoordinator):
    rollback_type = GoesBackTooFar


class GoesBackAtOnce(Rollback):
    def _due_at(self, *, is_possible: bool) -> Instant:
        return self._roster.now if is_possible else super()._due_at(is_possible=False)


class RollsBackAtOnce(PatchedCoordinator):
    rollback_type = GoesBackAtOnce


class TakesTheFirst(Rebuild):
    def newest(self, certificates: list[Certificate]) -> Certificate | None:
        return certificates[0] if certificates else None


class RebuildsFromTheFirst(CoordinatorMachine):
    rebuild_type = TakesTheFirst


def recovered(machine: CoordinatorMachine) -> list[Session]:
    """The sessions that a restarted coordinator begins with."""
    return list(machine._roster.sessions.values())


class TakesAllForHolders(CoordinatorMachine):
    @classmethod
    def recover(
        cls,
        config: CoordinatorConfig,
        records: Iterable[Record],
        now: Instant,
        *,
        rebuild: RebuildRule | None = None,
    ) -> "CoordinatorMachine":
        machine = super().recover(config, records, now, rebuild=rebuild)
        for session in recovered(machine):
            session.holds_state = True
        return machine


class ForgetsWhoWasLate(CoordinatorMachine):
    @classmethod
    def recover(
        cls,
        config: CoordinatorConfig,
        records: Iterable[Record],
        now: Instant,
        *,
        rebuild: RebuildRule | None = None,
    ) -> "CoordinatorMachine":
        machine = super().recover(config, records, now, rebuild=rebuild)
        for session in recovered(machine):
            session.has_worked = True
        return machine


class WritesOtherWeights(Closing):
    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[Contribution, ...]:
        made = super()._contributions(members, deviants)
        return tuple(msgspec.structs.replace(item, weight=made[0].weight) for item in made)


class WritesTokens(Closing):
    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[Contribution, ...]:
        made = super()._contributions(members, deviants)
        return tuple(msgspec.structs.replace(item, weight=float(item.num_tokens)) for item in made)


class TakesTokensForWeights(PatchedCoordinator):
    closing_type = WritesTokens


class RecordsOtherWeights(PatchedCoordinator):
    closing_type = WritesOtherWeights


class FoundsOnce(Admission):
    def found(self) -> None:
        founder = self._roster.founder
        if founder is None or founder.peer_id not in self._roster.sessions:
            super().found()


class KeepsItsFounder(PatchedCoordinator):
    admission_type = FoundsOnce


class RemindsNobody(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._roster.remind = lambda to: None  # type: ignore[method-assign]


class GrantsEveryRepeat(CoordinatorMachine):
    def _on_lease_request(self, session: Session, request: LeaseRequest) -> None:
        leases = self.state.leases
        newest = leases.newest_serial
        leases.newest_serial = lambda ref: min(newest(ref), request.serial - 1)  # type: ignore[method-assign]
        super()._on_lease_request(session, request)
        leases.newest_serial = newest  # type: ignore[method-assign]


class WeighsAnew(Attempt):
    """Another try, another weight."""

    def start(self, view: View, weights: tuple[float, ...] = ()) -> Sequence[MemberEffect]:
        effects = super().start(view, weights)
        return [
            dataclasses.replace(item, weight=item.weight + view.epoch % 2) if isinstance(item, StartExchange) else item
            for item in effects
        ]


class ChangesItsWeight(MemberMachine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._place.attempt = WeighsAnew()


class ForgetsEpochs(CoordinatorMachine):
    @classmethod
    def recover(
        cls,
        config: CoordinatorConfig,
        records: Iterable[Record],
        now: Instant,
        *,
        rebuild: RebuildRule | None = None,
    ) -> "CoordinatorMachine":
        machine = super().recover(config, records, now, rebuild=rebuild)
        machine.state.view = msgspec.structs.replace(machine.state.view, epoch=Epoch(0))
        return machine


# ------------------------------------------------------------------------ shells


def send_first(effects: Sequence[CoordinatorEffect]) -> Sequence[CoordinatorEffect]:
    """Tells everybody, then writes it down."""
    sends = [effect for effect in effects if isinstance(effect, SendToPeer)]
    return [*sends, *(effect for effect in effects if isinstance(effect, Persist))]


def hold_nothing(time: HeldClock) -> None:
    """The machine's time goes on while the store is at work."""


class OpenGate(FrameGate):
    """Takes every frame for the round that is running, whatever epoch and whose start it is of."""

    def arrive(self, frame: Frame, current: RoundKey | None, outer_step: int) -> None:
        if current is not None:
            self._deliver(frame)
        else:
            super().arrive(frame, current, outer_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Which rule is missing, and the machines without it."""

    what: str
    parts: Parts


MUTANTS: dict[str, Mutant] = {
    "no_commit_round": Mutant(
        what="a member installs what it has staged without waiting for the commit",
        parts=Parts(member=InstallsWithoutCommit),
    ),
    "words_unbounded": Mutant(
        what="a member says more than its listener takes",
        parts=Parts(member=SaysTooMuch),
    ),
    "no_epoch_fence": Mutant(
        what="chunks of abandoned rounds count in the running one",
        parts=Parts(gate=OpenGate),
    ),
    "vote_of_any_epoch": Mutant(
        what="a vote for an abandoned attempt counts for the current one",
        parts=Parts(coordinator=CountsVotesOfAnyEpoch),
    ),
    "send_before_persist": Mutant(
        what="the coordinator tells its decisions before they are durable",
        parts=Parts(arrange=send_first),
    ),
    "vote_without_digest": Mutant(
        what="the coordinator commits when all have voted, whatever for",
        parts=Parts(coordinator=VotesWithoutDigest),
    ),
    "learner_counted_early": Mutant(
        what="learners become members before they have caught up",
        parts=Parts(coordinator=CountsLearnersEarly),
    ),
    "learner_chases": Mutant(
        what="learners are admitted only with the state that the boundary itself has made",
        parts=Parts(coordinator=LetsLearnersChase),
    ),
    "lease_returned_twice": Mutant(
        what="samples that a commit consumed return when their owner is gone",
        parts=Parts(coordinator=ReturnsConsumedLeases),
    ),
    "weight_beyond_leases": Mutant(
        what="a member weighs whatever it says",
        parts=Parts(coordinator=BelievesEveryWeight),
    ),
    "any_size": Mutant(
        what="parts count however large their numbers are",
        parts=Parts(coordinator=CountsEveryPart),
    ),
    "weights_not_compared": Mutant(
        what="nobody looks whether all members have counted with the same weights",
        parts=Parts(coordinator=ComparesNoWeights),
    ),
    "sums_not_compared": Mutant(
        what="nobody looks whether a member gives the same sums to all",
        parts=Parts(coordinator=ComparesNoSums),
    ),
    "one_voice_is_enough": Mutant(
        what="who is pointed at by a single member has lied",
        parts=Parts(coordinator=BelievesOneVoice),
    ),
    "deviants_for_ever": Mutant(
        what="who deviates in every round is never put out for good",
        parts=Parts(coordinator=ForgivesForEver),
    ),
    "stranger_not_answered": Mutant(
        what="whoever was dropped is never told",
        parts=Parts(coordinator=AnswersNoStranger),
    ),
    "heartbeat_is_life": Mutant(
        what="a member that makes no progress is kept as long as its heart beats",
        parts=Parts(coordinator=TrustsHeartbeats),
    ),
    "voteless_awaited": Mutant(
        what="a member that never votes is awaited as long as its heart beats",
        parts=Parts(coordinator=WaitsForTheVoteless),
    ),
    "voteless_teaches_patience": Mutant(
        what="the time that one vote was awaited in vain counts as the time that exchanges take",
        parts=Parts(coordinator=WaitsLongerAndLonger),
    ),
    "few_votes_never_enough": Mutant(
        what="where most do not vote, or the only member, nobody is ever given up",
        parts=Parts(coordinator=WaitsForTheFirstVote),
    ),
    "accuser_believed": Mutant(
        what="who is accused goes, whoever says it",
        parts=Parts(coordinator=BelievesTheAccuser),
    ),
    "accused_out": Mutant(
        what="accusations alone may put out more than half of the last commit's members",
        parts=Parts(coordinator=AccusesAllOut),
    ),
    "newcomers_alone": Mutant(
        what="a round goes on with newcomers alone, whom nobody may reach",
        parts=Parts(coordinator=GoesOnWithNewcomers),
    ),
    "older_start_not_told": Mutant(
        what="an older start of a copied folder is never told of the newer one",
        parts=Parts(coordinator=TellsNoOlderStart),
    ),
    "older_start_heard": Mutant(
        what="what an older start of a peer says counts",
        parts=Parts(coordinator=HearsOlderStarts),
    ),
    "unaware_welcomed": Mutant(
        what="a former member becomes a learner without having heard that it was dropped",
        parts=Parts(coordinator=WelcomesTheUnaware),
    ),
    "grace_unbounded": Mutant(
        what="a round waits for the late as long as they live",
        parts=Parts(coordinator=HasUnboundedGrace),
    ),
    "state_taken_away": Mutant(
        what="the last holder of the state leaves in order while others still need it",
        parts=Parts(coordinator=LeavesWithTheState),
    ),
    "late_work_lost": Mutant(
        what="work that came too late for its round is thrown away",
        parts=Parts(member=ForgetsLateWork),
    ),
    "bytes_are_work": Mutant(
        what="an excused peer whose trainer hangs is a member again, because it follows the commits",
        parts=Parts(member=CountsBytesAsWork),
    ),
    "payload_forgotten": Mutant(
        what="a member drops its payload when the view changes",
        parts=Parts(member=ForgetsItsPayload),
    ),
    "certificate_not_checked": Mutant(
        what="a lost journal is made anew from certificates whose seal nobody has looked at",
        parts=Parts(coordinator=ChecksNoCertificate),
    ),
    "first_certificate_taken": Mutant(
        what="a lost journal is made anew from the first certificate that comes, not the newest",
        parts=Parts(coordinator=RebuildsFromTheFirst),
    ),
    "all_hold_after_restart": Mutant(
        what="a restarted coordinator takes every member for a holder of the newest state",
        parts=Parts(coordinator=TakesAllForHolders),
    ),
    "excused_forgotten": Mutant(
        what="a restarted coordinator takes who was excused for a peer that shows progress",
        parts=Parts(coordinator=ForgetsWhoWasLate),
    ),
    "tokens_for_weights": Mutant(
        what="a commit records how many tokens were trained on, and not the weight",
        parts=Parts(coordinator=TakesTokensForWeights),
    ),
    "other_weight_recorded": Mutant(
        what="a commit records another weight than was voted",
        parts=Parts(coordinator=RecordsOtherWeights),
    ),
    "founder_kept": Mutant(
        what="a founder that hangs is never replaced",
        parts=Parts(coordinator=KeepsItsFounder),
    ),
    "no_reminder": Mutant(
        what="who is put out is not told of the commit that it voted for",
        parts=Parts(coordinator=RemindsNobody),
    ),
    "lease_granted_twice": Mutant(
        what="a repeated request is granted again",
        parts=Parts(coordinator=GrantsEveryRepeat),
    ),
    "weight_changes": Mutant(
        what="a payload is exchanged with another weight at the second try",
        parts=Parts(member=ChangesItsWeight),
    ),
    "time_goes_on": Mutant(
        what="a store that is away costs peers their membership",
        parts=Parts(hold=hold_nothing, release=hold_nothing),
    ),
    "store_without_fence": Mutant(
        what="a coordinator that another one has replaced goes on writing",
        parts=Parts(fences=False),
    ),
    "put_out_let_back": Mutant(
        what="whoever was put out joins again as the same start",
        parts=Parts(coordinator=LetsBackWhoWasPutOut),
    ),
    "epoch_forgotten": Mutant(
        what="a restarted coordinator begins to count epochs anew",
        parts=Parts(coordinator=ForgetsEpochs),
    ),
    "rolled_back_too_far": Mutant(
        what="a run that goes back takes the oldest state that somebody holds, not the newest",
        parts=Parts(coordinator=RollsBackTooFar),
    ),
    "rolled_back_at_once": Mutant(
        what="a run goes back as soon as nobody is here who holds the committed state",
        parts=Parts(coordinator=RollsBackAtOnce),
    ),
}
