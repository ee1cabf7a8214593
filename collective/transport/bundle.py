# SPDX-License-Identifier: Apache-2.0
"""All links to one start of one peer, and the one queue of what is to be sent to it.

Several streams share the queue: whichever can write takes the next frame. Small notices go first.

Rules: one side of a pair dials; the other one waits, looks whether anybody is there, and dials if no call comes
(redial.py). Streams outlive views. A broken stream is made anew by whoever needs it (`repair`), so there is no task in
the background. Frames that were on a broken stream may be lost: with the next stream that comes up, whichever it is,
`BundleOwner.on_renewed` says to send again.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.collective.errors import CollectiveError, ConnectionLost
from isthmus.collective.transport.hello import MAX_STREAMS, Hello
from isthmus.collective.transport.interfaces import plain_host
from isthmus.collective.transport.link import Caps, Link, Outgoing, Sink
from isthmus.collective.transport.moving import Moving
from isthmus.collective.transport.pacing import FADING, RAISE, is_used, streams_needed
from isthmus.collective.transport.redial import Redial
from isthmus.collective.transport.security import Security
from isthmus.collective.transport.shared_link import link_over
from isthmus.collective.transport.sockets import FAR_S, SocketOptions, congestion_control_of, streams_for
from isthmus.collective.transport.tcp_info import TcpInfo, round_trip_s
from isthmus.collective.transport.wire import PADDING_NBYTES, Frame, FrameType, Header, on_bulk, pack

log = logging.getLogger(__name__)

_SIGN = pack(Header(type=FrameType.SIGN))
_CALL = pack(Header(type=FrameType.CALL))
_NOTHING = bytes(PADDING_NBYTES)


class BundleOwner(Protocol):
    """What a bundle tells the layer above. The bundle says of which peer."""

    def place(self, bundle: "Bundle", link: Link, header: Header) -> tuple[memoryview, Sink | None]:
        """See LinkOwner.place."""
        ...

    def on_frame(self, bundle: "Bundle", frame: Frame) -> None:
        """See LinkOwner.on_frame."""
        ...

    def on_broken(self, bundle: "Bundle", cause: CollectiveError) -> None:
        """A stream is gone. `cause` says whose fault."""
        ...

    def on_renewed(self, bundle: "Bundle") -> None:
        """A stream has come up since one was lost: repeat what may have been lost with it."""
        ...


class Notice:
    """A small frame of its own, such as OPEN or ABORT."""

    owner: object = None

    def __init__(self, header: bytes, payload: bytes) -> None:
        self._pieces = (header, memoryview(payload))

    def pieces(self, scratch: object) -> tuple[bytes, memoryview]:  # noqa: ARG002 - it is encoded already
        """Header and payload."""
        return self._pieces

    def sent(self, nbytes: int) -> None:
        """Nobody waits for it."""


_PADDING = Notice(pack(Header(type=FrameType.PADDING, payload_nbytes=PADDING_NBYTES), _NOTHING), _NOTHING)


class Bundle:
    """See the module.

    Args:
        peer: exactly this start of the peer.
        is_dialler: whether our side opens the connections, at first.
        num_streams: how many connections the pair keeps; None: one, and more once the path is found to be long.
        chunk_nbytes: longest payload.
        hello: makes the hello for one stream.
        owner: hears what arrives.
        options: for sockets dialled here.
        security: likewise.
        caps: bound what all links together move.
    """

    def __init__(
        self,
        peer: PeerRef,
        *,
        is_dialler: bool,
        num_streams: int | None,
        chunk_nbytes: int,
        hello: Callable[[PeerRef, int, int], Hello],
        owner: BundleOwner,
        options: SocketOptions,
        security: Security | None,
        caps: Caps,
    ) -> None:
        self.peer = peer
        self.is_dialler = is_dialler
        self.address: str | None = None  # known once a view names the peer
        self.closed = False
        self.is_met = False
        """Whether it has answered our dial, or opened a round with us: a connection that we took alone says little.

        Its dialler may have given it up while we were busy, or while the line was cut.
        """
        self.has_lost = False
        """Whether a stream ever broke: what was on it may be lost."""
        self.was_connected = False
        """Whether any stream was ever up."""
        self.host = ""
        """Where its newest stream comes from or leads to; empty before the first."""
        self._own_host = ""
        self.round_trip_s = 0.0
        self.notices: deque[Outgoing] = deque()
        self.results: deque[Outgoing] = deque()
        self.parts: deque[Outgoing] = deque()
        self._links: dict[int, Link] = {}
        self._owes_repeat = False  # a stream broke, and none has come up since
        self.num_streams = num_streams or 1
        self._chooses_streams = num_streams is None
        self._limits = on_bulk(chunk_nbytes)
        self._owner = owner
        self._caps = caps
        self._control = ""
        self._redial = Redial(self, hello=hello, options=options, security=security)
        self._bytes_of_old_links = [0, 0]
        self.moving = Moving()
        self._pads_until = 0.0
        self._pace: float | None = None
        self._raised = 1.0  # times what was planned
        self._num_used = MAX_STREAMS

    @property
    def peer_id(self) -> PeerId:
        """The peer's stable name."""
        return self.peer.peer_id

    @property
    def is_connected(self) -> bool:
        """Whether any stream is up."""
        return bool(self._links)

    @property
    def is_whole(self) -> bool:
        """Whether every stream is up."""
        return len(self._links) >= self.num_streams

    @property
    def missing_streams(self) -> list[int]:
        """Which streams are not up."""
        return [stream for stream in range(self.num_streams) if stream not in self._links]

    @property
    def is_refused(self) -> bool:
        """Whether it was refused wherever it may be: nobody listens there."""
        return self._redial.is_refused

    @property
    def cause(self) -> str:
        """Why the last dial failed; empty if none did."""
        return self._redial.cause

    @property
    def bytes_sent(self) -> int:
        """Bytes given to the kernel for this peer, headers included."""
        return self._bytes_of_old_links[0] + sum(link.bytes_sent for link in self._links.values())

    @property
    def bytes_received(self) -> int:
        """Bytes read from this peer, headers included."""
        return self._bytes_of_old_links[1] + sum(link.bytes_received for link in self._links.values())

    @property
    def is_waiting(self) -> bool:
        """Whether there is more to send than the sockets take."""
        is_queued = self.notices or self.results or self.parts or self._pads_until
        return bool(is_queued) or any(link.is_sending for link in self._links.values())

    def bytes_delivered(self) -> int:
        """Bytes that have arrived at the peer, about, over the streams that are up."""
        return sum(link.bytes_delivered() for link in self._links.values())

    def bytes_sent_again(self) -> int:
        """Bytes that were lost on the way, over the streams that are up."""
        return sum(info.bytes_retrans or 0 for info in self._tcp_infos())

    def shortest_round_trip_s(self) -> float:
        """The path without queues; 0.0 is unknown."""
        return min((info.min_rtt_us for info in self._tcp_infos() if info.min_rtt_us), default=0) * 1e-6

    @property
    def is_far(self) -> bool:
        """Whether the path is long."""
        return self.round_trip_s > FAR_S

    @property
    def pace_now(self) -> float | None:
        """What it may send, bytes/s; None is as fast as it can."""
        return self._pace

    def pace(self, bytes_per_s: float | None) -> None:
        """On a long path, send no faster than this, over as few streams as carry it; None lets go.

        Only with bbr: loss-based control needs many streams, and keeps itself far below what a lossy path allows.
        """
        self._raised = 1.0 if bytes_per_s is None else max(1.0, FADING * self._raised)
        self._set_pace(None if bytes_per_s is None else self._raised * bytes_per_s)

    def raise_pace(self) -> None:
        """Nothing else holds the path back."""
        if self._pace is not None:
            self._raised *= RAISE
            self._set_pace(RAISE * self._pace)

    def _set_pace(self, bytes_per_s: float | None) -> None:
        if not self.is_far or self._control != "bbr" or bytes_per_s == self._pace:
            return
        self._pace = bytes_per_s
        shared_by = min(self._num_used, self.num_streams)
        self._num_used = self.num_streams
        if bytes_per_s is not None:
            self._num_used = min(self.num_streams, streams_needed(bytes_per_s, self.round_trip_s))
        for link in self._links.values():
            link.pace(None if bytes_per_s is None else bytes_per_s / self._num_used)
            if self._num_used < shared_by:
                link.find_speed_anew()

    def pad_until(self, instant: float) -> None:
        """Send bytes without meaning until then (loop time), whenever there is nothing else."""
        self._pads_until = instant
        self.wake()

    def pad_once(self) -> None:
        """Send one frame without meaning."""
        self.notices.append(_PADDING)
        self.wake()

    def end_padding(self, instant: float) -> None:
        """Send no more of what was asked for until then; somebody may have asked for more since."""
        if self._pads_until == instant:
            self._pads_until = 0.0

    def heard(self) -> int:
        """A number that changes with every byte from this peer."""
        return self._bytes_of_old_links[1] + sum(link.heard() for link in self._links.values())

    def host_silent_s(self) -> float:
        """How long the peer's host has acknowledged nothing, whatever its process does; 0.0 is unknown."""
        return min((link.host_silent_s() for link in self._links.values()), default=0.0)

    def moved(self) -> int:
        """A number that grows while chunks get through in either direction: see moving.py."""
        return self.moving.total(sum(link.moved() for link in self._links.values()))

    def give_sign(self) -> None:
        """Say that we are there, on one stream, unless something waits to be sent anyway."""
        if not (self.notices or self.results or self.parts):
            self.notices.append(Notice(_SIGN, b""))
            self.wake()

    def ask_for_call(self) -> None:
        """Ask the peer to call us: see callbacks.py."""
        self.notices.append(Notice(_CALL, b""))
        self.wake()

    @property
    def chunk_s(self) -> float:
        """How long a chunk from this peer takes, on the slowest stream. 0.0 before the first."""
        return max((link.chunk_s for link in self._links.values()), default=0.0)

    def keep_streams(self, num_streams: int) -> None:
        """The dialler has so many, and knows of no others: they are of a time before its line was cut.

        One of its own must be attached next: that says to send again what went into the others.
        """
        self.num_streams = num_streams
        for stream in [stream for stream in self._links if stream >= num_streams]:
            self._links[stream].close(ConnectionLost("the dialler has fewer"))

    def attach(self, sock: socket.socket, stream: int) -> None:
        """Take a connection after its handshake. A stream that is there already is replaced."""
        if stream in self._links:
            self._links[stream].close(ConnectionLost("replaced by a newer connection"))
        link = link_over(sock, stream=stream, limits=self._limits, caps=self._caps, owner=self)
        self._links[stream] = link
        with contextlib.suppress(OSError):  # it is broken already
            self._be_between(plain_host(str(sock.getsockname()[0])), plain_host(str(sock.getpeername()[0])))
        known_s = [seconds for seconds in (self.round_trip_s, round_trip_s(sock)) if seconds > 0.0]
        self.round_trip_s = min(known_s, default=0.0)
        self._control = congestion_control_of(sock)
        if self._chooses_streams and self.is_dialler:
            self.num_streams = max(self.num_streams, streams_for(self.round_trip_s, self._control))
        if self._pace is not None:
            link.pace(self._pace / self._num_used)
        self.is_met |= self.is_dialler
        self._redial.found()
        self.was_connected = True
        if self._owes_repeat:
            self._owes_repeat = False
            self._owner.on_renewed(self)
        link.wake()

    def _be_between(self, own_host: str, host: str) -> None:
        """Forget how long another path was, and its pace. Found before: a pair that had met in one room stayed near."""
        if (own_host, host) != (self._own_host, self.host):
            self._own_host, self.host = own_host, host
            self.round_trip_s, self._pace, self._raised, self._num_used = 0.0, None, 1.0, MAX_STREAMS

    def wake(self) -> None:
        """Something was put into a queue."""
        for link in tuple(self._links.values()):
            link.wake()

    def release(self, owner: object) -> None:
        """Forget everything queued by this owner, and stop using its memory."""
        self.forget_queued(owner)
        for link in self._links.values():
            link.release(owner)

    def forget_queued(self, owner: object) -> None:
        """Take back what this owner has queued but no link has begun to send."""
        for queue in (self.results, self.parts):
            if queue:
                kept = [outgoing for outgoing in queue if outgoing.owner is not owner]
                queue.clear()
                queue.extend(kept)

    def close(self) -> None:
        """End all links."""
        self.closed = True
        for queue in (self.notices, self.results, self.parts):
            queue.clear()
        for link in tuple(self._links.values()):
            link.close()

    def cut(self, cause: str) -> None:
        """End all links as if they had broken."""
        for link in tuple(self._links.values()):
            link.close(ConnectionLost(cause))

    async def repair(self) -> None:
        """Make missing streams anew, again and again until they are all there or the peer refuses.

        The caller bounds it by cancelling. Returns at once if somebody is at it already, or nothing can be done.
        """
        await self._redial.repair()

    def _tcp_infos(self) -> list[TcpInfo]:
        return [info for link in self._links.values() if (info := link.tcp_info()) is not None]

    # -------------------------------------------------------------------------------- as owner of links

    def next_out(self, link: Link) -> Outgoing | None:
        """The next frame for whichever stream can write.

        Near, results go first, while they are in the cache. Far, parts do: others wait for them before they
        have results to send, so no line ever idles.
        """
        if not self._is_used(link):
            return None
        chunks = (self.parts, self.results) if self.is_far else (self.results, self.parts)
        for queue in (self.notices, *chunks):
            if queue:
                return queue.popleft()
        if self._pads_until:
            if asyncio.get_running_loop().time() < self._pads_until:
                return _PADDING
            self._pads_until = 0.0
        return None

    def _is_used(self, link: Link) -> bool:
        """Whether it is among as many streams as the pace needs."""
        if self._num_used >= self.num_streams or not self.is_whole:
            return True
        return is_used(link, self._links.values(), self._num_used)

    def place(self, link: Link, header: Header) -> tuple[memoryview, Sink | None]:
        """Ask the owner."""
        if header.type is FrameType.PADDING:
            return link.staging.room(header.payload_nbytes), None
        return self._owner.place(self, link, header)

    def on_frame(self, link: Link, frame: Frame) -> None:  # noqa: ARG002 - the queue is one for all streams
        """Tell the owner, unless it was a mere sign of life or padding."""
        if frame.header.type not in (FrameType.SIGN, FrameType.PADDING):
            self._owner.on_frame(self, frame)

    def on_lost(self, link: Link, cause: CollectiveError) -> None:
        """Count what it moved, and tell the owner unless it is our own doing."""
        self._bytes_of_old_links[0] += link.bytes_sent
        self._bytes_of_old_links[1] += link.bytes_received
        self.moving.taken(link.chunks_until)
        if self._links.get(link.stream) is link:
            del self._links[link.stream]
        if self.closed:
            return
        self.has_lost = self._owes_repeat = True
        self._owner.on_broken(self, cause)
