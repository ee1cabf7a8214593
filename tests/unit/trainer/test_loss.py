# SPDX-License-Identifier: Apache-2.0
"""The sliced loss beside the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.trainer.model import loss as loss_module
from isthmus.trainer.model.loss import token_loss

B, L, D, V = 3, 40, 24, 500


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, L, D, generator=generator).to(dtype).requires_grad_()
    head = (0.3 * torch.randn(V, D, generator=generator)).to(dtype).requires_grad_()
    return hidden, head, torch.randint(V, (B, L), generator=generator)


def _plain(hidden, head, targets):
    return F.cross_entropy((hidden @ head.T).float().flatten(0, 1), targets.flatten())


@pytest.fixture(params=[7, 64, 1000], ids=lambda rows: f"slices of {rows} positions")
def _slices(request, monkeypatch):
    monkeypatch.setattr(loss_module, "_MIN_SLICE", request.param)
    monkeypatch.setattr(loss_module, "_SLICE_NUMEL", 1)


@pytest.mark.usefixtures("_slices")
def test_loss_and_gradients_are_those_of_the_plain_cross_entropy():
    ours, plain = _inputs(), _inputs()
    loss, expected = token_loss(*ours), _plain(*plain)
    torch.testing.assert_close(loss, expected)
    (3.0 * loss).backward()
    (3.0 * expected).backward()
    torch.testing.assert_close(ours[0].grad, plain[0].grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(ours[1].grad, plain[1].grad, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("_slices")
def test_bf16_scores_become_an_fp32_loss_and_bf16_gradients():
    ours, plain = _inputs(torch.bfloat16), _inputs(torch.float32)
    loss = token_loss(*ours)
    loss.backward()
    _plain(*plain).backward()
    assert loss.dtype == torch.float32
    for one, other in zip(ours[:2], plain[:2], strict=True):
        assert one.grad.dtype == torch.bfloat16
        # A bf16 number has 8 significant bits; a score is a sum of D products of such numbers.
        assert (one.grad.float() - other.grad).norm() < 0.02 * other.grad.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(frozen):
    free, half = _inputs(), _inputs()
    half[frozen].requires_grad_(False)
    for inputs in (free, half):
        token_loss(*inputs).backward()
    assert half[frozen].grad is None
    torch.testing.assert_close(half[1 - frozen].grad, free[1 - frozen].grad)


def test_an_evaluation_is_the_same_number_without_a_gradient():
    inputs = _inputs()
    with torch.no_grad():
        loss = token_loss(*inputs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, token_loss(*inputs).detach())


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_scores_of_all_positions_are_never_there_at_once(monkeypatch):
    monkeypatch.setattr(loss_module, "_SLICE_NUMEL", 10 * V)
    monkeypatch.setattr(loss_module, "_MIN_SLICE", 1)
    inputs = _inputs()
    with _LargestTensor() as largest:
        token_loss(*inputs).backward()
    assert largest.numel == V * D < B * L * V  # the head's gradient is the largest tensor there is
