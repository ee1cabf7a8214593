# SPDX-License-Identifier: Apache-2.0
"""How an operation becomes a round and is seen through: memory, pace, watch.

Rules: the caller's memory is taken back at the end, however that comes. Each running round has one watch
(supervision.py), which ends with it.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from isthmus.collective.core.apart import NO_PAIR, Apart
from isthmus.collective.core.round_times import RoundTimes
from isthmus.collective.core.types import Member, PeerRef, RoundKey
from isthmus.collective.errors import OperationAborted
from isthmus.collective.links.measurements import LinkMeter
from isthmus.collective.links.mesh import Mesh, linked_members
from isthmus.collective.rounds.engine import Engine
from isthmus.collective.rounds.operation import Operation
from isthmus.collective.rounds.options import RoundStats
from isthmus.collective.rounds.plan import RoundPlan
from isthmus.collective.rounds.running_round import RunningRound
from isthmus.collective.rounds.supervision import Patience, supervise
from isthmus.collective.transport.bundle import Bundle

_HEADROOM = 1.1
"""Above the pace that the links are known to allow: at that pace itself no stream has room to make up for a loss, and
far above it queues lose what is too much. Of the bound, on four peers with 200 Mbit/s and 150 ms: .87 with 1.05, .89
with 1.1, .88 with 1.2 and three times as many packets lost, .86 with 1.4."""


class Runner:
    """See the module.

    Args:
        me: this start of this peer.
        engine: takes the rounds.
        mesh: has the links.
        meter: measures while rounds run.
        patience: see Patience.
    """

    def __init__(self, me: PeerRef, *, engine: Engine, mesh: Mesh, meter: LinkMeter, patience: Patience) -> None:
        self._me = me
        self._engine = engine
        self._mesh = mesh
        self._meter = meter
        self._patience = patience
        self._times = RoundTimes(patience.slow)

    async def run(
        self,
        key: RoundKey,
        members: Sequence[Member],
        rank: int,
        operation: Operation,
        *,
        deadline_s: float | None,
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> RoundStats:
        """Carry the operation out among these members, of which we are number `rank`.

        If there is something to do `first`, the others hear that we have come before it is done: it must be over long
        before silence becomes suspicion, and the operation be small (Engine.announce).
        """
        started = time.monotonic()
        with operation:
            round_ = RunningRound(
                key=key,
                members=members,
                rank=rank,
                plan=operation.plan,
                terms=operation.terms(members),
                buffers=operation.buffers(rank),
                weight=operation.weight,
                told=operation.told,
                bundles=self._bundles_to(members),
                eager_chunks=self._engine.credit(operation.longest_chunk_nbytes),
                chunk_nbytes=operation.longest_chunk_nbytes,
                apart=self._apart(members),
            )
            _pace(round_.bundles, None if operation.paces is None else operation.paces[rank])
            self._meter.paced_anew()
            if first is not None:
                await self._announce(round_, first)
            if not round_.is_done:
                self._engine.post(round_)
            await self._see_through(round_, deadline_s)
            if round_.opened_at is not None:
                refs = [member.ref for member in members]
                self._times.took(refs, round_.nbytes, time.monotonic() - round_.opened_at)
            sizes, sums = round_.sizes, round_.sums
            await operation.settle()
        return RoundStats(
            members=tuple(member.ref for member in members),
            weights=tuple(0.0 if known is None else known for known in round_.weights),
            weight_sum=round_.weight_sum(),
            bytes_sent=round_.bytes_sent,
            bytes_received=round_.bytes_received,
            seconds=time.monotonic() - started,
            plan=operation.plan_name,
            predicted_s=operation.predicted_s,
            sizes=sizes,
            sums=sums,
            roots=_roots_of(operation.plan),
            coded=_coded_by(rank, operation.plan),
        )

    async def _announce(self, round_: RunningRound, first: Callable[[], Awaitable[None]]) -> None:
        """Say that we have come, and do what is to be done before the round is posted. It may have failed then."""
        self._engine.announce(round_)
        try:
            await first()
        except BaseException:
            round_.give_up(OperationAborted(round_.key, "ended before it began"))
            self._engine.close(round_)
            raise

    async def _see_through(self, round_: RunningRound, deadline_s: float | None) -> None:
        """Watch a posted round until it is done; raise its error."""
        try:
            if not round_.is_done:
                total_s = self._patience.round_s if deadline_s is None else deadline_s
                await supervise(round_, self._patience, total_s, self._meter, self._times)
        except BaseException as error:
            cause = "cancelled by its caller" if isinstance(error, asyncio.CancelledError) else "failed inside"
            round_.give_up(OperationAborted(round_.key, cause))
            raise
        finally:
            self._engine.close(round_)
        ended_by, round_.error = round_.error, None
        if ended_by is not None:
            try:
                raise ended_by
            finally:
                # A traceback holds its frames and they their variables: with an error among them, all that the round
                # held, links' memory too, would live until the collector finds the ring.
                del ended_by

    def _apart(self, members: Sequence[Member]) -> Apart:
        view = self._engine.view
        assert view is not None, "a round needs a view"
        # Of a view's members all take part, or two that exchange, which have a link.
        return frozenset(view.apart) if len(members) == view.world_size else NO_PAIR

    def _bundles_to(self, members: Sequence[Member]) -> list[Bundle | None]:
        assert self._engine.view is not None, "a round needs a view"
        linked = {member.ref for member in linked_members(self._engine.view, self._me)}
        return [self._mesh.bundles[member.ref] if member.ref in linked else None for member in members]


def _roots_of(plan: RoundPlan) -> tuple[tuple[int, int, int], ...]:
    slices = plan.slices
    if not all(route.is_star and route.is_reduced for route in slices.routes):
        return ()
    spans = ((route.root, *plan.slice_span(slice_)) for slice_, route in enumerate(slices.routes))
    return tuple((rank, start, stop) for rank, start, stop in spans if start < stop)


def _coded_by(rank: int, plan: RoundPlan) -> tuple[tuple[int, int], ...]:
    """Where the part of this rank goes to the root alone: see `CodedBuffers`."""
    spans = (
        plan.slice_span(slice_)
        for slice_, route in enumerate(plan.slices.routes)
        if route.up[rank] == route.root and rank not in route.up
    )
    return tuple((start, stop) for start, stop in spans if start < stop)


def _pace(bundles: Sequence[Bundle | None], paces: Sequence[float] | None) -> None:
    """Let no link take what another one needs: with all at full speed, queues overflow and one of them ends last."""
    for rank, bundle in enumerate(bundles):
        if bundle is not None:
            is_known = paces is not None and 0.0 < paces[rank] < math.inf
            bundle.pace(paces[rank] * _HEADROOM if paces is not None and is_known else None)
