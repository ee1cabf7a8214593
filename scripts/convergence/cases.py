# SPDX-License-Identifier: Apache-2.0
"""What is compared: a row a method, with the paper's settings, what may be tuned, and what its paper claims.

Every method is tuned with the same number of runs, `RUNS_PER_SWEEP`: inner learning rates alone for those that have
nothing else to choose, fewer of them times three values of the one outer setting that matters most for the others. A
variant (another codec, aborted rounds) is not tuned: it takes the settings of its base, so that it differs in nothing
else. Names are those of `optim.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from isthmus.optim.registry import build_outer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from isthmus.optim.fragments import FragmentTable
    from isthmus.optim.outer import Outer

INNER_STEPS: Final = 15
"""H of every method that has one."""
DATA_PARALLEL: Final = "data_parallel"
RUNS_PER_SWEEP: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """One point of a sweep: what replaces a case's own settings."""

    inner_lr: float
    outer: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """All of them by name, for tables."""
        return {"inner lr": self.inner_lr, **self.outer, **self.inner}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.as_dict().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a method may have to know of the run it is for."""

    tuned: Tuned
    num_workers: int
    num_steps: int
    warmup_steps: int
    min_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    type: str
    """As the registry knows it."""
    settings: Mapping[str, object] = field(default_factory=dict)
    fits: Callable[[Run], Mapping[str, object]] = lambda _run: {}
    """Settings that follow from the run."""
    inner: Mapping[str, Any] = field(default_factory=dict)
    """Fields of InnerSettings that differ from the others'."""
    codec: str = "raw"
    """Of the rounds that name none."""
    sweep: tuple[Tuned, ...] = ()
    """Likely ones first. Empty for a variant."""
    base: str | None = None
    """Whose tuned settings a variant takes."""
    abort_share: float = 0.0
    """Of the rounds, which fail everywhere."""
    churns: bool = False
    """Two workers leave and come back, one after the other."""
    speeds: tuple[float, ...] = ()
    """Of the workers, in their order; 1 where not given."""
    workers: int | None = None
    """How many there are, where the case says it."""
    is_headline: bool = False
    """With 8 workers too."""
    source: str = ""

    def build(self, run: Run, table: FragmentTable) -> Outer:
        """The method, fitted to the model if it needs to know it.

        Raises:
            ValueError: there is none of that type, or it has no such settings.
        """
        return build_outer(self.type, **{**self.settings, **self.fits(run), **run.tuned.outer}).fitted(table)


# ------------------------------------------------------------------------------------------------------- the sweeps

_SIX_LRS: Final = (4e-3, 2.8e-3, 5.6e-3, 2e-3, 8e-3, 1.4e-3)
_TWO_LRS: Final = (2e-3, 4e-3)


def inner_sweep(lrs: Sequence[float] = _SIX_LRS) -> tuple[Tuned, ...]:
    """Inner learning rates alone."""
    return tuple(Tuned(inner_lr=lr) for lr in lrs)


def outer_sweep(name: str, values: Sequence[float], lrs: Sequence[float] = _TWO_LRS) -> tuple[Tuned, ...]:
    """Two inner learning rates times three values of an outer setting."""
    return tuple(Tuned(inner_lr=lr, outer={name: value}) for value in values for lr in lrs)


def _growing_rounds(run: Run) -> dict[str, object]:
    """Rounds that grow when the learning rate has fallen to half its peak."""
    return {
        "alpha": 0.5 * run.tuned.inner_lr * INNER_STEPS**0.5,
        "peak_lr": run.tuned.inner_lr,
        "total_steps": run.num_steps,
        "schedule": "cosine",
        "warmup_steps": run.warmup_steps,
        "min_ratio": run.min_ratio,
    }


# ------------------------------------------------------------------------------------------------------- the table

_H: Final = {"inner_steps": INNER_STEPS}

WITHOUT_MEANS: Final = {"resync_steps": 1 << 40}
"""For methods of gradients: here nobody joins and all round alike, so workers stay alike without means of them."""

_SLOW_STATES: Final = {"betas": (0.95, 0.995)}
"""DES-LOC's first beta, and a second whose half-life of 138 steps is longer than its period, as the paper asks."""
_NESTEROV: Final = {**_H, "momentum": 0.9}
_STREAMING: Final = {**_NESTEROV, "num_fragments": 2, "lr": 0.4}

_MEAN: Final = {**_H, "lr": 1.0, "momentum": 0.0}

CASES: Final = (
    Case(
        name=DATA_PARALLEL,
        type="data_parallel",
        settings=WITHOUT_MEANS,
        sweep=inner_sweep(),
        is_headline=True,
        source="2006.15704",
    ),
    Case(name="averaging", type="diloco", settings=_MEAN, sweep=inner_sweep(), is_headline=True, source="1805.09767"),
    Case(name="alone", type="diloco", settings=_MEAN, workers=1, sweep=inner_sweep()),
    Case(
        name="diloco",
        type="diloco",
        settings=_NESTEROV,
        sweep=outer_sweep("lr", (0.4, 0.7, 0.2)),
        is_headline=True,
        source="2311.08105",
    ),
    Case(name="diloco int8", type="diloco", settings=_NESTEROV, codec="int8", base="diloco", is_headline=True),
    Case(name="diloco e3m0", type="diloco", settings=_NESTEROV, codec="e3m0", base="diloco", is_headline=True),
    Case(name="diloco H=60", type="diloco", settings={**_NESTEROV, "inner_steps": 4 * INNER_STEPS}, base="diloco"),
    Case(
        name="diloco churn",
        type="diloco",
        settings=_NESTEROV,
        base="diloco",
        abort_share=0.1,
        churns=True,
        is_headline=True,
    ),
    Case(
        name="streaming",
        type="streaming",
        settings=_STREAMING,
        # The paper's 0.5 throws half of each outer step away; with one step of 15 under way there is less to keep.
        sweep=outer_sweep("keep", (0.25, 0.5, 0.0)),
        is_headline=True,
        source="2501.18512",
    ),
    Case(name="streaming int8", type="streaming", settings=_STREAMING, codec="int8", base="streaming"),
    Case(
        name="streaming e3m0",
        type="streaming",
        settings=_STREAMING,
        codec="e3m0",
        base="streaming",
        is_headline=True,
    ),
    Case(
        name="streaming churn",
        type="streaming",
        settings=_STREAMING,
        base="streaming",
        abort_share=0.1,
        churns=True,
    ),
    Case(
        name="delayed",
        type="delayed",
        settings=_NESTEROV,
        sweep=outer_sweep("lr", (0.1, 0.2, 0.05)),
        source="2502.12996",
    ),
    Case(
        name="eager", type="eager", settings=_NESTEROV, sweep=outer_sweep("lr", (0.2, 0.1, 0.05)), source="2502.12996"
    ),
    Case(
        name="co2",
        type="co2",
        settings={**_H, "momentum": 0.5},
        sweep=outer_sweep("lr", (0.25, 0.5, 0.12)),
        source="2401.16265",
    ),
    Case(
        name="sparseloco",
        type="sparseloco",
        # A residual that is remembered for ten rounds of 48. A mean of lone entries is short: the public code divides
        # by the members that sent an element, up to four times longer steps at alpha = 1, we by all of them.
        settings={**_H, "beta": 0.9, "dense_steps": 0},
        sweep=outer_sweep("alpha", (5.0, 3.5, 7.0)),
        is_headline=True,
        source="2508.15706",
    ),
    Case(
        name="local_adam",
        type="local_adam",
        settings=_H,
        inner=_SLOW_STATES,
        sweep=inner_sweep(),
        is_headline=True,
        source="2409.13155",
    ),
    Case(
        name="desloc",
        type="desloc",
        settings=_H,
        inner=_SLOW_STATES,
        sweep=inner_sweep(),
        is_headline=True,
        source="2505.22549",
    ),
    Case(
        name="mtdao",
        type="mtdao",
        settings=_H,
        # Half-lives longer than a round, and shorter than the run, which 0.9999 would not be.
        inner={"type": "adopt", "betas": (0.99, 0.99)},
        sweep=tuple(Tuned(inner_lr=lr, inner={"omega": omega}) for omega in (0.9, 0.97, 0.7) for lr in (8e-3, 4e-3)),
        source="2510.05361",
    ),
    Case(
        name="noloco",
        type="noloco",
        settings={**_H, "momentum": 0.5},
        sweep=outer_sweep("lr", (0.7, 1.0, 0.4)),
        source="2506.10911",
    ),
    Case(
        name="async",
        type="async",
        settings={**_NESTEROV, "dylu": True, "poll_steps": 5},
        fits=lambda run: {"buffer": run.num_workers},
        speeds=(1.0, 1.0, 0.75, 0.5),
        sweep=outer_sweep("lr", (0.4, 0.7, 0.2)),
        source="2401.09135",
    ),
    Case(
        name="edit",
        type="edit",
        settings={**_H, "momentum": 0.8},
        sweep=outer_sweep("lr", (0.7, 0.4, 1.0)),
        source="2412.07210",
    ),
    Case(
        name="decoupled",
        type="decoupled",
        settings={**_NESTEROV, "num_fragments": INNER_STEPS},
        sweep=outer_sweep("lr", (0.4, 0.2, 0.7)),
        source="2604.21428",
    ),
    Case(
        name="demo",
        type="demo",
        settings={**WITHOUT_MEANS, "warm_up_steps": 0},
        inner={"type": "sgd", "clip": None},
        sweep=inner_sweep((4e-3, 2.8e-3, 5.6e-3, 2e-3, 8e-3, 1.4e-3)),
        source="2411.19870",
    ),
    Case(
        name="powersgd",
        type="powersgd",
        settings={**_H, "rank": 8, "dense_steps": 0},
        sweep=outer_sweep("lr", (1.0, 0.7, 1.4)),
        source="1905.13727",
    ),
    Case(name="qsr", type="qsr", settings=_H, fits=_growing_rounds, sweep=inner_sweep(), source="2310.14423"),
    Case(
        name="autoloco",
        type="autoloco",
        settings=_NESTEROV,
        fits=_growing_rounds,
        sweep=outer_sweep("lr", (0.4, 0.7, 0.2)),
        source="AutoLoCo, 2026, from a secondary account",
    ),
)
