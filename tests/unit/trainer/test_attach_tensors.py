# SPDX-License-Identifier: Apache-2.0
"""What a loop's model and optimizer have, by name and kind, in the places of the run's flat vector."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from isthmus.optim.outer import GRAD, PARAM
from isthmus.trainer.attach.tensors import LoopTensors, bare_optimizer, trained_parameters

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.body(values))


class Foreign(torch.optim.Optimizer):
    """Its constructor takes what its defaults do not name."""

    def __init__(self, groups: list[nn.Parameter], *, plan: object) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.plan = plan

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad
                self.state[param]["age"] = self.state[param].get("age", 0) + 1


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, rank: int = 0) -> LoopTensors:
    return LoopTensors(model, optimizer or torch.optim.AdamW(model.parameters()), rank)


def _stored(tensors: LoopTensors, kind: str = PARAM) -> Tensor:
    mailbox = torch.full((tensors.numel,), torch.nan)
    tensors.write(kind, mailbox, ())
    return mailbox


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().float().reshape(-1) for param in trained_parameters(model).values()])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
def test_names_are_those_of_the_model_without_its_wrappers(alone: None) -> None:
    model = Model()
    compiled, distributed = torch.compile(model), DistributedDataParallel(model)
    around = torch.compile(distributed)
    assert isinstance(compiled, nn.Module)
    for wrapped in (model, compiled, distributed, DistributedDataParallel(compiled), around):
        assert list(trained_parameters(wrapped)) == NAMES
    model.body[0] = torch.compile(model.body[0])
    assert list(trained_parameters(model)) == NAMES


def test_a_part_that_is_called_as_a_wrapper_calls_its_own_keeps_its_name(alone: None) -> None:
    model = Model()
    model.module = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.ones(2))
    for wrapped in (model, DistributedDataParallel(model)):
        assert {"module.weight", "weight"} < set(trained_parameters(wrapped))


def test_tied_weights_are_one_parameter_and_frozen_ones_none() -> None:
    model = Model()
    model.tied = nn.Linear(3, 2, bias=False)
    model.tied.weight = model.head.weight
    model.body[0].requires_grad_(False)
    tensors = _tensors(model)
    assert list(tensors.shapes) == NAMES[2:]
    before = model.body[0].weight.clone()
    values = torch.arange(float(tensors.numel))
    tensors.read(PARAM, values, (), keep=0.0)
    assert torch.equal(_flat(model), values)
    assert model.tied.weight.data_ptr() == model.head.weight.data_ptr()
    assert torch.equal(model.body[0].weight, before)


# ------------------------------------------------------------------------------------------------------------ values


def test_parameters_go_to_their_places_and_come_back_whole_in_parts_and_blended() -> None:
    model = Model()
    tensors, began = _tensors(model), _flat(model)
    assert torch.equal(_stored(tensors), began)
    values = torch.randn(tensors.numel)
    tensors.read(PARAM, values, (range(2, 7), range(20, 21)), keep=0.0)
    expected = began.clone()
    for part in (slice(2, 7), slice(20, 21)):
        expected[part] = values[part]
    assert torch.equal(_flat(model), expected)
    tensors.read(PARAM, values, (), keep=0.25)
    torch.testing.assert_close(_flat(model), 0.25 * expected + 0.75 * values)


def test_parameters_in_bf16_are_exchanged_in_fp32() -> None:
    model = Model().bfloat16()
    tensors = _tensors(model)
    assert torch.equal(_stored(tensors), _flat(model))
    values = torch.randn(tensors.numel)
    tensors.read(PARAM, values, (), keep=0.0)
    assert torch.equal(_flat(model), values.bfloat16().float())
    tensors.read(PARAM, torch.zeros(tensors.numel), (), keep=0.5)
    assert torch.equal(_flat(model), (0.5 * values.bfloat16()).float())


def test_a_parameter_without_a_gradient_counts_as_zero_and_gets_the_common_one() -> None:
    model = Model()
    tensors = _tensors(model)
    model.head.weight.grad = torch.ones(2, 3)
    assert torch.equal(_stored(tensors, GRAD), torch.cat([torch.zeros(tensors.numel - 6), torch.ones(6)]))
    values = torch.randn(tensors.numel)
    tensors.read(GRAD, values, (), keep=0.0)
    assert torch.equal(torch.cat([param.grad.reshape(-1) for param in model.parameters()]), values)


def test_only_the_first_process_writes_what_all_have_and_each_its_own_shards(alone: None) -> None:
    assert _stored(_tensors(Model(), rank=1)).isnan().all()
    model = Model()
    began = _flat(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert torch.equal(_stored(_tensors(model, rank=1)), began)


# ------------------------------------------------------------------------------------------------------------ states


def test_states_are_those_that_the_optimizer_keeps_for_each_parameter() -> None:
    model = Model()
    parameters = list(model.parameters())
    kept = {
        ("exp_avg", "exp_avg_sq"): torch.optim.AdamW(parameters, betas=(0.5, 0.6)),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): torch.optim.Adam(parameters, amsgrad=True),
        ("momentum_buffer",): torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        (): torch.optim.SGD(parameters, lr=0.1),
    }
    for states, optimizer in kept.items():
        assert _tensors(model, optimizer).states == states


def test_a_foreign_optimizer_trains_but_nothing_of_it_is_exchanged() -> None:
    model = Model()
    optimizer = Foreign(list(model.parameters()), plan="mine")
    tensors = _tensors(model, optimizer)
    assert tensors.states == ()
    tensors.set_steps(7)
    _train(model, optimizer)
    assert torch.equal(_stored(tensors), _flat(model))


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_states_that_come_before_the_first_step_are_those_that_it_goes_on_from(kind: str) -> None:
    giver, taker = Model(), Model()
    taker.load_state_dict(giver.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (giver, taker)]
    tensors = [_tensors(model, optimizer) for model, optimizer in zip((giver, taker), optimizers, strict=True)]
    for _ in range(3):
        _train(giver, optimizers[0])
        optimizers[0].zero_grad()
    for each in (PARAM, "exp_avg", "exp_avg_sq"):
        tensors[1].read(each, _stored(tensors[0], each), (), keep=0.0)
    tensors[1].set_steps(3)
    assert torch.equal(_stored(tensors[1], kind), _stored(tensors[0], kind))
    for model, optimizer in zip((giver, taker), optimizers, strict=True):
        _train(model, optimizer)
    assert torch.equal(_flat(giver), _flat(taker))


def test_a_parameter_that_the_optimizer_does_not_have_gets_no_state() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.body.parameters())
    tensors = _tensors(model, optimizer)
    tensors.read("exp_avg", torch.ones(tensors.numel), (), keep=0.0)
    assert torch.equal(_stored(tensors, "exp_avg"), torch.cat([torch.ones(tensors.numel - 6), torch.zeros(6)]))
    optimizer.state_dict()  # which takes no state of a stranger


def test_an_optimizer_is_found_inside_its_wrappers() -> None:
    class Wrapper(torch.optim.Optimizer):
        """As accelerate has one: its hooks never run."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD(Model().parameters(), lr=0.1)
    assert bare_optimizer(Wrapper(Wrapper(inner))) is inner


# ----------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_exchanged_is_refused_by_name(alone: None) -> None:
    turned = Model()
    turned.head.weight = nn.Parameter(torch.ones(3, 2).t())
    with pytest.raises(ValueError, match=r"'head\.weight' does not lie in memory .* make it contiguous"):
        _tensors(turned)
    cut = Model()
    mesh = init_device_mesh("cpu", (1,))
    cut.head.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"'head\.weight' is placed as .* not cut along its first dimension"):
        _tensors(cut)
    with pytest.raises(ValueError, match="no parameter that wants a gradient"):
        _tensors(Model().requires_grad_(False), torch.optim.SGD(Model().parameters()))
    with pytest.raises(ValueError, match="trains no parameter of this model"):
        _tensors(Model(), torch.optim.SGD(Model().parameters()))
