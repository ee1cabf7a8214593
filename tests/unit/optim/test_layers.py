# SPDX-License-Identifier: Apache-2.0
"""Layers by name."""

import pytest

from isthmus.optim import FragmentTable
from isthmus.optim.layers import layer_groups


def groups(*names):
    return layer_groups(FragmentTable.from_named_shapes([(name, (2,)) for name in names]))


def test_the_first_number_in_a_name_is_its_layer():
    assert groups("layers.0.mlp.w2", "layers.1.attn.wq", "layer1.w") == (
        ("layers.0.mlp.w2",),
        ("layers.1.attn.wq", "layer1.w"),
    )


def test_what_comes_before_the_first_layer_goes_with_it_and_all_else_with_the_last():
    assert groups("embed", "position", "layers.0.w", "mask", "layers.1.w", "norm", "head") == (
        ("embed", "position", "layers.0.w"),
        ("mask", "layers.1.w", "norm", "head"),
    )


def test_layers_are_in_the_order_of_their_numbers_and_names_in_that_of_the_table():
    assert groups("h.10.b", "h.2.z", "h.2.a", "h.10.a") == (("h.2.z", "h.2.a"), ("h.10.b", "h.10.a"))


def test_a_model_without_numbers_is_one_group():
    assert groups("embed", "head") == (("embed", "head"),)


@pytest.mark.parametrize(
    "names",
    [
        ("norm", "h.3.w", "mask", "h.1.w", "head"),
        ("h.1.w", "h.1.v"),
        ("a", "b.7", "c", "d.7", "e.5", "f"),
    ],
)
def test_every_tensor_is_in_exactly_one_group(names):
    found = groups(*names)
    assert sorted(name for group in found for name in group) == sorted(names)
    assert all(found)
