# SPDX-License-Identifier: Apache-2.0
"""A connection between two processes of one machine: its bytes lie in memory that both have mapped, pipes ring.

Half of the processor time of an exchange over loopback is the kernel's. Here a byte is copied once in and once out,
while it is in the cache. It can be used wherever a plain non-blocking socket can: by a link.

How: a sender fills slots that are free, latest used first: those are in the cache, and the others need never become
memory. A bell is 8 bytes through a pipe, which costs half of what it costs over TCP: a slot, and how many bytes lie in
it, or that it is free again. So nothing depends on the order of memory accesses. TCP is silent from the hello on: it
says when the other side is gone.

Three things differ from a plain socket:

* `pending()` bytes have their bell behind them, so epoll does not wake anybody for them, as with TlsSocket.
* Nor does it for room: what makes room is a bell, which makes the socket readable. Whoever waits to write tries again
  after each read.
* It is readable when any of `descriptors` is.

Rules: the memory is shared_memory.py's, and trusted as far as it says. Bells that cannot be are a RemoteProtocolError.
"""

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from isthmus.collective.errors import RemoteProtocolError
from isthmus.collective.transport.copying import copy_bytes, copy_past_cache
from isthmus.collective.transport.shared_memory import NUM_SLOTS, SLOT_NBYTES, SharedMemory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_BELL = struct.Struct("!II")  # slot; bytes in it, 0 if it is free again
_HEARD_NBYTES = 4 * NUM_SLOTS * _BELL.size  # bells taken from the kernel at once


class SharedSocket(socket.socket):
    """See the module.

    Args:
        sock: plain, non-blocking, its handshake done; its descriptor moves here and `sock` is closed then.
        memory: of both sides; closed with the socket.
        is_dialler: which of the slots are ours to fill.
    """

    def __init__(self, sock: socket.socket, memory: SharedMemory, *, is_dialler: bool) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)
        self._memory = memory
        self._ours, self._theirs = memory.sides if is_dialler else memory.sides[::-1]
        self._free = list(reversed(range(NUM_SLOTS)))  # of ours; the last is taken next
        self._filled: dict[int, int] = {}  # of ours, and with how many bytes
        self._arrived: deque[tuple[int, memoryview]] = deque()  # of theirs, and what was not read yet
        self._num_pending = 0
        self._written = (-1, 0)  # slot and offset, see room_to_send
        self._end: OSError | None = None  # of the stream; errno 0 is an orderly one

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when there is something to read, or room, or the end."""
        return self.fileno(), self._memory.hears

    def pending(self) -> int:
        """Bytes that have come and were not asked for yet."""
        return self._num_pending

    def has_room(self) -> bool:
        """Whether anything can be sent now."""
        return bool(self._free) and self._end is None

    def room_to_send(self, offset: int, nbytes: int) -> memoryview | None:
        """Memory that `sendmsg` need not copy, if so many bytes go before it. None if they do not all fit in a slot."""
        if not self._free or offset + nbytes > SLOT_NBYTES:
            return None
        self._written = self._free[-1], offset
        return self._ours[self._free[-1]][offset : offset + nbytes]

    def untaken(self) -> int:
        """Bytes that were sent and that the other side has not said to have taken."""
        return sum(self._filled.values())

    def close(self) -> None:
        """Close the connection and unmap its memory."""
        super().close()
        self._arrived.clear()
        self._ours = self._theirs = []
        self._memory.close()

    # -------------------------------------------------------------------------------- reading

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        """As of a plain socket."""
        view = memoryview(buffer).cast("B")
        return self.recvmsg_into([view[:nbytes] if nbytes else view], 0, flags)[0]

    def recvmsg_into(
        self, buffers: Iterable["WriteableBuffer"], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[Any], int, Any]:
        """As of a plain socket: (number of bytes, nothing, 0, None). At most a slot at once, so that it stays warm."""
        _refuse_extras(ancbufsize, flags)
        rest = self.front()
        got = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            nbytes = min(len(view), len(rest) - got)
            copy_bytes(rest[got : got + nbytes], view[:nbytes])
            got += nbytes
        if got:
            self.skip(got)
        return got, [], 0, None

    def front(self) -> memoryview:
        """The next bytes where they lie; none at the end. `skip` what is used before anything else is read.

        Raises:
            BlockingIOError: none have come.
            OSError: the connection broke.
        """
        if self._end is None and not (self._arrived and self._free):
            self._hear()
        if self._arrived:
            return self._arrived[0][1]
        if self._end is None:
            raise BlockingIOError(errno.EAGAIN, "no bell has rung")
        if self._end.errno:
            raise self._end
        return memoryview(b"")

    def skip(self, nbytes: int) -> None:
        """So many bytes of `front` were read."""
        slot, rest = self._arrived[0]
        self._num_pending -= nbytes
        if len(rest) > nbytes:
            self._arrived[0] = slot, rest[nbytes:]
        else:
            self._give_back()

    def _give_back(self) -> None:
        """The slot that came first is read."""
        slot, _ = self._arrived.popleft()
        if self._end is None:
            self._ring(slot, 0)

    def _hear(self) -> None:
        """Take the bells that have come. What was sent before the end is read before it."""
        if self._take_bells() or self._end is not None:
            return
        try:
            beside = super().recv(1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            end = error.with_traceback(None)
        else:
            if beside:
                raise RemoteProtocolError("shared memory: bytes came beside it")
            end = OSError(0, "")
        self._take_bells()  # those that were rung before it
        self._end = self._end or end

    def _take_bells(self) -> bool:
        """Whether any came. A pipe brings them whole, as they were written."""
        try:
            heard = os.read(self._memory.hears, _HEARD_NBYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end = error.with_traceback(None)
            return False
        if not heard:
            self._end = OSError(0, "")
            return False
        if len(heard) % _BELL.size:
            raise RemoteProtocolError("shared memory: part of a bell")
        for slot, count in _BELL.iter_unpack(heard):
            self._on_bell(slot, count)
        return True

    def _on_bell(self, slot: int, count: int) -> None:
        if slot >= NUM_SLOTS or count > SLOT_NBYTES:
            raise RemoteProtocolError("shared memory: no such slot")
        if count == 0:
            if self._filled.pop(slot, None) is None:
                raise RemoteProtocolError("shared memory: a slot is free that was not filled")
            self._free.append(slot)
        else:
            if any(slot == other for other, _ in self._arrived):
                raise RemoteProtocolError("shared memory: a slot is filled that was not free")
            self._arrived.append((slot, self._theirs[slot][:count]))
            self._num_pending += count

    # -------------------------------------------------------------------------------- writing

    def send(self, data: "ReadableBuffer", flags: int = 0, /) -> int:
        """As of a plain socket."""
        return self.sendmsg((data,), (), flags)

    def sendmsg(
        self,
        buffers: Iterable["ReadableBuffer"],
        ancdata: Iterable[Any] = (),
        flags: int = 0,
        address: Any = None,  # noqa: ANN401 - the base class has it
        /,
    ) -> int:
        """As of a plain socket: as many bytes as there is room for."""
        _refuse_extras(ancdata, flags, address)
        self._check_open()
        if not self._free:
            raise BlockingIOError(errno.EAGAIN, "no slot is free")
        sent = used = 0
        slot = self._ours[self._free[-1]]
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if view.obj is slot.obj:
                assert self._written == (self._free[-1], used), "it was not written where it is sent from"
                used += len(view)
                continue
            while (nbytes := min(len(view), SLOT_NBYTES - used)) > 0:
                copy_past_cache(view[:nbytes], slot[used : used + nbytes])
                view = view[nbytes:]
                used += nbytes
                if used == SLOT_NBYTES:
                    self._hand_over(used)
                    sent += used
                    if not self._free:
                        return sent
                    slot, used = self._ours[self._free[-1]], 0
        if used:
            self._hand_over(used)
        return sent + used

    def _hand_over(self, nbytes: int) -> None:
        slot = self._free.pop()
        self._filled[slot] = nbytes
        self._ring(slot, nbytes)
        self._check_open()

    def _ring(self, slot: int, nbytes: int) -> None:
        """Whoever cannot be told is gone, and what it had sent by then is read before that shows."""
        try:
            os.write(self._memory.rings, _BELL.pack(slot, nbytes))  # whole or not at all, as it is so short
        except BlockingIOError:  # far more bells lie there than it has slots: it does not listen
            self._end = ConnectionResetError(errno.ECONNRESET, "nobody hears the bell")
        except OSError as error:
            self._take_bells()
            self._end = error.with_traceback(None)

    def _check_open(self) -> None:
        """Nothing is sent after the end. A link that hears of it closes, so not before all is read."""
        if self._arrived and self._end is not None:
            raise BlockingIOError(errno.EAGAIN, "the end, and what came before it is not read")
        if self._end is not None:
            raise self._end if self._end.errno else BrokenPipeError(errno.EPIPE, "the other side has closed")


def _refuse_extras(*extras: object) -> None:
    if any(extras):
        raise ValueError("shared memory has no flags, ancillary data or addresses")
