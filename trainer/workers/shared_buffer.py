# SPDX-License-Identifier: Apache-2.0
"""Memory that the daemon and its workers have in common: the mailbox of parameters, anchors, and the text.

Owns anonymous files: they have no name, are inherited as file descriptors and are gone when the last process that
holds them is gone, however it went. Rules: nobody reads what somebody may be writing; who may is said by the messages
of `trainer.workers.ipc`, never here. Must not know what the numbers mean.
"""

import fcntl
import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import torch
from torch import Tensor

from isthmus.trainer.errors import EnvironmentFault

if TYPE_CHECKING:
    from isthmus.trainer.data.corpus import TokenArray

MAILBOX: Final = 0
"""Place of the mailbox in a shared buffer."""
NUM_PLACES: Final = 3
"""The mailbox, then an anchor that is live, and one that is being made."""

_FLOAT_NBYTES = 4


class SharedBuffer:
    """Flat fp32 CPU tensors whose memory other processes map too, one at each place. What nobody writes costs nothing.

    Attributes:
        places: `NUM_PLACES` of [numel], zeros in a new buffer. They stay valid for as long as somebody refers to one of
            them or to a view of it.
        fd: to be inherited by other processes; this object's own.
    """

    def __init__(self, fd: int, numel: int) -> None:
        """Map a buffer by the descriptor that was inherited or created; the descriptor becomes this object's own.

        Raises:
            ValueError: the file is smaller than numel elements, or numel is below 1.
        """
        if numel < 1:
            raise ValueError(f"a shared buffer needs at least one element, not {numel}")
        self.fd = fd
        # mmap refuses a length beyond the end of the file by itself (ValueError).
        memory = torch.frombuffer(mmap.mmap(fd, NUM_PLACES * _apart(numel)), dtype=torch.float32)
        starts = range(0, memory.numel(), _apart(numel) // _FLOAT_NBYTES)
        self.places: tuple[Tensor, ...] = tuple(memory[start : start + numel] for start in starts)
        self._is_pinning = False
        self._pinned: list[Tensor] = []

    @classmethod
    def create(cls, numel: int) -> Self:
        """A new buffer of zeros.

        Raises:
            EnvironmentFault: it is larger than this machine's memory.
        """
        nbytes = _apart(numel)
        return cls(_anonymous_file("isthmus-mailbox", NUM_PLACES * nbytes, used_nbytes=nbytes), numel)

    @property
    def tensor(self) -> Tensor:
        """[numel], the mailbox."""
        return self.places[MAILBOX]

    @property
    def anchors(self) -> tuple[Tensor, ...]:
        """[numel] each: places for anchors that workers read where they lie."""
        return self.places[MAILBOX + 1 :]

    def pin(self) -> None:
        """Lock the pages for CUDA, of the mailbox now and of others as they are asked for.

        So copies from and to a device run at full speed and do not block.

        Raises:
            EnvironmentFault: the driver refuses.
        """
        self._is_pinning = True
        self.at(MAILBOX)

    def at(self, place: int) -> Tensor:
        """[numel], what is at a place, for a copy to or from a device.

        Raises:
            EnvironmentFault: see `pin`.
        """
        tensor = self.places[place]
        if self._is_pinning and not any(tensor is pinned for pinned in self._pinned):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            if int(status) != 0:
                raise EnvironmentFault(
                    f"CUDA cannot lock {tensor.nbytes} bytes of memory (error {int(status)})",
                    cure="raise the limit of locked memory (ulimit -l)",
                )
            self._pinned.append(tensor)
        return tensor

    def close(self) -> None:
        """Give up the descriptor and this object's reference to the memory; idempotent.

        The mapping itself goes with the last tensor that shows it: to unmap it under a tensor would be a crash.
        """
        if self.fd < 0:
            return
        for tensor in self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(tensor.data_ptr())
        self._pinned.clear()
        os.close(self.fd)
        self.fd = -1
        self.places = (torch.empty(0),) * NUM_PLACES


class SharedTokens:
    """A text, as tokens, that other processes can map.

    A text that is a map of a file is shared by that file; one that lives in memory is copied once.

    Attributes:
        fd: to be inherited; this object's own.
        offset: bytes in front of the first token.
        numel: number of tokens.
    """

    def __init__(self, fd: int, offset: int, numel: int) -> None:
        self.fd = fd
        self.offset = offset
        self.numel = numel

    @classmethod
    def share(cls, tokens: "TokenArray") -> Self:
        """Make tokens, uint8 [n], available.

        Raises:
            EnvironmentFault: the copy is larger than this machine's memory.
            OSError: the mapped file is gone.
        """
        root = tokens
        while isinstance(root, np.memmap) and isinstance(root.base, np.memmap):
            root = root.base
        if isinstance(root, np.memmap) and root.filename is not None and tokens.flags.c_contiguous:
            # numpy copies `offset` to every slice of a map, so a slice's place follows from its address only.
            offset = root.offset + tokens.ctypes.data - root.ctypes.data
            return cls(os.open(root.filename, os.O_RDONLY | os.O_CLOEXEC), offset, len(tokens))
        fd = _anonymous_file("isthmus-tokens", max(1, tokens.nbytes))
        with mmap.mmap(fd, max(1, tokens.nbytes)) as memory:
            memory[: tokens.nbytes] = tokens.tobytes()
        return cls(fd, 0, len(tokens))

    def tokens(self) -> "TokenArray":
        """The tokens, uint8 [numel], read-only: a map, not a copy."""
        if self.numel == 0:
            return np.empty(0, dtype=np.uint8)
        with os.fdopen(os.dup(self.fd), "rb") as file:
            return np.memmap(file, dtype=np.uint8, mode="r", offset=self.offset, shape=(self.numel,))

    def close(self) -> None:
        """Give up the descriptor; idempotent. Maps made by `tokens` stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _apart(numel: int) -> int:
    """Bytes from one place to the next: whole pages, which CUDA locks one place at a time."""
    return -(-numel * _FLOAT_NBYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _anonymous_file(name: str, nbytes: int, *, used_nbytes: int | None = None) -> int:
    """Descriptor of a file without a name, of that size, zeros, not inherited unless asked for.

    Args:
        name: for whoever lists open files.
        nbytes: its length.
        used_nbytes: how much of it will be written in any case; None: all.

    Raises:
        EnvironmentFault: it is larger than this machine's memory.
    """
    # Pages come at their first touch and the system promises more than it has; asking it to reserve them all would
    # be answered by the out-of-memory killer, not by an error. So this only refuses what can never be.
    used_nbytes = nbytes if used_nbytes is None else used_nbytes
    if used_nbytes > (total_nbytes := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise EnvironmentFault(
            f"{used_nbytes} bytes of shared memory are wanted, and this machine has {total_nbytes} in all",
            cure="train a smaller model",
        )
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile(prefix=name) as file:
            os.ftruncate(file.fileno(), nbytes)
            return os.dup(file.fileno())
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    # A file that shrank would kill whoever reads past its end.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd
