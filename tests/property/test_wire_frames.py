# SPDX-License-Identifier: Apache-2.0
"""Whatever the stream does to the bytes, frames come out whole or a RemoteProtocolError does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective.errors import PayloadCorrupted, RemoteProtocolError
from isthmus.collective.transport.wire import (
    HEADER_NBYTES,
    ON_CONTROL,
    FrameReader,
    FrameType,
    Header,
    on_bulk,
    pack,
    unpack,
    whole_frame,
)

LIMITS = dict.fromkeys(FrameType, 1 << 12)
U16, U32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
PAYLOADS = st.binary(max_size=300)


@st.composite
def frames(draw):
    payload = draw(PAYLOADS)
    header = Header(
        type=draw(st.sampled_from(FrameType)),
        payload_nbytes=len(payload),
        epoch=draw(U32),
        outer_step=draw(U32),
        fragment=draw(U16),
        rank=draw(U16),
        chunk=draw(U32),
        weight=draw(st.floats(0, 1e15)),
        plan_hash=draw(U32),
    )
    return header, payload


def read(stream, cuts, *, read_ahead=True, limits=LIMITS):
    """Feed `stream` in pieces of at most the given sizes, as a socket would."""
    reader = FrameReader(
        limits=limits, place=lambda header: memoryview(bytearray(header.payload_nbytes)), read_ahead=read_ahead
    )
    whole, position, turn = [], 0, 0
    while position < len(stream):
        wanted = cuts[turn % len(cuts)] if cuts else len(stream)
        turn += 1
        filled = 0
        for buffer in reader.next_buffers():
            piece = stream[position : position + min(len(buffer), wanted - filled)]
            buffer[: len(piece)] = piece
            filled += len(piece)
            position += len(piece)
            if filled == wanted:
                break
        whole.extend((frame.header, bytes(frame.payload)) for frame in reader.received(filled))
    return whole, reader


@given(st.lists(frames(), max_size=6), st.lists(st.integers(1, 400), max_size=5), st.booleans())
def test_frames_survive_any_split_of_the_stream(sent, cuts, read_ahead):
    stream = b"".join(pack(header, payload) + payload for header, payload in sent)
    whole, reader = read(stream, cuts, read_ahead=read_ahead)
    assert whole == sent
    assert not reader.in_frame


@given(frames(), st.integers(0, 10**6), st.integers(0, 7))
def test_a_flipped_bit_never_passes(frame, position, bit):
    header, payload = frame
    stream = bytearray(pack(header, payload) + payload)
    stream[position % len(stream)] ^= 1 << bit
    try:
        whole, reader = read(bytes(stream), [])
    except RemoteProtocolError:
        return
    # A longer length leaves the reader waiting for bytes that never come: nothing passed either.
    assert whole == []
    assert reader.in_frame


@given(st.binary(max_size=400))
def test_random_bytes_never_raise_anything_else(stream):
    try:
        whole, _ = read(stream, [])
    except RemoteProtocolError:
        return
    assert whole == []


@given(frames(), st.data())
def test_mutated_frames_never_raise_anything_else(frame, data):
    header, payload = frame
    stream = bytearray(pack(header, payload) + payload)
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(stream), data.draw(st.lists(st.integers(1, 64), max_size=3)))
    except RemoteProtocolError:
        return


@given(frames(), st.integers(1, 347))
def test_a_truncated_frame_is_no_frame(frame, missing):
    header, payload = frame
    stream = (pack(header, payload) + payload)[:-missing]
    whole, _ = read(stream, [])
    assert whole == []
    assert whole_frame(memoryview(stream), LIMITS) is None


def outcome(reads):
    try:
        return reads()
    except RemoteProtocolError as error:
        return error.reason


@given(frames(), st.binary(max_size=HEADER_NBYTES - 1), st.data())
def test_a_frame_in_one_piece_is_read_as_from_a_stream(frame, behind, data):
    header, payload = frame
    stream = bytearray(pack(header, payload) + payload)
    for _ in range(data.draw(st.integers(0, 2))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))

    def in_one_piece():
        found = whole_frame(memoryview(stream + behind), LIMITS)
        return [] if found is None else [(found.header, bytes(found.payload))]

    # A length that was changed can take in bytes behind the frame: then neither finds one before all of them are read.
    assert outcome(in_one_piece) == outcome(lambda: read(bytes(stream + behind), [])[0][:1])


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, ord("X"), "wrong magic"),
        (2, 99, "wrong protocol version"),
        (3, 200, "unknown frame type"),
        (3, FrameType.RESULT, "frame type not allowed here"),
        (4, 255, "payload too long"),
    ],
)
def test_a_header_out_of_bounds_is_refused_before_its_payload_has_a_place(position, value, reason):
    stream = bytearray(pack(Header(type=FrameType.CONTROL, payload_nbytes=3), b"abc"))
    stream[position] = value
    with pytest.raises(RemoteProtocolError, match=reason):
        unpack(bytes(stream[: HEADER_NBYTES - 8]), ON_CONTROL)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e39])
def test_a_weight_that_is_no_weight_is_refused(weight):
    header = Header(type=FrameType.PART, payload_nbytes=1, weight=weight)
    with pytest.raises(RemoteProtocolError, match="weight"):
        unpack(pack(header, b"x")[: HEADER_NBYTES - 8], on_bulk(1024))


def test_a_corrupt_payload_is_named_so():
    payload = b"payload"
    stream = bytearray(pack(Header(type=FrameType.CONTROL, payload_nbytes=7), payload) + payload)
    stream[-1] ^= 1
    with pytest.raises(PayloadCorrupted):
        read(bytes(stream), [])


def test_a_diverted_payload_is_forgotten_and_the_next_frame_is_whole():
    first, second = bytes(range(100)), b"second"
    stream = b"".join(pack(Header(type=FrameType.CONTROL, payload_nbytes=len(p)), p) + p for p in (first, second))
    kept = bytearray(100)
    places = [memoryview(kept), memoryview(bytearray(6))]
    reader = FrameReader(limits=LIMITS, place=lambda _: places.pop(0), read_ahead=True)
    received = []

    def feed(piece):
        for buffer in reader.next_buffers():
            taken = min(len(buffer), len(piece))
            buffer[:taken] = piece[:taken]
            piece = piece[taken:]
            received.extend(reader.received(taken) if not piece else [])
            if not piece:
                return

    feed(stream[:48])
    feed(stream[48:88])
    reader.divert(lambda nbytes: memoryview(bytearray(nbytes)))
    feed(stream[88:148])
    feed(stream[148:196])
    feed(stream[196:])
    assert bytes(kept[40:]) == bytes(60)
    assert [bytes(frame.payload) for frame in received] == [b"second"]
