# SPDX-License-Identifier: Apache-2.0
"""What a caller may hand in, and the errors that say what to do instead."""

import math

import numpy as np
import pytest
import torch

from isthmus.collective.rounds.buffers import DTYPES
from isthmus.collective.rounds.tensors import check_out, check_weight, flat, names, on_host, overlap


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (1, 2, 3, 1), (0,), (3, 0)])
def test_a_tensor_is_seen_flat_without_a_copy(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    seen = flat("tensor", tensor)
    assert (seen.shape, seen.dtype) == ((tensor.numel(),), dtype)
    seen.fill_(1)
    assert bool((tensor == 1).all())
    assert seen.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "u1", "i2", "i4", "i8"])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_an_array_is_seen_flat_without_a_copy(dtype, shape):
    array = np.zeros(shape, dtype)
    seen = flat("tensor", array)
    assert DTYPES[seen.dtype] == str(array.dtype)
    seen.fill_(1)
    assert bool((array == 1).all())


@pytest.mark.parametrize("empty", [np.zeros(0, np.float32), np.zeros((3, 0), np.int16), torch.tensor(np.zeros(0))])
def test_what_has_no_elements_can_be_seen_as_bytes(empty):
    assert flat("tensor", empty).view(torch.uint8).numel() == 0


def test_a_parameter_is_seen_without_its_gradient():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    seen = flat("tensor", parameter)
    assert not seen.requires_grad
    assert seen.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 4).t(), torch.ones(8)[::2], torch.ones(4, 4)[:, :2], torch.ones(1).expand(5)],
    ids=["transposed", "every second", "columns", "expanded"],
)
def test_a_tensor_that_is_not_contiguous_is_refused_with_its_cure(tensor):
    with pytest.raises(ValueError, match=r"out is not contiguous; pass out\.contiguous\(\)"):
        flat("out", tensor)


@pytest.mark.parametrize(
    "array",
    [np.ones((4, 4), np.float32).T, np.ones(8, np.float32)[::2], np.ones(8, np.float32)[::-1]],
    ids=["transposed", "every second", "backwards"],
)
def test_an_array_that_is_not_contiguous_is_refused_with_a_cure_for_arrays(array):
    with pytest.raises(ValueError, match=r"^tensor is not contiguous; pass np\.ascontiguousarray\(tensor\)"):
        flat("tensor", array)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_travel_is_named_with_those_that_can(dtype):
    with pytest.raises(ValueError, match="convert it to one of float32, float64, bfloat16") as refused:
        flat("tensor", torch.zeros(4, dtype=dtype))
    assert str(dtype).removeprefix("torch.") in str(refused.value)
    assert "torch." not in str(refused.value)


@pytest.mark.parametrize("dtype", [np.bool_, np.complex64, np.uint32, np.uint64, ">f4", "U3", object, np.longdouble])
def test_an_array_whose_dtype_cannot_travel_is_named_with_those_that_can(dtype):
    array = np.zeros(4, dtype)
    with pytest.raises(ValueError, match="convert it to one of float32, float64") as refused:
        flat("tensor", array)
    assert str(array.dtype) in str(refused.value)


def test_a_read_only_array_is_refused_with_its_cure():
    array = np.ones(4, np.float32)
    array.setflags(write=False)
    with pytest.raises(ValueError, match=r"tensor is a read-only array; pass tensor\.copy\(\)"):
        flat("tensor", array)


def test_a_tensor_on_another_device_and_a_sparse_one_are_refused_with_their_cure():
    with pytest.raises(ValueError, match=r"tensor is on meta; pass tensor\.cpu\(\)"):
        flat("tensor", torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"tensor is .*; pass "):
        flat("tensor", torch.eye(3).to_sparse())


def test_names_are_those_of_all_dtypes():
    assert names().split(", ") == list(DTYPES.values())


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (slice(0, 4), slice(4, 8), False),
        (slice(0, 5), slice(4, 8), True),
        (slice(4, 8), slice(0, 5), True),
        (slice(0, 8), slice(2, 4), True),
        (slice(0, 8), slice(0, 8), True),
        (slice(3, 3), slice(0, 8), False),
        (slice(0, 8), slice(3, 3), False),
    ],
)
def test_overlap_is_memory_in_common(first, second, is_shared):
    memory = torch.zeros(8)
    assert overlap(memory[first], memory[second]) is is_shared


def test_overlap_is_seen_across_dtypes():
    memory = torch.zeros(8, dtype=torch.uint8)
    assert overlap(memory[:5], memory.view(torch.float32)[1:])
    assert not overlap(memory[:4], memory.view(torch.float32)[1:])


def test_an_output_must_be_alike_and_of_the_right_length():
    check_out(torch.ones(4), torch.ones(8), 8)
    with pytest.raises(ValueError, match=r"out is torch\.float64 on cpu, the tensor torch\.float32 on cpu; make it al"):
        check_out(torch.ones(4), torch.ones(4, dtype=torch.float64), 4)
    with pytest.raises(ValueError, match="out has 5 elements; it needs 4"):
        check_out(torch.ones(4), torch.ones(5), 4)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf])
def test_a_weight_must_be_a_finite_number_from_0_up(weight):
    with pytest.raises(ValueError, match="weight must be a number from 0 to"):
        check_weight(weight, torch.float32, "mean")


@pytest.mark.parametrize(
    ("dtype", "op", "name"), [(torch.float32, "min", "float32"), (torch.int32, "sum", "int32"), (torch.int8, "max", "")]
)
def test_a_weight_without_a_meaning_is_refused_with_its_cure(dtype, op, name):
    check_weight(1.0, dtype, op)
    with pytest.raises(ValueError, match=f"a weight has no meaning for the {op} of {name}.*; leave it at 1"):
        check_weight(2.0, dtype, op)


def test_what_is_on_the_host_stays_where_it_is():
    tensor = torch.ones(4)
    assert on_host(tensor) is tensor
