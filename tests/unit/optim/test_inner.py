# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer."""

import copy
from typing import get_args

import pytest
import torch

from isthmus.optim.adopt import Adopt
from isthmus.optim.inner import CompositeOptimizer, InnerType, begin_states, build_inner_optimizer, set_lr, state_names


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


def test_defaults_are_those_of_the_type():
    def group(**settings):
        return build_inner_optimizer(_model().named_parameters(), lr=0.1, **settings).param_groups[0]

    assert (group()["betas"], group()["eps"]) == ((0.9, 0.99), 1e-8)
    adopt = group(type="adopt")
    assert (adopt["betas"], adopt["eps"], adopt["omegas"]) == ((0.9, 0.9999), 1e-6, (1.0,))


def test_adopt_decays_matrices_only_and_may_have_several_moments():
    optimizer = build_inner_optimizer(
        _model().named_parameters(), type="adopt", lr=0.1, betas=(0.9, 0.99, 0.999), omegas=(0.3, 0.6)
    )
    assert isinstance(optimizer, Adopt)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.9, 0.99, 0.999) for group in optimizer.param_groups)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias"],
    ]


class _Named(torch.nn.Module):
    """Layers of a decoder, each filled with the same values every time."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.block = torch.nn.Linear(4, 6, bias=False)
        self.gain = torch.nn.RMSNorm(6)
        self.head = torch.nn.Linear(4, 7, bias=False)
        for param in self.parameters():
            param.data = torch.linspace(-1.0, 1.0, param.numel()).view(param.shape)

    def set_gradients(self, step):
        generator = torch.Generator().manual_seed(step)
        for param in self.parameters():
            param.grad = torch.randn(param.shape, generator=generator)


def _muon(model, **settings):
    return build_inner_optimizer(model, type="muon", lr=0.05, **settings)


def test_muon_trains_hidden_matrices_and_adamw_the_rest():
    model, twin = _Named(), _Named()
    optimizer = _muon(model, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2, momentum=0.7)
    muon = torch.optim.Muon(
        [twin.block.weight], lr=0.05, weight_decay=0.2, momentum=0.7, adjust_lr_fn="match_rms_adamw"
    )
    tables = {"params": [twin.embedding.weight, twin.head.weight], "weight_decay": 0.2}
    adamw = torch.optim.AdamW(
        [tables, {"params": [twin.gain.weight], "weight_decay": 0.0}], lr=0.05, betas=(0.8, 0.9), eps=1e-7, fused=True
    )
    for step in range(4):
        model.set_gradients(step)
        twin.set_gradients(step)
        optimizer.step()
        muon.step()
        adamw.step()
    for name, param in model.named_parameters():
        assert torch.equal(param, twin.get_parameter(name)), name
        states = {"momentum_buffer"} if name == "block.weight" else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[param]) == states
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["block.weight"],
        ["embedding.weight", "head.weight"],
        ["gain.weight"],
    ]


def test_set_lr_and_zero_grad_reach_every_part():
    model = _Named()
    optimizer = _muon(model, weight_decay=0.0)
    before = [param.detach().clone() for param in model.parameters()]
    model.set_gradients(0)
    set_lr(optimizer, 0.0)
    optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    set_lr(optimizer, 0.1)
    optimizer.step()
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_a_composites_state_can_be_forgotten():
    model, fresh = _Named(), _Named()
    optimizer = _muon(model)
    for step in range(3):
        model.set_gradients(step)
        optimizer.step()
    optimizer.state.clear()
    fresh.load_state_dict(model.state_dict())
    model.set_gradients(3)
    fresh.set_gradients(3)
    optimizer.step()
    _muon(fresh).step()
    for name, param in model.named_parameters():
        assert torch.equal(param, fresh.get_parameter(name)), name


@pytest.mark.parametrize("copied", [False, True])
def test_a_composites_saved_state_goes_on_as_if_nothing_had_been(copied):
    model = _Named()
    optimizer = _muon(model)
    for step in range(3):
        model.set_gradients(step)
        optimizer.step()
    if copied:
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
    else:
        twin = _Named()
        twin.load_state_dict(model.state_dict())
        twin_optimizer = _muon(twin)
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 5):
        for each, its in ((model, optimizer), (twin, twin_optimizer)):
            each.set_gradients(step)
            set_lr(its, 0.02 * step)
            its.step()
    for name, param in model.named_parameters():
        assert torch.equal(param, twin.get_parameter(name)), name


def test_a_composite_evaluates_a_closure_once():
    model = _Named()
    optimizer, calls = _muon(model), []

    def closure():
        model.set_gradients(len(calls))
        calls.append(torch.is_grad_enabled())
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == [True]


def test_parts_may_not_share_a_parameter():
    param = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        CompositeOptimizer([torch.optim.SGD([param]), torch.optim.SGD([param])])


def test_muon_without_vectors_is_muon_alone_and_without_matrices_an_error():
    linear = torch.nn.Linear(3, 4, bias=False)
    optimizer = _muon(linear)
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"]]
    with pytest.raises(ValueError, match="there is none"):
        _muon(torch.nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"omegas": (0.5,)}, "omegas belong to adopt, not to adamw"),
        ({"betas": (0.9, 0.9, 0.9)}, "AdamW has two betas"),
        ({"type": "muon", "betas": (0.9,), "hidden": ["0.weight"]}, "AdamW has two betas"),
        ({"type": "muon", "momentum": 1.0, "hidden": ["0.weight"]}, r"momentum must be in \[0, 1\)"),
        ({"type": "muon"}, "parameters do not say which of them are hidden"),
        ({"type": "adopt", "omegas": (0.5, 0.6)}, "one weight for each of 1"),
    ],
)
def test_settings_of_another_type_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_inner_optimizer(_model().named_parameters(), lr=0.1, **settings)


@pytest.mark.parametrize("settings", [{"lr": -0.1}, {"lr": float("nan")}, {"lr": 0.1, "weight_decay": -1.0}])
def test_negative_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must not be negative"):
        build_inner_optimizer(_model().named_parameters(), **settings)


def test_who_gives_parameters_says_which_are_hidden():
    model = _model()
    optimizer = build_inner_optimizer(model.named_parameters(), type="muon", lr=0.1, hidden=("2.weight",))
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["2.weight"],
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias"],
    ]


STATES = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "sgd": set(),
    "adopt": {"exp_avg", "exp_avg_sq"},
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
}


@pytest.mark.parametrize("type_", get_args(InnerType))
def test_an_optimizer_keeps_what_its_type_says_in_the_shapes_of_the_parameters(type_):
    model = _Named()
    optimizer = build_inner_optimizer(model, type=type_, lr=0.05)
    model.set_gradients(0)
    optimizer.step()
    kept = set()
    for param in model.parameters():
        states = {name: tensor for name, tensor in optimizer.state.get(param, {}).items() if name != "step"}
        assert all(tensor.shape == param.shape for tensor in states.values())
        kept |= states.keys()
    assert kept == set(state_names(type_)) == STATES[type_]


def test_adopt_with_several_moments_numbers_them():
    assert state_names("adopt", (0.9, 0.99, 0.999)) == ("exp_avg_0", "exp_avg_1", "exp_avg_sq")
    assert state_names("adopt", (0.9, 0.99)) == state_names("adopt")


@pytest.mark.parametrize(
    ("type_", "settings"),
    [(type_, {}) for type_ in get_args(InnerType)] + [("adopt", {"betas": (0.9, 0.99, 0.999), "omegas": (0.3, 0.6)})],
)
def test_states_that_are_begun_beforehand_change_no_step(type_, settings):
    model, twin = _Named(), _Named()
    optimizer, begun = (build_inner_optimizer(each, type=type_, lr=0.05, **settings) for each in (model, twin))
    begin_states(begun)
    names = set(state_names(type_, settings.get("betas")))
    found = {name for state in begun.state.values() for name in state} - {"step"}
    assert found == names
    for step in range(3):
        for each in (model, twin):
            each.set_gradients(step)
        optimizer.step()
        before = {id(tensor) for state in begun.state.values() for tensor in state.values()}
        begin_states(begun)
        assert {id(tensor) for state in begun.state.values() for tensor in state.values()} == before, "kept"
        begun.step()
    for name, param in model.named_parameters():
        assert torch.equal(param, twin.get_parameter(name)), name
        theirs = begun.state.get(twin.get_parameter(name), {})
        assert theirs.keys() == optimizer.state.get(param, {}).keys()
        for key, tensor in optimizer.state.get(param, {}).items():
            assert torch.equal(tensor, theirs[key]), (name, key)
