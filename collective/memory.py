"""Large buffers that are used again: fresh memory costs a page fault for every 4 KiB, as much as copying it.

Rules: one event loop, no locks. What is given back is kept up to what was out at once; more is freed.
"""

import torch
from torch import Tensor


class BufferPool:
    """Byte buffers by size."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._nbytes_out = 0
        self._nbytes_kept = 0
        self._most_out = 0

    def take(self, nbytes: int) -> Tensor:
        """A uint8 tensor of this length with any content."""
        fitting = [index for index, buffer in enumerate(self._free) if nbytes <= buffer.numel() <= 2 * nbytes]
        if fitting:
            whole = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
            self._nbytes_kept -= whole.numel()
        else:
            whole = torch.empty(nbytes, dtype=torch.uint8)
        self._nbytes_out += whole.numel()
        self._most_out = max(self._most_out, self._nbytes_out)
        return whole[:nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """Nobody uses it any more."""
        whole = buffer if buffer._base is None else buffer._base
        self._nbytes_out -= whole.numel()
        self._free.append(whole)
        self._nbytes_kept += whole.numel()
        while self._nbytes_kept > self._most_out:
            self._nbytes_kept -= self._free.pop(0).numel()
