# SPDX-License-Identifier: Apache-2.0
"""EDiT (arXiv:2412.07210), pseudo-gradient penalty, per layer, of Δ = anchor - local and G = ‖Δ‖:

w = softmax(-G);  G > mean + 3 deviations of its own past → w = 0;  Δ̄ = Σ w Δ;  Δ̄ ← Δ̄ · min(1, φ / (‖Δ̄‖ + 1e-6))

Here G is per inner step and in units of a running typical G, so that the softmax has no scale.
"""

import dataclasses
import math
import statistics

import pytest
import torch

from isthmus.optim import ANCHOR, Contribution, DiLoCo, Op, Result, Round, Settled, Work, build_outer
from isthmus.optim.decoupled import DecoupledDiLoCo
from isthmus.optim.delayed import CARRIED, Delayed
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.eager import Eager
from isthmus.optim.edit import EDiT, LayerwiseDiLoCo
from isthmus.optim.guards import HISTORY, TYPICAL, Guarded, Guards
from isthmus.optim.noloco import NoLoCo
from isthmus.optim.simulate import State
from isthmus.optim.streaming import Streaming
from tests.unit.optim.lab import (
    INITIAL,
    TABLE,
    WORKERS,
    anchors,
    assert_parity,
    assert_same,
    gradient,
    run,
    sgd_step,
)
from tests.unit.optim.one_round import after, begin, digest, same, spare, tensors_of

NUMEL = TABLE.numel
KEY = TABLE.whole().key
OFF = Guards(temperature=math.inf, z_limit=math.inf, max_norm=math.inf)
ROUND = Round(fragment=KEY, op=Op.MEAN, inner_step=4, num_notes=1)
WORK = Work(inner_steps=4, samples=4.0)


def guarded(guards, **settings):
    return Guarded(inner=DiLoCo(**{"lr": 0.7, "momentum": 0.9, "inner_steps": 4, **settings}), guards=guards)


def with_spikes(*spikes, size=1.0):
    """Training in which `size` is added to everything a worker holds, at (worker, its inner step)."""

    def step(worker, inner_step, value):
        sgd_step(worker, inner_step, value)
        if (worker, inner_step) in spikes:
            value += size

    return step


def direct(guards, num_rounds, inner_step, *, lr=0.7, momentum=0.9, every=4):
    """The whole method on one fragment in double precision, with histories as plain lists."""
    anchor, velocity = INITIAL.double(), torch.zeros(NUMEL, dtype=torch.float64)
    local = {worker: anchor.clone() for worker in WORKERS}
    past, medians = {worker: [] for worker in WORKERS}, []
    moved, came = [], []
    for number in range(num_rounds):
        payloads, strides, weights = {}, {}, {}
        for worker in WORKERS:
            for step in range(number * every + 1, (number + 1) * every + 1):
                inner_step(worker, step, local[worker])
            payloads[worker] = anchor - local[worker]
            strides[worker] = payloads[worker].norm().item() / every
            mean = statistics.fmean(past[worker]) if past[worker] else 0.0
            spread = max(statistics.pstdev(past[worker]) if past[worker] else 0.0, 0.1 * mean)
            is_anomaly = len(past[worker]) >= guards.warmup_rounds and strides[worker] > mean + guards.z_limit * spread
            if not is_anomaly:
                typical = statistics.fmean(medians) if medians else strides[worker]
                weights[worker] = math.exp(-strides[worker] / typical / guards.temperature)
        if weights:
            delta = sum(weights[w] * payloads[w] for w in weights) / sum(weights.values())
            delta = delta * min(1.0, guards.max_norm / (delta.norm().item() + 1e-6))
            velocity = momentum * velocity + delta
            anchor = anchor - lr * (delta + momentum * velocity)
            moved.append(anchor)
            came.append(tuple(weights))
            medians.append(statistics.median(strides[w] for w in weights))
            for worker in weights:
                past[worker].append(strides[worker])
        local = {worker: anchor.clone() for worker in WORKERS}
    return moved, came


# ------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize(
    "inner",
    [
        DiLoCo(inner_steps=4),
        LayerwiseDiLoCo(inner_steps=4, num_fragments=3),
        Streaming(inner_steps=6, delay=2),
        DecoupledDiLoCo(inner_steps=6),
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_without_limits_the_method_is_what_it_was(inner):
    without, outer = run(inner), Guarded(inner=inner, guards=OFF)
    with_guards = run(outer)
    assert_same(anchors(with_guards), anchors(without), tolerance=0.0)
    assert_same(list(with_guards.values.values()), list(without.values.values()), tolerance=0.0)
    assert_parity(with_guards)


def test_edit_without_limits_is_diloco():
    settings = {"lr": 0.7, "momentum": 0.9, "inner_steps": 4}
    edit = EDiT(temperature=math.inf, z_limit=math.inf, max_norm=math.inf, **settings).fitted(TABLE)
    values = [list(run(outer).values.values()) for outer in (edit, DiLoCo(**settings))]
    assert_same(*values, tolerance=0.0)


def test_equal_norms_are_the_mean():
    """Constant gradients of one length in different directions, at a temperature that would tell any two apart."""
    directions = {worker: torch.sin(torch.arange(float(NUMEL)) + index) for index, worker in enumerate(WORKERS)}
    directions = {worker: vector / vector.norm() for worker, vector in directions.items()}

    def step(worker, _inner_step, value):
        value -= directions[worker]

    # With lr 1 and no momentum anchors stay small whole steps apart, so lengths are equal up to rounding.
    sharp = run(
        guarded(Guards(temperature=0.01), lr=1.0, momentum=0.0), 24, inner_step=step, initial=torch.zeros(NUMEL)
    )
    mean = run(DiLoCo(inner_steps=4, lr=1.0, momentum=0.0), 24, inner_step=step, initial=torch.zeros(NUMEL))
    assert_same(anchors(sharp), anchors(mean), tolerance=1e-3)


@pytest.mark.parametrize("warmup_rounds", [3, 1000], ids=["rejected", "outweighed"])
def test_one_outlier_of_a_hundred_times_the_norm_is_the_mean_of_the_rest(warmup_rounds):
    """Whether the worker's own past tells, or in its warm-up the others' lengths."""
    guards = Guards(temperature=1.0, warmup_rounds=warmup_rounds, max_norm=math.inf)
    calm, wild = (
        run(guarded(guards), 24, inner_step=with_spikes(*spikes, size=9.0)) for spikes in ((), [("birch", 23)])
    )
    assert_same(anchors(calm)[:-1], anchors(wild)[:-1], tolerance=0.0)
    rest = [worker for worker in WORKERS if worker != "birch"]
    without = run(guarded(guards), 24, leaves={22: ["birch"]})
    torch.testing.assert_close(anchors(wild)[-1], anchors(without)[-1], rtol=1e-5, atol=1e-6)
    assert (anchors(wild)[-1] - anchors(calm)[-1]).abs().max() > 1e-3
    assert without.committed[-1].members == tuple(rest)
    assert wild.committed[-1].members == (tuple(rest) if warmup_rounds == 3 else WORKERS)
    assert torch.equal(wild.values["birch"], anchors(wild)[-1])


@pytest.mark.parametrize(
    "guards",
    [
        Guards(warmup_rounds=4),
        Guards(temperature=0.2, warmup_rounds=1000, max_norm=0.3),
        Guards(temperature=math.inf, warmup_rounds=3, z_limit=2.0),
    ],
)
def test_it_follows_a_direct_implementation(guards):
    step = with_spikes(("birch", 26), ("ash", 27), ("cedar", 41), ("cedar", 50))
    trajectory = run(guarded(guards), 80, inner_step=step)
    moved, came = direct(guards, 20, step)
    assert [committed.members for committed in trajectory.committed] == came
    assert_same([anchor.double() for anchor in anchors(trajectory)], moved, tolerance=1e-4)
    if guards.warmup_rounds < 1000:
        assert ("cedar", "dogwood") in came
    assert_parity(trajectory)


def test_weights_do_not_depend_on_the_scale_of_the_model():
    def scaled(factor):
        def step(worker, inner_step, value):
            value -= 0.03 * factor * gradient(worker, inner_step, value / factor)

        guards = Guards(temperature=0.3, warmup_rounds=3, max_norm=10.0 * factor)
        return run(guarded(guards), 40, inner_step=step, initial=INITIAL * factor)

    small, large = scaled(1.0), scaled(1000.0)
    assert_same([anchor / 1000.0 for anchor in anchors(large)], anchors(small), tolerance=1e-4)
    plain = run(DiLoCo(lr=0.7, momentum=0.9, inner_steps=4), 40)
    assert (anchors(small)[-1] - anchors(plain)[-1]).abs().max() > 1e-2


# --------------------------------------------------------------------------------------------- guards


def test_the_mean_of_weights_is_a_softmax():
    guards, strides, typical = Guards(temperature=0.5), [1.0, 1.2, 0.7, 3.0], 1.1
    weights = torch.tensor([guards.weight(stride, typical) for stride in strides])
    expected = torch.softmax(-torch.tensor(strides) / typical / 0.5, dim=0)
    torch.testing.assert_close(weights / weights.sum(), expected)
    assert guards.weight(typical, typical) == 1.0
    assert guards.weight(123.0, 0.0) == 1.0


def test_when_all_go_astray_at_once_their_mean_still_exists():
    weights = [Guards().weight(stride, 1e-9) for stride in (1.0, 2.0)]
    assert weights[0] == weights[1] > 1e-20
    assert Guards(temperature=1e-6).weight(0.0, 1.0) < 1e20


@pytest.mark.parametrize(("length", "clipped_length"), [(9.0, 9.0), (10.0, 10.0), (400.0, 10.0)])
def test_clipping_shortens_and_does_not_turn(length, clipped_length):
    value = torch.sin(torch.arange(float(NUMEL)))
    value *= length / value.norm()
    clipped = Guards(max_norm=10.0).clipped(value)
    assert clipped.norm().item() == pytest.approx(clipped_length, rel=1e-5)
    torch.testing.assert_close(clipped / clipped.norm(), value / value.norm())
    assert Guards(max_norm=math.inf).clipped(value) is value


def test_statistics_are_plain_at_first_and_then_forget():
    guards = Guards(decay=0.1)
    strides = [1.0, 4.0, 2.0, 2.5, 7.0]
    history = [0.0] * 4
    for stride in strides:
        history = guards.after_accepted(stride, history)
    assert history == pytest.approx([5.0, statistics.fmean(strides), statistics.pvariance(strides), 0.0])
    for _ in range(300):
        history = guards.after_accepted(3.0, history)
    assert history == pytest.approx([305.0, 3.0, 0.0, 0.0], abs=1e-6)
    _, mean, variance, _ = guards.after_accepted(5.0, history)
    assert (mean, variance) == pytest.approx((3.2, 0.9 * 0.1 * 4.0), abs=1e-6)


def test_an_anomaly_is_above_its_past_never_below():
    guards = Guards(warmup_rounds=10, z_limit=3.0)
    history = [10.0, 5.0, 4.0, 0.0]
    assert [guards.is_anomaly(stride, history) for stride in (0.0, 10.9, 11.1)] == [False, False, True]
    assert not guards.is_anomaly(1e9, [9.0, 5.0, 4.0, 0.0])
    assert guards.is_anomaly(math.nan, [0.0] * 4)
    assert guards.is_anomaly(math.inf, [0.0] * 4)
    # Hardly any deviation at all: a tenth of the mean counts as one.
    assert [guards.is_anomaly(stride, [10.0, 5.0, 0.0, 0.0]) for stride in (6.4, 6.6)] == [False, True]


def test_patience_ends():
    guards, history = Guards(patience=3), [50.0, 1.0, 0.1, 0.0]
    for rejected in (1.0, 2.0):
        history = guards.after_rejected(history)
        assert history == [50.0, 1.0, 0.1, rejected]
    assert guards.after_accepted(1.0, history)[3] == 0.0
    assert guards.after_rejected(history) == [0.0] * 4


# ------------------------------------------------------------------------------------------- in a run


def history_of(trajectory, worker, key=KEY):
    return trajectory.states[worker][key].private[HISTORY].tolist()


def test_statistics_follow_from_accepted_rounds_only():
    guards = Guards(warmup_rounds=3)
    step = with_spikes(("birch", 26), size=9.0)
    before = run(guarded(guards), 24, inner_step=step)
    after = run(guarded(guards), 28, inner_step=step, aborted=lambda round_: round_.inner_step > 28)
    assert after.committed[-1].members == ("ash", "cedar", "dogwood")
    assert history_of(after, "birch") == [*history_of(before, "birch")[:3], 1.0]
    assert history_of(after, "ash")[0] == 7.0
    aborted = run(guarded(guards), 28, aborted=lambda round_: round_.inner_step == 28)
    for worker in WORKERS:
        assert history_of(aborted, worker) == history_of(before, worker)
        assert digest(aborted.states[worker][KEY]) == digest(before.states[worker][KEY])
        assert not torch.equal(aborted.values[worker], aborted.states[worker][KEY].shared[ANCHOR])


def test_a_round_of_anomalies_only_is_dropped_and_sends_all_back_to_the_anchor():
    step = with_spikes(*((worker, 26) for worker in WORKERS), size=9.0)
    trajectory = run(guarded(Guards(warmup_rounds=3)), 28, inner_step=step)
    assert [round_.inner_step for round_ in trajectory.dropped] == [28]
    for worker in WORKERS:
        assert torch.equal(trajectory.values[worker], anchors(trajectory)[-1])
        assert history_of(trajectory, worker)[3] == 1.0
    going_on = run(guarded(Guards(warmup_rounds=3)), 32, inner_step=step)
    assert going_on.committed[-1].round_.inner_step == 32
    assert going_on.committed[-1].members == WORKERS


def test_a_worker_that_went_astray_goes_back_to_the_anchor_whatever_the_method_keeps():
    inner = Streaming(inner_steps=4, num_fragments=1, delay=1, keep=0.5)
    step = with_spikes(("birch", 26), size=9.0)
    trajectory = run(Guarded(inner=inner, guards=Guards(warmup_rounds=3)), 29, inner_step=step)
    assert "birch" not in trajectory.committed[-1].members
    assert torch.equal(trajectory.values["birch"], anchors(trajectory)[-1])
    assert not torch.equal(trajectory.values["ash"], anchors(trajectory)[-1])


def test_a_change_of_the_world_is_accepted_in_the_end():
    """All workers go thirty times as far from some step on."""

    def step(worker, inner_step, value):
        for _ in range(30 if inner_step > 24 else 1):
            value -= 0.001 * torch.sign(torch.sin(torch.arange(float(NUMEL)) + ord(worker[0])))

    trajectory = run(guarded(Guards(warmup_rounds=3, patience=4)), 60, inner_step=step)
    assert [round_.inner_step for round_ in trajectory.dropped] == [28, 32, 36, 40]
    assert [committed.members for committed in trajectory.committed[-5:]] == [WORKERS] * 5
    assert_parity(trajectory)


def test_steps_of_aborted_rounds_are_no_anomaly():
    """Steps in one direction: the payload after seven rounds is seven times as long."""

    def step(worker, _inner_step, value):
        value -= 0.01 * torch.sin(torch.arange(float(NUMEL)) + ord(worker[0]))

    outer, aborted = guarded(Guards(warmup_rounds=3)), range(24, 48)
    trajectory = run(outer, 48, inner_step=step, aborted=lambda round_: round_.inner_step in aborted)
    assert trajectory.committed[-1].round_.inner_step == 48
    assert trajectory.committed[-1].members == WORKERS


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_payload_that_is_not_finite_weighs_nothing_even_in_the_warm_up(poison):
    def step(worker, inner_step, value):
        sgd_step(worker, inner_step, value)
        if worker == "birch" and inner_step == 2:
            value[3] = poison

    trajectory = run(guarded(Guards()), 12, inner_step=step)
    assert [committed.members for committed in trajectory.committed] == [("ash", "cedar", "dogwood"), WORKERS, WORKERS]
    assert all(value.isfinite().all() for value in trajectory.values.values())


@pytest.mark.parametrize(
    "outer",
    [
        EDiT(inner_steps=4, warmup_rounds=2, z_limit=0.5),
        Guarded(inner=Streaming(inner_steps=6, num_fragments=3, delay=2), guards=Guards(warmup_rounds=2, z_limit=0.5)),
    ],
    ids=["edit", "streaming"],
)
def test_whoever_joins_or_leaves_shared_states_are_equal(outer):
    trajectory = run(
        outer,
        60,
        inner_step=with_spikes(("cedar", 30), ("elm", 3), ("ash", 14)),
        leaves={13: ["birch"], 31: ["ash"]},
        joins={14: ["elm"], 33: ["fir"]},
        aborted=lambda round_: round_.inner_step in (20, 40),
    )
    assert_parity(trajectory)
    assert trajectory.values.keys() == {"cedar", "dogwood", "elm", "fir"}
    assert all(value.isfinite().all() for value in trajectory.values.values())
    assert any("cedar" not in committed.members for committed in trajectory.committed)


def test_each_layer_is_judged_by_itself():
    def step(worker, inner_step, value):
        sgd_step(worker, inner_step, value)
        if worker == "birch" and inner_step == 26:
            TABLE.view(value, "layer2").add_(9.0)

    trajectory = run(EDiT(inner_steps=4, warmup_rounds=3), 28, inner_step=step)
    last = {committed.round_.fragment.index: committed.members for committed in trajectory.committed[-6:]}
    assert last == {index: WORKERS if index != 2 else ("ash", "cedar", "dogwood") for index in range(6)}


# ------------------------------------------------------------------------------------------- protocol


def _state_result_mine(outer):
    shared = {**outer.init(TABLE.whole(), INITIAL), TYPICAL: torch.tensor([9.0, 0.2])}
    mine = Contribution(payload=INITIAL, weight=2.0, read_delivered=lambda _out: None, notes=(0.25,))
    result = Result(
        value=torch.sin(torch.arange(float(NUMEL))),
        members=WORKERS[:3],
        weight_sum=4.0,
        weights=(1.0, 2.0, 1.0),
        notes=((0.2,), (0.25,), (0.4,)),
    )
    return State(shared, {HISTORY: torch.ones(4)}), result, mine


def rejected(mine):
    return dataclasses.replace(mine, weight=0.0, notes=(-1.0,))


@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["clipped", "whole"])
def test_nothing_that_is_given_is_written(max_norm):
    outer = guarded(Guards(max_norm=max_norm))
    state, result, mine = _state_result_mine(outer)
    tensors = [*tensors_of(state), result.value, INITIAL]
    before = [tensor.clone() for tensor in tensors]
    outer.emit(ROUND, INITIAL.clone(), *state, WORK, out=torch.empty(NUMEL))
    once, again = (after(outer, ROUND, result, state, mine).state for _ in range(2))
    for given in (mine, rejected(mine), None):
        after(outer, ROUND, None, state, given, out=spare(state))
        after(outer, ROUND, result, state, given)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert digest(once) == digest(again) != digest(state)


@pytest.mark.parametrize("name", [None, ANCHOR, MOMENTUM])
@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["clipped", "whole"])
def test_a_round_writes_all_of_the_recycled_state_which_may_hold_the_mean(name, max_norm):
    outer = guarded(Guards(max_norm=max_norm))
    state, result, mine = _state_result_mine(outer)
    expected = after(outer, ROUND, result, state, mine)
    out = spare(state)
    if name is not None:
        out.shared[name] = result.value
    found = after(outer, ROUND, result, state, mine, out=out)
    assert found.state.shared is out.shared
    assert found.state.private is out.private
    assert found.target is out.shared[ANCHOR]
    assert same(out, expected.state)
    torch.testing.assert_close(out.shared[TYPICAL], torch.tensor([10.0, 0.2 + 0.1 * 0.05]))
    assert out.private[HISTORY].tolist() == pytest.approx(outer.guards.after_accepted(0.25, [1.0] * 4))


@pytest.mark.parametrize("which", ["shared", "private"])
def test_memory_of_the_state_is_never_written(which):
    outer = guarded(Guards())
    state, result, mine = _state_result_mine(outer)
    with pytest.raises(ValueError, match="never writes"):
        after(outer, ROUND, result, state, mine, out=spare(state)._replace(**{which: getattr(state, which)}))


def test_a_round_without_a_result_is_the_methods_own_affair_unless_the_worker_was_rejected():
    outer = guarded(Guards())
    state, _result, mine = _state_result_mine(outer)
    for given in (mine, None):
        missed = after(outer, ROUND, None, state, given, out=spare(state))
        assert same(missed.state, state)
        assert missed.keep == 1.0
    gone = after(outer, ROUND, None, state, rejected(mine))
    assert gone.keep == 0.0
    assert torch.equal(gone.target, state.shared[ANCHOR])
    assert digest(gone.state) == digest(state)
    assert gone.state.private[HISTORY].tolist() == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("method", [Delayed, Eager])
@pytest.mark.parametrize("has_result", [True, False])
def test_of_a_payload_that_was_rejected_nothing_is_carried_or_applied_early(method, has_result):
    """A method that holds its work in payloads would bring it again, in the next one."""
    outer = Guarded(inner=method(inner_steps=4), guards=Guards())
    state = begin(outer, TABLE.whole(), INITIAL)
    state.private[CARRIED].fill_(5.0)  # of the round before; it travels already
    _, result, mine = _state_result_mine(outer)
    mine = dataclasses.replace(rejected(mine), newer_payload=torch.ones(NUMEL))
    round_ = dataclasses.replace(ROUND, delay=4)
    found = after(outer, round_, result if has_result else None, state, mine)
    assert torch.equal(found.target, found.state.shared[ANCHOR])
    for name in found.state.private.keys() - {HISTORY}:
        assert found.state.private[name].count_nonzero() == 0
    assert found.state.private[HISTORY].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_a_worker_of_weight_nought_learns_nothing():
    outer = guarded(Guards())
    state, result, mine = _state_result_mine(outer)
    for given in (None, dataclasses.replace(mine, weight=0.0)):
        found = after(outer, ROUND, result, state, given)
        assert torch.equal(found.state.private[HISTORY], state.private[HISTORY])


@dataclasses.dataclass(frozen=True)
class Probe(DiLoCo):
    """A method with a note of its own, whose anchor stays, which counts what was not counted and keeps means."""

    def init(self, fragment, value, /):
        return {ANCHOR: value.clone()}

    def init_private(self, fragment, shared, value, /):
        assert (*shared,) == (ANCHOR,)
        return {"missed": torch.zeros(1), "mean": torch.zeros(NUMEL)}

    def plan(self, inner_step, /):
        return tuple(
            dataclasses.replace(round_, num_notes=1, keeps_value=True) for round_ in DiLoCo.plan(self, inner_step)
        )

    def emit(self, round_, value, shared, private, work, /, *, out):
        assert (*shared, *private) == (ANCHOR, "missed", "mean")
        emitted = DiLoCo.emit(self, round_, value, shared, private, work, out=out)
        return dataclasses.replace(emitted, weight=0.5, notes=(7.0,))

    def step(self, round_, result, shared, /, *, out=None):
        assert round_.num_notes == 1
        assert (*shared,) == (*out,) == (ANCHOR,)
        self.look(result)
        return shared

    def settle(self, outcome, /, *, out=None):
        assert outcome.round_.num_notes == 1
        assert outcome.contribution.notes == (7.0,)
        assert (*outcome.before,) == (*outcome.after,) == (ANCHOR,)
        assert (*outcome.private,) == (*out,) == ("missed", "mean")
        out["missed"].copy_(outcome.private["missed"] + (outcome.result is None))
        out["mean"].copy_(outcome.private["mean"])
        if outcome.result is not None:
            self.look(outcome.result)
            out["mean"].copy_(outcome.result.value)
        return Settled.untouched(out)

    def look(self, result):
        assert result.notes == ((7.0,),) * len(result.members)
        assert result.value.norm() <= 0.5 * (1.0 + 1e-5)


def test_the_method_never_meets_the_states_and_notes_of_the_guards():
    outer = Guarded(inner=Probe(inner_steps=4), guards=Guards(max_norm=0.5))
    trajectory = run(outer, 16, aborted=lambda round_: round_.inner_step in (8, 16))
    assert len(trajectory.committed) == 2
    for worker in WORKERS:
        state = trajectory.states[worker][KEY]
        assert torch.equal(state.shared[ANCHOR], INITIAL)
        assert state.private["missed"].item() == 2.0
        assert state.private["mean"].norm().item() == pytest.approx(0.5, rel=1e-4), "clipped, as the step saw it"
        assert state.shared[TYPICAL][0].item() == state.private[HISTORY][0].item() == 2.0
        assert state.shared[TYPICAL][1].item() < 1.0


def test_the_methods_own_weight_counts_too():
    outer = Guarded(inner=Probe(), guards=OFF)
    round_ = dataclasses.replace(ROUND, num_notes=2)
    state = begin(outer, TABLE.whole(), INITIAL)
    emitted = outer.emit(round_, INITIAL - 1.0, *state, WORK, out=torch.empty(NUMEL))
    assert emitted.weight == 0.5
    assert emitted.notes == (7.0, pytest.approx(math.sqrt(NUMEL) / 4))


def test_guards_refuse_what_they_cannot_guard():
    with pytest.raises(ValueError, match="guards already"):
        Guarded(inner=guarded(OFF)).init(TABLE.whole(), INITIAL)
    with pytest.raises(ValueError, match="must have one"):
        Guarded(inner=NoLoCo()).init(TABLE.whole(), INITIAL)
    with pytest.raises(ValueError, match="rounds must be means"):
        Guarded(inner=NoLoCo(inner_steps=4)).plan(4)


def test_edit_exchanges_all_layers_together():
    with pytest.raises(ValueError, match=r"call fitted\(table\) first"):
        EDiT(inner_steps=4).plan(4)
    outer = build_outer("edit", inner_steps=4).fitted(TABLE)
    assert outer.num_fragments == 6
    assert outer.fitted(TABLE) is outer
    TABLE.check_partition(outer.fragments(TABLE))
    assert [round_.fragment.index for round_ in outer.plan(8)] == list(range(6))
    assert all(round_.num_notes == 1 and round_.is_told and round_.delay == 0 for round_ in outer.plan(8))
    assert [step for step in range(13) if outer.plan(step)] == [4, 8, 12]


def test_neighbouring_layers_can_be_judged_together():
    groups = EDiT(num_fragments=4).fragments(TABLE)
    TABLE.check_partition(groups)
    assert [len(fragment.specs) for fragment in groups] == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="7 fragments need as many layers, this model has 6"):
        EDiT(num_fragments=7).fragments(TABLE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"num_fragments": 0}, "num_fragments must be at least 1"),
        ({"num_fragments": 2.0}, "'num_fragments' of outer optimizer 'edit' must be int"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"z_limit": math.nan}, "z_limit must be positive"),
        ({"max_norm": -1.0}, "max_norm must be positive"),
        ({"warmup_rounds": 0}, "warmup_rounds must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer("edit", **settings)
