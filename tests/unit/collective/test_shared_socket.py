# SPDX-License-Identifier: Apache-2.0
"""Connections within one machine: bytes through memory of both, bells through pipes."""

import contextlib
import os
import random
import socket
import struct

import pytest

from isthmus.collective.errors import RemoteProtocolError
from isthmus.collective.transport.shared_memory import NUM_SLOTS, SLOT_NBYTES, make_offering, take_offer
from isthmus.collective.transport.shared_socket import SharedSocket
from isthmus.collective.transport.sockets import SocketOptions
from tests.unit.collective.conftest import num_descriptors, num_mapped

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files are Linux's")

BELL = struct.Struct("!II")
PLAIN = SocketOptions(shares_memory=False)


def pair_of_tcp():
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = socket.create_connection(door.getsockname())
        there, _ = door.accept()
    for sock in (here, there):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def memory_of_both():
    offering = make_offering()
    theirs = take_offer(offering.offer)
    offering.close()
    return offering.memory, theirs


@pytest.fixture
def pair():
    """Both ends of one connection, in one process."""
    ours, theirs = memory_of_both()
    here, there = pair_of_tcp()
    with (
        contextlib.closing(SharedSocket(here, ours, is_dialler=True)) as dialler,
        contextlib.closing(SharedSocket(there, theirs, is_dialler=False)) as acceptor,
    ):
        yield dialler, acceptor


class Ringer:
    """The other side of a connection, which rings what it likes."""

    def __init__(self, memory, sock):
        self.memory, self.sock = memory, sock

    def ring(self, bells):
        os.write(self.memory.rings, bells)

    def close(self):
        self.memory.close()
        self.sock.close()


@pytest.fixture
def ringer():
    """One end of a connection, and a ringer."""
    ours, theirs = memory_of_both()
    here, there = pair_of_tcp()
    with (
        contextlib.closing(SharedSocket(here, ours, is_dialler=True)) as sock,
        contextlib.closing(Ringer(theirs, there)) as ringer,
    ):
        yield sock, ringer


def receive(sock, nbytes):
    buffer = bytearray(nbytes)
    return bytes(buffer[: sock.recv_into(buffer)])


def random_bytes(seed, nbytes):
    return random.Random(seed).randbytes(nbytes)


# ------------------------------------------------------------------------ a socket


@pytest.mark.parametrize("seed", range(5))
def test_bytes_come_in_order_both_ways_however_they_are_cut(pair, seed):
    chance = random.Random(seed)
    sent = [random_bytes(2 * seed + end, chance.randrange(1, 20 << 20)) for end in (0, 1)]
    cuts, arrived = [0, 0], [bytearray(), bytearray()]
    while any(len(arrived[end]) < len(sent[1 - end]) for end in (0, 1)):
        end = chance.randrange(2)
        with contextlib.suppress(BlockingIOError):
            if chance.random() < 0.5:
                middle, last = (cuts[end] + chance.randrange(1 << chance.randrange(1, 23)) for _ in range(2))
                pieces = [sent[end][cuts[end] : middle], sent[end][middle : max(middle, last)]]
                cuts[end] += pair[end].sendmsg(pieces)
            else:
                first, second = (bytearray(chance.randrange(1, 1 << 21)) for _ in range(2))
                nbytes = pair[end].recvmsg_into([first, second])[0]
                arrived[end] += (first + second)[:nbytes]
    assert [bytes(bytes_) for bytes_ in arrived] == sent[::-1]
    assert [sock.pending() for sock in pair] == [0, 0]


def test_a_full_sender_is_blocked_until_the_other_side_has_read_a_slot(pair):
    here, there = pair
    payload = random_bytes(1, NUM_SLOTS * SLOT_NBYTES + 1)
    assert here.send(payload) == NUM_SLOTS * SLOT_NBYTES
    assert not here.has_room()
    with pytest.raises(BlockingIOError):
        here.send(payload)
    assert receive(there, SLOT_NBYTES - 1) == payload[: SLOT_NBYTES - 1]
    with pytest.raises(BlockingIOError):
        receive(here, 1)  # nothing was sent to it, and no bell has rung
    assert not here.has_room()
    receive(there, 1)
    with pytest.raises(BlockingIOError):
        receive(here, 1)  # but it has heard of room
    assert here.has_room()
    assert here.untaken() == (NUM_SLOTS - 1) * SLOT_NBYTES


def test_a_slot_that_is_free_again_is_the_next_to_be_filled(pair):
    here, there = pair
    for _ in range(10):
        here.send(b"x" * 100_000)
        receive(there, 100_000)
        with pytest.raises(BlockingIOError):
            receive(here, 1)
    touched = [any(slot) for slot in here._ours]
    assert touched.count(True) == 1  # the others have never become memory


def test_bytes_can_be_used_where_they_lie(pair):
    here, there = pair
    here.sendmsg([b"header", bytes(1000), b"next"])
    assert receive(there, 6) == b"header"
    assert bytes(there.front()) == bytes(1000) + b"next"
    there.skip(1000)
    assert receive(there, 10) == b"next"
    with pytest.raises(BlockingIOError):
        there.front()
    here.close()
    assert there.front() == b""


def test_bytes_can_be_written_where_they_are_sent_from(pair):
    here, there = pair
    data, head = random_bytes(7, 500_000), b"header"
    for _ in range(5):
        room = here.room_to_send(len(head), len(data))
        room[:] = data
        assert here.sendmsg([head, room]) == len(head) + len(data)
        assert bytes(there.front()) == head + data
        there.skip(len(head) + len(data))
        with contextlib.suppress(BlockingIOError):
            here.front()  # hear that the slot is free


def test_there_is_no_room_for_what_does_not_fit_into_a_slot_or_while_all_are_filled(pair):
    here, there = pair
    assert here.room_to_send(48, SLOT_NBYTES - 48) is not None
    assert here.room_to_send(49, SLOT_NBYTES - 48) is None
    while here.has_room():
        here.send(b"x")
    assert here.room_to_send(0, 1) is None
    assert receive(there, 1) == b"x"


def test_what_was_written_elsewhere_than_it_is_sent_from_is_never_sent_for_it(pair):
    here, _ = pair
    room = here.room_to_send(48, 1000)
    with pytest.raises(AssertionError):
        here.sendmsg([b"only a few bytes", room])
    here.send(b"takes the slot")
    with pytest.raises(AssertionError):
        here.sendmsg([bytes(48), room])


def test_what_was_sent_before_the_end_is_read_before_it(pair):
    here, there = pair
    here.send(b"x" * 3_000_000)
    here.close()
    assert len(receive(there, SLOT_NBYTES)) == SLOT_NBYTES
    assert len(receive(there, SLOT_NBYTES)) == 3_000_000 - SLOT_NBYTES
    with contextlib.suppress(ConnectionError):  # the bell that a slot is free met a closed door
        assert receive(there, 1) == b""


def test_a_connection_that_is_reset_fails_after_what_has_come(ringer):
    sock, there = ringer
    there.ring(BELL.pack(0, 10))
    there.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.sock.close()  # now its end is a reset
    assert receive(sock, 4) == bytes(4)
    assert receive(sock, 4) == bytes(4)
    assert receive(sock, 4) == bytes(2)
    with pytest.raises(ConnectionError):
        receive(sock, 4)


@pytest.mark.parametrize("is_pipe", [True, False])
def test_either_end_is_the_end_once_the_bells_before_it_were_heard(ringer, is_pipe):
    sock, there = ringer
    there.ring(BELL.pack(0, 3) + BELL.pack(1, 2))
    (there.memory if is_pipe else there.sock).close()
    assert len(receive(sock, 9)) == 3
    assert len(receive(sock, 9)) == 2
    with contextlib.suppress(ConnectionError):  # the bell that a slot is free met a closed door
        assert receive(sock, 9) == b""


def test_a_bell_that_rings_while_the_end_is_heard_is_not_lost(ringer, monkeypatch):
    sock, there = ringer
    read = os.read
    late = [BELL.pack(0, 3)]

    def rings_after(descriptor, nbytes):
        try:
            return read(descriptor, nbytes)
        finally:
            if late:  # the pipe was found empty, and now both come
                there.ring(late.pop())
                there.sock.close()

    monkeypatch.setattr(os, "read", rings_after)
    assert len(receive(sock, 9)) == 3
    assert receive(sock, 9) == b""


def test_a_bell_that_rang_before_the_door_closed_is_heard_by_who_finds_it_closed(ringer):
    sock, there = ringer
    there.ring(BELL.pack(0, 3))
    assert len(sock.front()) == 3
    there.ring(BELL.pack(1, 2))
    there.close()
    sock.skip(3)  # the bell that the slot is free meets a closed door
    assert len(receive(sock, 9)) == 2
    with contextlib.suppress(ConnectionError):
        assert receive(sock, 9) == b""


def test_who_cannot_send_any_more_reads_what_has_come_first(ringer):
    sock, there = ringer
    there.ring(BELL.pack(0, 3))
    there.close()
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            sock.send(b"x")
        assert not sock.has_room()
    assert len(receive(sock, 9)) == 3
    with pytest.raises(ConnectionError):
        sock.send(b"x")


def test_bytes_over_tcp_are_a_protocol_error(ringer):
    sock, there = ringer
    there.sock.send(b"x")
    with pytest.raises(RemoteProtocolError, match="beside"):
        receive(sock, 1)


def test_a_peer_that_hears_no_bell_is_a_broken_connection(ringer):
    sock, _ = ringer

    def ring_for_ever():  # it says that slots are free, and does not read
        while True:
            slot = sock._free[-1]
            sock.send(b"x")
            sock._on_bell(slot, 0)

    with pytest.raises(ConnectionResetError):
        ring_for_ever()


def test_a_bell_behind_a_closed_door_is_a_broken_connection(ringer):
    sock, there = ringer
    there.close()
    with pytest.raises(BrokenPipeError):
        sock.send(b"x")


@pytest.mark.parametrize(
    "bells",
    [
        [(NUM_SLOTS, 1)],
        [(2**32 - 1, 0)],
        [(0, SLOT_NBYTES + 1)],
        [(0, 0)],  # free, but we have not filled it
        [(0, 1), (0, 1)],
        [(1, 5), (2, 7), (1, 5)],
    ],
)
def test_a_bell_that_cannot_be_is_a_protocol_error(ringer, bells):
    sock, there = ringer
    there.ring(b"".join(BELL.pack(*bell) for bell in bells))
    with pytest.raises(RemoteProtocolError, match="shared memory"):
        receive(sock, 1 << 20)


@pytest.mark.parametrize("seed", range(30))
def test_random_bells_raise_nothing_but_protocol_errors(ringer, seed):
    sock, there = ringer
    chance = random.Random(seed)
    with contextlib.suppress(RemoteProtocolError):
        for _ in range(200):
            if chance.random() < 0.9:
                there.ring(BELL.pack(chance.randrange(NUM_SLOTS + (chance.random() < 0.02)), chance.randrange(100)))
            else:
                there.ring(chance.randbytes(chance.randrange(1, 20)))
            with contextlib.suppress(BlockingIOError):
                receive(sock, chance.randrange(1, 200))
            with contextlib.suppress(BlockingIOError):
                sock.send(bytes(chance.randrange(1, 100)))


def test_a_part_of_a_bell_is_a_protocol_error(ringer):
    sock, there = ringer
    there.ring(BELL.pack(0, 3)[:5])
    with pytest.raises(RemoteProtocolError, match="part of a bell"):
        receive(sock, 1)


def test_flags_and_addresses_are_refused(pair):
    with pytest.raises(ValueError, match="no flags"):
        pair[0].recvmsg_into([bytearray(1)], 0, socket.MSG_PEEK)
    with pytest.raises(ValueError, match="no flags"):
        pair[0].sendmsg([b"x"], [(1, 2, b"")])


# ------------------------------------------------------------------------ its end


def test_memory_and_descriptors_are_gone_with_the_connection(pair):
    assert num_mapped() == 2
    before = num_descriptors()
    for sock in pair:
        sock.close()
        sock.close()  # idempotent
    assert num_mapped() == 0
    assert num_descriptors() == before - 8  # two connections, two that the mappings held, four ends of pipes
