# SPDX-License-Identifier: Apache-2.0
"""Framing without IO: what a frame looks like, and how frames come out of a stream of bytes.

A frame is a fixed header of 48 bytes in network order, then `payload_nbytes` bytes:

    magic "IS" | version u8 | type u8 | payload_nbytes u32 | epoch u32 | outer_step u32 | fragment u16 | rank u16
    four zeros | chunk u32 | weight f64 | plan_hash u32 | check u64

`check` is xxh3_64 over the 40 bytes before it and the payload: it finds broken bytes, not forged ones. Tensors in
payloads are little-endian.

Rules: bytes are untrusted. The reader allocates nothing by itself: it asks `place` for the destination of a payload,
and only after the header's type and length were found within the limits of the connection's present state. Whatever
arrives, the only error is RemoteProtocolError. Nothing here knows a socket, a tensor or a view.
"""

import enum
import struct
from collections.abc import Callable, Mapping

import msgspec
import xxhash

from isthmus.collective.core.types import Epoch, OuterStep, RoundKey
from isthmus.collective.errors import ConnectionLost, PayloadCorrupted, RemoteProtocolError, StreamBroken

PROTOCOL_VERSION = 9
"""Of what is sent, and of what methods make of it by default: peers of which each made something else never agree."""
MAGIC = b"IS"
HEADER_NBYTES = 48
MAX_WEIGHT = 2.0**64
"""More than anybody has tokens, and far below what overflows fp32."""
_FIELDS = struct.Struct("!2sBBIIIHH4xIdI")
_CHECK = struct.Struct("!Q")
_PREFIX_NBYTES = HEADER_NBYTES - _CHECK.size

assert _FIELDS.size == _PREFIX_NBYTES


class FrameType(enum.IntEnum):
    """What a frame carries. The numbers are the wire's and never change their meaning."""

    HELLO = 1
    HELLO_REPLY = 2
    CONTROL = 3
    OPEN = 4
    PART = 5
    RESULT = 6
    ABORT = 7
    STATE_REQUEST = 8
    STATE_HEADER = 9
    STATE_CHUNK = 10
    STATE_ERROR = 11
    SIGN = 12
    """A sign of life on a bulk connection, without payload."""
    PADDING = 13
    """Bytes without meaning, to measure a path."""
    CALL = 14
    """On a bulk connection: call me, I cannot call you. Without payload (callbacks.py)."""


_TYPES = {int(frame_type): frame_type for frame_type in FrameType}  # ten times faster than the enum itself

CHUNKS = frozenset({FrameType.PART, FrameType.RESULT})
"""What brings a round further."""

Limits = Mapping[FrameType, int]
"""Which frame types a connection may receive now, and how long their payloads may be."""

PADDING_NBYTES = 32 << 10
NOTICE_NBYTES = 4 << 10
"""Of an OPEN or an ABORT at most."""

BEFORE_HELLO: Limits = {FrameType.HELLO: 4 << 10}
BEFORE_REPLY: Limits = {FrameType.HELLO_REPLY: 4 << 10}
ON_CONTROL: Limits = {FrameType.CONTROL: 256 << 10}
ON_DIALLED_CONTROL: Limits = {FrameType.CONTROL: 2 << 20}
"""Of what the coordinator says: a view may name 1024 members, with addresses of 512 characters."""
ON_DOCTOR: Limits = {FrameType.CONTROL: 256 << 10, FrameType.PADDING: PADDING_NBYTES}
ON_STATE: Limits = {
    FrameType.STATE_REQUEST: 256 << 10,
    FrameType.STATE_HEADER: 4 << 20,
    FrameType.STATE_CHUNK: 4 << 20,
    FrameType.STATE_ERROR: 4 << 10,
}


def on_bulk(chunk_nbytes: int) -> Limits:
    """Limits of a bulk connection whose chunks have at most `chunk_nbytes` on the wire, in whatever codec."""
    return {
        FrameType.OPEN: NOTICE_NBYTES,
        FrameType.ABORT: NOTICE_NBYTES,
        FrameType.SIGN: 0,
        FrameType.CALL: 0,
        FrameType.PADDING: PADDING_NBYTES,
        FrameType.PART: chunk_nbytes,
        FrameType.RESULT: chunk_nbytes,
    }


class Header(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A frame's header without magic, version and check. Fields that a type has no use for are 0."""

    type: FrameType
    payload_nbytes: int = 0
    epoch: int = 0
    outer_step: int = 0
    fragment: int = 0
    rank: int = 0
    chunk: int = 0
    weight: float = 0.0
    plan_hash: int = 0

    @property
    def key(self) -> RoundKey:
        """The round that the frame belongs to."""
        return RoundKey(Epoch(self.epoch), OuterStep(self.outer_step), self.fragment)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A whole frame whose check fits. `payload` is the memory that `place` named, not a copy."""

    header: Header
    payload: memoryview


def pack(header: Header, payload: bytes | memoryview = b"") -> bytes:
    """The 48 bytes that go before `payload` on the wire. `header.payload_nbytes` must be the payload's length."""
    prefix = _FIELDS.pack(
        MAGIC,
        PROTOCOL_VERSION,
        header.type,
        header.payload_nbytes,
        header.epoch,
        header.outer_step,
        header.fragment,
        header.rank,
        header.chunk,
        header.weight,
        header.plan_hash,
    )
    check = xxhash.xxh3_64(prefix)
    check.update(payload)
    return prefix + _CHECK.pack(check.intdigest())


def unpack(prefix: bytes | memoryview, limits: Limits) -> Header:
    """Read a header's first 40 bytes.

    Raises:
        RemoteProtocolError: not our protocol or version, or a type or length that `limits` does not allow.
    """
    (
        magic,
        version,
        type_code,
        payload_nbytes,
        epoch,
        outer_step,
        fragment,
        rank,
        chunk,
        weight,
        plan_hash,
    ) = _FIELDS.unpack_from(prefix)
    if magic != MAGIC:
        raise RemoteProtocolError("wrong magic")
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError("wrong protocol version")
    frame_type = _TYPES.get(type_code)
    if frame_type is None:
        raise RemoteProtocolError("unknown frame type")
    longest = limits.get(frame_type)
    if longest is None:
        raise RemoteProtocolError("frame type not allowed here")
    if payload_nbytes > longest:
        raise RemoteProtocolError("payload too long")
    if not 0 <= weight <= MAX_WEIGHT:  # NaN is neither
        raise RemoteProtocolError("weight is not from 0 to 2**64")
    return Header(
        type=frame_type,
        payload_nbytes=payload_nbytes,
        epoch=epoch,
        outer_step=outer_step,
        fragment=fragment,
        rank=rank,
        chunk=chunk,
        weight=weight,
        plan_hash=plan_hash,
    )


def whole_frame(front: memoryview, limits: Limits) -> Frame | None:
    """The frame that these bytes begin with, its payload where it lies. None if it is not whole.

    Raises:
        RemoteProtocolError: see unpack; PayloadCorrupted, its check does not fit.
    """
    if len(front) < HEADER_NBYTES:
        return None
    header = unpack(front, limits)
    payload = front[HEADER_NBYTES : HEADER_NBYTES + header.payload_nbytes]
    if len(payload) < header.payload_nbytes:
        return None
    check = xxhash.xxh3_64(front[:_PREFIX_NBYTES])
    check.update(payload)
    if check.intdigest() != _CHECK.unpack_from(front, _PREFIX_NBYTES)[0]:
        raise PayloadCorrupted("checksum does not fit")
    return Frame(header, payload)


class FrameReader:
    """Turns a stream of bytes into frames, without copying a payload.

    The owner reads from its socket into `next_buffers()` and tells `received()` how many bytes came.

    Args:
        limits: what may arrive now; may be replaced between frames.
        place: names the destination of a payload, a writable view of exactly `header.payload_nbytes` bytes. May
            raise RemoteProtocolError.
        read_ahead: offer room for the next header behind the payload, which saves a system call for each frame. Off
            where the socket may be handed on between two frames.
    """

    def __init__(self, *, limits: Limits, place: Callable[[Header], memoryview], read_ahead: bool) -> None:
        self.limits = limits
        self._place = place
        self._read_ahead = read_ahead
        self._header_buffer = memoryview(bytearray(HEADER_NBYTES))
        self._prefix = self._header_buffer[:_PREFIX_NBYTES]
        self._header_filled = 0
        self._current: Header | None = None
        self._expected_check = 0
        self._check = xxhash.xxh3_64()
        self._payload = memoryview(b"")
        self._payload_filled = 0
        self._diverted = False

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun that is not whole yet."""
        return self._current is not None or self._header_filled > 0

    @property
    def current(self) -> Header | None:
        """Header of the frame whose payload is arriving, if any."""
        return self._current

    @property
    def missing_nbytes(self) -> int:
        """What is still to come of the payload that is arriving; 0 between frames."""
        return 0 if self._current is None else len(self._payload) - self._payload_filled

    def ended(self) -> ConnectionLost:
        """What it means that the stream is over here."""
        return StreamBroken("closed within a frame") if self.in_frame else ConnectionLost("closed by the other side")

    def next_buffers(self) -> list[memoryview]:
        """Where the next bytes belong, in order; never empty."""
        if self._current is None:
            return [self._header_buffer[self._header_filled :]]
        rest = self._payload[self._payload_filled :]
        return [rest, self._header_buffer] if self._read_ahead else [rest]

    def received(self, nbytes: int) -> list[Frame]:
        """Account for `nbytes` that were read into the buffers just named; return the frames that are whole now.

        Raises:
            RemoteProtocolError: the stream is beyond repair; close the connection.
        """
        frames: list[Frame] = []
        if self._current is not None:
            taken = min(nbytes, len(self._payload) - self._payload_filled)
            if not self._diverted:
                # Piece by piece, while the bytes are still in the cache.
                self._check.update(self._payload[self._payload_filled : self._payload_filled + taken])
            self._payload_filled += taken
            nbytes -= taken
            self._finish_payload(frames)
        if nbytes:
            self._header_filled += nbytes
            if self._header_filled == HEADER_NBYTES:
                self._begin_payload()
                self._finish_payload(frames)
        return frames

    def divert(self, room: Callable[[int], memoryview]) -> None:
        """Let the rest of the arriving payload go to `room(nbytes)` and forget that frame: its destination is gone."""
        if self._current is not None:
            self._payload = room(self._current.payload_nbytes)
            self._diverted = True

    def _begin_payload(self) -> None:
        self._header_filled = 0
        header = unpack(self._prefix, self.limits)
        (self._expected_check,) = _CHECK.unpack_from(self._header_buffer, _PREFIX_NBYTES)
        self._check.reset()
        self._check.update(self._prefix)
        self._payload = self._place(header) if header.payload_nbytes else memoryview(b"")
        assert len(self._payload) == header.payload_nbytes
        self._payload_filled = 0
        self._diverted = False
        self._current = header

    def _finish_payload(self, frames: list[Frame]) -> None:
        if self._current is None or self._payload_filled < len(self._payload):
            return
        header, payload = self._current, self._payload
        self._current = None
        self._payload = memoryview(b"")
        if self._diverted:
            return
        if self._check.intdigest() != self._expected_check:
            raise PayloadCorrupted("checksum does not fit")
        frames.append(Frame(header, payload))
