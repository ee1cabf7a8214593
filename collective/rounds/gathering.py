# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a round with a quorum: one small round before the round itself.

The member of rank 0 keeps the list (core/quorum.py) and broadcasts it, one byte a member. To be late is to post after
the list was made; it waits in the stash of whoever is late.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import torch

from isthmus.collective.core.quorum import Clerk, Quorum
from isthmus.collective.core.slices import broadcast
from isthmus.collective.core.types import Member, RoundKey
from isthmus.collective.rounds.engine import Engine
from isthmus.collective.rounds.operation import Operation
from isthmus.collective.rounds.round import Round
from isthmus.collective.rounds.workplace import Workplace
from isthmus.collective.transport.bundle import Bundle


class Gathering:
    """One round's list of members.

    Args:
        workplace: see Operation.
        engine: takes the round.
        key: of this first phase.
        members: of the view.
        rank: our place.
        quorum: see Quorum; the same on all members.
        bundles: by rank.
    """

    def __init__(
        self,
        workplace: Workplace,
        engine: Engine,
        *,
        key: RoundKey,
        members: Sequence[Member],
        rank: int,
        quorum: Quorum,
        bundles: Sequence[Bundle | None],
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._clerk = Clerk(quorum, len(members))
        self._changed = asyncio.Event()
        self._list = torch.zeros(len(members), dtype=torch.uint8)
        routes = broadcast(0, len(members))
        operation = Operation(
            workplace,
            op="copy",
            plan=workplace.cut([len(members)], routes, item_nbytes=1),
            plan_name=f"quorum of {quorum.min_members} and {quorum.grace_s:g} s",
            source=self._list if rank == 0 else self._list[:0],
            target=self._list[:0] if rank == 0 else self._list,
        )
        self.round = Round(
            key=key,
            members=members,
            rank=rank,
            plan=operation.plan,
            terms=operation.terms(members),
            buffers=operation.buffers(rank),
            weight=1.0,
            bundles=bundles,
            eager_chunks=1,
            is_gathering=True,
            on_opened=self._on_opened,
        )

    async def ranks(self, see_through: Callable[[Round], Awaitable[None]]) -> tuple[int, ...]:
        """The ranks that are in.

        Args:
            see_through: watches a posted round until it is done, and raises its error.
        """
        if self._rank != 0:
            self._engine.post(self.round)
            await see_through(self.round)
        else:
            self._engine.post(self.round, starts=False)
            self._on_opened(0)
            error: Exception | None = None
            async with asyncio.TaskGroup() as tasks:
                closing = tasks.create_task(self._close())
                try:
                    await see_through(self.round)
                except Exception as raised:  # noqa: BLE001 - raised below: a task group would wrap it
                    error = raised
                closing.cancel()
            if error is not None:
                raise error
        return tuple(rank for rank, is_in in enumerate(self._list.tolist()) if is_in)

    def _on_opened(self, rank: int) -> None:
        self._clerk.on_ready(rank, asyncio.get_running_loop().time())
        self._changed.set()

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        while (ranks := self._clerk.closed(loop.time())) is None:
            self._changed.clear()
            look = self._clerk.next_look
            try:
                async with asyncio.timeout(None if look is None else max(0.0, look - loop.time())):
                    await self._changed.wait()
            except TimeoutError:
                continue
        self._list[list(ranks)] = 1
        if not self.round.is_done:
            self.round.start()
