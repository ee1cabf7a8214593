# SPDX-License-Identifier: Apache-2.0
"""One run of one case, from the first weights to the last held-out loss."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from isthmus.collective.codec import NotFinite
from isthmus.optim.registry import build_outer
from isthmus.optim.simulate import shared_parameters, simulate
from isthmus.trainer.model.decoder import ModelConfig
from scripts.convergence.cases import INNER_STEPS, WITHOUT_MEANS, Run
from scripts.convergence.codec_wire import CodecWire
from scripts.convergence.fleet import Architecture, Fleet, InnerSettings
from scripts.convergence.text import VOCAB_SIZE, Reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from isthmus.optim.fragments import Fragment
    from isthmus.optim.outer import Round
    from isthmus.optim.simulate import Trajectory
    from scripts.convergence.cases import Case, Tuned
    from scripts.convergence.text import Text

WORKERS: Final = ("ash", "birch", "cedar", "dogwood", "elm", "fir", "gorse", "hazel")
_START_SEED: Final = 1000
_AWAY: Final = 0.25
"""Share of the run for which a churning worker is away."""
_EVALUATED_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What every run of a comparison gets alike."""

    start_steps: int = 360
    """Data-parallel steps, the same for all, before any run begins."""
    start_lr: float = 2e-3
    num_steps: int = 720
    """Global inner steps of a run."""
    warmup_steps: int = 36
    batch_size: int = 2
    """Samples a worker and step."""
    dim: int = 64
    num_layers: int = 3
    num_heads: int = 4
    hidden_dim: int = 128
    length: int = 64
    """Tokens of a sample."""
    held_out_samples: int = 512
    curve_points: int = 12
    curve_samples: int = 64

    @property
    def model(self) -> ModelConfig:
        """Of every worker."""
        return ModelConfig(
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            hidden_dim=self.hidden_dim,
            max_seq_len=self.length,
            vocab_size=VOCAB_SIZE,
        )

    @property
    def tokens_per_step(self) -> int:
        """Of one worker."""
        return self.batch_size * self.length


def run_trial(case: Case, tuned: Tuned, *, num_workers: int, seed: int, budget: Budget, text: Text) -> dict[str, Any]:
    """Train once.

    Returns:
        What is to be known of the run, for JSON. `loss` is None if it diverged.
    """
    started = time.perf_counter()
    architecture = Architecture(budget.model)
    workers = WORKERS[:num_workers]
    speeds = dict(zip(workers, itertools.cycle(case.speeds), strict=False)) if case.speeds else {}
    num_steps = _num_steps(case, budget, [speeds.get(worker, 1.0) for worker in workers])
    inner = InnerSettings(
        total_steps=num_steps,
        warmup_steps=budget.warmup_steps,
        lr=tuned.inner_lr,
        **{**case.inner, **tuned.inner},
    )
    reader = Reader(text, seed=seed, num_steps=num_steps, batch_size=budget.batch_size, length=budget.length)
    outer = case.build(
        Run(
            tuned=tuned,
            num_workers=num_workers,
            num_steps=num_steps,
            warmup_steps=inner.warmup_steps,
            min_ratio=inner.min_ratio,
        ),
        architecture.table,
    )
    fleet = Fleet(architecture, rows=num_workers, inner=inner, batches=reader)
    judge = _Judge(architecture, outer.fragments(architecture.table), num_steps, budget, text)
    joins, leaves = _churn(workers, num_steps) if case.churns else ({}, {})
    wire = CodecWire(case.codec)
    row: dict[str, Any] = {
        "case": case.name,
        "workers": num_workers,
        "seed": seed,
        "tuned": tuned.as_dict(),
        "loss": None,
        "curve": judge.curve,
    }
    try:
        trajectory = simulate(
            outer,
            table=architecture.table,
            initial=start(budget, seed, text),
            workers=workers,
            workload=fleet,
            num_inner_steps=num_steps,
            batch_size=float(budget.batch_size),
            speeds=speeds,
            aborted=_Aborts(case.abort_share, seed),
            joins=joins,
            leaves=leaves,
            wire=wire,
            records=False,
            on_step=judge.on_step,
        )
    except (NotFinite, FloatingPointError) as error:
        return row | {"diverged": str(error), "seconds": time.perf_counter() - started}
    return row | {
        "loss": judge.loss(trajectory, budget.held_out_samples),
        "steps": num_steps,
        "tokens": fleet.num_tokens,
        "rounds": trajectory.num_rounds,
        "dropped": len(trajectory.dropped),
        "payload_nbytes_per_token": wire.payload_nbytes / fleet.num_tokens,
        "sent_nbytes_per_token": wire.sent_nbytes / fleet.num_tokens,
        "seconds": time.perf_counter() - started,
    }


@functools.lru_cache(maxsize=8)
def start(budget: Budget, seed: int, text: Text) -> Tensor:
    """What every run of a seed starts from: weights that data parallelism has trained for a while, [numel].

    The outer optimizers are for the long way after the first, steep descent; their papers train for thousands of rounds
    or begin with a trained model as well.
    """
    initial = budget.model.initial_parameters(seed)
    if not budget.start_steps:
        return initial
    architecture = Architecture(budget.model)
    workers = WORKERS[:4]
    inner = InnerSettings(
        total_steps=budget.start_steps, warmup_steps=budget.warmup_steps, lr=budget.start_lr, min_ratio=1.0
    )
    reader = Reader(
        text, seed=seed + _START_SEED, num_steps=budget.start_steps, batch_size=budget.batch_size, length=budget.length
    )
    fleet = Fleet(architecture, rows=len(workers), inner=inner, batches=reader)
    trajectory = simulate(
        build_outer("data_parallel", **WITHOUT_MEANS),
        table=architecture.table,
        initial=initial,
        workers=workers,
        workload=fleet,
        num_inner_steps=budget.start_steps,
        records=False,
    )
    return next(iter(trajectory.values.values())).clone()


def _num_steps(case: Case, budget: Budget, speeds: Sequence[float]) -> int:
    """Where workers are slow or away all train for longer, so that the tokens are as many as elsewhere."""
    present = sum(speeds) - (2 * _AWAY if case.churns else 0.0)
    if present == len(speeds):
        return budget.num_steps
    return INNER_STEPS * round(budget.num_steps * len(speeds) / present / INNER_STEPS)


class _Judge:
    """Held-out losses of the shared parameters."""

    def __init__(
        self, architecture: Architecture, fragments: Sequence[Fragment], num_steps: int, budget: Budget, text: Text
    ) -> None:
        self._architecture, self._fragments = architecture, fragments
        self._num_steps, self._points = num_steps, budget.curve_points
        self._curve_samples = budget.curve_samples
        self._samples = text.held_out_samples(budget.held_out_samples, length=budget.length)
        self._params = torch.empty(architecture.table.numel)
        self.curve: list[tuple[int, float]] = []

    def on_step(self, step: int, trajectory: Trajectory) -> None:
        if step * self._points // self._num_steps == (step - 1) * self._points // self._num_steps:
            return
        loss = self.loss(trajectory, self._curve_samples)
        self.curve.append((step, loss))

    def loss(self, trajectory: Trajectory, num_samples: int) -> float:
        samples = self._samples[:: len(self._samples) // num_samples][:num_samples]
        return held_out_loss(self._architecture, trajectory, self._fragments, samples, params=self._params)


@torch.no_grad()
def held_out_loss(
    architecture: Architecture,
    trajectory: Trajectory,
    fragments: Sequence[Fragment],
    samples: Tensor,
    *,
    params: Tensor | None = None,
) -> float:
    """Of the shared parameters, nats a token.

    Args:
        architecture: of the workers.
        trajectory: at any moment.
        fragments: those of the method.
        samples: [count, length + 1] int64.
        params: [numel], overwritten; None allocates.

    Raises:
        FloatingPointError: it is not finite.
    """
    params = torch.empty(architecture.table.numel) if params is None else params
    shared_parameters(trajectory, fragments, out=params)
    weights = architecture.weights(params.unsqueeze(0))
    losses = [
        architecture.losses(weights, part.unsqueeze(0)).item() * len(part)
        for part in torch.split(samples, _EVALUATED_AT_ONCE)
    ]
    loss = sum(losses) / len(samples)
    if not math.isfinite(loss):
        raise FloatingPointError("the held-out loss is not finite")
    return loss


class _Aborts:
    """Which rounds fail, drawn from the seed and the step: the rounds of one step fail together."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._seed = share, seed

    def __call__(self, round_: Round) -> bool:
        return random.Random(f"{self._seed}/{round_.inner_step}").random() < self._share


def _churn(workers: Sequence[str], num_steps: int) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """(joins, leaves): the last worker is away in the second quarter, the one before it in the third.

    They leave and come in the middle of a round.
    """
    first, second, third = (num_steps * quarter // 4 + INNER_STEPS // 2 for quarter in (1, 2, 3))
    *_, before_last, last = workers
    return {second: [last], third: [before_last]}, {first: [last], second: [before_last]}
