# SPDX-License-Identifier: Apache-2.0
"""Memory that two processes of one machine share for one connection: how it is offered, found and taken.

One anonymous file with slots for either direction, and a pipe each way. The dialler of a plain connection to loopback
makes them and names them in its hello; the acceptor opens them as /proc/PID/fd/N and says whether it could. It can only
if both are of one user and see the same processes; if not, the connection is a plain one.

Rules: sizes are fixed here and follow no number that a peer sends. The file cannot shrink, or touching it could end us;
an acceptor looks whether that is sealed. What lies in a slot could change after it was checked, but only through a
process of our own user, which could as well write into our memory. It must not know what slots and pipes are used for.
"""

import contextlib
import mmap
import os
import secrets
import stat
from typing import Annotated

import msgspec
from msgspec import Meta

NUM_SLOTS = 3
"""Of one direction: one is filled, one waits, one is read. With 8 it is no faster, and four peers need 50 MiB."""
SLOT_NBYTES = (2 << 20) + (64 << 10)
"""The longest chunk that is usual, its header, and some notices before it: then it lies in one piece."""
_FILE_NBYTES = 2 * NUM_SLOTS * SLOT_NBYTES

_Descriptor = Annotated[int, Meta(ge=0, le=2**31)]
_PipeName = Annotated[str, Meta(pattern=r"^pipe:\[[0-9]{1,20}\]\Z")]


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the dialler's file and pipes are found: process, descriptors, and the names that they must have there."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    file: tuple[_Descriptor, Annotated[str, Meta(pattern=r"^/memfd:isthmus-[0-9a-f]{32} \(deleted\)\Z")]]
    hears: tuple[_Descriptor, _PipeName]
    """What the acceptor reads."""
    rings: tuple[_Descriptor, _PipeName]
    """What it writes."""


class SharedMemory:
    """The file of one connection, mapped, and our ends of its two pipes.

    Args:
        file: descriptor of the file, `_FILE_NBYTES` long. It may be closed afterwards.
        hears: descriptor that is read, non-blocking; closed by `close`.
        rings: likewise, that is written.
    """

    def __init__(self, file: int, hears: int, rings: int) -> None:
        whole = memoryview(mmap.mmap(file, _FILE_NBYTES))
        slots = [whole[at : at + SLOT_NBYTES] for at in range(0, _FILE_NBYTES, SLOT_NBYTES)]
        self.sides = (slots[:NUM_SLOTS], slots[NUM_SLOTS:])
        """Slots that the dialler fills, and those that the acceptor does."""
        self.hears, self.rings = hears, rings

    def close(self) -> None:
        """Unmap it, as soon as nobody looks at it any more, and close the pipes. Idempotent."""
        self.sides = ([], [])
        for pipe in (self.hears, self.rings):
            if pipe >= 0:
                os.close(pipe)
        self.hears = self.rings = -1


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """The end that hears and the one that rings, closed by `stack`."""
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for end in ends:
        stack.callback(os.close, end)
    return ends


class Offering:
    """The dialler's half: a new file and two pipes, and their offer. `close` closes what is the acceptor's."""

    def __init__(self) -> None:
        import fcntl

        with contextlib.ExitStack() as stack:
            file = os.memfd_create(f"isthmus-{secrets.token_hex(16)}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, file)
            os.ftruncate(file, _FILE_NBYTES)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            hears, they_ring = _pipe(stack)
            they_hear, rings = _pipe(stack)
            self._lent = (file, they_hear, they_ring)
            names = [(end, os.readlink(f"/proc/self/fd/{end}")) for end in self._lent]
            self.offer = Offer(pid=os.getpid(), file=names[0], hears=names[1], rings=names[2])
            self.memory = SharedMemory(file, hears, rings)
            stack.pop_all()

    def close(self) -> None:
        """The other side has it, or never will."""
        for descriptor in self._lent:
            os.close(descriptor)


def make_offering() -> Offering | None:
    """Something to offer; None where this system has no such files, or has no room for one more."""
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        return Offering()
    return None


def take_offer(offer: Offer) -> SharedMemory | None:
    """The acceptor's half: the file, mapped, and the pipes. None if it cannot be reached, or is not what is said."""
    with contextlib.suppress(OSError, ImportError, ValueError), contextlib.ExitStack() as stack:
        import fcntl

        file, hears, rings = (
            _open(offer.pid, *end, flags, stack)
            for end, flags in ((offer.file, os.O_RDWR), (offer.hears, os.O_RDONLY), (offer.rings, os.O_WRONLY))
        )
        cannot_shrink = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        status = os.fstat(file)
        is_ours = status.st_uid == os.geteuid()  # see the rules
        are_pipes = all(stat.S_ISFIFO(os.fstat(end).st_mode) for end in (hears, rings))
        if cannot_shrink and status.st_size == _FILE_NBYTES and is_ours and are_pipes:
            memory = SharedMemory(file, hears, rings)
            stack.pop_all()
            os.close(file)
            return memory
    return None


def _open(pid: int, descriptor: int, name: str, flags: int, stack: contextlib.ExitStack) -> int:
    """What another process has under this descriptor, if it is called so: to open anything else might have effects."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if os.readlink(path) != name:
        raise ValueError(path)
    opened = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    stack.callback(os.close, opened)
    return opened
