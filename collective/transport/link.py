# SPDX-License-Identifier: Apache-2.0
"""One bulk connection: frames in and out of a non-blocking socket, as callbacks of the event loop.

How it is fast: `sendmsg` takes header and payload in one call, `recvmsg_into` puts the payload straight where it
belongs and the next header behind it. What to send is asked for only when the socket can take it
(`LinkOwner.next_out`), so encoding is lazy and a queue holds references, never bytes.

Rules: a link always reads; a slow owner never makes a zero window, so a death is always noticed. Only a cap on the
download makes it pause, for milliseconds. Memory that the
link is using can be taken back at any moment (`release`): it then finishes the frame from a copy, or receives the
rest into scratch. The link ends exactly once, with `on_lost`. It knows nothing of rounds.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.errors import CollectiveError, ConnectionLost, RemoteProtocolError
from isthmus.collective.transport.low_water import LowWater
from isthmus.collective.transport.memory import Scratch
from isthmus.collective.transport.sockets import find_speed_anew, lost, pace
from isthmus.collective.transport.tcp_info import (
    TcpInfo,
    read_tcp_info,
    unacknowledged_nbytes,
    unread_nbytes,
    window_nbytes,
)
from isthmus.collective.transport.tls import TlsSocket
from isthmus.collective.transport.wire import Frame, FrameReader, Header, Limits

_CALLS_PER_WAKE = 8
"""System calls per direction before the other sockets get their turn: some MiB, as much as their buffers hold."""

_AVERAGING = 0.2
_GATHERED_NBYTES = 32 << 10
"""Of small frames in one system call."""
_PIECE_NBYTES = 16 << 10
"""Under a cap: not worth a system call if less may be moved."""
_BURST_S = 0.02
"""Under a cap: what may be moved at once after a pause."""


class Caps:
    """What all links of a process together may move a second; None for no bound."""

    def __init__(self, *, upload: float | None = None, download: float | None = None) -> None:
        self.upload = None if upload is None else TokenBucket(upload, max(_PIECE_NBYTES, upload * _BURST_S))
        self.download = None if download is None else TokenBucket(download, max(_PIECE_NBYTES, download * _BURST_S))


class Outgoing(Protocol):
    """Something to send, encoded when its turn comes."""

    def pieces(self, scratch: Scratch) -> tuple[bytes, memoryview] | None:
        """Header and payload, or None for nothing after all. The payload may lie in `scratch` or be `owner`'s."""
        ...

    @property
    def owner(self) -> object:
        """Whose memory the payload may be; None for a notice, which is small and carries its own."""
        ...

    def sent(self, nbytes: int) -> None:
        """The whole frame, of so many bytes, is the kernel's now."""
        ...


class Sink(Protocol):
    """Who takes a chunk when it is whole. Decided once, when its header comes: a chunk has no time to lose."""

    @property
    def owner(self) -> object:
        """Whose memory the destination may be."""
        ...

    def wants(self, header: Header) -> bool:
        """Whether the chunk that is under way is still needed."""
        ...

    def take(self, link: "Link", frame: Frame) -> None:
        """The chunk is whole and verified, where it was placed. May raise RemoteProtocolError."""
        ...


class LinkOwner(Protocol):
    """What a link asks its owner."""

    def next_out(self, link: "Link") -> Outgoing | None:
        """What to send next over this link, or None for nothing now (then `wake` starts the sending again)."""
        ...

    def place(self, link: "Link", header: Header) -> tuple[memoryview, "Sink | None"]:
        """Where this payload belongs, and who takes it; None for `on_frame`. May raise RemoteProtocolError."""
        ...

    def on_frame(self, link: "Link", frame: Frame) -> None:
        """A whole, verified frame. May raise RemoteProtocolError."""
        ...

    def on_lost(self, link: "Link", cause: CollectiveError) -> None:
        """The link has ended; it will not call again."""
        ...


class Link:
    """One stream to one peer.

    Args:
        sock: connected, after its handshake; the link owns it from now on.
        stream: number of this connection among those of the pair.
        limits: what may arrive.
        caps: see Caps.
        owner: see LinkOwner.
    """

    def __init__(self, sock: socket.socket, *, stream: int, limits: Limits, caps: Caps, owner: LinkOwner) -> None:
        self.stream = stream
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.chunks_until = 0
        """Bytes up to the end of the last chunk that was sent."""
        self._chunks_taken = 0
        self.staging = Scratch()  # where the owner may place what it does not keep
        self._encoding = Scratch()
        self._caps = caps
        self._owner = owner
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(limits=limits, place=self._place, read_ahead=True)
        self._sink: Sink | None = None
        self._receiving_since = self._received_at = 0.0
        self._whole_chunk_s = 0.0  # moving average
        self._outgoing: Outgoing | None = None
        self._outgoing_nbytes = 0
        self._unsent: list[memoryview] = []
        self._unsent_nbytes = 0
        self._is_writer_set = False
        self._is_writing = False
        self._low_water = LowWater(sock)
        self._timers: dict[Callable[[], None], asyncio.Handle] = {}
        self._read_when_readable()
        if self._has_pending():  # frames that came together with the answer to our hello
            self._loop.call_soon(self._on_readable)

    def wake(self) -> None:
        """There is something to send."""
        is_paused = self._on_writable in self._timers
        if not self._is_writer_set and not self._is_writing and not self.closed and not is_paused:
            self._on_writable()

    @property
    def chunk_s(self) -> float:
        """How long a chunk takes, from first byte to last: on average, or the present one so far if that is more.

        So far is until its latest byte: a peer that falls silent in a chunk does not gain time by its silence.
        """
        so_far_s = 0.0 if self._reader.current is None else self._received_at - self._receiving_since
        return max(self._whole_chunk_s, so_far_s)

    def moved(self) -> int:
        """Bytes of chunks that were sent and acknowledged, and of the one that is coming, if anybody needs it."""
        if self.closed:
            return 0
        # Never less than before: encryption has the kernel hold more bytes of a sign than we have sent.
        self._chunks_taken = max(self._chunks_taken, min(self.bytes_sent - self._untaken_nbytes(), self.chunks_until))
        taken, header = self._chunks_taken, self._reader.current
        if header is None or self._sink is None or not self._sink.wants(header):
            return taken
        missing = self._reader.missing_nbytes
        return taken + header.payload_nbytes - missing + min(missing, unread_nbytes(self._sock))

    def heard(self) -> int:
        """Bytes that have come, those that nobody has read yet too."""
        return self.bytes_received + (0 if self.closed else unread_nbytes(self._sock))

    def bytes_delivered(self) -> int:
        """Bytes that have arrived at the other side, about; 0 where the kernel does not tell."""
        info = self.tcp_info()
        return 0 if info is None else info.bytes_delivered or 0

    def host_silent_s(self) -> float:
        """How long its host has acknowledged nothing; 0.0 where the kernel does not tell."""
        info = self.tcp_info()
        return 0.0 if info is None else (info.last_ack_recv_ms or 0) * 1e-3

    @property
    def is_sending(self) -> bool:
        """Whether a frame is half written."""
        return bool(self._unsent)

    def pace(self, bytes_per_s: float | None) -> None:
        """Let the kernel send no faster than this; None lets go."""
        if not self.closed:
            pace(self._sock, bytes_per_s)

    def find_speed_anew(self) -> None:
        """What this stream may carry has changed by much."""
        if not self.closed:
            find_speed_anew(self._sock)

    def window_nbytes(self) -> int:
        """What the kernel lets be on its way at once; 0 where it does not tell."""
        return 0 if self.closed else window_nbytes(self._sock)

    def tcp_info(self) -> TcpInfo | None:
        """What the kernel knows of this connection."""
        return None if self.closed else read_tcp_info(self._sock)

    def release(self, owner: object) -> None:
        """Stop using memory of this owner, now. Frames under way are finished without it."""
        if self._outgoing is not None and self._outgoing.owner is owner and len(self._unsent) > 0:
            self._keep_unsent()
        if self._sink is not None and self._sink.owner is owner and self._reader.current is not None:
            self._reader.divert(self.staging.room)
            self._sink = None

    def close(self, cause: CollectiveError | None = None) -> None:
        """End the link; `on_lost` hears `cause`, or that it was closed here."""
        if self.closed:
            return
        self.closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._stop_reading()
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):  # it may be broken already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._outgoing, self._unsent, self._unsent_nbytes, self._sink = None, [], 0, None
        self._reader.divert(lambda _: memoryview(b""))  # its memory is free now, not when cycles are looked for
        self.staging, self._encoding = Scratch(), Scratch()
        self._owner.on_lost(self, cause or ConnectionLost("closed here"))

    # -------------------------------------------------------------------------------- reading

    def _place(self, header: Header) -> memoryview:
        destination, self._sink = self._owner.place(self, header)
        self._receiving_since = self._loop.time()
        return destination

    def _on_readable(self) -> None:
        try:
            for _ in range(_CALLS_PER_WAKE):
                if self.closed or not self._read_once():
                    break
            else:
                if not self.closed and self._has_pending():  # no readiness will tell of these
                    self._loop.call_soon(self._on_readable)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(lost(error))
        except RemoteProtocolError as error:
            self.close(error)
        if not self.closed and self._caps.download is None:
            self._low_water.await_more(self._reader, self._whole_chunk_s)

    def _read_once(self) -> bool:
        """Whether there may be more to read now."""
        buffers = self._reader.next_buffers()
        cap = self._caps.download
        if cap is not None:
            buffers = self._within(cap, buffers, self._resume_reading)
            if not buffers:
                self._stop_reading()
                return False
        nbytes = self._sock.recvmsg_into(buffers)[0]
        if nbytes == 0:
            self.close(self._reader.ended())
            return False
        if cap is not None:
            cap.take(self._loop.time(), nbytes)
        self._account(nbytes)
        # Less than there was room for: the kernel has no more, so it need not be asked.
        return not self.closed and (nbytes == sum(map(len, buffers)) or self._has_pending())

    def _account(self, nbytes: int) -> None:
        """Bytes are where they belong: hand on the frames that are whole."""
        self.bytes_received += nbytes
        self._received_at = self._loop.time()
        # Of the frame that may be whole now; the next one may begin as well.
        since, sink = self._receiving_since, None if self._reader.current is None else self._sink
        for frame in self._reader.received(nbytes):
            if sink is not None:
                self._whole_chunk_s += _AVERAGING * (self._received_at - since - self._whole_chunk_s)
                sink.take(self, frame)
                sink = None
            else:
                self._owner.on_frame(self, frame)
            if self.closed:
                return

    def _resume_reading(self) -> None:
        self._timers.pop(self._resume_reading, None)
        if not self.closed:
            self._read_when_readable()
            self._on_readable()

    def _has_pending(self) -> bool:
        """Whether bytes wait inside the encryption, of which the loop will not hear."""
        return isinstance(self._sock, TlsSocket) and self._sock.pending() > 0

    def _read_when_readable(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._sock.fileno())

    # -------------------------------------------------------------------------------- writing

    def _on_writable(self) -> None:
        self._timers.pop(self._on_writable, None)
        if self.closed:
            return
        # The owner may wake us while it makes the next frame; that must not start a second round of sending.
        self._is_writing = True
        try:
            self._want_writable(self._write_some())
        except (BlockingIOError, InterruptedError):
            self._want_writable(True)
        except OSError as error:
            self.close(lost(error))
        finally:
            self._is_writing = False

    def _write_some(self) -> bool:
        """Whether there is more to write as soon as the socket can take it."""
        cap = self._caps.upload
        for _ in range(_CALLS_PER_WAKE):
            if not self._unsent and not self._take_next():
                return False
            pieces = self._unsent
            if cap is not None:
                pieces = self._within(cap, pieces, self._on_writable)
                if not pieces:
                    return False
            nbytes = self._sock.sendmsg(pieces)
            if cap is not None:
                cap.take(self._loop.time(), nbytes)
            self._advance(nbytes)
            if self._unsent and cap is None:
                return True  # the kernel's buffer is full
        return True

    def _within(self, cap: TokenBucket, buffers: list[memoryview], resume: Callable[[], None]) -> list[memoryview]:
        """As much of the buffers as the cap allows now; nothing, and a call of `resume` in time, if that is little."""
        allowed = cap.available(self._loop.time())
        total = sum(map(len, buffers))
        if allowed < min(total, _PIECE_NBYTES):
            delay_s = cap.delay_s(self._loop.time(), min(total, _PIECE_NBYTES))
            self._timers[resume] = self._loop.call_later(delay_s, resume)
            return []
        within = []
        for buffer in buffers:
            within.append(buffer[:allowed])
            allowed -= len(within[-1])
            if allowed <= 0:
                break
        return within

    def _take_next(self) -> bool:
        """Gather notices and at most one chunk: small frames share a system call, and the receiver's wake-up."""
        while (outgoing := self._owner.next_out(self)) is not None and not self.closed:
            pieces = outgoing.pieces(self._room_to_encode())
            if pieces is None:
                continue
            header, payload = pieces
            nbytes = len(header) + len(payload)
            self._unsent.append(memoryview(header))
            if nbytes > len(header):
                self._unsent.append(payload)
            self._unsent_nbytes += nbytes
            if outgoing.owner is not None:
                self._outgoing = outgoing
                self._outgoing_nbytes = nbytes
                break
            if self._unsent_nbytes >= _GATHERED_NBYTES:
                break
        return bool(self._unsent)

    def _room_to_encode(self) -> Scratch:
        return self._encoding

    def _advance(self, nbytes: int) -> None:
        self.bytes_sent += nbytes
        if self._outgoing is not None:
            self.chunks_until = self.bytes_sent
        self._unsent_nbytes -= nbytes
        unsent = self._unsent
        if self._unsent_nbytes:
            while nbytes >= len(unsent[0]):
                nbytes -= len(unsent.pop(0))
            unsent[0] = unsent[0][nbytes:]
            return
        unsent.clear()
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.sent(self._outgoing_nbytes)

    def _untaken_nbytes(self) -> int:
        return unacknowledged_nbytes(self._sock)

    def _keep_unsent(self) -> None:
        payload = self._unsent[-1]
        if payload.obj is not self._encoding.bytes.obj:
            kept = self._encoding.room(len(payload))
            kept[:] = payload
            self._unsent[-1] = kept
        self._outgoing = None

    def _want_writable(self, wanted: bool) -> None:
        if self.closed or wanted == self._is_writer_set:
            return
        self._is_writer_set = wanted
        if wanted:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        else:
            self._loop.remove_writer(self._sock.fileno())
