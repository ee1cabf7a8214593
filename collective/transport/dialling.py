# SPDX-License-Identifier: Apache-2.0
"""The dialler's whole way: TCP, encryption where it is wanted or else a proof of who we are, hello.

Control, state and bulk connections all go it. An address may have several candidates. They are tried side by side, and
the first one where the expected peer proves to be there counts: another machine may have the same private address.

Rules: one deadline for everything. Nothing is left open after an error. Does not know what the connection is for.
"""

import asyncio
import functools
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from isthmus.collective.core.address import MAX_CANDIDATES, candidates_of, join_address, split_address
from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import (
    CollectiveError,
    ConnectionLost,
    HandshakeRefused,
    PeerUnreachable,
    SecurityRefused,
)
from isthmus.collective.transport.hello import Hello, HelloReply, Purpose, introduce
from isthmus.collective.transport.interfaces import is_loopback, own_interfaces, sort_candidates
from isthmus.collective.transport.racing import race
from isthmus.collective.transport.security import DialSecurity, name_mismatch
from isthmus.collective.transport.shared_memory import make_offering
from isthmus.collective.transport.shared_socket import SharedSocket
from isthmus.collective.transport.sockets import EncryptionFailed, SocketOptions, dial, lost
from isthmus.collective.transport.tls import TlsSocket

T = TypeVar("T")
log = logging.getLogger(__name__)

_HEAD_START_S = 0.25
"""Of each candidate over the next, as RFC 8305 advises."""


class Opened(NamedTuple):
    """A connection after its handshake. `address` is the candidate that led there.

    An encrypted socket, or one that shares memory, may hold bytes that epoll does not tell of: see `TlsSocket.pending`.
    """

    sock: socket.socket
    reply: HelloReply
    address: str


async def open_connection(
    address: str,
    hello: Hello,
    *,
    timeout_s: float,
    options: SocketOptions | None = None,
    security: DialSecurity | None = None,
    expect: PeerId | None = None,
) -> Opened:
    """Dial, encrypt if `security` wants that for the address found, introduce ourselves.

    Args:
        address: host:port, or several candidates.
        hello: what to say.
        timeout_s: for all of it.
        options: of the socket.
        security: None never encrypts and proves nothing.
        expect: who must answer; None for anybody.

    Raises:
        PeerUnreachable: nobody there, or not the expected peer; names every candidate that was tried.
        HandshakeRefused: somebody is there and says no.
        SecurityRefused: it is somebody else, or one side does not take the other's certificate.
        ConnectionLost, DeadlineExceeded, RemoteProtocolError: the handshake broke off.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s

    async def attempt(endpoint: str) -> Opened:
        return await _open_one(
            endpoint, hello, timeout_s=deadline - loop.time(), options=options, security=security, expect=expect
        )

    return await _first(address, attempt, timeout_s=timeout_s, let_go=lambda late: late.sock.close())


async def knock(address: str, options: SocketOptions, *, timeout_s: float) -> None:
    """Connect to whichever candidate takes a connection, and hang up.

    Raises:
        PeerUnreachable: none does.
    """

    async def attempt(endpoint: str) -> socket.socket:
        return await dial(endpoint, options, timeout_s=timeout_s)

    answered = await _first(address, attempt, timeout_s=timeout_s, let_go=lambda late: late.close())
    answered.close()


async def _first(
    address: str, attempt: Callable[[str], Awaitable[T]], *, timeout_s: float, let_go: Callable[[T], None]
) -> T:
    """What the first candidate gives that leads anywhere; a name stands for all that it is known by.

    Raises:
        CollectiveError: none does.
    """

    async def by_name(candidate: str) -> T:
        endpoints = await _resolve(candidate, timeout_s=timeout_s)
        return await among(candidate, endpoints, attempt)

    async def among(whole: str, ways: Sequence[str], go: Callable[[str], Awaitable[T]]) -> T:
        if len(ways) == 1:
            return await go(ways[0])
        causes: dict[str, CollectiveError] = {}
        found = await race(ways, go, head_start_s=_HEAD_START_S, let_go=let_go, causes=causes)
        if found is None:
            raise _failure(whole, causes)
        return found[1]

    candidates = candidates_of(address)[:MAX_CANDIDATES]
    return await among(address, candidates if len(candidates) == 1 else _in_order(candidates), by_name)


def _in_order(candidates: Sequence[str]) -> list[str]:
    """The likeliest first; as they come where the operating system does not tell which addresses are our own.

    Found before: it opens a file for that, so the first dial of a process that had no descriptor left ended it.
    """
    try:
        own = own_interfaces()
    except OSError as error:
        _warn_of_no_order(str(error))
        own = ()
    return sort_candidates(candidates, own)


@functools.cache
def _warn_of_no_order(cause: str) -> None:
    """Once."""
    log.warning("own_addresses_unknown cause=%r; the candidates of an address are dialled as they come", cause)


def _failure(address: str, causes: dict[str, CollectiveError]) -> CollectiveError:
    """What to tell of several failures: who said no says most."""
    errors = list(causes.values())
    for kind in (HandshakeRefused, SecurityRefused):
        for error in errors:
            if isinstance(error, kind):
                return error
    attempts = {
        item: error.cause if isinstance(error, PeerUnreachable) else str(error) for item, error in causes.items()
    }
    told = ", ".join(f"{item} ({cause})" for item, cause in attempts.items())
    unreachable = [error for error in errors if isinstance(error, PeerUnreachable)]
    is_nowhere = len(unreachable) == len(errors) and all(error.is_nowhere for error in unreachable)
    is_refused = len(unreachable) == len(errors) and all(error.is_refused for error in unreachable)
    return PeerUnreachable(address, told, is_nowhere=is_nowhere, is_refused=is_refused, attempts=attempts)


async def _resolve(candidate: str, *, timeout_s: float) -> list[str]:
    """The addresses that a candidate stands for: itself, unless its host is a name.

    Raises:
        PeerUnreachable: it is no address, or its name is not known.
    """
    try:
        host, port = split_address(candidate)
        if _is_number(host):
            return [candidate]
        async with asyncio.timeout(timeout_s):
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError as error:
        raise PeerUnreachable(candidate, f"its name is not known after {timeout_s:.3g} s") from error
    except (ValueError, OSError) as error:
        # A resolver that is away for now may know the name later.
        is_nowhere = error.args[0] != socket.EAI_AGAIN
        raise PeerUnreachable(candidate, str(error), is_nowhere=is_nowhere) from error
    return list(dict.fromkeys(join_address(str(entry[4][0]), port) for entry in entries))[:MAX_CANDIDATES]


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _open_one(
    address: str,
    hello: Hello,
    *,
    timeout_s: float,
    options: SocketOptions | None,
    security: DialSecurity | None,
    expect: PeerId | None,
) -> Opened:
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
    return Opened(sock, reply, address)


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
