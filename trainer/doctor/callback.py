# SPDX-License-Identifier: Apache-2.0
"""Dialling back: whether a listener that somebody has just opened can be reached from here. And that listener.

Whoever has a ticket can make the coordinator and a member dial addresses of its choice. By joining it can do that as
well, for an address that it gives is dialled by every member; but a join is seen by everybody, and this is not. So it
must be of no use for anything else:

* No port scanner. Of a third machine nobody learns more than whether our own listener answers there, and not before
  the whole time for a dial is over: whether a port is open, closed or filtered shows neither in words nor in time. Of
  the host that the question came from the cause is told, as any machine out there would tell it.
* No voice in foreign services. Nothing is sent on a connection: the listener speaks first, with a number that only the
  asker and we know, and anything else ends it. So no other machine with the same private address is taken for it.
* No amplifier. A question is longer than the handshakes that it causes, of one TCP connection an address; there are at
  most eight addresses in a question, and all questions together have one budget.
* Names are not dialled, for nobody knows before what they stand for. Loopback is dialled for who came over loopback;
  link-local addresses (169.254.169.254 tells secrets in some clouds), multicast and the unspecified address never.

Rules: one object a process, so that the budget holds whoever asks. Must not know what the answers are used for.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Sequence

from isthmus.collective.core.address import split_address
from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.errors import PeerUnreachable
from isthmus.collective.transport import Channel, SocketOptions
from isthmus.collective.transport.interfaces import is_loopback
from isthmus.collective.transport.sockets import dial
from isthmus.trainer.doctor.messages import CALLS, NONCE_NBYTES, Attempt, Busy, Called, hear, say

CALL_S = 3.0
"""For one dial and the nonce; also how long the answer takes if it is about a third machine."""
_RATE, _BURST = 0.8, 24
"""Dials a second in the long run, and at once: three questions of eight addresses."""
_NO_ANSWER = "no answer"
_TIMEOUT_S = 5.0


class CallBack:
    """Dials for whoever asks, within the budget of this process. See the module."""

    def __init__(self) -> None:
        self._budget = TokenBucket(_RATE, _BURST)

    async def serve(self, channel: Channel) -> None:
        """Answer a peer: the coordinator, which asks for somebody. The route for DIAL_BACK connections.

        Raises:
            CollectiveError: the peer said nonsense, or went away.
        """
        call = await hear(channel, CALLS, timeout_s=_TIMEOUT_S)
        # Who asks is not at the coordinator's host, so no host counts as its own and no cause is told.
        home = channel.host if is_loopback(channel.host) else ""
        called = await self.call(call.addresses, call.nonce, asker=home)
        await say(channel, called or Busy(), timeout_s=_TIMEOUT_S)

    async def call(self, addresses: Sequence[str], nonce: bytes, *, asker: str) -> Called | None:
        """Dial each of these; None if the budget does not allow it now.

        Args:
            addresses: single addresses.
            nonce: what their listener says.
            asker: host that the question came from; empty if that is not known.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        if self._budget.delay_s(began, len(addresses)) > 0:
            return None
        self._budget.take(began, len(addresses))
        async with asyncio.TaskGroup() as tasks:
            dials = [tasks.create_task(_attempt(address, nonce, asker)) for address in addresses]
        attempts = tuple(dial.result() for dial in dials)
        if any(attempt.cause == _NO_ANSWER for attempt in attempts):
            await asyncio.sleep(began + CALL_S - clock())
        return Called(attempts)


async def _attempt(address: str, nonce: bytes, asker: str) -> Attempt:
    try:
        host, _ = split_address(address)
    except ValueError:
        return Attempt(address, "not host:port")
    if (taboo := _taboo(host, asker)) is not None:
        return Attempt(address, taboo)
    cause = await _cause(address, nonce)
    return Attempt(address, cause if cause is None or host == asker else _NO_ANSWER)


def _taboo(host: str, asker: str) -> str | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return "not dialled: a name"
    if ip.is_loopback:
        return None if is_loopback(asker) else "not dialled: loopback is another machine's"
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return "not dialled: nobody else's address"
    return None


async def _cause(address: str, nonce: bytes) -> str | None:
    """Why our listener does not answer there; None if it does."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CALL_S):
            sock = await dial(address, SocketOptions(), timeout_s=CALL_S)
            with contextlib.closing(sock):
                said = b""
                while len(said) < NONCE_NBYTES:
                    piece = await loop.sock_recv(sock, NONCE_NBYTES - len(said))
                    if not piece:
                        break
                    said += piece
    except PeerUnreachable as error:
        return error.cause[:256]
    except TimeoutError:
        return f"no answer in {CALL_S:.3g} s"
    except OSError as error:
        return (error.strerror or "the connection broke")[:256]
    return None if hmac.compare_digest(said, nonce) else "somebody else answers there"


@contextlib.asynccontextmanager
async def answering(sock: socket.socket) -> AsyncIterator[bytes]:
    """Listen on a bound socket and say a nonce to whoever connects; gives that nonce. Closes the socket."""
    nonce = secrets.token_bytes(NONCE_NBYTES)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            writer.write(nonce)
            await writer.drain()

    async with await asyncio.start_server(greet, sock=sock):
        yield nonce
