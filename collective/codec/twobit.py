# SPDX-License-Identifier: Apache-2.0
"""Symmetric two bits: sign and small or large; one fp32 scale for 256 elements. 0.266 bytes an element.

    scale = mean(|x|)        large if |x| >= 1.2297 · scale        decoded = ± 0.5674 · scale or ± 1.8929 · scale

These are the levels of the best quantiser with four levels for Gaussian values (Max 1960: threshold 0.9816 σ, levels
0.4528 σ and 1.5104 σ), written by the mean magnitude, σ = mean · sqrt(π / 2). A scale from the mean follows the bulk
of a block; levels cut evenly below the largest value, as an absmax gives them, lose twice as much.

Error: 34 % in L2 on Gaussian data. For any input |decoded - x| <= 1.001 · max(0.67 · scale, |x| - 1.89 · scale), and
the L2 error of a block is at most its norm, so error feedback converges. There is no zero: only with error feedback.

Edges: a block whose mean magnitude is 2^-100 or less is sent as zeros. An all-zero block has scale +0.0 and decodes to
+0.0; a zero in another block decodes to + 0.5674 · scale, -0.0 to - that. A scale is at most the largest fp32 / 1.8929,
so that nothing overflows. NaN and infinity are refused.

How: x is scaled so that the threshold is at 2. The highest two bits of the float are then sign and "large".
"""

import math

import torch
from torch import Tensor

from isthmus.collective.codec.base import BLOCK_NUMEL, NotFinite, Scratch, divisor, first_non_finite, sum_of_rows
from isthmus.collective.codec.blocks import settle_scales

_TWO_BY_THRESHOLD = torch.tensor(2.0 / 1.2297)
_SMALL = 0.5674
_LARGE = 1.8929
_MANY = 256.0
"""A sum of magnitudes overflows only above the largest fp32 / this."""
_HIGHEST_BITS = torch.tensor(14, dtype=torch.int16)
_CODES_OF_QUAD = torch.tensor(0x03030303, dtype=torch.int32)
_GATHER = torch.tensor(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6, dtype=torch.int32)
_TO_LOWEST_BYTE = torch.tensor(24, dtype=torch.int32)


def pack_quads(quads: Tensor) -> Tensor:
    """Four codes of 2 bits, each in a byte of an int32, side by side in its lowest byte, in place.

    The product has them in its highest byte, and nothing carries into that.
    """
    return quads.mul_(_GATHER).bitwise_right_shift_(_TO_LOWEST_BYTE)


def _quadruples_by_byte() -> Tensor:
    """The four values of every byte, scaled by 1, as one complex128. Each 2 bits: negative, large."""
    magnitudes = torch.tensor([_SMALL, _LARGE, -_SMALL, -_LARGE])
    codes = torch.arange(256).unsqueeze(1) >> torch.tensor([0, 2, 4, 6]) & 3
    return magnitudes[codes].view(torch.complex128).view(-1)


def _write_means(source: Tensor, means: Tensor, work: Tensor, block_numel: int) -> None:
    """Mean magnitude of each block. Raises NotFinite."""
    torch.abs(source, out=work)
    torch.div(sum_of_rows(work), divisor(block_numel, work.device), out=means)
    if math.isfinite(means.sum().item()):
        return
    if first_non_finite(source.reshape(-1)) is not None:
        raise NotFinite("a block holds NaN or infinity")
    # Only a sum overflowed: again in smaller numbers. Rare, so it may be slow.
    torch.mul(source, 1.0 / _MANY, out=work)
    smaller = sum_of_rows(work.abs_()).mul_(_MANY / block_numel)
    torch.where(torch.isfinite(means), means, smaller, out=means)


class TwoBitKernel:
    """See the module; the layout is that of blocks.py."""

    name = "twobit"
    code_bits = 2
    highest_scale = float(torch.tensor(torch.finfo(torch.float32).max / 1.893))

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._tables: dict[torch.device, Tensor] = {}

    def encode(self, source: Tensor, scales: Tensor, codes: Tensor, work: Tensor, block_numel: int) -> None:
        """To fp16, whose highest two bits are the code; four of those to one byte."""
        _write_means(source, scales, work, block_numel)
        inverse = settle_scales(scales.clamp_(max=self.highest_scale), _TWO_BY_THRESHOLD)
        torch.mul(source, inverse, out=work)
        # What overflows fp16 is infinity, and that is large.
        bits = self._take("halves", source, torch.float16, BLOCK_NUMEL).copy_(work).view(torch.int16)
        bits.bitwise_right_shift_(_HIGHEST_BITS)
        quads = self._take("bytes", source, torch.int8, BLOCK_NUMEL).copy_(bits).view(torch.int32)
        codes.copy_(pack_quads(quads.bitwise_and_(_CODES_OF_QUAD)))
        if scales.amin().item() == 0.0:
            codes.masked_fill_((scales == 0.0).unsqueeze(1), 0)  # no sign, hence no -0.0

    def decode(self, codes: Tensor, out: Tensor) -> None:
        """Four values a look-up."""
        index = self._take("index", codes, torch.int32, BLOCK_NUMEL // 4).copy_(codes)
        table = self._tables.get(codes.device)
        if table is None:
            table = self._tables[codes.device] = _quadruples_by_byte().to(codes.device)
        torch.index_select(table, 0, index.view(-1), out=out.view(-1).view(torch.complex128))

    def _take(self, name: str, like: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        return self._scratch.rows(name, like.device, dtype, len(like), width)
