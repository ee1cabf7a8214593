# SPDX-License-Identifier: Apache-2.0
"""Frames: where they go, how many segments they hold, and what a cut piece looks like to the receiving kernel."""

import itertools
from random import Random

import pytest

from scripts.wanlink import packets
from tests.unit.wan import frames

PAYLOAD = Random(3).randbytes(5 * frames.MSS + 100)  # six segments, the last one short
HEADER = packets.VNET_NBYTES + 20 + frames.TCP_HEADER_NBYTES


def test_destination_is_the_peer_with_that_address() -> None:
    assert packets.destination(frames.tcp(b"x", target=3)) == 3


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        bytes(packets.VNET_NBYTES) + b"\x45",
        frames.tcp(b"x").replace(b"\x0a\x4d\x00", b"\x0a\x4d\x01"),
        frames.tcp(b"x").replace(b"\x45", b"\x65", 1),
    ],
    ids=["empty", "cut off", "another subnet", "not version 4"],
)
def test_frame_for_nobody_here_has_no_destination(frame: bytes) -> None:
    assert packets.destination(frame) == -1


def test_address_zero_is_no_peer() -> None:
    assert packets.destination(frames.tcp(b"x", target=-1)) == -1


def test_super_packet_is_measured_in_segments_of_its_mss() -> None:
    assert packets.measure(frames.tcp(PAYLOAD)) == (HEADER, frames.MSS, 6)
    assert packets.measure(frames.tcp(PAYLOAD[: 2 * frames.MSS])) == (HEADER, frames.MSS, 2)


def test_ordinary_frames_are_one_segment() -> None:
    assert packets.measure(frames.tcp(b"")) == (HEADER, 0, 1)
    assert packets.measure(frames.tcp(b"abc")) == (HEADER, 3, 1)
    assert packets.measure(frames.udp(b"abc")) == (packets.VNET_NBYTES + 28, 3, 1)


def test_wire_bytes_are_those_of_ethernet_frames() -> None:
    assert packets.wire_nbytes(frames.MSS, HEADER, 1) == 1514
    assert packets.wire_nbytes(len(PAYLOAD), HEADER, 6) == len(PAYLOAD) + 6 * (14 + 20 + 32)


@pytest.mark.parametrize(
    ("lost", "kept"),
    [
        ([], [(2, 8)]),
        ([0], [(3, 8)]),
        ([5], [(2, 7)]),
        ([1, 2, 4], [(2, 3), (5, 6), (7, 8)]),
        ([0, 1, 2, 3, 4, 5], []),
    ],
)
def test_runs_are_what_losses_leave(lost: list[int], kept: list[tuple[int, int]]) -> None:
    assert packets.runs(2, 8, lost) == kept


@pytest.mark.parametrize("cuts", [[0, 6], [0, 1, 6], [0, 2, 4, 6], [0, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_cut_pieces_carry_the_whole_payload_with_consecutive_numbers(cuts: list[int]) -> None:
    sequence = 2**32 - 2 * frames.MSS  # wraps on the way
    frame = frames.tcp(PAYLOAD, sequence=sequence, identity=0xFFFE, flags=frames.ACK | frames.PSH | frames.CWR)
    pieces = list(itertools.pairwise(cuts))
    read = [frames.read(packets.cut_out(frame, HEADER, frames.MSS, first, last)) for first, last in pieces]
    assert b"".join(piece.payload for piece in read) == PAYLOAD
    assert [piece.sequence for piece in read] == [(sequence + first * frames.MSS) % 2**32 for first, _ in pieces]
    assert [piece.identity for piece in read] == [(0xFFFE + first) % 2**16 for first, _ in pieces]
    assert [piece.mss for piece in read] == [frames.MSS if last - first > 1 else 0 for first, last in pieces]


def test_fin_and_push_stay_on_the_last_piece_and_cwr_on_the_first() -> None:
    every = frames.ACK | frames.PSH | frames.FIN | frames.CWR
    frame = frames.tcp(PAYLOAD, flags=every)
    flags = [frames.read(packets.cut_out(frame, HEADER, frames.MSS, i, i + 2)).flags for i in (0, 2, 4)]
    assert flags == [frames.ACK | frames.CWR, frames.ACK, frames.ACK | frames.PSH | frames.FIN]


def test_cutting_leaves_the_frame_alone_and_copies_no_payload() -> None:
    frame = frames.tcp(PAYLOAD)
    before = bytes(bytearray(frame))
    _, payload = packets.cut_out(frame, HEADER, frames.MSS, 1, 3)
    assert frame == before
    assert isinstance(payload, memoryview)
    assert payload.obj is frame


def test_flipped_bit_is_one_and_in_the_payload() -> None:
    frame = frames.tcp(PAYLOAD)
    rng = Random(1)
    for _ in range(200):
        (flipped,) = packets.flip_bit((frame[:HEADER], memoryview(frame)[HEADER:]), HEADER, rng)
        different = [(a ^ b).bit_count() for a, b in zip(frame, flipped, strict=True)]
        assert sum(different) == 1
        assert sum(different[:HEADER]) == 0


def test_frame_without_payload_has_no_bit_to_flip() -> None:
    frame = frames.tcp(b"")
    assert packets.flip_bit((frame,), HEADER, Random(1)) == (frame,)
