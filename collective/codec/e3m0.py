# SPDX-License-Identifier: Apache-2.0
"""E3M0: four bits a value, a sign and a three-bit exponent; one fp32 scale for 256 elements. 0.516 bytes an element.

The pseudo-gradient's wire form in Streaming DiLoCo (arXiv 2501.18512), which publishes no scaling; here

    scale = absmax(block)        decoded = 0 at level 0, else ± scale · 2^(level - 7) at level 1 to 7

and a value goes to the level that is nearest, ties away from zero.

Error: |decoded - x| <= max(|x| / 3, scale / 128) · 1.002, and 19.5 % in L2 on Gaussian data; a block's largest value is
exact. Biased for a single value, as every deterministic rounding; error feedback is the caller's.

Edges: a block whose absmax is 2^-100 or less is sent as zeros. An all-zero block has scale +0.0, and everything at
level 0 decodes to +0.0, also -0.0 and small negative values. Up to the largest fp32 nothing overflows, since no level
is above the scale; above 2^118 the inverse of the scale is subnormal, which torch keeps unless told otherwise. NaN and
infinity are refused.

How: x · 2^-8 / absmax as fp16 has its level in the exponent field, which is 0 for all that is below level 1; half a
mantissa added carries what is above the middle into the next level. The top six bits then hold sign and level.
"""

import torch
from torch import Tensor

from isthmus.collective.codec.base import BLOCK_NUMEL, Scratch
from isthmus.collective.codec.blocks import largest_magnitudes, settle_scales


def _int16(value: int) -> Tensor:
    """A constant that needs no conversion at each use."""
    return torch.tensor(value, dtype=torch.int16)


_TOP = torch.tensor(2.0**-8)
"""fp16 whose exponent field is 7."""
_HALF_MANTISSA = _int16(0x200)
_MANTISSA_BITS = _int16(10)
_LEVELS_OF_PAIR = _int16(0x0707)
_SIGNS_OF_PAIR = _int16(0x4080)
"""One bit of the sign of each: bit 14 is to be 6, and bit 7 stays."""
_TO_LEVEL_OF_SECOND = _int16(5)
_TO_SIGN_OF_SECOND = _int16(8)


def _pairs_by_byte() -> Tensor:
    """The two values of every byte, scaled by 1, as one complex64. Bits: sign 0, sign 1, level 1 (3), level 0 (3)."""
    magnitudes = [0.0] + [2.0 ** (level - 7) for level in range(1, 8)]
    pairs = []
    for byte in range(256):
        first, second = magnitudes[byte & 7], magnitudes[byte >> 3 & 7]
        # 0.0 - 0.0 is +0.0, so that level 0 never gives -0.0
        pairs.append(complex(0.0 - first if byte & 0x80 else first, 0.0 - second if byte & 0x40 else second))
    return torch.tensor(pairs, dtype=torch.complex64)


class E3M0Kernel:
    """See the module; the layout is that of blocks.py, with its own order of bits in a byte (_pairs_by_byte)."""

    name = "e3m0"
    code_bits = 4
    highest_scale = torch.finfo(torch.float32).max

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._tables: dict[torch.device, Tensor] = {}

    def encode(self, source: Tensor, scales: Tensor, codes: Tensor, work: Tensor, block_numel: int) -> None:  # noqa: ARG002
        """To fp16, to sign and level in a byte, two of those to one byte."""
        largest_magnitudes(source, scales)
        inverse = settle_scales(scales, _TOP)
        torch.mul(source, inverse, out=work)
        # From here on the elements are 2 bytes, then 1, and each step costs a fraction of those above.
        bits = self._take("halves", source, torch.float16, BLOCK_NUMEL).copy_(work).view(torch.int16)
        bits.add_(_HALF_MANTISSA).bitwise_right_shift_(_MANTISSA_BITS)  # sign in bits 5 and up, level in 0 to 2
        pairs = self._take("bytes", source, torch.int8, BLOCK_NUMEL).copy_(bits).view(torch.int16)
        levels = self._take("levels", source, torch.int16, BLOCK_NUMEL // 2)
        shifted = self._take("shifted", source, torch.int16, BLOCK_NUMEL // 2)
        torch.bitwise_and(pairs, _LEVELS_OF_PAIR, out=levels)
        levels.bitwise_or_(torch.bitwise_right_shift(levels, _TO_LEVEL_OF_SECOND, out=shifted))
        pairs.bitwise_and_(_SIGNS_OF_PAIR)
        levels.bitwise_or_(pairs).bitwise_or_(torch.bitwise_right_shift(pairs, _TO_SIGN_OF_SECOND, out=shifted))
        codes.copy_(levels)  # the low byte

    def decode(self, codes: Tensor, out: Tensor) -> None:
        """Two values a look-up."""
        index = self._take("index", codes, torch.int32, BLOCK_NUMEL // 2).copy_(codes)
        table = self._tables.get(codes.device)
        if table is None:
            table = self._tables[codes.device] = _pairs_by_byte().to(codes.device)
        torch.index_select(table, 0, index.view(-1), out=out.view(-1).view(torch.complex64))

    def _take(self, name: str, like: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        return self._scratch.rows(name, like.device, dtype, len(like), width)
