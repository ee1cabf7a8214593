# SPDX-License-Identifier: Apache-2.0
"""Error feedback around means: what a codec loses is sent again, once, and only what was counted moves the residual."""

import itertools

import pytest
import torch

from isthmus.optim import Contribution, DiLoCo, FragmentTable, Result, RunFacts, Work, build_outer, outer_types
from isthmus.optim.error_feedback import RESIDUAL, ErrorFeedback
from isthmus.optim.robust import Robust
from isthmus.optim.workload import ExactWire
from scripts.convergence.codec_wire import CodecWire
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, run
from tests.unit.optim.one_round import After, after, begin, spare

KEY = TABLE.whole().key
FACTS = RunFacts(num_peers=4, outer_steps=8, peak_lr=1e-3, schedule="cosine", warmup_steps=2)
METHODS = {
    "diloco": {"inner_steps": 4},
    "streaming": {"inner_steps": 6, "num_fragments": 3, "delay": 1},
    "edit": {"inner_steps": 4},
    "decoupled": {"inner_steps": 6, "num_fragments": 6, "delay": 2},
    "delayed": {"inner_steps": 4},
    "eager": {"inner_steps": 4},
}

WIDE = FragmentTable.from_named_shapes([(f"layer{number}", (16, 64)) for number in range(3)])
INDEX = torch.arange(float(WIDE.numel))


def opposed_step(worker, _inner_step, value):
    """Of quadratics with minima far apart, most of them small beside a few: two bits a number lose the small ones."""
    number = 1.0 + ord(worker[0]) - ord("a")
    minimum = torch.sin(INDEX * number) * torch.sin(0.37 * INDEX) ** 4
    value -= 0.1 * (0.2 + 0.8 * torch.sin(INDEX) ** 2) * (value - minimum)


def where_it_settles(outer, codec):
    """The mean of the last anchors."""
    settings = {"table": WIDE, "initial": torch.zeros(WIDE.numel), "inner_step": opposed_step}
    trajectory = run(outer, 300, wire=CodecWire(codec), **settings)
    assert_parity(trajectory)
    return torch.stack(anchors(trajectory)[-20:]).mean(0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_diloco_with_two_bits_comes_near_to_raw_with_it_and_not_without(momentum):
    method = DiLoCo(lr=0.6, momentum=momentum, inner_steps=5)
    raw = where_it_settles(method, "raw")
    with_it = (where_it_settles(ErrorFeedback(outer=method), "twobit") - raw).norm()
    without = (where_it_settles(method, "twobit") - raw).norm()
    assert without > 0.5 * raw.norm()
    assert with_it < 0.2 * raw.norm()


class RoundingWire:
    """To whole multiples of a step; remembers all that arrived."""

    def __init__(self, step):
        self.step = step
        self.arrived = {}

    def exchange(self, round_, fragment, payloads, weights):
        delivered = {name: (payload / self.step).round() * self.step for name, payload in payloads.items()}
        for name, payload in delivered.items():
            self.arrived[name] = self.arrived.get(name, 0.0) + payload.double()
        return ExactWire().exchange(round_, fragment, delivered, weights)


@pytest.mark.parametrize("name", ["diloco", "delayed"])
@pytest.mark.parametrize("aborted", [(), (8, 12, 24)])
def test_what_has_arrived_and_what_is_left_is_all_there_was(name, aborted):
    """Every inner step adds a thousandth, whatever happens, so all differences together are known."""

    def step(worker, _inner_step, value):
        value -= 0.001 * (1 + WORKERS.index(worker))

    settings = {"inner_step": step, "aborted": lambda round_: round_.inner_step in aborted}
    method = build_outer(name, inner_steps=4, lr=1.0, momentum=0.0)
    wire = RoundingWire(0.01)
    trajectory = run(ErrorFeedback(outer=method), 44, wire=wire, **settings)
    exact = ExactWire()
    sums = {}

    class Summing:
        def exchange(self, round_, fragment, payloads, weights):
            for worker, payload in payloads.items():
                sums[worker] = sums.get(worker, 0.0) + payload.double()
            return exact.exchange(round_, fragment, payloads, weights)

    run(method, 44, wire=Summing(), **settings)
    for worker in WORKERS:
        left = trajectory.states[worker][KEY].private[RESIDUAL]
        in_flight = 0.005 if name == "delayed" else 0.0  # of two residuals in turn one is under way
        assert left.abs().max() <= 0.005 + 1e-6
        error = (wire.arrived[worker] + left - sums[worker]).abs().max()
        assert error <= 1e-5 + in_flight


@pytest.mark.parametrize("name", METHODS)
def test_without_loss_the_method_is_what_it_was(name):
    settings = {
        "aborted": lambda round_: round_.inner_step in (12, 18),
        "leaves": {13: ["birch"]},
        "joins": {14: ["elm"]},
    }
    method = build_outer(name, **METHODS[name])
    bare, wrapped = (run(outer, 40, **settings) for outer in (method, ErrorFeedback(outer=method)))
    assert_same(anchors(wrapped), anchors(bare), tolerance=1e-5)
    assert_same(list(wrapped.values.values()), list(bare.values.values()), tolerance=1e-5)
    assert_parity(wrapped)


@pytest.mark.parametrize("name", METHODS)
def test_under_a_lossy_codec_shared_states_are_equal_whoever_joins_or_fails(name):
    trajectory = run(
        ErrorFeedback(outer=build_outer(name, **METHODS[name])),
        40,
        wire=CodecWire("twobit"),
        joins={14: ["elm"]},
        leaves={13: ["birch"]},
        aborted=lambda round_: round_.inner_step in (12, 18),
    )
    assert_parity(trajectory)
    assert all(value.isfinite().all() for value in trajectory.values.values())


def test_a_guard_around_it_judges_what_was_sent():
    trajectory = run(
        Robust(outer=ErrorFeedback(outer=DiLoCo(inner_steps=4)), guard="trimmed"), 40, wire=CodecWire("twobit")
    )
    assert_parity(trajectory)
    for worker, state in trajectory.states.items():
        assert state[KEY].private[RESIDUAL].any(), worker


# ------------------------------------------------------------------------------------------- one round


def one_round(*, weight=2.0, is_counted=True, out=None):
    """A payload of 1 and a residual of 0.25, of which 0.75 are delivered."""
    outer = ErrorFeedback(outer=DiLoCo(inner_steps=4)).fitted(TABLE)
    (round_,) = outer.plan(4)
    state = begin(outer, TABLE.whole(), INITIAL)
    assert not state.private[RESIDUAL].any(), "who begins owes nothing"
    state.private[RESIDUAL].fill_(0.25)
    work = Work(inner_steps=4, samples=4.0)
    emitted = outer.emit(round_, INITIAL - 1.0, state.shared, state.private, work, out=torch.empty(TABLE.numel))
    torch.testing.assert_close(emitted.payload, torch.full_like(INITIAL, 1.25))
    mine = Contribution(
        payload=emitted.payload, weight=weight, read_delivered=lambda into: into.fill_(0.75), kept=emitted.kept
    )
    result = Result(value=torch.ones_like(INITIAL), members=("ash",), weight_sum=2.0, weights=(2.0,))
    return (
        state,
        after(outer, round_, result if is_counted else None, state, mine, out=out and spare(state)),
        round_,
        outer,
    )


def residual_of(done: After):
    return set(done.state.private[RESIDUAL].tolist())


@pytest.mark.parametrize("out", [None, True])
def test_the_residual_is_what_was_sent_and_did_not_arrive(out):
    _, done, *_ = one_round(out=out)
    assert residual_of(done) == {0.5}
    assert done.keep == 0.0


@pytest.mark.parametrize("out", [None, True])
@pytest.mark.parametrize("how", [{"weight": 0.0}, {"is_counted": False}])
def test_what_was_not_counted_leaves_the_residual_that_was_in_it(out, how):
    _, done, *_ = one_round(**how, out=out)
    assert residual_of(done) == {0.25}


def test_who_gave_nothing_keeps_its_residual():
    state, _, round_, outer = one_round()
    result = Result(value=torch.ones_like(INITIAL), members=("birch",), weight_sum=1.0, weights=(1.0,))
    assert residual_of(after(outer, round_, result, state)) == {0.25}


def test_it_is_refused_where_it_does_not_fit():
    reasons = {}
    for name in outer_types():
        try:
            ErrorFeedback(outer=build_outer(name)).fitted(TABLE, FACTS)
        except ValueError as error:
            reasons[name] = str(error)
    own, none = "it has a residual of its own", "it exchanges no differences from a shared anchor"
    problems = {"sparseloco": own, "powersgd": own, "async": "its rounds are no means"}
    problems |= {"noloco": none} | dict.fromkeys(("data_parallel", "demo"), "it exchanges gradients")
    assert reasons == {
        name: f"error_feedback does not fit: {problem}; leave it out" for name, problem in problems.items()
    }


def test_means_of_moments_are_left_as_they_are():
    outer = ErrorFeedback(outer=build_outer("desloc", inner_steps=2)).fitted(TABLE)
    private = {fragment.kind: outer.init_private(fragment, {}, INITIAL) for fragment in outer.fragments(TABLE)}
    assert {kind: list(state) for kind, state in private.items()} == {
        "param": [RESIDUAL],
        "exp_avg": [],
        "exp_avg_sq": [],
    }
    rounds = itertools.chain.from_iterable(map(outer.plan, range(13)))
    moments = next(round_ for round_ in rounds if round_.fragment.kind == "exp_avg")
    emitted = outer.emit(moments, INITIAL, {}, {}, Work(inner_steps=2, samples=2.0), out=torch.empty(TABLE.numel))
    assert torch.equal(emitted.payload, INITIAL)
    assert emitted.kept is None
