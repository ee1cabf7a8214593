# SPDX-License-Identifier: Apache-2.0
"""Numbers and times of a step, read when the device has them: the host never waits for what it does not need yet.

On the CPU everything is there at once. On CUDA numbers are copied into pinned memory behind the kernels that make
them, and times are taken by events on the stream. Must not know what is measured.
"""

import itertools
import time

import torch
from torch import Tensor


class Readout:
    """Numbers on their way to the host.

    Args:
        numbers: one dimension, on any device; not written afterwards.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class Watch:
    """Marks on the way through a step, and the seconds between them.

    Args:
        device: what computes. On CUDA the seconds are the device's: the host may be far ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Here one part ends and the next begins."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    @property
    def is_passed(self) -> bool:
        """Whether the device has come to the last mark."""
        return not self._is_cuda or bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def seconds(self) -> list[float]:
        """Of each part between two marks; waits for the device to come to the last one."""
        if self._is_cuda:
            self._events[-1].synchronize()
            return [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(self._events)]
        return [other - one for one, other in itertools.pairwise(self._marks)]
