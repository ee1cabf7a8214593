# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's process does for `isthmus doctor`: it tells facts and time, moves padding, dials back.

It serves who has a valid ticket, which the gatekeeper looks at and nobody uses up. Training comes first: a transfer
begins when no exchange moves bytes, holds the caps of this node, and lasts two seconds. One asker at a time has its
transfers, a few wait, and all of them together have a budget; everybody else is told to come later.

Rules: every wait has a deadline, every queue a bound. Must not know what is made of the answers.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.types import Member, PeerId
from isthmus.collective.errors import CollectiveError, DeadlineExceeded
from isthmus.collective.transport import Channel
from isthmus.trainer.contact.admission import RunTerms
from isthmus.trainer.doctor.callback import CALL_S, CallBack
from isthmus.trainer.doctor.messages import (
    QUESTIONS,
    REPLIES,
    Busy,
    Call,
    Called,
    CalledByBoth,
    Download,
    Facts,
    FactsWanted,
    Go,
    MemberCalled,
    Moved,
    Now,
    Ping,
    Upload,
    hear,
    say,
)
from isthmus.trainer.doctor.transfer import MAX_STREAMS, bytes_between, count_padding, moved_of, send_padding

VISIT_S = 40.0
"""For all questions of one connection."""
MAX_CONNECTIONS = 32
_MAX_WAITING = 16
"""Connections that wait for their turn: two askers."""
_TURN_S = 15.0
_TIMEOUT_S = 5.0
_DRAIN_S = 1.0
_MEMBERS_S = 9.0
"""For finding a member that dials, and what it says."""
_MAX_ASKED = 3
_STREAM_RATE, _STREAM_BURST = 36 / 60, 108
"""Transfers of one stream: six askers, with nine streams each way, then two a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the service needs of its process.

    Attributes:
        me: who this process is.
        terms: of the run.
        version: of the program.
        now_s: the wall clock in Unix seconds.
        members: of the run, as the coordinator knows them.
        dial: opens a DIAL_BACK connection to a member.
        quiet: returns when no exchange moves bytes here, or after a while.
        upload: what this node may send, shared with its exchanges; None: no bound.
        download: what it may receive.
    """

    me: PeerId
    terms: RunTerms
    version: str
    now_s: Callable[[], float]
    members: Callable[[], tuple[Member, ...]]
    dial: Callable[[Member], Awaitable[Channel]]
    quiet: Callable[[], Awaitable[None]]
    upload: TokenBucket | None
    download: TokenBucket | None


class DoctorService:
    """See the module."""

    def __init__(self, surroundings: Surroundings, call_back: CallBack) -> None:
        self._here = surroundings
        self._call_back = call_back
        self._turns = _Turns()
        self._num_connections = 0

    async def serve(self, channel: Channel) -> None:
        """Answer one connection until it ends. The route for DOCTOR connections of the listener.

        Raises:
            CollectiveError: the other side said nonsense, or went away.
        """
        if self._num_connections >= MAX_CONNECTIONS:
            await say(channel, Busy(), timeout_s=_TIMEOUT_S)
            return
        self._num_connections += 1
        try:
            async with asyncio.timeout(VISIT_S):
                while True:
                    await self._answer(channel)
        except TimeoutError as error:
            raise DeadlineExceeded("a visit of the doctor's", VISIT_S) from error
        finally:
            self._num_connections -= 1

    async def _answer(self, channel: Channel) -> None:
        match await hear(channel, QUESTIONS, timeout_s=VISIT_S):
            case FactsWanted():
                await say(channel, self._facts(channel), timeout_s=_TIMEOUT_S)
            case Ping():
                await say(channel, Now(self._here.now_s()), timeout_s=_TIMEOUT_S)
            case Upload():
                await self._transfer(channel, self._receive)
            case Download(most_bytes_per_s=most):
                await self._transfer(channel, partial(self._send, most_bytes_per_s=most))
            case Call() as call:
                await say(channel, await self._call(call, channel.host), timeout_s=_TIMEOUT_S)

    def _facts(self, channel: Channel) -> Facts:
        here = self._here
        return Facts(
            version=here.version,
            manifest=here.terms.manifest,
            data_digest=here.terms.data_digest,
            seen_from=channel.host,
            num_members=len(here.members()),
        )

    # -------------------------------------------------------------------------------- transfers

    async def _transfer(self, channel: Channel, move: Callable[[Channel], Awaitable[Moved]]) -> None:
        try:
            async with self._turns.take(channel.hello.peer_id):
                await self._here.quiet()
                await say(channel, Go(), timeout_s=_TIMEOUT_S)
                moved = await move(channel)
        except _NotNow:
            await say(channel, Busy(), timeout_s=_TIMEOUT_S)
            return
        await say(channel, moved, timeout_s=_TIMEOUT_S)
        # Padding may still come. To close with bytes unread would destroy the answer on its way.
        await count_padding(channel, cap=self._here.download, patience_s=_DRAIN_S)

    async def _receive(self, channel: Channel) -> Moved:
        windows, _ = await count_padding(channel, cap=self._here.download, patience_s=_TIMEOUT_S)
        return moved_of(windows)

    async def _send(self, channel: Channel, *, most_bytes_per_s: float | None) -> Moved:
        before = channel.tcp_info
        await send_padding(channel, cap=self._here.upload, most_bytes_per_s=most_bytes_per_s)
        sent, resent = bytes_between(before, channel.tcp_info)
        return Moved(sent_nbytes=sent, resent_nbytes=resent)

    # -------------------------------------------------------------------------------- dialling back

    async def _call(self, call: Call, asker: str) -> CalledByBoth | Busy:
        others = [member for member in self._here.members() if member.peer_id != self._here.me]
        async with asyncio.TaskGroup() as tasks:
            own = tasks.create_task(self._call_back.call(call.addresses, call.nonce, asker=asker))
            by_member = tasks.create_task(self._call_by_member(call, others))
        called = own.result()
        if called is None:
            return Busy()
        return CalledByBoth(coordinator=called, member=by_member.result(), num_others=len(others))

    async def _call_by_member(self, call: Call, others: list[Member]) -> MemberCalled | None:
        """The first of a few members that can be asked. Members that only call are asked in vain."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MEMBERS_S):
                for member in random.sample(others, min(_MAX_ASKED, len(others))):
                    with contextlib.suppress(CollectiveError):
                        channel = await self._here.dial(member)
                        with contextlib.closing(channel):
                            await say(channel, call, timeout_s=_TIMEOUT_S)
                            answer = await hear(channel, REPLIES, timeout_s=CALL_S + _TIMEOUT_S)
                        if isinstance(answer, Called):
                            return MemberCalled(
                                peer_id=member.peer_id, address=member.address, attempts=answer.attempts
                            )
        return None


class _NotNow(Exception):
    """Too many wait, the budget is spent, or the turn did not come."""


class _Turns:
    """Who may load the line: one asker with a few streams; others wait."""

    def __init__(self) -> None:
        self._holder: PeerId | None = None
        self._num_streams = 0
        self._num_waiting = 0
        self._freed = asyncio.Event()
        self._budget = TokenBucket(_STREAM_RATE, _STREAM_BURST)

    @contextlib.asynccontextmanager
    async def take(self, asker: PeerId) -> AsyncIterator[None]:
        """Hold the turn. Raises _NotNow."""
        await self._wait(asker)
        now = asyncio.get_running_loop().time()
        if self._budget.delay_s(now, 1) > 0:
            raise _NotNow
        self._budget.take(now, 1)
        self._holder = asker
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._holder = None
            self._freed.set()
            self._freed = asyncio.Event()

    def _has_room_for(self, asker: PeerId) -> bool:
        return self._holder is None or (self._holder == asker and self._num_streams < MAX_STREAMS)

    async def _wait(self, asker: PeerId) -> None:
        if self._has_room_for(asker):
            return
        if self._num_waiting >= _MAX_WAITING:
            raise _NotNow
        self._num_waiting += 1
        try:
            async with asyncio.timeout(_TURN_S):
                while not self._has_room_for(asker):
                    await self._freed.wait()
        except TimeoutError as error:
            raise _NotNow from error
        finally:
            self._num_waiting -= 1
