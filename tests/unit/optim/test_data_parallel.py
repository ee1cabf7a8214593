# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: g ← mean of g in every step."""

import pytest
import torch

from isthmus.optim.data_parallel import DataParallel
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.outer import GRAD, PARAM, Contribution, Op, Result, Round, Work
from isthmus.optim.registry import build_outer
from tests.unit.optim.adam_lab import BETAS, EPS, LR, AdamRows, OptimizerRows, run_rows
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, gradient, run
from tests.unit.optim.one_round import after, begin

NUMEL = TABLE.numel


def sgd_rows():
    return OptimizerRows(lambda params: torch.optim.SGD(params, lr=0.03))


def parallel_adam(num_inner_steps, weights=(1.0,) * 4, skipped=()):
    """One model on the mean gradient, in double precision; a skipped step has the gradient zero."""
    x = INITIAL.double()
    u, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, num_inner_steps + 1):
        g = sum(w * gradient(worker, step, x) for w, worker in zip(weights, WORKERS, strict=True)) / sum(weights)
        g = torch.zeros_like(g) if step in skipped else g
        u = BETAS[0] * u + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        x = x - LR * u / (v.sqrt() + EPS)
    return x


def assert_all_are(rows, expected):
    for value in rows.of_workers(PARAM):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_workers_are_one_model_on_the_mean_gradient():
    rows = AdamRows()
    trajectory = run_rows(DataParallel(), rows=rows)
    assert trajectory.num_rounds == 24
    assert_all_are(rows, parallel_adam(24))
    assert (rows.of_workers(PARAM) == rows.of_workers(PARAM)[0]).all()


def test_with_sgd_it_is_diloco_of_one_inner_step():
    rows = sgd_rows()
    run_rows(DataParallel(), rows=rows)
    diloco = run(DiLoCo(lr=1.0, momentum=0.0, inner_steps=1))
    for value, local in zip(rows.of_workers(PARAM), diloco.values.values(), strict=True):
        torch.testing.assert_close(value, local, rtol=1e-5, atol=1e-6)


def test_weights_weigh_the_gradient():
    weights = dict(zip(WORKERS, (3.0, 1.0, 0.0, 0.5), strict=True))
    rows = AdamRows()
    run_rows(DataParallel(), rows=rows, weigh=lambda worker, _work: weights[worker])
    assert_all_are(rows, parallel_adam(24, tuple(weights.values())))


def test_an_aborted_round_lets_nobody_step_on_a_gradient_of_its_own():
    rows = sgd_rows()
    seen = []
    trajectory = run_rows(
        DataParallel(),
        8,
        rows=rows,
        aborted=lambda round_: round_.inner_step == 5,
        on_step=lambda *_: seen.append(rows.of_workers(PARAM).clone()),
    )
    assert [round_.inner_step for round_ in trajectory.dropped] == [5]
    assert torch.equal(seen[5], seen[4])
    assert not torch.equal(seen[6], seen[5])
    assert all((values == values[0]).all() for values in seen)


def test_an_inner_optimizer_with_momentum_coasts_through_an_aborted_round_alike_everywhere():
    rows = AdamRows()
    run_rows(DataParallel(), rows=rows, aborted=lambda round_: round_.inner_step in (5, 6, 20))
    assert_all_are(rows, parallel_adam(24, skipped=(5, 6, 20)))
    assert (rows.of_workers(PARAM) == rows.of_workers(PARAM)[0]).all()


def test_a_joiner_is_the_same_model_from_the_start():
    rows = sgd_rows()
    trajectory = run_rows(DataParallel(), rows=rows, joins={7: ["elm"]}, leaves={12: ["birch"]})
    assert set(trajectory.values) == {"ash", "cedar", "dogwood", "elm"}
    values = list(trajectory.values.values())
    assert all(torch.equal(value, values[0]) for value in values)
    assert trajectory.committed[-1].members == ("ash", "cedar", "dogwood", "elm")


def test_a_joiner_with_young_moments_comes_back_only_by_averages_of_the_parameters():
    def apart(outer):
        trajectory = run_rows(outer, 120, rows=AdamRows(), joins={7: ["elm"]})
        return (trajectory.values["elm"] - trajectory.values["ash"]).abs().max()

    assert apart(DataParallel()) > 0.01
    assert apart(DataParallel(resync_steps=60)) == 0.0


def test_an_aborted_average_of_parameters_changes_nothing():
    rows, without = AdamRows(), AdamRows()
    trajectory = run_rows(DataParallel(resync_steps=4), rows=rows, aborted=lambda r: r.fragment.kind == PARAM)
    run_rows(DataParallel(), rows=without)
    assert len(trajectory.dropped) == 6
    assert torch.equal(rows.tensors[PARAM], without.tensors[PARAM])


def test_a_slower_worker_is_moved_by_the_mean_of_those_who_took_part():
    rows = sgd_rows()
    trajectory = run_rows(DataParallel(), 6, rows=rows, speeds={"birch": 0.5}, aborted=lambda r: r.inner_step == 3)
    assert [c.members for c in trajectory.committed[:2]] == [("ash", "cedar", "dogwood"), WORKERS]


def test_the_plan():
    gradient_round = Round(fragment=TABLE.whole(GRAD).key, op=Op.MEAN, inner_step=6, keeps_value=True)
    assert DataParallel().plan(0) == ()
    assert DataParallel().plan(6) == DataParallel(resync_steps=4).plan(6) == (gradient_round,)
    both = DataParallel(resync_steps=3).plan(6)
    whole = TABLE.whole().key
    assert both == (gradient_round, Round(fragment=whole, op=Op.MEAN, inner_step=6, codec="raw", keeps_value=True))
    assert DataParallel().fragments(TABLE) == (TABLE.whole(GRAD),)


def test_it_costs_a_gradient_a_step():
    trajectory = run_rows(DataParallel(), 10, rows=sgd_rows())
    assert trajectory.payload_nbytes == 10 * 4 * NUMEL


def test_nothing_that_is_given_is_written():
    outer, round_ = DataParallel(), DataParallel().plan(1)[0]
    value = torch.linspace(0.0, 1.0, NUMEL)
    own, state = value.clone(), begin(outer, TABLE.whole(GRAD), value)
    assert not state.shared
    assert not state.private
    emitted = outer.emit(round_, own, *state, Work(inner_steps=1, samples=1.0), out=torch.empty(NUMEL))
    result = Result(value=value.clone(), members=WORKERS, weight_sum=4.0)
    mine = Contribution(payload=emitted.payload, weight=1.0, read_delivered=lambda out: out)
    counted, missed = after(outer, round_, result, state, mine), after(outer, round_, None, state, mine)
    assert not missed.target.any()
    assert missed.keep == counted.keep == 0.0
    assert after(outer, round_, None, state).target is None
    for kept in (own, emitted.payload, result.value, counted.target):
        assert torch.equal(kept, value)
    assert outer.emit(round_, own, *state, Work(inner_steps=1, samples=1.0), out=own).payload is own


def test_wrong_settings_and_buffers_are_refused():
    assert build_outer("data_parallel", resync_steps=9) == DataParallel(resync_steps=9)
    with pytest.raises(ValueError, match="resync_steps must not be negative"):
        DataParallel(resync_steps=-1)
    round_, work, right = DataParallel().plan(1)[0], Work(inner_steps=1, samples=1.0), torch.zeros(NUMEL)
    for value, out in ((torch.zeros(3), right), (right, torch.zeros(3)), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            DataParallel().emit(round_, value, {}, {}, work, out=out)
