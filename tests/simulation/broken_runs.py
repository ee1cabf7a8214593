# SPDX-License-Identifier: Apache-2.0
"""Coordinators that lack a rule of who takes part, or of what survives a restart (mutants.py)."""

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from isthmus.collective.core.types import Epoch, Instant, PeerRef
from isthmus.elastic.core.admission import Admission
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.closing import Closing
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.doorkeeper import Doorkeeper
from isthmus.elastic.core.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    PutOut,
    SendToPeer,
)
from isthmus.elastic.core.handover import Handover
from isthmus.elastic.core.messages import Evicted, Join, PeerMessage
from isthmus.elastic.core.past import Past
from isthmus.elastic.core.rebuild import Rebuild
from isthmus.elastic.core.reception import Reception
from isthmus.elastic.core.records import Record
from isthmus.elastic.core.rollback import Rollback
from isthmus.elastic.core.rounds import Rounds
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import Session


class PatchedCoordinator(CoordinatorMachine):
    """The real one with another part, or another patience, or that believes something else after a restart."""

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
        cls.after_restart(machine, list(machine._roster.sessions.values()))
        return machine

    @staticmethod
    def after_restart(machine: CoordinatorMachine, sessions: list[Session]) -> None:
        """What it believes of those whom the journal names."""


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


class TakesAllForHolders(PatchedCoordinator):
    @staticmethod
    def after_restart(machine: CoordinatorMachine, sessions: list[Session]) -> None:
        for session in sessions:
            session.holds_state = True


class ForgetsWhoWasLate(PatchedCoordinator):
    @staticmethod
    def after_restart(machine: CoordinatorMachine, sessions: list[Session]) -> None:
        for session in sessions:
            session.has_worked = True


class ForgetsEpochs(PatchedCoordinator):
    @staticmethod
    def after_restart(machine: CoordinatorMachine, sessions: list[Session]) -> None:
        machine.state.view = msgspec.structs.replace(machine.state.view, epoch=Epoch(0))


class MeetsNobody(PatchedCoordinator):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._meetings.have_met = lambda candidates, stays: list(candidates)  # type: ignore[method-assign]


class BlamesAroundHubs(PatchedCoordinator):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._closing._failures._gone_without = lambda blamed: set(blamed)  # type: ignore[method-assign]


class PausesNobody(PatchedCoordinator):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._roster.pauses.is_over = lambda ref, outer_step, now: True  # type: ignore[method-assign]


class AwaitsNobody(Admission):
    def between_commits(self) -> None:
        self._roster.awaited.clear()
        super().between_commits()


class BeginsAgainAlone(PatchedCoordinator):
    admission_type = AwaitsNobody


class ForgetsItsMembers(Rollback):
    def settle(self) -> None:
        state = self._roster.state
        view, state.view = state.view, msgspec.structs.replace(state.view, members=())
        super().settle()
        if state.view.epoch == view.epoch:
            state.view = view


class RollsBackWithMembers(PatchedCoordinator):
    rollback_type = ForgetsItsMembers


class LetsEverybodyGo(Handover):
    def _is_awaited(self) -> bool:
        return False


class LeavesWithTheState(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._roster.handover = LetsEverybodyGo(self._roster)
