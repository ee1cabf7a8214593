# SPDX-License-Identifier: Apache-2.0
"""The dialler's whole way: TCP, encryption where it is wanted or else a proof of who we are, hello.

Control, state and bulk connections all go it.

Rules: one deadline for everything. Nothing is left open after an error. Does not know what the connection is for.
"""

import asyncio
import socket

import msgspec

from collective.core.types import PeerId
from collective.errors import ConnectionLost, PeerUnreachable, SecurityRefused
from collective.transport.hello import Hello, HelloReply, Purpose, introduce
from collective.transport.security import DialSecurity, name_mismatch
from collective.transport.shared_memory import make_offering
from collective.transport.shared_socket import SharedSocket
from collective.transport.sockets import EncryptionFailed, SocketOptions, dial, is_loopback, lost
from collective.transport.tls import TlsSocket


async def open_connection(
    address: str,
    hello: Hello,
    *,
    timeout_s: float,
    options: SocketOptions | None = None,
    security: DialSecurity | None = None,
    expect: PeerId | None = None,
) -> tuple[socket.socket, HelloReply]:
    """Dial, encrypt if `security` wants that for the address found, introduce ourselves.

    Args:
        address: host:port.
        hello: what to say.
        timeout_s: for all of it.
        options: of the socket.
        security: None never encrypts and proves nothing.
        expect: who must answer; None for anybody.

    Returns:
        The socket and what the other side said. An encrypted socket, or one that shares memory, may hold bytes that
        epoll does not tell of: see `TlsSocket.pending`.

    Raises:
        PeerUnreachable: nobody there, or not the expected peer.
        HandshakeRefused: somebody is there and says no.
        SecurityRefused: it is somebody else, or one side does not take the other's certificate.
        ConnectionLost, DeadlineExceeded, RemoteProtocolError: the handshake broke off.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    options = options or SocketOptions()
    sock = await dial(address, options, timeout_s=timeout_s)
    try:
        host = _host_of(sock)
        if security is not None and security.wanted_for(host):
            sock = await security.secure_dialled(sock, expect=expect, timeout_s=deadline - loop.time())
        elif security is not None:
            hello = security.prove(sock, hello, expect=expect)
        is_near = is_loopback(host) and not isinstance(sock, TlsSocket)
        if is_near and hello.purpose is Purpose.BULK and options.shares_memory:
            sock, reply = await _introduce_offering(sock, hello, timeout_s=deadline - loop.time())
        else:
            reply = await _introduce(sock, hello, timeout_s=deadline - loop.time())
        mismatch = name_mismatch(sock, reply.peer_id, may_be_stranger=False)
        if security is not None and not security.wanted_for(host):
            mismatch = security.doubt_answer(hello, reply)
        if mismatch is not None:
            raise SecurityRefused(mismatch)
        if expect is not None and reply.peer_id != expect:
            raise PeerUnreachable(address, "another peer answers there")
    except BaseException:
        sock.close()
        raise
    return sock, reply


def _host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError as error:  # gone already
        raise lost(error) from error


async def _introduce_offering(
    sock: socket.socket, hello: Hello, *, timeout_s: float
) -> tuple[socket.socket, HelloReply]:
    """The same with memory on offer, which the other side may take."""
    offering = make_offering()
    if offering is None:
        return sock, await _introduce(sock, hello, timeout_s=timeout_s)
    is_taken = False
    try:
        reply = await _introduce(sock, msgspec.structs.replace(hello, memory=offering.offer), timeout_s=timeout_s)
        is_taken = reply.shares_memory
    finally:
        offering.close()
        if not is_taken:
            offering.memory.close()
    return SharedSocket(sock, offering.memory, is_dialler=True) if is_taken else sock, reply


async def _introduce(sock: socket.socket, hello: Hello, *, timeout_s: float) -> HelloReply:
    try:
        return await introduce(sock, hello, timeout_s=timeout_s)
    except ConnectionLost as error:
        if isinstance(error.__cause__, EncryptionFailed):
            # The first read is when a dialler hears that its certificate was not taken.
            raise SecurityRefused(error.__cause__.reason) from error
        raise
