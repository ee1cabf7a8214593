# SPDX-License-Identifier: Apache-2.0
"""DeMo (arXiv:2411.19870):

m ← β m + g;   q = TopK(DCT(m));   m ← m - IDCT(q);   θ ← θ - η sign(IDCT(mean over the senders of q))
"""

import dataclasses
import math

import pytest
import torch

from isthmus.optim import (
    GRAD,
    PARAM,
    Contribution,
    FragmentKey,
    FragmentTable,
    Op,
    Result,
    Round,
    RunFacts,
    Work,
    build_outer,
)
from isthmus.optim.blocks import SHAPES, block_order, shapes_of
from isthmus.optim.demo import DeMo
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.simulate import State, simulate
from tests.unit.optim import lab
from tests.unit.optim.one_round import after, same, spare, tensors_of

TABLE = FragmentTable.from_named_shapes([("norm", (64,)), ("up", (128, 64)), ("odd", (10, 7))])
NUMEL = TABLE.numel
KEY = FragmentKey(kind="grad", index=0)
WORKERS = ("ash", "birch", "cedar")
INITIAL = torch.sin(torch.arange(NUMEL) * 0.7)
ORDER = block_order(shapes_of(TABLE.whole()))
LR = 0.01


class Training:
    """Plain SGD with weight decay, for the gradients of lab.py or another."""

    def __init__(self, gradient=lab.gradient, *, weight_decay=0.0, rows=6):
        self.gradient, self.weight_decay = gradient, weight_decay
        self.tensors = {PARAM: torch.zeros(rows, NUMEL), GRAD: torch.zeros(rows, NUMEL)}
        self.names = {}

    def begin(self, row, worker):
        self.names[row] = worker

    def backward(self, rows, inner_steps):
        for row, inner_step in zip(rows, inner_steps, strict=True):
            self.tensors[GRAD][row] = self.gradient(self.names[row], inner_step, self.tensors[PARAM][row])

    def update(self, rows, inner_steps):
        for row in rows:
            param = self.tensors[PARAM][row]
            param.mul_(1.0 - LR * self.weight_decay).sub_(LR * self.tensors[GRAD][row])


def largest(run, topk):
    places = run.abs().topk(math.ceil(topk * len(run) / 4096)).indices
    return torch.zeros_like(run).index_copy_(0, places, run[places])


def quantised(run, topk):
    kept = largest(run, topk)
    step = kept.abs().max() / 16.0
    return (kept / step).round() * step


def demo(**settings):
    """As few coefficients from the first step on as later, as in the public code."""
    return DeMo(**{"warm_up_steps": 0} | settings)


def run(outer, num_inner_steps=12, workers=WORKERS, **settings):
    settings = {"wire": lab.TopKWire(quantised), "workload": Training(), **settings}
    return simulate(outer, table=TABLE, initial=INITIAL, workers=workers, num_inner_steps=num_inner_steps, **settings)


def momentum_of(trajectory, worker):
    return trajectory.states[worker][KEY].private[MOMENTUM]


# -------------------------------------------------------------------------------------------- the paper's equations
def cosines(size):
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * index[:, None] * (2.0 * index + 1.0) / (2.0 * size)) * math.sqrt(2.0 / size)
    matrix[0] /= math.sqrt(2.0)
    return matrix


def as_blocks(function, flat):
    """Transforms each block of the three tensors, in double precision: [64, 64] twice, [1, 64], [10, 7]."""
    result = torch.empty_like(flat)
    for spec in TABLE.specs:
        matrix = flat[spec.offset : spec.stop].view(-1, spec.shape[-1])
        for top in range(0, len(matrix), 64):
            block = matrix[top : top + 64]
            start = spec.offset + top * spec.shape[-1]
            transformed = function(block, cosines(len(block)), cosines(block.shape[1]))
            result[start : start + block.numel()] = transformed.reshape(-1)
    return result


def forward(flat):
    return as_blocks(lambda block, down, across: torch.einsum("ui,ij,vj->uv", down, block, across), flat)


def backward(flat):
    return as_blocks(lambda block, down, across: torch.einsum("ui,uv,vj->ij", down, block, across), flat)


def direct_demo(decay, topk, num_inner_steps, weight_decay=0.0):
    """The paper's algorithm without sign, its momentum in space rather than frequencies, in double precision."""
    up = TABLE.specs[1]
    is_up = torch.zeros(NUMEL, dtype=torch.bool)
    is_up[up.offset : up.stop] = True
    first, second = (torch.arange(up.offset + half, up.offset + half + 4096) for half in (0, 4096))
    runs = [first, second, (~is_up).nonzero().view(-1)]
    value = INITIAL.double()
    momenta = [torch.zeros_like(value) for _ in WORKERS]
    for step in range(1, num_inner_steps + 1):
        total, senders = torch.zeros_like(value), torch.zeros_like(value)
        for worker, momentum in zip(WORKERS, momenta, strict=True):
            momentum.mul_(decay).add_(lab.gradient(worker, step, value))
            coefficients, sent = forward(momentum), torch.zeros_like(value)
            for places in runs:
                sent[places] = largest(coefficients[places], topk)
            momentum -= backward(sent)
            total += sent
            senders += sent != 0.0
        value = value * (1.0 - LR * weight_decay) - LR * backward(total / senders.clamp(min=1.0))
    return value


@pytest.mark.parametrize(("topk", "decay"), [(32, 0.999), (500, 0.8)])
def test_it_follows_a_direct_implementation(topk, decay):
    trajectory = run(
        demo(topk=topk, decay=decay, sign=False), wire=lab.TopKWire(largest), workload=Training(weight_decay=0.5)
    )
    expected = direct_demo(decay, topk, 12, weight_decay=0.5)
    assert (expected - INITIAL).abs().max() > 0.05
    for value in trajectory.values.values():
        torch.testing.assert_close(value.double(), expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("decay", [0.0, 0.999])
def test_sending_everything_without_sign_is_sgd_on_the_mean_gradient(decay):
    value = INITIAL.double()
    for step in range(1, 13):
        value -= LR * sum(lab.gradient(worker, step, value) for worker in WORKERS) / len(WORKERS)
    for local in run(demo(topk=4096, decay=decay, sign=False)).values.values():
        torch.testing.assert_close(local.double(), value, rtol=0.0, atol=2e-6)


def test_sending_everything_divides_by_all_who_sent_zeros_as_well():
    def gradient(worker, _inner_step, value):
        return torch.full_like(value, 3.0 if worker == "ash" else 0.0)

    trajectory = run(demo(topk=4096, sign=False), 1, workload=Training(gradient))
    torch.testing.assert_close(trajectory.values["ash"], INITIAL - LR, rtol=0.0, atol=1e-6)


def test_sending_everything_alone_is_sign_sgd():
    """Of gradients that are not near 0, where the transform's rounding would decide."""

    def gradient(worker, inner_step, value):
        wave = lab.gradient(worker, inner_step, value)
        return wave + 0.1 * torch.where(wave < 0.0, -1.0, 1.0)

    value = INITIAL
    for step in range(1, 13):
        sign = gradient("birch", step, value).sign()
        value = value * (1.0 - LR * 0.1) - LR * sign
    trajectory = run(demo(topk=4096), workers=("birch",), workload=Training(gradient, weight_decay=0.1))
    assert torch.equal(trajectory.values["birch"], value)


def test_with_sign_every_element_moves_by_the_learning_rate():
    trajectory = run(demo(), 1)
    moved = (INITIAL - trajectory.values["ash"]) / LR
    torch.testing.assert_close(moved.abs(), torch.ones(NUMEL), rtol=0.0, atol=1e-4)
    unsigned = (INITIAL - run(demo(sign=False), 1).values["ash"]) / LR
    assert ((moved > 0.0) == (unsigned > 0.0)).float().mean() > 0.999


@pytest.mark.parametrize("aborted", [(), (3, 4, 9)])
def test_without_decay_no_gradient_is_lost_to_quantisation_or_aborted_rounds(aborted):
    """A constant gradient: what was sent and what is left are together its multiple."""
    slopes = {worker: torch.sin(torch.arange(NUMEL) * (n + 1.3)) for n, worker in enumerate(WORKERS)}
    wire = lab.TopKWire(quantised)
    trajectory = run(
        demo(decay=1.0),
        wire=wire,
        workload=Training(lambda worker, _inner_step, _value: slopes[worker]),
        aborted=lambda round_: round_.inner_step in aborted,
    )
    assert len(trajectory.dropped) == len(aborted)
    for worker in WORKERS:
        left = momentum_of(trajectory, worker)
        in_blocks = (wire.sent[worker] + left).float()
        total = backward(ORDER.from_blocks(in_blocks, out=torch.empty(NUMEL)).double())
        torch.testing.assert_close(total.float(), 12 * slopes[worker], rtol=0.0, atol=1e-4)
        assert left.abs().max() > 1.0


def test_after_an_aborted_round_nobody_moves_and_the_momentum_holds_the_gradient():
    before = run(demo(decay=0.9), 4)
    later = run(demo(decay=0.9), 5, aborted=lambda round_: round_.inner_step == 5)
    for worker in WORKERS:
        assert torch.equal(later.values[worker], before.values[worker])
        gradient = forward(lab.gradient(worker, 5, before.values[worker]).double())
        expected = 0.9 * momentum_of(before, worker) + ORDER.to_blocks(gradient.float(), out=torch.empty(NUMEL))
        torch.testing.assert_close(momentum_of(later, worker), expected, rtol=0.0, atol=1e-5)


def test_an_aborted_round_still_decays_the_weights():
    trajectory = run(demo(), 1, workload=Training(weight_decay=0.5), aborted=lambda _round: True)
    torch.testing.assert_close(trajectory.values["ash"], INITIAL * (1.0 - LR * 0.5))


# ------------------------------------------------------------------------------------------------------ membership
def test_parameters_are_equal_bit_for_bit_whoever_leaves_or_fails_and_a_joiners_from_the_next_mean():
    """Nothing calls a worker back from one step to the next: the workers' own parameters are what must not part."""
    apart = {}

    def compare(step, trajectory):
        first = trajectory.values["ash"]
        apart[step] = {name for name, value in trajectory.values.items() if not torch.equal(value, first)}

    trajectory = run(
        demo(topk=100, resync_steps=6),
        20,
        joins={4: ["elm"], 11: ["fir"]},
        leaves={7: ["birch"], 15: ["elm"]},
        aborted=lambda round_: round_.inner_step in (5, 15),
        weigh=lambda worker, _work: {"ash": 2.5, "elm": 0.3}.get(worker, 1.0),
        workload=Training(weight_decay=0.1),
        on_step=compare,
    )
    lab.assert_parity(trajectory)
    joiners = {4: {"elm"}, 5: {"elm"}, 11: {"fir"}}
    assert apart == {step: joiners.get(step, set()) for step in range(21)}
    assert trajectory.committed[-1].members == ("ash", "cedar", "fir")
    assert not torch.equal(trajectory.values["ash"], INITIAL)
    assert not torch.equal(momentum_of(trajectory, "ash"), momentum_of(trajectory, "cedar"))


def test_a_joiner_begins_at_the_last_mean_of_the_parameters_and_without_momentum():
    trajectory = run(demo(resync_steps=2), 3, joins={3: ["elm"]})
    assert momentum_of(trajectory, "ash").any()
    assert not momentum_of(trajectory, "elm").any()
    after_one_step = run(demo(), 1).values["ash"]  # the second step's gradient was computed there
    torch.testing.assert_close(trajectory.values["elm"], after_one_step, rtol=0.0, atol=1e-6)
    assert not torch.equal(trajectory.values["elm"], trajectory.values["ash"])


# --------------------------------------------------------------------------------------------------- one round
ROUND = Round(fragment=KEY, op=Op.GATHER, inner_step=1, codec="topk:32", keeps_value=True)
WORK = Work(inner_steps=1, samples=1.0)


def mixed(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_state():
    return State(shared={}, private={MOMENTUM: mixed(NUMEL), SHAPES: shapes_of(TABLE.whole(GRAD))})


def result_of(rows, weights=None):
    names = tuple(f"w{index}" for index in range(len(rows)))
    weights = weights or (1.0,) * len(rows)
    return Result(value=rows, members=names, weight_sum=sum(weights), weights=weights)


def contribution(weight=1.0):
    payload = mixed(NUMEL, seed=8)
    return Contribution(payload=payload, weight=weight, read_delivered=lambda out: out.copy_(payload).mul_(0.75))


def test_each_coefficient_is_averaged_over_those_who_sent_it():
    rows = torch.zeros(3, NUMEL)
    rows[:, 0] = torch.tensor([1.0, 2.0, 6.0])
    rows[:, 1] = torch.tensor([0.0, 2.0, 6.0])
    rows[:, 2] = torch.tensor([0.0, 2.0, 0.0])
    for weights, expected in ((None, [3.0, 4.0, 2.0]), ((2.0, 1.0, 1.0), [2.5, 4.0, 2.0])):
        direction = after(demo(sign=False), ROUND, result_of(rows, weights), some_state()).target
        coefficients = ORDER.to_blocks(forward(direction.double()).float(), out=torch.empty(NUMEL))
        assert coefficients[:3].tolist() == pytest.approx(expected, rel=1e-5)
        assert coefficients[3:].abs().max() < 1e-5


def test_what_did_not_arrive_stays_in_the_momentum():
    mine = contribution()
    settled = after(demo(), ROUND, result_of(mixed(2, NUMEL)), some_state(), mine).state
    torch.testing.assert_close(settled.private[MOMENTUM], mine.payload * 0.25)


def test_who_is_no_member_keeps_all_of_its_momentum():
    state, result = some_state(), result_of(mixed(2, NUMEL))
    silent = after(demo(), ROUND, result, state)
    assert torch.equal(silent.state.private[MOMENTUM], state.private[MOMENTUM])
    mine = contribution(weight=0.0)
    weightless = after(demo(), ROUND, result, state, mine)
    assert torch.equal(weightless.state.private[MOMENTUM], mine.payload)
    assert torch.equal(weightless.target, silent.target)


def test_who_gave_nothing_to_an_aborted_round_stands_still_too():
    state = some_state()
    settled = after(demo(), ROUND, None, state)
    assert torch.equal(settled.state.private[MOMENTUM], state.private[MOMENTUM])
    assert not settled.target.any()
    assert settled.keep == 0.0


def test_nothing_writes_to_the_state_or_the_result():
    outer, state = demo(), some_state()
    result, mine, gradient = result_of(mixed(3, NUMEL)), contribution(), mixed(NUMEL, seed=5)
    tensors = [*tensors_of(state), result.value, mine.payload, gradient]
    kept = [tensor.clone() for tensor in tensors]
    outer.emit(ROUND, gradient, *state, WORK, out=torch.empty(NUMEL))
    after(outer, ROUND, result, state, mine)
    after(outer, ROUND, None, state, mine)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@pytest.mark.parametrize("is_aborted", [False, True])
def test_every_tensor_of_the_recycled_state_is_set(is_aborted):
    outer, state, mine = demo(), some_state(), contribution()
    result = None if is_aborted else result_of(mixed(3, NUMEL))
    fresh, out = after(outer, ROUND, result, state, mine), spare(state)
    recycled = after(outer, ROUND, result, state, mine, out=out)
    assert recycled.state.private is out.private
    assert recycled.state.shared is state.shared
    assert torch.equal(recycled.target, fresh.target)
    assert same(recycled.state, fresh.state)
    with pytest.raises(ValueError, match="never writes"):
        after(outer, ROUND, result, state, mine, out=state)


def test_emit_may_write_over_the_gradient():
    state, gradient = some_state(), mixed(NUMEL, seed=5)
    coefficients = ORDER.to_blocks(forward(gradient.double()).float(), out=torch.empty(NUMEL))
    over = demo(decay=0.5).emit(ROUND, gradient, *state, WORK, out=gradient)
    assert over.payload is gradient
    assert over.weight == 1.0
    torch.testing.assert_close(over.payload, coefficients + 0.5 * state.private[MOMENTUM], rtol=0.0, atol=1e-5)


def test_buffers_of_another_size_are_refused():
    state, right = some_state(), torch.zeros(NUMEL)
    for value, out in ((right[1:], right.clone()), (right, right[1:].clone()), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            demo().emit(ROUND, value, *state, WORK, out=out)
    with pytest.raises(ValueError, match="initial value"):
        demo().init(TABLE.whole(GRAD), right[1:])


# ------------------------------------------------------------------------------------------------------- settings
def test_everybody_sends_to_everybody_in_every_step():
    outer = demo()
    assert outer.plan(0) == ()
    for step in (1, 2, 100):
        *means, round_ = outer.plan(step)
        assert means == [Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=step, codec="raw")] * (step == 100)
        assert round_ == Round(fragment=KEY, op=Op.GATHER, inner_step=step, codec="topk:32", keeps_value=True)
    assert demo(topk=4096).plan(1)[0].codec == "raw"
    assert outer.fragments(TABLE) == (TABLE.whole(GRAD), TABLE.whole())


def test_the_first_steps_send_16_times_as_much():
    codecs = {step: demo(topk=100, warm_up_steps=3).plan(step)[0].codec for step in (1, 3, 4)}
    assert codecs == {1: "topk:1600", 3: "topk:1600", 4: "topk:100"}
    assert demo(topk=1000, warm_up_steps=1).plan(1)[0].codec == "raw"
    assert {step: DeMo().plan(step)[-1].codec for step in (160, 161)} == {160: "topk:512", 161: "topk:32"}


def test_where_the_first_steps_send_all_their_zeros_count_as_well():
    few = run(demo(topk=256, warm_up_steps=12, sign=False), 12)
    everything = run(demo(topk=4096, sign=False), 12)
    assert torch.equal(few.values["ash"], everything.values["ash"])


def test_defaults_are_those_of_the_public_code():
    assert build_outer("demo") == DeMo(decay=0.999, topk=32, sign=True, resync_steps=50, warm_up_steps=160)


def test_any_other_inner_optimizer_than_plain_sgd_is_refused():
    facts = RunFacts(num_peers=2, outer_steps=10, peak_lr=1e-3)
    for known in (None, facts, dataclasses.replace(facts, inner_type="sgd")):
        assert demo().fitted(TABLE, known) == demo()
    with pytest.raises(ValueError, match="must be plain SGD"):
        demo().fitted(TABLE, dataclasses.replace(facts, inner_type="adamw"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk", 0),
        ("topk", 4097),
        ("resync_steps", 0),
        ("warm_up_steps", -1),
        ("decay", -0.1),
        ("decay", 1.1),
        ("decay", float("nan")),
    ],
)
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        DeMo(**{name: value})
