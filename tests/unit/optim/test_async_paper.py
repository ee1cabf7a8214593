# SPDX-License-Identifier: Apache-2.0
"""Asynchronous Local-SGD (arXiv:2401.09135), delayed Nesterov. A server gets one difference g at a time, acc += g:

every N-th:  m ← β m + acc/N;   θ ← θ - ε((1 - cN + c) β m + g/N);   acc ← 0
otherwise:   θ ← θ - ε(c β m + g/N)
"""

import pytest
import torch

from isthmus.optim import ANCHOR, Contribution, DiLoCo, Op, Result, Round, RunFacts, Work, build_outer
from isthmus.optim.async_diloco import ACCUMULATOR, NUM_ARRIVALS, PULLED, PULLED_AT, AsyncDiLoCo
from isthmus.optim.diloco import MOMENTUM
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
from tests.unit.optim.one_round import after, begin, digest, same, spare, tensors_of

NUMEL = TABLE.numel
KEY = TABLE.whole().key
ROUND = Round(fragment=KEY, op=Op.GATHER, inner_step=20)
WORK = Work(inner_steps=50, samples=50.0)
SPEEDS = {"ash": 1.0, "birch": 0.5, "cedar": 0.75, "dogwood": 0.25}


class Server:
    """The paper's server, in double precision, sharing nothing with the package."""

    def __init__(self, anchor, lr, momentum, buffer, share):
        self.anchor, self.m, self.acc = anchor.double(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        self.lr, self.momentum, self.buffer, self.share, self.arrived = lr, momentum, buffer, share, 0

    def take(self, g):
        c, n = self.share, self.buffer
        self.acc = self.acc + g
        self.arrived += 1
        if self.arrived % n == 0:
            self.m = self.momentum * self.m + self.acc / n
            self.anchor = self.anchor - self.lr * ((1 - c * n + c) * self.momentum * self.m + g / n)
            self.acc = torch.zeros_like(self.acc)
        else:
            self.anchor = self.anchor - self.lr * (c * self.momentum * self.m + g / n)


def direct(server, num_steps, *, inner_steps, poll_steps, speeds, aborted=()):
    """Workers that step in their turn, and arrive at the first poll at which they have done their steps."""
    local = {worker: server.anchor.clone() for worker in WORKERS}
    pulled = {worker: server.anchor.clone() for worker in WORKERS}
    total, since = dict.fromkeys(WORKERS, 0), dict.fromkeys(WORKERS, 0)
    history = []
    for step in range(1, num_steps + 1):
        for worker in WORKERS:
            if int(step * speeds[worker]) > int((step - 1) * speeds[worker]):
                total[worker] += 1
                since[worker] += 1
                local[worker] -= 0.03 * gradient(worker, total[worker], local[worker])
        ready = [worker for worker in WORKERS if since[worker] >= inner_steps]
        if step % poll_steps or step in aborted or not ready:
            continue
        for worker in ready:
            server.take(pulled[worker] - local[worker])
        for worker in ready:
            pulled[worker], local[worker], since[worker] = server.anchor.clone(), server.anchor.clone(), 0
        history.append((step, tuple(ready), server.anchor))
    return history, local


@pytest.mark.parametrize(("buffer", "share"), [(4, 0.0), (3, 0.2), (1, 0.0), (2, 0.5)])
def test_it_follows_a_server_to_which_workers_come_at_their_own_speed(buffer, share):
    outer = AsyncDiLoCo(lr=0.4, momentum=0.8, buffer=buffer, momentum_share=share, inner_steps=4, poll_steps=2)
    trajectory = run(outer, 60, speeds=SPEEDS)
    server = Server(INITIAL, 0.4, 0.8, buffer, share)
    history, local = direct(server, 60, inner_steps=4, poll_steps=2, speeds=SPEEDS)
    arrivals = [(committed.round_.inner_step, committed.members) for committed in trajectory.committed]
    assert arrivals == [(step, members) for step, members, _ in history]
    assert len({members for _, members in arrivals}) > 3
    assert_same([a.double() for a in anchors(trajectory)], [anchor for _, _, anchor in history], tolerance=1e-4)
    assert_same([v.double() for v in trajectory.values.values()], list(local.values()), tolerance=1e-4)
    assert_parity(trajectory)


def test_aborted_polls_cost_nothing_and_their_steps_arrive_later():
    outer = AsyncDiLoCo(lr=0.4, momentum=0.9, buffer=4, inner_steps=4, poll_steps=2)
    trajectory = run(outer, 40, speeds=SPEEDS, aborted=lambda round_: round_.inner_step in (4, 6, 16))
    server = Server(INITIAL, 0.4, 0.9, 4, 0.0)
    history, _ = direct(server, 40, inner_steps=4, poll_steps=2, speeds=SPEEDS, aborted=(4, 6, 16))
    assert_same([a.double() for a in anchors(trajectory)], [anchor for _, _, anchor in history], tolerance=1e-4)


def arrive(outer, state, *rows, mine=None):
    members = tuple(f"w{index}" for index in range(len(rows)))
    result = Result(value=torch.stack(rows), members=members, weight_sum=float(len(rows)))
    return after(outer, ROUND, result, state, mine)


def differences(count):
    return list(torch.randn(count, NUMEL, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_buffer_of_one_is_nesterov(share):
    outer = AsyncDiLoCo(lr=0.3, momentum=0.9, buffer=1, momentum_share=share)
    state = begin(outer, TABLE.whole(), INITIAL)
    anchor = torch.nn.Parameter(INITIAL.double())
    nesterov = torch.optim.SGD([anchor], lr=0.3, momentum=0.9, nesterov=True)
    for g in differences(6):
        state = arrive(outer, state, g).state
        anchor.grad = g.double()
        nesterov.step()
        torch.testing.assert_close(state.shared[ANCHOR].double(), anchor.data, rtol=1e-5, atol=1e-5)


def test_as_many_as_the_buffer_that_arrive_together_are_diloco():
    together = run(AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=4, inner_steps=4, poll_steps=4), 24)
    diloco = run(DiLoCo(lr=0.7, momentum=0.9, inner_steps=4), 24)
    assert_same(anchors(together), anchors(diloco), tolerance=1e-5)
    assert_same(list(together.values.values()), list(diloco.values.values()), tolerance=1e-5)


def test_it_does_not_matter_whether_arrivals_share_a_poll():
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=3, momentum_share=0.1)
    rows = differences(7)
    start = begin(outer, TABLE.whole(), INITIAL)
    together, alone = arrive(outer, arrive(outer, start, *rows[:2]).state, *rows[2:]).state, start
    for g in rows:
        alone = arrive(outer, alone, g).state
    assert digest(together) == digest(alone)


def test_the_momentum_moves_with_every_nth_arrival_only():
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=3)
    state, moved, counts = begin(outer, TABLE.whole(), INITIAL), [], []
    for g in differences(7):
        stepped = arrive(outer, state, g).state
        moved.append(not torch.equal(stepped.shared[MOMENTUM], state.shared[MOMENTUM]))
        counts.append(int(stepped.shared[NUM_ARRIVALS]))
        assert stepped.shared[ACCUMULATOR].any() == (counts[-1] > 0)
        state = stepped
    assert moved == [False, False, True, False, False, True, False]
    assert counts == [1, 2, 0, 1, 2, 0, 1]


def test_the_share_moves_the_momentums_step_but_does_not_change_its_length():
    """Under a constant difference, N arrivals move the anchor as far for any c."""
    moves = []
    for share in (0.0, 0.1, 0.25):
        outer = AsyncDiLoCo(lr=0.1, momentum=0.5, buffer=4, momentum_share=share)
        state = begin(outer, TABLE.whole(), torch.zeros(NUMEL))
        for _ in range(120):
            state = arrive(outer, state, torch.ones(NUMEL)).state
        stepped = arrive(outer, state, *[torch.ones(NUMEL)] * 4).state
        moves.append(state.shared[ANCHOR] - stepped.shared[ANCHOR])
    assert_same(moves, [torch.full((NUMEL,), 0.1 / (1 - 0.5))] * 3, tolerance=1e-4)


def test_only_who_has_done_its_steps_contributes():
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, inner_steps=4)
    state, out = begin(outer, TABLE.whole(), INITIAL), torch.empty(NUMEL)
    value = INITIAL - 1.0
    for steps, weight in ((0, 0.0), (3, 0.0), (4, 1.0), (9, 1.0)):
        emitted = outer.emit(ROUND, value, *state, Work(inner_steps=steps, samples=1.0), out=out)
        assert emitted.weight == weight
        torch.testing.assert_close(emitted.payload, torch.ones(NUMEL))


def contribution_of(weight):
    return Contribution(payload=torch.ones(NUMEL), weight=weight, read_delivered=lambda _out: None)


def test_who_arrived_pulls_and_the_others_are_left_alone():
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=4)
    state = begin(outer, TABLE.whole(), INITIAL)
    came, stayed, learner = (
        arrive(outer, state, torch.ones(NUMEL), mine=mine)
        for mine in (contribution_of(1.0), contribution_of(0.0), None)
    )
    assert came.target is came.state.shared[ANCHOR]
    assert came.keep == 0.0
    assert torch.equal(came.state.private[PULLED], came.state.shared[ANCHOR])
    assert came.state.private[PULLED_AT].item() == 20.0
    for left in (stayed, learner):
        assert (left.target, left.keep) == (None, 1.0)
        assert torch.equal(left.state.private[PULLED], INITIAL)
        assert left.state.private[PULLED_AT].item() == 0.0
        assert digest(left.state) == digest(came.state) != digest(state)


def test_whose_difference_was_not_counted_neither_pulls_nor_follows_the_anchor():
    """It counts from what it pulled, wherever the anchor is by now."""
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=4)
    state = begin(outer, TABLE.whole(), INITIAL)
    missed = after(outer, ROUND, None, state, contribution_of(1.0))
    assert missed.state.private is state.private
    assert (missed.target, missed.keep) == (None, 1.0)


def test_whoever_joins_or_leaves_shared_states_are_equal():
    outer = AsyncDiLoCo(lr=0.4, momentum=0.9, buffer=3, momentum_share=0.1, inner_steps=4, poll_steps=2)
    speeds = {**SPEEDS, "elm": 0.5}
    trajectory = run(outer, 60, speeds=speeds, leaves={13: ["birch"], 30: ["ash"]}, joins={17: ["elm"], 40: ["fir"]})
    assert_parity(trajectory)
    assert any("elm" in committed.members for committed in trajectory.committed)
    assert any("fir" in committed.members for committed in trajectory.committed)
    assert trajectory.values.keys() == {"cedar", "dogwood", "elm", "fir"}
    assert all(value.isfinite().all() for value in trajectory.values.values())


def test_a_joiner_counts_from_the_anchor_it_was_given():
    trajectory = run(AsyncDiLoCo(lr=0.7, momentum=0.9, inner_steps=4, poll_steps=4), 9, joins={9: ["elm"]})
    state = trajectory.states["elm"][KEY]
    assert torch.equal(state.private[PULLED], state.shared[ANCHOR])
    assert torch.equal(trajectory.values["elm"], state.shared[ANCHOR])
    assert not torch.equal(state.shared[ANCHOR], INITIAL)


# -------------------------------------------------------------------------------------------- DyLU


def works_of(outer, num_steps, **settings):
    """(step, worker, its own inner steps) of every arrival."""
    done, arrivals, num_seen = {}, [], 0

    def weigh(worker, work):
        done[worker] = work.inner_steps
        return 1.0

    def on_step(step, trajectory):
        nonlocal num_seen
        for committed in trajectory.committed[num_seen:]:
            arrivals.extend((step, worker, done[worker]) for worker in committed.members)
        num_seen = len(trajectory.committed)

    trajectory = run(outer, num_steps, speeds=SPEEDS, weigh=weigh, on_step=on_step, **settings)
    return arrivals, trajectory


def test_with_dylu_all_speeds_arrive_at_once_with_their_own_number_of_steps():
    arrivals, trajectory = works_of(AsyncDiLoCo(lr=0.7, momentum=0.9, inner_steps=8, poll_steps=4, dylu=True), 40)
    assert [committed.members for committed in trajectory.committed] == [WORKERS] * 5
    steps = {"ash": 8, "birch": 4, "cedar": 6, "dogwood": 2}
    assert arrivals == [(step, worker, steps[worker]) for step in range(8, 41, 8) for worker in WORKERS]


def test_without_dylu_the_slow_arrive_seldom():
    arrivals, _ = works_of(AsyncDiLoCo(lr=0.7, momentum=0.9, inner_steps=8, poll_steps=4), 64)
    came = {worker: sum(name == worker for _, name, _ in arrivals) for worker in WORKERS}
    assert came == {"ash": 8, "birch": 4, "cedar": 5, "dogwood": 2}
    assert all(steps >= 8 for _, _, steps in arrivals)


def test_with_dylu_a_worker_has_done_at_least_one_step():
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, inner_steps=8, dylu=True)
    state = begin(outer, TABLE.whole(), INITIAL)

    def weight(inner_step, steps):
        round_ = Round(fragment=KEY, op=Op.GATHER, inner_step=inner_step)
        work = Work(inner_steps=steps, samples=1.0)
        return outer.emit(round_, INITIAL, *state, work, out=torch.empty(NUMEL)).weight

    assert [weight(4, 4), weight(8, 0), weight(8, 1), weight(20, 1)] == [0.0, 0.0, 1.0, 1.0]


def test_a_worker_may_have_steps_of_its_own():
    """Methods that differ in `inner_steps` only: the same plan, the same server."""
    methods = [AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=4, inner_steps=steps, poll_steps=2) for steps in (8, 4, 6, 2)]
    assert len({method.plan(6) for method in methods}) == 1
    states = [begin(method, TABLE.whole(), INITIAL) for method in methods]
    states = [arrive(m, s, *differences(5)).state for m, s in zip(methods, states, strict=True)]
    assert len({digest(state) for state in states}) == 1


# ----------------------------------------------------------------------------------------- protocol


def test_nothing_that_is_given_is_written():
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=2)
    state = arrive(outer, begin(outer, TABLE.whole(), INITIAL), *differences(3)).state
    rows = torch.stack(differences(3))
    result, mine = Result(value=rows, members=WORKERS[:3], weight_sum=3.0), contribution_of(1.0)
    tensors = [*tensors_of(state), rows, mine.payload]
    before = [tensor.clone() for tensor in tensors]
    outer.emit(ROUND, INITIAL.clone(), *state, WORK, out=torch.empty(NUMEL))
    thrown_away = after(outer, ROUND, result, state, mine)
    assert same(after(outer, ROUND, None, state, mine, out=spare(state)).state, state)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert same(after(outer, ROUND, result, state, mine).state, thrown_away.state)


@pytest.mark.parametrize("mine", [contribution_of(1.0), None])
@pytest.mark.parametrize("name", [None, ANCHOR, MOMENTUM, ACCUMULATOR])
def test_all_of_the_recycled_state_is_written_and_it_may_hold_a_lone_row(name, mine):
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=2)
    state = arrive(outer, begin(outer, TABLE.whole(), INITIAL), *differences(3)).state
    row = torch.full((NUMEL,), 0.5)
    result = Result(value=row.clone()[None], members=("ash",), weight_sum=1.0)
    expected, out = after(outer, ROUND, result, state, mine), spare(state)
    if name is not None:
        out.shared[name].copy_(row)
        result = Result(value=out.shared[name][None], members=("ash",), weight_sum=1.0)
    settled = after(outer, ROUND, result, state, mine, out=out)
    assert settled.state.shared is out.shared
    assert settled.state.private is (state.private if mine is None else out.private)
    assert same(settled.state, expected.state)


@pytest.mark.parametrize("kind", ["shared", "private"])
def test_no_method_writes_over_the_state_it_is_given(kind):
    outer = AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=4)
    state = begin(outer, TABLE.whole(), INITIAL)
    out = spare(state)._replace(**{kind: getattr(state, kind)})
    result = Result(value=torch.ones(1, NUMEL), members=("ash",), weight_sum=1.0)
    with pytest.raises(ValueError, match="never writes"):
        after(outer, ROUND, result, state, contribution_of(1.0), out=out)


def test_init_owns_its_memory():
    value = INITIAL.clone()
    state = begin(AsyncDiLoCo(), TABLE.whole(), value)
    value.zero_()
    state.shared[ANCHOR].add_(1.0)
    assert torch.equal(state.private[PULLED], INITIAL)


def test_a_poll_to_which_nobody_comes_changes_nothing():
    trajectory = run(AsyncDiLoCo(lr=0.7, momentum=0.9, inner_steps=50, poll_steps=2), 9)
    alone = INITIAL.clone()
    for step in range(1, 10):
        sgd_step("ash", step, alone)
    assert len(trajectory.dropped) == 4
    assert not trajectory.committed
    assert torch.equal(trajectory.values["ash"], alone)


def test_polls_are_planned_by_the_global_step_alone():
    outer = build_outer("async", poll_steps=3, inner_steps=7)
    assert [step for step in range(10) if outer.plan(step)] == [3, 6, 9]
    assert outer.plan(6) == (Round(fragment=KEY, op=Op.GATHER, inner_step=6),)
    assert outer.fragments(TABLE) == (TABLE.whole(),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"buffer": 0}, "buffer must be at least 1"),
        ({"buffer": 4, "momentum_share": 0.3}, r"momentum_share must be in \[0, 1/4\]"),
        ({"momentum_share": -0.1}, "momentum_share"),
        ({"poll_steps": 0}, "poll_steps must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AsyncDiLoCo(**settings)


def test_the_buffer_is_as_many_as_the_run_expects_peers_unless_it_is_set():
    facts = RunFacts(num_peers=7, outer_steps=10, peak_lr=1e-3)
    outer = AsyncDiLoCo()
    assert outer.fitted(TABLE, facts).buffer == 7
    assert outer.fitted(TABLE).buffer == 4
    assert AsyncDiLoCo(lr=0.7, momentum=0.9, buffer=3).fitted(TABLE, facts).buffer == 3
    with pytest.raises(ValueError, match=r"momentum_share must be in \[0, 1/7\]"):
        AsyncDiLoCo(momentum_share=0.2).fitted(TABLE, facts)
    with pytest.raises(ValueError, match="call fitted"):
        arrive(outer, begin(outer, TABLE.whole(), INITIAL), torch.ones(NUMEL))
