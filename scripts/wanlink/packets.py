# SPDX-License-Identifier: Apache-2.0
"""One frame as a TUN device gives and takes it: a virtio-net header, then an IPv4 packet.

With segmentation offload the kernel hands over super-packets: one TCP header and up to 64 KiB of payload, which a
network card would send as many segments of `mss` bytes. Losing, and queueing, happens to segments; this module counts
them and cuts a super-packet into runs of them.

Rules: pure; a payload is never copied, only its header is. It knows nothing of links or time.
"""

import struct
from collections.abc import Sequence
from random import Random
from typing import TypeAlias

# The pieces of a frame in order, for writev.
Pieces: TypeAlias = tuple[bytes | bytearray | memoryview, ...]

SUBNET = bytes([10, 77, 0])  # peer i has 10.77.0.(i + 1)
ETHERNET_NBYTES = 14  # what each segment takes on the wire beside its IP packet
TCP = 6

# struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset; in the machine's byte order.
VNET_NBYTES = 10
VNET_NEEDS_CHECKSUM = 1
_GSO_SIZE = struct.Struct("=H")
_GSO_SIZE_AT = 4
_GSO_TYPE_AT = 1

# Offsets in the frame, or in the TCP header.
_IP = VNET_NBYTES
_LENGTH_AND_ID = struct.Struct("!HH")
_LENGTH_AND_ID_AT = _IP + 2
_PROTOCOL_AT = _IP + 9
_IP_CHECKSUM_AT = _IP + 10
_ADDRESSES_AT = _IP + 12
_DESTINATION_AT = _IP + 16
_SEQUENCE_AT = 4
_DATA_OFFSET_AT = 12
_FLAGS_AT = 13
_TCP_CHECKSUM_AT = 16
_UDP_HEADER_NBYTES = 8
_FIN_PSH = 0x01 | 0x08
_CWR = 0x80

_U16 = struct.Struct("!H")
_U32 = struct.Struct("!I")
_FOUR_U16 = struct.Struct("!4H")


def destination(frame: bytes) -> int:
    """Index of the peer that the frame is for; -1 if it is not IPv4 within the peers' subnet."""
    if len(frame) < _IP + 20 or frame[_IP] >> 4 != 4 or frame[_DESTINATION_AT : _DESTINATION_AT + 3] != SUBNET:
        return -1
    return frame[_DESTINATION_AT + 3] - 1


def measure(frame: bytes) -> tuple[int, int, int]:
    """Header bytes (virtio-net, IP and TCP or UDP), mss in bytes, and number of segments of an IPv4 frame.

    A frame that is no super-packet is one segment, and its mss is the whole of its payload.
    """
    transport = _IP + (frame[_IP] & 15) * 4
    if frame[_PROTOCOL_AT] != TCP:
        header = min(transport + _UDP_HEADER_NBYTES, len(frame))
        return header, len(frame) - header, 1
    if len(frame) < transport + 20:
        return len(frame), 0, 1
    header = transport + (frame[transport + _DATA_OFFSET_AT] >> 4) * 4
    payload = len(frame) - header
    (mss,) = _GSO_SIZE.unpack_from(frame, _GSO_SIZE_AT)
    if not frame[_GSO_TYPE_AT] or not mss or payload <= mss:
        return header, payload, 1
    return header, mss, -(-payload // mss)


def wire_nbytes(payload: int, header: int, segments: int) -> int:
    """Bytes on an Ethernet for so much payload in so many segments; `header` as `measure` gives it."""
    return payload + segments * (header - VNET_NBYTES + ETHERNET_NBYTES)


def runs(first: int, last: int, lost: Sequence[int]) -> list[tuple[int, int]]:
    """The stretches [first, last) falls into when the segments `lost` (ascending, relative to first) are gone."""
    kept = []
    start = first
    for index in lost:
        if start < first + index:
            kept.append((start, first + index))
        start = first + index + 1
    if start < last:
        kept.append((start, last))
    return kept


def cut_out(frame: bytes, header: int, mss: int, first: int, last: int) -> Pieces:
    """Segments [first, last) of a TCP super-packet as a frame of their own; the payload stays where it is.

    Does what a network card does for each segment: IP length, id and checksum, sequence number, FIN and PSH only on
    the last one, CWR only on the first, and the pseudo-header part of the TCP checksum, which the receiving kernel
    takes as "not computed yet, and not needed: it never was on a wire".
    """
    start, stop = header + first * mss, min(header + last * mss, len(frame))
    transport = _IP + (frame[_IP] & 15) * 4
    head = bytearray(frame[:header])
    if last - first == 1:
        head[_GSO_TYPE_AT] = 0
        _GSO_SIZE.pack_into(head, _GSO_SIZE_AT, 0)
    length = header - _IP + stop - start
    _, identity = _LENGTH_AND_ID.unpack_from(head, _LENGTH_AND_ID_AT)
    _LENGTH_AND_ID.pack_into(head, _LENGTH_AND_ID_AT, length, (identity + first) & 0xFFFF)
    _U16.pack_into(head, _IP_CHECKSUM_AT, 0)
    words = struct.unpack_from(f"!{(transport - _IP) // 2}H", head, _IP)
    _U16.pack_into(head, _IP_CHECKSUM_AT, 0xFFFF & ~ones_complement(sum(words)))
    (sequence,) = _U32.unpack_from(head, transport + _SEQUENCE_AT)
    _U32.pack_into(head, transport + _SEQUENCE_AT, (sequence + first * mss) & 0xFFFFFFFF)
    if stop < len(frame):
        head[transport + _FLAGS_AT] &= ~_FIN_PSH
    if first:
        head[transport + _FLAGS_AT] &= ~_CWR & 0xFF
    if head[0] & VNET_NEEDS_CHECKSUM:
        pseudo_header = sum(_FOUR_U16.unpack_from(head, _ADDRESSES_AT)) + TCP + length - (transport - _IP)
        _U16.pack_into(head, transport + _TCP_CHECKSUM_AT, ones_complement(pseudo_header))
    return head, memoryview(frame)[start:stop]


def ones_complement(total: int) -> int:
    """Sum of 16-bit words with the carries added in again (RFC 1071)."""
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def flip_bit(pieces: Pieces, header: int, rng: Random) -> Pieces:
    """The same frame with one bit of its payload turned; as it was, if it has no payload."""
    whole = bytearray().join(pieces)
    if len(whole) == header:
        return pieces
    whole[rng.randrange(header, len(whole))] ^= 1 << rng.randrange(8)
    return (whole,)
