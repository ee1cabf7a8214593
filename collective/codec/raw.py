# SPDX-License-Identifier: Apache-2.0
"""fp32 as it lies in memory: 4 bytes an element, nothing lost, nothing copied.

Error: none; every bit pattern of a finite number stays, -0.0 and subnormal ones too. Encoding does not look for NaN and
infinity, `check` does.
"""

import torch
from torch import Tensor

from isthmus.collective.codec.base import NotFinite, first_non_finite, weighted_sum

_ITEM_NBYTES = 4


class RawCodec:
    """The wire form is the tensor's own memory."""

    name = "raw"
    is_identity = True

    def wire_nbytes(self, numel: int) -> int:
        """Four bytes an element."""
        return numel * _ITEM_NBYTES

    def encode(self, source: Tensor, wire: Tensor) -> Tensor:  # noqa: ARG002 - the wire form is the source itself
        """Return `source` seen as bytes; `wire` is not touched."""
        return source.view(torch.uint8)

    def scales(self, wire: Tensor, numel: int) -> None:
        """It has none."""

    def check(self, wire: Tensor, numel: int) -> None:  # noqa: ARG002 - the wire form ends where it ends
        """One pass over the values; see first_non_finite."""
        index = first_non_finite(wire.view(torch.float32))
        if index is not None:
            raise NotFinite(f"element {index} is not finite")

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Copy, unless the bytes landed in `out` already."""
        values = wire.view(torch.float32)
        if values.data_ptr() != out.data_ptr():
            out.copy_(values)

    def accumulate(self, wire: Tensor, weight: float, base: Tensor, base_weight: float, total: Tensor) -> None:
        """Add in place, see Codec."""
        weighted_sum(base, base_weight, wire.view(torch.float32), weight, total)
