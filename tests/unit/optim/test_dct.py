# SPDX-License-Identifier: Apache-2.0
"""DCT-II of blocks: orthonormal, invertible, and back with the same bits everywhere."""

import math
import struct
from fractions import Fraction

import pytest
import torch

from isthmus.optim import dct
from isthmus.optim.dct import dct2, dct_matrix, idct2

SIDES = [(1, 1), (1, 48), (13, 64), (64, 64), (7, 5)]


def mixed(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def transformed(function, blocks):
    return function(blocks, out=torch.full_like(blocks, torch.nan))


def cosine_sum(block):
    """The definition, in double precision: every coefficient is a sum over all elements."""
    height, width = block.shape
    result = torch.empty(height, width, dtype=torch.float64)
    for u in range(height):
        for v in range(width):
            rows = torch.cos(math.pi * u * (2 * torch.arange(height, dtype=torch.float64) + 1) / (2 * height))
            columns = torch.cos(math.pi * v * (2 * torch.arange(width, dtype=torch.float64) + 1) / (2 * width))
            gain = math.sqrt((2 if u else 1) * (2 if v else 1) / (height * width))
            result[u, v] = gain * (block.double() * rows[:, None] * columns).sum()
    return result


@pytest.mark.parametrize(("height", "width"), SIDES)
def test_back_and_forth_is_the_identity(height, width):
    blocks = mixed(3, height, width)
    there = transformed(dct2, blocks)
    torch.testing.assert_close(transformed(idct2, there), blocks, rtol=0.0, atol=3e-6)
    torch.testing.assert_close(transformed(dct2, transformed(idct2, blocks)), blocks, rtol=0.0, atol=3e-6)
    assert height * width == 1 or not torch.allclose(there, blocks, atol=0.1)


@pytest.mark.parametrize(("height", "width"), [(1, 6), (7, 5), (16, 3)])
def test_coefficients_are_the_sums_that_define_them(height, width):
    blocks = mixed(2, height, width)
    for block, coefficients in zip(blocks, transformed(dct2, blocks), strict=True):
        torch.testing.assert_close(coefficients.double(), cosine_sum(block), rtol=0.0, atol=1e-6)


def test_lengths_are_kept():
    blocks = mixed(4, 64, 64)
    torch.testing.assert_close(transformed(dct2, blocks).norm(), blocks.norm())
    torch.testing.assert_close(transformed(idct2, blocks).norm(), blocks.norm())


def test_a_constant_block_is_one_coefficient():
    coefficients = transformed(dct2, torch.full((1, 64, 64), 0.5))
    assert coefficients[0, 0, 0].item() == pytest.approx(32.0)
    coefficients[0, 0, 0] = 0.0
    assert coefficients.abs().max() < 1e-5


def test_both_work_in_place():
    blocks = mixed(5, 13, 64)
    for function in (dct2, idct2):
        expected, buffer = transformed(function, blocks), blocks.clone()
        assert function(buffer, out=buffer) is buffer
        assert torch.equal(buffer, expected)


def test_a_block_keeps_its_precision_beside_a_larger_one():
    alone = mixed(1, 64, 64)
    small, large = alone * 2.0**-40, alone * 2.0**40
    together = transformed(idct2, torch.cat((large, small, torch.zeros_like(alone))))
    for block, factor in ((together[0], 2.0**-40), (together[1], 2.0**40)):
        assert torch.equal(block * factor, transformed(idct2, alone)[0])
    assert not together[2].any()


def test_work_memory_does_not_change_the_coefficients(monkeypatch):
    blocks = mixed(9, 8, 16)
    whole = transformed(dct2, blocks), transformed(idct2, blocks)
    monkeypatch.setattr(dct, "_TILE_NUMEL", 300)
    torch.testing.assert_close(transformed(dct2, blocks), whole[0], rtol=0.0, atol=1e-6)
    torch.testing.assert_close(transformed(idct2, blocks), whole[1], rtol=0.0, atol=1e-6)


# -------------------------------------------------------------------------------------- the same bits everywhere
def to_fp32(value: Fraction) -> Fraction:
    """Rounded as fp32 rounds; fp64 first only if that is exact."""
    assert Fraction(float(value)) == value
    return Fraction(struct.unpack("<f", struct.pack("<f", float(value)))[0])


def exact_product(left, right):
    """Rows times columns in fractions: factors of as many bits as keep fp64 exact, one rounding at the end."""
    bits = (52 - max(len(right) - 1, 1).bit_length()) // 2

    def coarse(matrix):
        largest = max(abs(value) for row in matrix for value in row)
        unit = Fraction(2) ** (math.frexp(largest)[1] - bits)
        return [[round(value / unit) * unit for value in row] for row in matrix]

    left, right = coarse(left), coarse(right)
    columns = list(zip(*right, strict=True))
    return [[to_fp32(sum(a * b for a, b in zip(row, column, strict=True))) for column in columns] for row in left]


def fractions(matrix):
    return [[Fraction(value) for value in row] for row in matrix.tolist()]


@pytest.mark.parametrize(("height", "width"), [(6, 5), (1, 16), (16, 12)])
def test_the_inverse_is_exact_arithmetic_rounded_once_a_product(height, width):
    """So no library, thread or vector unit can change a bit: fractions have none of these."""
    coefficients = mixed(1, height, width)
    unit = Fraction(2) ** math.frexp(coefficients.abs().max().item())[1]
    scaled = [[value / unit for value in row] for row in fractions(coefficients[0])]
    rows = exact_product(scaled, fractions(dct_matrix(width)))
    columns = exact_product([list(column) for column in zip(*rows, strict=True)], fractions(dct_matrix(height)))
    expected = [[float(value * unit) for value in row] for row in zip(*columns, strict=True)]
    assert transformed(idct2, coefficients)[0].tolist() == expected


def test_no_entry_of_a_matrix_hinges_on_the_last_bits_of_a_cosine():
    """Libraries differ there. Entries near 0 vanish in the product, which is coarser than they are small."""
    for size in range(1, 65):
        exact = torch.tensor([[dct._cosine(k, i, size) for i in range(size)] for k in range(size)], dtype=torch.float64)
        exact[exact.abs() < 2.0**-40] = 0.0
        assert torch.equal((exact * (1 + 2.0**-48)).float(), (exact * (1 - 2.0**-48)).float()), size
