# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo (arXiv:2501.18512):

send at (t - t_p) mod H = 0:          Δ_p = θ_p - θ_m,p
receive at (t - t_p - τ) mod H = 0:   θ_p ← Nesterov(θ_p, mean Δ_p);   θ_m,p ← α·θ_m,p + (1 - α)·θ_p
"""

import dataclasses

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, FragmentTable, Op, Outcome, Result, Round, Work, build_outer
from isthmus.optim.outer import digest_of, empty_like
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

LAYER_NUMELS = (6, 9, 12, 15, 18, 21)


def elements(layers):
    starts = [sum(LAYER_NUMELS[:layer]) for layer in range(7)]
    return torch.tensor([i for layer in layers for i in range(starts[layer], starts[layer + 1])])


def direct_streaming(parts, offsets, *, H, tau, alpha, lr, mu, num_steps, weights=(1.0, 1.0, 1.0, 1.0), aborted=()):
    """The paper's listing in double precision: every committed anchor, and the workers at the end."""
    anchor, velocity = INITIAL.double(), torch.zeros(TABLE.numel, dtype=torch.float64)
    locals_ = [anchor.clone() for _ in WORKERS]
    in_flight, committed = [], []
    for t in range(1, num_steps + 1):
        for worker, value in zip(WORKERS, locals_, strict=True):
            value -= 0.03 * gradient(worker, t, value)
        for part, offset in zip(parts, offsets, strict=True):
            if (t - offset) % H == 0:
                delta = sum(w * (anchor - value)[part] for w, value in zip(weights, locals_, strict=True)) / sum(
                    weights
                )
                in_flight.append((t, part, delta))
        for sent, part, delta in [flight for flight in in_flight if flight[0] + tau == t]:
            if sent in aborted:
                continue
            velocity[part] = mu * velocity[part] + delta
            anchor[part] -= lr * (delta + mu * velocity[part])
            committed.append(anchor[part].clone())
            for value in locals_:
                value[part] = alpha * value[part] + (1 - alpha) * anchor[part]
    return committed, locals_


def values(trajectory):
    return [trajectory.values[worker] for worker in WORKERS]


# --------------------------------------------------------------------------------------- identities


def test_one_fragment_without_delay_is_diloco():
    streamed = run(Streaming(lr=0.4, inner_steps=4, num_fragments=1, delay=0, keep=0.0))
    diloco = run(DiLoCo(lr=0.4, inner_steps=4))
    assert_same(anchors(streamed), anchors(diloco), tolerance=0.0)
    assert_same(values(streamed), values(diloco), tolerance=0.0)


def test_keeping_everything_isolates_the_workers():
    streamed = run(Streaming(inner_steps=8, num_fragments=4, delay=1, keep=1.0))
    assert len(streamed.committed) == 11
    assert_same(values(streamed), values(run(DiLoCo(inner_steps=1000))), tolerance=0.0)


@pytest.mark.parametrize(
    ("pattern", "parts"), [("strided", ((0, 3), (1, 4), (2, 5))), ("sequential", ((0, 1), (2, 3), (4, 5)))]
)
@pytest.mark.parametrize(("tau", "alpha"), [(0, 0.0), (3, 0.0), (3, 0.5), (7, 0.9)])
def test_it_follows_a_direct_implementation(pattern, parts, tau, alpha):
    outer = Streaming(lr=0.4, momentum=0.9, inner_steps=8, num_fragments=3, pattern=pattern, delay=tau, keep=alpha)
    trajectory = run(outer, 40)
    committed, locals_ = direct_streaming(
        [elements(part) for part in parts], (0, 2, 5), H=8, tau=tau, alpha=alpha, lr=0.4, mu=0.9, num_steps=40
    )
    assert_same([anchor.double() for anchor in anchors(trajectory)], committed, tolerance=1e-5)
    assert_same([value.double() for value in values(trajectory)], locals_, tolerance=1e-5)


def test_weights_and_aborted_rounds_are_those_of_the_direct_implementation():
    weights = (3.0, 1.0, 0.5, 1.5)
    aborted = (5, 10, 13, 24)  # each a round of another fragment, two of one in a row
    trajectory = run(
        Streaming(lr=0.4, momentum=0.9, inner_steps=8, num_fragments=3, delay=2, keep=0.5),
        40,
        weigh=lambda worker, _work: weights[WORKERS.index(worker)],
        aborted=lambda round_: round_.inner_step in aborted,
    )
    assert tuple(round_.inner_step for round_ in trajectory.dropped) == aborted
    parts = [elements(part) for part in ((0, 3), (1, 4), (2, 5))]
    committed, locals_ = direct_streaming(
        parts,
        (0, 2, 5),
        H=8,
        tau=2,
        alpha=0.5,
        lr=0.4,
        mu=0.9,
        num_steps=40,
        weights=weights,
        aborted=aborted,
    )
    assert_same([anchor.double() for anchor in anchors(trajectory)], committed, tolerance=1e-5)
    assert_same([value.double() for value in values(trajectory)], locals_, tolerance=1e-5)


def test_an_aborted_round_is_brought_by_the_next_one_of_its_fragment():
    """Constant gradients, lr 1, α 0, τ 0: the anchor has moved by all steps, whatever was aborted in between."""

    def constant_step(_worker, _inner_step, value):
        value -= 1.0

    trajectory = run(
        Streaming(lr=1.0, momentum=0.0, inner_steps=7, num_fragments=3, delay=0, keep=0.0),
        63,
        inner_step=constant_step,
        initial=torch.zeros(TABLE.numel),
        aborted=lambda round_: round_.inner_step in (7, 14, 16, 39, 46),
    )
    last = {committed.round_.fragment.index: committed for committed in trajectory.committed}
    for index, sent in ((0, 63), (1, 58), (2, 60)):
        assert last[index].round_.inner_step == sent
        assert last[index].shared[ANCHOR].unique().tolist() == [-float(sent)]


# --------------------------------------------------------------------------------------- turns


@pytest.mark.parametrize("inner_steps", [1, 2, 7, 8, 29, 30, 31, 100])
def test_every_fragment_is_sent_once_in_any_h_inner_steps(inner_steps):
    for count in {1, 2, 3, 4, 7, 16, 29, 30, inner_steps} & set(range(1, inner_steps + 1)):
        outer = Streaming(inner_steps=inner_steps, num_fragments=count, delay=0)
        turns = [outer.plan(step) for step in range(3 * inner_steps + 1)]
        assert max(map(len, turns)) == 1
        sent = [rounds[0].fragment.index if rounds else None for rounds in turns]
        assert sent[0] is None  # nothing has been trained yet
        for first in range(1, 2 * inner_steps + 1):
            window = [index for index in sent[first : first + inner_steps] if index is not None]
            assert sorted(window) == list(range(count))


def test_thirty_steps_and_four_fragments_have_a_period_of_thirty():
    outer = Streaming(inner_steps=30, num_fragments=4)
    turns = [(step, round_.fragment.index) for step in range(61) for round_ in outer.plan(step)]
    assert turns == [(7, 1), (15, 2), (22, 3), (30, 0), (37, 1), (45, 2), (52, 3), (60, 0)]


def test_the_plan_is_a_pure_function_of_the_global_step():
    outer, twin = (Streaming(inner_steps=8, num_fragments=3, delay=2) for _ in range(2))
    forward = [outer.plan(step) for step in range(30)]
    assert forward == [twin.plan(step) for step in reversed(range(30))][::-1]
    assert forward[8] == (Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=8, delay=2),)


# --------------------------------------------------------------------------------------- fragments

MODEL = FragmentTable.from_named_shapes(
    [("embed", (4,)), *((f"layers.{i}.{part}", (3,)) for i in range(7) for part in ("attn", "mlp")), ("norm", (2,))]
)


def mlps(fragments):
    """The layers of each fragment."""
    MODEL.check_partition(fragments)
    assert [fragment.index for fragment in fragments] == list(range(len(fragments)))
    return [[int(s.name.split(".")[1]) for s in f.specs if s.name.endswith("mlp")] for f in fragments]


def test_strided_fragments_take_every_pth_layer():
    assert mlps(Streaming(num_fragments=3).fragments(MODEL)) == [[0, 3, 6], [1, 4], [2, 5]]


def test_sequential_fragments_take_neighbours():
    outer = Streaming(num_fragments=3, pattern="sequential")
    assert mlps(outer.fragments(MODEL)) == [[0, 1], [2, 3], [4, 5, 6]]


def test_embedding_and_final_norm_go_with_the_first_and_the_last_layer():
    first, second, third = ({s.name for s in f.specs} for f in Streaming(num_fragments=3).fragments(MODEL))
    assert {"embed", "layers.0.attn", "layers.6.mlp", "norm"} <= first
    assert not {"embed", "norm"} & (second | third)
    first, *_, last = ({s.name for s in f.specs} for f in Streaming(num_fragments=7).fragments(MODEL))
    assert first == {"embed", "layers.0.attn", "layers.0.mlp"}
    assert last == {"layers.6.attn", "layers.6.mlp", "norm"}


def test_by_default_there_is_a_fragment_for_every_three_layers():
    fitted = Streaming().fitted(MODEL)
    assert fitted == Streaming(num_fragments=3)
    assert fitted.fitted(TABLE) is fitted
    assert len(Streaming().fragments(MODEL)) == 3
    assert Streaming().fitted(TABLE).num_fragments == 2


def test_a_plan_needs_the_number_of_fragments():
    with pytest.raises(ValueError, match="call fitted"):
        Streaming().plan(1)


def test_there_are_no_more_fragments_than_layers():
    with pytest.raises(ValueError, match="8 fragments need as many layers, this model has 7"):
        Streaming(num_fragments=8).fragments(MODEL)


# --------------------------------------------------------------------------------------- membership, purity, settings


@pytest.mark.parametrize(
    ("count", "tau", "alpha", "pattern"),
    [
        (1, 0, 0.0, "strided"),
        (2, 1, 0.5, "sequential"),
        (3, 7, 0.5, "strided"),
        (4, 3, 1.0, "strided"),
        (6, 5, 0.0, "strided"),
    ],
)
def test_anchors_are_equal_on_all_workers_through_joins_leaves_and_aborts(count, tau, alpha, pattern):
    trajectory = run(
        Streaming(inner_steps=8, num_fragments=count, delay=tau, keep=alpha, pattern=pattern),
        48,
        leaves={13: ["birch"], 30: ["cedar"]},
        joins={9: ["fir"], 18: ["elm"]},
        aborted=lambda round_: round_.inner_step % 5 == 0,
    )
    assert_parity(trajectory)
    assert trajectory.committed[-1].digests.keys() == {"ash", "dogwood", "elm", "fir"}
    assert trajectory.dropped


def test_a_joiner_starts_from_the_anchors_of_all_fragments():
    seen = {}

    def look(step, trajectory):
        if step == 18:
            seen["value"] = trajectory.values["elm"].clone()
            fragments = Streaming(num_fragments=3).fragments(TABLE)
            seen["anchor"] = torch.empty(TABLE.numel)
            for fragment in fragments:
                fragment.scatter(trajectory.states["ash"][fragment.key].shared[ANCHOR], out=seen["anchor"])

    run(Streaming(inner_steps=8, num_fragments=3, delay=2), 24, joins={18: ["elm"]}, on_step=look)
    assert torch.equal(seen["value"], seen["anchor"])


def test_state_is_never_written():
    outer = Streaming(inner_steps=8, num_fragments=3)
    fragment = outer.fragments(TABLE)[1]
    value = torch.linspace(-1.0, 1.0, fragment.numel)
    shared = outer.init(fragment, value)
    digest = digest_of(shared)
    round_ = Round(fragment=fragment.key, op=Op.MEAN, inner_step=2, delay=1)
    outer.emit(round_, value * 2.0, shared, {}, Work(inner_steps=2, samples=2.0), out=torch.empty(fragment.numel))
    result = Result(value=value.clone(), members=WORKERS, weight_sum=4.0)
    stepped = outer.step(round_, result, shared, out=empty_like(shared))
    assert digest_of(stepped) != digest
    assert digest_of(shared) == digest
    outcome = Outcome(round_=round_, result=result, contribution=None, before=shared, after=stepped, private={})
    settled = outer.settle(outcome)
    assert settled.keep == 1 / 8, "unless it is set, the share of a round for which the workers went on"
    assert dataclasses.replace(outer, keep=0.5).settle(outcome).keep == 0.5
    assert dataclasses.replace(outer, delay=0).settle(outcome).keep == 0.0
    assert settled.target is stepped[ANCHOR]
    missed = outer.settle(dataclasses.replace(outcome, result=None))
    assert missed.keep == 1.0, "its work is in the value, which the next difference from the anchor holds"
    alone = dataclasses.replace(outer, keep=1.0).settle(outcome)
    assert (alone.target, alone.keep) == (None, 1.0)


def test_the_workers_have_different_gradients():
    after = [INITIAL.clone() for _ in WORKERS]
    for worker, value in zip(WORKERS, after, strict=True):
        sgd_step(worker, 1, value)
    assert (after[0] - after[1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"num_fragments": 0}, r"num_fragments must be in \[1, inner_steps = 100\], got 0"),
        ({"num_fragments": 101}, r"num_fragments must be in \[1, inner_steps = 100\], got 101"),
        ({"num_fragments": 2.0}, "'num_fragments' of outer optimizer 'streaming' must be int"),
        ({"num_fragments": True}, "'num_fragments' of outer optimizer 'streaming' must be int"),
        ({"pattern": "stride"}, "pattern must be 'strided' or 'sequential', got 'stride'"),
        ({"delay": -1}, r"delay must be in \[0, inner_steps = 100\), got -1"),
        ({"delay": 100}, r"delay must be in \[0, inner_steps = 100\), got 100"),
        ({"keep": 1.1}, r"keep must be in \[0, 1\], got 1.1"),
        ({"keep": float("nan")}, r"keep must be in \[0, 1\]"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer("streaming", **settings)


def test_it_is_built_by_its_name():
    assert build_outer("streaming", num_fragments=4) == Streaming(num_fragments=4)
