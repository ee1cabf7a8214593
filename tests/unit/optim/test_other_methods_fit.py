"""The protocol carries methods quite unlike DiLoCo, each in one class, with an identity that would show a misfit.

They are the shortest forms that keep each paper's recurrence, written against the protocol alone.
"""

from dataclasses import dataclass

import pytest
import torch

from optim import ANCHOR, Absorbed, DiLoCo, Emitted, FragmentTable, Op, Round, State
from optim.diloco import MOMENTUM
from optim.nesterov import nesterov_step
from optim.simulate import simulate

TABLE = FragmentTable.from_named_shapes([(f"layer{i}", (i + 2, 3)) for i in range(6)])
WORKERS = ("ash", "birch", "cedar", "dogwood")
INITIAL = torch.linspace(-1.0, 1.0, TABLE.numel)


def sgd_step(worker: str, inner_step: int, value: torch.Tensor) -> None:
    number = 1.0 + ord(worker[0]) - ord("a")
    index = torch.arange(TABLE.numel, dtype=torch.float32)
    value -= 0.03 * (0.5 + 0.2 * number) * (value - torch.sin(index * number + 0.1 * inner_step))


def run(outer, num_inner_steps=24, workers=WORKERS, **settings):
    return simulate(
        outer,
        table=TABLE,
        initial=INITIAL,
        workers=workers,
        inner_step=sgd_step,
        num_inner_steps=num_inner_steps,
        **settings,
    )


def anchors(trajectory):
    return [committed.shared[ANCHOR] for committed in trajectory.committed]


def assert_same(left, right, tolerance=1e-6):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------- streaming (arXiv:2501.18512)
@dataclass(frozen=True)
class Streaming(DiLoCo):
    num_fragments: int = 1
    delay: int = 0
    keep: float = 0.0

    def fragments(self, table, /):
        names = [spec.name for spec in table.specs]
        return tuple(table.fragment(p, names[p :: self.num_fragments]) for p in range(self.num_fragments))

    def plan(self, inner_step, /):
        stride = self.inner_steps // self.num_fragments
        index, rest = divmod(inner_step % self.inner_steps, stride)
        if rest or inner_step == 0:
            return ()
        key = self.fragments(TABLE)[index].key
        return (Round(fragment=key, op=Op.MEAN, inner_step=inner_step, delay=self.delay),)

    def absorb(self, round_, result, state, /, *, out=None):
        after = DiLoCo.absorb(self, round_, result, state, out=out)
        return (
            Absorbed.unchanged(after.state)
            if self.keep == 1.0
            else Absorbed(state=after.state, target=after.target, keep=self.keep)
        )


def test_streaming_of_one_fragment_without_delay_is_diloco():
    assert_same(anchors(run(Streaming(inner_steps=4))), anchors(run(DiLoCo(inner_steps=4))), tolerance=0.0)


def test_streaming_that_keeps_everything_isolates_the_workers():
    alone = run(DiLoCo(inner_steps=1000))
    streamed = run(Streaming(inner_steps=8, num_fragments=4, delay=1, keep=1.0))
    assert_same(list(streamed.values.values()), list(alone.values.values()), tolerance=0.0)


def test_streaming_fragments_take_turns_and_stay_equal():
    outer = Streaming(inner_steps=8, num_fragments=4, delay=3, keep=0.5)
    trajectory = run(outer, 40, leaves={13: ["birch"]}, joins={18: ["elm"]}, aborted=lambda r: r.inner_step == 20)
    turns = [(c.round_.inner_step, c.round_.fragment.index) for c in trajectory.committed]
    assert turns == [(t, t // 2 % 4) for t in range(2, 38, 2) if t != 20]
    assert all(len(set(committed.digests.values())) == 1 for committed in trajectory.committed)
    assert trajectory.committed[-1].digests.keys() == {"ash", "cedar", "dogwood", "elm"}


# ----------------------------------------------------------------- delayed by a whole round, and eager (2502.12996)
@dataclass(frozen=True)
class Delayed(DiLoCo):
    """Applies the mean of the round before; carries what was aborted."""

    def init(self, fragment, value, /):
        state = DiLoCo.init(self, fragment, value)
        return State(shared=state.shared, private={"carried": torch.zeros_like(value)})

    def plan(self, inner_step, /):
        if inner_step % self.inner_steps:
            return ()
        key = TABLE.whole().key
        return (Round(fragment=key, op=Op.MEAN, inner_step=inner_step, delay=self.inner_steps),)

    def emit(self, _round, value, state, /, *, out):
        torch.sub(state.shared[ANCHOR], value, out=out)
        return Emitted(payload=out.add_(state.private["carried"]))

    def absorb(self, round_, result, state, /, *, out=None):
        out = out or state.empty_like()
        after = DiLoCo.absorb(self, round_, result, state, out=out)
        out.private["carried"].zero_()  # the payload in flight holds it
        return after

    def dropped(self, _round, contribution, state, /, *, out=None):
        out = out or state.empty_like()
        for name, tensor in state.shared.items():
            out.shared[name].copy_(tensor)
        out.private["carried"].copy_(contribution.payload)
        return Absorbed(state=out, target=out.shared[ANCHOR], keep=0.0)


@dataclass(frozen=True)
class Eager(Delayed):
    """Own term fresh, the others' stale. Every worker has its own anchor, so all its state is private."""

    def init(self, fragment, value, /):
        return State(private={ANCHOR: value.clone(), MOMENTUM: torch.zeros_like(value)})

    def emit(self, _round, value, state, /, *, out):
        return Emitted(payload=torch.sub(state.private[ANCHOR], value, out=out))

    def absorb(self, _round, result, state, /, *, out=None):
        out = out or state.empty_like()
        mine = result.contribution
        share = mine.weight / result.weight_sum
        nesterov_step(
            anchor=state.private[ANCHOR],
            momentum=state.private[MOMENTUM],
            delta=result.value + share * (mine.newer_payload - mine.payload),
            lr=self.lr,
            mu=self.momentum,
            anchor_out=out.private[ANCHOR],
            momentum_out=out.private[MOMENTUM],
        )
        return Absorbed(state=out, target=out.private[ANCHOR], keep=0.0)


def test_eager_with_one_worker_is_diloco():
    eager, diloco = (run(cls(inner_steps=4), workers=("ash",)) for cls in (Eager, DiLoCo))
    assert_same(list(eager.values.values()), list(diloco.values.values()), tolerance=1e-5)


def test_eager_anchors_differ_by_their_own_latest_term_only():
    """With plain SGD outside, θ_m + (η/M)·Δ_m is the same on all workers, round after round."""
    outer, num_steps = Eager(lr=0.5, momentum=0.0, inner_steps=4), 24
    after = run(outer, num_steps)
    before = run(outer, num_steps - 1)
    invariant, own = [], []
    for worker in WORKERS:
        value = before.values[worker].clone()
        sgd_step(worker, num_steps, value)
        anchor = next(iter(before.states[worker].values())).private[ANCHOR]
        invariant.append(after.values[worker] + 0.5 / len(WORKERS) * (anchor - value))
        own.append(anchor - value)
    assert (own[0] - own[1]).abs().max() > 1e-3
    assert_same(invariant[1:], invariant[:1] * 3, tolerance=1e-5)


def test_delayed_delivers_every_block_of_work_once_when_rounds_are_aborted():
    """A constant gradient: each worker's every block of H steps moves it by H, and all of it must arrive."""

    def constant_step(_worker, _inner_step, value):
        value -= 1.0

    trajectory = simulate(
        Delayed(lr=1.0, momentum=0.0, inner_steps=4),
        table=TABLE,
        initial=torch.zeros(TABLE.numel),
        workers=WORKERS,
        inner_step=constant_step,
        num_inner_steps=80,
        aborted=lambda round_: round_.inner_step in (12, 16, 32),
    )
    assert len(trajectory.dropped) == 3
    # Nineteen blocks were emitted before the last boundary and are due by now.
    assert trajectory.committed[-1].shared[ANCHOR].unique().tolist() == [-19 * 4.0]


# ------------------------------------------------------------------------------------- pairs (arXiv:2506.10911)
@dataclass(frozen=True)
class Pairs(DiLoCo):
    """NoLoCo with one tensor sent: m ← μ·m + η·(mean of the pair's θ - φ);  φ ← φ + m."""

    def init(self, fragment, value, /):
        return State(private={"slow": value.clone(), MOMENTUM: torch.zeros_like(value)})

    def plan(self, inner_step, /):
        return tuple(
            Round(fragment=r.fragment, op=Op.PAIR, inner_step=inner_step) for r in DiLoCo.plan(self, inner_step)
        )

    def emit(self, _round, value, _state, /, *, out):
        return Emitted(payload=out.copy_(value))

    def absorb(self, _round, result, state, /, *, out=None):
        out = out or state.empty_like()
        pair_mean = (result.value + result.contribution.payload) / 2.0
        out.private[MOMENTUM].copy_(
            self.momentum * state.private[MOMENTUM] + self.lr * (pair_mean - state.private["slow"])
        )
        torch.add(state.private["slow"], out.private[MOMENTUM], out=out.private["slow"])
        return Absorbed(state=out, target=out.private["slow"], keep=0.0)


def test_a_pair_without_momentum_meets_in_the_middle():
    after = run(Pairs(lr=1.0, momentum=0.0, inner_steps=4), 4, workers=WORKERS[:2])
    mean = run(DiLoCo(lr=1.0, momentum=0.0, inner_steps=4), 4, workers=WORKERS[:2])
    assert_same(list(after.values.values()), anchors(mean) * 2)


def test_an_unpaired_worker_goes_on_alone():
    after = run(Pairs(lr=1.0, momentum=0.0, inner_steps=4), 4, workers=WORKERS[:3])
    alone = run(DiLoCo(inner_steps=1000), 4, workers=WORKERS[:3])
    untouched = [worker for worker in WORKERS[:3] if torch.equal(after.values[worker], alone.values[worker])]
    assert len(untouched) == 1
    assert untouched[0] not in after.committed[0].members


# --------------------------------------------------------------------- sparse, error feedback (arXiv:2508.15706)
@dataclass(frozen=True)
class Sparse(DiLoCo):
    """a = β·e + Δ is sent; e keeps what did not arrive; plain descent on the mean of what did."""

    decay: float = 0.95

    def init(self, fragment, value, /):
        return State(shared={ANCHOR: value.clone()}, private={"residual": torch.zeros_like(value)})

    def plan(self, inner_step, /):
        return tuple(
            Round(fragment=r.fragment, op=Op.GATHER, inner_step=inner_step) for r in DiLoCo.plan(self, inner_step)
        )

    def emit(self, _round, value, state, /, *, out):
        torch.sub(state.shared[ANCHOR], value, out=out)
        return Emitted(payload=out.add_(self.decay * state.private["residual"]))

    def absorb(self, _round, result, state, /, *, out=None):
        out = out or state.empty_like()
        total = torch.zeros_like(state.shared[ANCHOR])
        for row in result.value:
            total += row
        torch.sub(state.shared[ANCHOR], total * (self.lr / len(result.members)), out=out.shared[ANCHOR])
        residual = out.private["residual"].zero_()
        if result.contribution is not None:
            result.contribution.read_delivered(residual)
            torch.sub(result.contribution.payload, residual, out=residual)
        return Absorbed(state=out, target=out.shared[ANCHOR], keep=0.0)


def top_quarter(payload):
    kept = payload.abs().topk(payload.numel() // 4).indices
    return torch.zeros_like(payload).index_copy_(0, kept, payload[kept])


@pytest.mark.parametrize("decay", [0.0, 0.95, 1.0])
def test_sparse_that_sends_everything_is_diloco_without_momentum(decay):
    sparse = run(Sparse(lr=0.6, inner_steps=4, decay=decay))
    assert_same(anchors(sparse), anchors(run(DiLoCo(lr=0.6, momentum=0.0, inner_steps=4))))


def test_error_feedback_loses_nothing_also_when_rounds_are_aborted():
    """decay 1, lr 1: anchor moved + mean residual = all work done, which a constant gradient lets us count."""
    slopes = {worker: torch.sin(torch.arange(float(TABLE.numel)) * (n + 1)) for n, worker in enumerate(WORKERS)}

    def constant_step(worker, _inner_step, value):
        value -= slopes[worker]

    trajectory = simulate(
        Sparse(lr=1.0, inner_steps=4, decay=1.0),
        table=TABLE,
        initial=INITIAL,
        workers=WORKERS,
        inner_step=constant_step,
        num_inner_steps=40,
        aborted=lambda round_: round_.inner_step in (8, 24),
        deliver=top_quarter,
    )
    states = [next(iter(held.values())) for held in trajectory.states.values()]
    residual = torch.stack([state.private["residual"] for state in states]).mean(dim=0)
    assert residual.abs().max() > 0.1
    work = 40 * torch.stack(list(slopes.values())).mean(dim=0)
    torch.testing.assert_close(INITIAL - states[0].shared[ANCHOR] + residual, work, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------- a payload judged by its own sender
@dataclass(frozen=True)
class Guarded(DiLoCo):
    """A worker that has gone too far weighs nothing: EDiT's guard (arXiv:2412.07210) at its crudest."""

    def emit(self, round_, value, state, /, *, out):
        emitted = DiLoCo.emit(self, round_, value, state, out=out)
        return Emitted(payload=emitted.payload, weight=float(emitted.payload.norm() < 100.0))


def test_a_worker_that_ran_away_is_left_out_and_called_back():
    def step(worker, inner_step, value):
        sgd_step(worker, inner_step, value)
        if worker == "birch" and inner_step < 4:
            value += 1e3

    guarded = simulate(
        Guarded(inner_steps=4),
        table=TABLE,
        initial=INITIAL,
        workers=WORKERS,
        inner_step=step,
        num_inner_steps=8,
    )
    assert [committed.members for committed in guarded.committed] == [("ash", "cedar", "dogwood"), WORKERS]
    assert guarded.values["birch"].abs().max() < 10.0
