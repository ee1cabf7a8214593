# SPDX-License-Identifier: Apache-2.0
"""CO2 (arXiv:2401.16265), every τ inner steps, with x̄ the mean launched τ steps ago and x_old where its block began:

m ← μ·m + (x_old - x̄) / Λ;   m ← clamp(m, -φ, φ);   x ← x - lr·m

What it shares with every method that is delayed by a whole round is in test_delayed_paper.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from isthmus.optim import ANCHOR, Op, Result, Round, build_outer
from isthmus.optim.co2 import CO2
from isthmus.optim.diloco import MOMENTUM
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, anchors, assert_same, gradient, run, sgd_step

TAU = 4


def direct_co2(num_blocks, *, lr, mu, penalty=1.0, clip=math.inf, delay=1, weights=(1.0, 1.0, 1.0, 1.0), aborted=()):
    """On averaged parameters, in double precision; the anchor after each outer step. `aborted`: blocks, from 1.

    Work that was aborted stays with its workers, on top of what they average next.
    """
    anchor, momentum = INITIAL.double(), torch.zeros(TABLE.numel, dtype=torch.float64)
    kept = [torch.zeros_like(anchor) for _ in WORKERS]
    launched, found = [], []
    for block in range(1, num_blocks + 1):
        ends = []
        for worker, rest in zip(WORKERS, kept, strict=True):
            value = anchor.clone()
            for step in range((block - 1) * TAU + 1, block * TAU + 1):
                value -= 0.03 * gradient(worker, step, value)
            ends.append(value + rest)
        kept = [torch.zeros_like(anchor) for _ in WORKERS]
        launched.append((block, anchor, ends))
        if len(launched) <= delay:
            continue
        launch, old, values = launched.pop(0)
        if launch in aborted:
            kept = [value - old for value in values]
            continue
        mean = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        momentum = (mu * momentum + (old - mean) / penalty).clamp(-clip, clip)
        anchor = anchor - lr * momentum
        found.append(anchor)
    return found


def committed_anchors(trajectory):
    """Without that of the first round, of zeros."""
    assert torch.equal(anchors(trajectory)[0], INITIAL)
    return [anchor.double() for anchor in anchors(trajectory)[1:]]


# --------------------------------------------------------------------------------------- identities


def test_without_overlap_momentum_and_penalty_it_averages_parameters():
    settings = {"lr": 1.0, "momentum": 0.0, "penalty": 1.0, "clip": math.inf, "inner_steps": TAU}
    before = run(CO2(overlap=False, **settings), 3 * TAU - 1).values
    for worker, value in before.items():
        sgd_step(worker, 3 * TAU, value)
    after = run(CO2(overlap=False, **settings), 3 * TAU)
    torch.testing.assert_close(anchors(after)[-1], torch.stack(list(before.values())).mean(dim=0))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1.0, "mu": 0.5},
        {"lr": 1.0, "mu": 0.0},
        {"lr": 0.7, "mu": 0.2, "penalty": 3.0},
        {"lr": 0.8, "mu": 0.5, "penalty": 1.5, "clip": 0.03},
    ],
)
@pytest.mark.parametrize("delay", [0, 1])
def test_it_follows_a_direct_implementation(settings, delay):
    named = {"momentum" if name == "mu" else name: value for name, value in settings.items()}
    # Where no clip is set, it is the released threshold, far above what is reached here.
    trajectory = run(CO2(inner_steps=TAU, overlap=bool(delay), **named), 40)
    found = committed_anchors(trajectory) if delay else [anchor.double() for anchor in anchors(trajectory)]
    assert_same(found, direct_co2(10, delay=delay, **settings), tolerance=1e-5)


def test_weights_and_aborted_rounds_are_those_of_the_direct_implementation():
    weights, aborted = (3.0, 1.0, 0.5, 1.5), (2, 5, 6)
    trajectory = run(
        CO2(momentum=0.5, inner_steps=TAU, penalty=1.25),
        48,
        weigh=lambda worker, _work: weights[WORKERS.index(worker)],
        aborted=lambda round_: round_.inner_step in (8, 20, 24),
    )
    assert [round_.inner_step for round_ in trajectory.dropped] == [8, 20, 24]
    expected = direct_co2(12, lr=1.0, mu=0.5, penalty=1.25, weights=weights, aborted=aborted)
    assert_same(committed_anchors(trajectory), expected, tolerance=1e-5)


# --------------------------------------------------------------------------------------- the step itself


def step(outer, mean, momentum=None):
    shared = outer.init(TABLE.whole(), INITIAL)
    if momentum is not None:
        shared[MOMENTUM].copy_(momentum)
    round_ = Round(fragment=TABLE.whole().key, op=Op.MEAN, inner_step=TAU, delay=TAU)
    return outer.step(round_, Result(value=mean, members=WORKERS, weight_sum=4.0), shared)


def test_the_clip_clips_each_element_of_the_momentum_and_nothing_else():
    mean = torch.linspace(-0.1, 0.1, TABLE.numel)
    clipped = step(CO2(clip=0.06), mean)[MOMENTUM]
    within = mean.abs() <= 0.06
    assert 0 < within.sum() < TABLE.numel
    assert torch.equal(clipped[within], mean[within])
    assert torch.equal(clipped[~within], torch.tensor(0.06) * mean[~within].sign())
    assert torch.equal(step(CO2(clip=math.inf), mean)[MOMENTUM], mean)


def test_the_clip_bounds_how_far_an_outer_step_goes():
    found = anchors(run(CO2(momentum=0.5, inner_steps=TAU, clip=0.01), 40))
    moved = [(after - before).abs().max().item() for before, after in itertools.pairwise(found)]
    assert max(moved) == pytest.approx(0.01, rel=1e-4)


def test_the_penalty_divides_what_is_stale_but_not_the_momentum():
    mean, momentum = torch.full((TABLE.numel,), 0.5), torch.full((TABLE.numel,), 0.25)
    assert step(CO2(momentum=0.5, penalty=4.0), mean, momentum)[MOMENTUM].unique().tolist() == [0.5 * 0.25 + 0.5 / 4]


def test_bits_are_those_of_separately_rounded_operations():
    generator = torch.Generator().manual_seed(2)
    mean, momentum = (torch.randn(TABLE.numel, generator=generator) for _ in range(2))
    found = step(CO2(lr=0.7, momentum=0.3, penalty=1.7, clip=0.9), mean, momentum)
    f32 = np.float32
    expected = np.clip(momentum.numpy() * f32(0.3) + mean.numpy() / f32(1.7), f32(-0.9), f32(0.9))
    assert np.array_equal(found[MOMENTUM].numpy(), expected)
    assert np.array_equal(found[ANCHOR].numpy(), INITIAL.numpy() - expected * f32(0.7))


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"penalty": 0.5}, "penalty must be finite and at least 1, got 0.5"),
        ({"penalty": math.inf}, "penalty must be finite and at least 1"),
        ({"penalty": math.nan}, "penalty must be finite and at least 1"),
        ({"clip": 0.0}, "clip must be positive, got 0.0"),
        ({"clip": math.nan}, "clip must be positive"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer("co2", **settings)


def test_it_is_built_by_its_name():
    assert build_outer("co2", momentum=0.2) == CO2(momentum=0.2)
