"""The inner optimizer."""

import pytest
import torch

from optim.inner import build_inner_optimizer, set_lr


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


def test_only_matrices_decay():
    model = _model()
    optimizer = build_inner_optimizer(model.named_parameters(), lr=0.1, weight_decay=0.5)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        factor = 1.0 - 0.1 * 0.5 if param.ndim >= 2 else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor)


def test_it_is_adamw_with_the_settings_given_and_knows_names():
    model = torch.nn.Linear(3, 4)
    optimizer = build_inner_optimizer(model.named_parameters(), lr=0.1, betas=(0.8, 0.95), eps=1e-6)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    assert all(group["betas"] == (0.8, 0.95) and group["eps"] == 1e-6 for group in optimizer.param_groups)


def test_frozen_parameters_are_left_out():
    model = torch.nn.Linear(3, 4)
    model.weight.requires_grad_(False)
    optimizer = build_inner_optimizer(model.named_parameters(), type="sgd", lr=0.1)
    assert [group["param_names"] for group in optimizer.param_groups] == [["bias"]]
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        build_inner_optimizer(model.named_parameters(), lr=0.1)


def test_sgd_is_plain():
    model = torch.nn.Linear(1, 1)
    optimizer = build_inner_optimizer(model.named_parameters(), type="sgd", lr=0.5, weight_decay=0.0)
    before = model.weight.detach().clone()
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_set_lr_reaches_every_group():
    optimizer = build_inner_optimizer(_model().named_parameters(), lr=0.1)
    set_lr(optimizer, 0.025)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]


@pytest.mark.parametrize("settings", [{"lr": -0.1}, {"lr": float("nan")}, {"lr": 0.1, "weight_decay": -1.0}])
def test_negative_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must not be negative"):
        build_inner_optimizer(_model().named_parameters(), **settings)
