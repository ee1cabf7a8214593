# SPDX-License-Identifier: Apache-2.0
"""The values of an all-reduce between two: both give all they have, and both add it up alike.

As many bytes as the butterfly, one way instead of two, so it is what two members do with small tensors. For the
machine it is a gather: slice r is the part of rank r.

Rules: the same bits on both sides, whatever their processors: the part of the lower rank comes first, and nothing is
left to a fused multiply-add.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus.collective.codec.base import NotFinite, first_non_finite
from isthmus.collective.errors import NonFiniteInput
from isthmus.collective.rounds.buffers import RoundBuffers, divide


class SwapBuffers(RoundBuffers):
    """See the module. Arguments as RoundBuffers; the plan holds both parts, `out` one result."""

    is_identity = False

    def __init__(self, *, rank: int, is_tolerant: bool = False, **more: Any) -> None:  # noqa: ANN401
        super().__init__(rank=rank, **more)
        self._wide = {}
        self._is_tolerant = is_tolerant and self._looks_at_numbers

    def result(self, chunk: int) -> memoryview:
        """Our part."""
        return self._source_bytes[self._in_source(chunk)]

    def finish(self, chunk: int, weight_sum: float) -> None:
        """Our part needs no more."""

    def keep_own(self) -> None:
        """It is in every sum already."""

    def install(self, chunk: int, wire: Tensor, weights: Sequence[float | None]) -> None:
        """Add the other's part to ours.

        Raises:
            NotFinite: it holds NaN or infinity.
            NonFiniteInput: our part does.
            OverflowError: the result is too large for the dtype.
        """
        first = self._starts[chunk] - self._other_base
        place = slice(first, first + self._plan.numel_of(chunk))
        own, part, out = self._source[place], wire.view(self._source.dtype), self._out[place]
        low, high = (own, part) if self._rank == 0 else (part, own)
        if self.op in ("min", "max"):
            self._combine_extremes(low, high, out)
        else:
            self._add_up(low, high, out, [1.0 if weight is None else weight for weight in weights])
        if self._looks_at_numbers:
            for rank, weight in enumerate(weights):
                if weight != 0.0:
                    self._seen.saw_part(rank, low if rank == 0 else high)
        if self._looks_at_numbers and first_non_finite(out) is not None:
            index = first_non_finite(own)
            if index is not None:
                raise NonFiniteInput(first + index)
            if not self._is_tolerant:
                if first_non_finite(part) is not None:
                    raise NotFinite("a part holds NaN or infinity")
                raise OverflowError("the result overflows its dtype")
            self._seen.saw_part(1 - self._rank, None)
            out.zero_()
        if self.record is not None:
            item = self._item_nbytes
            self.record(first, place.stop - first, self._out_bytes[first * item : place.stop * item])

    @property
    def _other_base(self) -> int:
        return self._plan.slice_span(1 - self._rank)[0]

    def _combine_extremes(self, low: Tensor, high: Tensor, out: Tensor) -> None:
        (torch.minimum if self.op == "min" else torch.maximum)(low, high, out=out)

    def _add_up(self, low: Tensor, high: Tensor, out: Tensor, weights: list[float]) -> None:
        if weights != [1.0, 1.0] or low.dtype in (torch.bfloat16, torch.float16):
            wide = torch.float64 if low.dtype is torch.float64 else torch.float32
            low, high = low.to(wide) * weights[0], high.to(wide) * weights[1]
            total = low.add_(high)
            if self.op == "mean":
                divide(total, weights[0] + weights[1])
            out.copy_(total)
            return
        torch.add(low, high, out=out)
        if self.op == "mean":
            divide(out, 2.0)
