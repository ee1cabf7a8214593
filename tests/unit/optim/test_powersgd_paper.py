# SPDX-License-Identifier: Apache-2.0
"""PowerSGD (arXiv:1905.13727), one side a round:

P = mean(A·Q̂), Â = P·Q̂ᵀ;   then Q = mean(Aᵀ·P̂), Â = P̂·Qᵀ;   A = Δ + e;   e ← A - Â
"""

import dataclasses
import math

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, FragmentTable, Op, Result, Work, build_outer
from isthmus.optim.outer import Contribution
from isthmus.optim.powersgd import LEFT, RESIDUAL, RIGHT, PowerSGD
from isthmus.optim.workload import Delivery, ExactWire
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, run, sgd_step
from tests.unit.optim.one_round import after, begin, same, spare, tensors_of

MATRICES = FragmentTable.from_named_shapes([("bias", (5,)), ("wide", (6, 20)), ("conv", (8, 3, 5)), ("tiny", (2, 3))])
START = torch.linspace(-1.0, 1.0, MATRICES.numel)
COMPRESSED = ((slice(5, 125), (6, 20)), (slice(125, 245), (8, 15)))
"""Where a matrix [6, 20] lies, and a tensor that is taken as [8, 15]."""
WORK = Work(inner_steps=4, samples=4.0)
NESTEROV = {"lr": 0.7, "momentum": 0.9}


def power_sgd(**settings):
    return PowerSGD(**{"inner_steps": 4, "rank": 2, "dense_steps": 0} | NESTEROV | settings).fitted(MATRICES)


def run_matrices(outer, num_inner_steps=24, **settings):
    return run(outer, num_inner_steps, table=MATRICES, initial=START, **settings)


def direct_power_sgd(outer, table, initial, boundaries, weights=None, *, inner_step=sgd_step):
    """The released recurrence in double precision with its own residual, A - Â, sharing only the first factors."""
    weights = weights or dict.fromkeys(WORKERS, 1.0)
    total = sum(weights.values())
    first = outer.init(table.whole(), initial)
    matrices, offset = [], {LEFT: 0, RIGHT: 0}
    for spec in table.specs:
        if len(spec.shape) < 2:
            continue
        n, m = spec.shape[0], math.prod(spec.shape[1:])
        r = min(outer.rank, n, m)
        if n * m < 2.0 * r * (n + m) / 2.0:
            continue
        sizes = {LEFT: n * r, RIGHT: m * r}
        own = {s: first[s][offset[s] : offset[s] + sizes[s]].view(-1, r).double() for s in sizes}
        offset = {s: offset[s] + sizes[s] for s in sizes}
        matrices.append((slice(spec.offset, spec.stop), n, m, own))
    anchor, momentum = initial.double(), torch.zeros(table.numel, dtype=torch.float64)
    residuals = {worker: torch.zeros(table.numel, dtype=torch.float64) for worker in WORKERS}
    values = {worker: initial.clone() for worker in WORKERS}
    found, step = [], 0
    for boundary in boundaries:
        while step < boundary:
            step += 1
            for worker in WORKERS:
                inner_step(worker, step, values[worker])
        owed = {w: anchor - values[w].double() + residuals[w] for w in WORKERS}
        delta = sum(weights[w] * owed[w] for w in WORKERS) / total
        mean = delta.clone()
        for place, n, m, factors in matrices:
            a = mean[place].view(n, m)
            if boundary // outer.inner_steps % 2:
                sent = a @ factors[RIGHT]
                approximation = sent @ factors[RIGHT].t()
                factors[LEFT] = torch.linalg.qr(sent).Q
            else:
                sent = a.t() @ factors[LEFT]
                approximation = factors[LEFT] @ sent.t()
                factors[RIGHT] = torch.linalg.qr(sent).Q
            delta[place] = approximation.reshape(-1)
        residuals = {w: owed[w] - delta for w in WORKERS}
        momentum = outer.momentum * momentum + delta
        anchor = anchor - outer.lr * (delta + outer.momentum * momentum)
        values = {w: anchor.float() for w in WORKERS}
        found.append(anchor)
    return found


def as_double(trajectory):
    return [anchor.double() for anchor in anchors(trajectory)]


def mean_residual(trajectory):
    states = [next(iter(held.values())) for held in trajectory.states.values()]
    return torch.stack([state.private[RESIDUAL] for state in states]).mean(0)


# ------------------------------------------------------------------------------------------------ identities


def test_without_a_matrix_worth_compressing_it_is_diloco_bit_for_bit():
    compressed = run(PowerSGD(inner_steps=4, rank=3, dense_steps=0, **NESTEROV).fitted(TABLE))
    assert_same(anchors(compressed), anchors(run(DiLoCo(inner_steps=4, **NESTEROV))), tolerance=0.0)
    assert LEFT not in compressed.committed[0].shared
    assert not mean_residual(compressed).any()


def test_rounds_that_send_everything_are_diloco_bit_for_bit():
    compressed = run_matrices(power_sgd(dense_steps=24))
    assert_same(anchors(compressed), anchors(run_matrices(DiLoCo(inner_steps=4, **NESTEROV))), tolerance=0.0)
    assert {committed.round_.numel for committed in compressed.committed} == {MATRICES.numel}


def test_by_default_the_anchor_becomes_the_mean_of_what_arrived():
    everything = run_matrices(PowerSGD(inner_steps=4).fitted(MATRICES))
    assert_same(anchors(everything), anchors(run_matrices(DiLoCo(inner_steps=4, lr=1.0, momentum=0.0))), tolerance=0.0)


def test_it_follows_a_direct_implementation_of_the_released_recurrence():
    outer = power_sgd()
    expected = direct_power_sgd(outer, MATRICES, START, range(4, 33, 4))
    assert_same(as_double(run_matrices(outer, 32)), expected, tolerance=2e-5)


def test_weights_weigh_the_mean_of_the_factors():
    outer, weights = power_sgd(rank=1), {"ash": 3.0, "birch": 1.0, "cedar": 0.5, "dogwood": 1.0}
    trajectory = run_matrices(outer, weigh=lambda worker, _work: weights[worker])
    expected = direct_power_sgd(outer, MATRICES, START, range(4, 25, 4), weights)
    assert_same(as_double(trajectory), expected, tolerance=2e-5)


def steady_step(worker, inner_step, value):
    """Every worker has a direction of its own in each matrix, of rank 1; all lie in the same spaces, of rank 2."""
    number = ord(worker[0]) - ord("a")
    value[:5] -= 0.01 * (number + inner_step)
    for place, (n, m) in COMPRESSED:
        rows, columns = (torch.sin(torch.arange(float(k)) + shift) for k, shift in ((n, number), (m, 2.0 * number)))
        value[place] -= 0.01 * torch.outer(rows, columns).reshape(-1)


def test_a_rank_that_suffices_is_exact_in_every_second_round():
    """Nothing is then left to send: lr 1 without momentum, the anchor is where DiLoCo's is.

    Not in every round: what a round of rows leaves out has other rows than the work, and the next factor sees both.
    """
    compressed = run_matrices(power_sgd(lr=1.0, momentum=0.0), 40, inner_step=steady_step)
    dense = run_matrices(DiLoCo(lr=1.0, momentum=0.0, inner_steps=4), 40, inner_step=steady_step)
    assert (anchors(compressed)[0] - anchors(dense)[0]).abs().max() > 1e-3
    assert_same(anchors(compressed)[1::2], anchors(dense)[1::2], tolerance=1e-5)
    assert mean_residual(compressed).abs().max() < 1e-5


def test_a_rank_that_does_not_suffice_is_not_exact():
    compressed = run_matrices(power_sgd(lr=1.0, momentum=0.0, rank=1), 40, inner_step=steady_step)
    assert mean_residual(compressed).abs().max() > 1e-3


@pytest.mark.parametrize("seed", [0, 7])
def test_what_was_sent_and_what_is_left_is_all_work_done(seed):
    """lr 1, no momentum: the anchor moved by what was sent. Work does not depend on where a worker is: it adds up."""
    slopes = {w: torch.sin(torch.arange(float(MATRICES.numel)) * (n + 1.3)) for n, w in enumerate(WORKERS)}

    def constant_step(worker, _inner_step, value):
        value -= 0.01 * slopes[worker]

    trajectory = run_matrices(
        power_sgd(lr=1.0, momentum=0.0, seed=seed),
        40,
        inner_step=constant_step,
        aborted=lambda round_: round_.inner_step in (4, 12, 16, 28),
    )
    assert len(trajectory.dropped) == 4
    assert mean_residual(trajectory).abs().max() > 0.01
    work = 0.4 * torch.stack(list(slopes.values())).mean(0)
    sent = START - anchors(trajectory)[-1]
    torch.testing.assert_close(sent + mean_residual(trajectory), work, rtol=1e-5, atol=1e-5)


class HalvingWire(ExactWire):
    """Everybody decodes half of what was sent."""

    def exchange(self, round_, fragment, payloads, weights):
        halves = {worker: payload / 2.0 for worker, payload in payloads.items()}
        exact = ExactWire.exchange(self, round_, fragment, halves, weights)
        return Delivery(**{f.name: getattr(exact, f.name) for f in dataclasses.fields(Delivery)})


def test_what_the_codec_loses_is_sent_later():
    slopes = {w: torch.sin(torch.arange(float(MATRICES.numel)) * (n + 1.3)) for n, w in enumerate(WORKERS)}

    def constant_step(worker, _inner_step, value):
        value -= 0.01 * slopes[worker]

    trajectory = run_matrices(power_sgd(lr=1.0, momentum=0.0), inner_step=constant_step, wire=HalvingWire())
    work = 0.24 * torch.stack(list(slopes.values())).mean(0)
    sent = START - anchors(trajectory)[-1]
    assert (sent[:5] - work[:5]).abs().max() > 1e-3  # also of what is not compressed
    torch.testing.assert_close(sent + mean_residual(trajectory), work, rtol=1e-5, atol=1e-5)


def test_a_matrix_that_did_not_move_can_move_later():
    def late_step(worker, inner_step, value):
        if inner_step > 12:
            steady_step(worker, inner_step, value)

    compressed = run_matrices(power_sgd(lr=1.0, momentum=0.0), 32, inner_step=late_step)
    dense = run_matrices(DiLoCo(lr=1.0, momentum=0.0, inner_steps=4), 32, inner_step=late_step)
    assert torch.equal(anchors(compressed)[2], START)
    assert_same(anchors(compressed)[4::2], anchors(dense)[4::2], tolerance=1e-5)


# ------------------------------------------------------------------------------------------------ membership


@pytest.mark.parametrize("rank", [1, 2])
def test_shared_state_has_the_same_bits_whoever_joins_leaves_or_fails(rank):
    trajectory = run_matrices(
        power_sgd(rank=rank, dense_steps=4),
        40,
        joins={9: ["elm"], 22: ["fir"]},
        leaves={14: ["birch"], 20: ["cedar"]},
        aborted=lambda round_: round_.inner_step in (12, 24, 28),
    )
    assert_parity(trajectory)
    assert trajectory.committed[-1].digests.keys() == {"ash", "dogwood", "elm", "fir"}


def test_an_aborted_round_leaves_state_and_workers_as_they_were():
    outer = power_sgd()
    without = run_matrices(outer, 7)
    aborted = run_matrices(outer, 8, aborted=lambda round_: round_.inner_step == 8)
    for worker, value in without.values.items():
        sgd_step(worker, 8, value)
        assert torch.equal(aborted.values[worker], value)
        before, since = (next(iter(t.states[worker].values())) for t in (without, aborted))
        assert same(before, since)
        assert before.private[RESIDUAL].any()


def test_an_aborted_round_costs_its_turn_but_no_work():
    outer = power_sgd()
    trajectory = run_matrices(outer, 32, aborted=lambda round_: round_.inner_step in (8, 12))
    expected = direct_power_sgd(outer, MATRICES, START, [4, 16, 20, 24, 28, 32])
    assert_same(as_double(trajectory), expected, tolerance=2e-5)


def test_a_worker_of_weight_nought_keeps_its_residual():
    outer = power_sgd()
    round_, result, state, mine = committed_round(outer)
    settled = after(outer, round_, result, state, dataclasses.replace(mine, weight=0.0)).state
    assert torch.equal(settled.private[RESIDUAL], state.private[RESIDUAL])
    assert settled.private[RESIDUAL].any()


def test_who_was_not_counted_keeps_its_residual_and_its_distance_from_the_anchor():
    outer = power_sgd()
    round_, _, state, mine = committed_round(outer)
    settled = after(outer, round_, None, state, mine)
    assert settled.state.private is state.private
    assert (settled.target, settled.keep) == (None, 1.0)


# ------------------------------------------------------------------------------------------------ the protocol


def test_the_payload_is_a_thin_factor_of_alternating_sides_and_the_rest_as_it_is():
    outer = power_sgd()
    rounds = [round_ for step in range(17) for round_ in outer.plan(step)]
    assert [round_.inner_step for round_ in rounds] == [4, 8, 12, 16]
    rest = 5 + 2 * 3
    assert [round_.numel for round_ in rounds] == [2 * (6 + 8) + rest, 2 * (20 + 15) + rest] * 2
    assert {(round_.op, round_.delay) for round_ in rounds} == {(Op.MEAN, 0)}
    assert rounds == [round_ for step in reversed(range(17)) for round_ in outer.plan(step)][::-1]


def test_a_tensor_is_compressed_if_it_becomes_small_enough():
    # [6, 20] at rank 2: 120 elements against 2 · 26 / 2 = 26 on the mean of both sides, 4.6 times smaller
    assert power_sgd(rank=2, min_compression=4.6).plan(4)[0].numel == 2 * (6 + 8) + 11
    assert power_sgd(rank=2, min_compression=4.7).plan(4)[0].numel == 2 * 8 + 120 + 11
    assert power_sgd(rank=2, min_compression=120 / 23).plan(4)[0].numel == 2 * 8 + 120 + 11
    assert power_sgd(rank=2, min_compression=120 / 22).plan(4)[0].numel == MATRICES.numel


def test_factors_stay_orthonormal():
    for committed in run_matrices(power_sgd(), 32).committed:
        for side, sizes in ((LEFT, (6, 8)), (RIGHT, (20, 15))):
            for factor, size in zip(committed.shared[side].split([2 * n for n in sizes]), sizes, strict=True):
                gram = factor.view(size, 2).t() @ factor.view(size, 2)
                torch.testing.assert_close(gram, torch.eye(2), rtol=1e-5, atol=1e-5)


def committed_round(outer, inner_step=4):
    """A state in the middle of a run, and what a worker is given: (round, result, state, contribution)."""
    state = begin(outer, MATRICES.whole(), START)
    state.private[RESIDUAL].copy_(torch.cos(START * 9.0))
    (round_,) = outer.plan(inner_step)
    emitted = outer.emit(round_, torch.sin(START * 5.0), *state, WORK, out=torch.empty(round_.numel))
    mine = Contribution(
        payload=emitted.payload,
        weight=1.0,
        read_delivered=lambda out: out.copy_(emitted.payload),
        kept=emitted.kept,
    )
    value = emitted.payload * 0.9 + 0.01
    return round_, Result(value=value, members=("ash", "elm"), weight_sum=2.0), state, mine


@pytest.mark.parametrize("inner_step", [4, 8])
def test_nothing_that_is_given_is_written(inner_step):
    outer = power_sgd()
    round_, result, state, mine = committed_round(outer, inner_step)
    given = [*tensors_of(state), result.value, mine.payload, mine.kept]
    kept = [tensor.clone() for tensor in given]
    first = after(outer, round_, result, state, mine)
    assert same(after(outer, round_, None, state, mine).state, state)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    again = after(outer, round_, result, state, mine)
    assert same(again.state, first.state)
    assert not same(first.state, state)


@pytest.mark.parametrize("inner_step", [4, 8])
@pytest.mark.parametrize("learner", [False, True])
def test_every_tensor_of_a_recycled_state_is_written(inner_step, learner):
    outer = power_sgd()
    round_, result, state, mine = committed_round(outer, inner_step)
    mine = None if learner else mine
    fresh, out = after(outer, round_, result, state, mine), spare(state)
    settled = after(outer, round_, result, state, mine, out=out)
    assert settled.state.shared is out.shared
    assert settled.state.private is (state.private if learner else out.private)
    assert settled.target is out.shared[ANCHOR]
    assert same(settled.state, fresh.state)
    assert torch.equal(fresh.state.private[RESIDUAL], state.private[RESIDUAL]) == learner


def test_the_results_memory_can_become_the_momentum():
    outer = power_sgd(dense_steps=36)
    round_, result, state, mine = committed_round(outer)
    expected, out = after(outer, round_, result, state, mine).state, spare(state)
    out.shared["momentum"] = result.value
    assert same(after(outer, round_, result, state, mine, out=out).state, expected)


@pytest.mark.parametrize("name", ["shared", "private"])
def test_no_method_writes_over_the_state_it_is_given(name):
    outer = power_sgd()
    round_, result, state, mine = committed_round(outer)
    with pytest.raises(ValueError, match="never writes"):
        after(outer, round_, result, state, mine, out=spare(state)._replace(**{name: getattr(state, name)}))


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be"),
        ({"min_compression": 0.0}, "min_compression must be"),
        ({"min_compression": float("nan")}, "min_compression must be"),
        ({"dense_steps": -1}, "dense_steps must be"),
        ({"seed": 1 << 16}, "seed must be"),
        ({"seed": -1}, "seed must be"),
        ({"lr": 0.0}, "lr must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer("powersgd", **settings)


def test_settings_must_be_fitted_to_the_model_first():
    outer = PowerSGD(inner_steps=4)
    with pytest.raises(ValueError, match="call fitted"):
        outer.plan(4)
    assert outer.plan(3) == ()
    with pytest.raises(ValueError, match="other shapes"):
        power_sgd().fragments(TABLE)
    assert power_sgd().fitted(MATRICES) == power_sgd()
    assert outer.fragments(TABLE) == (TABLE.whole(),)


def test_buffers_of_another_size_are_refused():
    outer = power_sgd()
    state = begin(outer, MATRICES.whole(), START)
    (round_,) = outer.plan(4)
    for value, out in ((INITIAL[:3], torch.empty(round_.numel)), (START, torch.empty(MATRICES.numel))):
        with pytest.raises(ValueError, match="contiguous fp32"):
            outer.emit(round_, value, *state, WORK, out=out)
