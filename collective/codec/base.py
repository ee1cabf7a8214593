# SPDX-License-Identifier: Apache-2.0
"""The seam between chunks and bytes.

Rules: everything works on flat contiguous tensors and into buffers that the caller gives; scratch is made once per
codec and device, and follows the device of what is encoded. The length of a wire form follows from the number of
elements alone, so nothing is ever sized by what a peer sent. The same wire bytes decode to the same bits on every
machine: decoding is at most one rounded operation per element. The same values encode to the same bytes on every
device and processor. No NaN and no infinity passes in either direction.
A wire form begins at a multiple of 4 bytes; that of whole blocks has such a length, so that several lie end to end.
It must not know: who sends, views, weights' meaning, sockets.
"""

import functools
import math
import sys
from typing import Protocol

import torch
from torch import Tensor

assert sys.byteorder == "little", "tensors travel in little-endian order without conversion"

BLOCK_NUMEL = 256
"""Chunks and slices begin on multiples of this, so that no block of a codec lies across a border."""

TINY = 2.0**-100
"""Scales below this are sent as zero: their inverse could overflow, and what they scale could become subnormal, which
some processors flush. Zero or at least this is what a wire form may hold."""


class NotFinite(ValueError):
    """NaN or infinity where only numbers may be."""


class BadWire(NotFinite):
    """A wire form that no encoder writes; decoding it could give NaN, infinity or a place outside the tensor."""


class Codec(Protocol):
    """One wire form of fp32 chunks."""

    name: str
    """As `codec_named` takes it, with all parameters: peers that share a name share the wire form."""
    is_identity: bool
    """Whether the wire form is the tensor's own memory: then nothing is copied and results land in place."""

    def wire_nbytes(self, numel: int) -> int:
        """Length of the wire form of `numel` elements."""
        ...

    def encode(self, source: Tensor, wire: Tensor) -> Tensor:
        """Return the wire form of fp32 `source` as uint8: written to the front of `wire`, or `source`'s own memory.

        Raises:
            NotFinite: `source` holds NaN or infinity (an identity codec does not look).
        """
        ...

    def scales(self, wire: Tensor, numel: int) -> Tensor | None:
        """fp32 numbers in a wire form by which all that it decodes to is multiplied; None if it has none."""
        ...

    def check(self, wire: Tensor, numel: int) -> None:
        """Look at a wire form of `numel` elements from another peer; its length is right already.

        Raises:
            NotFinite: it decodes to NaN or infinity, or no encoder writes it (BadWire).
        """
        ...

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Write the values of a checked `wire` to `out`, fp32."""
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


def sum_of_rows(work: Tensor) -> Tensor:
    """Sum each row of `work` [rows, width] by halves, which spoils it: the same bits wherever fp32 adds are rounded.

    A library's own sum adds in an order that differs from one processor, and one device, to the next.

    Returns:
        [rows], a view of `work`.
    """
    width = work.shape[1]
    while width > 1:
        half = width // 2
        work[:, :half].add_(work[:, width - half : width])
        width -= half
    return work[:, 0]


@functools.lru_cache(maxsize=1024)
def divisor(value: float, device: torch.device) -> Tensor:
    """fp32 without dimensions on `device`; not to be written to.

    CUDA multiplies by the reciprocal of a number that lies on the CPU, which is another rounding than a division.
    """
    return torch.tensor(value, dtype=torch.float32, device=device)


def check_scales(scales: Tensor, highest: float) -> None:
    """Raise BadWire unless every scale is +0.0 or from TINY to `highest`; what is not finite is neither."""
    if not scales.numel():
        return
    low, high = (float(bound) for bound in torch.aminmax(scales))
    if not (low >= 0.0 and high <= highest):
        raise BadWire("a scale is not finite, negative or too large")
    if low < TINY and bool(((scales < TINY) & (scales.view(torch.int32) != 0)).any()):
        raise BadWire("a scale is too small or a negative zero")


class Scratch:
    """Work memory by name and device, as large as the largest request so far. Not to be shared between threads."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def rows(self, name: str, device: torch.device, dtype: torch.dtype, num_rows: int, width: int) -> Tensor:
        """[num_rows, width]; a name always has the same dtype and width. What it holds is anybody's."""
        tensor = self._tensors.get((name, device))
        known = 0 if tensor is None else tensor.shape[0]  # `len` of a tensor is Python, and slower
        if tensor is None or known < num_rows:
            tensor = self._tensors[name, device] = torch.empty(num_rows, width, dtype=dtype, device=device)
            known = num_rows
        return tensor if known == num_rows else tensor[:num_rows]
