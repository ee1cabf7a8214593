# SPDX-License-Identifier: Apache-2.0
"""SparseLoCo (arXiv:2508.15706):

a_r = β e_r + Δ_r;   Δ̂_r = Q(TopK(a_r));   e_r ← a_r - Δ̂_r;   θ ← θ - α · 1/R Σ_r Δ̂_r
"""

import math

import pytest
import torch

from isthmus.optim import (
    ANCHOR,
    Contribution,
    DiLoCo,
    FragmentKey,
    FragmentTable,
    Op,
    Result,
    Round,
    Work,
    build_outer,
)
from isthmus.optim.blocks import SHAPES, block_order, shapes_of
from isthmus.optim.robust import Robust
from isthmus.optim.simulate import State
from isthmus.optim.sparseloco import RESIDUAL, SparseLoCo
from tests.unit.optim import lab
from tests.unit.optim.one_round import after, digest, same, spare, tensors_of

TABLE = FragmentTable.from_named_shapes([("norm", (64,)), ("up", (128, 64)), ("odd", (10, 7))])
NUMEL = TABLE.numel
KEY = FragmentKey(kind="param", index=0)
WORKERS = ("ash", "birch", "cedar")
INITIAL = torch.sin(torch.arange(NUMEL) * 0.7)
ORDER = block_order(shapes_of(TABLE.whole()))
SLOPES = {name: torch.sin(torch.arange(NUMEL) * (n + 1.3)) for n, name in enumerate((*WORKERS, "elm", "fir"))}


def sparse_loco(**settings):
    """Sparse from the first round on, as in the paper."""
    return SparseLoCo(**{"dense_steps": 0} | settings)


def sparsified(run, kept):
    """The k largest, as sign and one of two levels, in the dtype given."""
    places = run.abs().topk(kept).indices
    magnitudes = run[places].abs()
    upper = magnitudes >= magnitudes.mean()
    levels = torch.where(upper, magnitudes[upper].mean(), magnitudes[~upper].mean() if not upper.all() else 0.0)
    return torch.zeros_like(run).index_copy_(0, places, levels * run[places].sign())


def num_kept(topk, run):
    return math.ceil(topk * len(run) / 4096)


def sparse_wire():
    return lab.TopKWire(lambda part, topk: sparsified(part, num_kept(topk, part)))


def slope_step(worker, _inner_step, value):
    value -= SLOPES[worker]


def run(outer, num_inner_steps=24, **settings):
    settings = {
        "workers": WORKERS,
        "wire": sparse_wire(),
        "inner_step": lab.sgd_step,
        **settings,
    }
    return lab.run(outer, num_inner_steps, table=TABLE, initial=INITIAL, **settings)


def state_of(trajectory, worker):
    return trajectory.states[worker][KEY]


# ------------------------------------------------------------------------------------------------ the paper's equations
def naive_runs():
    """Which elements compete: each block of 64 x 64 of the matrix, then all that lies in smaller blocks."""
    start = TABLE.specs[1].offset
    blocks = [
        torch.tensor([start + (64 * block + row) * 64 + column for row in range(64) for column in range(64)])
        for block in range(2)
    ]
    rest = sorted(set(range(NUMEL)) - set(torch.cat(blocks).tolist()))
    return [*blocks, torch.tensor(rest)]


def direct_sparseloco(alphas, beta, topk, boundaries, weights=(1.0, 1.0, 1.0)):
    """The paper's algorithm in double precision, sharing nothing with the package."""
    anchor, anchors, step = INITIAL.double(), [], 0
    locals_ = [anchor.clone() for _ in WORKERS]
    residuals = [torch.zeros_like(anchor) for _ in WORKERS]
    for boundary, alpha in zip(boundaries, alphas, strict=True):
        while step < boundary:
            step += 1
            for worker, value in zip(WORKERS, locals_, strict=True):
                lab.sgd_step(worker, step, value)
        mean = torch.zeros_like(anchor)
        for index, value in enumerate(locals_):
            wanted = beta * residuals[index] + anchor - value
            sent = torch.zeros_like(wanted)
            for places in naive_runs():
                sent[places] = sparsified(wanted[places], num_kept(topk, places))
            residuals[index] = wanted - sent
            mean += weights[index] / sum(weights) * sent
        anchor = anchor - alpha * mean
        anchors.append(anchor)
        locals_ = [anchor.clone() for _ in WORKERS]
    return anchors


def assert_follows(trajectory, expected):
    lab.assert_same([anchor.double() for anchor in lab.anchors(trajectory)], expected, tolerance=1e-5)


def test_it_follows_a_direct_implementation():
    trajectory = run(sparse_loco(alpha=1.0, inner_steps=4, norm_guard=False))
    assert_follows(trajectory, direct_sparseloco([1.0] * 6, 0.95, 64, range(4, 25, 4)))


def test_it_follows_a_direct_implementation_of_unequal_weights_and_a_late_alpha():
    outer = sparse_loco(inner_steps=4, topk=400, beta=0.7, alpha=0.9, late_alpha=0.5, late_step=16, norm_guard=False)
    trajectory = run(outer, weigh=lambda worker, _work: {"ash": 3.0, "cedar": 0.5}.get(worker, 1.0))
    alphas = [0.9] * 3 + [0.5] * 3
    assert_follows(trajectory, direct_sparseloco(alphas, 0.7, 400, range(4, 25, 4), weights=(3.0, 1.0, 0.5)))


def test_two_aborted_rounds_are_one_round_of_three_times_the_steps():
    outer = sparse_loco(alpha=1.0, inner_steps=4, norm_guard=False)
    trajectory = run(outer, aborted=lambda round_: round_.inner_step in (12, 16))
    assert [round_.inner_step for round_ in trajectory.dropped] == [12, 16]
    assert_follows(trajectory, direct_sparseloco([1.0] * 4, 0.95, 64, [4, 8, 20, 24]))


@pytest.mark.parametrize("beta", [0.0, 0.95, 1.0])
def test_sending_everything_is_diloco_without_momentum_for_any_beta(beta):
    sparse = run(sparse_loco(alpha=0.6, beta=beta, inner_steps=4, topk=4096, norm_guard=False))
    assert_follows(
        sparse, [a.double() for a in lab.anchors(run(DiLoCo(lr=0.6, momentum=0.0, inner_steps=4), wire=None))]
    )
    for worker in WORKERS:
        assert not state_of(sparse, worker).private[RESIDUAL].any()


def test_dense_rounds_are_plain_averaging():
    dense = run(SparseLoCo(inner_steps=4, norm_guard=False))
    mean = run(DiLoCo(lr=1.0, momentum=0.0, inner_steps=4), wire=None)
    assert_follows(dense, [anchor.double() for anchor in lab.anchors(mean)])
    assert not any(state_of(dense, worker).private[RESIDUAL].any() for worker in WORKERS)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("aborted", [(), (8, 24)])
def test_beta_one_loses_nothing_also_to_quantisation_and_aborted_rounds(alpha, aborted):
    """A constant gradient: what was sent and what is left are together all the work done, of every worker."""
    wire = sparse_wire()
    outer = sparse_loco(alpha=alpha, beta=1.0, inner_steps=4, norm_guard=False)
    trajectory = run(outer, 40, inner_step=slope_step, wire=wire, aborted=lambda round_: round_.inner_step in aborted)
    assert len(trajectory.dropped) == len(aborted)
    residuals = []
    for worker in WORKERS:
        residuals.append(state_of(trajectory, worker).private[RESIDUAL])
        work = ORDER.to_blocks(40 * SLOPES[worker], out=torch.empty(NUMEL))
        torch.testing.assert_close((wire.sent[worker] + residuals[-1]).float(), work, rtol=1e-5, atol=1e-4)
        assert residuals[-1].abs().max() > 1.0
    left = ORDER.from_blocks(torch.stack(residuals).mean(0), out=torch.empty(NUMEL))
    moved = (INITIAL - state_of(trajectory, "ash").shared[ANCHOR]) / alpha
    done = 40 * torch.stack([SLOPES[worker] for worker in WORKERS]).mean(0)
    torch.testing.assert_close(moved + left, done, rtol=1e-5, atol=1e-4)


def test_a_beta_below_one_forgets():
    wire = sparse_wire()
    trajectory = run(sparse_loco(beta=0.9, inner_steps=4, norm_guard=False), 40, inner_step=slope_step, wire=wire)
    work = ORDER.to_blocks(40 * SLOPES["ash"], out=torch.empty(NUMEL))
    assert (wire.sent["ash"] + state_of(trajectory, "ash").private[RESIDUAL] - work).abs().max() > 1.0


# ------------------------------------------------------------------------------------------------------ membership
@pytest.mark.parametrize("norm_guard", [True, False])
def test_shared_state_is_equal_whoever_joins_leaves_or_fails(norm_guard):
    outer = sparse_loco(inner_steps=3, norm_guard=norm_guard, late_step=12)
    trajectory = run(
        outer,
        30,
        joins={7: ["elm"], 15: ["fir"]},
        leaves={9: ["birch"], 20: ["elm"]},
        aborted=lambda round_: round_.inner_step in (6, 18),
        weigh=lambda worker, _work: {"ash": 2.5, "elm": 0.3}.get(worker, 1.0),
    )
    lab.assert_parity(trajectory)
    assert [set(committed.members) for committed in trajectory.committed][1:4] == [
        {"ash", "cedar", "elm"},
        {"ash", "cedar", "elm"},
        {"ash", "cedar", "elm"},
    ]
    assert trajectory.committed[-1].digests.keys() == {"ash", "cedar", "fir"}


def test_a_joiner_begins_without_a_residual():
    trajectory = run(sparse_loco(inner_steps=4), 9, joins={9: ["elm"]})
    assert state_of(trajectory, "ash").private[RESIDUAL].any()
    assert not state_of(trajectory, "elm").private[RESIDUAL].any()
    assert digest(state_of(trajectory, "elm")) == digest(state_of(trajectory, "ash"))
    assert torch.equal(trajectory.values["elm"], state_of(trajectory, "ash").shared[ANCHOR])


# --------------------------------------------------------------------------------------------------- one round
ROUND = Round(fragment=KEY, op=Op.GATHER, inner_step=30, codec="topk:64")
WORK = Work(inner_steps=30, samples=30.0)


def mixed(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_state():
    return State(
        shared={ANCHOR: mixed(NUMEL), SHAPES: shapes_of(TABLE.whole())}, private={RESIDUAL: mixed(NUMEL, seed=4)}
    )


def result_of(rows, weights=None):
    names = tuple(f"w{index}" for index in range(len(rows)))
    weights = weights or (1.0,) * len(rows)
    return Result(value=rows, members=names, weight_sum=sum(weights), weights=weights)


def step_of(outer, rows):
    """How far the anchor moves, in the order of the blocks."""
    state = some_state()
    moved = outer.step(ROUND, result_of(rows), state.shared)[ANCHOR]
    return ORDER.to_blocks(state.shared[ANCHOR] - moved, out=torch.empty(NUMEL))


def test_what_one_member_alone_sent_is_divided_by_all_members():
    rows = torch.zeros(4, NUMEL)
    rows[0, 5], rows[:, 6] = 4.0, 4.0
    step = step_of(sparse_loco(alpha=1.0, norm_guard=False), rows)
    assert step[5:7].tolist() == pytest.approx([1.0, 4.0], rel=1e-5)


def test_a_member_that_goes_further_is_scaled_to_the_median_norm():
    rows = mixed(5, NUMEL)
    rows *= (torch.tensor([1.0, 2.0, 3.0, 50.0, 1000.0]) / rows.norm(dim=1))[:, None]
    scaled = rows * torch.tensor([1.0, 1.0, 1.0, 3.0 / 50.0, 3.0 / 1000.0])[:, None]
    torch.testing.assert_close(step_of(sparse_loco(alpha=1.0), rows), scaled.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        step_of(sparse_loco(alpha=1.0, norm_guard=False), rows), rows.mean(0), rtol=1e-4, atol=1e-6
    )


def test_the_median_of_two_norms_lies_between_them():
    rows = torch.zeros(2, NUMEL)
    rows[0, 0], rows[1, 1] = 1.0, 3.0
    assert step_of(sparse_loco(alpha=1.0), rows)[:2].tolist() == pytest.approx([0.5, 1.0], rel=1e-5)


@pytest.mark.parametrize("norm_guard", [True, False])
def test_a_round_of_zeros_moves_nothing(norm_guard):
    assert not step_of(sparse_loco(norm_guard=norm_guard), torch.zeros(3, NUMEL)).any()


def contribution(weight=1.0):
    payload = mixed(NUMEL, seed=8)
    return Contribution(payload=payload, weight=weight, read_delivered=lambda out: out.copy_(payload).mul_(0.75))


def test_the_residual_is_what_was_sent_less_what_arrived():
    mine = contribution()
    state = after(sparse_loco(), ROUND, result_of(mixed(2, NUMEL)), some_state(), mine).state
    torch.testing.assert_close(state.private[RESIDUAL], mine.payload * 0.25)


@pytest.mark.parametrize("mine", [None, contribution(weight=0.0)])
def test_the_residual_of_who_is_no_member_stays(mine):
    state = some_state()
    settled = after(sparse_loco(), ROUND, result_of(mixed(2, NUMEL)), state, mine)
    assert torch.equal(settled.state.private[RESIDUAL], state.private[RESIDUAL])
    assert settled.target is settled.state.shared[ANCHOR]


def test_who_was_not_counted_keeps_its_residual_and_its_distance_from_the_anchor():
    state = some_state()
    settled = after(sparse_loco(), ROUND, None, state, contribution())
    assert settled.state.private is state.private
    assert (settled.target, settled.keep) == (None, 1.0)


def test_nothing_writes_to_the_state_or_the_result():
    outer, state = sparse_loco(), some_state()
    result, mine = result_of(mixed(3, NUMEL)), contribution()
    given = [*tensors_of(state), result.value, mine.payload]
    kept = [tensor.clone() for tensor in given]
    outer.emit(ROUND, mixed(NUMEL, seed=5), *state, WORK, out=torch.empty(NUMEL))
    after(outer, ROUND, result, state, mine)
    aborted = after(outer, ROUND, None, state, mine, out=spare(state))
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    assert same(aborted.state, state)
    assert aborted.keep == 1.0


def test_every_tensor_of_the_recycled_state_is_set():
    outer, state, result = sparse_loco(), some_state(), result_of(mixed(3, NUMEL))
    fresh = after(outer, ROUND, result, state, contribution())
    out = spare(state)
    settled = after(outer, ROUND, result, state, contribution(), out=out)
    assert settled.state.shared is out.shared
    assert settled.state.private is out.private
    assert settled.target is out.shared[ANCHOR]
    assert settled.keep == 0.0
    assert same(out, fresh.state)


@pytest.mark.parametrize("name", [ANCHOR, RESIDUAL])
def test_no_method_writes_over_the_state_it_is_given(name):
    state, out = some_state(), spare(some_state())
    for tensors, old in zip(out, state, strict=True):
        if name in tensors:
            tensors[name] = old[name]
    with pytest.raises(ValueError, match="never writes"):
        after(sparse_loco(), ROUND, result_of(mixed(2, NUMEL)), state, contribution(), out=out)


def test_emit_may_write_over_the_value():
    outer, state, value = sparse_loco(beta=0.5), some_state(), mixed(NUMEL, seed=5)
    expected = ORDER.to_blocks(state.shared[ANCHOR] - value, out=torch.empty(NUMEL)) + 0.5 * state.private[RESIDUAL]
    over = outer.emit(ROUND, value, *state, WORK, out=value)
    assert over.payload is value
    assert over.weight == 1.0
    torch.testing.assert_close(over.payload, expected, rtol=0.0, atol=1e-6)


def test_buffers_of_another_size_are_refused():
    state, right = some_state(), torch.zeros(NUMEL)
    for value, out in ((right[1:], right.clone()), (right, right[1:].clone()), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            sparse_loco().emit(ROUND, value, *state, WORK, out=out)
    with pytest.raises(ValueError, match="initial value"):
        sparse_loco().init(TABLE.whole(), right[1:])


# ------------------------------------------------------------------------------------------------------- settings
def test_everybody_sends_to_everybody_after_every_h_steps():
    outer = sparse_loco(inner_steps=5)
    assert [step for step in range(21) if outer.plan(step)] == [5, 10, 15, 20]
    assert outer.plan(5) == (Round(fragment=KEY, op=Op.GATHER, inner_step=5, codec="topk:64"),)
    assert sparse_loco(topk=4096).plan(30)[0].codec == "raw"
    assert outer.fragments(TABLE) == (TABLE.whole(),)


@pytest.mark.parametrize(
    ("settings", "last_dense", "first_sparse"),
    [({"inner_steps": 5, "dense_steps": 12}, 10, 15), ({"inner_steps": 5}, 160, 165), ({"inner_steps": 30}, 600, 630)],
)
def test_the_first_rounds_are_means_of_all_elements(settings, last_dense, first_sparse):
    outer = SparseLoCo(**settings)
    assert outer.plan(last_dense) == (Round(fragment=KEY, op=Op.MEAN, inner_step=last_dense, codec="e3m0"),)
    assert outer.plan(first_sparse)[0].op is Op.GATHER


def test_two_members_have_no_majority_so_a_guard_changes_neither_dense_nor_sparse_rounds():
    outer = SparseLoCo(inner_steps=4, dense_steps=8, norm_guard=False)
    guarded = run(Robust(outer=outer, guard="norm").fitted(TABLE), workers=WORKERS[:2])
    assert {committed.round_.op for committed in guarded.committed} == {Op.GATHER}
    lab.assert_parity(guarded)
    lab.assert_same(lab.anchors(guarded), lab.anchors(run(outer, workers=WORKERS[:2])))
    with pytest.raises(ValueError, match="takes every payload"):
        Robust(outer=outer, guard="trimmed").fitted(TABLE)


def test_defaults_are_those_of_covenant_72b_with_three_times_the_step():
    assert build_outer("sparseloco") == SparseLoCo(
        inner_steps=30, topk=64, beta=0.95, alpha=3.0 * 1.0, late_alpha=1.95, late_step=None, norm_guard=True
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner_steps", 0),
        ("dense_steps", -1),
        ("topk", 0),
        ("topk", 4097),
        ("beta", -0.1),
        ("beta", 1.1),
        ("beta", float("nan")),
        ("alpha", 0.0),
        ("alpha", float("inf")),
        ("late_alpha", -1.0),
        ("late_step", 0),
    ],
)
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        SparseLoCo(**{name: value})
