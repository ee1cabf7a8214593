# SPDX-License-Identifier: Apache-2.0
"""Eager updates (arXiv:2502.12996, algorithm 3), at boundary t, on a worker's own anchor and momentum:

Δ~_m^(t) = mean Δ^(t-H) + (Δ_m^(t) - Δ_m^(t-H)) / M;   θ_m ← Nesterov(θ_m, Δ~_m^(t))

What it shares with every method that is delayed by a whole round is in test_delayed_paper.py.
"""

import pytest
import torch

from isthmus.optim import ANCHOR, Contribution, DiLoCo, Op, Result, Round, Work, build_outer, default_outer_lr
from isthmus.optim.delayed import CARRIED, Delayed
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.eager import AHEAD, AHEAD_MOMENTUM, Eager
from isthmus.optim.simulate import shared_parameters
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_parity, assert_same, gradient, run, sgd_step
from tests.unit.optim.one_round import after, begin

H = 4
WEIGHTS = dict(zip((*WORKERS, "elm", "fir"), (3.0, 1.0, 0.5, 1.5, 2.0, 0.25), strict=True))


JOINED = {"elm": 25, "fir": 51}


def weigh(worker, _work):
    return WEIGHTS[worker]


def direct_eager(lr, mu, num_blocks, weights):
    """The paper's form in double precision: all workers after each boundary."""
    names, total = list(weights), sum(weights.values())
    anchor = {name: INITIAL.double() for name in names}
    velocity = {name: torch.zeros(TABLE.numel, dtype=torch.float64) for name in names}
    previous, stale_mean = dict.fromkeys(names, 0.0), 0.0
    found = []
    for block in range(1, num_blocks + 1):
        delta = {}
        for name in names:
            value = anchor[name].clone()
            for step in range((block - 1) * H + 1, block * H + 1):
                value -= 0.03 * gradient(name, step, value)
            delta[name] = anchor[name] - value
        for name in names:
            mixed = stale_mean + weights[name] / total * (delta[name] - previous[name])
            velocity[name] = mu * velocity[name] + mixed
            anchor[name] = anchor[name] - lr * (mixed + mu * velocity[name])
        previous, stale_mean = delta, sum(weights[name] * delta[name] for name in names) / total
        found.append(dict(anchor))
    return found


def record(outer, num_steps, **settings):
    """A run, and every worker's value after every step."""
    values = []
    trajectory = run(
        outer,
        num_steps,
        on_step=lambda _step, live: values.append({name: value.clone() for name, value in live.values.items()}),
        **settings,
    )
    return trajectory, values


# --------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize(("lr", "mu"), [(0.4, 0.9), (0.7, 0.5), (0.5, 0.0)])
def test_every_worker_follows_the_papers_own_form(lr, mu):
    _, values = record(Eager(lr=lr, momentum=mu, inner_steps=H), 40)
    expected = direct_eager(lr, mu, 10, dict.fromkeys(WORKERS, 1.0))
    for block, anchor in enumerate(expected, start=1):
        found = values[block * H]
        assert_same([found[name].double() for name in WORKERS], [anchor[name] for name in WORKERS], tolerance=1e-5)
        assert (found["ash"] - found["birch"]).abs().max() > 1e-3


def test_a_workers_share_is_its_weight():
    weights = {name: WEIGHTS[name] for name in WORKERS}
    _, values = record(Eager(lr=0.4, momentum=0.9, inner_steps=H), 40, weigh=weigh)
    for block, anchor in enumerate(direct_eager(0.4, 0.9, 10, weights), start=1):
        found = values[block * H]
        assert_same([found[name].double() for name in WORKERS], [anchor[name] for name in WORKERS], tolerance=1e-5)


@pytest.mark.parametrize(("lr", "mu"), [(0.4, 0.9), (1.0, 0.0)])
def test_one_worker_is_diloco(lr, mu):
    settings = {"lr": lr, "momentum": mu, "inner_steps": H}
    _, eager = record(Eager(**settings), 40, workers=("ash",))
    _, diloco = record(DiLoCo(**settings), 40, workers=("ash",))
    assert_same([value["ash"] for value in eager], [value["ash"] for value in diloco], tolerance=1e-5)


def test_the_shared_anchor_is_delayed_dilocos_as_long_as_no_block_began_ahead():
    eager, delayed = (run(method(inner_steps=H), 2 * H) for method in (Eager, Delayed))
    assert_same(anchors(eager), anchors(delayed), tolerance=0.0)


def test_the_rate_that_goes_by_the_members_is_a_rate_like_another_while_they_stay():
    _, found = record(Eager(lr=None, momentum=0.9, inner_steps=H), 40)
    _, expected = record(Eager(lr=default_outer_lr(4), momentum=0.9, inner_steps=H), 40)
    assert_same([value["ash"] for value in found], [value["ash"] for value in expected], tolerance=1e-5)


@pytest.mark.parametrize(("lr", "mu"), [(0.5, 0.0), (0.4, 0.9), (None, 0.0), (None, 0.9)])
def test_own_anchors_differ_by_their_own_early_terms_only(lr, mu):
    """Whoever comes and goes, anchor_m - anchor is what Nesterov makes of the worker's changes of share · payload.

    At mu = 0 that says: anchor_m + lr · share · payload_m is the same on all workers. Workers weigh differently, two
    leave and two join, so that every share changes, and where lr goes by the members every rate too; some rounds are
    aborted, and their payloads carried.
    """
    aborted = {8, 36, 40}
    weights = WEIGHTS if lr else {**WEIGHTS, "ash": 8.0}  # as good as alone: rates of fewer than two differ
    trajectory, values = record(
        Eager(lr=lr, momentum=mu, inner_steps=H),
        80,
        weigh=lambda worker, _work: weights[worker],
        leaves={27: ["birch"], 58: ["cedar"]},
        joins={when: [name] for name, when in JOINED.items()},
        aborted=lambda round_: round_.inner_step in aborted,
    )
    assert_parity(trajectory)
    assert trajectory.committed[-1].members == ("ash", "dogwood", "elm", "fir")
    by_due = {committed.round_.due_step: committed for committed in trajectory.committed}
    zeros = torch.zeros(TABLE.numel, dtype=torch.float64)
    own = {
        name: {"payload": None, "carried": zeros, "ahead": zeros, "momentum": zeros, "away": zeros} for name in WEIGHTS
    }
    rates = set()
    for step in range(H, 80 + 1, H):
        for name, value in values[step].items():
            worker = own[name]
            local = values[step - 1][name].clone()
            sgd_step(name, step - JOINED.get(name, 0), local)
            begun = max(step - H, JOINED.get(name, 0))
            payload = (values[begun][name] - local).double() + worker["carried"]
            if step - H in aborted:
                worker["carried"] = worker["payload"]
            else:
                members = by_due[step].members
                there = [weights[member] for member in members]
                share = weights[name] / sum(there) if name in members else 0.0
                rate = default_outer_lr(sum(there) ** 2 / sum(w * w for w in there)) if lr is None else lr
                rates.add(round(rate, 6))
                change = rate * share * payload - worker["ahead"]
                worker["momentum"] = mu * worker["momentum"] + change
                worker["away"] = worker["away"] - (change + mu * worker["momentum"])
                worker["ahead"], worker["carried"] = rate * share * payload, zeros
                found = (value - by_due[step].shared[ANCHOR]).double()
                torch.testing.assert_close(found, worker["away"], rtol=1e-4, atol=1e-5)
            worker["payload"] = payload
    assert all(worker["away"].abs().max() > 1e-3 for worker in own.values())
    assert (len(rates) > 3) == (lr is None)


def test_after_aborts_every_block_arrives_once_and_the_newest_own_one_early():
    slopes = dict(zip(WORKERS, (1.0, 2.0, 3.0, 6.0), strict=True))

    def constant_step(worker, _inner_step, value):
        value -= slopes[worker]

    aborted = {0, 8, 24, 28, 32, 56}
    trajectory = run(
        Eager(lr=1.0, momentum=0.0, inner_steps=H),
        80,
        inner_step=constant_step,
        initial=torch.zeros(TABLE.numel),
        aborted=lambda round_: round_.inner_step in aborted,
    )
    for worker, slope in slopes.items():
        assert trajectory.values[worker].unique().tolist() == [-19 * H * 3.0 - H * slope / 4]


# --------------------------------------------------------------------------------------- joiners


@pytest.mark.parametrize("when", [5 * H, 5 * H + 3])
def test_a_joiner_is_absent_from_the_mean_in_flight_and_level_with_the_others(when):
    trajectory, values = record(Eager(lr=0.4, momentum=0.9, inner_steps=H), 44, joins={when: ["elm"]})
    assert_parity(trajectory)
    by_due = {committed.round_.due_step: committed for committed in trajectory.committed}
    assert torch.equal(values[when]["elm"], by_due[5 * H].shared[ANCHOR])
    assert "elm" not in by_due[6 * H].members
    assert torch.equal(values[6 * H]["elm"], by_due[6 * H].shared[ANCHOR])
    assert "elm" in by_due[7 * H].members
    assert not torch.equal(values[7 * H]["elm"], by_due[7 * H].shared[ANCHOR])
    # Its distance from the shared anchor is that of the others, which comes from their newest blocks.
    away = {name: (values[44][name] - by_due[44].shared[ANCHOR]).norm().item() for name in (*WORKERS, "elm")}
    assert 0.0 < away["elm"] < 3 * max(away[name] for name in WORKERS)


def test_a_run_stands_for_its_shared_anchor():
    outer = Eager(lr=0.4, momentum=0.9, inner_steps=H)
    trajectory = run(outer, 22)
    found = shared_parameters(trajectory, outer.fragments(TABLE), out=torch.empty(TABLE.numel))
    assert torch.equal(found, trajectory.committed[-1].shared[ANCHOR])


# --------------------------------------------------------------------------------------- parts


PAYLOAD, NOTHING = torch.full((TABLE.numel,), 8.0), torch.zeros(TABLE.numel)


def one_block(outer, state, mean, sent, newer, *, peers=1):
    """A round that a worker gave to, on a wire that loses half."""
    mine = Contribution(
        payload=sent, weight=1.0, read_delivered=lambda out: torch.div(sent, 2, out=out), newer_payload=newer
    )
    members = tuple(f"w{index}" for index in range(peers))
    result = Result(value=mean.clone(), members=members, weight_sum=float(peers), weights=(1.0,) * peers)
    return after(outer, Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=0, delay=H), result, state, mine)


def test_a_worker_that_did_not_train_sends_nothing():
    outer = Eager(lr=0.4, momentum=0.9, inner_steps=H)
    trajectory = run(outer, 5 * H)
    for worker in WORKERS:
        (state,) = trajectory.states[worker].values()
        assert state.private[AHEAD].abs().max() > 1e-3
        out = torch.empty(TABLE.numel)
        round_ = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=6 * H, delay=H)
        emitted = outer.emit(round_, trajectory.values[worker], *state, Work(inner_steps=0, samples=0.0), out=out)
        assert emitted.payload.count_nonzero() == 0


def test_an_own_term_is_taken_back_as_it_was_applied_whatever_the_others_decoded():
    """One worker alone, one block, a wire that loses half: what the mean lacks, the own anchor lacks from then on."""
    outer = Eager(lr=1.0, momentum=0.0, inner_steps=H)
    state = begin(outer, TABLE.whole(), torch.zeros(TABLE.numel))
    first = one_block(outer, state, NOTHING, NOTHING, PAYLOAD)
    assert first.target.unique().tolist() == [-8.0]
    second = one_block(outer, first.state, PAYLOAD / 2, PAYLOAD, NOTHING)
    assert second.target.unique().tolist() == [-4.0]


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_an_own_term_is_taken_back_at_the_rate_that_it_was_applied_with(mu):
    """Applied among eight at 0.8, taken back in a round of one at 0.4: the worker goes back to the shared anchor."""
    outer = Eager(lr=None, momentum=mu, inner_steps=H)
    state = begin(outer, TABLE.whole(), torch.zeros(TABLE.numel))
    ahead = one_block(outer, state, NOTHING, NOTHING, PAYLOAD, peers=8)
    torch.testing.assert_close(ahead.target, -0.8 * (1.0 + mu) * PAYLOAD / 8)
    back = one_block(outer, ahead.state, PAYLOAD / 8, PAYLOAD, NOTHING, peers=1)
    for _ in range(30):  # what momentum made of it fades
        back = one_block(outer, back.state, NOTHING, NOTHING, NOTHING, peers=1)
    torch.testing.assert_close(back.target, back.state.shared[ANCHOR], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(back.target, -0.4 / (1.0 - mu) * PAYLOAD / 8)


def test_init_owns_its_memory():
    value = torch.ones(TABLE.numel)
    state = begin(Eager(), TABLE.whole(), value)
    value.zero_()
    assert state.shared[ANCHOR].sum() == TABLE.numel
    zeros = (state.shared[MOMENTUM], *(state.private[name] for name in (CARRIED, AHEAD, AHEAD_MOMENTUM)))
    assert not any(tensor.count_nonzero() for tensor in zeros)
    assert len({tensor.data_ptr() for tensor in zeros}) == 4


def test_it_is_built_by_its_name():
    assert build_outer("eager", inner_steps=50) == Eager(inner_steps=50)
