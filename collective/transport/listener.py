# SPDX-License-Identifier: Apache-2.0
"""One port per peer: accept, encrypt, read the hello within its deadline, hand the connection to whom it is for.

Rules: nothing that a stranger sends can end the process or hold more than a socket, 4 KiB and a TLS handshake for 5 s.
At most `max_unknown` connections may be without a valid hello, of which one address gets a share, and an address may
not try too often. Every connection that does not get through, or that ends for what came over it, is closed, counted in
`counters` by reason and told of (`refusal_log.py`). Whether it must be encrypted is the policy of `Security`; a hello
counts only if its sender has proved to be who it says.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from isthmus.collective.core.address import EVERY_INTERFACE, join_address, split_address
from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import (
    AddressInUse,
    CollectiveError,
    ConnectionLost,
    RemoteProtocolError,
    SecurityRefused,
    StreamBroken,
)
from isthmus.collective.transport.accept_limit import AcceptLimiter, ConnectionAttempt
from isthmus.collective.transport.channel import Channel
from isthmus.collective.transport.hello import (
    REFUSED_EXIT_CODE,
    STRANGERS,
    Hello,
    HelloReply,
    Purpose,
    read_hello,
    send_reply,
)
from isthmus.collective.transport.interfaces import is_loopback, plain_host
from isthmus.collective.transport.reading import Allowances, Turns
from isthmus.collective.transport.refusal_log import CLOSED_BEFORE_HELLO, RefusalLog
from isthmus.collective.transport.security import Security, name_mismatch
from isthmus.collective.transport.shared_memory import take_offer
from isthmus.collective.transport.shared_socket import SharedSocket
from isthmus.collective.transport.sockets import SocketOptions, bind, fit_to_path, lost, tune
from isthmus.collective.transport.tls import TLS_HANDSHAKE_RECORD, TlsSocket
from isthmus.collective.transport.wire import PROTOCOL_VERSION

log = logging.getLogger(__name__)

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OF_ONE_CALLER = (
    *(errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN),
    *(errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH),
)
"""What accept raises of a connection that is gone with it: see accept(2)."""
_RESOURCE_PAUSE_S = 0.1
_MAX_OF_ONE_PEER = 64
"""Connections of one peer that routes hold for one purpose, whichever of its starts they are of. An honest one needs a
few: a learner has three to a donor, and those of an older start end a little later."""
_ALERT_S = 0.5
_BACKLOG = 512
_UNREAD_NBYTES = 4 << 10
_NUM_UNREAD = 16


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection that was accepted and has shown no valid hello yet. `sock` is replaced when it is encrypted."""

    sock: socket.socket
    host: str
    attempt: ConnectionAttempt


class Listener:
    """The server side of all connections of one peer.

    Args:
        address: host:port; port 0 takes any free one, `address` tells which after start(). Host "*" is every interface.
        accept: decides about a valid hello. Runs on the loop, must be quick.
        routes: who takes a CONTROL or STATE connection. Each runs as a task of the listener until it returns; the
            channel is closed then.
        bulk: takes an accepted BULK socket for good.
        counters: by reason, connections that did not get through; give one to share it.
        security: encrypts what comes from outside this machine, and lets everybody else prove who it is; None takes
            nothing but plain connections, and believes them.
        limiter: how often an address may try; the usual limits if None.
    """

    def __init__(
        self,
        address: str,
        *,
        accept: Callable[[Hello], HelloReply],
        routes: Mapping[Purpose, Callable[[Channel], Awaitable[None]]],
        bulk: Callable[[socket.socket, Hello], None],
        counters: Counter[str] | None = None,
        options: SocketOptions | None = None,
        hello_timeout_s: float = 5.0,
        max_unknown: int = 128,
        security: Security | None = None,
        limiter: AcceptLimiter | None = None,
    ) -> None:
        self.address = address
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._refusals = RefusalLog(self.counters)
        self._accept = accept
        self._routes = routes
        self._bulk = bulk
        self._options = options or SocketOptions()
        self._hello_timeout_s = hello_timeout_s
        self._max_unknown = max_unknown
        self._security = security
        self._limiter = limiter or AcceptLimiter()
        self._unknown: set[_Caller] = set()
        self._channels: set[Channel] = set()
        self._allowances = Allowances()
        self._sock: socket.socket | None = None
        self._accepts = False
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    def bind(self) -> None:
        """Take the address and accept nobody yet: who dials is refused by the system. `start` does it if need be.

        Raises:
            AddressInUse: somebody listens there.
            ValueError: not an address of this machine.
        """
        self._sock = bind(self.address, self._options)
        host, port, *_ = self._sock.getsockname()
        is_everywhere = split_address(self.address)[0] == EVERY_INTERFACE
        self.address = join_address(EVERY_INTERFACE if is_everywhere else host, port)

    async def start(self) -> None:
        """Accept from now on. Raises as `bind`."""
        if self._sock is None:
            self.bind()
        assert self._sock is not None
        try:
            self._sock.listen(_BACKLOG)
        except OSError as error:  # another one was bound as well, and was faster
            self._sock.close()
            self._sock = None
            raise AddressInUse(self.address) from error
        await self._tasks.__aenter__()
        self._accepts = True
        self._spawn(partial(self._accept_connections, self._sock))

    async def close(self) -> None:
        """Stop accepting, end every connection that a route still holds. Returns when all tasks have ended."""
        if self._sock is None:
            return
        for task in self._running:
            task.cancel()
        try:
            if self._accepts:
                await self._tasks.__aexit__(None, None, None)
        finally:
            self._sock.close()
            self._sock = None
            for caller in self._unknown:  # a task that never began left its socket there
                caller.sock.close()

    def put_out(self, peer_id: PeerId) -> None:
        """End the connections of a peer that routes hold, but for CONTROL: there it is told why, and by whom."""
        for channel in list(self._channels):
            if channel.hello.peer_id == peer_id and channel.hello.purpose is not Purpose.CONTROL:
                channel.close()

    async def __aenter__(self) -> "Listener":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except Exception:  # a task root: the failure of one connection is not the listener's
                self.counters["handler failed"] += 1
                log.exception("connection_handler_failed address=%s", self.address)

        task = self._tasks.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _accept_connections(self, listening: socket.socket) -> None:
        turns = Turns()
        while True:
            await turns.give()  # dials may come faster than they are refused
            try:
                sock, remote = await _next_caller(listening)
            except OSError as error:
                is_short = error.errno in _OUT_OF_RESOURCES
                self.counters["out of descriptors" if is_short else "broken before accept"] += 1
                if error.errno not in _OF_ONE_CALLER:
                    # Accepting again at once would spin: the kernel keeps the connection, or the socket is dead.
                    await asyncio.sleep(_RESOURCE_PAUSE_S)
                continue
            caller = self._admitted(sock, plain_host(remote[0]))
            if caller is None:
                sock.close()
            else:
                self._unknown.add(caller)
                self._spawn(partial(self._welcome, caller))

    def _admitted(self, sock: socket.socket, host: str) -> _Caller | None:
        """None, counted by reason, if there is no room for one more. This is the cheapest moment to say so."""
        attempt = self._limiter.attempt(
            host,
            asyncio.get_running_loop().time(),
            waiting=[caller.attempt for caller in self._unknown],
            num_places=self._max_unknown,
        )
        if attempt.refusal is not None:
            self._ended(attempt.refusal, host)
            return None
        try:
            tune(sock, self._options)
            fit_to_path(sock, self._options)
        except OSError:
            self._ended("broken before hello", host)
            return None
        return _Caller(sock, host, attempt)

    def _ended(self, kind: str, host: str, **about: str) -> None:
        self._refusals.ended(kind, asyncio.get_running_loop().time(), host=host, **about)

    async def _welcome(self, caller: _Caller) -> None:
        try:
            hello = await self._greet(caller)
        except BaseException:
            caller.sock.close()
            raise
        finally:
            self._unknown.discard(caller)
        sock = caller.sock
        if hello is None:
            sock.close()
            return
        if hello.purpose is Purpose.BULK:
            self._bulk(sock, hello)
            return
        if hello.purpose not in STRANGERS and self._num_like(hello) >= _MAX_OF_ONE_PEER:
            self._ended("too many connections of one peer", caller.host, peer_id=hello.peer_id, purpose=hello.purpose)
            sock.close()
            return
        with contextlib.closing(Channel(sock, hello, allowance=self._allowances.of(hello))) as channel:
            self._channels.add(channel)
            try:
                await self._routes[hello.purpose](channel)
            except (RemoteProtocolError, StreamBroken) as error:
                reason = error.reason if isinstance(error, RemoteProtocolError) else error.cause
                self._ended(f"{hello.purpose}: {reason}", caller.host, peer_id=hello.peer_id)
            except ConnectionLost:
                log.debug("connection_lost purpose=%s peer_id=%s", hello.purpose, hello.peer_id)
            except CollectiveError as error:
                kind = f"{hello.purpose}: {type(error).__name__}"
                self._ended(kind, caller.host, peer_id=hello.peer_id, detail=str(error))
            finally:
                self._channels.discard(channel)

    def _num_like(self, hello: Hello) -> int:
        """Connections that this peer has for the same purpose."""
        there = (channel.hello for channel in self._channels)
        return sum(other.peer_id == hello.peer_id and other.purpose is hello.purpose for other in there)

    # -------------------------------------------------------------------------------- before the hello

    async def _greet(self, caller: _Caller) -> Hello | None:
        """Encrypt, read and answer the hello. None, counted by reason, if this connection is not to live."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                await self._secure(caller)
                hello = await read_hello(caller.sock)
                reply, counted_as = self._decide(caller.sock, hello)
                await self._answer(caller, hello, reply)
        except TimeoutError:
            self._ended("no hello in time", caller.host)
        except StreamBroken as error:
            self._ended(error.cause, caller.host)
        except ConnectionLost:
            self._ended(CLOSED_BEFORE_HELLO, caller.host)
        except RemoteProtocolError as error:
            self._ended(error.reason, caller.host)
        except SecurityRefused as error:
            self._ended(error.reason, caller.host)
            await _let_read(caller.sock)
        else:
            if reply.accepted:
                caller.attempt.forgive()
                return hello
            self._ended(counted_as, caller.host, peer_id=hello.peer_id, purpose=hello.purpose, detail=reply.reason)
        return None

    async def _answer(self, caller: _Caller, hello: Hello, reply: HelloReply) -> None:
        """Send the reply, and take the memory that is offered for a plain bulk connection within this machine."""
        memory = None
        if reply.accepted:
            reply = msgspec.structs.replace(reply, seen_from=caller.host)
        is_plain = not isinstance(caller.sock, TlsSocket)
        if reply.accepted and is_plain and self._security is not None and hello.purpose not in STRANGERS:
            reply = self._security.answer(hello, reply)
        is_near = is_loopback(caller.host) and is_plain
        if reply.accepted and hello.purpose is Purpose.BULK and is_near and self._options.shares_memory:
            memory = None if hello.memory is None else take_offer(hello.memory)
        if memory is None:
            await send_reply(caller.sock, reply)
            return
        try:
            await send_reply(caller.sock, msgspec.structs.replace(reply, shares_memory=True))
            caller.sock = SharedSocket(caller.sock, memory, is_dialler=False)
        except BaseException:
            memory.close()
            raise

    async def _secure(self, caller: _Caller) -> None:
        first = await _first_byte(caller.sock)
        if first == TLS_HANDSHAKE_RECORD:
            if self._security is None or not self._security.is_served:
                raise SecurityRefused("unexpected TLS")
            refusal = self._limiter.encrypts(caller.attempt, asyncio.get_running_loop().time())
            if refusal is not None:
                raise SecurityRefused(refusal)
            caller.sock = await self._security.secure_accepted(caller.sock, timeout_s=self._hello_timeout_s)
        elif first and self._security is not None and self._security.wanted_for(caller.host):
            raise SecurityRefused("not encrypted")

    def _decide(self, sock: socket.socket, hello: Hello) -> tuple[HelloReply, str]:
        """The answer to a valid hello, and what to count it as if that is no."""
        reply = self._accept(hello)
        mismatch = self._mismatch(sock, hello, is_wanted=reply.accepted)
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"protocol version {hello.protocol_version}, here {PROTOCOL_VERSION}: update one side"
        elif mismatch is not None:
            reason = f"the connection is not safe: {mismatch}"
        elif reply.accepted and hello.purpose is not Purpose.BULK and hello.purpose not in self._routes:
            reason = f"{hello.purpose} is not served here"
        else:
            return reply, "refused"
        refusal = HelloReply(
            accepted=False,
            code=REFUSED_EXIT_CODE,
            reason=reason,
            peer_id=reply.peer_id,
            incarnation=reply.incarnation,
        )
        return refusal, mismatch or "refused"

    def _mismatch(self, sock: socket.socket, hello: Hello, *, is_wanted: bool) -> str | None:
        """Why the dialler is not who it says, or None if it is, or is a stranger who may be one."""
        may_be_stranger = hello.purpose in STRANGERS
        if isinstance(sock, TlsSocket):
            return name_mismatch(sock, hello.peer_id, may_be_stranger=may_be_stranger)
        if self._security is None or may_be_stranger or not is_wanted:
            return None
        return self._security.doubt(sock, hello)


async def _first_byte(sock: socket.socket) -> bytes:
    """The byte that comes first, which stays there to be read. Empty if the other side hangs up instead."""
    while True:
        try:
            return sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            await _readable(sock)
        except OSError as error:
            raise lost(error) from error


async def _next_caller(listening: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    """A new connection, non-blocking. As `loop.sock_accept`, which raises in the loop, and keeps the connection open,
    if one comes in the turn in which it is cancelled. Raises OSError."""
    while True:
        try:
            sock, remote = listening.accept()
        except (BlockingIOError, InterruptedError):
            await _readable(listening)
        else:
            sock.setblocking(False)
            return sock, remote


async def _readable(sock: socket.socket) -> None:
    """Until there is something to read, or nothing will ever be."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def _let_read(sock: socket.socket) -> None:
    """Leave the other side a moment for the alert that says why: closing with bytes unread would destroy it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_ALERT_S):
            for _ in range(_NUM_UNREAD):
                if not await loop.sock_recv(sock, _UNREAD_NBYTES):
                    return
