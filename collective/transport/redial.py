# SPDX-License-Identifier: Apache-2.0
"""Making the missing streams of one bundle anew: by its dialler. The other side looks whether anybody is there, and
dials as well if no call has come for a while: its peer may be behind a NAT that only it can be called through.

Rules: a repair is somebody's task and ends with it. One at a time; there is none in the background. Where two calls
cross, that of the smaller id stays, on both sides: the other one is closed by its caller, or replaced. The candidate
that led there last is dialled first, alone; the peer is taken for gone only when all of them refuse.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus.collective.core.address import candidates_of
from isthmus.collective.core.types import PeerRef
from isthmus.collective.errors import CollectiveError, PeerUnreachable
from isthmus.collective.transport.dialling import knock, open_connection
from isthmus.collective.transport.hello import Hello
from isthmus.collective.transport.security import Security
from isthmus.collective.transport.sockets import SocketOptions

if TYPE_CHECKING:
    from isthmus.collective.transport.bundle import Bundle

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_DIAL_TIMEOUT_S = 5.0
_WAIT_FOR_CALL_S = 1.5
"""How long the side that waits leaves it to the other one: a first call with TLS over the longest path takes less."""


class Redial:
    """See the module.

    Args:
        bundle: whose streams; it takes them by `attach`.
        hello: see Bundle.
        options: see Bundle.
        security: see Bundle.
    """

    def __init__(
        self,
        bundle: "Bundle",
        *,
        hello: Callable[[PeerRef, int, int], Hello],
        options: SocketOptions,
        security: Security | None,
    ) -> None:
        self.is_refused = False
        """Whether it was refused wherever it may be: nobody listens there."""
        self.cause = ""
        """Why the last attempt failed."""
        self.path: str | None = None
        """The candidate that led there last; None as long as one is dialled in vain."""
        self._bundle = bundle
        self._hello = hello
        self._options = options
        self._security = security
        self._is_repairing = False
        self._has_looked = False
        self._waits_since: float | None = None

    def found(self) -> None:
        """A stream is up: the peer is there."""
        self.is_refused = self._has_looked = False
        self._waits_since = None

    async def repair(self) -> None:
        """See Bundle.repair."""
        bundle = self._bundle
        if self._is_repairing or bundle.closed or bundle.address is None or not self._has_something_to_do():
            return
        self._is_repairing = True
        self.is_refused = False
        pause_s = _FIRST_PAUSE_S
        try:
            while not bundle.closed and not bundle.is_whole:
                try:
                    if not bundle.is_dialler and not self._has_waited():
                        await self._look(bundle.address)
                        return
                    await self._dial_missing(bundle.address)
                except PeerUnreachable as error:
                    self.is_refused, self.cause = error.is_refused, error.cause
                    if self.is_refused and bundle.was_connected:
                        return
                    log.debug("dial_failed peer_id=%s cause=%s", bundle.peer_id, error.cause)
                except CollectiveError as error:
                    self.cause = str(error)
                    log.info("handshake_failed peer_id=%s cause=%s", bundle.peer_id, error)
                if not bundle.is_whole:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._is_repairing = False

    def _has_something_to_do(self) -> bool:
        return self._bundle.is_dialler or not self._has_looked or self._has_waited()

    def _has_waited(self) -> bool:
        """Whether the side that should be called has waited in vain."""
        if self._bundle.is_connected:
            return False
        now = asyncio.get_running_loop().time()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since >= _WAIT_FOR_CALL_S

    async def _dial_missing(self, address: str) -> None:
        """Over the candidate that led there last, or else over whichever does now.

        It is forgotten until it answers again, also if this is cancelled while it is silent. Found before: it was
        dialled alone for as long as the address named it. When it refused, or somebody else was there, the peer was
        taken for dead in every view, though another candidate led to it.

        Raises:
            CollectiveError: none leads there.
        """
        path, self.path = self.path, None
        if path in candidates_of(address):
            await self._dial_over(path, address)
        if self.path is None and self._bundle.missing_streams:
            await self._dial(address, self._bundle.missing_streams[0])  # finds the way for the others
        if self.path is not None:
            await self._dial_over(self.path, address)

    async def _dial_over(self, path: str, address: str) -> None:
        """Dial all that are missing over one candidate.

        Raises:
            CollectiveError: it does not lead there, and is the only one.
        """
        async with asyncio.TaskGroup() as group:
            dials = [group.create_task(self._try_dial(path, stream)) for stream in self._bundle.missing_streams]
        for error in filter(None, (finished.result() for finished in dials)):
            if path == address:
                raise error
            self.cause = str(error)
            log.debug("path_failed peer_id=%s path=%s cause=%s", self._bundle.peer_id, path, error)

    async def _try_dial(self, address: str, stream: int) -> CollectiveError | None:
        """Dial one stream. An error is returned, so that it does not take the other dials with it."""
        try:
            await self._dial(address, stream)
        except CollectiveError as error:
            return error
        return None

    async def _dial(self, address: str, stream: int) -> None:
        bundle = self._bundle
        own_hello = self._hello(bundle.peer, stream, bundle.num_streams)
        sock, reply, path = await open_connection(
            address,
            own_hello,
            timeout_s=_DIAL_TIMEOUT_S,
            options=self._options,
            security=self._security,
            expect=bundle.peer.peer_id,
        )
        if reply.ref != bundle.peer:
            sock.close()
            raise PeerUnreachable(address, "another start of the peer answers there")
        self.path = path
        # Found before: where two calls crossed, both callers closed theirs, waited equally long, and crossed again.
        has_crossed = bundle.is_connected and not bundle.is_dialler
        if bundle.closed or (has_crossed and own_hello.peer_id > bundle.peer_id):
            sock.close()
            return
        bundle.is_dialler = True
        bundle.attach(sock, stream)

    async def _look(self, address: str) -> None:
        """As the side that waits: find out at once if nobody listens there any more."""
        await knock(address, self._options, timeout_s=_DIAL_TIMEOUT_S)
        self._has_looked = True
