# SPDX-License-Identifier: Apache-2.0
"""Sums and products whose bits depend on nothing but their arguments."""

import math
from fractions import Fraction

import pytest
import torch

from isthmus.optim import stable


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 1001])
def test_a_sum_by_halves_is_the_sum(length):
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    expected = torch.tensor([math.fsum(row.tolist()) for row in values], dtype=torch.float64)
    torch.testing.assert_close(stable.sum_last(values), expected, rtol=1e-14, atol=1e-14)


def test_a_sum_by_halves_adds_in_its_own_order():
    values = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])
    # (2^24 - 2^24) + (1 + 1); from left to right the first 1 would be lost.
    assert stable.sum_last(values).item() == 2.0


@pytest.mark.parametrize("numel", [1, 1000, 3 * stable._TILE_NUMEL + 17])
def test_a_norm_is_the_root_of_the_exact_sum_of_squares(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = math.sqrt(math.fsum((values.double() ** 2).tolist()))
    assert stable.norm(values) == pytest.approx(expected, rel=1e-15)


def test_a_norm_does_not_overflow_where_fp32_would():
    assert stable.norm(torch.full((4,), 3e38)) == pytest.approx(6e38, rel=1e-6)
    assert stable.norm(torch.zeros(0)) == 0.0


def test_a_product_of_few_bits_is_exact_and_rounded_once():
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-(2**20), 2**20, (5, 40), generator=generator).float()
    right = torch.randint(-(2**20), 2**20, (40, 7), generator=generator).float()
    product = stable.exact_matmul(left, right, out=torch.empty(5, 7))
    for row in range(5):
        for column in range(7):
            exact = sum(
                Fraction(a) * Fraction(b) for a, b in zip(left[row].tolist(), right[:, column].tolist(), strict=True)
            )
            assert product[row, column].item() == torch.tensor(float(exact), dtype=torch.float64).float().item()


def test_a_product_does_not_depend_on_the_order_of_its_terms():
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(33, 500, generator=generator), torch.randn(500, 9, generator=generator)
    order = torch.randperm(500, generator=generator)
    one = stable.exact_matmul(left, right, out=torch.empty(33, 9))
    other = stable.exact_matmul(left[:, order], right[order], out=torch.empty(33, 9))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, (left.double() @ right.double()).float(), rtol=1e-4, atol=1e-4)
