# SPDX-License-Identifier: Apache-2.0
"""A link whose bytes go through shared memory: what it does otherwise than one over a plain socket.

A frame that lies whole in one slot is used there, or copied straight to where it belongs. All other reading is that of
any link: under a cap, or of chunks that are longer than a slot.
"""

import errno
import socket
from typing import Any

from torch import Tensor

from isthmus.collective.transport.copying import copy_bytes
from isthmus.collective.transport.link import Link
from isthmus.collective.transport.memory import Scratch
from isthmus.collective.transport.shared_socket import SharedSocket
from isthmus.collective.transport.wire import HEADER_NBYTES, Frame, Limits, whole_frame


class _SlotScratch(Scratch):
    """A chunk is encoded where it is sent from, if it fits there.

    Args:
        sock: has the slots.
        offset: bytes that go before the chunk.
        spare: for chunks that do not fit.
    """

    def __init__(self, sock: SharedSocket, offset: int, spare: Scratch) -> None:
        self._sock = sock
        self._offset = offset
        self._spare = spare

    def room(self, nbytes: int) -> memoryview:
        """See Scratch."""
        return self._sock.room_to_send(self._offset, nbytes) or self._spare.room(nbytes)

    def tensor_of(self, payload: memoryview) -> Tensor:
        """See Scratch."""
        return self._spare.tensor_of(payload)


def link_over(sock: socket.socket, **more: Any) -> Link:  # noqa: ANN401
    """The link for this kind of socket. Arguments as Link."""
    return SharedLink(sock, **more) if isinstance(sock, SharedSocket) else Link(sock, **more)


class SharedLink(Link):
    """See the module, and Link for the arguments."""

    def __init__(self, sock: SharedSocket, *, limits: Limits, **more: Any) -> None:  # noqa: ANN401
        self._shared = sock
        self._limits = limits
        super().__init__(sock, limits=limits, **more)

    def bytes_delivered(self) -> int:
        """Bytes that the other side has taken."""
        return self.bytes_sent - self._shared.untaken()

    def host_silent_s(self) -> float:
        """Its host is ours."""
        return 0.0

    # -------------------------------------------------------------------------------- reading

    def _on_readable(self) -> None:
        super()._on_readable()
        if self._is_writer_set and not self.closed and self._on_writable not in self._timers:
            self._on_writable()  # what came may have been news of room

    def _read_once(self) -> bool:
        if self._read_in_place():
            return not self.closed and self._shared.pending() > 0
        return super()._read_once()

    def _read_in_place(self) -> bool:
        """Whether a frame lay there whole, and was handed on."""
        if self._reader.in_frame or self._caps.download is not None:
            return False
        frame = whole_frame(self._shared.front(), self._limits)
        if frame is None:
            return False
        header, payload = frame.header, frame.payload
        nbytes = HEADER_NBYTES + len(payload)
        self.bytes_received += nbytes
        sink = None
        if payload:
            destination, sink = self._owner.place(self, header)
            if destination.obj is not self.staging.bytes.obj:
                copy_bytes(payload, destination)
                frame = Frame(header, destination)
        if sink is not None:
            sink.take(self, frame)
        else:
            self._owner.on_frame(self, frame)
        if not self.closed:
            self._shared.skip(nbytes)
        return True

    def _has_pending(self) -> bool:
        return self._shared.pending() > 0

    def _read_when_readable(self) -> None:
        for descriptor in self._shared.descriptors:
            self._loop.add_reader(descriptor, self._on_readable)

    def _stop_reading(self) -> None:
        for descriptor in self._shared.descriptors:
            self._loop.remove_reader(descriptor)

    # -------------------------------------------------------------------------------- writing

    def _untaken_nbytes(self) -> int:
        return self._shared.untaken()

    def _take_next(self) -> bool:
        if not self._shared.has_room():
            raise BlockingIOError(errno.EAGAIN, "no slot is free")  # what is encoded now would have to be copied later
        return super()._take_next()

    def _room_to_encode(self) -> Scratch:
        if self._caps.upload is not None:  # a frame may go in pieces
            return self._encoding
        return _SlotScratch(self._shared, self._unsent_nbytes + HEADER_NBYTES, self._encoding)

    def _want_writable(self, wanted: bool) -> None:
        self._is_writer_set = wanted
        if wanted and not self.closed and self._shared.has_room():  # the turn is over, not the room
            self._timers[self._on_writable] = self._loop.call_soon(self._on_writable)
