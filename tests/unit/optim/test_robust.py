# SPDX-License-Identifier: Apache-2.0
"""Guards on the receiving side: one of four members sends −5 × its difference, and the anchor stays with the others."""

import dataclasses
import functools
import itertools
import math
import re
import statistics
from dataclasses import dataclass

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, Op, Result, RunFacts, build_outer, outer_types
from isthmus.optim.outer import digest_of
from isthmus.optim.robust import CENTRE, Robust, clip_around, guarded_mean, in_middle_range, num_trimmed
from isthmus.optim.wrapper import Wrapper
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, run
from tests.unit.optim.one_round import after, begin, spare

NUMEL = TABLE.numel
KEY = TABLE.whole().key
GUARDS = ("norm", "trimmed", "centred")
FACTOR = -5.0
LIAR = "birch"
NUM_STEPS = 36
FACTS = RunFacts(num_peers=4, outer_steps=8, peak_lr=1e-3, schedule="cosine", warmup_steps=2)
METHODS = {
    "diloco": {"inner_steps": 4},
    "streaming": {"inner_steps": 6, "num_fragments": 3, "delay": 1},
    "edit": {"inner_steps": 4},
    "decoupled": {"inner_steps": 6, "num_fragments": 6, "delay": 2},
    "powersgd": {"inner_steps": 4, "rank": 2, "min_compression": 0.5, "dense_steps": 0},
}
FITTING = [(name, guard) for name in METHODS for guard in GUARDS if (name, guard) != ("powersgd", "centred")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lying(Wrapper):
    """A method of which one worker lies: of its work, or of its payload alone, whose weight and notes stay honest."""

    about: str | None
    honest: dict
    """The others' values as they were emitted, by inner step and fragment; filled here."""
    turns: itertools.cycle = dataclasses.field(default_factory=lambda: itertools.cycle(WORKERS))

    def emit(self, round_, value, shared, private, work, /, *, out):
        is_liar = next(self.turns) == LIAR
        if not is_liar:
            self.honest.setdefault((round_.inner_step, round_.fragment), []).append(value.clone())
        elif self.about == "work":
            value.sub_(shared[ANCHOR]).mul_(FACTOR).add_(shared[ANCHOR])
        emitted = self.outer.emit(round_, value, shared, private, work, out=out)
        if is_liar and self.about == "payload":
            emitted.payload.mul_(FACTOR)
        return emitted


@functools.cache
def strays(name, guard, about):
    """By round, where the anchor went from the mean of the honest, in units of how far these are apart.

    With lr 1 and no momentum an anchor goes where the members' aggregate is.
    """
    honest = {}
    outer = Lying(outer=build_outer(name, lr=1.0, momentum=0.0, **METHODS[name]), about=about, honest=honest)
    trajectory = run(Robust(outer=outer, guard=guard) if guard else outer, NUM_STEPS)
    assert_parity(trajectory)
    found = []
    for committed in trajectory.committed:
        values = honest[committed.round_.inner_step, committed.round_.fragment]
        spread = max((a - b).norm().item() for a, b in itertools.combinations(values, 2))
        found.append((committed.shared[ANCHOR] - torch.stack(values).mean(0)).norm().item() / spread)
    return found


@pytest.mark.parametrize("about", ["work", "payload"])
@pytest.mark.parametrize(("name", "guard"), FITTING)
def test_the_anchor_goes_no_further_from_the_honest_mean_than_the_honest_are_apart(name, guard, about):
    assert max(strays(name, guard, about)) < 1.0
    assert max(strays(name, None, about)) > 1.1


@pytest.mark.parametrize(("name", "guard"), FITTING)
def test_honest_members_lose_little(name, guard):
    assert max(strays(name, guard, None)) < 0.5


@functools.cache
def driven_by_a_liar(name, guard):
    """How far the anchor is in the end from where it is without a liar and without a guard."""
    num_steps = 60  # what is momentum has to come up to speed
    calm = anchors(run(build_outer(name, **METHODS[name]), num_steps))[-1]
    outer = Lying(outer=build_outer(name, **METHODS[name]), about="payload", honest={})
    end = anchors(run(Robust(outer=outer, guard=guard) if guard else outer, num_steps))[-1]
    return (end - calm).norm().item()


@pytest.mark.parametrize(("name", "guard"), FITTING)
def test_with_the_defaults_a_liar_does_not_drive_the_run_away(name, guard):
    assert driven_by_a_liar(name, None) > 3.0 * driven_by_a_liar(name, guard)


@pytest.mark.parametrize("about", [None, "payload"])
def test_rows_that_a_method_gathers_itself_are_scaled(about):
    def last(guarded):
        bare = build_outer("sparseloco", inner_steps=4, dense_steps=0, norm_guard=not guarded)
        outer = Lying(outer=bare, about=about, honest={})
        trajectory = run(Robust(outer=outer, guard="norm") if guarded else outer, 24)
        assert_parity(trajectory)
        return anchors(trajectory)

    assert_same(last(guarded=True), last(guarded=False), tolerance=1e-5)


def test_asynchronous_arrivals_are_scaled_where_three_come_together():
    def last(guard, about):
        method = build_outer("async", inner_steps=4, poll_steps=4)
        outer = Lying(outer=method, about=about, honest={})
        return anchors(run(Robust(outer=outer, guard=guard) if guard else outer, 40))[-1]

    calm = last(None, None)
    assert (last("norm", "payload") - calm).norm() < 0.25 * (last(None, "payload") - calm).norm()


# ------------------------------------------------------------------------------------------- one aggregate


def result_of(rows, weights=None, notes=()):
    weights = tuple(weights or [1.0] * len(rows))
    members = tuple(f"m{number}" for number in range(len(rows)))
    return Result(value=rows, members=members, weight_sum=sum(weights), weights=weights, notes=notes)


def some_rows(count, numel=1000):
    return torch.stack(
        [torch.sin(torch.arange(numel) * (1.0 + 0.01 * row)) * (1.0 + 0.1 * row) for row in range(count)]
    )


def aggregate(guard, result, centre=None):
    out = torch.full_like(result.value[0], math.nan)
    if guard == "centred":
        return clip_around(torch.zeros_like(out) if centre is None else centre, result, out=out)
    return guarded_mean(guard, result, out=out)


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (5.0,)])
def test_one_or_two_members_have_their_weighted_mean(guard, weights):
    rows = some_rows(len(weights))
    expected = (rows * torch.tensor(weights).unsqueeze(1)).sum(0) / sum(weights)
    torch.testing.assert_close(aggregate(guard, result_of(rows, weights)), expected)


@pytest.mark.parametrize(("count", "f"), [(1, 0), (2, 0), (3, 1), (4, 1), (8, 1), (9, 2), (13, 3)])
def test_trimmed_is_the_weighted_mean_without_the_outermost(count, f):
    assert num_trimmed(count) == f
    rows = some_rows(count, numel=300)[torch.randperm(count, generator=torch.Generator().manual_seed(count))]
    weights = [1.0 + row % 3 for row in range(count)]
    order = rows.argsort(dim=0)[f : count - f]
    kept, heavy = rows.gather(0, order).double(), torch.tensor(weights).double()[order]
    expected = (kept * heavy).sum(0) / heavy.sum(0)
    torch.testing.assert_close(aggregate("trimmed", result_of(rows, weights)).double(), expected)


def test_no_weight_takes_trimmed_out_of_the_range_of_the_others():
    rows, weights = some_rows(5), [1.0, 1.0, 1e30, 1.0, 1.0]
    rows[2] = -1e30
    found = aggregate("trimmed", result_of(rows, weights))
    others = rows[[0, 1, 3, 4]]
    assert (found >= others.amin(0) - 1e-6).all()
    assert (found <= others.amax(0) + 1e-6).all()


def test_norm_is_no_longer_than_the_median_whatever_one_sends():
    rows = some_rows(5)
    rows[2] *= -1e20
    assert aggregate("norm", result_of(rows)).norm() <= statistics.median(row.norm() for row in rows) * (1 + 1e-6)


def test_centred_finds_the_others_again_when_the_last_aggregate_is_far_away():
    rows = 1.0 + 0.001 * some_rows(5)
    rows[2] = -1e6
    found = aggregate("centred", result_of(rows), centre=torch.full((1000,), -3.0))
    others = rows[[0, 1, 3, 4]]
    assert (found - others.mean(0)).norm() < 0.3 * others.mean(0).norm()
    again = aggregate("centred", result_of(rows), centre=found)
    assert (again - others.mean(0)).norm() < 0.1 * (found - others.mean(0)).norm()


def test_notes_are_brought_into_the_range_of_the_others():
    notes = ((1.0, 7.0), (1e30, 5.0), (2.0, -1e9), (3.0, 6.0))
    assert in_middle_range(notes) == ((2.0, 6.0), (3.0, 5.0), (2.0, 5.0), (3.0, 6.0))
    assert in_middle_range(notes[:2]) == notes[:2]
    assert in_middle_range(()) == ()


# ------------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("name", ["diloco", "edit", "decoupled", "qsr"])
def test_step_writes_all_of_the_recycled_state_and_nothing_that_is_given(name, guard):
    outer = Robust(outer=build_outer(name, **METHODS.get(name, {})), guard=guard).fitted(TABLE, FACTS)
    round_ = next(outer.plan(step)[0] for step in range(1, 9) if outer.plan(step))
    fragment = next(fragment for fragment in outer.fragments(TABLE) if fragment.key == round_.fragment)
    state = begin(outer, fragment, fragment.gather(INITIAL, out=torch.empty(fragment.numel)))
    rows = some_rows(4, numel=fragment.numel)
    result = result_of(rows, notes=tuple((0.1 * row + 0.1,) for row in range(4)) if round_.num_notes else ())
    given = [*state.shared.values(), rows]
    before = [tensor.clone() for tensor in given]
    expected = after(outer, round_, result, state)
    out = spare(state)
    found = after(outer, round_, result, state, out=out)
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
    assert found.state.shared is out.shared or found.state.shared == out.shared
    assert digest_of(found.state.shared) == digest_of(expected.state.shared) != digest_of(state.shared)
    assert (CENTRE in expected.state.shared) == (guard == "centred")
    assert torch.equal(found.target, found.state.shared[ANCHOR])


@pytest.mark.parametrize("guard", GUARDS)
def test_whoever_joins_leaves_or_fails_shared_states_are_equal(guard):
    trajectory = run(
        Robust(outer=build_outer("streaming", **METHODS["streaming"]), guard=guard),
        48,
        joins={14: ["elm"], 33: ["fir"]},
        leaves={13: ["birch"], 31: ["ash", "cedar"]},
        aborted=lambda round_: round_.inner_step in (20, 40),
    )
    assert_parity(trajectory)
    assert {2, 3, 4} <= {len(committed.members) for committed in trajectory.committed}


def test_rounds_are_gathers_and_the_method_sees_its_own():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Probe(Wrapper):
        def emit(self, round_, value, shared, private, work, /, *, out):
            assert (round_.op, CENTRE in shared) == (Op.MEAN, False)
            return self.outer.emit(round_, value, shared, private, work, out=out)

        def settle(self, outcome, /, *, out=None):
            assert (outcome.round_.op, CENTRE in outcome.after, CENTRE in outcome.before) == (Op.MEAN, False, False)
            return self.outer.settle(outcome, out=out)

    outer = Robust(outer=Probe(outer=DiLoCo(inner_steps=4)), guard="centred")
    assert {round_.op for round_ in outer.fitted(TABLE).plan(4)} == {Op.GATHER}
    assert len(run(outer, 8).committed) == 2


def cure_of(name, guard):
    """What the refusal says to take instead; None: the guard fits."""
    try:
        Robust(outer=build_outer(name), guard=guard).fitted(TABLE, FACTS)
    except ValueError as error:
        return re.fullmatch(rf'guard = "{guard}" does not fit: .+; take guard = "(\w+)"', str(error))[1]
    return None


def test_what_a_guard_cannot_judge_is_refused_with_a_cure():
    cures = {name: tuple(cure_of(name, guard) for guard in GUARDS) for name in outer_types()}
    unguarded = ("desloc", "local_adam", "mtdao", "noloco", "data_parallel", "demo")
    assert {name: cure for name, cure in cures.items() if any(cure)} == {
        **dict.fromkeys(unguarded, ("none", "none", "none")),
        **dict.fromkeys(("sparseloco", "async"), (None, "norm", "norm")),
        "powersgd": (None, None, "trimmed"),
    }
