# SPDX-License-Identifier: Apache-2.0
"""One operation between its caller's tensors and its round: plan, memory, codec.

Rules: results go to memory that the input does not share, so that an abort leaves the input untouched; in place that
is a buffer of the pool, copied over when nothing can fail any more. The same for CUDA, with pinned memory. All memory
is given back at the end, however it comes.
"""

import asyncio
from collections.abc import Sequence

from torch import Tensor

from isthmus.collective.core.link_table import Matrix
from isthmus.collective.core.types import Member
from isthmus.collective.rounds.buffers import DTYPES, Record, RoundBuffers
from isthmus.collective.rounds.coded import CodedBuffers
from isthmus.collective.rounds.plan import RoundPlan, Terms, terms_of
from isthmus.collective.rounds.swap import SwapBuffers
from isthmus.collective.rounds.tensors import on_host, overlap
from isthmus.collective.rounds.workplace import Workplace

_COPY_NBYTES = 8 << 20
"""Copied before the loop gets its turn."""


class Operation:
    """See the module. A context: memory is taken on entry and given back on exit.

    Args:
        workplace: what operations share.
        op: see RoundBuffers.
        plan: the cut.
        plan_name: for people.
        source: our flat part.
        target: flat, where results go; may be `source`.
        source_base: see RoundBuffers.
        target_base: likewise, of the output.
        weight: of our part.
        told: see Round.
        codec: its name.
        record: see RoundBuffers.
        is_tolerant: see RoundBuffers.
        predicted_s: what the cost model expects.
        paces: see Choice; of the members of the round.
    """

    def __init__(
        self,
        workplace: Workplace,
        *,
        op: str,
        plan: RoundPlan,
        plan_name: str,
        source: Tensor,
        target: Tensor,
        source_base: int = 0,
        target_base: int = 0,
        weight: float = 1.0,
        told: Sequence[float] | None = None,
        codec: str = "raw",
        record: Record | None = None,
        is_tolerant: bool = False,
        predicted_s: float | None = None,
        paces: Matrix | None = None,
    ) -> None:
        self.plan = plan
        self.plan_name = plan_name
        self.predicted_s = predicted_s
        self.paces = paces
        self.weight = weight
        self.told = told
        self._workplace = workplace
        self._op = op
        self._source, self._source_base = source, source_base
        self._target, self._target_base = target, target_base
        self._codec = codec
        self._record = record
        self._is_tolerant = is_tolerant
        self._out = target
        self._taken: list[Tensor] = []

    def __enter__(self) -> "Operation":
        if overlap(self._source, self._target):
            self._out = self._take(self._target.nbytes).view(self._target.dtype)
        elif self._target.device.type != "cpu":
            self._out = on_host(self._target)
        self._source = on_host(self._source)
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._taken:
            self._workplace.pool.give_back(buffer)
        self._taken.clear()

    @property
    def longest_chunk_nbytes(self) -> int:
        """Of those that other members may get ahead of time: on their way into a root, or as they lie in memory."""
        if self._codec != "raw" and all(route.is_star for route in self.plan.slices.routes):
            return self._workplace.codec(self._codec).wire_nbytes(self.plan.longest)
        return self.plan.longest * self._source.element_size()

    def terms(self, members: Sequence[Member]) -> Terms:
        """What all members must have posted alike."""
        return terms_of(
            self.plan,
            op=self._op,
            dtype=DTYPES[self._source.dtype],
            numel=self.plan.numel // 2 if self.plan_name == "swap" else self.plan.numel,
            codec=self._codec,
            chunk_nbytes=self._workplace.chunk_nbytes,
            members=tuple(member.ref for member in members),
            plan_name=self.plan_name,
        )

    def buffers(self, rank: int) -> RoundBuffers:
        """The values, as the round sees them."""
        if self.plan_name == "swap":
            return SwapBuffers(
                plan=self.plan,
                rank=rank,
                op=self._op,
                source=self._source,
                out=self._out,
                source_base=rank * self._source.numel(),
                weight=self.weight,
                record=self._record,
                is_tolerant=self._is_tolerant,
            )
        if self._codec != "raw":
            return CodedBuffers(
                self._workplace.codec(self._codec),
                take=self._take,
                plan=self.plan,
                rank=rank,
                op=self._op,
                source=self._source,
                out=self._out,
                weight=self.weight,
                record=self._record,
                is_tolerant=self._is_tolerant,
            )
        return RoundBuffers(
            plan=self.plan,
            rank=rank,
            op=self._op,
            source=self._source,
            out=self._out,
            source_base=self._source_base,
            out_base=self._target_base,
            weight=self.weight,
            record=self._record,
            is_tolerant=self._is_tolerant,
        )

    async def settle(self) -> None:
        """Bring the results to the caller's memory, all of them even if the caller is cancelled meanwhile."""
        if self._out is self._target:
            return
        cancelled: asyncio.CancelledError | None = None
        step = max(1, _COPY_NBYTES // max(1, self._target.element_size()))
        for start in range(0, self._target.numel(), step):
            self._target[start : start + step].copy_(self._out[start : start + step])
            if cancelled is None:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    def _take(self, nbytes: int) -> Tensor:
        buffer = self._workplace.pool.take(nbytes)
        self._taken.append(buffer)
        return buffer
