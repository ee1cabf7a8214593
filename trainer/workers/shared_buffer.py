# SPDX-License-Identifier: Apache-2.0
"""Memory that the daemon and its workers have in common: the mailbox of parameters, and the text.

Owns anonymous files: they have no name, are inherited as file descriptors and are gone when the last process that
holds them is gone, however it went. Rules: nobody reads what somebody may be writing; who may is said by the messages
of `trainer.workers.ipc`, never here. Must not know what the numbers mean.
"""

import fcntl
import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from isthmus.trainer.errors import EnvironmentFault

if TYPE_CHECKING:
    from isthmus.trainer.data.corpus import TokenArray

_FLOAT_NBYTES = 4


class SharedBuffer:
    """A flat fp32 CPU tensor whose memory other processes map too.

    Attributes:
        tensor: [numel], zeros in a new buffer. It stays valid for as long as somebody refers to it or to a view of it.
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
        self.tensor = torch.frombuffer(mmap.mmap(fd, numel * _FLOAT_NBYTES), dtype=torch.float32)
        self._is_pinned = False

    @classmethod
    def create(cls, numel: int) -> Self:
        """A new buffer of zeros.

        Raises:
            EnvironmentFault: it is larger than this machine's memory.
        """
        return cls(_anonymous_file("isthmus-mailbox", numel * _FLOAT_NBYTES), numel)

    def pin(self) -> None:
        """Lock the pages for CUDA, so that copies from and to a device run at full speed and do not block.

        Raises:
            EnvironmentFault: the driver refuses.
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, 0)
        if int(status) != 0:
            raise EnvironmentFault(
                f"CUDA cannot lock {self.tensor.nbytes} bytes of memory (error {int(status)})",
                cure="raise the limit of locked memory (ulimit -l)",
            )
        self._is_pinned = True

    def close(self) -> None:
        """Give up the descriptor and this object's reference to the memory; idempotent.

        The mapping itself goes with the last tensor that shows it: to unmap it under a tensor would be a crash.
        """
        if self.fd < 0:
            return
        if self._is_pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.tensor.data_ptr())
        os.close(self.fd)
        self.fd = -1
        self.tensor = torch.empty(0)


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


def _anonymous_file(name: str, nbytes: int) -> int:
    """Descriptor of a file without a name, of that size, zeros, not inherited unless asked for.

    Raises:
        EnvironmentFault: it is larger than this machine's memory.
    """
    # Pages come at their first touch and the system promises more than it has; asking it to reserve them all would
    # be answered by the out-of-memory killer, not by an error. So this only refuses what can never be.
    if nbytes > (total_nbytes := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise EnvironmentFault(
            f"{nbytes} bytes of shared memory are wanted, and this machine has {total_nbytes} in all",
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
