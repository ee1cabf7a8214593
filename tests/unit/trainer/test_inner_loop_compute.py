# SPDX-License-Identifier: Apache-2.0
"""How an inner step is computed: begun before the one before it is read, in bf16, with activations computed again."""

from collections import Counter
from typing import get_args

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.optim.inner import can_skip
from isthmus.trainer.config.job import ActivationCheckpointing, OptimizerJob
from isthmus.trainer.errors import TrainingFault
from isthmus.trainer.workers.blocks import prepare_blocks
from isthmus.trainer.workers.inner_loop import InnerLoop
from tests.unit.trainer.test_inner_loop import JOB, MODEL, TABLE, TRAIN, VALIDATION

BF16_TOLERANCE = 0.02
"""Of each step's loss, relative: trainer/README.md states it."""


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def make(mesh):
    loops = []

    def make(weights=None, **changes):
        job = msgspec.structs.replace(JOB, **changes)
        loops.append(InnerLoop(job, mesh=mesh, train=TRAIN, validation=VALIDATION))
        loops[-1].load(MODEL.initial_parameters(0) if weights is None else weights)
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def stored(loop, kind="param"):
    mailbox = torch.full((TABLE.numel,), torch.nan)
    loop.store(mailbox, kind=kind)
    return mailbox


@pytest.mark.parametrize("type_", ["adamw", "sgd", "adopt", "muon"])
def test_steps_that_are_read_late_are_the_same_bits(make, type_):
    optimizer = OptimizerJob(type=type_, lr=1e-2)
    late, plain = make(optimizer=optimizer), make(optimizer=optimizer)
    begun = [late.begin_step(range(4 * step, 4 * step + 4), step) for step in range(1, 4)]
    at_once = [plain.step(range(4 * step, 4 * step + 4), step) for step in range(1, 4)]
    assert all(step.is_ready for step in begun)
    assert [step.result().loss for step in begun] == [step.loss for step in at_once]
    assert torch.equal(stored(late), stored(plain))


@pytest.mark.parametrize("type_", ["adamw", "sgd"])
def test_the_device_itself_leaves_out_a_step_that_is_no_number(make, type_):
    weights = MODEL.initial_parameters(0)
    weights[5] = torch.inf
    loop = make(weights, optimizer=OptimizerJob(type=type_, lr=1e-2))
    assert can_skip(loop._optimizer)
    first, second = (loop.begin_step(range(4), step) for step in (3, 4))  # nobody has read the first one
    assert torch.equal(stored(loop), weights)
    with pytest.raises(TrainingFault, match="inner step 3: loss nan"):
        first.result()
    with pytest.raises(TrainingFault, match="inner step 4"):
        second.result()


@pytest.mark.parametrize("type_", ["adopt", "muon"])
def test_an_optimizer_that_cannot_leave_out_a_step_is_asked_when_the_numbers_are_read(make, type_):
    weights = MODEL.initial_parameters(0)
    weights[5] = torch.inf
    loop = make(weights, optimizer=OptimizerJob(type=type_, lr=1e-2))
    with pytest.raises(TrainingFault, match="inner step 3: loss nan"):
        loop.begin_step(range(4), 3)
    assert torch.equal(stored(loop), weights)


def test_text_that_was_made_ready_changes_no_step(make):
    ahead, plain = make(), make()
    for step in range(1, 4):
        ahead.prefetch(range(4 * step, 4 * step + 4))
        assert (
            ahead.step(range(4 * step, 4 * step + 4), step).loss == plain.step(range(4 * step, 4 * step + 4), step).loss
        )
    assert torch.equal(stored(ahead), stored(plain))


def test_the_parts_of_a_step_are_all_of_it(make):
    result = make().step(range(6), 1)
    parts = result.parts
    assert min(parts.passes_s, parts.clip_s, parts.update_s, parts.data_s) > 0.0
    assert parts.data_s + parts.passes_s + parts.clip_s + parts.update_s == pytest.approx(result.seconds)


def test_training_in_bf16_follows_training_in_fp32(make):
    exact, rounded = make(), make(precision="bf16")
    losses = [
        (exact.step(indices, step).loss, rounded.step(indices, step).loss)
        for step in range(1, 31)
        for indices in [range(8 * step, 8 * step + 8)]
    ]
    assert losses[-1][0] < 0.8 * losses[0][0], "it learns"
    assert max(abs(other / one - 1.0) for one, other in losses) < BF16_TOLERANCE
    assert any(one != other for one, other in losses)


def test_micro_batches_in_bf16_add_up_in_fp32(make):
    whole, parts = (make(precision="bf16", micro_batch=size) for size in (6, 1))
    for loop in (whole, parts):
        loop.backward(range(6), 1)
    one, other = stored(whole, "grad"), stored(parts, "grad")
    assert (one - other).norm() < 0.02 * one.norm()


@pytest.mark.parametrize("keep", get_args(ActivationCheckpointing))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_computed_again_is_the_same(make, keep, precision):
    plain, other = make(precision=precision), make(precision=precision, activation_checkpointing=keep)
    for step in (1, 2):
        one, again = plain.step(range(5), step), other.step(range(5), step)
        assert again.loss == pytest.approx(one.loss, rel=1e-6)
    torch.testing.assert_close(stored(other), stored(plain), rtol=1e-4, atol=1e-6)


class Count(TorchDispatchMode):
    """How often which operation was computed."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def test_selective_computes_all_but_products_twice_and_full_these_too():
    times = {}
    for keep in get_args(ActivationCheckpointing):
        block = MODEL.build().to_empty(device="cpu").blocks[0]
        nn.utils.vector_to_parameters(
            torch.full((sum(p.numel() for p in block.parameters()),), 0.1), block.parameters()
        )
        prepare_blocks(nn.ModuleList([block]), keep=keep, is_compiled=False)
        with Count() as count:
            block(torch.randn(3, 8, 8, requires_grad=True)).sum().backward()
        times[keep] = [count.times[op] for op in (torch.ops.aten.mm, torch.ops.aten.rsqrt)]
    products, norms = times["none"]
    assert times["selective"] == [products, 2 * norms]
    assert times["full"][0] > products
    assert times["full"][1] == 2 * norms
