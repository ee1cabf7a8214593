# SPDX-License-Identifier: Apache-2.0
"""What a method may know of the run that it is part of: equal on all members, fixed when the run is founded.

It must not know methods, peers or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.optim.schedule import build_schedule

if TYPE_CHECKING:
    from isthmus.optim.inner import InnerType
    from isthmus.optim.schedule import Schedule, ScheduleType


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """How long a run is, and how it trains between exchanges.

    A method whose rounds follow from the schedule, whose length follows from the rounds, asks `lr_factor` for several
    lengths.
    """

    num_peers: int
    """Expected, >= 1; they come and go."""
    outer_steps: int
    """Outer steps after which the run is done, >= 1."""
    peak_lr: float
    """The inner optimizer's highest learning rate."""
    inner_type: InnerType | None = None
    """Which inner optimizer it is; None: not known."""
    schedule: ScheduleType = "constant"
    """Type of the inner learning-rate schedule."""
    warmup_steps: int | None = None
    """Of the schedule; None: a twentieth of the run's inner steps, at most 100."""
    min_ratio: float = 0.1
    """Of the schedule: its last factor."""
    decay_steps: int | None = None
    """Of the schedule "wsd"; None: a fifth of the run's inner steps."""

    def warmup(self, total_steps: int) -> int:
        """Inner steps of the warm-up in a run of so many, with the default worked out."""
        return min(100, total_steps // 20) if self.warmup_steps is None else self.warmup_steps

    def decay(self, total_steps: int) -> int | None:
        """Inner steps of the last decay in a run of so many, with the default worked out; None without one."""
        if self.schedule != "wsd":
            return None
        return total_steps // 5 if self.decay_steps is None else self.decay_steps

    def lr_factor(self, total_steps: int) -> Schedule:
        """The inner learning rate after a number of finished inner steps, as a factor on the peak.

        Raises:
            ValueError: if warm-up and decay are longer than the run.
        """
        return build_schedule(
            self.schedule,
            total_steps=total_steps,
            warmup_steps=self.warmup(total_steps),
            min_ratio=1.0 if self.schedule == "constant" else self.min_ratio,
            decay_steps=self.decay(total_steps),
        )
