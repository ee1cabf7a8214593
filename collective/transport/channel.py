# SPDX-License-Identifier: Apache-2.0
"""An awaitable connection for control messages and state transfer: send a frame, receive a frame.

Rules: one receive at a time, and bytes are read only while somebody receives, so the kernel's buffer is the only
queue and back-pressure reaches the sender by itself. However fast the other side sends, everything else here gets its
turns, and of a peer that dialled no more is read than is allowed (reading.py). Sends are serialised. A send that was
cut off by its deadline or a cancellation leaves half a frame on the stream, so it closes the channel; a receive that
was cut off can be repeated. Not for the all-reduce: that is link.py.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

from isthmus.collective.core.address import join_address, split_address
from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import ConnectionLost, DeadlineExceeded, RemoteProtocolError
from isthmus.collective.transport.dialling import open_connection
from isthmus.collective.transport.hello import Hello, Purpose
from isthmus.collective.transport.interfaces import plain_host
from isthmus.collective.transport.reading import BOUNDS, Allowance, Turns
from isthmus.collective.transport.security import DialSecurity
from isthmus.collective.transport.sockets import SocketOptions, lost
from isthmus.collective.transport.tcp_info import TcpInfo, path_mtu, read_tcp_info
from isthmus.collective.transport.wire import (
    HEADER_NBYTES,
    ON_CONTROL,
    ON_DIALLED_CONTROL,
    ON_DOCTOR,
    ON_STATE,
    FrameReader,
    FrameType,
    Header,
    pack,
)

_LIMITS = {Purpose.STATE: ON_STATE, Purpose.CALLED: ON_STATE, Purpose.DOCTOR: ON_DOCTOR}

Into = Callable[[FrameType, int, int], memoryview | None]
"""Given (frame type, chunk, payload_nbytes): where that payload belongs, or None for fresh memory."""


class ChannelFrame(NamedTuple):
    """What `receive` returns. `payload` is the memory that `into` named, or fresh memory."""

    type: FrameType
    payload: memoryview
    chunk: int


class Channel:
    """One CONTROL or STATE connection after its handshake.

    Args:
        sock: it is the channel's from now on.
        hello: see the attributes.
        seen_from: likewise.
        is_dialled: whether this side has dialled.
        allowance: what may be read of the other side; None bounds nothing.

    Attributes:
        hello: the other side's word about itself.
        seen_from: the host that the other side saw us come from; empty where we were dialled.
    """

    def __init__(
        self,
        sock: socket.socket,
        hello: Hello,
        *,
        seen_from: str = "",
        is_dialled: bool = False,
        allowance: Allowance | None = None,
    ) -> None:
        self.hello = hello
        self.seen_from = seen_from
        self.closed = False
        self._is_closed = asyncio.Event()
        self._sock = sock
        self._num_users = 0
        self._sending = asyncio.Lock()
        self._receiving = False
        self._turns = Turns()
        self._allowance = allowance
        self._into: Into | None = None
        limits = _LIMITS.get(hello.purpose, ON_CONTROL)
        if is_dialled and hello.purpose is Purpose.CONTROL:
            limits = ON_DIALLED_CONTROL
        self._reader = FrameReader(limits=limits, place=self._place, read_ahead=False)

    async def send(
        self, frame_type: FrameType, payload: bytes | memoryview, *, chunk: int = 0, timeout_s: float
    ) -> None:
        """Hand one frame to the kernel.

        Raises:
            ConnectionLost: the channel is closed or broke.
            DeadlineExceeded: the other side did not read for so long; the channel is closed.
        """
        header = Header(type=frame_type, payload_nbytes=len(payload), chunk=chunk)
        packed = pack(header, payload)
        loop = asyncio.get_running_loop()
        whole = False
        try:
            async with asyncio.timeout(timeout_s), self._sending:
                await self._turns.give()  # it may read as fast as we send
                with self._in_use():
                    try:
                        if len(payload) <= 64 << 10:
                            await loop.sock_sendall(self._sock, packed + payload)
                        else:
                            await loop.sock_sendall(self._sock, packed)
                            await loop.sock_sendall(self._sock, payload)
                        whole = True
                    finally:
                        if not whole:
                            self.close()
        except TimeoutError as error:
            raise DeadlineExceeded(f"sending {frame_type.name}", timeout_s) from error

    async def receive(self, *, timeout_s: float | None, into: Into | None = None) -> ChannelFrame:
        """Wait for the next frame.

        Args:
            timeout_s: None waits as long as the connection lives; the kernel's keepalive bounds that.
            into: names destinations, so that chunks land in place. Must return exactly `payload_nbytes` bytes.

        Raises:
            ConnectionLost: the channel is closed or broke.
            RemoteProtocolError: the other side sent nonsense; the channel is closed.
            DeadlineExceeded: nothing whole came; call again if you like, with the same destinations.
        """
        if self._receiving:
            raise RuntimeError("somebody is receiving on this channel already")
        loop = asyncio.get_running_loop()
        self._receiving, self._into = True, into
        try:
            if self._allowance is not None:
                await self._allowance.wait()  # it is not silent meanwhile: we do not listen
            async with asyncio.timeout(timeout_s):
                with self._in_use():
                    while True:
                        await self._turns.give()
                        (buffer,) = self._reader.next_buffers()
                        nbytes = await loop.sock_recv_into(self._sock, buffer)
                        if nbytes == 0:
                            self.close()
                            raise self._reader.ended()
                        for frame in self._reader.received(nbytes):
                            if self._allowance is not None:
                                self._allowance.spend(HEADER_NBYTES + len(frame.payload))
                            return ChannelFrame(frame.header.type, frame.payload, frame.header.chunk)
        except TimeoutError as error:
            raise DeadlineExceeded("receiving", timeout_s or 0.0) from error
        except RemoteProtocolError:
            self.close()
            raise
        finally:
            self._receiving, self._into = False, None

    async def wait_closed(self) -> None:
        """Return when somebody here has closed it."""
        await self._is_closed.wait()

    def close(self) -> None:
        """End the connection; whoever waits on it gets ConnectionLost. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._is_closed.set()
        with contextlib.suppress(OSError):  # it may be broken already
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._num_users == 0:
            self._sock.close()

    @property
    def host(self) -> str:
        """Where the other side is, as this side sees it; empty if the connection is gone."""
        return split_address(self.address)[0] if self.address else ""

    @property
    def address(self) -> str:
        """The same with its port."""
        try:
            host, port, *_ = self._sock.getpeername()
        except OSError:
            return ""
        return join_address(plain_host(str(host)), port)

    @property
    def tcp_info(self) -> TcpInfo | None:
        """What the kernel knows about the connection; None where it does not tell."""
        return read_tcp_info(self._sock)

    @property
    def path_mtu(self) -> int | None:
        """See `tcp_info.path_mtu`."""
        return path_mtu(self._sock)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the descriptor open while the loop waits on it: closing it under the loop would wait for ever."""
        if self.closed:
            raise ConnectionLost("closed here")
        self._num_users += 1
        try:
            yield
        except TimeoutError:
            # ETIMEDOUT of the kernel; a passed deadline arrives here as a cancellation.
            self.close()
            raise ConnectionLost("ETIMEDOUT") from None
        except OSError as error:
            self.close()
            raise lost(error) from error
        finally:
            self._num_users -= 1
            if self.closed and self._num_users == 0:
                self._sock.close()

    def _place(self, header: Header) -> memoryview:
        named = self._into(header.type, header.chunk, header.payload_nbytes) if self._into else None
        if named is None:
            return memoryview(bytearray(header.payload_nbytes))
        if named.nbytes != header.payload_nbytes:
            raise RemoteProtocolError("payload has another length than agreed")
        return named.cast("B")


async def connect(
    address: str,
    hello: Hello,
    *,
    timeout_s: float,
    options: SocketOptions | None = None,
    security: DialSecurity | None = None,
    expect: PeerId | None = None,
) -> Channel:
    """Dial, shake hands, return the channel. Its `hello` describes the side that answered.

    Raises:
        PeerUnreachable: nobody there.
        HandshakeRefused: somebody is there and says no; `code` is for the process to end with.
        SecurityRefused: it is somebody else, or one side does not take the other's certificate.
        ConnectionLost, DeadlineExceeded, RemoteProtocolError: the handshake broke off.
    """
    sock, reply, _ = await open_connection(
        address, hello, timeout_s=timeout_s, options=options, security=security, expect=expect
    )
    answered = Hello(
        protocol_version=hello.protocol_version,
        run_id=hello.run_id,
        purpose=hello.purpose,
        peer_id=reply.peer_id,
        incarnation=reply.incarnation,
    )
    # Who has us call it asks as if it had dialled.
    allowance = Allowance(BOUNDS[Purpose.STATE]) if hello.purpose is Purpose.CALLED else None
    return Channel(sock, answered, seen_from=reply.seen_from, is_dialled=True, allowance=allowance)
