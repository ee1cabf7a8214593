# SPDX-License-Identifier: Apache-2.0
"""The values that the protocol passes around."""

import dataclasses

import pytest
import torch

from isthmus.optim import Absorbed, FragmentKey, Op, Result, Round, State
from isthmus.optim.flat import blend, overlap

KEY = FragmentKey(kind="param", index=0)


def test_a_states_names_are_read_only():
    names = {"anchor": torch.zeros(2)}
    state = State(shared=names)
    names["late"] = torch.zeros(2)
    assert list(state.shared) == ["anchor"]
    with pytest.raises(TypeError):
        state.shared["anchor"] = torch.ones(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.shared = {}


def test_the_digest_sees_names_bytes_and_sizes_but_not_private_state_or_order():
    a, b = torch.arange(3.0), torch.arange(3.0) + 1
    digest = State(shared={"a": a, "b": b}).shared_digest()
    assert State(shared={"b": b.clone(), "a": a.clone()}, private={"e": a}).shared_digest() == digest
    assert State(shared={"a": b, "b": a}).shared_digest() != digest
    assert State(shared={"a": a, "c": b}).shared_digest() != digest
    assert State(shared={"a": torch.cat([a, b]), "b": torch.empty(0)}).shared_digest() != digest
    minus_zero = torch.tensor([-0.0, 1.0, 2.0])
    assert torch.equal(minus_zero, a)
    assert State(shared={"a": minus_zero, "b": b}).shared_digest() != digest


def test_a_recycled_state_is_of_the_same_kind_and_other_memory():
    state = State(shared={"a": torch.zeros(3)}, private={"e": torch.zeros(3)})
    spare = state.empty_like()
    assert (spare.shared["a"].shape, spare.private["e"].shape) == ((3,), (3,))
    assert not overlap(spare.shared["a"], state.shared["a"])


def test_a_round_nobody_contributed_to_has_no_result():
    for members, weight_sum in (((), 1.0), (("ash",), 0.0), (("ash",), float("nan"))):
        with pytest.raises(ValueError, match="dropped"):
            Result(value=torch.zeros(1), members=members, weight_sum=weight_sum)


def test_a_round_is_not_due_before_it_begins():
    assert Round(fragment=KEY, op=Op.MEAN, inner_step=7, delay=2).due_step == 9
    for settings in ({"inner_step": -1}, {"inner_step": 1, "delay": -1}):
        with pytest.raises(ValueError, match="needs inner_step"):
            Round(fragment=KEY, op=Op.MEAN, **settings)


def test_a_target_goes_with_keeping_less_than_everything():
    state = State()
    assert Absorbed.unchanged(state).target is None
    for keep, target in ((1.0, torch.zeros(1)), (0.5, None), (1.5, torch.zeros(1)), (-0.1, torch.zeros(1))):
        with pytest.raises(ValueError, match="keep"):
            Absorbed(state=state, target=target, keep=keep)


@pytest.mark.parametrize(("keep", "expected"), [(0.0, 8.0), (0.25, 7.0), (1.0, 4.0)])
def test_blend_keeps_its_share_of_the_local_value(keep, expected):
    value = torch.full((3,), 4.0)
    blend(value, torch.full((3,), 8.0), keep)
    assert value.tolist() == [expected] * 3


def test_replacing_is_exact_even_over_a_broken_value():
    value = torch.tensor([torch.nan, torch.inf, 1.0])
    target = torch.tensor([0.1, 0.2, 0.3])
    blend(value, target, 0.0)
    assert torch.equal(value, target)


def test_blend_works_in_the_values_dtype():
    value = torch.full((2,), 2.0, dtype=torch.bfloat16)
    blend(value, torch.full((2,), 4.0), 0.5)
    assert value.dtype == torch.bfloat16
    assert value.tolist() == [3.0, 3.0]


def test_overlap_sees_shared_bytes_only():
    memory = torch.zeros(10)
    assert overlap(memory[:6], memory[5:])
    assert not overlap(memory[:5], memory[5:])
