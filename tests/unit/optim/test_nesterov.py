# SPDX-License-Identifier: Apache-2.0
"""The outer step: its memory, its arithmetic. test_bit_stability.py has its bits.

m ← μ·m + Δ;  θ ← θ - η·(Δ + μ·m): the outer optimizer of DiLoCo (arXiv:2311.08105).
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.optim import nesterov
from isthmus.optim.nesterov import nesterov_step

LR, MU = 0.7, 0.9


def _tensors(numel: int = 1000, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(3)]


def _step(anchor, momentum, delta, anchor_out, momentum_out, lr=LR, mu=MU):
    nesterov_step(
        anchor=anchor,
        momentum=momentum,
        delta=delta,
        lr=lr,
        mu=mu,
        anchor_out=anchor_out,
        momentum_out=momentum_out,
    )


def _out_of_place(anchor, momentum, delta):
    outputs = torch.full_like(anchor, torch.nan), torch.full_like(anchor, torch.nan)
    _step(anchor, momentum, delta, *outputs)
    return outputs


def test_it_agrees_with_torch_sgd_to_fp32_tolerance():
    anchor, momentum, _ = _tensors()
    momentum.zero_()
    param = torch.nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([param], lr=LR, momentum=MU, nesterov=True)
    for seed in range(5):
        delta = _tensors(seed=seed)[2]
        param.grad = delta.clone()
        reference.step()
        _step(anchor, momentum, delta, anchor, momentum)
    torch.testing.assert_close(anchor, param.detach(), rtol=1e-5, atol=1e-6)


def test_gain_on_a_first_gradient_is_lr_times_one_plus_momentum():
    zero, one = torch.zeros(4, dtype=torch.float32), torch.ones(4)
    anchor, momentum = _out_of_place(zero, zero.clone(), one)
    torch.testing.assert_close(-anchor, torch.full((4,), LR * (1 + MU)))
    torch.testing.assert_close(momentum, one)


def test_gain_on_a_constant_gradient_tends_to_lr_over_one_minus_momentum():
    anchor, momentum, one = torch.zeros(4), torch.zeros(4), torch.ones(4)
    before = anchor.clone()
    for _ in range(300):
        before.copy_(anchor)
        _step(anchor, momentum, one, anchor, momentum)
    torch.testing.assert_close(before - anchor, torch.full((4,), LR / (1 - MU)), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("aliased", ["anchor_out=anchor", "momentum_out=momentum", "momentum_out=delta", "swapped"])
def test_outputs_may_be_the_inputs_themselves(aliased):
    anchor, momentum, delta = _tensors(nesterov.TILE_NUMEL + 3)
    expected = _out_of_place(anchor, momentum, delta)
    spare = torch.empty_like(anchor)
    outputs = {
        "anchor_out=anchor": (anchor, spare),
        "momentum_out=momentum": (spare, momentum),
        "momentum_out=delta": (spare, delta),
        "swapped": (delta, anchor),
    }[aliased]
    _step(anchor, momentum, delta, *outputs)
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[1], expected[1])


def test_out_of_place_leaves_every_input_untouched():
    inputs = _tensors()
    copies = [tensor.clone() for tensor in inputs]
    _out_of_place(*inputs)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


def test_partial_overlap_and_shared_outputs_are_refused():
    memory = torch.zeros(1500)
    anchor, momentum, delta = _tensors()
    with pytest.raises(ValueError, match="share memory"):
        _step(anchor, momentum, delta, delta, delta)
    with pytest.raises(ValueError, match="in part"):
        _step(memory[:1000], momentum, delta, memory[500:], torch.empty(1000))


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(999), torch.zeros(1000, dtype=torch.float64), torch.zeros(2000)[::2], torch.zeros(10, 100)],
    ids=["size", "dtype", "stride", "shape"],
)
def test_tensors_of_another_kind_are_refused(wrong):
    anchor, momentum, _ = _tensors()
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
        _out_of_place(anchor, momentum, wrong)


class _LargestResult(TorchDispatchMode):
    """Largest tensor any operation made that is not one of the outputs given."""

    def __init__(self, given):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.given:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // 4)
        return result


def test_nothing_larger_than_a_tile_is_allocated():
    anchor, momentum, delta = _tensors(3 * nesterov.TILE_NUMEL)
    spare = torch.empty_like(anchor)
    with _LargestResult([anchor, momentum, delta, spare]) as largest:
        _step(anchor, momentum, delta, spare, delta)
    assert largest.numel == nesterov.TILE_NUMEL


def test_an_empty_fragment_is_a_step_of_nothing():
    empty = [torch.empty(0) for _ in range(5)]
    _step(*empty)
