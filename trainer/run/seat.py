# SPDX-License-Identifier: Apache-2.0
"""Where a run's coordinator lives: how it is made of what its founder knows, who asks it, and when it is not needed.

Must not know this process's peer, nor who listens.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable

from isthmus.collective.transport.security import wall_s
from isthmus.elastic.core.config import REBUILD_SALTS, RebuildRule
from isthmus.elastic.core.records import BarRecord
from isthmus.elastic.observation import Observation, Observe, RecordWritten
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.shell.notary import RunSealer
from isthmus.trainer.config.wiring import coordinator_config
from isthmus.trainer.contact.admission import authority_of
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.contact.office import Office
from isthmus.trainer.run.coordination import Coordination
from isthmus.trainer.run.founding import Founded
from isthmus.trainer.run.options import Founding, StandingBy
from isthmus.trainer.run.preparation import Start
from isthmus.trainer.workers.loop import Loop

_POLL_S = 0.1


class Seat:
    """See the module. `open`, then `run` as a task; `close` in the end, whatever has happened.

    Attributes:
        rebuild: how a journal that was lost is made anew; None if none was.
        closing: set when nobody wants the coordinator any more.
        coordinator, office: once it is open.

    Args:
        start, founded: of this process, and the run.
        bouncer, observe: are told whom the journal puts out, and of every record and connection.
    """

    def __init__(self, start: Start, founded: Founded, bouncer: Bouncer, observe: Observe) -> None:
        self._start = start
        self._founded = founded
        self._bouncer = bouncer
        self._observe = observe
        self.rebuild = _rebuild_rule(start, founded)
        self.closing = asyncio.Event()
        self.coordinator: CoordinatorShell | None = None
        self.office: Office | None = None
        position = None if founded.checkpoint is None else founded.checkpoint.meta
        config = coordinator_config(
            start.config,
            founded.terms.digest(),
            RunSealer(authority_of(founded.run), founded.run.run_id, lambda: start.security.authorities),
            authorities=founded.terms.authorities,
            rebuild_salt=secrets.randbelow(REBUILD_SALTS),
            first_index=0 if position is None else position.next_index,
            returned=() if position is None else position.returned,
        )
        self._coordination = Coordination(
            start.config.coordinator,
            config,
            run_id=founded.run.run_id,
            me=start.me,
            run_dir=start.options.run_dir,
            rebuild=self.rebuild,
            observe=self._heard,
        )

    async def open(self, tasks: asyncio.TaskGroup, address: str, coordinators: Callable[[], tuple[str, ...]]) -> bool:
        """Wait for the right to coordinate, and take the seat; False if `closing` was set before.

        Args:
            tasks: for its signs of life; `close` ends them.
            address: where peers will find this coordinator.
            coordinators: where the run's coordinators listen now, this one first.
        """
        start = self._start
        self.coordinator = coordinator = await self._coordination.open(
            tasks, address=address, stands_by=isinstance(start.options.role, StandingBy), closing=self.closing
        )
        if coordinator is None:
            return False
        for bar in coordinator.doors.bars.values():
            self._bouncer.put_out(bar)
        self.office = Office(
            me=start.me,
            run=self._founded.run,
            addresses=coordinators,
            fingerprint=start.security.server_fingerprint if start.security.is_served else b"",
            lifetime_s=start.config.members.ticket_lifetime_s,
            coordinator=coordinator,
            now_s=wall_s,
            program=_program(start),
        )
        return True

    async def run(self) -> None:
        """Coordinate until cancelled."""
        await self._coordination.run()

    def close(self) -> None:
        """Let go of the journal."""
        self._coordination.close()

    async def everybody_gone(self, *, has_peer: bool, timeout_s: float | None, owner: Loop | None = None) -> None:
        """Coordinate for as long as somebody is there, or until `closing` is set.

        Args:
            has_peer: whether a peer lived here; else nobody's absence ends the coordinator of a run that goes on.
            timeout_s: for all of it; None: no limit.
            owner: whose end ends it too, so that it can be started again in this folder.
        """
        assert self.coordinator is not None, "it was opened"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_over(self.coordinator, has_peer, owner):  # noqa: ASYNC110 - a state of many parts
                    await asyncio.sleep(_POLL_S)
                if self.coordinator.finished:
                    await self.coordinator.until_finished()  # the last goodbyes are on their way

    def _is_over(self, coordinator: CoordinatorShell, has_peer: bool, owner: Loop | None) -> bool:
        status = coordinator.status()
        if status.finished or self.closing.is_set() or not (owner is None or owner.is_alive):
            return True
        return has_peer and not (status.view.members or status.learners)

    def _heard(self, event: Observation) -> None:
        self._observe(event)
        match event:
            case RecordWritten(record=BarRecord(bar=bar)):
                self._bouncer.put_out(bar)
            case _:
                pass


def _rebuild_rule(start: Start, founded: Founded) -> RebuildRule | None:
    role = start.options.role
    if isinstance(role, Founding) and role.rebuild is not None:
        return role.rebuild
    return RebuildRule.MAJORITY if founded.has_lost_its_journal else None


def _program(start: Start) -> tuple[str, ...] | None:
    """How a loop of one's own is started, if the run is one of loops: like the one here."""
    if start.loop is not None:
        return start.loop.facts.program
    return ("python", "LOOP.py") if start.config.is_loops else None
