# SPDX-License-Identifier: Apache-2.0
"""One control connection, at either end: messages in, messages out, an end with a cause.

Rules: `send` never waits. What cannot be sent at once goes into a bounded outbox; a side that does not empty its
outbox in time is disconnected, because a machine must not be slowed down by the slowest listener. Every message is
decoded and validated before anybody acts on it. Nothing here knows what a message means.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from isthmus.collective.errors import CollectiveError, ConnectionLost, RemoteProtocolError
from isthmus.collective.transport import Channel
from isthmus.collective.transport.wire import FrameType
from isthmus.elastic.wire import decode, encode

_Heard = TypeVar("_Heard")

_SEND_TIMEOUT_S = 10.0
"""For one message to leave."""


class ControlConnection(Generic[_Heard]):
    """Drives a CONTROL channel until it ends.

    Args:
        channel: an open connection past its handshake; closed when `run` returns.
        decoder: of the messages that the other side may send.
        outbox_size: messages that may wait to be sent.
        silence_timeout_s: time without any frame after which the connection counts as lost.
        sign_of_life_s: who has nothing to say for so long sends an empty frame; a fraction of what the other side
            bears of silence.
    """

    def __init__(
        self,
        channel: Channel,
        decoder: msgspec.msgpack.Decoder[_Heard],
        *,
        outbox_size: int = 256,
        silence_timeout_s: float = 60.0,
        sign_of_life_s: float = 2.0,
    ) -> None:
        self._channel = channel
        self._decoder = decoder
        self._outbox: deque[bytes] = deque()
        self._outbox_size = outbox_size
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._silence_timeout_s = silence_timeout_s
        self._sign_of_life_s = sign_of_life_s
        self._ended: asyncio.Future[CollectiveError] = asyncio.get_running_loop().create_future()
        self._last_cause: str | None = None
        self._cut: asyncio.TimerHandle | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Send as soon as possible, after what was given before. Does not wait and does not fail."""
        if self._ended.done():
            return
        if len(self._outbox) >= self._outbox_size:
            self.end("outbox full: the other side does not read")
            return
        self._outbox.append(encode(message))
        self._filled.set()
        self._drained.clear()

    def end(self, cause: str) -> None:
        """Let the connection end; `run` returns soon. May be called at any time and more than once."""
        if not self._ended.done():
            self._ended.set_result(ConnectionLost(cause))
        self._drained.set()

    def finish(self, cause: str, *, within_s: float) -> None:
        """Let the connection end when all that was given to `send` is sent, or after this time. Nothing is heard."""
        if self._last_cause is None and not self._ended.done():
            self._last_cause = cause
            self._cut = asyncio.get_running_loop().call_later(within_s, self.end, cause)
            self._filled.set()

    async def run(self, heard: Callable[[_Heard], None]) -> CollectiveError:
        """Pass on every message to `heard`, in order, until the connection ends. Returns why it did.

        What `heard` raises ends the connection and is raised here.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._until_broken(self._receive_all(heard))),
                    tasks.create_task(self._until_broken(self._transmit_all())),
                ]
                try:
                    return await self._ended
                finally:
                    for pump in pumps:
                        pump.cancel()
        finally:
            if self._cut is not None:
                self._cut.cancel()
            self.end("closed here")
            self._channel.close()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all that was given to `send` is handed to the system, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()

    async def _until_broken(self, pump: Awaitable[None]) -> None:
        try:
            await pump
        except CollectiveError as error:
            if not self._ended.done():
                self._ended.set_result(error)

    async def _receive_all(self, heard: Callable[[_Heard], None]) -> None:
        while True:
            frame = await self._channel.receive(timeout_s=self._silence_timeout_s)
            if frame.type is not FrameType.CONTROL:
                raise RemoteProtocolError("not a control message")
            if not frame.payload or self._last_cause is not None:
                continue  # a sign of life, or nobody listens any more
            heard(decode(self._decoder, frame.payload))

    async def _transmit_all(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._sign_of_life_s):
                    await self._filled.wait()
            except TimeoutError:
                # The coordinator only answers, and a round may last for hours: silence must still mean something.
                await self._channel.send(FrameType.CONTROL, b"", timeout_s=_SEND_TIMEOUT_S)
            while self._outbox:
                message = self._outbox.popleft()
                await self._channel.send(FrameType.CONTROL, message, timeout_s=_SEND_TIMEOUT_S)
            self._filled.clear()
            self._drained.set()
            if self._last_cause is not None:
                self.end(self._last_cause)
