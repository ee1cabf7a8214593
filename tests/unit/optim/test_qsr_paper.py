# SPDX-License-Identifier: Apache-2.0
"""QSR (arXiv:2310.14423): H = max(H_base, floor((α/η_t)²)), at the start of each round; parameters are averaged."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim import DiLoCo, Op, RunFacts, build_outer, build_schedule, qsr
from isthmus.optim.autoloco import AutoLoCo
from isthmus.optim.qsr import QSR
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, run, sgd_step

SCHEDULE = {"peak_lr": 0.004, "total_steps": 60, "schedule": "cosine", "warmup_steps": 5, "min_ratio": 0.1}


def rule(**changes):
    return QSR(**{"inner_steps": 2, "alpha": 0.006} | SCHEDULE | changes)


def boundaries(outer, stop):
    return [step for step in range(stop + 1) if outer.plan(step)]


def direct_boundaries(outer, factor):
    """The released code's own order: H from the rate of the step to come, kept until the next average."""
    ends, step = [], 0
    alpha = outer.peak_lr * outer.inner_steps ** (1 / outer.power) if outer.alpha is None else outer.alpha
    while step < outer.total_steps:
        h = outer.inner_steps
        if step >= outer.warmup_steps:
            lr = outer.peak_lr * factor(step)
            h = max(
                h, int(min((alpha / lr) ** outer.power * (1 + 1e-9), outer.total_steps)) if lr else outer.total_steps
            )
        step += max(1, min(h, outer.total_steps - step))
        ends.append(step)
    return ends


def direct_average(ends, inner_step=sgd_step):
    """Local SGD in double precision: after each of these inner steps all workers have the mean."""
    values = {worker: INITIAL.double() for worker in WORKERS}
    means = []
    for step in range(1, ends[-1] + 1):
        for worker in WORKERS:
            local = values[worker].float()
            inner_step(worker, step, local)
            values[worker] = local.double()
        if step in ends:
            means.append(torch.stack(list(values.values())).mean(0))
            values = dict.fromkeys(WORKERS, means[-1])
    return means


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("cosine", {"min_ratio": 0.1}), ("wsd", {"min_ratio": 0.05, "decay_steps": 30}), ("constant", {})],
)
def test_rounds_end_where_the_released_code_ends_them(schedule, settings, power):
    for total_steps, alpha in itertools.product((60, 211), (0.001, 0.006, 0.02)):
        outer = rule(schedule=schedule, power=power, total_steps=total_steps, alpha=alpha, **settings)
        factor = build_schedule(schedule, total_steps=total_steps, warmup_steps=5, **settings)
        assert boundaries(outer, total_steps) == direct_boundaries(outer, factor)


@pytest.mark.parametrize(("alpha", "length"), [(0.0, 3), (0.005, 3), (0.01, 6), (0.012, 9), (0.04, 60)])
def test_a_constant_learning_rate_makes_rounds_of_constant_length(alpha, length):
    outer = rule(alpha=alpha, inner_steps=3, warmup_steps=0, schedule="constant")
    lengths = [b - a for a, b in itertools.pairwise([0, *boundaries(outer, 60)])]
    assert set(lengths[:-1]) <= {length}
    assert lengths[-1] == (60 - 1) % length + 1


def test_rounds_grow_with_the_square_of_the_falling_rate_and_the_last_ends_with_the_run():
    outer = rule(total_steps=2000, alpha=0.008, min_ratio=0.05)
    ends = boundaries(outer, 2000)
    lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert ends[-1] == 2000
    after_warmup = lengths[3:-1]
    assert after_warmup == sorted(after_warmup)
    assert after_warmup[0] == 4  # (0.008 / 0.004)²
    assert after_warmup[-1] > 50


def test_while_the_rate_warms_up_rounds_are_short():
    outer = rule(total_steps=400, warmup_steps=100, alpha=0.02, inner_steps=4)
    ends = boundaries(outer, 400)
    assert ends[:25] == list(range(4, 101, 4))
    assert ends[25] - ends[24] == 25  # (0.02 / 0.004)²


@pytest.mark.parametrize(("alpha", "lr", "length"), [(0.0003, 0.0001, 9), (0.018, 0.003, 36), (0.0096, 0.0008, 144)])
def test_decimal_settings_mean_what_they_say(alpha, lr, length):
    assert math.floor((alpha / lr) ** 2) == length - 1
    outer = rule(alpha=alpha, peak_lr=lr, schedule="constant", warmup_steps=0, total_steps=5 * length)
    assert boundaries(outer, 5 * length) == list(range(length, 5 * length + 1, length))


def test_a_run_that_goes_on_keeps_the_last_rate_and_length():
    outer = rule(alpha=0.0016, min_ratio=0.1)  # (0.0016 / 0.0004)² = 16
    assert boundaries(outer, 130)[-4:] == [76, 92, 108, 124]
    # A rate of 0 asks for rounds without end: they are as long as the run was.
    outer = rule(schedule="wsd", min_ratio=0.0, decay_steps=6)
    assert [step for step in boundaries(outer, 200) if step >= 60] == [60, 120, 180]


def test_workers_are_averaged():
    outer = rule()
    ends = boundaries(outer, 60)
    assert len({b - a for a, b in itertools.pairwise(ends)}) > 2
    found = [anchor.double() for anchor in anchors(run(outer, 60))]
    assert_same(found, direct_average(ends), tolerance=1e-5)


def test_without_growth_it_is_diloco_with_lr_one_and_no_momentum():
    plain = run(DiLoCo(lr=1.0, momentum=0.0, inner_steps=4))
    assert_same(anchors(run(rule(alpha=0.0, inner_steps=4))), anchors(plain), tolerance=0.0)


def test_an_aborted_round_moves_no_later_one_and_loses_no_work():
    outer = rule()
    ends = boundaries(outer, 60)
    gone = (ends[4], ends[5], ends[9])
    trajectory = run(outer, 60, aborted=lambda round_: round_.inner_step in gone)
    kept = [end for end in ends if end not in gone]
    assert [committed.round_.inner_step for committed in trajectory.committed] == kept
    assert_same([anchor.double() for anchor in anchors(trajectory)], direct_average(kept), tolerance=1e-5)


def test_shared_state_has_the_same_bits_whoever_joins_leaves_or_fails():
    outer = rule(lr=0.7, momentum=0.9)
    ends = boundaries(outer, 60)
    trajectory = run(
        outer,
        60,
        joins={9: ["elm"], ends[8]: ["fir"]},
        leaves={14: ["birch"], ends[10]: ["cedar"]},
        aborted=lambda round_: round_.inner_step in ends[5:7],
    )
    assert_parity(trajectory)
    assert trajectory.committed[-1].digests.keys() == {"ash", "dogwood", "elm", "fir"}


def test_the_plan_is_a_pure_function_of_the_global_step():
    outer, twin = rule(), rule()
    forward = [outer.plan(step) for step in range(80)]
    for cached in (qsr._boundaries, qsr._known):
        cached.cache_clear()
    assert [twin.plan(step) for step in reversed(range(80))][::-1] == forward
    assert {(r.op, r.delay, r.fragment) for rounds in forward for r in rounds} == {(Op.MEAN, 0, TABLE.whole().key)}
    assert all(r.inner_step == step for step, rounds in enumerate(forward) for r in rounds)


def test_the_schedule_is_walked_through_once(monkeypatch):
    calls = []
    original = QSR.round_length
    monkeypatch.setattr(QSR, "round_length", lambda self, step: calls.append(step) or original(self, step))
    outer = rule(total_steps=61)
    first = boundaries(outer, 61)
    num_calls = len(calls)
    assert num_calls == len(first)
    assert boundaries(outer, 61) == first
    assert len(calls) == num_calls


# ------------------------------------------------------------------------------------------------ fitted to a run


def facts(outer_steps=40, **settings):
    return RunFacts(**{"num_peers": 4, "outer_steps": outer_steps, "peak_lr": 0.004, "schedule": "cosine"} | settings)


SCHEDULES = [
    {"schedule": "constant"},
    {"schedule": "constant", "warmup_steps": 30},
    {"schedule": "cosine"},
    {"schedule": "cosine", "warmup_steps": 0, "min_ratio": 0.0},
    {"schedule": "cosine", "warmup_steps": 17, "min_ratio": 0.5},
    {"schedule": "wsd"},
    {"schedule": "wsd", "min_ratio": 0.0, "warmup_steps": 3, "decay_steps": 50},
]


@pytest.mark.parametrize("cls", [QSR, AutoLoCo])
@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_a_run_ends_with_its_last_round_where_its_schedule_does(settings, cls):
    for outer_steps, alpha, inner_steps in itertools.product((20, 101), (None, 0.0, 0.006, 0.02), (3, 7)):
        run_facts = facts(outer_steps, **settings)
        outer = cls(alpha=alpha, inner_steps=inner_steps).fitted(TABLE, run_facts)
        ends = boundaries(outer, outer.total_steps)
        assert len(ends) == outer_steps
        assert ends[-1] == outer.total_steps
        theirs, ours = run_facts.lr_factor(outer.total_steps), outer.lr_factor()
        assert [ours(step) for step in range(outer.total_steps)] == [theirs(step) for step in range(outer.total_steps)]
        assert ends == direct_boundaries(outer, theirs)
        assert outer.fitted(TABLE, run_facts) == outer.fitted(TABLE) == outer
        longer = outer._within(run_facts, outer.total_steps + 1)
        assert len(boundaries(longer, longer.total_steps)) > outer_steps, "its last round is whole"


def test_a_run_at_a_constant_rate_is_h_times_its_rounds():
    assert QSR(inner_steps=7).fitted(TABLE, facts(40, schedule="constant")).total_steps == 40 * 7


@settings(deadline=None, max_examples=40)
@given(
    outer_steps=st.integers(1, 400),
    inner_steps=st.integers(1, 12),
    growth=st.none() | st.floats(0.0, 8.0),
    power=st.integers(1, 3),
    schedule=st.sampled_from(["constant", "cosine", "wsd"]),
    min_ratio=st.floats(0.0, 1.0),
    warmup_steps=st.none() | st.just(0),
)
def test_every_number_of_rounds_has_a_length(
    outer_steps, inner_steps, growth, power, schedule, min_ratio, warmup_steps
):
    run_facts = facts(outer_steps, schedule=schedule, min_ratio=min_ratio, warmup_steps=warmup_steps)
    alpha = None if growth is None else 0.004 * growth
    outer = QSR(inner_steps=inner_steps, alpha=alpha, power=power).fitted(TABLE, run_facts)
    assert outer._num_rounds(1000) == outer_steps


def test_by_default_rounds_last_h_base_at_the_peak_and_grow_as_soon_as_the_rate_falls():
    for power, inner_steps in itertools.product((1, 2, 3), (1, 4, 500)):
        outer = QSR(inner_steps=inner_steps, power=power).fitted(TABLE, facts(100, min_ratio=0.1))
        warmup, total = outer.warmup_steps, outer.total_steps
        assert outer.round_length(warmup) == inner_steps
        assert outer.round_length(total) == pytest.approx(min(inner_steps * 10**power, total), abs=1)
        factor = ((inner_steps + 1) / inner_steps) ** (-1 / power) * (1 - 1e-6)
        fallen = next(step for step in range(warmup, total) if outer.lr_factor()(step) <= factor)
        assert outer.round_length(fallen) > inner_steps


def test_the_default_growth_is_close_to_the_papers_own_example():
    """AdamW, peak 0.008, H_base 4: 0.0175 there. And of a cosine run's 100 rounds of equal length it makes about 41."""
    schedule = {**SCHEDULE, "peak_lr": 0.008, "total_steps": 4000, "warmup_steps": 0}
    by_default, papers = (QSR(alpha=alpha, **schedule) for alpha in (None, 0.0175))
    assert by_default.round_length(0) == papers.round_length(0) == 4
    assert papers.round_length(4000) / by_default.round_length(4000) == pytest.approx((0.0175 / 0.016) ** 2, rel=0.01)
    assert 38 <= len(boundaries(QSR(inner_steps=40, **schedule), 4000)) <= 44


def test_without_run_or_schedule_one_sentence_says_what_is_missing():
    message = "set peak_lr, total_steps, schedule, warmup_steps, min_ratio, or call fitted"
    for ask in (lambda outer: outer.fitted(TABLE), lambda outer: outer.plan(4), lambda outer: outer.lr_factor()):
        with pytest.raises(ValueError, match=message):
            ask(QSR())
    with pytest.raises(ValueError, match="set min_ratio, decay_steps, or call"):
        QSR(**SCHEDULE | {"schedule": "wsd", "min_ratio": None}).fitted(TABLE)
    constant = QSR(peak_lr=0.004, total_steps=60, schedule="constant", warmup_steps=0)
    assert constant.fitted(TABLE) is constant
    with pytest.raises(ValueError, match="inner learning rate"):
        run(QSR(), 4)


@pytest.mark.parametrize(
    ("restated", "message"),
    [
        ({"peak_lr": 0.001}, "peak_lr is 0.001 here and 0.004 in the run that it belongs to: leave it out"),
        ({"schedule": "constant"}, "schedule is constant here and cosine"),
        ({"warmup_steps": 1}, "warmup_steps is 1 here"),
        ({"min_ratio": 0.2}, "min_ratio is 0.2 here and 0.1"),
        ({"total_steps": 100}, "40 rounds do not end after 100 inner steps: leave total_steps out"),
    ],
)
def test_a_schedule_that_is_not_the_runs_is_refused(restated, message):
    with pytest.raises(ValueError, match=message):
        QSR(**restated).fitted(TABLE, facts(40))


def test_a_schedule_that_is_the_runs_may_be_restated():
    outer = QSR().fitted(TABLE, facts(40))
    assert QSR(peak_lr=0.004, schedule="cosine", min_ratio=0.1).fitted(TABLE, facts(40)) == outer
    shorter = QSR(total_steps=outer.total_steps - 1).fitted(TABLE, facts(40))
    assert len(boundaries(shorter, shorter.total_steps)) == 40


@pytest.mark.parametrize("restated", [{"alpha": 1e3}, {"inner_steps": 1}])
def test_a_length_that_no_run_has_is_refused_in_one_sentence(restated):
    """Rounds of 6e10 inner steps; and a warm-up of 100 with no more than 40 rounds of one step."""
    with pytest.raises(ValueError, match=r"40 rounds do not end .*: shorten warm-up and decay, or lower alpha"):
        QSR(**restated).fitted(TABLE, facts(40, warmup_steps=100))


# ------------------------------------------------------------------------------------------------ settings

REQUIRED = {"alpha": 0.01, **SCHEDULE, "total_steps": 100}


def test_it_is_built_from_plain_values():
    outer = build_outer("qsr", alpha=0.01, peak_lr=0.004, total_steps=100, schedule="wsd", decay_steps=20)
    assert outer == QSR(alpha=0.01, peak_lr=0.004, total_steps=100, schedule="wsd", decay_steps=20)
    assert (outer.lr, outer.momentum) == (1.0, 0.0)
    assert build_outer("qsr") == QSR()


@pytest.mark.parametrize("name", ["qsr", "autoloco"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, "alpha must be"),
        ({"alpha": math.inf}, "alpha must be"),
        ({"power": 0}, "power must be"),
        ({"power": 4}, "power must be"),
        ({"peak_lr": 0.0}, "peak_lr must be"),
        ({"total_steps": 0}, "total_steps must be"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, wsd"),
        ({"decay_steps": "20"}, "'decay_steps' of outer optimizer '(qsr|autoloco)' must be int"),
        ({"decay_steps": 20}, "belongs to wsd"),
        ({"warmup_steps": 100}, "warmup_steps"),
        ({"min_ratio": 2.0}, "min_ratio"),
        ({"inner_steps": 0}, "inner_steps must be"),
        ({"lr": 0.0}, "lr must be"),
        ({"momentum": 1.0}, "momentum must be"),
    ],
)
def test_settings_out_of_range_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer(name, **{**REQUIRED, **settings})
