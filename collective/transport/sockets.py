"""Opening TCP sockets with the options that notice a dead peer and keep a link full.

Rules: every socket is non-blocking, sends at once (TCP_NODELAY) and breaks within seconds when the other host is
gone: keepalive 2/1/4 for an idle receiver, TCP_USER_TIMEOUT for a blocked sender. The congestion control is set
before connect and listen, since a socket that once ran bbr keeps its pacing. Options that this system does not have
are left out.
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket
import struct
from dataclasses import dataclass

from collective.errors import AddressInUse, ConnectionLost, PeerUnreachable

_LISTEN_BACKLOG = 512
_TCP_INFO_NBYTES = 104
_TCP_INFO_RTT_OFFSET = 68  # eight u8, then u32s: tcpi_rtt is the sixteenth
_SIOCOUTQ = 0x5411


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """How sockets are set up on this machine. Local: peers may differ."""

    congestion_control: str | None = None
    """Name for TCP_CONGESTION; None = cubic to loopback and private addresses, else bbr where there is one."""
    buffer_nbytes: int | None = None
    """Send and receive buffer; None lets the kernel tune them."""
    user_timeout_s: float = 6.0
    """Unacknowledged bytes break the connection after this long."""
    keepalive_idle_s: int = 2
    keepalive_interval_s: int = 1
    keepalive_probes: int = 4


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, with IPv6 hosts in brackets, as (host, port).

    Raises:
        ValueError: no such form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of split_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def lost(error: OSError) -> ConnectionLost:
    """What an operating system error on a connected socket means."""
    return ConnectionLost(errno.errorcode.get(error.errno or 0, type(error).__name__))


def tune(sock: socket.socket, options: SocketOptions, remote_host: str) -> None:
    """Set all options. For a listening socket `remote_host` is its own address."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    numbers = {
        "TCP_KEEPIDLE": options.keepalive_idle_s,
        "TCP_KEEPINTVL": options.keepalive_interval_s,
        "TCP_KEEPCNT": options.keepalive_probes,
        "TCP_USER_TIMEOUT": round(options.user_timeout_s * 1000),
    }
    for name, value in numbers.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if options.buffer_nbytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.buffer_nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.buffer_nbytes)
    if hasattr(socket, "TCP_CONGESTION"):
        name = options.congestion_control or ("cubic" if _is_near(remote_host) else "bbr")
        with contextlib.suppress(OSError):  # a kernel without it keeps its default
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii"))


def open_listener(address: str, options: SocketOptions) -> socket.socket:
    """A listening socket. Port 0 takes any free port.

    Raises:
        AddressInUse: somebody listens there.
        ValueError: `address` is not host:port of this machine.
    """
    host, port = split_address(address)
    try:
        (family, _, _, _, bind_to), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"{address!r} is no address of this machine: {error.strerror}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(sock, options, host)
        sock.bind(bind_to)
        sock.listen(_LISTEN_BACKLOG)
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
            tune(sock, options, str(connect_to[0]))
            await loop.sock_connect(sock, connect_to)
            return sock
    except BaseException as error:
        if sock is not None:
            sock.close()
        match error:
            case TimeoutError():
                raise PeerUnreachable(address, f"no answer in {timeout_s:g} s") from error
            case ConnectionRefusedError():
                raise PeerUnreachable(address, "refused") from error
            case OSError() | ValueError():
                raise PeerUnreachable(address, str(error)) from error
            case _:
                raise


def round_trip_s(sock: socket.socket) -> float:
    """The kernel's smoothed round-trip time of this connection, 0.0 where it does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
    except OSError:
        return 0.0
    if len(info) < _TCP_INFO_RTT_OFFSET + 4:
        return 0.0
    (rtt_us,) = struct.unpack_from("=I", info, _TCP_INFO_RTT_OFFSET)
    return float(rtt_us) * 1e-6


def unacknowledged_nbytes(sock: socket.socket) -> int:
    """Bytes that were written but not acknowledged yet, 0 where the system does not tell."""
    try:
        import fcntl
    except ImportError:
        return 0
    try:
        answer = fcntl.ioctl(sock.fileno(), _SIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("=i", answer)[0])


def _is_near(host: str) -> bool:
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    return parsed.is_loopback or parsed.is_private
