# SPDX-License-Identifier: Apache-2.0
"""ADOPT (arXiv:2411.02853v3), clipped:

m ← β₁m + (1 - β₁) clip(g / max(√v, ε), ±t^¼);   θ ← θ - αm;   v ← β₂v + (1 - β₂)g²,   with v₀ = g₀²
"""

import copy
import math

import pytest
import torch

from isthmus.optim.adopt import Adopt, momentum_names

SHAPES = ((4, 3), (5,))


def gradients(step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    # Of very different size, and sometimes far larger than before, so that clipping has work to do.
    return [scale * (1 + 9 * (step % 4 == 0)) * torch.randn(shape, generator=generator).exp() for shape in SHAPES]


def train(num_steps, scale=1.0, **settings):
    params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(4, 3)), torch.nn.Parameter(torch.ones(5))]
    optimizer = Adopt(params, **settings)
    for step in range(num_steps):
        for param, grad in zip(params, gradients(step, scale), strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params], optimizer


def directly(num_steps, lr=1e-3, betas=(0.9, 0.9999), omegas=(1.0,), eps=1e-6, weight_decay=0.0):
    """The listing for one tensor after another, in double precision."""
    ends = []
    for number, x in enumerate((torch.linspace(-1.0, 1.0, 12).view(4, 3), torch.ones(5))):
        x, v, momenta = x.double(), None, [torch.zeros(x.shape, dtype=torch.float64) for _ in omegas]
        for t in range(num_steps):
            g = gradients(t)[number].double()
            if t == 0:
                v = g * g
                continue
            n = torch.minimum(torch.maximum(g / v.sqrt().clamp(min=eps), -g.new_tensor(t**0.25)), g.new_tensor(t**0.25))
            momenta = [b * m + (1 - b) * n for b, m in zip(betas[:-1], momenta, strict=True)]
            step = (1 - sum(omegas)) * n + sum(w * m for w, m in zip(omegas, momenta, strict=True))
            x = x - lr * weight_decay * x - lr * step
            v = betas[-1] * v + (1 - betas[-1]) * g * g
        ends.append(x)
    return ends


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.1, "betas": (0.8, 0.5), "weight_decay": 0.3},
        {"lr": 0.1, "betas": (0.9, 0.99), "omegas": (0.4,)},
        {"lr": 0.1, "betas": (0.5, 0.9, 0.99), "omegas": (0.2, 0.7)},
        {"lr": 0.1, "betas": (0.9, 0.99), "eps": 2.0},
    ],
)
def test_it_follows_the_listing(settings):
    ends, _ = train(20, **settings)
    for end, expected in zip(ends, directly(20, **settings), strict=True):
        torch.testing.assert_close(end.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_first_step_only_measures():
    ends, optimizer = train(1, lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(ends[1], torch.ones(5), rtol=0.0, atol=0.0)
    for param, grad in zip(optimizer.param_groups[0]["params"], gradients(0), strict=True):
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], grad.square())
        assert not optimizer.state[param]["exp_avg"].any()


def test_a_gradient_is_not_divided_by_what_it_adds_itself():
    """The difference to Adam: v is that of the steps before."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = Adopt([param], lr=1.0, betas=(0.0, 0.0))
    for grad in (2.0, 1.0):
        param.grad = torch.tensor([grad])
        optimizer.step()
    assert param.item() == pytest.approx(-0.5)


def test_steps_are_bounded_by_the_fourth_root_of_their_number():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = Adopt([param], lr=1.0, betas=(0.0, 0.0))
    way = []
    for number in range(18):
        param.grad = torch.tensor([1e-3 * 10.0**number])
        before = param.item()
        optimizer.step()
        way.append(before - param.item())
    assert way == pytest.approx([0.0, *(number**0.25 for number in range(1, 18))], rel=1e-5)


def test_the_scale_of_the_gradients_does_not_matter():
    small, large = train(20, lr=0.1)[0], train(20, 1024.0, lr=0.1)[0]
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))


def test_weight_nought_is_no_momentum():
    ends = [train(12, lr=0.1, betas=(beta, 0.99), omegas=(0.0,))[0] for beta in (0.0, 0.5, 0.99)]
    plain = train(12, lr=0.1, betas=(0.0, 0.99))[0]
    for other in ends:
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_states_are_named_as_torchs_adam_names_them_and_updated_in_place():
    _, optimizer = train(2)
    params = optimizer.param_groups[0]["params"]
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    held = {name: tensor.data_ptr() for name, tensor in optimizer.state[params[0]].items()}
    optimizer.step()
    assert {name: tensor.data_ptr() for name, tensor in optimizer.state[params[0]].items()} == held
    _, several = train(2, betas=(0.9, 0.99, 0.999), omegas=(0.1, 0.2))
    assert set(several.state[several.param_groups[0]["params"][0]]) == {"step", "exp_avg_0", "exp_avg_1", "exp_avg_sq"}
    assert momentum_names(1) == ("exp_avg",)


def test_a_saved_state_goes_on_as_if_nothing_had_been():
    _, optimizer = train(6, lr=0.1, betas=(0.5, 0.9, 0.99), omegas=(0.2, 0.7))
    twins = [torch.nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"]]
    twin = Adopt(twins, betas=(0.5, 0.9, 0.99), omegas=(0.2, 0.7))
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, twin):
        for param, grad in zip(each.param_groups[0]["params"], gradients(6), strict=True):
            param.grad = grad
        each.step()
    for param, other in zip(optimizer.param_groups[0]["params"], twins, strict=True):
        assert torch.equal(param, other)


def test_a_parameter_without_gradient_stays():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Adopt(params, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        params[0].grad = torch.ones(2)
        optimizer.step()
    assert torch.equal(params[1], torch.ones(2))
    assert params[1] not in optimizer.state
    assert (params[0] < 1.0).all()


def test_a_closure_is_evaluated_once_with_gradients():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, losses = Adopt([param], lr=0.1), []

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    assert [optimizer.step(closure) for _ in range(3)] == losses
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "need lr >= 0"),
        ({"lr": float("nan")}, "need lr >= 0"),
        ({"eps": 0.0}, "eps > 0"),
        ({"weight_decay": -1.0}, "weight_decay >= 0"),
        ({"betas": (0.9,)}, "betas are those"),
        ({"betas": (0.9, 1.0)}, "betas are those"),
        ({"betas": (-0.1, 0.9)}, "betas are those"),
        ({"betas": (0.9, 0.9, 0.9)}, "one weight for each of 2"),
        ({"omegas": ()}, "one weight for each of 1"),
        ({"omegas": (1.1,)}, "at most 1 in sum"),
        ({"omegas": (-0.1,)}, "at most 1 in sum"),
        ({"betas": (0.9, 0.9, 0.9), "omegas": (0.6, 0.6)}, "at most 1 in sum"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Adopt([torch.nn.Parameter(torch.ones(2))], **settings)


def test_weights_that_are_one_in_sum_but_for_rounding_are_welcome():
    half = math.nextafter(0.5, 1.0)
    assert half + half > 1.0
    Adopt([torch.nn.Parameter(torch.ones(2))], betas=(0.9, 0.9, 0.9), omegas=(half, half))


def test_moments_of_bf16_parameters_are_forgotten_as_fast_as_others_also_after_a_restart():
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = Adopt([param], betas=(0.9, 0.999))
        for step in range(2000):
            if step == 1000:
                written = copy.deepcopy(optimizer.state_dict())
                optimizer = Adopt([param], betas=(0.9, 0.999))
                optimizer.load_state_dict(written)
            param.grad = torch.full((4,), 8.0 if step == 0 else 0.5, dtype=dtype)
            optimizer.step()
        ends.append(optimizer.state[param]["exp_avg_sq"])
    assert ends[1].dtype == torch.float32
    torch.testing.assert_close(ends[1], ends[0], rtol=0.01, atol=0.0)  # found before: it stayed at 64
    assert float(ends[0][0]) < 10.0
