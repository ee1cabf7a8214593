# SPDX-License-Identifier: Apache-2.0
"""What the codecs with one scale for every 256 elements share: wire layout, tiles, the short last block.

Wire form: the scales of all blocks (fp32, little-endian), then the codes of all elements in order, `code_bits` each,
the first in the low bits of a byte. A last block of fewer elements has fewer codes; its last byte is filled with the
code of zero.

Work goes tile by tile, because operations on a whole tensor leave the cache and are 10 to 20 times slower. A tile's
border is a block's border and a block depends on itself only, so tiles change no bit.
It must not know how a block becomes codes: that is the kernel's.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from isthmus.collective.codec.base import (
    BLOCK_NUMEL,
    TINY,
    NotFinite,
    Scratch,
    check_scales,
    first_non_finite,
    weighted_sum,
)

_SCALE_NBYTES = 4
_ALIGNMENT_NUMEL = 4
"""A kernel may see fp32 as complex128, which is four of them."""
_TILE_BLOCKS = 2048
"""2 MiB of fp32. Smaller ones, which would fit into the nearest cache, lose more to calls than they gain."""
_TILE_BLOCKS_ACCELERATOR = 65_536
"""64 MiB: an accelerator has no such cache and wants few launches."""


def num_blocks(numel: int) -> int:
    """Blocks of `numel` elements, the short one included."""
    return -(-numel // BLOCK_NUMEL)


class BlockKernel(Protocol):
    """How B whole blocks become codes and back: fp32 is [B, 256], scales are [B], codes [B, 32 · bits] uint8."""

    name: str
    code_bits: int
    highest_scale: float
    """The largest scale with which every code decodes to a finite value, an fp32; scales are at most this."""

    def encode(self, source: Tensor, scales: Tensor, codes: Tensor, work: Tensor, block_numel: int) -> None:
        """Write `scales` and `codes`; spoils `work`, fp32. Of each block `block_numel` elements count, the rest are 0.

        NaN or infinity in a block must make its scale so, whatever its codes; a scale may be above `highest_scale`.
        """
        ...

    def decode(self, codes: Tensor, out: Tensor) -> None:
        """Write what the codes stand for where the scale is 1, to all of `out`, fp32.

        `out` begins at a multiple of 4 elements of its storage.
        """
        ...


def largest_magnitudes(blocks: Tensor, largest: Tensor) -> None:
    """The largest |x| of each row; NaN where a row has one. To look twice is cheaper than to write all magnitudes.

    `aminmax` of rows is eight times slower than `amin` and `amax`.

    Args:
        blocks: [B, 256] fp32.
        largest: [B] fp32, written.
    """
    torch.amax(blocks, 1, out=largest)
    torch.maximum(largest, torch.amin(blocks, 1).neg_(), out=largest)


def settle_scales(scales: Tensor, numerator: Tensor) -> Tensor:
    """Set scales up to TINY to +0.0. Few operations: each costs microseconds.

    Args:
        scales: [B], not negative.
        numerator: fp32 without dimensions.

    Returns:
        `numerator / scale` [B, 1]; 0 where the scale is 0.
    """
    torch.threshold_(scales, TINY, 0.0)
    return torch.div(numerator, scales).nan_to_num_(nan=0.0, posinf=0.0).unsqueeze_(1)


class BlockCodec:
    """See the module. Holds a few MiB of scratch.

    Args:
        kernel: for this codec alone, since it has scratch too.
    """

    is_identity = False

    def __init__(self, kernel: BlockKernel) -> None:
        self.name = kernel.name
        self._kernel = kernel
        self._block_code_nbytes = BLOCK_NUMEL * kernel.code_bits // 8
        self._scratch = Scratch()

    def wire_nbytes(self, numel: int) -> int:
        """One scale a block, `code_bits` an element."""
        return num_blocks(numel) * _SCALE_NBYTES + -(-numel * self._kernel.code_bits // 8)

    def encode(self, source: Tensor, wire: Tensor) -> Tensor:
        """Quantise `source` to the front of `wire`. Raises NotFinite."""
        numel = source.numel()
        wire = wire[: self.wire_nbytes(numel)]
        work = self._work(source.device)
        for scales, codes, blocks in self._tiles(wire, source):
            self._kernel.encode(blocks, scales, codes, head(work, blocks.shape[0]), BLOCK_NUMEL)
        rest = numel % BLOCK_NUMEL
        if rest:
            block, scale, codes = self._short_block(wire, numel)
            block.zero_()
            block[0, :rest] = source[numel - rest :]
            padded = self._padded_codes(source.device)
            self._kernel.encode(block, scale, padded, work[:1], rest)
            codes.copy_(padded[0, : len(codes)])
        self._look_at(self.scales(wire, numel))
        return wire

    def _look_at(self, scales: Tensor) -> None:
        """Once for all tiles: no scale is NaN or infinity (else NotFinite), and none is too large."""
        if not scales.sum().item() <= self._kernel.highest_scale:
            if first_non_finite(scales) is not None:
                raise NotFinite("a block holds NaN or infinity")
            scales.clamp_(max=self._kernel.highest_scale)

    def scales(self, wire: Tensor, numel: int) -> Tensor:
        """One for every block."""
        return self._parts(wire, numel)[0]

    def check(self, wire: Tensor, numel: int) -> None:
        """Every code is good with a good scale, so the scales decide. Raises BadWire."""
        check_scales(self.scales(wire, numel), self._kernel.highest_scale)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Straight to `out`, or through scratch if its place in memory is odd."""
        is_aligned = out.storage_offset() % _ALIGNMENT_NUMEL == 0
        for scales, codes, place in self._tiles(wire, out):
            if is_aligned:
                self._kernel.decode(codes, place)
                place.mul_(scales.unsqueeze(1))
            else:
                torch.mul(self._decoded(codes), scales.unsqueeze(1), out=place)
        rest = out.numel() % BLOCK_NUMEL
        if rest:
            out[-rest:] = self._decoded_short_block(wire, out.numel())

    def accumulate(self, wire: Tensor, weight: float, base: Tensor, base_weight: float, total: Tensor) -> None:
        """Decode a tile into scratch, scale and add it in one pass, next tile.

        Processors may round that once or twice; one member makes a sum, and all get its bytes.
        """
        for scales, codes, own, place in self._tiles(wire, base, total):
            if base_weight != 1.0:
                own = torch.mul(own, base_weight, out=place)
            torch.addcmul(own, self._decoded(codes), scales.unsqueeze(1), value=weight, out=place)
        rest = total.numel() % BLOCK_NUMEL
        if rest:
            decoded = self._decoded_short_block(wire, total.numel())
            weighted_sum(base[-rest:], base_weight, decoded, weight, total[-rest:])

    def _decoded(self, codes: Tensor) -> Tensor:
        """[B, 256] in scratch, valid until the next call; not scaled."""
        decoded = head(self._work(codes.device), codes.shape[0])
        self._kernel.decode(codes, decoded)
        return decoded

    def _decoded_short_block(self, wire: Tensor, numel: int) -> Tensor:
        _, scale, codes = self._short_block(wire, numel)
        padded = self._padded_codes(wire.device).zero_()
        padded[0, : len(codes)] = codes
        return self._decoded(padded).mul_(scale).view(-1)[: numel % BLOCK_NUMEL]

    def _tiles(self, wire: Tensor, *values: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Of each tile of whole blocks the scales [B], the codes [B, bytes], and [B, 256] of each of `values`."""
        numel = values[0].numel()
        whole = numel // BLOCK_NUMEL
        if not whole:
            return ()
        scales, codes = self._parts(wire, numel)
        nbytes = self._block_code_nbytes
        columns = [head(scales, whole), head(codes, whole * nbytes).view(whole, nbytes)]
        columns += [head(tensor, whole * BLOCK_NUMEL).view(whole, BLOCK_NUMEL) for tensor in values]
        step = _tile_blocks(wire.device)
        borders = tuple(range(step, whole, step))
        return zip(*(column.tensor_split(borders) for column in columns), strict=True) if borders else (tuple(columns),)

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales_nbytes = num_blocks(numel) * _SCALE_NBYTES
        return wire[:scales_nbytes].view(torch.float32), wire[scales_nbytes : self.wire_nbytes(numel)]

    def _short_block(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scratch [1, 256] for its elements, its scale [1] and its codes, of which there are fewer than in others."""
        scales, codes = self._parts(wire, numel)
        block = self._scratch.rows("block", wire.device, torch.float32, 1, BLOCK_NUMEL)
        return block, scales[-1:], codes[numel // BLOCK_NUMEL * self._block_code_nbytes :]

    def _padded_codes(self, device: torch.device) -> Tensor:
        return self._scratch.rows("codes", device, torch.uint8, 1, self._block_code_nbytes)

    def _work(self, device: torch.device) -> Tensor:
        return self._scratch.rows("work", device, torch.float32, _tile_blocks(device), BLOCK_NUMEL)


def _tile_blocks(device: torch.device) -> int:
    return _TILE_BLOCKS if device.type == "cpu" else _TILE_BLOCKS_ACCELERATOR


def head(tensor: Tensor, count: int) -> Tensor:
    """The first `count`; cutting costs more than a microsecond, so not if that is all of it."""
    return tensor if count == tensor.shape[0] else tensor[:count]
