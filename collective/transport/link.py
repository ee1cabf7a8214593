"""One bulk connection: frames in and out of a non-blocking socket, as callbacks of the event loop.

How it is fast: `sendmsg` takes header and payload in one call, `recvmsg_into` puts the payload straight where it
belongs and the next header behind it. What to send is asked for only when the socket can take it
(`LinkOwner.next_out`), so encoding is lazy and a queue holds references, never bytes.

Rules: a link always reads; a slow owner never makes a zero window, so a death is always noticed. Memory that the
link is using can be taken back at any moment (`release`): it then finishes the frame from a copy, or receives the
rest into scratch. The link ends exactly once, with `on_lost`. It knows nothing of rounds.
"""

import asyncio
import contextlib
import socket
from typing import Protocol

import torch
from torch import Tensor

from collective.errors import CollectiveError, ConnectionLost, RemoteProtocolError
from collective.transport.sockets import lost, unacknowledged_nbytes
from collective.wire import Frame, FrameReader, Header, Limits

_CALLS_PER_WAKE = 8
"""System calls per direction before the other sockets get their turn: at most a few MiB."""

_AVERAGING = 0.2


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type] # numpy's stub lacks the buffer


class Scratch:
    """Memory of one link for one chunk: as a tensor for codecs and as bytes for sockets."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.bytes = bytes_of(self.tensor)


class Outgoing(Protocol):
    """Something to send, encoded when its turn comes."""

    def pieces(self, scratch: Scratch) -> tuple[bytes, memoryview]:
        """Header and payload. The payload may lie in `scratch`, or in memory that belongs to `owner`."""
        ...

    @property
    def owner(self) -> object:
        """Whose memory the payload may be."""
        ...

    def sent(self) -> None:
        """The whole frame is the kernel's now."""
        ...


class LinkOwner(Protocol):
    """What a link asks its owner."""

    def next_out(self) -> Outgoing | None:
        """What to send next, or None for nothing now (then `wake` starts the sending again)."""
        ...

    def place(self, link: "Link", header: Header) -> tuple[memoryview, object]:
        """Where this payload belongs, and whose memory that is. May raise RemoteProtocolError."""
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
        chunk_nbytes: the longest payload in either direction.
        owner: see LinkOwner.
    """

    def __init__(
        self, sock: socket.socket, *, stream: int, limits: Limits, chunk_nbytes: int, owner: LinkOwner
    ) -> None:
        self.stream = stream
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.chunk_s = 0.0  # moving average, from a payload's first byte to its last
        self.staging = Scratch(chunk_nbytes)  # where the owner may place what it does not keep
        self._encoding = Scratch(chunk_nbytes)
        self._owner = owner
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(limits=limits, place=self._place, read_ahead=True)
        self._receiving_for: object = None
        self._receiving_since = 0.0
        self._outgoing: Outgoing | None = None
        self._unsent: list[memoryview] = []
        self._is_writer_set = False
        self._is_writing = False
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def wake(self) -> None:
        """There is something to send."""
        if not self._is_writer_set and not self._is_writing and not self.closed:
            self._on_writable()

    def moved(self) -> int:
        """A number that changes while bytes get through in either direction."""
        if self.closed:
            return 0
        return self.bytes_received + self.bytes_sent - unacknowledged_nbytes(self._sock)

    def release(self, owner: object) -> None:
        """Stop using memory of this owner, now. Frames under way are finished without it."""
        if self._outgoing is not None and self._outgoing.owner is owner and len(self._unsent) > 0:
            self._keep_unsent()
        if self._receiving_for is owner and self._reader.current is not None:
            self._reader.divert(self.staging.bytes)
            self._receiving_for = None

    def close(self, cause: CollectiveError | None = None) -> None:
        """End the link; `on_lost` hears `cause`, or that it was closed here."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):  # it may be broken already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._outgoing, self._unsent = None, []
        self._owner.on_lost(self, cause or ConnectionLost("closed here"))

    # -------------------------------------------------------------------------------- reading

    def _place(self, header: Header) -> memoryview:
        destination, self._receiving_for = self._owner.place(self, header)
        self._receiving_since = self._loop.time()
        return destination

    def _on_readable(self) -> None:
        try:
            for _ in range(_CALLS_PER_WAKE):
                buffers = self._reader.next_buffers()
                nbytes = self._sock.recvmsg_into(buffers)[0]
                if nbytes == 0:
                    self.close(ConnectionLost("closed by the peer"))
                    return
                self.bytes_received += nbytes
                since = self._receiving_since  # of the frame that may be whole now; the next one may begin as well
                for frame in self._reader.received(nbytes):
                    self.chunk_s += _AVERAGING * (self._loop.time() - since - self.chunk_s)
                    self._owner.on_frame(self, frame)
                    if self.closed:
                        return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(lost(error))
        except RemoteProtocolError as error:
            self.close(error)

    # -------------------------------------------------------------------------------- writing

    def _on_writable(self) -> None:
        # The owner may wake us while it makes the next frame; that must not start a second round of sending.
        self._is_writing = True
        try:
            for _ in range(_CALLS_PER_WAKE):
                if not self._unsent and not self._take_next():
                    self._want_writable(False)
                    return
                self._advance(self._sock.sendmsg(self._unsent))
                if self._unsent:
                    break  # the kernel's buffer is full
            self._want_writable(True)
        except (BlockingIOError, InterruptedError):
            self._want_writable(True)
        except OSError as error:
            self.close(lost(error))
        finally:
            self._is_writing = False

    def _take_next(self) -> bool:
        outgoing = self._owner.next_out()
        if outgoing is None or self.closed:
            return False
        self._outgoing = outgoing
        header, payload = outgoing.pieces(self._encoding)
        self._unsent = [memoryview(header), payload] if len(payload) else [memoryview(header)]
        return True

    def _advance(self, nbytes: int) -> None:
        self.bytes_sent += nbytes
        while self._unsent and nbytes >= len(self._unsent[0]):
            nbytes -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][nbytes:]
            return
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.sent()

    def _keep_unsent(self) -> None:
        payload = self._unsent[-1]
        if payload.obj is not self._encoding.bytes.obj:
            kept = self._encoding.bytes[: len(payload)]
            kept[:] = payload
            self._unsent[-1] = kept
        self._outgoing = None

    def _want_writable(self, wanted: bool) -> None:
        if wanted == self._is_writer_set or self.closed:
            return
        self._is_writer_set = wanted
        if wanted:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        else:
            self._loop.remove_writer(self._sock.fileno())
