# SPDX-License-Identifier: Apache-2.0
"""Frames as a TUN device gives them, and what a receiver reads in one."""

import struct
from dataclasses import dataclass

from scripts.wanlink.packets import VNET_NBYTES, Pieces, ones_complement

MSS = 1448
TCP_HEADER_NBYTES = 32
FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80


def address(peer: int) -> bytes:
    return bytes([10, 77, 0, peer + 1])


def _ipv4(source: int, target: int, protocol: int, length: int, identity: int) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, identity, 0x4000, 64, protocol, 0)
    whole = head + address(source) + address(target)
    checksum = 0xFFFF & ~ones_complement(sum(struct.unpack("!10H", whole)))
    return whole[:10] + struct.pack("!H", checksum) + whole[12:]


def tcp(
    payload: bytes, *, source: int = 0, target: int = 1, sequence: int = 1000, flags: int = ACK, identity: int = 7
) -> bytes:
    """A TCP frame whose checksum the receiver is not to look at; a super-packet if it is longer than MSS."""
    is_super = len(payload) > MSS
    vnet = struct.pack("=BBHHHH", 1, int(is_super), 52, MSS if is_super else 0, 20, 16)
    length = TCP_HEADER_NBYTES + len(payload)
    pseudo = ones_complement(sum(struct.unpack("!4H", address(source) + address(target))) + 6 + length)
    header = struct.pack("!HHIIBBHHH", 1, 2, sequence, 5, TCP_HEADER_NBYTES // 4 << 4, flags, 500, pseudo, 0)
    return vnet + _ipv4(source, target, 6, length, identity) + header + bytes(12) + payload


def udp(payload: bytes, *, source: int = 0, target: int = 1) -> bytes:
    header = struct.pack("!4H", 1, 2, 8 + len(payload), 0)
    return bytes(VNET_NBYTES) + _ipv4(source, target, 17, 8 + len(payload), 7) + header + payload


@dataclass(frozen=True, slots=True)
class Read:
    """A TCP frame taken apart; making one checks what a kernel checks."""

    identity: int
    sequence: int
    flags: int
    mss: int
    payload: bytes


def read(pieces: Pieces) -> Read:
    frame = b"".join(pieces)
    flags, gso_type, _, gso_size, start, offset = struct.unpack_from("=BBHHHH", frame)
    packet = frame[VNET_NBYTES:]
    length, identity = struct.unpack_from("!HH", packet, 2)
    assert length == len(packet)
    assert ones_complement(sum(struct.unpack_from("!10H", packet))) == 0xFFFF, "the IP header's checksum"
    assert (flags, start, offset) == (1, 20, 16)
    segment = packet[20:]
    (pseudo,) = struct.unpack_from("!H", segment, 16)
    assert pseudo == ones_complement(sum(struct.unpack_from("!4H", packet, 12)) + 6 + len(segment))
    assert bool(gso_type) == bool(gso_size)
    (sequence,) = struct.unpack_from("!I", segment, 4)
    return Read(identity, sequence, segment[13], gso_size, segment[TCP_HEADER_NBYTES:])
