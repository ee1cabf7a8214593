# SPDX-License-Identifier: Apache-2.0
"""One peer's end of all links to one start of another, and the queues: stands in for transport/bundle.py."""

from collections import deque
from typing import TYPE_CHECKING, Protocol

from isthmus.collective.core.types import PeerRef
from tests.simulation.rounds.network import Link
from tests.simulation.rounds.values import SIGN, Frame

if TYPE_CHECKING:
    from tests.simulation.rounds.peer import Peer

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class Outgoing(Protocol):
    """What waits in a queue; encoded when a socket can take it."""

    owner: object

    def pieces(self) -> Frame | None: ...

    def sent(self) -> None: ...


class Notice:
    """A small frame, made already."""

    owner: object = None

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def pieces(self) -> Frame:
        return self._frame

    def sent(self) -> None:
        pass


class Bundle:
    """See the module."""

    def __init__(self, peer: "Peer", ref: PeerRef) -> None:
        self.peer, self.peer_ref, self.start = peer, peer.ref, peer.start_number
        self.ref = ref
        self.is_dialler = peer.peer_id < ref.peer_id
        self.closed = self.is_refused = self.was_connected = self.is_met = False
        self.heard = self.moved = 0
        self.heard_at = self.moved_at = peer.world.now
        self.round_trip_s = 0.0
        self.notices: deque[Outgoing] = deque()
        self.results: deque[Outgoing] = deque()
        self.parts: deque[Outgoing] = deque()
        self.links: dict[int, Link] = {}
        self._owes_repeat = False
        self._has_looked = self._is_repairing = False
        self._awaited: set[int] = set()
        self._attempt = 0
        self._pause_s = FIRST_PAUSE_S

    @property
    def is_whole(self) -> bool:
        return len(self.links) >= self.peer.options.num_streams

    # ------------------------------------------------------------------------ sending

    def pump(self) -> None:
        """Give the streams what they can take."""
        if self.peer.is_paused:
            return
        window, network, rng = self.peer.options.window, self.peer.network, self.peer.world.rng
        while self.notices or (not self.peer.is_jammed and (self.results or self.parts)):
            free = [link for link in self.links.values() if link.end_at(self.peer.peer_id).num_unread < window]
            if not free:
                return
            outgoing = (self.notices or self.results or self.parts).popleft()
            frame = outgoing.pieces()
            if frame is not None:
                link = free[0] if len(free) == 1 else rng.choice(free)
                network.send(link, link.end_at(self.peer.peer_id), frame)
                outgoing.sent()

    def give_sign(self) -> None:
        """Say that we are there, unless something waits to be sent anyway."""
        if self.peer.is_jammed or not (self.notices or self.results or self.parts):
            self.notices.append(Notice(Frame(SIGN, self.peer_ref)))
            self.pump()

    def host_silent_s(self) -> float:
        """Since when nothing has come from its host: kernels acknowledge while a process computes or hangs."""
        cut_since = self.peer.network.broken_since(self.peer.peer_id, self.ref.peer_id)
        return 0.0 if cut_since is None else self.peer.world.now - max(cut_since, self.heard_at)

    def forget_queued(self, owner: object) -> None:
        """Take back what no link has begun to send."""
        for queue in (self.results, self.parts):
            kept = [outgoing for outgoing in queue if outgoing.owner is not owner]
            queue.clear()
            queue.extend(kept)

    # ------------------------------------------------------------------------ from the network

    def on_frame(self, link: Link, frame: Frame) -> None:
        self.heard += 1
        self.heard_at = self.peer.world.now
        if frame.is_corrupt and self.peer.parts.checks_sums:
            self.peer.checker.corrupt_found()
            self.peer.network.reject(link, link.end_at(self.peer.peer_id))
            self.on_lost(link, is_their_fault=True)
        elif frame.kind != SIGN:
            self._move()
            self.peer.on_frame(self, frame)

    def _move(self) -> None:
        self.moved += 1
        self.moved_at = self.peer.world.now

    def on_ack(self, frame: Frame) -> None:
        if frame.kind != SIGN:
            self._move()
        if self.peer.start_number == self.start:
            self.pump()

    def on_lost(self, link: Link, *, is_their_fault: bool) -> None:
        if self.links.get(link.stream) is link:
            del self.links[link.stream]
        if not self.closed:
            self._owes_repeat = True
            self.peer.on_broken(self, is_their_fault=is_their_fault)

    def attach(self, link: Link) -> None:
        """Take a connection after its handshake. A stream that is there already is replaced."""
        old = self.links.get(link.stream)
        if old is not None:
            self.peer.network.close(old, old.end_at(self.peer.peer_id))
            self.on_lost(old, is_their_fault=False)
        self.links[link.stream] = link
        link.end_at(self.peer.peer_id).is_up = True
        self.round_trip_s = max(self.round_trip_s, self.peer.network.latency_s(self.ref.peer_id, self.peer.peer_id) * 2)
        self.is_refused = self._has_looked = False
        self.was_connected = True
        self.is_met |= self.is_dialler
        if self._owes_repeat:
            self._owes_repeat = False
            self.peer.on_renewed(self)
        self.pump()

    def close(self) -> None:
        """End all links."""
        self.closed = True
        for link in tuple(self.links.values()):
            self.peer.network.close(link, link.end_at(self.peer.peer_id))
        self.links.clear()

    # ------------------------------------------------------------------------ repair

    @property
    def is_pausing(self) -> bool:
        """Whether an attempt has failed, and the next one has not begun."""
        return self._is_repairing and not self._awaited

    def repair(self) -> None:
        """Make missing streams anew until all are there, the peer refuses, or no round needs them."""
        if not (self._is_repairing or self.closed or self._has_looked or self.is_whole):
            self._is_repairing = True
            self.is_refused = False
            self._pause_s = FIRST_PAUSE_S
            self._try()

    def is_awaiting(self, stream: int, attempt: int) -> bool:
        return not self.closed and attempt == self._attempt and stream in self._awaited

    def on_dialled(self, stream: int, attempt: int, outcome: str) -> None:
        """How the attempt of one stream went. Whatever is told later of the same attempt does not count."""
        if not self.is_awaiting(stream, attempt):
            return
        self._awaited.discard(stream)
        self.is_refused |= outcome == "refused"
        self._has_looked |= outcome == "answered"
        if self._awaited:
            return
        if self.is_whole or self._has_looked or (self.is_refused and self.was_connected):
            self._is_repairing = False
            self.peer.look_now()
        else:
            self.peer.later(self._pause_s, "redial", self._try)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _try(self) -> None:
        if self.closed or self.is_whole or not self.peer.wants(self):
            self._is_repairing = False
            return
        self._attempt += 1
        missing = {stream for stream in range(self.peer.options.num_streams) if stream not in self.links}
        self._awaited = missing if self.is_dialler else {-1}
        for stream in sorted(self._awaited):
            self.peer.network.dial(self, stream, self._attempt)
