# SPDX-License-Identifier: Apache-2.0
"""Small rules about flat tensors."""

import pytest
import torch

from isthmus.optim.flat import blend

BROKEN = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_takes_the_target_and_is_counted(dtype):
    value = torch.tensor([1.0, torch.nan, 3.0, torch.inf, -torch.inf, 6.0], dtype=dtype)
    target = torch.tensor([5.0, 0.1, 7.0, 0.2, 0.3, 10.0])
    assert blend(value, target, 0.25) == 3
    assert torch.equal(value, torch.tensor([4.0, 0.1, 6.0, 0.2, 0.3, 9.0]).to(dtype))
    assert blend(value, target, 0.25) == 0, "mended"


def test_a_target_that_is_not_finite_is_none_of_the_values_faults():
    value = torch.ones(2)
    assert blend(value, torch.tensor([torch.nan, 3.0]), 0.5) == 0
    assert value[1] == 2.0


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_each_product_is_rounded_before_the_sum(keep):
    value, target = torch.randn(1000), torch.randn(1000)
    expected = value * keep + target * (1.0 - keep)
    assert blend(value, target, keep) == 0
    assert torch.equal(value, expected)


def test_where_nothing_is_blended_nothing_is_counted():
    value = torch.tensor(BROKEN)
    blend(value, torch.zeros(3), 1.0)
    assert not value.isfinite().any()
    assert blend(value, torch.zeros(3), 0.0) == 0
    assert torch.equal(value, torch.zeros(3))


def test_a_part_of_a_tensor_of_any_shape_can_be_blended():
    whole = torch.full((3, 4), torch.nan)
    assert blend(whole[1:, ::2], torch.ones(2, 2), 0.5) == 4
    assert torch.equal(whole[1:, ::2], torch.ones(2, 2))
    assert whole.isnan().sum() == 8
