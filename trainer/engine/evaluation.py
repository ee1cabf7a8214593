# SPDX-License-Identifier: Apache-2.0
"""The anchor on held-out text: whose turn it is, and how a peer judges it while it trains.

    begin     the workers keep a copy of the anchor beside their parameters
    idle      while they stand still for the others they judge the copy, batch by batch
    finish    what is left is judged at once: the next one is due, or the run is over

Rules: what is due when, and at whom, follows from the commit alone, so that all members agree without a word; nobody
takes the place of a member that goes: its evaluation is missing. Of a device without room for a copy the anchor is
judged at once, and its peer trains on after that. Must not know events, or how workers compute.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from isthmus.elastic.core.messages import DataPosition
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.workers.pool import WorkerPool

_STEPS_REMEMBERED: Final = 64
"""More than a method has outer steps on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What came of one evaluation.

    Attributes:
        outer_step: of the anchor.
        tokens: that the run had trained on by then.
        loss: mean, nats a token.
        seconds: of the workers.
        held_s: of these, for how long they would have trained.
    """

    outer_step: int
    tokens: int
    loss: float
    seconds: float
    held_s: float


class Turns:
    """Says which commits are judged, and by whom.

    Args:
        every: tokens of the run between two evaluations; 0: never.
        tokens_per_sample: of the run.
    """

    def __init__(self, *, every: int, tokens_per_sample: int) -> None:
        self._every = every
        self._tokens_per_sample = tokens_per_sample
        self._tokens: dict[int, int] = {0: 0}  # by outer step

    def committed(self, outer_step: int, position: DataPosition) -> None:
        """This step is committed, and the data stands there. Every peer hears of each commit."""
        num_samples = position.next_index - sum(map(len, position.unconsumed))
        self._tokens[outer_step] = num_samples * self._tokens_per_sample
        for old in [step for step in self._tokens if step <= outer_step - _STEPS_REMEMBERED]:
            del self._tokens[old]

    def tokens(self, outer_step: int) -> int:
        """That the run had trained on by then; 0 if that is not known."""
        return self._tokens.get(outer_step, 0)

    def rank(self, outer_step: int, world_size: int, *, is_final: bool) -> int | None:
        """Rank of the member that judges this step; None if nobody does.

        The duty goes round: the number of an evaluation is at most that of its outer step, and at most how often
        `every` tokens are done. Where one of them grows by one from each evaluation to the next, so does the smaller.
        """
        now, before = self._tokens.get(outer_step), self._tokens.get(outer_step - 1)
        if not self._every or now is None:
            return None
        if not is_final and (before is None or before // self._every == now // self._every):
            return None
        return min(now // self._every, outer_step) % world_size


class Evaluation:
    """One anchor after the other. Call all of it from the task that trains.

    Args:
        values: the workers' values.
        pool: the workers.
        clock: monotonic seconds.
        tell: is told what came of each.
    """

    def __init__(
        self, values: WorkerValues, pool: WorkerPool, clock: Callable[[], float], tell: Callable[[Judged], None]
    ) -> None:
        self._values = values
        self._pool = pool
        self._clock = clock
        self._tell = tell
        self._open: _Open | None = None

    async def begin(self, outer_step: int, tokens: int) -> None:
        """Judge the anchor that the values are based on from now on. One that is open is finished first."""
        await self.finish()
        began = self._clock()
        kept = await self._values.keep_anchor()
        if kept.has_room:
            taken_s = self._clock() - began
            self._open = _Open(outer_step, tokens, kept.num_batches, seconds=taken_s, held_s=taken_s)
            return
        whole = await self._values.judge_anchor()
        taken_s = self._clock() - began
        self._tell(Judged(outer_step=outer_step, tokens=tokens, loss=whole.loss, seconds=taken_s, held_s=taken_s))

    async def idle(self, until: asyncio.Future[None]) -> None:
        """Judge on until this is done, and until the batch that is under way then is."""
        ended_at: list[float] = []
        until.add_done_callback(lambda _: ended_at.append(self._clock()))
        while (now := self._open) is not None and not until.done():
            await self._judge(now)
            if ended_at:
                now.held_s += self._clock() - ended_at[0]
            self._tell_if_done(now)

    async def advance(self) -> None:
        """Judge a part now: who never stands still comes to an end too."""
        if (now := self._open) is not None and not now.has_advanced:
            now.held_s += await self._judge(now)
            self._tell_if_done(now)
        if self._open is not None:
            self._open.has_advanced = False

    async def finish(self) -> None:
        """Judge what is left."""
        while (now := self._open) is not None:
            now.held_s += await self._judge(now)
            self._tell_if_done(now)

    def drop(self) -> None:
        """The workers are gone, and the copy with them."""
        self._open = None

    async def _judge(self, now: "_Open") -> float:
        """One batch for each worker; returns how long it took."""
        began = self._clock()
        part = range(now.next_batch, min(now.next_batch + self._pool.num_workers, now.num_batches))
        judged = await self._pool.evaluate(part, is_kept=True)
        now.next_batch, now.has_advanced = part.stop, True
        now.loss_sum += judged.loss * judged.num_tokens
        now.num_tokens += judged.num_tokens
        taken_s = self._clock() - began
        now.seconds += taken_s
        return taken_s

    def _tell_if_done(self, now: "_Open") -> None:
        if now.next_batch < now.num_batches:
            return
        self._open = None
        loss = now.loss_sum / now.num_tokens
        self._tell(
            Judged(outer_step=now.outer_step, tokens=now.tokens, loss=loss, seconds=now.seconds, held_s=now.held_s)
        )


@dataclass(slots=True)
class _Open:
    """An evaluation that is not over."""

    outer_step: int
    tokens: int
    num_batches: int
    seconds: float
    held_s: float
    next_batch: int = 0
    loss_sum: float = 0.0
    num_tokens: int = 0
    has_advanced: bool = True
    """Since the last landing."""
