# SPDX-License-Identifier: Apache-2.0
"""Opening TCP sockets with the options that notice a dead peer and keep a link full.

Rules: every socket is non-blocking, sends at once (TCP_NODELAY) and breaks within seconds when the other host is
gone: keepalive 2/1/4 for an idle receiver, TCP_USER_TIMEOUT for a blocked sender. Every socket begins with cubic,
before connect and listen, and changes to bbr at most once: a socket that once ran bbr keeps its pacing. Options that
this system does not have are left out.
"""

import asyncio
import contextlib
import errno
import socket
import struct
import sys
from dataclasses import dataclass

from isthmus.collective.core.address import EVERY_INTERFACE, split_address
from isthmus.collective.errors import AddressInUse, ConnectionLost, PeerUnreachable, StreamBroken
from isthmus.collective.transport.tcp_info import round_trip_s

FAR_S = 0.002
"""A round trip from which on a path counts as long."""
_STREAMS_BBR = 8
_STREAMS_OTHERS = 48
_FAR_UNSENT_NBYTES = 256 << 10
_MOST_UNSENT_NBYTES = 1 << 20
_PATIENCE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 6000}
"""Silence is asked about after 2 s, 4 times; unacknowledged bytes break the connection after 6 s (in ms)."""
_RESERVE_S = 0.03
"""What a paced stream has in the kernel to go on with while other streams, or other programs, keep us busy."""
_SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it
_NO_PACE = 2**64 - 1
_NEAR_BUFFER_NBYTES = 2 << 20
"""The longest chunk: with less, two near peers wait for each other's reads, which costs 10 % on loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """How sockets are set up on this machine. Local: peers may differ."""

    congestion_control: str | None = None
    """Name for TCP_CONGESTION; None = cubic, and bbr (where there is one) once the path is found to be long."""
    buffer_nbytes: int | None = None
    """Send and receive buffer; None = 2 MiB for a near peer, and tuned by the kernel for a far one."""
    shares_memory: bool = True
    """Bulk bytes between processes of one machine go through memory of both, where a connection is not encrypted."""


class EncryptionFailed(OSError):
    """What an encrypted socket raises where a plain one raises OSError: its stream cannot be read any more.

    Attributes:
        reason: a few words of the TLS library's fixed list.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPROTO, reason)
        self.reason = reason


def lost(error: OSError) -> ConnectionLost:
    """What an operating system error on a connected socket means."""
    if isinstance(error, EncryptionFailed):
        return StreamBroken(error.reason)
    return ConnectionLost(errno.errorcode.get(error.errno or 0, type(error).__name__))


def tune(sock: socket.socket, options: SocketOptions) -> None:
    """Set what must be set before connecting or listening."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PATIENCE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _set_buffers(sock, options.buffer_nbytes)
    _set_congestion_control(sock, options.congestion_control or "cubic")


def fit_to_path(sock: socket.socket, options: SocketOptions) -> None:
    """Settle what depends on how far away the other side is, once the handshake has measured that.

    Near: buffers that stay in the cache. Far: bbr where there is one, since cubic needs dozens of streams to fill a
    path that loses packets, and a short queue in the kernel, so that whichever stream is quick takes the next chunk.
    """
    is_far = round_trip_s(sock) > FAR_S
    with contextlib.suppress(OSError):  # the connection may be broken already
        if is_far:
            if options.congestion_control is None:
                _set_congestion_control(sock, "bbr")
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _FAR_UNSENT_NBYTES)
        else:
            _set_buffers(sock, options.buffer_nbytes or _NEAR_BUFFER_NBYTES)


def streams_for(round_trip: float, congestion_control: str) -> int:
    """How many connections fill a path: one that is near; a few with bbr; many with cubic, which loss slows down.

    Measured at 50 ms, 0.1 % loss and 1 Gbit/s: bbr 304 Mbit/s a stream and 950 with eight, cubic 9 a stream.

    Args:
        round_trip: seconds.
        congestion_control: as the kernel calls it.
    """
    if round_trip <= FAR_S:
        return 1
    return _STREAMS_BBR if congestion_control == "bbr" else _STREAMS_OTHERS


def pace(sock: socket.socket, bytes_per_s: float | None) -> None:
    """Let the kernel send no faster than this over a long path, evenly, and keep some of it waiting; None lets go.

    Without effect where there is no such thing.
    """
    if sys.platform == "linux":
        rate = _NO_PACE if bytes_per_s is None else max(1, int(bytes_per_s))
        reserve = 0 if bytes_per_s is None else int(_RESERVE_S * bytes_per_s)
        unsent = min(max(_FAR_UNSENT_NBYTES, reserve), _MOST_UNSENT_NBYTES)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)


def congestion_control_of(sock: socket.socket) -> str:
    """The name of what this connection uses, "" where the system does not tell."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return ""
    return name.rstrip(b"\0").decode("ascii", "replace")


def _set_buffers(sock: socket.socket, nbytes: int | None) -> None:
    if nbytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def _set_congestion_control(sock: socket.socket, name: str) -> None:
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # a kernel without it keeps its default
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii"))


def find_speed_anew(sock: socket.socket) -> None:
    """Let bbr forget how fast the path is to this connection, and double its speed every round trip until it knows.

    Else it tries a quarter more every eight round trips.
    """
    name = congestion_control_of(sock)
    _set_congestion_control(sock, "reno")  # every kernel has it; the same name again changes nothing
    _set_congestion_control(sock, name)


def bind(address: str, options: SocketOptions) -> socket.socket:
    """A socket that has the address and does not listen yet. Port 0 takes any free port.

    Raises:
        AddressInUse: somebody listens there.
        ValueError: `address` is not host:port of this machine.
    """
    host, port = split_address(address)
    if host == EVERY_INTERFACE:
        return _bind_everywhere(port, options)
    try:
        (family, _, _, _, bind_to), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"{address!r} is no address of this machine: {error.strerror}") from error
    return _bound(family, bind_to, address, options)


def _bind_everywhere(port: int, options: SocketOptions) -> socket.socket:
    """One socket for IPv4 and IPv6, or for IPv4 where there is no other."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(ValueError):
            return _bound(socket.AF_INET6, ("::", port), f"{EVERY_INTERFACE}:{port}", options)
    return _bound(socket.AF_INET, ("0.0.0.0", port), f"{EVERY_INTERFACE}:{port}", options)


def _bound(family: int, bind_to: tuple[object, ...], address: str, options: SocketOptions) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and bind_to[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        tune(sock, options)
        sock.bind(bind_to)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(address) from error
        raise ValueError(f"cannot listen at {address!r}: {error.strerror}") from error
    return sock


async def dial(address: str, options: SocketOptions, *, timeout_s: float) -> socket.socket:
    """A connected socket.

    Raises:
        PeerUnreachable: nobody there within `timeout_s`; `cause` is "refused" if the host is up and says no.
    """
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        host, port = split_address(address)
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, connect_to = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            tune(sock, options)
            await loop.sock_connect(sock, connect_to)
            fit_to_path(sock, options)
            return sock
    except BaseException as error:
        if sock is not None:
            sock.close()
        match error:
            case TimeoutError():
                raise PeerUnreachable(address, f"no answer in {timeout_s:.3g} s") from error
            case ConnectionRefusedError():
                raise PeerUnreachable(address, "refused", is_refused=True) from error
            case OSError() | ValueError():
                # A resolver that is away for now may know the name later.
                is_nowhere = isinstance(error, ValueError | socket.gaierror) and error.args[0] != socket.EAI_AGAIN
                raise PeerUnreachable(address, str(error), is_nowhere=is_nowhere) from error
            case _:
                raise
