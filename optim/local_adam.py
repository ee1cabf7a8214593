# SPDX-License-Identifier: Apache-2.0
"""Local Adam: every K inner steps the workers average parameters and both moments.

    every K inner steps:   x <- mean of x;   u <- mean of u;   v <- mean of v

It is DES-LOC with equal periods, at twice the bytes of DES-LOC's recommended ones and three times those of averaging
the parameters alone. State, wire and departures are DES-LOC's (desloc.py).

Source: Local Adam (arXiv:2409.13155); the baseline of DES-LOC (arXiv:2505.22549), there with K = 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.optim.desloc import StateAveraging, checked_states
from isthmus.optim.outer import PARAM
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from collections.abc import Mapping


@register("local_adam")
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAdam(StateAveraging):
    """Local Adam's settings.

    Raises:
        ValueError: if a setting is out of its range.
    """

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """States of the inner optimizer that are averaged, by their own names; those of AdamW and ADOPT."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", checked_states(self.states))
        StateAveraging.__post_init__(self)

    @property
    def periods(self) -> Mapping[str, int]:
        """K of all."""
        return dict.fromkeys((PARAM, *self.states), self.inner_steps)
