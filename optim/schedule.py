# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules of the inner optimizer: pure functions from the inner step to a factor on the peak rate.

Inner steps count from 0: `schedule(t)` is the factor for the step that follows t finished ones. They are those of the
plan, and need not be whole: a run is worth as many as the tokens say that it has committed, whoever trained them. The
first step is never wasted on a rate of zero, and past its end a schedule stays where it ended: a run that is prolonged
goes on.

The outer learning rate is constant; it is not here. It must not know optimizers or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, assert_never

Schedule: TypeAlias = Callable[[float], float]
"""inner_step -> factor in [0, 1] on the peak learning rate."""

ScheduleType: TypeAlias = Literal["constant", "cosine", "wsd"]


def constant(*, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, then 1.

    Raises:
        ValueError: if warmup_steps is negative.
    """
    _require(warmup_steps >= 0, f"warmup_steps must be >= 0, got {warmup_steps}")
    return lambda inner_step: warmup(inner_step, warmup_steps)


def cosine(*, total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.1) -> Schedule:
    """Linear warm-up, then half a cosine from 1 to `min_ratio`, reached at `total_steps`.

    Raises:
        ValueError: unless 0 <= warmup_steps < total_steps and 0 <= min_ratio <= 1.
    """
    _require(
        0 <= warmup_steps < total_steps, f"need 0 <= warmup_steps < total_steps, got {warmup_steps}, {total_steps}"
    )
    _require_ratio(min_ratio)

    def factor(inner_step: float) -> float:
        if inner_step < warmup_steps:
            return warmup(inner_step, warmup_steps)
        progress = min(1.0, (inner_step - warmup_steps) / (total_steps - warmup_steps))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def wsd(*, total_steps: int, decay_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> Schedule:
    """Warm-up, stable, decay: linear warm-up, then 1, then linearly to `min_ratio` over the last `decay_steps`.

    The stable part does not depend on `total_steps`, so a run can be prolonged before its decay has begun.

    Raises:
        ValueError: unless the warm-up and the decay fit into total_steps >= 1 and 0 <= min_ratio <= 1.
    """
    _require(
        min(warmup_steps, decay_steps) >= 0 and 1 <= total_steps >= warmup_steps + decay_steps,
        f"warm-up ({warmup_steps}) and decay ({decay_steps}) must fit into total_steps ({total_steps})",
    )
    _require_ratio(min_ratio)
    decay_start = total_steps - decay_steps

    def factor(inner_step: float) -> float:
        if inner_step < decay_start or decay_steps == 0:
            return warmup(inner_step, warmup_steps)
        progress = min(1.0, (inner_step - decay_start) / decay_steps)
        return 1.0 - (1.0 - min_ratio) * progress

    return factor


def build_schedule(
    type: ScheduleType,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.1,
    decay_steps: int | None = None,
) -> Schedule:
    """Build a schedule from configuration.

    Args:
        type: "constant" (reads warmup_steps only), "cosine" or "wsd".
        total_steps: inner steps of the whole run.
        warmup_steps: inner steps of the linear warm-up.
        min_ratio: factor at the end.
        decay_steps: of "wsd" only; None: a tenth of the run.

    Raises:
        ValueError: as the schedule itself, or if decay_steps is given to another type.
    """
    _require(decay_steps is None or type == "wsd", f"decay_steps belongs to wsd, not to {type}")
    match type:
        case "constant":
            return constant(warmup_steps=warmup_steps)
        case "cosine":
            return cosine(total_steps=total_steps, warmup_steps=warmup_steps, min_ratio=min_ratio)
        case "wsd":
            decay_steps = total_steps // 10 if decay_steps is None else decay_steps
            return wsd(total_steps=total_steps, decay_steps=decay_steps, warmup_steps=warmup_steps, min_ratio=min_ratio)
        case _:
            assert_never(type)


def warmup(inner_step: float, warmup_steps: int) -> float:
    """The linear rise at the beginning of every schedule: a factor in (0, 1], 1 from `warmup_steps` on."""
    return min(1.0, (inner_step + 1) / (warmup_steps + 1))


def _require_ratio(min_ratio: float) -> None:
    _require(0.0 <= min_ratio <= 1.0, f"min_ratio must be in [0, 1], got {min_ratio}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
