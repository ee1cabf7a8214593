# SPDX-License-Identifier: Apache-2.0
"""Serving the shared state to learners, and the run's text to joiners, while training goes on.

Rules: the members never wait for a learner. A snapshot is pinned, not copied, and its digests were made when its step
was committed; a learner that stops reading only fills its own connection's buffers and is cut off at its deadline.
A pin is always released, however the connection ends. At most `max_connections` are answered at once; others are told
so. Of one learner only a few count, and are answered: it cannot take the places of all. Nor can several that open
connections and ask nothing: where all places are taken, who asks takes that of a connection that stands idle.
Exchanges come first: while their bytes move here, or use up the cap on the upload, chunks of a snapshot wait. Where
exchanges never pause (streaming, small models), all learners together still get a tenth of the time: a piece waits
nine times as long as the one before it took, and `TURN_S` at most, so that a learner can tell a busy donor from a
dead one. Commits wait for no exchange: whoever asks for one may be the very member that it waits for. A text may take
hours, so those who read one leave half of the connections to learners. What comes from the disk, texts and stored
results, is read by a thread, in bounded pieces. What the bytes mean is not known here.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.types import Instant, OuterStep, PeerId
from isthmus.collective.errors import ConnectionLost, RemoteProtocolError
from isthmus.collective.transport import Channel
from isthmus.collective.transport.wire import FrameType
from isthmus.elastic.core.messages import Digest
from isthmus.elastic.donor.commit_log import CommitLog, StoredResult
from isthmus.elastic.state.replica import CommitEntry, Pinned, PrivateState, Replica, SharedText
from isthmus.elastic.state.wire import (
    MAX_STOCK,
    PIECE_NBYTES,
    REQUESTS,
    ChunkMap,
    ChunkRequest,
    CommitHeader,
    CommitRequest,
    ManifestRequest,
    Pace,
    PrivateRequest,
    Refusal,
    StateRequest,
    Stock,
    StockRequest,
    TextOffer,
    TextRequest,
)
from isthmus.elastic.wire import decode, encode

_log = logging.getLogger(__name__)

TURN_S = 2.0
"""What a piece waits for exchanges at most. Far less than a learner's patience."""

WAITS_PER_PIECE = 9
"""A piece waits for exchanges so many times as long as the piece before it was under way."""

_LOOK_S = 0.01
_QUIET_S = 0.05
"""An exchange that has moved nothing for so long is over, or waits for somebody."""
_MAX_OF_ONE_LEARNER = 4
"""It uses up to two at once, and two of a line that broke may not have ended yet."""
_USED_BY_ONE_LEARNER = 2
_IDLE_S = 1.0
"""Who has asked nothing for so long makes way: an honest learner asks at once, but for round trips and hashing."""
_REFUSAL_TIMEOUT_S = 10.0
_READ_NBYTES = 4 * PIECE_NBYTES
"""Of a stored result in memory at once."""


class Donor:
    """Answers the questions of learners from a replica and a commit log.

    Args:
        replica: whose held state is pinned.
        commit_log: the newest commits.
        pace: how long a learner may take to accept an answer.
        max_connections: how many are answered at once; each may hold a pin, and a learner uses up to two.
        idle_timeout_s: how long a learner may ask nothing.
        upload: what this node may send; shared with its exchanges.
        exchanged: a number that grows with every byte that exchanges move here.
        private: this peer's own state, for those that may have it.
        text: what the run trains on; None: it cannot be had here.
    """

    def __init__(
        self,
        replica: Replica,
        commit_log: CommitLog,
        *,
        pace: Pace | None = None,
        max_connections: int = 8,
        idle_timeout_s: float = 120.0,
        upload: TokenBucket | None = None,
        exchanged: Callable[[], int] = lambda: 0,
        private: PrivateState | None = None,
        text: SharedText | None = None,
    ) -> None:
        self._replica = replica
        self._private = private
        self._text = text
        self._commit_log = commit_log
        self._pace = pace or Pace()
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._upload = upload
        self._exchanged = exchanged
        self._exchanged_before = exchanged()
        self._moved_at = -math.inf
        self._turn = asyncio.Lock()
        self._sessions: dict[_Session, None] = {}  # in the order in which they came
        self.bytes_served = 0
        """Bytes of chunks, results and text sent since the start."""

    async def serve(self, channel: Channel) -> None:
        """Answer one learner until it goes. The route for STATE connections of the listener.

        Raises:
            CollectiveError: always, in the end: that is how a connection ends. The pin is released before.
        """
        session = _Session(self, channel)
        self._sessions[session] = None
        try:
            await session.run()
        finally:
            self._sessions.pop(session, None)  # unless it has made way
            session.release()
            channel.close()

    async def room_for(self, nbytes: int, *, is_urgent: bool = False, piece_s: float = math.inf) -> None:
        """Wait until so many bytes may go; under a cap, one learner after the other.

        Args:
            nbytes: of this piece.
            is_urgent: it waits for no exchange.
            piece_s: how long the learner's last piece was under way.
        """
        cap, clock = self._upload, asyncio.get_running_loop().time
        since = clock()
        if cap is not None:
            piece_s = max(piece_s, nbytes / cap.rate)
        patience_s = min(TURN_S, WAITS_PER_PIECE * piece_s * max(1, self.num_connections))
        while not is_urgent and self._is_exchanging(clock()) and clock() - since < patience_s:  # noqa: ASYNC110
            await asyncio.sleep(min(_LOOK_S, patience_s))
        if cap is None:
            return
        async with self._turn:
            # Once its turn is up it needs no room any more, only that the piece before is paid for.
            while delay_s := cap.delay_s(clock(), nbytes if clock() - since < patience_s else 0):  # noqa: ASYNC110
                await asyncio.sleep(min(delay_s, TURN_S))
            cap.take(clock(), nbytes)

    def _is_exchanging(self, now: Instant) -> bool:
        moved = self._exchanged()
        if moved != self._exchanged_before:
            self._exchanged_before, self._moved_at = moved, now
        return now - self._moved_at < _QUIET_S

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._sessions)

    def fetches(self) -> dict[PeerId, tuple[int, int]]:
        """Bytes of a snapshot that were sent to each learner, and bytes of the whole state."""
        result: dict[PeerId, tuple[int, int]] = {}
        for session in self._sessions:
            if session.snapshot_nbytes:
                sent_nbytes, _ = result.get(session.peer_id, (0, 0))
                result[session.peer_id] = sent_nbytes + session.sent_nbytes, session.snapshot_nbytes
        return result

    def has_no_place_for(self, session: "_Session") -> bool:
        """Whether one connection more than allowed is open, of all learners or of this one. The idle make way first."""
        own = [other for other in self._sessions if other.peer_id == session.peer_id]
        if session not in self._sessions or own.index(session) >= _MAX_OF_ONE_LEARNER:
            return True
        while self._num_places() > self._max_connections:
            idle = self._most_idle(session)
            if idle is None:
                return True
            del self._sessions[idle]
            idle.make_way()
        return False

    def _num_places(self) -> int:
        counts = Counter(session.peer_id for session in self._sessions)
        return sum(min(count, _MAX_OF_ONE_LEARNER) for count in counts.values())

    def _most_idle(self, newcomer: "_Session") -> "_Session | None":
        """Whose place is needed least: of the learner with most connections, the one that has been idle longest.

        One that is between two questions keeps its place, unless its learner has more than an honest one uses.
        """
        counts = Counter(session.peer_id for session in self._sessions)
        now = asyncio.get_running_loop().time()
        idle_s = {
            session: now - session.idle_since
            for session in self._sessions
            if session is not newcomer and session.idle_since is not None
        }
        may_go = [
            session
            for session, seconds in idle_s.items()
            if seconds >= _IDLE_S or counts[session.peer_id] > _USED_BY_ONE_LEARNER
        ]
        return max(may_go, key=lambda session: (counts[session.peer_id], idle_s[session]), default=None)

    @property
    def is_full_of_readers(self) -> bool:
        """Whether as many read the text as may."""
        return 2 * sum(session.reads_text for session in self._sessions) >= self._max_connections


async def refuse(channel: Channel, reason: str) -> None:
    """Answer one question of a learner, where there is no donor.

    Raises:
        CollectiveError: it asked nothing, or did not listen.
    """
    try:
        await channel.receive(timeout_s=_REFUSAL_TIMEOUT_S)
        await channel.send(FrameType.STATE_ERROR, encode(Refusal(reason)), timeout_s=_REFUSAL_TIMEOUT_S)
    finally:
        channel.close()


class _Session:
    """One learner's connection: its pin and its questions."""

    def __init__(self, donor: Donor, channel: Channel) -> None:
        self._donor = donor
        self._channel = channel
        self.peer_id = channel.hello.ref.peer_id
        self.sent_nbytes = 0
        """Of the snapshot that this learner was offered last."""
        self.snapshot_nbytes = 0
        self.idle_since: Instant | None = asyncio.get_running_loop().time()
        """Since when all its questions are answered; None while one is not."""
        self._text: SharedText | None = None
        """Whose chunks are asked for."""
        self._piece_s = 0.0
        self._pinned: Pinned | None = None
        self._chunks: ChunkMap | None = None

    async def run(self) -> None:
        """Answer questions in their order, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            self.idle_since = clock()
            frame = await self._channel.receive(timeout_s=self._donor._idle_timeout_s)
            self.idle_since = None
            if frame.type is not FrameType.STATE_REQUEST:
                raise RemoteProtocolError("not a state request")
            request = decode(REQUESTS, frame.payload)
            if self._donor.has_no_place_for(self):
                await self._refuse("this peer serves as many learners as it may", is_busy=True)
            else:
                await self._answer(request)

    def make_way(self) -> None:
        """End: somebody else has the place."""
        self._channel.close()

    def release(self) -> None:
        """Give the pin up, if there is one."""
        if self._pinned is not None:
            self._pinned.release()
        self._pinned = self._chunks = self._text = None

    @property
    def reads_text(self) -> bool:
        """Whether it reads a text, or a part of one."""
        return self._text is not None

    async def _answer(self, request: StateRequest) -> None:
        match request:
            case ManifestRequest():
                await self._describe()
            case PrivateRequest():
                await self._describe_private()
            case TextRequest(digest=digest):
                await self._describe_text(digest)
            case ChunkRequest(index=index):
                await self._send_chunk(index)
            case CommitRequest(outer_step=outer_step):
                self.release()  # who replays needs no snapshot: a pin would cost us a copy of the state
                await self._send_commit(outer_step)
            case StockRequest(first=first):
                sizes = self._donor._commit_log.sizes_from(first)[:MAX_STOCK]
                await self._send(FrameType.STATE_HEADER, encode(Stock(sizes)))

    async def _describe(self) -> None:
        self.release()
        if self._donor._replica.held() is None:
            await self._refuse("this peer holds no state")
            return
        pinned = self._donor._replica.pin()
        self.sent_nbytes, self.snapshot_nbytes = 0, pinned.manifest.nbytes
        await self._offer(pinned)

    async def _describe_private(self) -> None:
        self.release()
        private = self._donor._private
        lent = None if private is None else await private.lend()
        if lent is None:
            await self._refuse("this peer has no state of its own to give")
        else:
            await self._offer(lent)

    async def _describe_text(self, digest: Digest) -> None:
        self.release()
        whole = self._donor._text
        if whole is None:
            await self._refuse("this peer has no text to give")
        elif self._donor.is_full_of_readers:
            await self._refuse("this peer gives the text to as many as it may", is_busy=True)
        elif (text := await asyncio.to_thread(whole.part, digest)) is None:
            await self._refuse("this peer does not have it")
        else:
            self._text, self._chunks = text, ChunkMap(text.manifest)
            await self._send(FrameType.STATE_HEADER, encode(TextOffer(text.manifest, text.description)))

    async def _offer(self, pinned: Pinned) -> None:
        self._pinned, self._chunks = pinned, ChunkMap(pinned.manifest)
        await self._send(FrameType.STATE_HEADER, encode(pinned.manifest))

    async def _send_chunk(self, index: int) -> None:
        if self._chunks is None:
            raise RemoteProtocolError("chunk asked for before the manifest")
        place = self._chunks.place(index)
        if self._pinned is not None:
            await self._send_pieces(index, self._pinned.chunk(*place))
        elif (text := self._text) is not None:
            await self._send_pieces(index, await asyncio.to_thread(text.read, *place))

    async def _send_commit(self, outer_step: OuterStep) -> None:
        log = self._donor._commit_log
        kept = log.get(outer_step)
        if kept is None:
            await self._refuse(f"commits {log.span.start} to {log.span.stop - 1} are kept, not {outer_step}")
        elif isinstance(kept, CommitEntry):
            await self._send(FrameType.STATE_HEADER, encode(CommitHeader.of(kept)))
            for number, chunk in enumerate(kept.chunks):
                await self._send_pieces(number, memoryview(chunk.data), is_urgent=True)
        else:
            await self._send_stored(kept)

    async def _send_stored(self, stored: StoredResult) -> None:
        try:
            result = stored.open()
        except OSError as error:
            self._offer_no_more(stored, error)
            await self._refuse(f"commit {stored.outer_step} cannot be read any more")
            return
        with contextlib.closing(result):
            try:
                header = await asyncio.to_thread(result.read_header)
                await self._send(FrameType.STATE_HEADER, encode(header))
                for number, (_, nbytes) in enumerate(header.chunks):
                    for start in range(0, nbytes, _READ_NBYTES):
                        data = await asyncio.to_thread(result.read, min(_READ_NBYTES, nbytes - start))
                        await self._send_pieces(number, memoryview(data), is_urgent=True)
            except OSError as error:  # the network's are none
                self._offer_no_more(stored, error)
                raise ConnectionLost("a stored result cannot be read") from error

    def _offer_no_more(self, stored: StoredResult, error: OSError) -> None:
        """Nor what is older: without this one it leads nowhere."""
        _log.warning("result_unreadable outer_step=%d cause=%r", stored.outer_step, str(error))
        self._donor._commit_log.forget_before(stored.outer_step + 1)

    async def _send_pieces(self, number: int, data: memoryview, *, is_urgent: bool = False) -> None:
        clock = asyncio.get_running_loop().time
        for start in range(0, data.nbytes, PIECE_NBYTES):
            piece = data[start : start + PIECE_NBYTES]
            await self._donor.room_for(piece.nbytes, is_urgent=is_urgent, piece_s=self._piece_s)
            began = clock()
            await self._send(FrameType.STATE_CHUNK, piece, chunk=number)
            self._piece_s = clock() - began
            self._donor.bytes_served += piece.nbytes
            self.sent_nbytes += piece.nbytes

    async def _refuse(self, reason: str, *, is_busy: bool = False) -> None:
        await self._send(FrameType.STATE_ERROR, encode(Refusal(reason, is_busy)))

    async def _send(self, frame_type: FrameType, payload: bytes | memoryview, *, chunk: int = 0) -> None:
        timeout_s = self._donor._pace.allowance_s(len(payload))
        await self._channel.send(frame_type, payload, chunk=chunk, timeout_s=timeout_s)
