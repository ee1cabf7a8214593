# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows about a connection: round trips, what has arrived, what was lost.

Rules: read from TCP_INFO of Linux, whose struct only ever grows at its end. A field that this kernel does not have is
None, a system without TCP_INFO or a closed socket gives no answer at all; nothing here raises. Knows no TLS: the
bytes counted are those on the wire.
"""

import socket
import struct
import sys
from dataclasses import dataclass

_MAX_NBYTES = 256
_SIOCOUTQ = 0x5411
_SIOCINQ = 0x541B
_UNKNOWN_RTT_US = 0xFFFFFFFF
_IP_MTU, _IPV6_MTU = 14, 24  # of Linux; Python has no names for them

# Offsets in struct tcp_info of linux/tcp.h: eight bytes of small fields, 24 u32, then u64 and u32 mixed.
_SND_MSS = ("=I", 16)
_LAST_ACK_RECV_MS = ("=I", 56)
_RTT_US = ("=I", 68)
_SND_CWND = ("=I", 80)
_BYTES_ACKED = ("=Q", 120)
_MIN_RTT_US = ("=I", 148)
_DELIVERED = ("=I", 192)
_BYTES_RETRANS = ("=Q", 208)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """One connection at one moment. None where the kernel does not tell.

    Attributes:
        last_ack_recv_ms: how long ago the other side's kernel last acknowledged anything, in milliseconds.
        rtt_us: smoothed round-trip time in microseconds.
        min_rtt_us: the shortest round trip that was seen lately, in microseconds: the path without queues.
        bytes_acked: bytes that the other side has acknowledged.
        bytes_delivered: bytes that have arrived there, about: also those behind a gap, which `bytes_acked` counts all
            at once when the gap is filled.
        bytes_retrans: bytes that were sent again.
    """

    last_ack_recv_ms: int | None
    rtt_us: int | None
    min_rtt_us: int | None
    bytes_acked: int | None
    bytes_delivered: int | None
    bytes_retrans: int | None


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Ask the kernel. None where it does not tell: another system, or the socket is closed."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MAX_NBYTES))
    except OSError:
        return None


def parse_tcp_info(info: bytes) -> TcpInfo:
    """Read the bytes of a struct tcp_info, as many as this kernel has."""
    min_rtt_us = _field(info, _MIN_RTT_US)
    return TcpInfo(
        last_ack_recv_ms=_field(info, _LAST_ACK_RECV_MS),
        rtt_us=_field(info, _RTT_US),
        min_rtt_us=None if min_rtt_us == _UNKNOWN_RTT_US else min_rtt_us,
        bytes_acked=_field(info, _BYTES_ACKED),
        bytes_delivered=_product(_field(info, _DELIVERED), _field(info, _SND_MSS)),
        bytes_retrans=_field(info, _BYTES_RETRANS),
    )


def round_trip_s(sock: socket.socket) -> float:
    """The shortest round trip of this connection lately, 0.0 where the kernel does not tell.

    Not the smoothed one: between processes that share a busy machine the first ones take milliseconds, and a path that
    is taken for a long one gets dozens of connections, and padding.
    """
    info = read_tcp_info(sock)
    shortest_us = None if info is None else info.min_rtt_us or info.rtt_us
    return 0.0 if shortest_us is None else shortest_us * 1e-6


def window_nbytes(sock: socket.socket) -> int:
    """Bytes that may be on their way at once: the congestion window. 0 where the system does not tell."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MAX_NBYTES) if hasattr(socket, "TCP_INFO") else b""
    except OSError:
        return 0
    return _product(_field(info, _SND_CWND), _field(info, _SND_MSS)) or 0


def path_mtu(sock: socket.socket) -> int | None:
    """The longest IP packet that the kernel sends on this path, in bytes: what it has found out, or its interface's.

    None where it does not tell.
    """
    if sys.platform != "linux":
        return None
    try:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None


def unacknowledged_nbytes(sock: socket.socket) -> int:
    """Bytes that were written but not acknowledged yet, 0 where the system does not tell."""
    return _queued_nbytes(sock, _SIOCOUTQ)


def unread_nbytes(sock: socket.socket) -> int:
    """Bytes that have come and that nobody has read, 0 where the system does not tell."""
    return _queued_nbytes(sock, _SIOCINQ)


def _queued_nbytes(sock: socket.socket, request: int) -> int:
    try:
        import fcntl
    except ImportError:
        return 0
    try:
        answer = fcntl.ioctl(sock.fileno(), request, b"\0\0\0\0")
    except (OSError, ValueError):  # ValueError: closed, so the descriptor is -1
        return 0
    return int(struct.unpack("=i", answer)[0])


def _field(info: bytes, place: tuple[str, int]) -> int | None:
    layout, offset = place
    if len(info) < offset + struct.calcsize(layout):
        return None
    value: int = struct.unpack_from(layout, info, offset)[0]
    return value


def _product(segments: int | None, nbytes: int | None) -> int | None:
    return None if segments is None or nbytes is None else segments * nbytes
