# SPDX-License-Identifier: Apache-2.0
"""Sums and products with the same bits on every machine, whatever its vector units, libraries or threads.

A library's sum adds in the order that suits its registers, so it rounds differently from one CPU to the next. Here
sums have a fixed order of single additions, and products of matrices are exact in fp64 before they are rounded once.
Whatever goes into `State.shared` and is more than an elementwise operation is computed with these.

It must not know rounds, states or methods.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

_EXACT_BITS: Final = 53
"""Whole numbers up to 2^this are exact in fp64."""
_TILE_NUMEL: Final = 1 << 20
"""Elements that are computed at once, in fp64. Peers must have the same."""


def sum_last(values: Tensor) -> Tensor:
    """Sum over the last dimension by halves, in the dtype of `values`. [..., n] to [...]."""
    if values.shape[-1] == 0:
        return values.new_zeros(values.shape[:-1])
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if values.shape[-1] % 2:
            folded[..., 0] += values[..., -1]
        values = folded
    return values[..., 0]


def norm(values: Tensor) -> float:
    """L2 norm of a flat fp32 tensor, [n]. Squares are exact in fp64, their sum has a fixed order."""
    wide = (tile.double() for tile in torch.split(values, _TILE_NUMEL))
    return math.sqrt(math.fsum(sum_last(tile.mul_(tile)).item() for tile in wide))


def exact_matmul(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """left · right, fp32 [n, k] and [k, m], to `out` [n, m], which is returned.

    Both are rounded to whole multiples of a power of two so coarse that no sum of products needs more than 53 bits. So
    the fp64 product is exact, whatever order a library adds in; it is rounded to fp32 once. The coarseness is that of
    fp32 numbers as large as the largest of each factor.
    """
    inner = left.shape[1]
    bits = (_EXACT_BITS - 1 - max(inner - 1, 1).bit_length()) // 2
    left_whole, left_unit = _whole_multiples(left, bits)
    right_whole, right_unit = _whole_multiples(right, bits)
    step = max(1, _TILE_NUMEL // max(right.shape[1], 1))
    for first in range(0, len(left), step):
        product = torch.mm(left_whole[first : first + step], right_whole)
        out[first : first + step] = product.mul_(left_unit).mul_(right_unit)
    return out


def power_of_two_above(values: Tensor) -> float:
    """The least power of two above all magnitudes; 1 if there are none."""
    highest = values.abs().amax().item() if values.numel() else 0.0
    return math.ldexp(1.0, math.frexp(highest)[1]) if highest > 0.0 else 1.0


def _whole_multiples(factor: Tensor, bits: int) -> tuple[Tensor, float]:
    """`factor` as whole numbers of at most `bits` bits in fp64, and the power of two that is their unit."""
    unit = math.ldexp(power_of_two_above(factor), -bits)
    return factor.double().div_(unit).round_(), unit
