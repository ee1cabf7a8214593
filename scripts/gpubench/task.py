# SPDX-License-Identifier: Apache-2.0
"""What a part is told, and how it takes the time. Needs nothing but torch."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]
"""JSON. `ok` is false if something is wrong."""

GIGA = 1e9
_WARM_UP_CALLS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One part, on one device."""

    part: str
    device_type: str
    preset: str
    limit_s: float
    """When it is killed. What is measured for a time takes a share of this."""
    told: Path
    """Where its figures go."""

    def for_s(self, share: float) -> float:
        """A share of its time, in which one figure is measured; next to nothing on a CPU."""
        return share * self.limit_s if self.is_cuda else 0.05

    def keep(self, figures: Figures) -> None:
        """Write what is known so far, in case that this part does not come to its end."""
        self.told.write_text(json.dumps(figures))

    @property
    def device(self) -> torch.device:
        """With its number, as a tensor there says it."""
        return torch.empty(0, device=self.device_type).device

    @property
    def is_cuda(self) -> bool:
        """Else it is the CPU, where the same code is run and no figure means anything."""
        return self.device_type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, *, for_s: float = 0.5, most: int = 200) -> float:
    """Median of single calls, each to its end on the device.

    Args:
        call: what is timed.
        device: on which it works.
        for_s: for how long calls are made, after a few that do not count; three calls at least.
        most: how many calls there are at most.
    """
    for _ in range(_WARM_UP_CALLS):
        call()
    synchronize(device)
    seconds: list[float] = []
    ends_at = time.perf_counter() + for_s
    while len(seconds) < 3 or (time.perf_counter() < ends_at and len(seconds) < most):
        began = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def gigabytes_per_s(nbytes: int, seconds: float) -> float:
    """Rounded for people."""
    return round(nbytes / seconds / GIGA, 2)
