# SPDX-License-Identifier: Apache-2.0
"""The order in which sparse methods send a fragment: matrices as blocks of up to 64 x 64 elements.

A codec that keeps the k largest of every 4096 consecutive elements should find what belongs together in such a run. So
each matrix [n, m] is cut into blocks [h, w], where h and w are the largest divisors of n and m up to 64, and block
follows block, each row by row. A vector [m] is the matrix [1, m] and keeps its order; a tensor of more dimensions is
the matrix of its first and of all others.

Blocks of equal size lie together, the largest first. So every matrix whose dimensions are multiples of 64 is sent as
whole runs, one a block; smaller blocks share runs. The public code gives each of them a selection of its own, with as
many elements as a large one: then a vector is hardly compressed. Here all elements have the same share of the bytes.

Rules: a permutation; nothing is rounded. It follows from the shapes alone. A `Round` names a fragment but does not hold
its shapes, hence methods keep them in their shared state, which also makes peers of different shapes differ in digest.
It must not know: rounds, wires, what the elements mean.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.flat import overlap, require_flat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from isthmus.optim.fragments import Fragment

SHAPES: Final = "shapes"
"""Name, in shared state, of what `shapes_of` gives."""
ALL: Final = "raw"
"""The codec that keeps all elements of a run."""
RUN_NUMEL: Final = 4096
"""Consecutive elements of which a codec keeps the largest."""
_MAX_SIDE: Final = 64
_MAX_DIMENSION: Final = 1 << 24
"""fp32 holds whole numbers up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """Where each element of a fragment's buffer lies among the blocks. Build it with `block_order`."""

    matrices: tuple[tuple[int, tuple[int, int, int, int]], ...]
    """(first element in the buffer, (blocks down, height, blocks across, width)) in the order of the blocks."""
    numel: int

    def to_blocks(self, buffer: Tensor, *, out: Tensor) -> Tensor:
        """Copy a fragment's buffer, [numel], to `out`, [numel], block by block; returns `out`.

        Raises:
            ValueError: if one is no flat fp32 CPU tensor of that size, or they share memory.
        """
        for flat, blocks in self._pairs(buffer, out):
            blocks.copy_(flat)
        return out

    def from_blocks(self, blocks: Tensor, *, out: Tensor) -> Tensor:
        """Invert `to_blocks`: [numel] block by block, to a fragment's buffer `out`, [numel], which is returned.

        Raises:
            ValueError: if one is no flat fp32 CPU tensor of that size, or they share memory.
        """
        for flat, piece in self._pairs(out, blocks):
            flat.copy_(piece)
        return out

    def batches(self, blocks: Tensor) -> Iterator[Tensor]:
        """Views of all blocks of one size, [blocks, height, width], of a tensor in the order of the blocks, [numel]."""
        counts: dict[tuple[int, int], int] = {}
        for _, (down, height, across, width) in self.matrices:
            counts[height, width] = counts.get((height, width), 0) + down * across
        start = 0
        for (height, width), count in counts.items():
            stop = start + count * height * width
            yield blocks[start:stop].view(count, height, width)
            start = stop

    def _pairs(self, buffer: Tensor, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each matrix in the buffer and in the blocks, both as [blocks down, blocks across, height, width]."""
        require_flat(buffer, self.numel, "the fragment's buffer")
        require_flat(blocks, self.numel, "the buffer of its blocks")
        if overlap(buffer, blocks):
            raise ValueError("elements change places: both tensors must be separate memory")
        place = 0
        for start, (down, height, across, width) in self.matrices:
            numel = down * height * across * width
            flat = buffer[start : start + numel].view(down, height, across, width).transpose(1, 2)
            yield flat, blocks[place : place + numel].view(down, across, height, width)
            place += numel


def shapes_of(fragment: Fragment) -> Tensor:
    """Rows and columns of each tensor of a fragment, as matrices: [2 * tensors] fp32.

    Raises:
        ValueError: a dimension is too large for fp32 to hold.
    """
    sizes = [size for spec in fragment.specs for size in _matrix(spec.shape)]
    if max(sizes) > _MAX_DIMENSION:
        raise ValueError(f"a dimension of {max(sizes)} elements: blocks are for dimensions up to {_MAX_DIMENSION}")
    return torch.tensor(sizes, dtype=torch.float32)


def block_order(shapes: Tensor) -> BlockOrder:
    """The order that follows from `shapes_of` a fragment."""
    return _block_order(tuple(int(size) for size in shapes.tolist()))


def topk_codec(kept: int) -> str:
    """The codec that keeps so many elements of each run; nothing is lost where that is all of them.

    Raises:
        ValueError: if kept is not from 1 to 4096.
    """
    if not 1 <= kept <= RUN_NUMEL:
        raise ValueError(f"topk must be from 1 to {RUN_NUMEL}, got {kept}")
    return ALL if kept == RUN_NUMEL else f"topk:{kept}"


@functools.lru_cache(maxsize=256)
def _block_order(sizes: tuple[int, ...]) -> BlockOrder:
    matrices, start = [], 0
    for rows, columns in zip(sizes[::2], sizes[1::2], strict=True):
        if rows * columns:
            height, width = _side(rows), _side(columns)
            matrices.append((start, (rows // height, height, columns // width, width)))
            start += rows * columns
    matrices.sort(key=lambda matrix: (-matrix[1][1] * matrix[1][3], matrix[1][1], matrix[0]))
    return BlockOrder(matrices=tuple(matrices), numel=start)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _side(size: int) -> int:
    return max(side for side in range(1, _MAX_SIDE + 1) if size % side == 0)
