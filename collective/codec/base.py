"""The seam between chunks and bytes.

Rules: everything works on flat contiguous CPU tensors and into buffers that the caller gives; scratch is allocated
once per codec. The same wire bytes decode to the same bits on every machine: decoding is at most one rounded
operation per element. No NaN and no infinity passes in either direction.
"""

import math
import sys
from typing import Protocol

import torch
from torch import Tensor

assert sys.byteorder == "little", "tensors travel in little-endian order without conversion"

BLOCK_NUMEL = 256
"""Chunks and slices begin on multiples of this, so that no block of a codec lies across a border."""


class NotFinite(ValueError):
    """NaN or infinity where only numbers may be."""


class Codec(Protocol):
    """One wire form of fp32 chunks."""

    name: str
    is_identity: bool
    """Whether the wire form is the tensor's own memory: then nothing is copied and results land in place."""

    def wire_nbytes(self, numel: int) -> int:
        """Length of the wire form of `numel` elements."""
        ...

    def numel(self, wire_nbytes: int) -> int:
        """How many elements a wire form of this length holds. Raises ValueError for an impossible length."""
        ...

    def encode(self, source: Tensor, wire: Tensor) -> Tensor:
        """Return the wire form of fp32 `source` as uint8: written to the front of `wire`, or `source`'s own memory.

        Raises:
            NotFinite: `source` holds NaN or infinity (an identity codec does not look).
        """
        ...

    def check(self, wire: Tensor) -> None:
        """Look at a wire form from another peer. Raises NotFinite if it holds NaN or infinity."""
        ...

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Write the values of `wire` to `out`, fp32."""
        ...

    def accumulate(self, wire: Tensor, weight: float, base: Tensor, base_weight: float, total: Tensor) -> None:
        """`total = base_weight · base + weight · decoded(wire)`, fp32. `base` may be `total`."""
        ...


def first_non_finite(tensor: Tensor) -> int | None:
    """Index of the first NaN or infinity of a flat tensor, or None.

    One sum decides nearly always: a sum of finite numbers is finite unless it overflows, and nothing that is not
    finite can leave a sum again.
    """
    if math.isfinite(tensor.sum().item()):
        return None
    bad = torch.isfinite(tensor).logical_not_().nonzero()
    return int(bad[0]) if len(bad) else None


def weighted_sum(base: Tensor, base_weight: float, other: Tensor, weight: float, total: Tensor) -> None:
    """`total = base_weight · base + weight · other`, without a temporary. `base` may be `total`."""
    if base_weight != 1.0:
        base = torch.mul(base, base_weight, out=total)
    torch.add(base, other, alpha=weight, out=total)
