"""One port per peer: accept, read the hello within its deadline, hand the connection to whom it is for.

Rules: nothing that a stranger sends can end the process or hold more than a socket and 4 KiB for 5 s. At most
`max_unknown` connections may be without a valid hello. Every connection that does not get through is closed and
counted in `counters`, by reason.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from collective.errors import CollectiveError, ConnectionLost, RemoteProtocolError
from collective.transport.channel import Channel
from collective.transport.hello import REFUSED_EXIT_CODE, Hello, HelloReply, Purpose, read_hello, send_reply
from collective.transport.sockets import SocketOptions, join_address, open_listener, tune
from collective.wire import PROTOCOL_VERSION

log = logging.getLogger(__name__)

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RESOURCE_PAUSE_S = 0.1


class Listener:
    """The server side of all connections of one peer.

    Args:
        address: host:port; port 0 takes any free one, `address` tells which after start().
        accept: decides about a valid hello. Runs on the loop, must be quick.
        routes: who takes a CONTROL or STATE connection. Each runs as a task of the listener until it returns; the
            channel is closed then.
        bulk: takes an accepted BULK socket for good.
        counters: by reason, connections that did not get through; give one to share it.
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
        max_unknown: int = 64,
    ) -> None:
        self.address = address
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._accept = accept
        self._routes = routes
        self._bulk = bulk
        self._options = options or SocketOptions()
        self._hello_timeout_s = hello_timeout_s
        self._max_unknown = max_unknown
        self._unknown: set[socket.socket] = set()
        self._sock: socket.socket | None = None
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind and accept from now on.

        Raises:
            AddressInUse: somebody listens there.
            ValueError: not an address of this machine.
        """
        self._sock = open_listener(self.address, self._options)
        host, port, *_ = self._sock.getsockname()
        self.address = join_address(host, port)
        await self._tasks.__aenter__()
        self._spawn(self._accept_connections, self._sock)

    async def close(self) -> None:
        """Stop accepting, end every connection that a route still holds. Returns when all tasks have ended."""
        if self._sock is None:
            return
        for task in self._running:
            task.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            for sock in (self._sock, *self._unknown):  # a task that never began left its socket there
                sock.close()
            self._sock = None

    async def __aenter__(self) -> "Listener":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _spawn(self, work: Callable[[socket.socket], Awaitable[None]], sock: socket.socket) -> None:
        async def run() -> None:
            try:
                await work(sock)
            except Exception:  # a task root: the failure of one connection is not the listener's
                self.counters["handler failed"] += 1
                log.exception("connection_handler_failed address=%s", self.address)

        task = self._tasks.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _accept_connections(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, remote = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    self.counters["broken before accept"] += 1
                    continue
                # Accepting again at once would spin: the kernel keeps the connection in its queue.
                self.counters["out of descriptors"] += 1
                await asyncio.sleep(_RESOURCE_PAUSE_S)
                continue
            if len(self._unknown) >= self._max_unknown:
                self.counters["too many without hello"] += 1
                sock.close()
                continue
            try:
                tune(sock, self._options, remote[0])
            except OSError:
                self.counters["broken before hello"] += 1
                sock.close()
                continue
            self._unknown.add(sock)
            self._spawn(self._welcome, sock)

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            hello = await self._greet(sock)
        finally:
            self._unknown.discard(sock)
        if hello is None:
            sock.close()
            return
        if hello.purpose is Purpose.BULK:
            self._bulk(sock, hello)
            return
        with contextlib.closing(Channel(sock, hello)) as channel:
            try:
                await self._routes[hello.purpose](channel)
            except ConnectionLost:
                log.debug("connection_ended purpose=%s peer_id=%s", hello.purpose, hello.peer_id)
            except CollectiveError as error:
                self.counters["broke the protocol after hello"] += 1
                log.warning("connection_dropped purpose=%s peer_id=%s cause=%s", hello.purpose, hello.peer_id, error)

    async def _greet(self, sock: socket.socket) -> Hello | None:
        """Read and answer the hello. None, counted by reason, if this connection is not to live."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                hello = await read_hello(sock)
                reply = self._accept(hello)
                if hello.protocol_version != PROTOCOL_VERSION:
                    reply = HelloReply(
                        accepted=False,
                        code=REFUSED_EXIT_CODE,
                        reason=f"protocol version {hello.protocol_version}, here {PROTOCOL_VERSION}: update one side",
                        peer_id=reply.peer_id,
                        incarnation=reply.incarnation,
                    )
                elif reply.accepted and hello.purpose is not Purpose.BULK and hello.purpose not in self._routes:
                    reply = HelloReply(
                        accepted=False,
                        code=REFUSED_EXIT_CODE,
                        reason=f"{hello.purpose} is not served here",
                        peer_id=reply.peer_id,
                        incarnation=reply.incarnation,
                    )
                await send_reply(sock, reply)
        except TimeoutError:
            self.counters["no hello in time"] += 1
        except ConnectionLost:
            self.counters["closed before hello"] += 1
        except RemoteProtocolError as error:
            self.counters[error.reason] += 1
        except BaseException:
            sock.close()
            raise
        else:
            if reply.accepted:
                return hello
            self.counters["refused"] += 1
            log.warning("hello_refused peer_id=%s purpose=%s reason=%s", hello.peer_id, hello.purpose, reply.reason)
        return None
