# SPDX-License-Identifier: Apache-2.0
"""Frames that no honest peer sends: valid ones, changed in one of many ways.

Most carry a checksum that fits, so that they reach what lies behind it: another header field, a hostile payload, a
number that is not finite. The rest are broken as a stream can be: flipped bits, missing or additional bytes, pieces of
two frames, noise.

Rules: everything follows from the generator's seed and from the frames that `learn` was given.
"""

import random
import struct

import msgspec

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.collective.rounds.notices import AbortNotice, Mismatch
from isthmus.collective.rounds.plan import Terms
from isthmus.collective.transport.hello import MAX_CREDENTIAL_NBYTES, Hello, HelloReply, Purpose
from isthmus.collective.transport.wire import HEADER_NBYTES, PROTOCOL_VERSION, Frame, FrameType, Header, pack

_CHUNK_TYPES = (FrameType.PART, FrameType.RESULT)
_FIELD_BITS = {
    "epoch": 32,
    "outer_step": 32,
    "fragment": 16,
    "rank": 16,
    "chunk": 32,
    "plan_hash": 32,
}
_HOSTILE_FLOATS = (float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45, -0.0)
_HOSTILE_MSGPACK = (
    b"\x91" * 4000,  # nested too deep
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xff",  # bytes of as many
    b"\xa4\xff\xfe\xfd\xfc",  # no UTF-8
    b"\x80",
    b"\xc1",  # never used
    b"",
)


class Hostile:
    """See the module.

    Args:
        rng: decides everything.
        victim: whom the frames are for; some accuse it.
    """

    def __init__(self, rng: random.Random, victim: PeerId) -> None:
        self._rng = rng
        self._victim = victim
        self._header = Header(type=FrameType.SIGN)  # of the round that is under way, as the attacker would fill it
        self._terms = Terms(
            op="mean", dtype="float32", numel=1, codec="raw", chunk_nbytes=2048, members="", plan="", slices=""
        )
        self._lengths = [4]
        self._num_chunks = 1
        self._kept = b"noise"

    def learn(self, heard: Frame, rank: int) -> None:
        """Take a frame of the victim's: from now on ours are of its round. `rank` is ours."""
        header = heard.header
        if header.type is FrameType.OPEN:
            self._header = msgspec.structs.replace(header, rank=rank, weight=1.0)
            self._terms = msgspec.msgpack.decode(heard.payload, type=Terms)
            self._lengths, self._num_chunks = [], 1
        elif header.type in _CHUNK_TYPES:
            self._lengths = [*self._lengths[-3:], header.payload_nbytes]
            # Of a swap we hear the second half, of a butterfly first of all our slice, which is the first half.
            heard_chunks = header.chunk + 1
            is_own_half = header.type is FrameType.PART
            self._num_chunks = max(self._num_chunks, 2 * heard_chunks if is_own_half else heard_chunks)

    def frame(self, hostility: float) -> bytes:
        """The bytes of one more frame, which is changed with this probability."""
        if self._rng.random() >= hostility:
            return self._honest_frame()
        frame_type = self._rng.choices(tuple(FrameType), weights=_WEIGHTS)[0]
        payload = self._payload(frame_type)
        header = self._header_of(frame_type)
        way = self._rng.random()
        if way < 0.3:
            header = self._with_hostile_field(header)
        elif way < 0.5:
            payload = self._changed(payload)
        header = msgspec.structs.replace(header, payload_nbytes=len(payload))
        stream = pack(header, payload) + payload
        if self._rng.random() < 0.12:
            stream = self._broken(stream)
        if self._rng.random() < 0.1:
            self._kept = stream
        return stream

    def _honest_frame(self) -> bytes:
        """One that a member with rank 0 of 2 would send, in any order: results of its slice, parts of the other's."""
        half = self._num_chunks // 2
        kinds = (FrameType.OPEN, FrameType.RESULT, FrameType.PART)
        frame_type = self._rng.choice(kinds[:2] if self._terms.codec == "raw" else kinds)
        payload = msgspec.msgpack.encode(self._terms) if frame_type is FrameType.OPEN else self._chunk()
        chunk = {FrameType.OPEN: 0, FrameType.RESULT: 0, FrameType.PART: half}[frame_type]
        chunk += self._rng.randrange(half or 1) if frame_type in _CHUNK_TYPES else 0
        header = msgspec.structs.replace(self._header, type=frame_type, chunk=chunk, payload_nbytes=len(payload))
        return pack(header, payload) + payload

    def _header_of(self, frame_type: FrameType) -> Header:
        chunk = self._rng.randrange(self._num_chunks) if frame_type in _CHUNK_TYPES else 0
        return msgspec.structs.replace(self._header, type=frame_type, chunk=chunk)

    def _chunk(self) -> bytes:
        return bytes(self._rng.choice(self._lengths or [4]))

    def _payload(self, frame_type: FrameType) -> bytes:
        match frame_type:
            case FrameType.PART | FrameType.RESULT:
                chunk = self._chunk()
                if self._rng.random() < 0.05:
                    return struct.pack("<f", self._rng.choice(_HOSTILE_FLOATS)) * (len(chunk) // 4)
                return chunk
            case FrameType.OPEN:
                return msgspec.msgpack.encode(self._other_terms())
            case FrameType.ABORT:
                return msgspec.msgpack.encode(self._notice())
            case FrameType.HELLO:
                return msgspec.msgpack.encode(self._hello())
            case FrameType.HELLO_REPLY:
                reply = HelloReply(accepted=True, reason="x" * 600, peer_id=self._victim, incarnation=Incarnation(-1))
                return msgspec.msgpack.encode(reply)
            case FrameType.SIGN:
                return b""
            case _:
                return self._rng.randbytes(self._rng.randrange(64))

    def _other_terms(self) -> Terms:
        terms = self._terms
        if self._rng.random() < 0.3:
            field = self._rng.choice(terms.__struct_fields__)
            value = self._rng.choice((-1, 2**63 - 1, 0) if isinstance(getattr(terms, field), int) else ("", "x" * 900))
            terms = msgspec.structs.replace(terms, **{field: value})
        return terms

    def _notice(self) -> AbortNotice:
        suspects = self._rng.choice(((), (self._victim,), (PeerId("f" * 16),) * 200, (PeerId("\x00"),)))
        words = Mismatch(
            self._rng.choice(("numel", "", "op")), self._rng.choice((0, -1, "sum")), "x" * 900, self._victim
        )
        mismatch = words if self._rng.random() < 0.3 else None
        return AbortNotice(self._rng.choice(("", "gone", "é" * 1500)), suspects, mismatch)

    def _hello(self) -> Hello:
        return Hello(
            protocol_version=self._rng.choice((PROTOCOL_VERSION, -1, 2**40)),
            run_id="r" * self._rng.choice((0, 64, 65)),
            purpose=self._rng.choice(tuple(Purpose)),
            peer_id=self._rng.choice((self._victim, PeerId("../../x"))),
            incarnation=Incarnation(self._rng.choice((0, 2**53 + 1))),
            credential=self._rng.randbytes(self._rng.choice((0, 128, MAX_CREDENTIAL_NBYTES + 1))),
            stream=self._rng.choice((0, 63, 64)),
        )

    def _with_hostile_field(self, header: Header) -> Header:
        if self._rng.random() < 0.1:
            weight = self._rng.choice((0.0, 1e300, -1.0, float("nan"), float("inf")))
            return msgspec.structs.replace(header, weight=weight)
        field = self._rng.choice(tuple(_FIELD_BITS))
        top = 2 ** _FIELD_BITS[field] - 1
        known = getattr(header, field)
        value = self._rng.choice((0, 1, top, min(known + 1, top), max(known - 1, 0), self._rng.randint(0, top)))
        return msgspec.structs.replace(header, **{field: value})

    def _changed(self, payload: bytes) -> bytes:
        """Another payload, with a length and a checksum that fit it."""
        way = self._rng.randrange(5)
        if way == 0:
            return self._rng.choice(_HOSTILE_MSGPACK)
        if way == 1:
            return payload[: self._rng.randrange(len(payload) + 1)]
        if way == 2:
            return payload + self._rng.randbytes(self._rng.choice((1, 4, 5000)))
        return self._flipped(payload)

    def _broken(self, stream: bytes) -> bytes:
        """Bytes that are no frame any more."""
        way = self._rng.randrange(5)
        if way == 0:
            return self._rng.randbytes(self._rng.randrange(1, 200))
        if way == 1:
            return stream[: self._rng.randrange(1, len(stream))]
        if way == 2:
            cut = self._rng.randrange(len(stream))
            return stream[:cut] + self._kept[self._rng.randrange(len(self._kept)) :]
        if way == 3:  # another length than what follows
            length = self._rng.choice((0, 1, 2**32 - 1, len(stream) - HEADER_NBYTES + self._rng.choice((-1, 1))))
            return stream[:4] + struct.pack("!I", length & 0xFFFFFFFF) + stream[8:]
        return self._flipped(stream)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._rng.randint(1, 4) if changed else 0):
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)


_WEIGHTS = [
    {FrameType.OPEN: 4, FrameType.ABORT: 1, FrameType.PART: 8, FrameType.RESULT: 8}.get(frame_type, 0.4)
    for frame_type in FrameType
]
