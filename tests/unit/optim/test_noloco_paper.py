# SPDX-License-Identifier: Apache-2.0
"""NoLoCo (arXiv:2506.10911), as its code has it, with two tensors sent:

m_i ← μ m_i + η mean(θ - φ) + η (mean φ - φ_i);   φ_i ← φ_i + m_i;   θ_i ← φ_i
"""

import pytest
import torch

from isthmus.optim import Contribution, DiLoCo, Op, Result, Round, Work, build_outer
from isthmus.optim.diloco import MOMENTUM
from isthmus.optim.noloco import SLOW, NoLoCo
from isthmus.optim.simulate import State
from isthmus.optim.workload import draw_pairs
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, assert_parity, assert_same, gradient, run, sgd_step
from tests.unit.optim.one_round import after, begin, same, spare, tensors_of

NUMEL = TABLE.numel
ROUND = Round(fragment=TABLE.whole().key, op=Op.PAIR, inner_step=50, keeps_value=True)
WORK = Work(inner_steps=50, samples=50.0)


def direct_noloco(lr, momentum, boundaries, num_steps, workers=WORKERS):
    """The released code's two-tensor form in double precision; pairs are drawn as the simulation draws them."""
    slow = {worker: INITIAL.double() for worker in workers}
    fast = {worker: value.clone() for worker, value in slow.items()}
    velocity = {worker: torch.zeros(NUMEL, dtype=torch.float64) for worker in workers}
    for step in range(1, num_steps + 1):
        for worker in workers:
            fast[worker] -= 0.03 * gradient(worker, step, fast[worker])
        if step not in boundaries:
            continue
        round_ = Round(fragment=TABLE.whole().key, op=Op.PAIR, inner_step=step)
        before = dict(slow)
        for worker, peer in draw_pairs(round_, workers).items():
            pair = (worker, peer)
            mean_difference = sum(fast[name] - before[name] for name in pair) / 2
            mean_slow = sum(before[name] for name in pair) / 2
            velocity[worker] = momentum * velocity[worker] + lr * mean_difference + lr * (mean_slow - before[worker])
            slow[worker] = before[worker] + velocity[worker]
        for worker in draw_pairs(round_, workers):
            fast[worker] = slow[worker].clone()
    return fast


def assert_follows(trajectory, expected):
    assert_same([value.double() for value in trajectory.values.values()], list(expected.values()), tolerance=1e-5)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.5), (1.2, 0.0), (0.3, 0.9)])
def test_one_tensor_is_the_two_tensor_form(lr, momentum):
    trajectory = run(NoLoCo(lr=lr, momentum=momentum, inner_steps=4), 30)
    assert_follows(trajectory, direct_noloco(lr, momentum, range(4, 31, 4), 30))
    values = list(trajectory.values.values())
    assert (values[0] - values[1]).abs().max() > 1e-3


def test_the_mean_of_a_pair_is_heavy_ball():
    """Of workers that have met others: mean m ← μ mean m - η mean Δ with Δ = φ - θ;  mean φ ← mean φ + mean m."""
    outer = NoLoCo(lr=0.7, momentum=0.5, inner_steps=4)
    before, after = run(outer, 15), run(outer, 16)

    def private(trajectory, worker, name):
        return trajectory.states[worker][ROUND.fragment].private[name].double()

    met = draw_pairs(Round(fragment=ROUND.fragment, op=Op.PAIR, inner_step=16), WORKERS)
    for worker, peer in met.items():
        pair = (worker, peer)
        slow, velocity = (sum(private(before, name, key) for name in pair) / 2 for key in (SLOW, MOMENTUM))
        difference = torch.zeros(NUMEL, dtype=torch.float64)
        for name in pair:
            local = before.values[name].clone()
            sgd_step(name, 16, local)
            difference += (private(before, name, SLOW) - local) / 2
        velocity = 0.5 * velocity - 0.7 * difference
        assert (private(before, worker, SLOW) - private(before, peer, SLOW)).abs().max() > 1e-3
        after_slow, after_velocity = (sum(private(after, name, key) for name in pair) / 2 for key in (SLOW, MOMENTUM))
        torch.testing.assert_close(after_velocity, velocity, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after_slow, slow + velocity, rtol=1e-5, atol=1e-6)


def test_two_that_only_meet_each_other_are_one_under_heavy_ball():
    pair = WORKERS[:2]
    trajectory = run(NoLoCo(lr=0.7, momentum=0.5, inner_steps=4), 24, workers=pair)
    slow, velocity = INITIAL.double(), torch.zeros(NUMEL, dtype=torch.float64)
    for start in range(0, 24, 4):
        locals_ = [slow.clone(), slow.clone()]
        for step in range(start + 1, start + 5):
            for worker, local in zip(pair, locals_, strict=True):
                local -= 0.03 * gradient(worker, step, local)
        velocity = 0.5 * velocity - 0.7 * (slow - sum(locals_) / 2)
        slow = slow + velocity
    assert_follows(trajectory, dict.fromkeys(pair, slow))


def test_lr_one_without_momentum_sets_both_to_their_mean():
    pair = WORKERS[:2]
    before = run(NoLoCo(inner_steps=4), 3, workers=pair).values
    for worker, value in before.items():
        sgd_step(worker, 4, value)
    after = run(NoLoCo(lr=1.0, momentum=0.0, inner_steps=4), 4, workers=pair)
    first, second = after.values.values()
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, sum(before.values()) / 2)


def test_workers_that_no_longer_train_agree_in_the_end_on_their_mean():
    def only_once(worker, inner_step, value):
        if inner_step == 1:
            value += torch.sin(torch.arange(float(NUMEL)) * ord(worker[0]))

    apart = list(run(NoLoCo(inner_steps=1000), 1, inner_step=only_once).values.values())
    together = list(run(NoLoCo(lr=0.7, momentum=0.5, inner_steps=1), 200, inner_step=only_once).values.values())
    assert (apart[0] - apart[1]).abs().max() > 0.5
    # The first meeting applies 0.7 of the move, the momentum the rest and more: heavy-ball's whole gain on one impulse.
    mean = INITIAL + 0.7 / (1 - 0.5) * (sum(apart) / 4 - INITIAL)
    assert_same(together, [mean] * 4, tolerance=1e-4)


def test_an_unpaired_worker_skips():
    after = run(NoLoCo(inner_steps=4), 4, workers=WORKERS[:3])
    alone = run(DiLoCo(inner_steps=1000), 4, workers=WORKERS[:3])
    untouched = [worker for worker in WORKERS[:3] if torch.equal(after.values[worker], alone.values[worker])]
    assert len(untouched) == 1
    state = after.states[untouched[0]][ROUND.fragment]
    assert torch.equal(state.private[SLOW], INITIAL)
    assert not state.private[MOMENTUM].any()
    assert untouched[0] not in after.committed[0].members


def test_unpaired_workers_carry_their_steps_into_the_next_meeting():
    trajectory = run(NoLoCo(lr=0.7, momentum=0.5, inner_steps=4), 32, workers=WORKERS[:3])
    assert_follows(trajectory, direct_noloco(0.7, 0.5, range(4, 33, 4), 32, workers=WORKERS[:3]))


def test_two_aborted_meetings_are_one_of_three_times_the_steps():
    trajectory = run(
        NoLoCo(lr=0.7, momentum=0.5, inner_steps=4), 24, aborted=lambda round_: round_.inner_step in (8, 12)
    )
    assert [round_.inner_step for round_ in trajectory.dropped] == [8, 12]
    assert_follows(trajectory, direct_noloco(0.7, 0.5, (4, 16, 20, 24), 24))


def test_whoever_joins_or_leaves_the_others_meet_on():
    trajectory = run(
        NoLoCo(lr=0.7, momentum=0.5, inner_steps=3), 30, leaves={7: ["birch"], 15: ["ash"]}, joins={10: ["elm", "fir"]}
    )
    assert_parity(trajectory)
    assert trajectory.values.keys() == {"cedar", "dogwood", "elm", "fir"}
    assert all(value.isfinite().all() for value in trajectory.values.values())
    assert all(len(committed.members) == 2 for committed in trajectory.committed)


def test_a_joiner_sets_out_from_its_donor():
    trajectory = run(NoLoCo(inner_steps=4), 6, joins={6: ["elm"]})
    state = trajectory.states["elm"][ROUND.fragment]
    assert not state.shared
    assert torch.equal(state.private[SLOW], trajectory.values["ash"])
    assert torch.equal(trajectory.values["elm"], trajectory.values["ash"])


def _state_and_result():
    generator = torch.Generator().manual_seed(5)
    slow, momentum, peer, own = (torch.randn(NUMEL, generator=generator) for _ in range(4))
    contribution = Contribution(payload=own, weight=1.0, read_delivered=lambda _out: pytest.fail("not needed"))
    state = State(shared={}, private={SLOW: slow, MOMENTUM: momentum})
    return state, Result(value=peer, members=("ash", "birch"), weight_sum=2.0), contribution


def test_nothing_that_is_given_is_written():
    state, result, mine = _state_and_result()
    given = [*tensors_of(state), result.value, mine.payload]
    before = [tensor.clone() for tensor in given]
    outer = NoLoCo()
    outer.emit(ROUND, INITIAL.clone(), *state, WORK, out=torch.empty(NUMEL))
    after(outer, ROUND, result, state, mine)
    after(outer, ROUND, None, state, mine, out=spare(state))
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


@pytest.mark.parametrize("name", [None, SLOW, MOMENTUM])
def test_the_peers_payload_may_lie_in_the_recycled_state(name):
    outer = NoLoCo()
    state, result, mine = _state_and_result()
    expected, out = after(outer, ROUND, result, state, mine), spare(state)
    if name is not None:
        out.private[name] = result.value
    settled = after(outer, ROUND, result, state, mine, out=out)
    assert settled.state.private is out.private
    assert settled.target is out.private[SLOW]
    assert settled.keep == 0.0
    assert same(settled.state, expected.state)


def test_no_method_writes_over_the_state_it_is_given():
    state, result, mine = _state_and_result()
    with pytest.raises(ValueError, match="never writes"):
        after(NoLoCo(), ROUND, result, state, mine, out=state)


def test_init_owns_its_memory():
    value = INITIAL.clone()
    state = begin(NoLoCo(), TABLE.whole(), value)
    value.zero_()
    assert torch.equal(state.private[SLOW], INITIAL)
    assert not state.shared


def test_who_gave_nothing_or_met_nobody_keeps_what_it_has():
    state, result, mine = _state_and_result()
    for left in (after(NoLoCo(), ROUND, result, state), after(NoLoCo(), ROUND, None, state, mine)):
        assert left.state.private is state.private
        assert (left.target, left.keep) == (None, 1.0)


def test_the_payload_is_the_value_and_may_lie_in_it():
    state, _, _ = _state_and_result()
    value = INITIAL.clone()
    emitted = NoLoCo().emit(ROUND, value, *state, WORK, out=value)
    assert emitted.payload is value
    assert torch.equal(value, INITIAL)
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
        NoLoCo().emit(ROUND, value, *state, WORK, out=torch.empty(3))


def test_pairs_meet_after_every_h_steps():
    outer = build_outer("noloco", inner_steps=5)
    assert [step for step in range(16) if outer.plan(step)] == [5, 10, 15]
    assert outer.plan(5) == (Round(fragment=TABLE.whole().key, op=Op.PAIR, inner_step=5, keeps_value=True),)
    assert outer.fragments(TABLE) == (TABLE.whole(),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": 3.0}, r"less than 2 \* \(1 \+ momentum\)"),
        ({"lr": 2.0, "momentum": 0.0}, r"less than 2 \* \(1 \+ momentum\)"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NoLoCo(**settings)
