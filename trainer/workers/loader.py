# SPDX-License-Identifier: Apache-2.0
"""Batches of text, made ready by a thread while the device computes; and who takes which samples of a step.

Rules: what is made ready is bounded by one step's samples; a batch that nobody has asked for beforehand is made when it
is taken. Must not know models, nor how long a step takes.
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from isthmus.trainer.data.samples import SampleSource

Indices = tuple[int, ...]


def shares(num_samples: int, num_workers: int) -> list[range]:
    """Who takes which positions of a batch: contiguous, the first ones at most one sample larger."""
    base, extra = divmod(num_samples, num_workers)
    starts = [rank * base + min(rank, extra) for rank in range(num_workers + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def micro_batches(indices: Sequence[int], *, rank: int, num_workers: int, size: int) -> list[Indices]:
    """What one worker computes of a step, in turn: as many micro-batches on every worker, the last ones maybe empty.

    Args:
        indices: the peer's whole batch.
        rank: which worker.
        num_workers: of the peer.
        size: samples of a micro-batch, at most.
    """
    parts = shares(len(indices), num_workers)
    own = [indices[at] for at in parts[rank]]
    return [tuple(own[start : start + size]) for start in range(0, len(parts[0]), size)]


class Loader:
    """Batches on the device, by the indices of their samples.

    Args:
        source: of the samples; used by a thread.
        device: where they are wanted. For CUDA they are made in pinned memory, so that their copy does not wait.
    """

    def __init__(self, source: SampleSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._coming: dict[Indices, Future[tuple[Tensor, Tensor]]] = {}

    def prefetch(self, batches: Sequence[Indices]) -> None:
        """Make these ready, in turn; what was asked for before and not taken is forgotten."""
        for future in self._coming.values():
            future.cancel()
        self._coming = {batch: self._thread.submit(self._make, batch) for batch in batches}

    def take(self, batch: Indices) -> tuple[Tensor, Tensor]:
        """(inputs_BL, targets_BL), int64 on the device.

        Raises:
            IndexError: there are no such samples.
        """
        coming = self._coming.pop(batch, None)
        inputs_BL, targets_BL = self._make(batch) if coming is None else coming.result()
        return inputs_BL.to(self._device, non_blocking=True), targets_BL.to(self._device, non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, batch: Indices) -> tuple[Tensor, Tensor]:
        inputs_BL, targets_BL = self._source.batch(batch)
        if self._device.type == "cuda":
            return inputs_BL.pin_memory(), targets_BL.pin_memory()
        return inputs_BL, targets_BL
