# SPDX-License-Identifier: Apache-2.0
"""How much must have come before a link on a long path is woken.

There a chunk comes in dozens of packets, and to wake for each costs more than to take it: tens of microseconds of
Python, whatever it brings. The kernel can wait until there is more (SO_RCVLOWAT). Of 128 MiB over 1 Gbit/s and 50 ms
that saves a tenth of the processor time, and a sixth with TLS.

Rules: never more than what is missing of the frame that is coming, since nothing need follow it; and never more than
comes in `_WAIT_S` at the link's own speed. The end of a connection wakes at once, as ever. What waits in the kernel
counts as heard (`unread_nbytes`), so a path that has become slow is not taken for a silent one.
"""

import contextlib
import socket

from isthmus.collective.transport.sockets import FAR_S
from isthmus.collective.transport.tcp_info import round_trip_s
from isthmus.collective.transport.tls import TlsSocket
from isthmus.collective.transport.wire import FrameReader

_MOST_NBYTES = 128 << 10
_WAIT_S = 0.01
_RECORD_NBYTES = 17 << 10
"""Of TLS. So much may have left the kernel, encrypted, that nobody has seen yet."""


class LowWater:
    """See the module.

    Args:
        sock: what is read.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_far = round_trip_s(sock) > FAR_S
        self._hidden_nbytes = _RECORD_NBYTES if isinstance(sock, TlsSocket) else 0
        self._nbytes = 1

    def await_more(self, reader: FrameReader, chunk_s: float) -> None:
        """Before the loop waits for the socket.

        Args:
            reader: knows what is coming.
            chunk_s: how long a chunk takes from its first byte to its last; 0.0 if that is not known.
        """
        if self._is_far:
            coming_nbytes = 0 if reader.current is None or chunk_s <= 0.0 else reader.current.payload_nbytes
            in_time_nbytes = int(coming_nbytes * _WAIT_S / chunk_s) if coming_nbytes else 0
            self._set(max(1, min(reader.missing_nbytes - self._hidden_nbytes, in_time_nbytes, _MOST_NBYTES)))

    def _set(self, nbytes: int) -> None:
        if nbytes != self._nbytes:
            with contextlib.suppress(OSError):  # some system may not have it
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
                self._nbytes = nbytes
