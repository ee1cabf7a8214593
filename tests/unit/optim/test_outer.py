# SPDX-License-Identifier: Apache-2.0
"""The values that the protocol passes around."""

import dataclasses

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, FragmentKey, FragmentTable, Op, Outcome, Outer, Result, Round, Settled
from isthmus.optim.flat import blend, overlap
from isthmus.optim.outer import Weigh, digest_of, empty_like, successor

KEY = FragmentKey(kind="param", index=0)


def test_a_method_need_not_say_what_is_the_same_for_most():
    class Plain(Outer):
        fragments = DiLoCo.fragments
        init = DiLoCo.init
        plan = DiLoCo.plan
        emit = DiLoCo.emit
        step = DiLoCo.step

    table, outer = FragmentTable.from_named_shapes([("w", (3,))]), Plain()
    assert outer.fitted(table) is outer
    assert outer.init_private(table.whole(), {}, torch.zeros(3)) == {}
    with pytest.raises(TypeError, match="abstract"):
        Outer()


def test_by_default_a_worker_goes_to_the_new_anchor_and_follows_it_if_it_was_not_counted():
    class Plain(DiLoCo):
        pass

    before, after, private = {ANCHOR: torch.zeros(2)}, {ANCHOR: torch.ones(2)}, {"mine": torch.zeros(2)}
    round_ = Round(fragment=KEY, op=Op.MEAN, inner_step=1)
    result = Result(value=torch.empty(0), members=("ash",), weight_sum=1.0)
    outcome = Outcome(round_=round_, result=result, contribution=None, before=before, after=after, private=private)
    counted = Plain().settle(outcome)
    assert (counted.target, counted.keep) == (after[ANCHOR], 0.0)
    missed = Plain().settle(dataclasses.replace(outcome, result=None))
    assert (missed.target, missed.keep) == (None, 1.0)
    assert counted.private is missed.private is private


def test_the_digest_sees_names_bytes_and_sizes_but_not_the_order():
    a, b = torch.arange(3.0), torch.arange(3.0) + 1
    digest = digest_of({"a": a, "b": b})
    assert digest_of({"b": b.clone(), "a": a.clone()}) == digest
    assert digest_of({"a": b, "b": a}) != digest
    assert digest_of({"a": a, "c": b}) != digest
    assert digest_of({"a": torch.cat([a, b]), "b": torch.empty(0)}) != digest
    minus_zero = torch.tensor([-0.0, 1.0, 2.0])
    assert torch.equal(minus_zero, a)
    assert digest_of({"a": minus_zero, "b": b}) != digest


def test_a_recycled_state_is_of_the_same_kind_and_other_memory():
    state = {"a": torch.zeros(3), "b": torch.zeros(1)}
    spare = empty_like(state)
    assert {name: tensor.shape for name, tensor in spare.items()} == {"a": (3,), "b": (1,)}
    assert not overlap(spare["a"], state["a"])
    assert successor(state, spare) is spare
    fresh = successor(state, None)
    assert fresh.keys() == state.keys()
    assert not overlap(fresh["a"], state["a"])
    with pytest.raises(ValueError, match="never writes"):
        successor(state, {**spare, "b": state["a"][:1]})


def test_a_round_nobody_contributed_to_has_no_result():
    for members, weight_sum in (((), 1.0), (("ash",), 0.0), (("ash",), float("nan"))):
        with pytest.raises(ValueError, match="no result"):
            Result(value=torch.zeros(1), members=members, weight_sum=weight_sum)


def test_a_round_is_not_due_before_it_begins():
    assert Round(fragment=KEY, op=Op.MEAN, inner_step=7, delay=2).due_step == 9
    for settings in ({"inner_step": -1}, {"inner_step": 1, "delay": -1}):
        with pytest.raises(ValueError, match="needs inner_step"):
            Round(fragment=KEY, op=Op.MEAN, **settings)


def test_a_plain_mean_by_samples_costs_no_word_beforehand():
    plain = Round(fragment=KEY, op=Op.MEAN, inner_step=1)
    assert not plain.is_told
    for told in ({"num_notes": 1}, {"weigh": Weigh.ALIKE}, {"op": Op.GATHER}, {"op": Op.PAIR}):
        assert dataclasses.replace(plain, **told).is_told


def test_the_inner_optimizer_waits_for_its_gradient():
    with pytest.raises(ValueError, match="no delay"):
        Round(fragment=FragmentKey(kind="grad", index=0), op=Op.MEAN, inner_step=1, delay=1)


def test_a_target_goes_with_keeping_less_than_everything():
    assert (Settled.untouched({}).target, Settled.untouched({}).keep) == (None, 1.0)
    for keep, target in ((1.0, torch.zeros(1)), (0.5, None), (1.5, torch.zeros(1)), (-0.1, torch.zeros(1))):
        with pytest.raises(ValueError, match="keep"):
            Settled(private={}, target=target, keep=keep)


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
