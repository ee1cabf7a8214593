# SPDX-License-Identifier: Apache-2.0
"""Machines that put out, leave behind, keep out or take in without a reason, or never end (mutants.py)."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from isthmus.collective.core.types import Instant, PeerRef
from isthmus.elastic.core.attendance import Attendance
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.chain import Chain
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.farewell import Farewell
from isthmus.elastic.core.grace import Grace
from isthmus.elastic.core.holders import Holders
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import Heartbeat
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import STANDS_STILL, Session
from isthmus.elastic.core.watch import Watch
from isthmus.elastic.core.work import MAX_STRIKES
from tests.simulation.broken_runs import PatchedCoordinator


class TakesWhoFetchesForDeaf(Attendance):
    def beats(self, session: Session, beat: Heartbeat) -> None:
        since, is_behind = session.behind_since, beat.outer_step < self._state.outer_step
        super().beats(session, beat)
        if is_behind and beat.epoch >= self._state.epoch and not beat.blocked:
            session.behind_since = since
            if self._turn.now >= session.told_at + self._config.resend_interval_s:
                self._news.tell(session)


class DropsWhoFetches(PatchedCoordinator):
    parts = (("_attendance", TakesWhoFetchesForDeaf),)


class DropsWhoIsAccused(CoordinatorMachine):
    """Whoever is accused, and does not speak in this very moment, counts as silent."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._closing._failures._config = dataclasses.replace(config, suspect_silence_s=1e-9)


class CountsFromTheFirst(Grace):
    def closes_at(self, ready_at: Collection[Instant], num_standing: int) -> Instant | None:
        return None if super().closes_at(ready_at, num_standing) is None else min(ready_at) + self.window_s


class ExcusesTooEarly(PatchedCoordinator):
    parts = (("_round.grace", CountsFromTheFirst),)


class CountsTheAbsent(Holders):
    def holds(self, session: Session) -> bool:
        known = session.disconnected, session.awaited_until
        session.disconnected, session.awaited_until = False, None
        result = super().holds(session)
        session.disconnected, session.awaited_until = known
        return result


class LeavesItToTheAbsent(PatchedCoordinator):
    parts = (("_holders", CountsTheAbsent),)


class NeverCountsAnew(OpenRound):
    def committed(self) -> None:
        splits = self._splits
        super().committed()
        self._splits = splits


class HaltsForOldSplits(PatchedCoordinator):
    parts = (("_round", NeverCountsAnew),)


class ForgivesNoWait(Pauses):
    def contributed(self, refs: Iterable[PeerRef]) -> None:
        pass


class PausesLongerAndLonger(PatchedCoordinator):
    parts = (("_pauses", ForgivesNoWait),)


class KnowsOfNoLoss(Roster):
    def learners(self) -> list[Session]:
        gone = [session for session in self.sessions.values() if session.disconnected]
        for session in gone:
            session.disconnected = False
        result = super().learners()
        for session in gone:
            session.disconnected = True
        return result


class AdmitsTheAbsent(PatchedCoordinator):
    parts = (("_roster", KnowsOfNoLoss),)


class OverlooksTheIdle(Watch):
    def overdue(self) -> dict[PeerRef, str]:
        return {ref: reason for ref, reason in super().overdue().items() if reason != STANDS_STILL}


class KeepsTheIdle(PatchedCoordinator):
    parts = (("_watch", OverlooksTheIdle),)


class RemembersEveryStart(CoordinatorMachine):
    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        strikes = state.strikes
        strikes.is_out = lambda ref: strikes.of(ref.peer_id) >= MAX_STRIKES  # type: ignore[method-assign]


class KeepsWhatWasGivenUp(Chain):
    def go_back_to(self, certificate: Certificate | None) -> None:
        self.newest = certificate or self.newest


class BelievesInTheLostRun(MemberMachine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._fence.chain.__class__ = KeepsWhatWasGivenUp


class WaitsForAnyAnswer(Farewell):
    def limit(self, now: Instant) -> None:
        if self.word is not None and self.word.now:
            super().limit(now)


class NeverGoesByItself(MemberMachine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._farewell.__class__ = WaitsForAnyAnswer
