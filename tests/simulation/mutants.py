"""The test of the tests: broken variants of the protocol, each of which the simulator has to catch.

Every mutant is the real thing with one rule taken out, by subclassing or patching from here. Production code has no
flag for any of them.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from collective.core.types import Epoch, Instant, OuterStep, PeerRef, RoundKey, View
from elastic.core.admission import Admission
from elastic.core.certificate import Certificate
from elastic.core.closing import Closing
from elastic.core.config import CoordinatorConfig, RebuildRule
from elastic.core.coordinator import CoordinatorMachine
from elastic.core.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    ExchangeDone,
    MemberEffect,
    MemberEvent,
    Persist,
    SendToPeer,
)
from elastic.core.grace import Grace
from elastic.core.handover import Handover
from elastic.core.member import MemberMachine
from elastic.core.messages import Evicted, Held, Join, NewView, RoundFailed, Vote
from elastic.core.place import Phase, Place
from elastic.core.rebuild import Rebuild
from elastic.core.reception import Reception
from elastic.core.records import Record
from elastic.core.rounds import Agreed, Rounds, Split
from elastic.core.run_state import RunState
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


# ------------------------------------------------------------------------ coordinators


class PatchedCoordinator(CoordinatorMachine):
    """The real one with another `Rounds`, `Admission`, `Reception` or patience."""

    rounds_type: type[Rounds] = Rounds
    admission_type: type[Admission] = Admission
    reception_type: type[Reception] = Reception
    patience: float = 1.0

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        stall = dataclasses.replace(
            config,
            stall_floor_s=config.stall_floor_s * self.patience,
            stall_initial_s=config.stall_initial_s * self.patience,
        )
        super()._start(stall, state)
        self._rounds = self._roster.rounds = self.rounds_type()
        self._admission = self.admission_type(self._roster)
        self._closing = Closing(self._roster, self._admission)
        self._reception = self.reception_type(self._roster)


class CountsVotesOfAnyEpoch(CoordinatorMachine):
    def _on_round(self, session: Session, message: Vote | RoundFailed) -> None:
        key = RoundKey(self.state.epoch, message.key.outer_step, message.key.fragment)
        super()._on_round(session, msgspec.structs.replace(message, key=key))


class TakesEverybodyForAware(Reception):
    def join(self, sender: PeerRef, message: Join) -> None:
        super().join(sender, msgspec.structs.replace(message, epoch=self._roster.state.epoch))


class WelcomesTheUnaware(PatchedCoordinator):
    reception_type = TakesEverybodyForAware


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


class AnswersNoStranger(CoordinatorMachine):
    def handle(self, event: CoordinatorEvent, now: Instant) -> Sequence[CoordinatorEffect]:
        effects = super().handle(event, now)
        return [item for item in effects if not (isinstance(item, SendToPeer) and isinstance(item.message, Evicted))]


class BelievesEverybody(Rebuild):
    def is_genuine(self, certificate: Certificate) -> bool:
        return True


class ChecksNoCertificate(CoordinatorMachine):
    rebuild_type = BelievesEverybody


class TakesTheFirst(Rebuild):
    def newest(self, certificates: list[Certificate]) -> Certificate | None:
        return certificates[0] if certificates else None


class RebuildsFromTheFirst(CoordinatorMachine):
    rebuild_type = TakesTheFirst


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
    "stranger_not_answered": Mutant(
        what="whoever was dropped is never told",
        parts=Parts(coordinator=AnswersNoStranger),
    ),
    "heartbeat_is_life": Mutant(
        what="a member that makes no progress is kept as long as its heart beats",
        parts=Parts(coordinator=TrustsHeartbeats),
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
    "epoch_forgotten": Mutant(
        what="a restarted coordinator begins to count epochs anew",
        parts=Parts(coordinator=ForgetsEpochs),
    ),
}
