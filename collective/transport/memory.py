# SPDX-License-Identifier: Apache-2.0
"""Large buffers. Those of operations are used again: fresh memory costs a page fault for every 4 KiB, as copying does.

Rules: one event loop, no locks. What is given back is kept up to what was out at once; more is freed. What is freed
goes back to the system: malloc keeps large blocks that come and go among small ones.
"""

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

_LARGE_NBYTES = 64 << 10


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type] # numpy's stub lacks the buffer


def fresh_memory(nbytes: int) -> memoryview:
    """Zeros that nobody else uses, and that go back to the system with their last user."""
    return memoryview(mmap.mmap(-1, nbytes) if nbytes >= _LARGE_NBYTES else bytearray(nbytes))


def give_back_to_system() -> None:
    """Let malloc return what is free, also between blocks in use. Milliseconds; without effect where it cannot."""
    with contextlib.suppress(AttributeError, OSError):  # of glibc only
        ctypes.CDLL(None).malloc_trim(0)


class Scratch:
    """Memory of one link for one chunk: as a tensor for codecs and as bytes for sockets. Grows to the longest one."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.bytes = memoryview(b"")

    def room(self, nbytes: int) -> memoryview:
        """Its first bytes. The caller has checked that so many are allowed."""
        if nbytes > len(self.bytes):
            self.bytes = fresh_memory(nbytes)
            self.tensor = torch.frombuffer(self.bytes, dtype=torch.uint8)
        return self.bytes[:nbytes]

    def tensor_of(self, payload: memoryview) -> Tensor:
        """What was placed here, as a uint8 tensor. It may have grown since: then that lies in its former memory."""
        if payload.obj is self.bytes.obj:
            return self.tensor[: len(payload)]
        return torch.frombuffer(payload, dtype=torch.uint8)


_MOST_TIMES_LONGER = 8
"""So much longer a buffer may be than what was asked for: fragments of several lengths take turns."""


class BufferPool:
    """Byte buffers by size."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._nbytes_out = 0
        self._nbytes_kept = 0
        self._most_out = 0

    def take(self, nbytes: int) -> Tensor:
        """A uint8 tensor of this length with any content."""
        fitting = [
            index for index, buffer in enumerate(self._free) if nbytes <= buffer.numel() <= _MOST_TIMES_LONGER * nbytes
        ]
        if fitting:
            whole = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
            self._nbytes_kept -= whole.numel()
        else:
            whole = torch.frombuffer(fresh_memory(max(1, nbytes)), dtype=torch.uint8)
        self._nbytes_out += nbytes
        self._most_out = max(self._most_out, self._nbytes_out)
        return whole[:nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """Nobody uses it any more."""
        whole = buffer if buffer._base is None else buffer._base
        self._nbytes_out -= buffer.nbytes
        self._free.append(whole)
        self._nbytes_kept += whole.numel()
        while self._nbytes_kept > self._most_out:
            self._nbytes_kept -= self._free.pop(0).numel()
