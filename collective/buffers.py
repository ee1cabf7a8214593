"""The values of one MEAN: the caller's tensors, cut into chunks and seen through a codec.

Who owns memory: the caller owns `tensor` and `out`. An owner sums in its own slice of `out`, which becomes the result
in place; there is no temporary of the size of the tensor. Only a codec that changes the bytes gets memory of its own
for the results of the own slice, since they are sent to several members.

In place (`out` is `tensor`): a slice is overwritten only by its owner's results, which exist only after our part of
them was counted. So a duplicate that is sent again from an overwritten slice is dropped by its owner.

Rules: chunk by chunk, on the thread of the loop. The owner encodes a result once and keeps what the encoding decodes
to, as everybody else does.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from collective.codec.base import Codec, NotFinite, first_non_finite
from collective.plan import MeanPlan
from collective.transport.link import bytes_of

Record = Callable[[int, memoryview], None]
"""Receives (start_numel, wire form) of every result chunk; the memory is valid during the call only."""

_ITEM_NBYTES = 4


def check_tensors(tensor: Tensor, out: Tensor, weight: float) -> None:
    """Raise ValueError unless the arguments are what `Communicator.all_reduce_mean` asks for."""
    for name, value in (("tensor", tensor), ("out", out)):
        if value.dtype != torch.float32 or value.device.type != "cpu" or value.dim() != 1 or not value.is_contiguous():
            raise ValueError(f"{name} must be flat contiguous fp32 on the CPU")
    if tensor.numel() != out.numel():
        raise ValueError(f"tensor has {tensor.numel()} elements, out {out.numel()}")
    first, second = sorted((tensor.data_ptr(), out.data_ptr()))
    if first != second and second - first < 4 * tensor.numel():
        raise ValueError("tensor and out overlap without being the same")
    if not (math.isfinite(weight) and weight >= 0.0):
        raise ValueError(f"weight must be a finite number from 0 up, not {weight}")


class MeanBuffers:
    """See the module.

    Args:
        plan: the cut.
        own: the chunks that are summed here.
        codec: with its scratch.
        tensor: our part.
        out: where the mean goes.
        weight: of our part.
        record: see Record.
    """

    def __init__(
        self,
        *,
        plan: MeanPlan,
        own: range,
        codec: Codec,
        tensor: Tensor,
        out: Tensor,
        weight: float,
        record: Record | None,
    ) -> None:
        self.codec = codec
        self._plan = plan
        self._own = own
        self._tensor = tensor
        self._out = out
        self._weight = weight
        self._record = record
        self._sum_begun = -1  # chunk whose sum begins with our own part
        self._tensor_bytes = bytes_of(tensor)  # cut as memoryviews: ten times cheaper than cutting tensors
        self._out_bytes = bytes_of(out)
        self._result_payloads: dict[int, memoryview] = {}
        longest = max((codec.wire_nbytes(plan.numel_of(chunk)) for chunk in own), default=0)
        self._wire_memory = torch.empty(0 if codec.is_identity else (len(own), longest), dtype=torch.uint8)

    def wire_nbytes(self, chunk: int) -> int:
        """Length of this chunk on the wire."""
        return self.codec.wire_nbytes(self._plan.numel_of(chunk))

    def contribution(self, chunk: int, scratch: Tensor) -> memoryview:
        """Wire form of our part of a chunk: in `scratch`, or the tensor's own memory."""
        if self.codec.is_identity:
            return self._tensor_bytes[self._byte_span(chunk)]
        return bytes_of(self.codec.encode(self._tensor[self._plan.span(chunk)], scratch))

    def result(self, chunk: int) -> memoryview:
        """Wire form of a chunk that was finished here."""
        return self._result_payloads[chunk]

    def landing_place(self, chunk: int) -> memoryview:
        """Memory of the output: where an identity codec's results arrive."""
        return self._out_bytes[self._byte_span(chunk)]

    def begin_sum(self, chunk: int) -> None:
        """The sum of this chunk starts with our own part; it is added with the first that arrives, in one pass."""
        self._sum_begun = chunk

    def add(self, chunk: int, wire: Tensor, weight: float) -> None:
        """Add the part of another member.

        Raises:
            NotFinite: it holds NaN or infinity.
            OverflowError: the sum is too large for fp32.
        """
        if not self.codec.is_identity:
            self.codec.check(wire)
        span = self._plan.span(chunk)
        total = self._out[span]
        if self._sum_begun == chunk:
            self.codec.accumulate(wire, weight, self._tensor[span], self._weight, total)
            self._sum_begun = -1
        else:
            self.codec.accumulate(wire, weight, total, 1.0, total)
        if first_non_finite(total) is not None:  # one look at the sum spares one at the part
            self.codec.check(wire)
            raise OverflowError("the sum overflows fp32")

    def finish(self, chunk: int, weight_sum: float) -> None:
        """Divide, encode once, keep what that decodes to. All zeros if `weight_sum` is 0.

        Raises:
            OverflowError: the sum is too large for fp32.
        """
        span = self._plan.span(chunk)
        total = self._out[span]
        if self._sum_begun == chunk:  # alone in the view
            torch.mul(self._tensor[span], self._weight, out=total)
            self._sum_begun = -1
            if first_non_finite(total) is not None:
                raise OverflowError("the sum overflows fp32")
        if weight_sum > 0.0:
            total.div_(weight_sum)
        else:
            total.zero_()
        if weight_sum < 1.0 and first_non_finite(total) is not None:
            raise OverflowError("the mean overflows fp32")
        if self.codec.is_identity:
            payload = self._out_bytes[self._byte_span(chunk)]
        else:
            wire = self.codec.encode(total, self._wire_memory[chunk - self._own.start])
            self.codec.decode(wire, total)
            payload = bytes_of(wire)
        self._result_payloads[chunk] = payload
        self._tell_record(chunk, payload)

    def install(self, chunk: int, wire: Tensor) -> None:
        """Take a result that arrived elsewhere than in its landing place.

        Raises:
            NotFinite: it holds NaN or infinity.
        """
        self.codec.check(wire)
        self.codec.decode(wire, self._out[self._plan.span(chunk)])
        self._tell_record(chunk, bytes_of(wire))

    def install_landed(self, chunk: int) -> None:
        """Take a result that arrived in its landing place.

        Raises:
            NotFinite: it holds NaN or infinity.
        """
        index = first_non_finite(self._out[self._plan.span(chunk)])
        if index is not None:
            raise NotFinite(f"element {index} is not finite")
        self._tell_record(chunk, self.landing_place(chunk))

    def _byte_span(self, chunk: int) -> slice:
        span = self._plan.span(chunk)
        return slice(_ITEM_NBYTES * span.start, _ITEM_NBYTES * span.stop)

    def _tell_record(self, chunk: int, payload: memoryview) -> None:
        if self._record is not None:
            self._record(self._plan.starts[chunk], payload)
