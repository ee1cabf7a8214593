# SPDX-License-Identifier: Apache-2.0
"""AutoLoCo, as we read a secondary account of it. Of a round of p base lengths that could go as far as g base rounds:

m ← μ^p·m + Δ/g;   θ ← θ - η·g·(Δ/g + μ^p·m)
"""

import dataclasses
import itertools

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, Result, RunFacts, Work, build_outer, build_schedule
from isthmus.optim.autoloco import COMMITTED_AT, AutoLoCo
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.outer import digest_of, empty_like
from isthmus.optim.qsr import QSR
from isthmus.optim.simulate import State
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, gradient, run
from tests.unit.optim.one_round import after


def autoloco(**changes):
    settings = {"inner_steps": 4, "alpha": 0.005, "peak_lr": 0.004, "total_steps": 60}
    schedule = {"schedule": "cosine", "warmup_steps": 5, "min_ratio": 0.1}
    return AutoLoCo(**settings | schedule | {"lr": 0.7, "momentum": 0.9} | changes)


def boundaries(outer):
    return [step for step in range(outer.total_steps + 1) if outer.plan(step)]


FACTOR = build_schedule("cosine", total_steps=60, warmup_steps=5)


def scheduled_step(worker, inner_step, value):
    """Inner SGD whose learning rate follows the same schedule."""
    value -= 0.03 * FACTOR(inner_step - 1) * gradient(worker, inner_step, value)


def direct_autoloco(outer, ends):
    """In double precision, with nothing rounded."""
    anchor, momentum = INITIAL.double(), torch.zeros(TABLE.numel, dtype=torch.float64)
    base = max(outer.inner_steps, int((outer.alpha / outer.peak_lr) ** 2))
    found, start = [], 0
    for end in ends:
        values = [anchor.float() for _ in WORKERS]
        reach = 0.0
        for step in range(start, end):
            reach += FACTOR(step) / base
            for worker, value in zip(WORKERS, values, strict=True):
                scheduled_step(worker, step + 1, value)
        delta = torch.stack([anchor - value.double() for value in values]).mean(0)
        mu = outer.momentum ** ((end - start) / base)
        momentum = mu * momentum + delta / reach
        anchor = anchor - outer.lr * reach * (delta / reach + mu * momentum)
        found.append(anchor)
        start = end
    return found


def as_double(trajectory):
    return [anchor.double() for anchor in anchors(trajectory)]


@pytest.mark.parametrize("alpha", [0.0, 0.005, 0.0126])
def test_a_constant_learning_rate_makes_it_diloco_bit_for_bit(alpha):
    """alpha 0.0126: all rounds have 9 inner steps, more than the shortest would."""
    outer = autoloco(schedule="constant", warmup_steps=0, alpha=alpha, total_steps=36)
    steps = {0.0: 4, 0.005: 4, 0.0126: 9}[alpha]
    churn = {"joins": {10: ["elm"]}, "leaves": {20: ["birch"]}}
    diloco = run(DiLoCo(lr=0.7, momentum=0.9, inner_steps=steps), 36, **churn)
    assert len(diloco.committed) == 36 // steps
    assert_same(anchors(run(outer, 36, **churn)), anchors(diloco), tolerance=0.0)


def test_with_nothing_said_a_run_at_a_constant_learning_rate_is_dilocos():
    run_facts = RunFacts(num_peers=4, outer_steps=9, peak_lr=0.004, schedule="constant", warmup_steps=0)
    outer = AutoLoCo(inner_steps=4).fitted(TABLE, run_facts)
    assert_same(anchors(run(outer, 36)), anchors(run(DiLoCo(inner_steps=4), 36)), tolerance=0.0)


def test_it_follows_a_direct_implementation_through_uneven_rounds():
    outer = autoloco()
    ends = boundaries(outer)
    lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert len(set(lengths)) > 2
    found = as_double(run(outer, 60, inner_step=scheduled_step))
    assert_same(found, direct_autoloco(outer, ends), tolerance=1e-3)


def test_rounds_end_where_qsrs_do():
    settings = {field.name: getattr(autoloco(), field.name) for field in dataclasses.fields(QSR)}
    assert boundaries(autoloco()) == boundaries(QSR(**settings))


def test_without_momentum_the_step_is_lr_times_the_mean_difference_whatever_the_round():
    settings = {field.name: getattr(autoloco(), field.name) for field in dataclasses.fields(QSR)} | {"momentum": 0.0}
    left, right = (run(cls(**settings), 60, inner_step=scheduled_step) for cls in (AutoLoCo, QSR))
    assert_same(anchors(left), anchors(right), tolerance=1e-5)


def test_aborted_rounds_make_one_longer_round_that_is_treated_as_such():
    outer = autoloco()
    ends = boundaries(outer)
    kept = [end for end in ends if end not in ends[2:4]]
    trajectory = run(outer, 60, inner_step=scheduled_step, aborted=lambda round_: round_.inner_step in ends[2:4])
    assert len(trajectory.dropped) == 2
    assert_same(as_double(trajectory), direct_autoloco(outer, kept), tolerance=1e-3)
    assert [int(committed.shared[COMMITTED_AT]) for committed in trajectory.committed] == kept


def test_what_momentum_holds_does_not_depend_on_the_length_of_the_round():
    """Workers that go at the pace of their learning rate: momentum sees the pace, not how far that led."""

    def steady_step(_worker, inner_step, value):
        value -= FACTOR(inner_step - 1)

    trajectory = run(autoloco(momentum=1e-9), 60, inner_step=steady_step)
    for committed in trajectory.committed:
        torch.testing.assert_close(committed.shared[MOMENTUM], torch.full((TABLE.numel,), 4.0), rtol=1e-3, atol=0.0)


def test_a_base_round_measures_one_and_the_measures_have_few_bits():
    outer = autoloco(schedule="constant", warmup_steps=0)
    assert outer.measures(0, 4) == (1.0, 1.0)
    assert outer.measures(12, 18) == (1.5, 1.5)
    for stop in range(1, 60):
        length, reach = autoloco().measures(0, stop)
        assert length == stop / 4
        assert 0.0 < reach <= length
        assert (reach * 2.0**24).is_integer()


def test_rounds_at_a_rate_of_nought_do_no_harm():
    outer = autoloco(schedule="wsd", min_ratio=0.0, decay_steps=20)
    trajectory = run(outer, 130)
    assert trajectory.committed[-1].round_.inner_step == 120
    assert all(torch.isfinite(anchor).all() for anchor in anchors(trajectory))


def test_shared_state_has_the_same_bits_whoever_joins_leaves_or_fails():
    outer = autoloco()
    ends = boundaries(outer)
    trajectory = run(
        outer,
        60,
        inner_step=scheduled_step,
        joins={9: ["elm"], ends[4] + 1: ["fir"]},
        leaves={14: ["birch"], ends[4] + 2: ["cedar"]},
        aborted=lambda round_: round_.inner_step in (ends[2], ends[5]),
    )
    assert_parity(trajectory)
    assert trajectory.committed[-1].digests.keys() == {"ash", "dogwood", "elm", "fir"}


def committed_round(outer):
    generator = torch.Generator().manual_seed(3)
    anchor, momentum, value = (torch.randn(TABLE.numel, generator=generator) for _ in range(3))
    shared = {ANCHOR: anchor, MOMENTUM: momentum, COMMITTED_AT: torch.tensor([8.0])}
    end = boundaries(outer)[-1]
    return outer.plan(end)[0], Result(value=value, members=WORKERS, weight_sum=4.0), shared


@pytest.mark.parametrize(("rounds", "kept"), [(1, 0.7), (3, 0.343), (100, 0.0)])
def test_by_default_a_long_round_which_keeps_little_momentum_goes_nearly_to_the_mean(rounds, kept):
    facts = RunFacts(num_peers=4, outer_steps=1000, peak_lr=0.004, schedule="constant", warmup_steps=0)
    outer = AutoLoCo(inner_steps=4).fitted(TABLE, facts)
    at = outer.plan(4000)[0]
    shared = outer.init(TABLE.whole(), torch.zeros(TABLE.numel)) | {COMMITTED_AT: torch.tensor([4000.0 - 4 * rounds])}
    ones = Result(value=torch.ones(TABLE.numel), members=WORKERS, weight_sum=4.0, weights=(1.0,) * 4)
    lr = 1.0 - 0.4 * kept / 0.7
    assert (-outer.step(at, ones, shared)[ANCHOR]).tolist() == pytest.approx([lr * (1 + kept)] * TABLE.numel, rel=1e-3)


def test_emit_and_step_never_write_to_the_state():
    outer = autoloco()
    round_, result, shared = committed_round(outer)
    digest, value = digest_of(shared), result.value.clone()
    outer.emit(round_, INITIAL.clone(), shared, {}, Work(inner_steps=4, samples=4.0), out=torch.empty(TABLE.numel))
    first = outer.step(round_, result, shared)
    assert digest_of(shared) == digest
    assert torch.equal(result.value, value)
    assert digest_of(outer.step(round_, result, shared)) == digest_of(first) != digest


@pytest.mark.parametrize("name", [ANCHOR, MOMENTUM, None])
def test_the_results_memory_can_become_a_tensor_of_a_recycled_state(name):
    outer = autoloco()
    round_, result, shared = committed_round(outer)
    expected = digest_of(outer.step(round_, result, shared))
    out = {key: tensor.fill_(float("nan")) for key, tensor in empty_like(shared).items()}
    if name is not None:
        out[name] = result.value
    assert outer.step(round_, result, shared, out=out) is out
    assert digest_of(out) == expected


def test_the_workers_go_to_the_new_anchor_or_keep_what_was_not_counted():
    outer = autoloco()
    round_, result, shared = committed_round(outer)
    moved = after(outer, round_, result, State(shared, {}))
    assert (moved.target, moved.keep) == (moved.state.shared[ANCHOR], 0.0)
    missed = after(outer, round_, None, State(shared, {}))
    assert missed.state.shared is shared
    assert missed.keep == 1.0


def test_step_refuses_to_write_over_the_state_it_is_given():
    outer = autoloco()
    round_, result, shared = committed_round(outer)
    with pytest.raises(ValueError, match="never writes"):
        outer.step(round_, result, shared, out=shared)


def test_it_is_built_from_plain_values_with_dilocos_outer_step():
    outer = build_outer("autoloco", alpha=0.01, peak_lr=0.004, total_steps=100)
    assert (outer.lr, outer.momentum, outer.inner_steps) == (DiLoCo().lr, DiLoCo().momentum, DiLoCo().inner_steps)
    with pytest.raises(ValueError, match="at most 16777216"):
        build_outer("autoloco", alpha=0.01, peak_lr=0.004, total_steps=1 << 25)
