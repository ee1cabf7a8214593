# SPDX-License-Identifier: Apache-2.0
"""Coordinators that lack a rule of who takes part, or of what survives a restart (mutants.py)."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

import msgspec

from isthmus.collective.core.types import Epoch, Instant, PeerId, PeerRef
from isthmus.elastic.core.admission import Admission
from isthmus.elastic.core.certificate import Certificate
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
from isthmus.elastic.core.peer_fence import PeerFence, Void
from isthmus.elastic.core.rebuild import Rebuild
from isthmus.elastic.core.records import Record
from isthmus.elastic.core.rendezvous import Rendezvous
from isthmus.elastic.core.rollback import Rollback
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import Session


class PatchedCoordinator(CoordinatorMachine):
    """The real one with other parts, or another patience, or that believes something else after a restart."""

    parts: tuple[tuple[str, type], ...] = ()
    """Attributes of parts, and of which class each is instead."""
    patience: float = 1.0

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        stall = dataclasses.replace(
            config,
            stall_floor_s=config.stall_floor_s * self.patience,
            stall_initial_s=config.stall_initial_s * self.patience,
        )
        super()._start(stall, state)
        for name, kind in self.parts:
            part = attrgetter(name)(self)
            assert issubclass(kind, type(part)), "a broken part is the real one without a rule"
            part.__class__ = kind

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
        self._news.tell_replaced = lambda to: None  # type: ignore[method-assign]


class HearsOlderStarts(CoordinatorMachine):
    """What an older start says counts as said by the newer one."""

    def _on_said(self, sender: PeerRef, message: PeerMessage) -> None:
        session = self._roster.sessions.get(sender.peer_id)
        is_older = session is not None and sender.incarnation < session.ref.incarnation
        super()._on_said(session.ref if session is not None and is_older else sender, message)


class TakesEverybodyForAware(PeerFence):
    def _why_void_of_stranger(self, sender: PeerRef, message: PeerMessage) -> Void | None:
        if isinstance(message, Join):
            message = msgspec.structs.replace(message, epoch=self._state.epoch)
        return super()._why_void_of_stranger(sender, message)


class WelcomesTheUnaware(PatchedCoordinator):
    parts = (("_fence", TakesEverybodyForAware),)


class TurnsNobodyAway(Doorkeeper):
    def turn_away(self, sender: PeerRef) -> bool:
        return False

    def settle(self) -> None:
        pass

    def _put_out(self, order: PutOut) -> str | None:
        refusal = super()._put_out(order)
        super().settle()
        return refusal


class LetsBackWhoWasPutOut(PatchedCoordinator):
    parts = (("_doorkeeper", TurnsNobodyAway),)


class AdmitsWhoeverWaits(Admission):
    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        for session in self._roster.learners():
            session.synced = self._state.committed
        super().at_boundary(deviants)


class CountsLearnersEarly(PatchedCoordinator):
    parts = (("_admission", AdmitsWhoeverWaits),)


class AdmitsOnlyTheNewest(Admission):
    def at_boundary(self, deviants: Sequence[PeerRef]) -> None:
        for session in self._roster.learners():
            if session.synced != self._state.committed:
                session.synced = None
        super().at_boundary(deviants)


class LetsLearnersChase(PatchedCoordinator):
    parts = (("_admission", AdmitsOnlyTheNewest),)


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
        found = [self._state.past(item.synced) for item in learners if item.synced]
        return min((at for at in found if at is not None), key=lambda at: at.held.outer_step, default=None)


class RollsBackTooFar(PatchedCoordinator):
    parts = (("_rollback", GoesBackTooFar),)


class GoesBackAtOnce(Rollback):
    def _due_at(self, *, is_possible: bool) -> Instant:
        return self._turn.now if is_possible else super()._due_at(is_possible=False)


class RollsBackAtOnce(PatchedCoordinator):
    parts = (("_rollback", GoesBackAtOnce),)


class TakesTheFirst(Rebuild):
    def newest(self, certificates: list[Certificate]) -> Certificate | None:
        return certificates[0] if certificates else None


class RebuildsFromTheFirst(CoordinatorMachine):
    rebuild_type = TakesTheFirst


class FoundsOnce(Admission):
    def found(self) -> None:
        founder = self._news.founder
        if founder is None or founder.peer_id not in self._roster.sessions:
            super().found()


class KeepsItsFounder(PatchedCoordinator):
    parts = (("_admission", FoundsOnce),)


class RemindsNobody(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._news.remind = lambda to: None  # type: ignore[method-assign]


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
        self._pauses.is_over = lambda ref, outer_step, now: True  # type: ignore[method-assign]


class AwaitsNobody(Rendezvous):
    def call(self, peers: Collection[PeerId], now: Instant) -> None:
        pass


class BeginsAgainAlone(PatchedCoordinator):
    parts = (("_rendezvous", AwaitsNobody),)


class ForgetsItsMembers(Rollback):
    def settle(self) -> None:
        state = self._state
        view, state.view = state.view, msgspec.structs.replace(state.view, members=())
        super().settle()
        if state.view.epoch == view.epoch:
            state.view = view


class RollsBackWithMembers(PatchedCoordinator):
    parts = (("_rollback", ForgetsItsMembers),)


class LetsEverybodyGo(Handover):
    def _is_awaited(self) -> bool:
        return False


class LeavesWithTheState(PatchedCoordinator):
    parts = (("_handover", LetsEverybodyGo),)
