# SPDX-License-Identifier: Apache-2.0
"""One-step delayed DiLoCo (PCCL's asynchronous DiLoCo; arXiv:2502.12996, algorithm 2), at boundary t:

Δ^(t) = θ - θ_m;   θ ← Nesterov(θ, mean Δ^(t-1));   θ_m ← θ;   send Δ^(t)

The laws of what is carried, and of memory, hold for every method that is delayed by a whole round.
"""

import dataclasses
import random

import pytest
import torch

from isthmus.optim import ANCHOR, Contribution, DiLoCo, Op, Outcome, Result, Round, Work, build_outer, default_outer_lr
from isthmus.optim.co2 import CO2
from isthmus.optim.delayed import CARRIED, Delayed
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.eager import Eager
from isthmus.optim.outer import digest_of, empty_like
from isthmus.optim.simulate import State
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, gradient, run
from tests.unit.optim.one_round import after, begin, same, spare, tensors_of

H = 4
METHODS = [Delayed, Eager, CO2]


def direct_delayed(lr, mu, num_blocks, *, weights=(1.0, 1.0, 1.0, 1.0), aborted=()):
    """The listing in double precision; the anchor after each boundary but the first. `aborted`: blocks, from 1."""
    anchor, velocity = INITIAL.double(), torch.zeros(TABLE.numel, dtype=torch.float64)
    carried = [torch.zeros_like(anchor) for _ in WORKERS]
    sent, found = None, []
    for block in range(1, num_blocks + 1):
        payloads = []
        for worker, rest in zip(WORKERS, carried, strict=True):
            value = anchor.clone()
            for step in range((block - 1) * H + 1, block * H + 1):
                value -= 0.03 * gradient(worker, step, value)
            payloads.append(anchor - value + rest)
        carried = [torch.zeros_like(anchor) for _ in WORKERS]
        if sent is not None and block - 1 in aborted:
            carried = sent
        elif sent is not None:
            delta = sum(w * p for w, p in zip(weights, sent, strict=True)) / sum(weights)
            velocity = mu * velocity + delta
            anchor = anchor - lr * (delta + mu * velocity)
            found.append(anchor)
        sent = payloads
    return found


def committed_anchors(trajectory):
    """Without that of the first round, of zeros."""
    assert torch.equal(anchors(trajectory)[0], INITIAL)
    return [anchor.double() for anchor in anchors(trajectory)[1:]]


# --------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize(("lr", "mu"), [(0.4, 0.9), (1.0, 0.0)])
def test_it_follows_a_direct_implementation(lr, mu):
    trajectory = run(Delayed(lr=lr, momentum=mu, inner_steps=H), 32)
    assert_same(committed_anchors(trajectory), direct_delayed(lr, mu, 8), tolerance=1e-5)


def test_weights_weigh_the_mean():
    weights = (3.0, 1.0, 0.5, 1.5)
    trajectory = run(
        Delayed(lr=0.4, momentum=0.9, inner_steps=H), 32, weigh=lambda worker, _work: weights[WORKERS.index(worker)]
    )
    assert_same(committed_anchors(trajectory), direct_delayed(0.4, 0.9, 8, weights=weights), tolerance=1e-5)


def test_aborted_rounds_are_those_of_the_direct_implementation():
    trajectory = run(
        Delayed(lr=0.4, momentum=0.9, inner_steps=H), 48, aborted=lambda round_: round_.inner_step in (8, 20, 24)
    )
    assert [round_.inner_step for round_ in trajectory.dropped] == [8, 20, 24]
    assert_same(committed_anchors(trajectory), direct_delayed(0.4, 0.9, 12, aborted=(2, 5, 6)), tolerance=1e-5)


@pytest.mark.parametrize("method", [Delayed, Eager])
def test_without_overlap_it_is_diloco(method):
    settings = {"lr": 0.4, "momentum": 0.9, "inner_steps": H}
    runs = [
        run(outer, 24, aborted=lambda round_: round_.inner_step == 12)
        for outer in (method(overlap=False, **settings), DiLoCo(**settings))
    ]
    assert_same(*map(anchors, runs), tolerance=0.0)
    assert_same(*(list(r.values.values()) for r in runs), tolerance=0.0 if method is Delayed else 1e-6)


def test_the_first_block_only_sends_the_workers_back():
    before, after = (run(Delayed(lr=0.4, momentum=0.9, inner_steps=H), steps) for steps in (H - 1, H))
    assert all((value - INITIAL).abs().max() > 1e-2 for value in before.values.values())
    assert all(torch.equal(value, INITIAL) for value in after.values.values())


def test_the_plan_is_a_pure_function_of_the_global_step():
    outer, twin = (Delayed(inner_steps=5) for _ in range(2))
    forward = [outer.plan(step) for step in range(21)]
    assert forward == [twin.plan(step) for step in reversed(range(21))][::-1]
    assert [step for step, rounds in enumerate(forward) if rounds] == [0, 5, 10, 15, 20]
    assert forward[5] == (Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=5, delay=5),)
    assert Delayed(inner_steps=5, overlap=False).plan(0) == ()


# --------------------------------------------------------------------------------------- nothing is lost

SLOPES = dict(zip(WORKERS, (1.0, 2.0, 3.0, 6.0), strict=True))
MEAN_SLOPE = 3.0


def constant_step(worker, _inner_step, value):
    value -= SLOPES[worker]


def plain(method, **settings):
    """Settings under which the anchor moves by what arrives."""
    more = {"clip": float("inf")} if method is CO2 else {}
    return method(lr=1.0, momentum=0.0, inner_steps=H, **more, **settings)


def run_constant(method, num_inner_steps=80, **settings):
    settings = {"inner_step": constant_step, "initial": torch.zeros(TABLE.numel), **settings}
    return run(plain(method), num_inner_steps, **settings)


# Of twenty blocks nineteen are due at the end. What was aborted after 68 is still carried then.
ABORTS = [
    {12, 16, 32},
    {0},
    {4},
    {0, 4, 8},
    {12, 16, 20, 24, 28},
    {68},
    set(range(0, 72, 8)),
    *({4 * k for k in range(18) if random.Random(f"{seed} {k}").random() < 0.6} for seed in range(6)),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("aborted", ABORTS, ids=str)
def test_every_block_of_work_arrives_once_whatever_is_aborted(method, aborted):
    trajectory = run_constant(method, aborted=lambda round_: round_.inner_step in aborted)
    assert {round_.inner_step for round_ in trajectory.dropped} == aborted
    assert trajectory.committed[-1].round_.inner_step == 76
    assert trajectory.committed[-1].shared[ANCHOR].unique().tolist() == [-19 * H * MEAN_SLOPE]


@pytest.mark.parametrize("method", METHODS)
def test_an_aborted_round_is_not_applied_and_its_workers_go_back(method):
    aborted = run_constant(method, 2 * H, aborted=lambda round_: round_.inner_step == H)
    without = run_constant(method, 2 * H - 1)
    for worker in WORKERS:
        (state,), (before,) = aborted.states[worker].values(), without.states[worker].values()
        assert digest_of(state.shared) == digest_of(before.shared)
        assert torch.equal(aborted.values[worker], plain(method).start(*before))
        assert state.private[CARRIED].unique().tolist() == [H * SLOPES[worker]]


# --------------------------------------------------------------------------------------- membership


@pytest.mark.parametrize("method", METHODS)
def test_shared_state_is_equal_on_all_workers_through_joins_leaves_and_aborts(method):
    trajectory = run(
        method(momentum=0.5, inner_steps=H),
        60,
        leaves={13: ["birch"], 32: ["ash"]},
        joins={0: ["gum"], 8: ["fir"], 18: ["elm"], 33: ["hazel"]},
        aborted=lambda round_: round_.inner_step in (16, 28, 32),
    )
    assert_parity(trajectory)
    assert trajectory.committed[-1].digests.keys() == {"cedar", "dogwood", "elm", "fir", "gum", "hazel"}
    assert set(trajectory.committed[-1].members) == trajectory.committed[-1].digests.keys()
    assert [round_.inner_step for round_ in trajectory.dropped] == [16, 28, 32]


@pytest.mark.parametrize("when", [2 * H, 2 * H + 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_joiner_hears_the_round_in_flight_and_sends_its_own_first_block(method, when):
    seen = {}

    def look(step, trajectory):
        if step in (when, 3 * H):
            (state,) = trajectory.states["elm"].values()
            seen[step] = (
                trajectory.values["elm"].clone(),
                state.shared[ANCHOR].clone(),
                state.private[CARRIED].clone(),
            )

    trajectory = run(method(momentum=0.5, inner_steps=H), 16, joins={when: ["elm"]}, on_step=look)
    assert_parity(trajectory)
    assert [("elm" in committed.members) for committed in trajectory.committed] == [False, False, False, True]
    for value, anchor, carried in seen.values():
        assert torch.equal(value, anchor)
        assert carried.count_nonzero() == 0


# --------------------------------------------------------------------------------------- memory


def filled(method):
    """A state whose tensors are all different, a round, its result, and what the worker gave to it."""
    generator = torch.Generator().manual_seed(5)

    def noise():
        return torch.randn(TABLE.numel, generator=generator)

    names = begin(method(momentum=0.5, inner_steps=H), TABLE.whole(), INITIAL)
    state = State(shared={n: noise() for n in names.shared}, private={n: noise() for n in names.private})
    payload = noise()
    mine = Contribution(
        payload=payload, weight=2.0, read_delivered=lambda out: out.copy_(payload), newer_payload=noise()
    )
    result = Result(value=noise(), members=WORKERS, weight_sum=6.0)
    return state, Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=4, delay=4), result, mine


def copies(state):
    return State(*({name: tensor.clone() for name, tensor in part.items()} for part in state))


CASES = {
    "counted": (True, True),
    "counted, of a learner": (True, False),
    "not counted": (False, True),
    "not counted, of a learner": (False, False),
}
"""Whether there is a result, and whether the worker gave something."""


def settled_as(method, case, state, round_, result, mine, *, out=None):
    has_result, has_given = CASES[case]
    return after(
        method(momentum=0.5, inner_steps=H),
        round_,
        result if has_result else None,
        state,
        mine if has_given else None,
        out=out,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_the_same_in_recycled_memory_and_leaves_the_state_alone(method, case):
    done = []
    for give in (lambda _state: None, spare):
        state, round_, result, mine = filled(method)
        before, value = copies(state), result.value.clone()
        out = give(state)
        done.append(settled_as(method, case, state, round_, result, mine, out=out))
        assert same(state, before)
        assert torch.equal(result.value, value)
    fresh, recycled = done
    assert recycled.state.private is out.private
    assert recycled.state.shared is (out.shared if CASES[case][0] else state.shared)
    assert same(fresh.state, recycled.state)
    assert torch.equal(fresh.target, recycled.target)
    assert fresh.keep == recycled.keep == 0.0
    assert all(tensor.isfinite().all() for tensor in tensors_of(fresh.state))
    carried = fresh.state.private[CARRIED]
    assert torch.equal(carried, mine.payload if case == "not counted" else torch.zeros(TABLE.numel))


@pytest.mark.parametrize("method", METHODS)
def test_any_tensor_of_the_recycled_state_may_be_the_mean(method):
    outer = method(momentum=0.5, inner_steps=H)
    state, round_, result, _mine = filled(method)
    expected = digest_of(outer.step(round_, result, state.shared))
    for name in state.shared:
        state, round_, result, _mine = filled(method)
        out = {**empty_like(state.shared), name: result.value}
        assert digest_of(outer.step(round_, result, state.shared, out=out)) == expected


@pytest.mark.parametrize("method", METHODS)
def test_memory_of_the_state_is_never_written(method):
    outer = method(momentum=0.5, inner_steps=H)
    state, round_, result, mine = filled(method)
    for name, tensor in state.shared.items():
        with pytest.raises(ValueError, match="never writes"):
            outer.step(round_, result, state.shared, out={**empty_like(state.shared), name: tensor})
    for name, tensor in state.private.items():
        for case in CASES:
            out = State(empty_like(state.shared), {**empty_like(state.private), name: tensor})
            with pytest.raises(ValueError, match="never writes"):
                settled_as(method, case, state, round_, result, mine, out=out)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_was_not_counted_goes_where_the_others_went_and_brings_its_block_later(method):
    """Its payload came too late for a round that the others made: the anchor moves, and it takes the block along."""
    outer = plain(method)
    state, round_, result, mine = filled(method)
    moved = outer.step(round_, result, state.shared)
    missed = Outcome(
        round_=round_, result=None, contribution=mine, before=state.shared, after=moved, private=state.private
    )
    settled = outer.settle(missed)
    assert torch.equal(settled.private[CARRIED], mine.payload)
    assert torch.equal(settled.target, outer.start(moved, settled.private))
    assert not torch.equal(settled.target, outer.start(state.shared, state.private))
    for name in state.private.keys() - {CARRIED}:
        assert torch.equal(settled.private[name], state.private[name])


@pytest.mark.parametrize("method", METHODS)
def test_where_workers_wait_they_keep_what_was_not_counted(method):
    outer = method(momentum=0.5, inner_steps=H, overlap=False)
    state, round_, _result, mine = filled(method)
    missed = after(outer, dataclasses.replace(round_, delay=0), None, state, mine)
    assert missed.keep == 1.0
    assert missed.state.private is state.private


@pytest.mark.parametrize("method", METHODS)
def test_emit_may_write_over_the_value_but_not_the_state(method):
    outer = method(momentum=0.5, inner_steps=H)
    state, round_, _result, _mine = filled(method)
    before, value = copies(state), torch.linspace(0.0, 1.0, TABLE.numel)
    expected = outer.start(*state) - value + state.private[CARRIED]
    work = Work(inner_steps=H, samples=H)
    separate = outer.emit(round_, value.clone(), *state, work, out=torch.empty(TABLE.numel))
    over = outer.emit(round_, value, *state, work, out=value)
    assert over.payload is value
    assert torch.equal(over.payload, expected)
    assert torch.equal(separate.payload, expected)
    assert same(state, before)


@pytest.mark.parametrize("method", METHODS)
def test_buffers_of_another_size_are_refused(method):
    outer = method(momentum=0.5, inner_steps=H)
    state, round_, _result, _mine = filled(method)
    right, work = torch.zeros(TABLE.numel), Work(inner_steps=H, samples=H)
    for value, out in ((torch.zeros(3), right), (right, torch.zeros(3)), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            outer.emit(round_, value, *state, work, out=out)
    with pytest.raises(ValueError, match="initial value"):
        outer.init(TABLE.whole(), torch.zeros(3))
    short = Result(value=torch.zeros(3), members=WORKERS, weight_sum=4.0)
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
        outer.step(round_, short, state.shared)


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("method", METHODS)
def test_without_a_rate_of_its_own_a_round_takes_the_best_one_for_those_who_gave_to_it(method):
    state, round_, result, _mine = filled(method)
    for weights in ((1.0, 1.0), (1.0,) * 8):
        members = tuple(f"w{index}" for index in range(len(weights)))
        given = dataclasses.replace(result, members=members, weights=weights, weight_sum=sum(weights))
        moved = method(lr=None, momentum=0.5, inner_steps=H).step(round_, given, state.shared)
        best = method(lr=default_outer_lr(len(weights)), momentum=0.5, inner_steps=H).step(round_, given, state.shared)
        assert digest_of(moved) == digest_of(best)


@pytest.mark.parametrize("name", ["delayed", "eager", "co2"])
def test_the_rate_that_goes_by_the_members_can_be_asked_for(name):
    assert build_outer(name, lr=None).lr is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"overlap": 1}, "'overlap' .* must be bool"),
        ({"delay": 3}, "no setting 'delay'"),
    ],
)
@pytest.mark.parametrize("name", ["delayed", "eager", "co2"])
def test_a_setting_of_another_type_or_range_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer(name, **settings)


def test_it_is_built_by_its_name():
    assert build_outer("delayed", inner_steps=50) == Delayed(inner_steps=50)


def test_init_owns_its_memory():
    value = torch.ones(TABLE.numel)
    state = begin(Delayed(), TABLE.whole(), value)
    value.zero_()
    assert state.shared[ANCHOR].sum() == TABLE.numel
    assert state.shared[MOMENTUM].count_nonzero() == state.private[CARRIED].count_nonzero() == 0
