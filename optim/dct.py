# SPDX-License-Identifier: Apache-2.0
"""The orthonormal DCT-II of blocks, in both directions, and its inverse with the same bits on every machine.

    Y = C_h · X · C_wᵀ        X = C_hᵀ · Y · C_w        C_n[k, i] = √((k ? 2 : 1) / n) · cos(π k (2 i + 1) / 2 n)

A block of one row has C_1 = 1: it is transformed along its columns only.

Error: up to about 1e-6 of the largest coefficient of a block, in each direction.

Rules: `dct2` is a worker's own and uses whatever product of matrices is fast. What comes out of `idct2` may decide the
sign of a step, where one ulp would part two peers for ever, so its products are exact before they are rounded (see
optim/stable.py). It scales each block by a power of two first, so that a block keeps its precision beside a larger one.
It must not know: where blocks come from, what is sent.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.stable import exact_matmul

if TYPE_CHECKING:
    from torch import Tensor

_TILE_NUMEL: Final = 1 << 18
"""Elements that are transformed at once; it bounds work memory. Peers must have the same."""


def dct2(blocks: Tensor, *, out: Tensor) -> Tensor:
    """Coefficients of blocks, fp32 [blocks, height, width], to `out` of that shape, which is returned.

    `out` may be `blocks`.
    """
    _, height, width = blocks.shape
    down, across = dct_matrix(height), dct_matrix(width).t()
    step = _blocks_at_once(blocks)
    for part, place in zip(torch.split(blocks, step), torch.split(out, step), strict=True):
        place.copy_(down @ part @ across)
    return out


def idct2(coefficients: Tensor, *, out: Tensor) -> Tensor:
    """Invert `dct2`: fp32 [blocks, height, width], to `out` of that shape, which is returned. Equal bits everywhere.

    `out` may be `coefficients`.
    """
    _, height, width = coefficients.shape
    step = _blocks_at_once(coefficients)
    for part, place in zip(torch.split(coefficients, step), torch.split(out, step), strict=True):
        unit = _powers_of_two(part.abs().amax((1, 2), keepdim=True))
        rows = (part / unit).view(-1, width)
        rows = exact_matmul(rows, dct_matrix(width), out=torch.empty_like(rows))
        columns = rows.view(part.shape).transpose(1, 2).reshape(-1, height)
        columns = exact_matmul(columns, dct_matrix(height), out=torch.empty_like(columns))
        torch.mul(columns.view(-1, width, height).transpose(1, 2), unit, out=place)
    return out


@functools.cache
def dct_matrix(size: int) -> Tensor:
    """C, fp32 [size, size]: a row for each frequency. Not to be written to."""
    return torch.tensor(
        [[_cosine(frequency, place, size) for place in range(size)] for frequency in range(size)], dtype=torch.float32
    )


def _cosine(frequency: int, place: int, size: int) -> float:
    # The angle is reduced in whole numbers, so libraries differ by an ulp of fp64 at most, and fp32 rounds that away.
    turn = frequency * (2 * place + 1) % (4 * size)
    return math.sqrt((2 if frequency else 1) / size) * math.cos(math.pi * turn / (2 * size))


def _blocks_at_once(blocks: Tensor) -> int:
    _, height, width = blocks.shape
    return max(1, _TILE_NUMEL // (height * width))


def _powers_of_two(magnitudes: Tensor) -> Tensor:
    """Of each the least power of two above it; 1 for 0. A number divided by its mantissa is that, exactly."""
    return torch.where(magnitudes > 0.0, magnitudes / torch.frexp(magnitudes).mantissa, 1.0)
