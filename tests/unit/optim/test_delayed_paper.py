# SPDX-License-Identifier: Apache-2.0
"""One-step delayed DiLoCo (PCCL's asynchronous DiLoCo; arXiv:2502.12996, algorithm 2), at boundary t:

Δ^(t) = θ - θ_m;   θ ← Nesterov(θ, mean Δ^(t-1));   θ_m ← θ;   send Δ^(t)

The laws of what is carried, and of memory, hold for every method that is delayed by a whole round.
"""

import random

import pytest
import torch

from isthmus.optim import ANCHOR, Contribution, DiLoCo, Op, Result, Round, State, Work, build_outer
from isthmus.optim.co2 import CO2
from isthmus.optim.delayed import CARRIED, Delayed
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.eager import Eager
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, gradient, run

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
    trajectory = run(Delayed(inner_steps=H), 32, weigh=lambda worker, _work: weights[WORKERS.index(worker)])
    assert_same(committed_anchors(trajectory), direct_delayed(0.4, 0.9, 8, weights=weights), tolerance=1e-5)


def test_aborted_rounds_are_those_of_the_direct_implementation():
    trajectory = run(Delayed(inner_steps=H), 48, aborted=lambda round_: round_.inner_step in (8, 20, 24))
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
    before, after = (run(Delayed(inner_steps=H), steps) for steps in (H - 1, H))
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
        assert state.shared_digest() == before.shared_digest()
        assert torch.equal(aborted.values[worker], plain(method).start(before))
        assert state.private[CARRIED].unique().tolist() == [H * SLOPES[worker]]


# --------------------------------------------------------------------------------------- membership


@pytest.mark.parametrize("method", METHODS)
def test_shared_state_is_equal_on_all_workers_through_joins_leaves_and_aborts(method):
    trajectory = run(
        method(inner_steps=H),
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

    trajectory = run(method(inner_steps=H), 16, joins={when: ["elm"]}, on_step=look)
    assert_parity(trajectory)
    assert [("elm" in committed.members) for committed in trajectory.committed] == [False, False, False, True]
    for value, anchor, carried in seen.values():
        assert torch.equal(value, anchor)
        assert carried.count_nonzero() == 0


# --------------------------------------------------------------------------------------- memory


def filled(method):
    """A state whose tensors are all different, a round, and its result with a contribution."""
    generator = torch.Generator().manual_seed(5)

    def noise():
        return torch.randn(TABLE.numel, generator=generator)

    names = method(inner_steps=H).init(TABLE.whole(), INITIAL)
    state = State(shared={n: noise() for n in names.shared}, private={n: noise() for n in names.private})
    payload = noise()
    contribution = Contribution(
        payload=payload, weight=2.0, read_delivered=lambda out: out.copy_(payload), newer_payload=noise()
    )
    result = Result(value=noise(), members=WORKERS, weight_sum=6.0, contribution=contribution)
    return state, Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=4, delay=4), result


def tensors(state):
    return {**state.shared, **state.private}


def copies(state):
    return {name: tensor.clone() for name, tensor in tensors(state).items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def results(method):
    """What absorb and dropped return: without memory given, and with."""
    outer = method(inner_steps=H)
    for give in (lambda _state: None, State.empty_like):
        for call in ("absorb", "dropped", "dropped by a learner"):
            state, round_, result = filled(method)
            before, value = copies(state), result.value.clone()
            out = give(state)
            if out is not None:
                for tensor in tensors(out).values():
                    tensor.fill_(float("nan"))
            if call == "absorb":
                absorbed = outer.absorb(round_, result, state, out=out)
            else:
                mine = result.contribution if call == "dropped" else None
                absorbed = outer.dropped(round_, mine, state, out=out)
            assert_equal(tensors(state), before)
            assert torch.equal(result.value, value)
            yield call, out, absorbed


@pytest.mark.parametrize("method", METHODS)
def test_a_result_is_the_same_in_recycled_memory_and_leaves_the_state_alone(method):
    first, second = {}, {}
    for call, out, absorbed in results(method):
        assert absorbed.keep == 0.0
        if out is None:
            first[call] = absorbed
        else:
            assert absorbed.state is out
            second[call] = absorbed
    assert first.keys() == second.keys() == {"absorb", "dropped", "dropped by a learner"}
    assert first["dropped by a learner"].state.private[CARRIED].count_nonzero() == 0
    for call, absorbed in first.items():
        assert all(torch.isfinite(tensor).all() for tensor in tensors(absorbed.state).values())
        assert_equal(tensors(absorbed.state), tensors(second[call].state))
        assert torch.equal(absorbed.target, second[call].target)


@pytest.mark.parametrize("method", METHODS)
def test_any_tensor_of_the_recycled_state_may_be_the_mean(method):
    outer = method(inner_steps=H)
    state, round_, result = filled(method)
    expected = copies(outer.absorb(round_, result, state).state)
    for name in tensors(state):
        state, round_, result = filled(method)
        spare = state.empty_like()
        out = State(
            shared={n: result.value if n == name else t for n, t in spare.shared.items()},
            private={n: result.value if n == name else t for n, t in spare.private.items()},
        )
        assert_equal(tensors(outer.absorb(round_, result, state, out=out).state), expected)


@pytest.mark.parametrize("method", METHODS)
def test_memory_of_the_state_is_never_written(method):
    outer = method(inner_steps=H)
    state, round_, result = filled(method)
    for name in tensors(state):
        spare = state.empty_like()
        out = State(
            shared={n: state.shared.get(name, t) if n == name else t for n, t in spare.shared.items()},
            private={n: state.private.get(name, t) if n == name else t for n, t in spare.private.items()},
        )
        with pytest.raises(ValueError, match="never writes"):
            outer.absorb(round_, result, state, out=out)
        with pytest.raises(ValueError, match="never writes"):
            outer.dropped(round_, result.contribution, state, out=out)


@pytest.mark.parametrize("method", METHODS)
def test_emit_may_write_over_the_value_but_not_the_state(method):
    outer = method(inner_steps=H)
    state, round_, _result = filled(method)
    before, value = copies(state), torch.linspace(0.0, 1.0, TABLE.numel)
    expected = outer.start(state) - value + state.private[CARRIED]
    work = Work(inner_steps=H, samples=H)
    separate = outer.emit(round_, value.clone(), state, work, out=torch.empty(TABLE.numel))
    over = outer.emit(round_, value, state, work, out=value)
    assert over.payload is value
    assert torch.equal(over.payload, expected)
    assert torch.equal(separate.payload, expected)
    assert_equal(tensors(state), before)


@pytest.mark.parametrize("method", METHODS)
def test_buffers_of_another_size_are_refused(method):
    outer = method(inner_steps=H)
    state, round_, result = filled(method)
    right, work = torch.zeros(TABLE.numel), Work(inner_steps=H, samples=H)
    for value, out in ((torch.zeros(3), right), (right, torch.zeros(3)), (right.double(), right)):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            outer.emit(round_, value, state, work, out=out)
    with pytest.raises(ValueError, match="initial value"):
        outer.init(TABLE.whole(), torch.zeros(3))
    short = Result(value=torch.zeros(3), members=WORKERS, weight_sum=4.0, contribution=result.contribution)
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
        outer.absorb(round_, short, state)


# --------------------------------------------------------------------------------------- settings


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
    state = Delayed().init(TABLE.whole(), value)
    value.zero_()
    assert state.shared[ANCHOR].sum() == TABLE.numel
    assert state.shared[MOMENTUM].count_nonzero() == state.private[CARRIED].count_nonzero() == 0
