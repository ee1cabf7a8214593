"""Block int8: one fp32 scale for 256 elements, codes from -127 to 127. 1.016 bytes an element.

    scale = absmax(block) / 127        code = round_half_even(x · (127 / absmax))        decoded = code · scale

Wire form: the scales of all blocks (fp32, little-endian), then the codes. The last block may be short.

Edges: a block whose absmax is below 2^-100 is sent as zeros, since 1/absmax could overflow and scales could become
subnormal, which some CPUs flush. An all-zero block has scale +0.0 and decodes to +0.0. A value that is not finite
is refused. |decoded - x| <= 0.51 · scale for every other element.
"""

import torch
from torch import Tensor

from collective.codec.base import BLOCK_NUMEL, NotFinite, first_non_finite, weighted_sum

_SCALE_NBYTES = 4
_LEVELS = 127.0
_TINY = 2.0**-100
_MAX_SCALE = float(torch.nextafter(torch.tensor(torch.finfo(torch.float32).max / _LEVELS), torch.tensor(0.0)))
"""Largest scale whose product with 127 is finite; absmax/127 may round to just above it."""
_TILE_BLOCKS = 1024
"""Blocks worked on at once: 1 MiB of fp32, which stays in the cache. Whole-tensor operations are 20 times slower."""


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL)


class Int8Codec:
    """See the module. Holds 2 MiB of scratch."""

    name = "int8"
    is_identity = False

    def __init__(self) -> None:
        self._values = torch.empty(_TILE_BLOCKS, BLOCK_NUMEL)
        self._padded = torch.empty(1, BLOCK_NUMEL)
        self._absmax = torch.empty(_TILE_BLOCKS, 1)

    def wire_nbytes(self, numel: int) -> int:
        """One scale a block, one byte an element."""
        return _num_blocks(numel) * _SCALE_NBYTES + numel

    def numel(self, wire_nbytes: int) -> int:
        """Invert wire_nbytes."""
        numel = wire_nbytes - -(-wire_nbytes // (BLOCK_NUMEL + _SCALE_NBYTES)) * _SCALE_NBYTES
        if numel < 0 or self.wire_nbytes(numel) != wire_nbytes:
            raise ValueError(f"{wire_nbytes} bytes are no whole number of int8 blocks")
        return numel

    def encode(self, source: Tensor, wire: Tensor) -> Tensor:
        """Quantise `source` to the front of `wire`."""
        numel = source.numel()
        wire = wire[: self.wire_nbytes(numel)]
        scales, codes = self._parts(wire)
        whole = numel // BLOCK_NUMEL
        for first in range(0, whole, _TILE_BLOCKS):
            last = min(first + _TILE_BLOCKS, whole)
            tile = slice(first * BLOCK_NUMEL, last * BLOCK_NUMEL)
            self._encode_tile(source[tile].view(-1, BLOCK_NUMEL), scales[first:last], codes[tile].view(-1, BLOCK_NUMEL))
        rest = numel - whole * BLOCK_NUMEL
        if rest:
            padded_codes = torch.empty(1, BLOCK_NUMEL, dtype=torch.int8)
            self._padded.zero_()
            self._padded[0, :rest] = source[numel - rest :]
            self._encode_tile(self._padded, scales[whole:], padded_codes)
            codes[numel - rest :] = padded_codes[0, :rest]
        if first_non_finite(scales) is not None:
            raise NotFinite("a block holds NaN or infinity")
        scales.clamp_(max=_MAX_SCALE)
        return wire

    def check(self, wire: Tensor) -> None:
        """Scales must be finite, normal or zero, and not so large that a code overflows; -128 is no code."""
        scales, codes = self._parts(wire)
        low, high = (float(bound) for bound in torch.aminmax(scales))
        if not (low >= 0.0 and high <= _MAX_SCALE):
            raise NotFinite("a scale is not finite, negative or too large")
        if int(codes.min()) < -_LEVELS:
            raise NotFinite("a code is out of range")

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """One product an element."""
        scales, codes = self._parts(wire)
        for tile, blocks in self._tiles(codes.numel()):
            if tile.stop - tile.start < BLOCK_NUMEL:
                torch.mul(codes[tile], scales[blocks], out=out[tile])
            else:
                shape = (-1, BLOCK_NUMEL)
                torch.mul(codes[tile].view(shape), scales[blocks].view(-1, 1), out=out[tile].view(shape))

    def accumulate(self, wire: Tensor, weight: float, base: Tensor, base_weight: float, total: Tensor) -> None:
        """Decode a tile into scratch, add it, next tile."""
        scales, codes = self._parts(wire)
        for tile, blocks in self._tiles(codes.numel()):
            numel = tile.stop - tile.start
            decoded = self._values.view(-1)[:numel]
            if numel < BLOCK_NUMEL:
                torch.mul(codes[tile], scales[blocks], out=decoded)
            else:
                shape = (-1, BLOCK_NUMEL)
                torch.mul(codes[tile].view(shape), scales[blocks].view(-1, 1), out=decoded.view(shape))
            weighted_sum(base[tile], base_weight, decoded, weight, total[tile])

    def _encode_tile(self, source: Tensor, scales: Tensor, codes: Tensor) -> None:
        values = self._values[: len(source)]
        absmax = self._absmax[: len(source)]
        torch.abs(source, out=values)
        torch.amax(values, 1, keepdim=True, out=absmax)
        absmax.masked_fill_(absmax < _TINY, 0.0)
        torch.div(absmax.view(-1), _LEVELS, out=scales)
        inverse = torch.div(_LEVELS, absmax)
        inverse.masked_fill_(absmax == 0.0, 0.0)
        torch.mul(source, inverse, out=values)
        codes.copy_(values.round_())

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        num_scales = _num_blocks(self.numel(wire.numel()))
        scales_nbytes = num_scales * _SCALE_NBYTES
        return wire[:scales_nbytes].view(torch.float32), wire[scales_nbytes:].view(torch.int8)

    def _tiles(self, numel: int) -> list[tuple[slice, slice]]:
        """Element and block ranges: tiles of whole blocks, then the short block if there is one."""
        whole = numel // BLOCK_NUMEL
        tiles = []
        for first in range(0, whole, _TILE_BLOCKS):
            last = min(first + _TILE_BLOCKS, whole)
            tiles.append((slice(first * BLOCK_NUMEL, last * BLOCK_NUMEL), slice(first, last)))
        if whole * BLOCK_NUMEL < numel:
            tiles.append((slice(whole * BLOCK_NUMEL, numel), slice(whole, whole + 1)))
        return tiles
