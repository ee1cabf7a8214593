# SPDX-License-Identifier: Apache-2.0
"""The values of a MEAN or SUM of fp32 whose chunks travel in a lossy codec's wire form.

A part is encoded on its way into the slice's root, sums of parts on the way there travel as they are; the root
encodes the result once, keeps what that decodes to, and everybody decodes the same bytes. So no number is quantised
more than twice, whatever the plan and the number of members.

Rules: only the results that others get from here cost memory of their own, in wire form.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isthmus.collective.codec.base import TINY, Codec, NotFinite, first_non_finite, weighted_sum
from isthmus.collective.rounds.buffers import RoundBuffers, divide
from isthmus.collective.transport.memory import Scratch, bytes_of


class CodedBuffers(RoundBuffers):
    """See the module. Arguments as RoundBuffers, the codec with its scratch, and `take(nbytes)` for wire memory."""

    is_identity = False

    def __init__(self, codec: Codec, *, take: Callable[[int], Tensor], rank: int, **more: Any) -> None:  # noqa: ANN401
        super().__init__(rank=rank, **more)
        self._codec = codec
        routes = self._plan.slices.routes
        handed_on = [
            chunk
            for slice_, route in enumerate(routes)
            if route.root == rank or rank in route.down
            for chunk in self._plan.slices.chunks_of(slice_)
        ]
        lengths = [codec.wire_nbytes(self._plan.numel_of(chunk)) for chunk in handed_on]
        self._results = dict(zip(handed_on, torch.split(take(sum(lengths)), lengths), strict=True))

    def part_nbytes(self, chunk: int, *, is_into_root: bool) -> int:
        """Encoded only on the way into the root."""
        if is_into_root:
            return self._codec.wire_nbytes(self._plan.numel_of(chunk))
        return super().part_nbytes(chunk, is_into_root=False)

    def result_nbytes(self, chunk: int) -> int:
        """Always encoded."""
        return self._codec.wire_nbytes(self._plan.numel_of(chunk))

    def part(self, chunk: int, scratch: Scratch, *, is_sum: bool, is_into_root: bool) -> memoryview:
        """Encode into `scratch` on the way into the root. Raises NotFinite."""
        if not is_into_root:
            return super().part(chunk, scratch, is_sum=is_sum, is_into_root=False)
        values = self._out_part(chunk) if is_sum else self._own_part(chunk)
        room = scratch.room(self._codec.wire_nbytes(values.numel()))
        self._codec.encode(values, scratch.tensor_of(room))
        return room

    def result(self, chunk: int) -> memoryview:
        """The bytes that everybody decodes."""
        return bytes_of(self._results[chunk])

    def add(self, chunk: int, wire: Tensor, weight: float, *, is_into_root: bool, rank: int | None = None) -> None:
        """Decode and add: in one pass, or if it is one member's own part by way of a look at how large it is."""
        if not is_into_root:
            super().add(chunk, wire, weight, is_into_root=False, rank=rank)
            return
        total = self._out_part(chunk)
        try:
            self._codec.check(wire, total.numel())
        except NotFinite:
            if rank is None or not self._is_tolerant:
                raise
            self._measure(chunk, None, weight, rank)
            self._spoiled.add(chunk)
            self._is_begun[chunk] = 1
            return
        base, base_weight = (total, 1.0) if self._is_begun[chunk] else (self._own_part(chunk), self._weight)
        if rank is None:
            self._codec.accumulate(wire, weight, base, base_weight, total)
        else:
            part = self._decoded[: total.numel()]
            self._codec.decode(wire, part)
            self._measure(chunk, part, weight, rank)
            if chunk not in self._spoiled:
                weighted_sum(base, base_weight, part, weight, total)
        self._is_begun[chunk] = 1  # `finish` looks at the sum, since it encodes it

    @cached_property
    def _decoded(self) -> Tensor:
        """Room for one chunk."""
        return torch.empty(self._plan.longest)

    def finish(self, chunk: int, weight_sum: float) -> None:
        """Divide, encode once, keep what that decodes to.

        Raises:
            NonFiniteInput: our part is not finite; those of others were looked at as they came.
            OverflowError: the sum is too large for the dtype.
        """
        total = self._out_part(chunk)
        if not self._is_begun[chunk]:  # we are alone
            torch.mul(self._own_part(chunk), self._weight, out=total)
            self._measure_alone(chunk)
        wire = self._results[chunk]
        try:
            if chunk not in self._spoiled:
                self._encode_mean(total, wire, weight_sum if self.op == "mean" else 1.0)
        except NotFinite:
            self._spoil(chunk, None, None, is_first=True)
        if chunk in self._spoiled:
            self._codec.encode(total.zero_(), wire)
        self._codec.decode(wire, total)
        self._tell_record(chunk, bytes_of(wire))

    def _encode_mean(self, total: Tensor, wire: Tensor, divisor: float) -> None:
        """Write the wire form of `total / divisor`; spoils `total`. Raises NotFinite."""
        scales = self._codec.scales(wire, total.numel()) if divisor >= 1.0 else None  # a larger one may be too large
        if scales is None:
            if divisor <= 0.0 and first_non_finite(total) is not None:
                raise NotFinite("zeros would hide it")
            divide(total, divisor)
        self._codec.encode(total, wire)
        if scales is not None and divisor != 1.0:
            torch.threshold_(scales.div_(divisor), TINY, 0.0)  # the mean of all, without a pass over all

    def install(self, chunk: int, wire: Tensor, weights: Sequence[float | None]) -> None:  # noqa: ARG002
        """Decode a result. Raises NotFinite if it holds NaN or infinity."""
        out = self._out_part(chunk)
        self._codec.check(wire, out.numel())
        self._codec.decode(wire, out)
        self._measure_sum(chunk)
        if chunk in self._results:
            self._results[chunk].copy_(wire)
        self._tell_record(chunk, bytes_of(wire))
