# SPDX-License-Identifier: Apache-2.0
"""The doctor's side of the conversation with a run: finds the coordinator, measures the path to it, has itself called.

Nothing is remembered: who asks has a key for as long as it asks. Every question has a deadline.

Errors: `Unreached` names what happened at each of the coordinator's addresses; `CollectiveError` where a connection
breaks later; `TurnRefused` where the coordinator has no time.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.collective.errors import (
    CollectiveError,
    ConnectionLost,
    DeadlineExceeded,
    HandshakeRefused,
    RemoteProtocolError,
)
from isthmus.collective.transport import Channel, Hello, Purpose, TicketSecurity, connect
from isthmus.collective.transport.certificates import peer_id_of_key
from isthmus.collective.transport.link import Caps
from isthmus.collective.transport.racing import race
from isthmus.collective.transport.security import wall_s
from isthmus.elastic.wire import decode
from isthmus.trainer.contact.identity import PeerIdentity
from isthmus.trainer.contact.joining import stranger_hello
from isthmus.trainer.contact.ticket import Ticket
from isthmus.trainer.doctor.messages import (
    REPLIES,
    Busy,
    Call,
    CalledByBoth,
    Download,
    Facts,
    FactsWanted,
    Go,
    Moved,
    Nonce,
    Now,
    Ping,
    Question,
    Reply,
    Upload,
    hear,
    say,
)
from isthmus.trainer.doctor.transfer import (
    TRANSFER_S,
    Windows,
    bytes_between,
    count_padding,
    rate_of,
    send_padding,
    windows_of,
)

_R = TypeVar("_R", bound=Reply)

REACH_S = 5.0
"""For finding a coordinator at all of its addresses. People wait for the answer."""
_HEAD_START_S = 0.5
_TIMEOUT_S = 6.0
_TURN_S = 25.0
"""For a turn to measure: the coordinator lets a few askers wait."""
_CALLS_S = 15.0
_LAST_WORD_S = 1.5
_NUM_PINGS = 8


class Unreached(Exception):
    """No coordinator answers. `causes` has what happened at each address."""

    def __init__(self, causes: Mapping[str, CollectiveError]) -> None:
        super().__init__(str(dict(causes)))
        self.causes = causes


class TurnRefused(Exception):
    """The coordinator has no time for this question now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Pings: the shortest and the longest round trip, and how far the clock there is ahead of ours. Seconds."""

    shortest_s: float
    longest_s: float
    ahead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a path carries one way. Of `sent_nbytes` that arrived `resent_nbytes` were sent again; 0 if not known."""

    bytes_per_s: float
    num_streams: int
    sent_nbytes: int
    resent_nbytes: int
    path_mtu: int | None = None


class Path:
    """The way to a coordinator that has answered. Closed by whoever has opened it (`reach`).

    Attributes:
        address: where it answers.
        caps: what this node may send and receive.
    """

    def __init__(self, channel: Channel, hello: Hello, security: TicketSecurity | None, caps: Caps) -> None:
        self.address = channel.address
        self.caps = caps
        self._channel = channel
        self._hello = hello
        self._security = security

    async def facts(self) -> Facts:
        """What run this is."""
        return await _expect(self._channel, Facts, FactsWanted(), timeout_s=_TIMEOUT_S)

    async def trip(self) -> Trip:
        """Ping a few times."""
        trips: list[tuple[float, float]] = []
        for _ in range(_NUM_PINGS):
            left_s, began_s = wall_s(), time.monotonic()
            now = await _expect(self._channel, Now, Ping(), timeout_s=_TIMEOUT_S)
            trip_s = time.monotonic() - began_s
            trips.append((trip_s, now.wall_s - (left_s + trip_s / 2)))
        (shortest_s, ahead_s), (longest_s, _) = min(trips), max(trips)
        return Trip(shortest_s=shortest_s, longest_s=longest_s, ahead_s=ahead_s)

    async def download(self, num_streams: int, *, most_bytes_per_s: float | None = None) -> Transfer:
        """Let the coordinator send for two seconds."""
        streams = self._streams(Download(most_bytes_per_s), num_streams)
        async with streams as channels, asyncio.TaskGroup() as tasks:
            counts = [tasks.create_task(self._count(channel)) for channel in channels]
        results = [count.result() for count in counts]
        return Transfer(
            bytes_per_s=rate_of(windows for windows, _ in results),
            num_streams=num_streams,
            sent_nbytes=sum(moved.sent_nbytes for _, moved in results),
            resent_nbytes=sum(moved.resent_nbytes for _, moved in results),
        )

    async def upload(self, num_streams: int, *, most_bytes_per_s: float | None = None) -> Transfer:
        """Send for two seconds."""
        async with self._streams(Upload(), num_streams) as channels, asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._send(channel, most_bytes_per_s)) for channel in channels]
        results = [one.result() for one in sent]
        return Transfer(
            bytes_per_s=rate_of(result.windows for result in results),
            num_streams=num_streams,
            sent_nbytes=sum(result.sent_nbytes for result in results),
            resent_nbytes=sum(result.resent_nbytes for result in results),
            path_mtu=results[0].path_mtu,
        )

    async def called_at(self, addresses: Sequence[str], nonce: Nonce) -> CalledByBoth:
        """Have the coordinator and a member dial a listener of ours, which says the nonce."""
        with contextlib.closing(await self._open()) as channel:
            return await _expect(channel, CalledByBoth, Call(tuple(addresses), nonce), timeout_s=_CALLS_S)

    async def doubt_member(self, address: str, peer_id: PeerId) -> str | None:
        """Why a member cannot be reached from here; None if it can."""
        try:
            channel = await connect(address, self._hello, timeout_s=REACH_S, security=self._security, expect=peer_id)
        except HandshakeRefused:
            return None  # it is there, and serves coordinators only
        except CollectiveError as error:
            return str(error)
        channel.close()
        return None

    @contextlib.asynccontextmanager
    async def _streams(self, question: Question, num_streams: int) -> AsyncIterator[tuple[Channel, ...]]:
        """So many connections, each with its turn."""
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.TaskGroup() as tasks:
                opening = [tasks.create_task(self._open()) for _ in range(num_streams)]
            channels = tuple(stack.enter_context(contextlib.closing(opened.result())) for opened in opening)
            async with asyncio.TaskGroup() as tasks:
                for channel in channels:
                    tasks.create_task(_expect(channel, Go, question, timeout_s=_TURN_S))
            yield channels

    async def _open(self) -> Channel:
        return await connect(self.address, self._hello, timeout_s=_TIMEOUT_S, security=self._security)

    async def _count(self, channel: Channel) -> tuple[Windows, Moved]:
        windows, last = await count_padding(
            channel, cap=self.caps.download, patience_s=_TIMEOUT_S, last_word_s=_LAST_WORD_S
        )
        if last is None:
            return windows, Moved()
        moved = decode(REPLIES, last.payload)
        return windows, moved if isinstance(moved, Moved) else Moved()

    async def _send(self, channel: Channel, most_bytes_per_s: float | None) -> "_Sent":
        before = channel.tcp_info
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._pour(channel, most_bytes_per_s))
            moved = await hear(channel, REPLIES, timeout_s=2 * TRANSFER_S + _TIMEOUT_S)
            sent, resent = bytes_between(before, channel.tcp_info)
            path_mtu = channel.path_mtu
            sending.cancel()
        if not isinstance(moved, Moved):
            raise RemoteProtocolError("another answer than was asked for")
        return _Sent(windows_of(moved), sent, resent, path_mtu)

    async def _pour(self, channel: Channel, most_bytes_per_s: float | None) -> None:
        with contextlib.suppress(ConnectionLost, DeadlineExceeded):  # it has had enough, or the line is slow
            await send_padding(channel, cap=self.caps.upload, most_bytes_per_s=most_bytes_per_s)


class _Sent(NamedTuple):
    windows: Windows
    sent_nbytes: int
    resent_nbytes: int
    path_mtu: int | None


@contextlib.asynccontextmanager
async def reach(ticket: Ticket, security: TicketSecurity | None, caps: Caps) -> AsyncIterator[Path]:
    """Find a coordinator of the ticket's run.

    Raises:
        Unreached: none answers.
    """
    hello = stranger_hello(_nobody(), ticket.run_id, ticket.token, purpose=Purpose.DOCTOR)
    causes: dict[str, CollectiveError] = {}
    found = await race(
        ticket.addresses,
        lambda address: connect(address, hello, timeout_s=REACH_S, security=security),
        head_start_s=_HEAD_START_S,
        let_go=lambda late: late.close(),
        causes=causes,
    )
    if found is None:
        raise Unreached(causes)
    with contextlib.closing(found[1]) as channel:
        yield Path(channel, hello, security, caps)


def _nobody() -> PeerIdentity:
    key = Ed25519PrivateKey.generate()
    peer_id = peer_id_of_key(key.public_key().public_bytes_raw())
    return PeerIdentity(peer_id=peer_id, incarnation=Incarnation(1), key=key)


async def _expect(channel: Channel, kind: type[_R], question: Question, *, timeout_s: float) -> _R:
    await say(channel, question, timeout_s=timeout_s)
    reply = await hear(channel, REPLIES, timeout_s=timeout_s)
    if isinstance(reply, Busy):
        raise TurnRefused
    if not isinstance(reply, kind):
        raise RemoteProtocolError("another answer than was asked for")
    return reply
