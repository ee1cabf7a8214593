# SPDX-License-Identifier: Apache-2.0
"""The values of one round: the caller's tensors, cut into chunks. Bytes as they lie in memory, any dtype.

Who owns memory: the caller owns `source` and `out`. Whoever adds parts up does so in the chunk's place in `out`, which
becomes the result in place; there is no temporary of the size of the tensor. The sums of half-precision numbers are
the exception: they are kept in fp32 for the chunks whose result is made here, and rounded once.

Rules: chunk by chunk, on the thread of the loop. `source` and `out` never overlap. Numbers are looked at once, where
they are added: the sum of finite numbers is finite unless it overflows, so one look at the sum finds a bad part.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from isthmus.collective.codec.base import NotFinite, first_non_finite, weighted_sum
from isthmus.collective.errors import NonFiniteInput
from isthmus.collective.rounds.plan import RoundPlan
from isthmus.collective.rounds.sizes import Sizes
from isthmus.collective.transport.memory import Scratch, bytes_of

Record = Callable[[int, int, memoryview], None]
"""Receives (start_numel, numel, wire form) of every result chunk; the memory is valid during the call only."""

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
"""What can travel, and its name on the wire."""
HALF = (torch.bfloat16, torch.float16)
OPS = ("mean", "sum", "min", "max")


class RoundBuffers:
    """See the module.

    Args:
        plan: the cut.
        rank: our place.
        op: one of OPS, or "copy" for an operation without reduction.
        source: our part; element 0 is the element `source_base` of the whole buffer.
        out: where results go; element 0 is the element `out_base`.
        weight: of our part, for "mean" and "sum".
        record: see Record.
        is_tolerant: see `Communicator.all_reduce`.
    """

    is_identity = True
    """Whether a result's wire form is the output's own memory: then it lands there straight from the socket."""

    def __init__(
        self,
        *,
        plan: RoundPlan,
        rank: int,
        op: str,
        source: Tensor,
        out: Tensor,
        source_base: int = 0,
        out_base: int = 0,
        weight: float = 1.0,
        record: Record | None = None,
        is_tolerant: bool = False,
    ) -> None:
        self.op = op
        self._plan = plan
        self._starts = plan.starts
        self._source, self._source_base = source, source_base
        self._out, self._out_base = out, out_base
        self._weight = weight
        self.record = record
        self._item_nbytes = source.element_size()
        self._is_begun = bytearray(plan.slices.num_chunks)  # our own part is in the sum
        self._looks_at_numbers = source.is_floating_point() and op in ("mean", "sum")
        self._rank = rank
        self._seen = Sizes(plan.slices.world_size, rank)
        self._is_direct = all(route.is_star and route.is_reduced for route in plan.slices.routes)
        self._is_tolerant = is_tolerant and self._is_direct and self._looks_at_numbers
        self._spoiled = set[int]()  # chunks that cannot be added up
        self._wide: dict[int, Tensor] = {}
        if source.dtype in HALF and self._looks_at_numbers:
            own = plan.slices.rooted_at(rank)
            total = sum(map(plan.numel_of, own))
            parts = torch.split(torch.empty(total), [plan.numel_of(chunk) for chunk in own])
            self._wide = dict(zip(own, parts, strict=True))

    @property
    def sizes(self) -> tuple[float, ...]:
        """See RoundStats."""
        return self._seen.by_rank()

    @property
    def sums(self) -> tuple[float, ...]:
        """See RoundStats."""
        return self._seen.sums()

    # -------------------------------------------------------------------------------- to the sockets

    def part_nbytes(self, chunk: int, *, is_into_root: bool) -> int:  # noqa: ARG002 - codecs ask for it
        """Length of a part."""
        return self._plan.numel_of(chunk) * self._item_nbytes

    def result_nbytes(self, chunk: int) -> int:
        """Length of a result."""
        return self._plan.numel_of(chunk) * self._item_nbytes

    def part(self, chunk: int, scratch: Scratch, *, is_sum: bool, is_into_root: bool) -> memoryview:  # noqa: ARG002
        """Wire form of our part of a chunk, or of the sum of parts that were added here."""
        return self._out_bytes[self._in_out(chunk)] if is_sum else self._source_bytes[self._in_source(chunk)]

    def result(self, chunk: int) -> memoryview:
        """Wire form of a chunk that is done here."""
        if self.op == "copy" and self._plan.slices.is_rooted_at(self._rank, chunk):
            return self._source_bytes[self._in_source(chunk)]
        return self._out_bytes[self._in_out(chunk)]

    def landing_place(self, chunk: int) -> memoryview:
        """Memory of the output: where results arrive."""
        return self._out_bytes[self._in_out(chunk)]

    # -------------------------------------------------------------------------------- from the sockets

    def add(self, chunk: int, wire: Tensor, weight: float, *, is_into_root: bool, rank: int | None = None) -> None:
        """Add the part of another member; the first one is added to our own.

        Args:
            chunk: where.
            wire: the part's wire form.
            weight: of the part.
            is_into_root: see `part_nbytes`.
            rank: whose part it is; None for a sum of several.

        Raises:
            NotFinite: it holds NaN or infinity.
            NonFiniteInput: our own part does.
            OverflowError: the sum is too large for the dtype.
        """
        part = self._values_of(wire, is_into_root=is_into_root)
        self._measure(chunk, part, weight, rank)
        if chunk in self._spoiled:
            return  # it was a part of one member, and so was this: there is a sum of several only where none is spoiled
        if chunk in self._wide:
            total = self._wide[chunk]
            if not self._is_begun[chunk]:
                total.copy_(self._own_part(chunk)).mul_(self._weight)
            torch.add(total, part, alpha=weight, out=total)
        else:
            total = self._out_part(chunk)
            self._combine(self._own_part(chunk) if not self._is_begun[chunk] else None, part, weight, total)
        is_first, self._is_begun[chunk] = not self._is_begun[chunk], 1
        if self._looks_at_numbers and first_non_finite(total) is not None:
            self._spoil(chunk, part, rank, is_first=is_first)

    def finish(self, chunk: int, weight_sum: float) -> None:
        """Divide by `weight_sum`. All zeros if that is 0.

        Raises:
            NonFiniteInput: we are alone, and our part is not finite.
            OverflowError: the result is too large for the dtype.
        """
        if self.op == "copy":
            return  # the source is the result; `keep_own` brings it into the output
        total = self._wide.get(chunk, self._out_part(chunk))
        if not self._is_begun[chunk]:
            total.copy_(self._own_part(chunk))
            self._measure_alone(chunk)
            if self._weight != 1.0:
                total.mul_(self._weight)
            if self._looks_at_numbers and first_non_finite(total) is not None:
                self._blame(chunk, None, is_first=True)
        if chunk in self._spoiled:
            total.zero_()
        if self.op == "mean":
            divide(total, weight_sum)
        out = self._out_part(chunk)
        if total is not out and chunk in self._wide:
            out.copy_(total)
        if (weight_sum < 1.0 or chunk in self._wide) and self._looks_at_numbers and first_non_finite(out) is not None:
            raise OverflowError("the result overflows its dtype")
        self._tell_record(chunk, self._out_bytes[self._in_out(chunk)])

    def install(self, chunk: int, wire: Tensor, weights: Sequence[float | None]) -> None:  # noqa: ARG002 - see swap.py
        """Take a result that arrived elsewhere than in its landing place. `weights` are those of the members."""
        self._out_bytes[self._in_out(chunk)] = bytes_of(wire)
        self.install_landed(chunk)

    def install_landed(self, chunk: int) -> None:
        """Take a result that arrived in its landing place."""
        self._measure_sum(chunk)
        self._tell_record(chunk, self.landing_place(chunk))

    def first_bad_input(self) -> int | None:
        """Index of the first NaN or infinity of our part, where that matters; a whole pass."""
        return first_non_finite(self._source) if self._looks_at_numbers else None

    def keep_own(self) -> None:
        """Bring what we gave to others into the output, if it has a place there."""
        if self.op != "copy":
            return
        for chunk in self._plan.slices.rooted_at(self._rank):
            span = self._in_out(chunk)
            if span.start >= 0 and span.stop <= len(self._out_bytes):
                self._out_bytes[span] = self._source_bytes[self._in_source(chunk)]

    # -------------------------------------------------------------------------------- inside

    def _measure(self, chunk: int, part: Tensor | None, weight: float, rank: int | None) -> None:
        """How large the numbers of this member's part are, None if there are none, and once those of our own.

        A part without weight is not in the sum, unless it spoils it.
        """
        if rank is None or not self._looks_at_numbers:
            return
        if weight > 0.0 or part is None:
            self._seen.saw_part(rank, part)
        if not self._is_begun[chunk] and self._weight > 0.0:
            self._seen.saw_part(self._rank, self._own_part(chunk))

    def _measure_alone(self, chunk: int) -> None:
        """The same of our own part, where there is no other."""
        if self._looks_at_numbers and self._weight > 0.0:
            self._seen.saw_part(self._rank, self._own_part(chunk))

    def _measure_sum(self, chunk: int) -> None:
        """How large another root's sum is. Through third hands nobody knows whose doing it is."""
        if self._looks_at_numbers and self._is_direct and self._weight > 0.0:
            root = self._plan.slices.root_of(chunk)
            self._seen.saw_sum(root, self._out_part(chunk), self._own_part(chunk))

    @cached_property
    def _source_bytes(self) -> memoryview:  # cut as memoryviews: ten times cheaper than cutting tensors
        return bytes_of(self._source)

    @cached_property
    def _out_bytes(self) -> memoryview:
        return bytes_of(self._out)

    def _values_of(self, wire: Tensor, *, is_into_root: bool) -> Tensor:  # noqa: ARG002 - codecs ask for it
        return wire.view(self._source.dtype)

    def _combine(self, own: Tensor | None, part: Tensor, weight: float, total: Tensor) -> None:
        match self.op:
            case "min":
                torch.minimum(total if own is None else own, part, out=total)
            case "max":
                torch.maximum(total if own is None else own, part, out=total)
            case _ if total.is_floating_point():
                if own is None:
                    weighted_sum(total, 1.0, part, weight, total)
                else:
                    weighted_sum(own, self._weight, part, weight, total)
            case _:
                torch.add(total if own is None else own, part, out=total)

    def _spoil(self, chunk: int, part: Tensor | None, rank: int | None, *, is_first: bool) -> None:
        """The sum is not finite: go on without one where that is wished for and not our own part is to blame."""
        if not self._is_tolerant or (is_first and first_non_finite(self._own_part(chunk)) is not None):
            self._blame(chunk, part, is_first=is_first)
        if rank is not None and part is not None and first_non_finite(part) is not None:
            self._seen.saw_part(rank, None)
        self._spoiled.add(chunk)

    def _blame(self, chunk: int, part: Tensor | None, *, is_first: bool) -> NoReturn:
        index = first_non_finite(self._own_part(chunk)) if is_first else None
        if index is not None:
            raise NonFiniteInput(self._starts[chunk] - self._source_base + index)
        if part is not None and first_non_finite(part) is not None:
            raise NotFinite("a part holds NaN or infinity")
        raise OverflowError("the sum overflows its dtype")

    def _own_part(self, chunk: int) -> Tensor:
        base = self._source_base
        return self._source[self._starts[chunk] - base : self._starts[chunk + 1] - base]

    def _out_part(self, chunk: int) -> Tensor:
        base = self._out_base
        return self._out[self._starts[chunk] - base : self._starts[chunk + 1] - base]

    def _in_source(self, chunk: int) -> slice:
        base, item = self._source_base, self._item_nbytes
        return slice((self._starts[chunk] - base) * item, (self._starts[chunk + 1] - base) * item)

    def _in_out(self, chunk: int) -> slice:
        base, item = self._out_base, self._item_nbytes
        return slice((self._starts[chunk] - base) * item, (self._starts[chunk + 1] - base) * item)

    def _tell_record(self, chunk: int, payload: memoryview) -> None:
        if self.record is not None:
            self.record(self._starts[chunk], self._plan.numel_of(chunk), payload)


def divide(total: Tensor, weight_sum: float) -> None:
    """`total /= weight_sum` in place; zeros if that is 0. A product where it has the same bits: it is twice as fast."""
    if weight_sum <= 0.0:
        total.zero_()
    elif math.frexp(weight_sum)[0] == 0.5 and 1e-30 < weight_sum < 1e30:
        if weight_sum != 1.0:
            total.mul_(1.0 / weight_sum)
    else:
        total.div_(weight_sum)
