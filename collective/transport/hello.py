# SPDX-License-Identifier: Apache-2.0
"""The first two frames of every connection: who dials and what for, and whether that is welcome.

Rules: before the hello a connection may send nothing else and at most 4 KiB; the dialler sends no further frame
before the reply. No byte beyond these frames is read here, so the socket can be handed on.
"""

import asyncio
import enum
import socket
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import PEER_ID_PATTERN, Incarnation, PeerId, PeerRef
from isthmus.collective.errors import ConnectionLost, DeadlineExceeded, HandshakeRefused, RemoteProtocolError
from isthmus.collective.transport.shared_memory import Offer
from isthmus.collective.transport.sockets import lost
from isthmus.collective.transport.wire import (
    BEFORE_HELLO,
    BEFORE_REPLY,
    Frame,
    FrameReader,
    FrameType,
    Header,
    Limits,
    pack,
)

MAX_STREAMS = 64
MAX_CREDENTIAL_NBYTES = 2048
REFUSED_EXIT_CODE = 5
"""For a dialler of another version: the product's table of exit codes calls that refused."""


class Purpose(enum.StrEnum):
    """What a connection is for."""

    CONTROL = "control"
    BULK = "bulk"
    STATE = "state"
    CALLED = "called"
    """A donor calls who has asked it to, and serves it as over STATE: collective/api/callbacks.py."""
    ADMISSION = "admission"
    """A stranger with a ticket asks what run this is."""
    DOCTOR = "doctor"
    """A stranger with a ticket measures the path to the coordinator."""
    DIAL_BACK = "dial back"
    """The coordinator asks a peer to dial somebody."""


STRANGERS = frozenset({Purpose.ADMISSION, Purpose.DOCTOR})
"""What somebody may come for who has no certificate of the run; its hello shows a ticket."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who dials. `credential` proves it where encryption does not (proof.py), or is a stranger's ticket."""

    protocol_version: Annotated[int, Meta(ge=0, le=2**16)]
    run_id: Annotated[str, Meta(max_length=64)]
    purpose: Purpose
    peer_id: Annotated[PeerId, Meta(pattern=PEER_ID_PATTERN)]
    incarnation: Annotated[Incarnation, Meta(ge=0, le=2**53)]
    credential: Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_NBYTES)] = b""
    stream: Annotated[int, Meta(ge=0, lt=MAX_STREAMS)] = 0
    num_streams: Annotated[int, Meta(ge=1, le=MAX_STREAMS)] = 1
    memory: Offer | None = None
    """Through which bytes may go instead, if it is within reach."""

    @property
    def ref(self) -> PeerRef:
        """This start of the peer."""
        return PeerRef(self.peer_id, self.incarnation)

    def __repr__(self) -> str:
        return f"Hello({self.purpose}, {self.peer_id}/{self.incarnation}, run_id={self.run_id!r})"


class HelloReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who answers, and whether the dialler may go on. `code` is the exit code for the dialler, 0 if accepted."""

    accepted: bool
    code: Annotated[int, Meta(ge=0, le=255)] = 0
    reason: Annotated[str, Meta(max_length=512)] = ""
    peer_id: Annotated[PeerId, Meta(pattern=PEER_ID_PATTERN)]
    incarnation: Annotated[Incarnation, Meta(ge=0, le=2**53)]
    shares_memory: bool = False
    """From here on bytes go through the memory that was offered."""
    seen_from: Annotated[str, Meta(max_length=64)] = ""
    """The host that the dialler comes from, as the side that accepts it sees it."""
    credential: Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_NBYTES)] = b""
    """Proves who answers where the hello proved who dials."""

    @property
    def ref(self) -> PeerRef:
        """This start of the peer."""
        return PeerRef(self.peer_id, self.incarnation)


_T = TypeVar("_T")


def decode(payload: bytes | memoryview, kind: type[_T]) -> _T:
    """Decode one msgpack struct from untrusted bytes.

    Raises:
        RemoteProtocolError: whatever is wrong with them.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        # msgspec lets the last three through for malformed text and deep nesting.
        raise RemoteProtocolError(f"malformed {kind.__name__}") from error


async def introduce(sock: socket.socket, hello: Hello, *, timeout_s: float) -> HelloReply:
    """The dialler's half: say who we are, wait for the answer. The caller keeps the socket, also after an error.

    Raises:
        HandshakeRefused: the other side said no.
        ConnectionLost, DeadlineExceeded, RemoteProtocolError: there was no proper answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _send(sock, FrameType.HELLO, msgspec.msgpack.encode(hello))
            reply = decode((await _read_one(sock, BEFORE_REPLY)).payload, HelloReply)
    except TimeoutError as error:
        raise DeadlineExceeded("handshake", timeout_s) from error
    if not reply.accepted:
        raise HandshakeRefused(reply.code, reply.reason)
    return reply


async def read_hello(sock: socket.socket) -> Hello:
    """The acceptor's first half. The caller sets the deadline.

    Raises:
        RemoteProtocolError, ConnectionLost: no valid hello came.
    """
    return decode((await _read_one(sock, BEFORE_HELLO)).payload, Hello)


async def send_reply(sock: socket.socket, reply: HelloReply) -> None:
    """The acceptor's second half. Raises ConnectionLost."""
    await _send(sock, FrameType.HELLO_REPLY, msgspec.msgpack.encode(reply))


async def _send(sock: socket.socket, frame_type: FrameType, payload: bytes) -> None:
    header = pack(Header(type=frame_type, payload_nbytes=len(payload)), payload)
    try:
        await asyncio.get_running_loop().sock_sendall(sock, header + payload)
    except OSError as error:
        raise lost(error) from error


async def _read_one(sock: socket.socket, limits: Limits) -> Frame:
    loop = asyncio.get_running_loop()
    reader = FrameReader(limits=limits, place=_fresh_memory, read_ahead=False)
    while True:
        (buffer,) = reader.next_buffers()
        try:
            nbytes = await loop.sock_recv_into(sock, buffer)
        except OSError as error:
            raise lost(error) from error
        if nbytes == 0:
            raise ConnectionLost("closed in the handshake")
        frames = reader.received(nbytes)
        if frames:
            return frames[0]


def _fresh_memory(header: Header) -> memoryview:
    return memoryview(bytearray(header.payload_nbytes))
