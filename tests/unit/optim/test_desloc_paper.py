# SPDX-License-Identifier: Apache-2.0
"""DES-LOC (arXiv:2505.22549), algorithm 1:

if t mod K_u = 0: u ← mean u;  if t mod K_v = 0: v ← mean v;  if t mod K_x = 0: x ← mean x
"""

import pytest
import torch

from isthmus.optim.data_parallel import DataParallel
from isthmus.optim.desloc import DesLoc
from isthmus.optim.local_adam import LocalAdam
from isthmus.optim.outer import ANCHOR, GRAD, PARAM, Contribution, Result, Work
from isthmus.optim.registry import build_outer
from isthmus.optim.simulate import State
from isthmus.optim.workload import ExactWire
from tests.unit.optim.adam_lab import AdamRows, adam_directly, fixed_gradient, run_rows
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, assert_parity
from tests.unit.optim.one_round import after, begin, digest, same, spare

U, V = "exp_avg", "exp_avg_sq"
NUMEL = TABLE.numel


def anchors(trajectory):
    return [c.shared[ANCHOR] for c in trajectory.committed if c.round_.fragment.kind == PARAM]


def assert_follows(rows, direct):
    for kind, name in ((PARAM, "x"), (U, "u"), (V, "v")):
        torch.testing.assert_close(rows.of_workers(kind).double(), direct[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_inner_steps", [24, 29])
def test_it_follows_a_direct_implementation(num_inner_steps):
    rows = AdamRows()
    trajectory = run_rows(DesLoc(inner_steps=4), num_inner_steps, rows=rows)
    assert_follows(rows, adam_directly({"x": 4, "u": 12, "v": 24}, num_inner_steps))
    assert_parity(trajectory)


def test_workers_differ_in_every_state_before_they_are_averaged():
    rows = AdamRows()
    run_rows(DesLoc(inner_steps=4), 3, rows=rows)
    for kind in (PARAM, U, V):
        values = rows.of_workers(kind)
        assert all((values[0] - other).abs().max() > 1e-3 for other in values[1:])


def test_each_state_is_equal_on_all_workers_after_its_own_period_and_only_then():
    outer = DesLoc(inner_steps=2, state_multiples=(2, 3))
    rows, alike = AdamRows(), {PARAM: [], U: [], V: []}

    def look(step, _trajectory):
        for kind, steps in alike.items():
            if step and (rows.of_workers(kind) == rows.of_workers(kind)[0]).all():
                steps.append(step)

    run_rows(outer, 12, rows=rows, on_step=look)
    assert alike == {PARAM: [2, 4, 6, 8, 10, 12], U: [4, 8, 12], V: [6, 12]}


def test_for_fixed_gradients_the_mean_first_moment_does_not_depend_on_its_period():
    means = []
    for multiple in (1, 2, 5, 24):
        rows = AdamRows(gradient=fixed_gradient)
        run_rows(DesLoc(inner_steps=1, state_multiples=(multiple, 6)), rows=rows)
        means.append(rows.of_workers(U).mean(0))
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], rtol=1e-5, atol=1e-6)


def test_with_all_periods_one_the_first_moment_is_data_parallels_and_the_second_is_larger():
    local, parallel = AdamRows(gradient=fixed_gradient), AdamRows(gradient=fixed_gradient)
    run_rows(DesLoc(inner_steps=1, state_multiples=(1, 1)), rows=local)
    run_rows(DataParallel(), rows=parallel)
    torch.testing.assert_close(local.of_workers(U), parallel.of_workers(U), rtol=1e-5, atol=1e-6)
    # The mean of squares is the square of the mean and a variance.
    of_squares, of_means = local.of_workers(V), parallel.of_workers(V)
    assert (of_squares >= of_means).all()
    assert of_squares.sum() > 1.5 * of_means.sum()
    assert not torch.allclose(local.of_workers(PARAM), parallel.of_workers(PARAM), atol=1e-3)


def test_with_all_periods_one_and_the_same_data_it_is_data_parallel():
    def same(_worker, inner_step, value):
        return fixed_gradient("ash", inner_step, value) + 0.7 * value

    local, parallel = AdamRows(gradient=same), AdamRows(gradient=same)
    run_rows(DesLoc(inner_steps=1, state_multiples=(1, 1)), rows=local)
    run_rows(DataParallel(), rows=parallel)
    torch.testing.assert_close(local.of_workers(PARAM), parallel.of_workers(PARAM), rtol=1e-4, atol=1e-5)


def test_equal_periods_are_local_adam():
    desloc, local_adam = AdamRows(), AdamRows()
    a = run_rows(DesLoc(inner_steps=4, state_multiples=(1, 1)), rows=desloc)
    b = run_rows(LocalAdam(inner_steps=4), rows=local_adam)
    assert [c.digests for c in a.committed] == [c.digests for c in b.committed]
    for kind in (PARAM, U, V):
        assert torch.equal(desloc.of_workers(kind), local_adam.of_workers(kind))


def test_recommended_periods_cost_half_of_local_adams_bytes():
    desloc = run_rows(DesLoc(inner_steps=2), rows=AdamRows())
    local_adam = run_rows(LocalAdam(inner_steps=2), rows=AdamRows())
    assert desloc.num_rounds == 12 + 4 + 2
    assert desloc.payload_nbytes == 18 * 4 * NUMEL
    assert desloc.sent_nbytes / local_adam.sent_nbytes == pytest.approx(1.5 / 3)


def test_without_states_every_worker_keeps_its_moments():
    rows = AdamRows()
    run_rows(DesLoc(inner_steps=4, states=(), state_multiples=()), rows=rows)
    assert_follows(rows, adam_directly({"x": 4}, 24))


def test_weights_weigh_every_mean():
    rows = AdamRows()
    weights = dict(zip(WORKERS, (3.0, 1.0, 0.0, 0.5), strict=True))
    before = AdamRows()
    outer = DesLoc(inner_steps=4, state_multiples=(1, 1))
    run_rows(outer, 4, rows=rows, weigh=lambda worker, _work: weights[worker])
    run_rows(outer, 4, rows=before, aborted=lambda _round: True)
    for kind in (PARAM, U, V):
        expected = sum(w * row for w, row in zip(weights.values(), before.of_workers(kind), strict=True)) / 4.5
        torch.testing.assert_close(rows.of_workers(kind), expected.expand(len(WORKERS), -1), rtol=1e-5, atol=1e-6)


def test_the_anchor_is_the_mean_of_the_parameters():
    rows = AdamRows()
    trajectory = run_rows(DesLoc(inner_steps=4), 24, rows=rows)
    assert all(torch.equal(value, anchors(trajectory)[-1]) for value in rows.of_workers(PARAM))


# ---------------------------------------- aborts, joins, leaves


def test_a_mean_that_is_aborted_is_left_out_and_nothing_else_changes():
    aborted = {("u", 12), ("x", 8), ("x", 16), ("v", 24)}
    names = {PARAM: "x", U: "u", V: "v"}
    rows = AdamRows()
    trajectory = run_rows(
        DesLoc(inner_steps=4),
        30,
        rows=rows,
        aborted=lambda round_: (names[round_.fragment.kind], round_.inner_step) in aborted,
    )
    assert len(trajectory.dropped) == 4
    assert_follows(rows, adam_directly({"x": 4, "u": 12, "v": 24}, 30, aborted=aborted))


def test_an_aborted_round_leaves_state_and_workers_as_they_were():
    with_abort, without = AdamRows(), AdamRows()
    a = run_rows(DesLoc(inner_steps=4), 4, rows=with_abort, aborted=lambda _round: True)
    b = run_rows(DesLoc(inner_steps=5), 4, rows=without)
    assert torch.equal(with_abort.tensors[PARAM], without.tensors[PARAM])
    for worker in WORKERS:
        digests = [{key.kind: digest(s) for key, s in t.states[worker].items()} for t in (a, b)]
        assert digests[0] == digests[1]


@pytest.mark.parametrize("randomised", [False, True])
def test_members_agree_after_every_round_whoever_comes_and_goes(randomised):
    rows = AdamRows()
    trajectory = run_rows(
        DesLoc(inner_steps=3, randomised=randomised),
        60,
        rows=rows,
        joins={4: ["elm"], 9: ["fir"], 31: ["birch"]},
        leaves={7: ["birch"], 20: ["elm"], 22: ["cedar"]},
        aborted=lambda round_: round_.inner_step in (12, 13, 15),
    )
    assert_parity(trajectory)
    assert {c.round_.fragment.kind for c in trajectory.committed} == {PARAM, U, V}
    assert all(torch.isfinite(value).all() for value in trajectory.values.values())


def test_a_joiner_starts_from_the_anchor_with_moments_of_its_own():
    rows, seen = AdamRows(), []

    def look(step, trajectory):
        if step == 6:
            (row,) = (row for row, worker in rows.workers.items() if worker == "elm")
            seen.append((trajectory.values["elm"].clone(), rows.tensors[U][row].clone()))

    trajectory = run_rows(DesLoc(inner_steps=4), 24, rows=rows, joins={6: ["elm"]}, on_step=look)
    value, moment = seen[0]
    assert torch.equal(value, anchors(trajectory)[0])
    assert not moment.any()
    assert torch.equal(rows.tensors[U][4], rows.tensors[U][0])


# ---------------------------------------- wire


class Rough(ExactWire):
    """A codec whose error is larger than small values: everything arrives a little too low."""

    def exchange(self, round_, fragment, payloads, weights):
        lowered = {worker: payload - 0.12 for worker, payload in payloads.items()}
        return super().exchange(round_, fragment, lowered, weights)


def test_second_moments_stay_non_negative_whatever_the_codec_does():
    rows = AdamRows()
    trajectory = run_rows(DesLoc(inner_steps=2), 24, rows=rows, wire=Rough())
    assert (rows.of_workers(V) >= 0.0).all()
    assert not rows.of_workers(V).all()
    assert (rows.of_workers(U) < 0.0).any()
    assert all(torch.isfinite(value).all() for value in trajectory.values.values())


def test_second_moments_travel_exactly_and_the_rest_as_configured():
    by_kind = {round_.fragment.kind: round_.codec for round_ in DesLoc(inner_steps=1).plan(6)}
    assert by_kind == {PARAM: None, U: None, V: "raw"}
    by_kind = {round_.fragment.kind: round_.codec for round_ in DesLoc(second_moment_codec=None).plan(1536)}
    assert by_kind == {PARAM: None, U: None, V: None}


def test_means_of_states_are_kept_for_the_workers_and_that_of_the_parameters_is_the_anchor():
    by_kind = {round_.fragment.kind: round_.keeps_value for round_ in DesLoc(inner_steps=1).plan(6)}
    assert by_kind == {PARAM: False, U: True, V: True}


# ---------------------------------------- plan and settings


def test_the_plan_is_a_pure_function_of_the_global_step():
    outer, twin = DesLoc(inner_steps=2), DesLoc(inner_steps=2)
    forward = [outer.plan(step) for step in range(25)]
    assert forward == [twin.plan(step) for step in reversed(range(25))][::-1]
    assert [[round_.fragment.kind for round_ in rounds] for rounds in forward[::6]] == [
        [],
        [PARAM, U],
        [PARAM, U, V],
        [PARAM, U],
        [PARAM, U, V],
    ]
    assert all(round_.delay == 0 for rounds in forward for round_ in rounds)


def test_the_randomised_plan_has_the_same_frequencies_and_is_equal_on_all_members():
    outer, twin = DesLoc(inner_steps=4, randomised=True), DesLoc(inner_steps=4, randomised=True)
    assert [outer.plan(step) for step in range(200)] == [twin.plan(step) for step in range(200)]
    assert not outer.plan(0)
    drawn = [round_ for step in range(12_000) for round_ in outer.plan(step)]
    steps = {kind: [r.inner_step for r in drawn if r.fragment.kind == kind] for kind in (PARAM, U, V)}
    for kind, period in ((PARAM, 4), (U, 12), (V, 24)):
        assert len(steps[kind]) == pytest.approx(12_000 / period, rel=0.15)
    # Independent of each other, and of multiples of the period.
    assert len(set(steps[PARAM]) & set(steps[U])) == pytest.approx(12_000 / 48, rel=0.25)
    assert sum(step % 4 == 0 for step in steps[PARAM]) == pytest.approx(len(steps[PARAM]) / 4, rel=0.15)


def test_all_states_every_step_leave_nothing_to_chance():
    outer = DesLoc(inner_steps=1, state_multiples=(1, 1), randomised=True)
    assert all(len(outer.plan(step)) == 3 for step in range(1, 100))


def test_the_default_periods_are_the_papers():
    assert DesLoc().periods == {PARAM: 256, U: 768, V: 1536}


def test_lists_of_a_configuration_become_tuples():
    outer = build_outer("desloc", inner_steps=8, states=["exp_avg"], state_multiples=[2])
    assert outer == DesLoc(inner_steps=8, states=("exp_avg",), state_multiples=(2,))
    assert hash(outer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"states": ("exp_avg",)}, "1 states need as many"),
        ({"state_multiples": (3,)}, "2 states need as many"),
        ({"state_multiples": (3, 0)}, "whole numbers of at least 1"),
        ({"state_multiples": (3, 1.5)}, "whole numbers of at least 1"),
        ({"state_multiples": (True, 1)}, "whole numbers of at least 1"),
        ({"states": ("exp_avg", "exp_avg")}, "different names"),
        ({"states": ("exp_avg", "param")}, "different names"),
        ({"states": (GRAD, "exp_avg")}, "different names"),
        ({"states": ("", "exp_avg")}, "different names"),
        ({"states": "exp_avg", "state_multiples": (1,) * 7}, "different names"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DesLoc(**settings)


# ---------------------------------------- the protocol's rules

OUTER = DesLoc(inner_steps=1, state_multiples=(1, 1))
NOTHING = State(shared={}, private={})
PARAM_ROUND, U_ROUND, V_ROUND = OUTER.plan(1)
WORK = Work(inner_steps=1, samples=1.0)


def _state_and_result():
    generator = torch.Generator().manual_seed(3)
    anchor, value = torch.randn(NUMEL, generator=generator), torch.randn(NUMEL, generator=generator)
    return State(shared={ANCHOR: anchor}, private={}), Result(value=value, members=WORKERS, weight_sum=4.0)


def test_emit_gives_the_way_from_the_anchor_or_the_state_itself_and_may_write_over_the_value():
    state, _ = _state_and_result()
    value, before = torch.linspace(0.0, 1.0, NUMEL), digest(state)
    for round_, held, expected in (
        (PARAM_ROUND, state, state.shared[ANCHOR] - value),
        (U_ROUND, NOTHING, value),
        (V_ROUND, NOTHING, value),
    ):
        own = value.clone()
        separate = OUTER.emit(round_, own, *held, WORK, out=torch.empty(NUMEL))
        assert torch.equal(own, value)
        over = OUTER.emit(round_, own, *held, WORK, out=own)
        assert over.payload is own
        assert torch.equal(separate.payload, expected)
        assert torch.equal(over.payload, expected)
    assert digest(state) == before


def test_a_step_is_pure_and_writes_into_the_recycled_state():
    state, result = _state_and_result()
    before, value = digest(state), result.value.clone()
    fresh, out = after(OUTER, PARAM_ROUND, result, state), spare(state)
    recycled = after(OUTER, PARAM_ROUND, result, state, out=out)
    assert recycled.state.shared is out.shared
    assert recycled.target is out.shared[ANCHOR]
    assert recycled.keep == fresh.keep == 0.0
    assert digest(out) == digest(fresh.state) != before
    assert digest(state) == before
    assert torch.equal(result.value, value)


def test_the_mean_of_an_inner_state_is_no_shared_state_and_the_result_stays_as_it_is():
    _, result = _state_and_result()
    value = result.value.clone()
    for round_, expected in ((U_ROUND, value), (V_ROUND, value.clamp(min=0.0))):
        settled = after(OUTER, round_, result, NOTHING, out=NOTHING)
        assert torch.equal(settled.target, expected)
        assert settled.keep == 0.0
        assert same(settled.state, NOTHING)
        assert torch.equal(result.value, value)


def test_the_means_memory_can_become_the_anchor():
    state, result = _state_and_result()
    expected = digest(after(OUTER, PARAM_ROUND, result, state).state)
    out = State(shared={ANCHOR: result.value}, private={})
    assert digest(after(OUTER, PARAM_ROUND, result, state, out=out).state) == expected


def test_no_method_writes_over_the_state_it_is_given():
    state, result = _state_and_result()
    with pytest.raises(ValueError, match="never writes"):
        after(OUTER, PARAM_ROUND, result, state, out=state)


def test_a_round_that_was_not_counted_changes_nothing_but_parameters_follow_the_anchor():
    state, result = _state_and_result()
    before = digest(state)
    mine = Contribution(payload=result.value, weight=1.0, read_delivered=lambda out: out)
    for round_, held in ((PARAM_ROUND, state), (U_ROUND, NOTHING), (V_ROUND, NOTHING)):
        missed = after(OUTER, round_, None, held, mine, out=spare(held))
        assert same(missed.state, held)
        assert (missed.target, missed.keep) == (None, 1.0)
    assert digest(state) == before


def test_init_owns_its_memory_and_keeps_the_parameters_only():
    value = INITIAL.clone()
    state = begin(OUTER, TABLE.whole(), value)
    value.zero_()
    assert torch.equal(state.shared[ANCHOR], INITIAL)
    assert not state.private
    assert same(begin(OUTER, TABLE.whole(V), value), NOTHING)


def test_buffers_of_another_size_or_type_are_refused():
    state, result = _state_and_result()
    right, wrong = torch.zeros(NUMEL), torch.zeros(3)
    for round_ in (PARAM_ROUND, U_ROUND):
        for value, out in ((wrong, right), (right, wrong), (right.double(), right)):
            with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
                OUTER.emit(round_, value, *state, WORK, out=out)
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
        OUTER.emit(PARAM_ROUND, wrong, *state, WORK, out=wrong)
    with pytest.raises(ValueError, match="the next anchor"):
        OUTER.step(PARAM_ROUND, result, state.shared, out={ANCHOR: wrong})
    with pytest.raises(ValueError, match="the mean of the payloads"):
        OUTER.step(PARAM_ROUND, Result(value=wrong, members=WORKERS, weight_sum=1.0), state.shared)
    with pytest.raises(ValueError, match="initial value"):
        OUTER.init(TABLE.whole(), wrong)
