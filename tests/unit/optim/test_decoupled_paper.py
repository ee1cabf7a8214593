# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo (arXiv:2604.21428), with w = tokens²/steps and v = anchor - local of a fragment:

RDA = (Σ w‖v‖ / Σ w) · unit(Σ w · unit(v) / Σ w);   anchor ← Nesterov(anchor, RDA);   local ← anchor
"""

import itertools
import math

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, FragmentTable, Op, Result, Round, Work, build_outer
from isthmus.optim.decoupled import PLAIN_MEAN, DecoupledDiLoCo, radial_directional
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.outer import Weigh, digest_of, empty_like
from isthmus.optim.simulate import State, by_samples
from tests.unit.optim.lab import (
    INITIAL,
    TABLE,
    WORKERS,
    anchors,
    assert_parity,
    assert_same,
    gradient,
    run,
)
from tests.unit.optim.one_round import after

NUMEL = TABLE.numel
SPEEDS = {"ash": 1.0, "birch": 0.5, "cedar": 0.75, "dogwood": 0.25}
ROUND = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=6, delay=2, num_notes=1, weigh=Weigh.ALIKE)
WORK = Work(inner_steps=4, samples=8.0)


def direct(table, groups, *, plain, lr, momentum, inner_steps, delay, num_steps, batch_size=1.0, aborted=()):
    """The whole method in double precision: fragments as boolean masks over the flat vector."""
    local = {worker: INITIAL.double() for worker in WORKERS}
    anchor, velocity = INITIAL.double(), torch.zeros(NUMEL, dtype=torch.float64)
    total = dict.fromkeys(WORKERS, 0)
    moved_at = {(worker, index): 0 for worker in WORKERS for index in range(len(groups))}
    masks = []
    for names in groups:
        mask = torch.zeros(NUMEL, dtype=torch.bool)
        for spec in table.specs:
            mask[spec.offset : spec.stop] = spec.name in names or bool(mask[spec.offset : spec.stop].any())
        masks.append(mask)
    in_flight, history = [], []
    for step in range(1, num_steps + 1):
        for worker in WORKERS:
            if int(step * SPEEDS[worker]) > int((step - 1) * SPEEDS[worker]):
                total[worker] += 1
                local[worker] -= 0.03 * gradient(worker, total[worker], local[worker])
        for index, mask in enumerate(masks):
            if step % inner_steps == index * inner_steps // len(groups):
                payloads = {worker: (anchor - local[worker])[mask] for worker in WORKERS}
                in_flight.append((step, index, payloads))
        for sent, index, payloads in [flight for flight in in_flight if flight[0] + delay == step]:
            steps = {worker: total[worker] - moved_at[worker, index] for worker in WORKERS}
            # What was done until the payload was sent; no one moved the fragment since.
            steps = {w: steps[w] - _steps_between(w, sent, step) for w in WORKERS}
            weights = {w: (batch_size * steps[w]) ** 2 / steps[w] if steps[w] else 0.0 for w in WORKERS}
            if sent in aborted or not sum(weights.values()):
                continue
            if plain[index]:
                merged = sum(weights[w] * payloads[w] for w in WORKERS) / sum(weights.values())
            else:
                length = sum(weights[w] * payloads[w].norm() for w in WORKERS) / sum(weights.values())
                units = sum(weights[w] * payloads[w] / payloads[w].norm() for w in WORKERS if weights[w])
                merged = length * units / units.norm()
            mask = masks[index]
            velocity[mask] = momentum * velocity[mask] + merged
            anchor = anchor.clone()
            anchor[mask] -= lr * (merged + momentum * velocity[mask])
            history.append(anchor[mask])
            for worker in WORKERS:
                local[worker][mask] = anchor[mask]
                moved_at[worker, index] = total[worker]
    return history


def _steps_between(worker, start, stop):
    return int(stop * SPEEDS[worker]) - int(start * SPEEDS[worker])


def names_of(outer, table=TABLE):
    return [[spec.name for spec in fragment.specs] for fragment in outer.fragments(table)]


@pytest.mark.parametrize(
    ("num_fragments", "inner_steps", "delay"), [(1, 4, 0), (3, 6, 2), (6, 6, 5), (4, 6, 1), (6, 3, 1)]
)
def test_it_follows_a_direct_implementation_at_any_speeds(num_fragments, inner_steps, delay):
    settings = {"lr": 0.4, "momentum": 0.6, "inner_steps": inner_steps, "delay": delay}
    outer = DecoupledDiLoCo(num_fragments=num_fragments, embeddings="", **settings)
    trajectory = run(outer, 40, speeds=SPEEDS, batch_size=16.0)
    groups = names_of(outer)
    expected = direct(TABLE, groups, plain=[False] * len(groups), num_steps=40, batch_size=16.0, **settings)
    assert_same([anchor.double() for anchor in anchors(trajectory)], expected, tolerance=1e-4)
    assert_parity(trajectory)


def test_embeddings_are_merged_by_the_plain_mean():
    settings = {"lr": 0.4, "momentum": 0.6, "inner_steps": 6, "delay": 2}
    outer = DecoupledDiLoCo(num_fragments=3, embeddings=r"layer0|layer4", **settings)
    groups = names_of(outer)
    plain = [set(names) <= {"layer0", "layer4"} for names in groups]
    assert 0 < sum(plain) < 3
    trajectory = run(outer, 40, speeds=SPEEDS)
    expected = direct(TABLE, groups, plain=plain, num_steps=40, **settings)
    assert_same([anchor.double() for anchor in anchors(trajectory)], expected, tolerance=1e-4)


def test_one_learner_is_diloco():
    decoupled = run(DecoupledDiLoCo(inner_steps=4, num_fragments=1, delay=0, embeddings=""), workers=("ash",))
    assert_same(anchors(decoupled), anchors(run(DiLoCo(inner_steps=4), workers=("ash",))), tolerance=1e-5)


def test_embeddings_alone_at_equal_speeds_are_diloco():
    decoupled = run(DecoupledDiLoCo(inner_steps=4, num_fragments=1, delay=0, embeddings="layer"))
    assert_same(anchors(decoupled), anchors(run(DiLoCo(inner_steps=4))), tolerance=1e-6)


# ----------------------------------------------------------------------------------------------- RDA


def merge(vectors, weights, **how):
    """What a step would make of these, through unit vectors and notes."""
    lengths = [vector.double().norm().item() for vector in vectors]
    units = [vector / length if length else vector for vector, length in zip(vectors, lengths, strict=True)]
    value = sum(w * unit for w, unit in zip(weights, units, strict=True)) / sum(weights)
    notes = tuple((length,) for length in lengths)
    members = tuple(f"w{index}" for index in range(len(vectors)))
    result = Result(value=value, members=members, weight_sum=sum(weights), weights=tuple(weights), notes=notes)
    return radial_directional(result, **how)


def vectors(count, numel=64):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(numel, generator=generator) * (1.0 + index) for index in range(count)]


def test_one_that_says_it_is_a_million_times_as_long_counts_for_ten_times_the_middle():
    direction = torch.zeros(8)
    direction[3] = 1.0
    for lengths, expected in (((1.0, 2.0, 3.0, 1e6), (1.0 + 2.0 + 3.0 + 20.0) / 4), ((0.0, 0.0, 2.0), 2.0 / 3)):
        members = tuple(f"w{index}" for index in range(len(lengths)))
        notes = tuple((length,) for length in lengths)
        result = Result(
            value=direction, members=members, weight_sum=len(lengths), weights=(1.0,) * len(lengths), notes=notes
        )
        torch.testing.assert_close(radial_directional(result), direction * expected)


def test_of_one_vector_it_is_the_identity():
    (vector,) = vectors(1)
    torch.testing.assert_close(merge([vector], [3.0]), vector)


def test_its_length_is_the_weighted_mean_of_the_lengths():
    weights = [1.0, 0.25, 4.0, 2.0, 0.5]
    mean = sum(w * v.norm() for w, v in zip(weights, vectors(5), strict=True)) / sum(weights)
    torch.testing.assert_close(merge(vectors(5), weights).norm(), mean)


def test_orthogonal_vectors_do_not_shrink():
    merged = merge(list(torch.eye(8)), [1.0] * 8)
    torch.testing.assert_close(merged, torch.full((8,), 1.0 / math.sqrt(8)))
    assert torch.eye(8).mean(0).norm() == pytest.approx(0.353, abs=1e-3)


def test_equal_vectors_are_what_they_are():
    vector = vectors(1)[0]
    torch.testing.assert_close(merge([vector] * 3, [1.0, 2.0, 0.3]), vector)


@pytest.mark.parametrize(("warmth", "length"), [(0.0, 2.5 * 0.5**0.5), (0.5, 1.25 * (1 + 0.5**0.5)), (1.0, 2.5)])
def test_while_it_warms_up_its_length_grows_from_that_of_the_mean_of_unit_vectors(warmth, length):
    merged = merge([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 2.0])], [1.0, 1.0], warmth=warmth)
    assert merged.tolist() == pytest.approx([length / 2**0.5] * 2)


@pytest.mark.parametrize(("settings", "length"), [({}, 0.5**0.5), ({"lr": 1.0, "momentum": 0.0}, 1.0)])
def test_a_run_begins_with_short_steps_unless_it_has_a_momentum_of_its_own(settings, length):
    outer = DecoupledDiLoCo(embeddings="", num_fragments=1, **settings)
    shared = outer.init(TABLE.whole(), torch.zeros(NUMEL))
    value = torch.zeros(NUMEL)
    value[:2] = 0.5
    result = Result(value=value, members=WORKERS[:2], weight_sum=2.0, weights=(1.0, 1.0), notes=((1.0,), (1.0,)))
    early = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=1, num_notes=1, weigh=Weigh.ALIKE)
    moved = outer.step(early, result, shared)[ANCHOR]
    assert moved.norm().item() == pytest.approx(length, rel=0.01)


def test_its_direction_does_not_follow_the_longest():
    merged = merge([torch.tensor([1000.0, 0.0]), torch.tensor([0.0, 1.0])], [1.0, 1.0])
    torch.testing.assert_close(merged[0], merged[1])


def test_zeros_and_opposites_do_not_divide_by_zero():
    assert torch.equal(merge([torch.zeros(4)], [1.0]), torch.zeros(4))
    assert torch.equal(merge([torch.ones(4), -torch.ones(4)], [1.0, 1.0]), torch.zeros(4))
    torch.testing.assert_close(merge([torch.ones(4), torch.zeros(4)], [1.0, 1.0]), torch.full((4,), 0.5))


def test_workers_that_do_not_move_leave_the_anchor_where_it_is():
    trajectory = run(DecoupledDiLoCo(inner_steps=6, num_fragments=3), 20, inner_step=lambda *_: None)
    assert trajectory.committed
    assert all(torch.equal(value, INITIAL) for value in trajectory.values.values())


# ------------------------------------------------------------------------------------------- weights


def emitted_with(samples, steps):
    outer = DecoupledDiLoCo(num_fragments=1, inner_steps=6, embeddings="")
    shared = outer.init(TABLE.whole(), INITIAL)
    work = Work(inner_steps=steps, samples=samples)
    return outer.emit(ROUND, INITIAL - 0.5, shared, {}, work, out=torch.empty(NUMEL))


def test_a_learner_weighs_quantity_times_quality():
    weight = emitted_with(1000.0, 10).weight
    assert emitted_with(2000.0, 10).weight == pytest.approx(4 * weight)
    assert emitted_with(1000.0, 20).weight == pytest.approx(weight / 2)
    assert emitted_with(0.0, 0).weight == 0.0


def test_samples_are_counted_once_though_the_run_counts_by_them():
    """Of two learners with batches of 16 and 48 the second weighs nine times as much, tokens² / steps; not 27 times."""

    def step(worker, _inner_step, value):
        value -= {"ash": 10.0, "birch": 0.0}[worker]

    outer = DecoupledDiLoCo(inner_steps=4, num_fragments=1, delay=0, lr=1.0, momentum=0.0, embeddings="layer")
    for weigh in ({}, {"weigh": by_samples}):
        trajectory = run(
            outer,
            4,
            ("ash", "birch"),
            inner_step=step,
            initial=torch.zeros(NUMEL),
            batch_size={"ash": 16.0, "birch": 48.0},
            **weigh,
        )
        (committed,) = trajectory.committed
        torch.testing.assert_close(committed.shared[ANCHOR], torch.full((NUMEL,), -40.0 / (1 + 9)))


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_whether_the_run_weighs_by_samples_changes_no_bit(num_fragments):
    outer = DecoupledDiLoCo(inner_steps=6, num_fragments=num_fragments, delay=2, embeddings="")
    settings = {"speeds": SPEEDS, "batch_size": dict(zip(WORKERS, (16.0, 48.0, 1.0, 7.0), strict=True))}
    alike, twice = (run(outer, 40, **settings, **more) for more in ({}, {"weigh": by_samples}))
    assert_same(anchors(alike), anchors(twice), tolerance=0.0)


def test_a_weight_fits_the_wire_for_billions_of_tokens():
    assert emitted_with(5e10, 24).weight < 2.0**64
    assert emitted_with(1.0, 500).weight > 1e-30


def test_the_payload_is_a_unit_vector_and_its_length_a_note():
    emitted = emitted_with(1.0, 1)
    assert emitted.notes == pytest.approx((0.5 * math.sqrt(NUMEL),))
    torch.testing.assert_close(emitted.payload, torch.full((NUMEL,), 1.0 / math.sqrt(NUMEL)))


def test_who_did_nothing_is_no_member():
    trajectory = run(DecoupledDiLoCo(inner_steps=6, num_fragments=3, delay=0), 6, speeds={"birch": 0.1})
    assert all(committed.members == ("ash", "cedar", "dogwood") for committed in trajectory.committed)


# ----------------------------------------------------------------------------------------- fragments


def table_of(sizes):
    return FragmentTable.from_named_shapes([(name, (size,)) for name, size in sizes.items()])


MODEL = {
    "embed.weight": 400,
    **{f"blocks.{i}.{part}": size for i in range(8) for part, size in (("w", 90), ("v", 37), ("norm", 5))},
    "head.weight": 300,
}


@pytest.mark.parametrize("num_fragments", [2, 3, 7, 24, 26])
def test_fragments_hold_every_tensor_once_and_do_not_mix_embeddings_with_the_rest(num_fragments):
    table = table_of(MODEL)
    outer = DecoupledDiLoCo(num_fragments=num_fragments)
    fragments = outer.fragments(table)
    table.check_partition(fragments)
    assert [fragment.index for fragment in fragments] == list(range(num_fragments))
    for names in names_of(outer, table):
        assert len({name in ("embed.weight", "head.weight") for name in names}) == 1
    assert outer.fragments(table) == fragments
    firsts = [fragment.specs[0].offset for fragment in fragments]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("num_fragments", [1, 2, 5, 12])
def test_fragments_are_balanced_by_size(num_fragments):
    table = table_of({name: size for name, size in MODEL.items() if name.startswith("blocks")})
    sizes = [fragment.numel for fragment in DecoupledDiLoCo(num_fragments=num_fragments).fragments(table)]
    assert max(sizes) - min(sizes) <= 37
    assert max(sizes) <= 4 / 3 * max(90, math.ceil(table.numel / num_fragments))


def test_tensors_without_elements_leave_no_fragment_empty():
    table = table_of({"a": 0, "b": 0, "c": 5, "d": 0})
    assert sorted(map(len, names_of(DecoupledDiLoCo(num_fragments=4), table))) == [1, 1, 1, 1]
    table.check_partition(DecoupledDiLoCo(num_fragments=2).fragments(table))


def test_too_many_fragments_are_refused_and_fitted_ones_are_not():
    outer = DecoupledDiLoCo()
    with pytest.raises(ValueError, match="the model has 6 tensors, too few for 24 fragments"):
        outer.fragments(TABLE)
    assert len(outer.fitted(TABLE).fragments(TABLE)) == 6
    assert outer.fitted(table_of(MODEL)) == outer
    with pytest.raises(ValueError, match="at least 2 fragments"):
        DecoupledDiLoCo(num_fragments=1, embeddings="layer0").fragments(TABLE)


@pytest.mark.parametrize(
    ("num_fragments", "inner_steps", "delay"),
    [(24, 24, 2), (6, 24, 2), (5, 100, 2), (24, 13, 2), (24, 12, 1), (6, 8, 1), (1, 3, 1), (1, 1, 0)],
)
def test_every_fragment_is_sent_once_in_any_h_steps_and_merged_soon_in_short_rounds(num_fragments, inner_steps, delay):
    outer = DecoupledDiLoCo(num_fragments=num_fragments, inner_steps=inner_steps)
    assert outer.plan(0) == ()
    for start in (1, 2, inner_steps, 5 * inner_steps + 3):
        rounds = [round_ for step in range(start, start + inner_steps) for round_ in outer.plan(step)]
        assert sorted(round_.fragment.index for round_ in rounds) == list(range(num_fragments))
        assert all(round_.due_step == round_.inner_step + delay for round_ in rounds)
        assert all(round_.is_told and round_.weigh is Weigh.ALIKE for round_ in rounds)
    if num_fragments == inner_steps:
        assert all(len(outer.plan(step)) == 1 for step in range(1, 100))


# ------------------------------------------------------------------------------------------ protocol


def test_an_aborted_round_costs_nothing():
    settings = {"lr": 0.4, "momentum": 0.6, "inner_steps": 6, "delay": 2}
    outer = DecoupledDiLoCo(num_fragments=3, embeddings="", **settings)
    trajectory = run(outer, 40, speeds=SPEEDS, aborted=lambda round_: round_.inner_step in (8, 14, 24))
    assert len(trajectory.dropped) == 3
    groups = names_of(outer)
    expected = direct(TABLE, groups, plain=[False] * 3, num_steps=40, aborted=(8, 14, 24), **settings)
    assert_same([anchor.double() for anchor in anchors(trajectory)], expected, tolerance=1e-4)


def test_whoever_joins_or_leaves_shared_states_are_equal():
    outer = DecoupledDiLoCo(inner_steps=6, num_fragments=6, embeddings="layer0", momentum=0.5)
    changes = {"leaves": {8: ["birch"], 21: ["ash"]}, "joins": {9: ["elm"], 15: ["fir", "gorse"]}}
    trajectory = run(outer, 60, speeds=SPEEDS, aborted=lambda round_: round_.inner_step == 17, **changes)
    assert_parity(trajectory)
    assert trajectory.committed[-1].digests.keys() == {"cedar", "dogwood", "elm", "fir", "gorse"}
    assert "gorse" in trajectory.committed[-1].members
    assert all(value.isfinite().all() for value in trajectory.values.values())
    for before, later in itertools.pairwise(
        committed for committed in trajectory.committed if committed.round_.fragment.index == 2
    ):
        assert not torch.equal(before.shared[ANCHOR], later.shared[ANCHOR])


def _outer_shared_result(embeddings):
    outer = DecoupledDiLoCo(num_fragments=1, inner_steps=6, embeddings=embeddings)
    generator = torch.Generator().manual_seed(2)
    anchor, momentum, value = (torch.randn(NUMEL, generator=generator) for _ in range(3))
    rule = outer.init(TABLE.whole(), anchor)[PLAIN_MEAN]
    shared = {ANCHOR: anchor, MOMENTUM: momentum, PLAIN_MEAN: rule}
    result = Result(value=value, members=("ash", "birch"), weight_sum=3.0, weights=(1.0, 2.0), notes=((0.5,), (0.25,)))
    return outer, shared, result


@pytest.mark.parametrize("embeddings", ["", "layer"])
def test_nothing_that_is_given_is_written(embeddings):
    outer, shared, result = _outer_shared_result(embeddings)
    digest, value = digest_of(shared), result.value.clone()
    outer.emit(ROUND, INITIAL.clone(), shared, {}, WORK, out=torch.empty(NUMEL))
    once = outer.step(ROUND, result, shared)
    assert digest_of(once) == digest_of(outer.step(ROUND, result, shared)) != digest
    assert digest_of(shared) == digest
    assert torch.equal(result.value, value)


@pytest.mark.parametrize("embeddings", ["", "layer"])
@pytest.mark.parametrize("name", [None, ANCHOR, MOMENTUM])
def test_the_mean_may_lie_in_the_recycled_state(embeddings, name):
    outer, shared, result = _outer_shared_result(embeddings)
    expected = digest_of(outer.step(ROUND, result, shared))
    out = empty_like(shared)
    out[PLAIN_MEAN].fill_(7.0)
    if name is not None:
        out[name] = result.value
    assert outer.step(ROUND, result, shared, out=out) is out
    assert digest_of(out) == expected


def test_a_worker_goes_to_the_new_anchor_or_keeps_what_was_not_counted():
    outer, shared, result = _outer_shared_result("")
    moved = after(outer, ROUND, result, State(shared, {}))
    assert (moved.target, moved.keep) == (moved.state.shared[ANCHOR], 0.0)
    missed = after(outer, ROUND, None, State(shared, {}))
    assert missed.state.shared is shared
    assert missed.keep == 1.0


def test_step_refuses_to_write_over_the_state_it_is_given():
    outer, shared, result = _outer_shared_result("")
    with pytest.raises(ValueError, match="never writes"):
        outer.step(ROUND, result, shared, out=shared)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"num_fragments": 0}, "num_fragments must be at least 1"),
        ({"delay": 24}, r"delay must be in \[0, inner_steps\)"),
        ({"delay": -1}, "delay"),
        ({"embeddings": "("}, "not a regular expression"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer("decoupled", **settings)
