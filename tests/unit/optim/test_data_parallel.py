# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: g ← mean of g in every step; now and then θ ← mean of θ before it."""

import pytest
import torch

from isthmus.optim.data_parallel import DataParallel
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.outer import ANCHOR, GRAD, PARAM, Contribution, Op, Result, Round, Work
from isthmus.optim.registry import build_outer
from isthmus.optim.simulate import shared_parameters
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
    trajectory = run_rows(DataParallel(resync_steps=10), rows=rows)
    assert trajectory.num_rounds == 24 + 2
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


def test_a_joiner_begins_at_the_last_mean_of_the_parameters_and_is_the_same_model_from_the_next():
    rows, seen = sgd_rows(), {}
    trajectory = run_rows(
        DataParallel(resync_steps=5),
        rows=rows,
        joins={7: ["elm"]},
        leaves={12: ["birch"]},
        on_step=lambda step, now: seen.update({step: {name: value.clone() for name, value in now.values.items()}}),
    )
    # Step 5 computed its gradient where step 4 had left the parameters, which is where their mean was taken.
    torch.testing.assert_close(seen[7]["elm"], seen[4]["ash"], rtol=0.0, atol=1e-6)
    assert not torch.equal(seen[9]["elm"], seen[9]["ash"])
    for step in (10, 12, 24):
        values = list(seen[step].values())
        assert all(torch.equal(value, values[0]) for value in values)
    assert set(trajectory.values) == {"ash", "cedar", "dogwood", "elm"}
    assert trajectory.committed[-1].members == ("ash", "cedar", "dogwood", "elm")


def test_a_joiner_with_young_moments_comes_back_only_by_means_of_the_parameters():
    def apart(resync_steps):
        trajectory = run_rows(DataParallel(resync_steps=resync_steps), 120, rows=AdamRows(), joins={7: ["elm"]})
        return (trajectory.values["elm"] - trajectory.values["ash"]).abs().max()

    assert apart(1000) > 0.1
    assert apart(20) < 0.02


def test_a_mean_of_the_parameters_is_the_anchor_and_moves_nobody_who_is_where_the_others_are():
    rows, without = AdamRows(), AdamRows()
    trajectory = run_rows(DataParallel(resync_steps=4), 23, rows=rows)
    run_rows(DataParallel(resync_steps=1000), 23, rows=without)
    torch.testing.assert_close(rows.tensors[PARAM], without.tensors[PARAM], rtol=0.0, atol=1e-5)
    means = [committed for committed in trajectory.committed if committed.round_.fragment.kind == PARAM]
    assert [mean.round_.inner_step for mean in means] == [4, 8, 12, 16, 20]
    assert all(len(set(mean.digests.values())) == 1 for mean in means)
    torch.testing.assert_close(means[-1].shared[ANCHOR].double(), parallel_adam(19), rtol=1e-4, atol=1e-5)


def test_a_run_stands_where_its_workers_are_not_at_the_anchor_of_an_older_step():
    trajectory = run_rows(DataParallel(resync_steps=5), 8, rows=sgd_rows())
    found = shared_parameters(trajectory, DataParallel().fragments(TABLE), out=torch.empty(NUMEL))
    torch.testing.assert_close(found, trajectory.values["ash"], rtol=0.0, atol=1e-6)


def test_an_aborted_mean_of_the_parameters_changes_nothing():
    rows, without = AdamRows(), AdamRows()
    trajectory = run_rows(DataParallel(resync_steps=4), rows=rows, aborted=lambda r: r.fragment.kind == PARAM)
    run_rows(DataParallel(), rows=without)
    assert len(trajectory.dropped) == 6
    assert torch.equal(rows.tensors[PARAM], without.tensors[PARAM])
    assert torch.equal(trajectory.states["ash"][TABLE.whole().key].shared[ANCHOR], INITIAL)


def test_a_slower_worker_is_moved_by_the_mean_of_those_who_took_part():
    rows = sgd_rows()
    trajectory = run_rows(DataParallel(), 6, rows=rows, speeds={"birch": 0.5}, aborted=lambda r: r.inner_step == 3)
    assert [c.members for c in trajectory.committed[:2]] == [("ash", "cedar", "dogwood"), WORKERS]


def test_the_plan():
    gradient_round = Round(fragment=TABLE.whole(GRAD).key, op=Op.MEAN, inner_step=6, keeps_value=True)
    mean = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=6, codec="raw")
    assert DataParallel().plan(0) == ()
    assert DataParallel().plan(6) == DataParallel(resync_steps=4).plan(6) == (gradient_round,)
    assert DataParallel(resync_steps=3).plan(6) == DataParallel(resync_steps=1).plan(6) == (mean, gradient_round)
    assert DataParallel().fragments(TABLE) == (TABLE.whole(GRAD), TABLE.whole())


def test_it_costs_a_gradient_a_step_and_now_and_then_the_parameters():
    assert run_rows(DataParallel(), 10, rows=sgd_rows()).payload_nbytes == 10 * 4 * NUMEL
    assert run_rows(DataParallel(resync_steps=3), 10, rows=sgd_rows()).payload_nbytes == 13 * 4 * NUMEL


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
    with pytest.raises(ValueError, match="resync_steps must be at least 1, got 0"):
        DataParallel(resync_steps=0)
    round_, work, right = DataParallel().plan(1)[0], Work(inner_steps=1, samples=1.0), torch.zeros(NUMEL)
    for value, out in ((torch.zeros(3), right), (right, torch.zeros(3)), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            DataParallel().emit(round_, value, {}, {}, work, out=out)
    mean, state = DataParallel(resync_steps=1).plan(1)[0], begin(DataParallel(), TABLE.whole(), right)
    for value, out in ((torch.zeros(3), right.clone()), (right, torch.zeros(3))):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            DataParallel().emit(mean, value, *state, work, out=out)
    with pytest.raises(ValueError, match="initial value"):
        DataParallel().init(TABLE.whole(), right[1:])
