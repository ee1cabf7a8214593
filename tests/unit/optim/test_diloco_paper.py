# SPDX-License-Identifier: Apache-2.0
"""DiLoCo (arXiv:2311.08105), algorithm 1:

Δ = 1/k Σ_i (θ^(t-1) - θ_i^(t));   θ^(t) ← OuterOpt(θ^(t-1), Δ)
"""

import itertools

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, FragmentTable, Op, Outcome, Result, Round, Work, default_outer_lr
from isthmus.optim.diloco import MOMENTUM, effective_number, warm_up_steps
from isthmus.optim.outer import digest_of, empty_like
from isthmus.optim.simulate import simulate
from isthmus.optim.workload import OneByOne

TABLE = FragmentTable.from_named_shapes([("a", (7, 3)), ("b", (11,))])
NUMEL = TABLE.numel
WORKERS = ("ash", "birch", "cedar")
INITIAL = torch.linspace(-1.0, 1.0, NUMEL)
ROUND = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=500)


def gradient(worker: str, inner_step: int, value: torch.Tensor) -> torch.Tensor:
    """Of a quadratic that differs between workers in both centre and curvature, and moves with the step."""
    number = 1.0 + ord(worker[0]) - ord("a")
    index = torch.arange(NUMEL, dtype=torch.float32)
    centre = torch.sin(index * number + 0.1 * inner_step)
    return (0.5 + 0.2 * number) * (value - centre)


def sgd_step(worker: str, inner_step: int, value: torch.Tensor) -> None:
    value -= 0.05 * gradient(worker, inner_step, value)


def run(outer, num_inner_steps, **settings):
    return simulate(
        outer,
        table=TABLE,
        initial=INITIAL,
        workers=WORKERS,
        workload=OneByOne(sgd_step, rows=6, numel=NUMEL),
        num_inner_steps=num_inner_steps,
        **settings,
    )


def direct_diloco(lr, momentum, boundaries, weights=(1.0, 1.0, 1.0)):
    """The paper's algorithm in double precision, sharing nothing with the package."""
    anchor, velocity = INITIAL.double(), torch.zeros(NUMEL, dtype=torch.float64)
    anchors, step = [], 0
    locals_ = [anchor.clone() for _ in WORKERS]
    for boundary in boundaries:
        while step < boundary:
            step += 1
            for worker, value in zip(WORKERS, locals_, strict=True):
                value -= 0.05 * gradient(worker, step, value)
        delta = sum(w * (anchor - value) for w, value in zip(weights, locals_, strict=True)) / sum(weights)
        velocity = momentum * velocity + delta
        anchor = anchor - lr * (delta + momentum * velocity)
        anchors.append(anchor)
        locals_ = [anchor.clone() for _ in WORKERS]
    return anchors


def test_workers_differ_before_they_are_averaged():
    trajectory = run(DiLoCo(inner_steps=5), 4)
    values = list(trajectory.values.values())
    assert (values[0] - values[1]).abs().max() > 0.01
    assert (values[1] - values[2]).abs().max() > 0.01


def test_lr_one_without_momentum_is_the_mean_of_the_workers():
    before = run(DiLoCo(inner_steps=5), 4).values
    for worker, value in before.items():
        sgd_step(worker, 5, value)
    after = run(DiLoCo(lr=1.0, momentum=0.0, inner_steps=5), 5)
    torch.testing.assert_close(after.committed[0].shared[ANCHOR], torch.stack(list(before.values())).mean(dim=0))


def test_sgd_with_one_inner_step_is_data_parallel():
    value = INITIAL.double()
    for step in range(1, 21):
        value -= 0.05 * sum(gradient(worker, step, value) for worker in WORKERS) / len(WORKERS)
    trajectory = run(DiLoCo(lr=1.0, momentum=0.0, inner_steps=1), 20)
    for local in trajectory.values.values():
        torch.testing.assert_close(local.double(), value, rtol=1e-5, atol=1e-6)


def test_it_follows_a_direct_implementation():
    trajectory = run(DiLoCo(lr=0.7, momentum=0.9, inner_steps=4), 24)
    expected = direct_diloco(0.7, 0.9, [4, 8, 12, 16, 20, 24])
    assert len(trajectory.committed) == len(expected)
    for committed, anchor in zip(trajectory.committed, expected, strict=True):
        torch.testing.assert_close(committed.shared[ANCHOR].double(), anchor, rtol=1e-4, atol=1e-5)


def test_weights_weigh_the_mean():
    weights = {"ash": 3.0, "birch": 1.0, "cedar": 0.5}
    trajectory = run(DiLoCo(lr=0.7, momentum=0.9, inner_steps=4), 12, weigh=lambda worker, _work: weights[worker])
    expected = direct_diloco(0.7, 0.9, [4, 8, 12], weights=(3.0, 1.0, 0.5))
    torch.testing.assert_close(trajectory.committed[-1].shared[ANCHOR].double(), expected[-1], rtol=1e-4, atol=1e-5)


def test_a_worker_of_weight_nought_changes_nothing():
    trajectory = run(
        DiLoCo(lr=0.7, momentum=0.9, inner_steps=4), 12, weigh=lambda worker, _work: float(worker != "cedar")
    )
    expected = direct_diloco(0.7, 0.9, [4, 8, 12], weights=(1.0, 1.0, 0.0))
    assert trajectory.committed[0].members == ("ash", "birch")
    torch.testing.assert_close(trajectory.committed[-1].shared[ANCHOR].double(), expected[-1], rtol=1e-4, atol=1e-5)


def test_two_aborted_rounds_are_one_round_of_three_times_the_steps():
    aborted = run(DiLoCo(lr=0.7, momentum=0.9, inner_steps=4), 24, aborted=lambda round_: round_.inner_step in (12, 16))
    assert [round_.inner_step for round_ in aborted.dropped] == [12, 16]
    expected = direct_diloco(0.7, 0.9, [4, 8, 20, 24])
    for committed, anchor in zip(aborted.committed, expected, strict=True):
        torch.testing.assert_close(committed.shared[ANCHOR].double(), anchor, rtol=1e-4, atol=1e-5)


def test_an_aborted_round_leaves_state_and_workers_as_they_were():
    outer = DiLoCo(inner_steps=4)
    without = run(outer, 7)
    aborted = run(outer, 8, aborted=lambda round_: round_.inner_step == 8)
    for worker, value in without.values.items():
        sgd_step(worker, 8, value)
        assert torch.equal(aborted.values[worker], value)
        states = [next(iter(t.states[worker].values())) for t in (without, aborted)]
        assert digest_of(states[0].shared) == digest_of(states[1].shared)


def _shared_and_result(numel: int = NUMEL):
    generator = torch.Generator().manual_seed(3)
    anchor, momentum, value = (torch.randn(numel, generator=generator) for _ in range(3))
    return {ANCHOR: anchor, MOMENTUM: momentum}, Result(value=value, members=WORKERS, weight_sum=3.0)


ROUND = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=500)
WORK = Work(inner_steps=1, samples=1.0)


def test_step_is_pure_and_can_be_thrown_away():
    outer = DiLoCo()
    shared, result = _shared_and_result()
    digest, value = digest_of(shared), result.value.clone()
    thrown_away = outer.step(ROUND, result, shared)
    assert digest_of(thrown_away) != digest
    assert digest_of(shared) == digest
    assert torch.equal(result.value, value)
    assert digest_of(outer.step(ROUND, result, shared)) == digest_of(thrown_away)


def test_step_writes_into_the_recycled_state_and_the_workers_go_to_its_anchor():
    outer = DiLoCo()
    shared, result = _shared_and_result()
    fresh = outer.step(ROUND, result, shared)
    out = empty_like(shared)
    assert outer.step(ROUND, result, shared, out=out) is out
    assert digest_of(out) == digest_of(fresh)
    settled = outer.settle(
        Outcome(round_=ROUND, result=result, contribution=None, before=shared, after=out, private={}), out={}
    )
    assert settled.target is out[ANCHOR]
    assert settled.keep == 0.0


def test_the_averaged_gradients_memory_can_become_the_momentum():
    outer = DiLoCo()
    shared, result = _shared_and_result()
    expected, digest = digest_of(outer.step(ROUND, result, shared)), digest_of(shared)
    out = {ANCHOR: torch.empty(NUMEL), MOMENTUM: result.value}
    assert digest_of(outer.step(ROUND, result, shared, out=out)) == expected
    assert digest_of(shared) == digest


@pytest.mark.parametrize("name", [ANCHOR, MOMENTUM])
def test_step_refuses_to_write_over_the_state_it_is_given(name):
    shared, result = _shared_and_result()
    with pytest.raises(ValueError, match="never writes"):
        DiLoCo().step(ROUND, result, shared, out={**empty_like(shared), name: shared[name]})


def test_emit_may_write_over_the_value():
    outer = DiLoCo()
    shared, _ = _shared_and_result()
    value = torch.linspace(0.0, 1.0, NUMEL)
    expected = shared[ANCHOR] - value
    digest = digest_of(shared)
    separate = outer.emit(ROUND, value.clone(), shared, {}, WORK, out=torch.empty(NUMEL))
    over = outer.emit(ROUND, value, shared, {}, WORK, out=value)
    assert over.payload is value
    assert torch.equal(over.payload, expected)
    assert torch.equal(separate.payload, expected)
    assert over.weight == 1.0
    assert digest_of(shared) == digest


def test_init_owns_its_memory():
    value = torch.ones(NUMEL)
    shared = DiLoCo().init(TABLE.whole(), value)
    value.zero_()
    assert shared[ANCHOR].sum() == NUMEL
    assert shared[MOMENTUM].count_nonzero() == 0
    assert not DiLoCo().init_private(TABLE.whole(), shared, value)


def test_buffers_of_another_size_or_type_are_refused():
    outer = DiLoCo()
    shared, _ = _shared_and_result()
    right = torch.zeros(NUMEL)
    for value, out in ((torch.zeros(3), right), (right, torch.zeros(3)), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            outer.emit(ROUND, value, shared, {}, WORK, out=out)
    with pytest.raises(ValueError, match="initial value"):
        outer.init(TABLE.whole(), torch.zeros(3))


def test_the_plan_is_a_pure_function_of_the_global_step():
    outer, twin = DiLoCo(inner_steps=5), DiLoCo(inner_steps=5)
    forward = [outer.plan(step) for step in range(21)]
    backward = [twin.plan(step) for step in reversed(range(21))]
    assert forward == backward[::-1]
    assert [step for step, rounds in enumerate(forward) if rounds] == [5, 10, 15, 20]
    assert forward[5] == (Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=5, delay=0),)
    assert forward[5][0].due_step == 5


def test_one_fragment_holds_the_whole_vector():
    assert DiLoCo().fragments(TABLE) == (TABLE.whole(),)


@pytest.mark.parametrize(("num_peers", "lr"), [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (6, 0.7), (8, 0.8), (100, 0.8)])
def test_default_outer_lr_follows_the_scaling_laws(num_peers, lr):
    assert default_outer_lr(num_peers) == pytest.approx(lr, rel=1e-15)


def test_no_peers_have_no_learning_rate():
    with pytest.raises(ValueError, match="at least 1"):
        default_outer_lr(0)


WARM = warm_up_steps(DiLoCo().inner_steps)


def result_of(*weights):
    members = WORKERS[: len(weights)]
    return Result(value=torch.ones(NUMEL), members=members, weight_sum=sum(weights), weights=weights)


def round_at(inner_step):
    return Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=inner_step)


@pytest.mark.parametrize("weights", [(8.0,), (8.0, 8.0), (8.0, 8.0, 8.0)])
def test_without_a_rate_of_its_own_a_round_takes_the_best_one_for_those_who_gave_to_it(weights):
    shared = DiLoCo().init(TABLE.whole(), INITIAL)
    best = default_outer_lr(len(weights))
    for given, momentum in ({}, 0.7), ({"momentum": 0.9}, 0.9):
        stepped = DiLoCo(**given).step(round_at(WARM), result_of(*weights), shared)
        expected = DiLoCo(lr=best, momentum=momentum).step(ROUND, result_of(*weights), shared)
        assert digest_of(stepped) == digest_of(expected)
    assert DiLoCo(lr=0.3).lr_of(result_of(*weights)) == 0.3, "whoever says a rate means it"


def test_without_settings_a_run_begins_with_plain_averaging_and_warms_up_in_a_line():
    three = result_of(1.0, 1.0, 1.0)
    assert DiLoCo().rates(round_at(0), three) == (1.0, 0.0)
    assert DiLoCo().rates(round_at(WARM // 2), three) == pytest.approx((0.8, 0.35))
    assert DiLoCo().rates(round_at(WARM), three) == pytest.approx((0.6, 0.7))
    assert DiLoCo().rates(round_at(1000 * WARM), three) == pytest.approx((0.6, 0.7))


@pytest.mark.parametrize(("inner_steps", "warm_at"), [(1, 160), (8, 160), (30, 600), (100, 2000)])
def test_a_run_is_warm_after_twenty_rounds_and_not_before_160_inner_steps(inner_steps, warm_at):
    outer = DiLoCo(inner_steps=inner_steps)
    assert [outer.warmth(round_at(step)) for step in (0, warm_at // 2, warm_at, 2 * warm_at)] == [0.0, 0.5, 1.0, 1.0]
    assert DiLoCo(inner_steps=inner_steps, momentum=0.9).warmth(round_at(1)) == 1.0


def test_what_is_set_holds_from_the_first_round_on():
    three = result_of(1.0, 1.0, 1.0)
    for inner_step in (1, 10 * WARM):
        assert DiLoCo(lr=0.3, momentum=0.9).rates(round_at(inner_step), three) == (0.3, 0.9)
        assert DiLoCo(momentum=0.9).rates(round_at(inner_step), three) == (default_outer_lr(3), 0.9)
        assert DiLoCo(lr=0.3).rates(round_at(inner_step), three)[0] == 0.3


def test_who_gave_little_to_a_round_counts_little_in_its_rate():
    assert effective_number(result_of(5.0, 5.0, 5.0)) == 3.0
    assert effective_number(result_of(5.0, 0.0, 5.0)) == 2.0
    assert effective_number(result_of(4.0, 2.0)) == pytest.approx(36 / 20)
    assert 1.0 <= effective_number(result_of(1e-30, 1e30)) < 1.0 + 1e-9, "and no square is too large or too small"
    assert effective_number(Result(value=INITIAL, members=WORKERS, weight_sum=3.0)) == 3.0


def test_the_rate_is_the_same_bits_whatever_the_order_of_the_members():
    weights = (0.1, 1e-7, 3.3)
    numbers = {effective_number(result_of(*order)) for order in itertools.permutations(weights)}
    assert len(numbers) == 1
