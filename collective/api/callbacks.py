# SPDX-License-Identifier: Apache-2.0
"""Connections that the other side opens because we cannot: a peer behind a NAT calls, and cannot be called.

Whoever wants a connection to such a peer asks for it over the bulk link between the two, and the peer dials back. From
then on it is a STATE connection whose learner is the one that was called.

Rules: only a member of the run can ask, over a link that has proved who it is; what is dialled is the address that the
coordinator has told of it, so nobody can have a third party called. At most `MAX_CALLS` at a time on either side; more
are dropped, and whoever asked finds that out by its deadline.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from isthmus.collective.api.communicator import Communicator
from isthmus.collective.core.types import Member, PeerRef
from isthmus.collective.errors import CollectiveError, PeerUnreachable
from isthmus.collective.transport.channel import Channel

log = logging.getLogger(__name__)

MAX_CALLS = 8

Dial = Callable[[str, PeerRef], Awaitable[Channel]]
"""Opens a CALLED connection to this peer at an address, within its own deadline. Raises CollectiveError."""


class Callbacks:
    """Asks others to call, takes their calls, and calls who asks.

    Args:
        communicator: has the links.
        dial: calls back.
        serve: what a connection that we have opened is for; runs until it ends.
    """

    def __init__(self, communicator: Communicator, *, dial: Dial, serve: Callable[[Channel], Awaitable[None]]) -> None:
        self._communicator = communicator
        self._dial = dial
        self._serve = serve
        self._waiting: dict[PeerRef, deque[asyncio.Future[Channel]]] = {}
        self._asked: asyncio.Queue[tuple[PeerRef, str]] = asyncio.Queue(MAX_CALLS)
        self._num_calls = 0
        communicator.on_call_wanted(self._on_wanted)

    async def open(self, member: Member, *, timeout_s: float) -> Channel:
        """Have this member call us.

        Raises:
            PeerUnreachable: there is no link with it now, or it does not call.
        """
        if not self._communicator.ask_for_call(member.ref):
            raise PeerUnreachable(
                member.address, "it cannot be dialled, and there is no link over which to ask it to call"
            )
        future: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(member.ref, deque())
        waiting.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise PeerUnreachable(member.address, f"it has not called back within {timeout_s:g} s") from error
        finally:
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(member.ref, None)

    async def take(self, channel: Channel) -> None:
        """A peer calls: for whoever has asked for that. The route for CALLED connections of the listener."""
        waiting = self._waiting.get(channel.hello.ref, deque())
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(channel)
                await channel.wait_closed()
                return

    async def run(self) -> None:
        """Call whoever asks, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                ref, address = await self._asked.get()
                tasks.create_task(self._call(ref, address))

    def _on_wanted(self, ref: PeerRef, address: str) -> None:
        if self._num_calls + self._asked.qsize() < MAX_CALLS:
            self._asked.put_nowait((ref, address))

    async def _call(self, ref: PeerRef, address: str) -> None:
        self._num_calls += 1
        try:
            await self._serve(await self._dial(address, ref))
        except CollectiveError as error:
            log.debug("call_ended peer_id=%s cause=%s", ref.peer_id, error)
        except Exception:  # a task root, as in the listener: found before, a fault of one call ended the peer
            log.exception("call_failed peer_id=%s", ref.peer_id)
        finally:
            self._num_calls -= 1
