# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells about a connection, and kernels that tell less."""

import socket
import struct
import sys
from contextlib import closing
from pathlib import Path

import pytest

from isthmus.collective.transport.tcp_info import (
    TcpInfo,
    parse_tcp_info,
    path_mtu,
    read_tcp_info,
    round_trip_s,
    unacknowledged_nbytes,
    window_nbytes,
)

FIELDS = TcpInfo.__dataclass_fields__


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
    with closing(here), closing(there):
        yield here, there


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_longest_packet_of_a_path_is_that_of_its_interface(family, host):
    with socket.socket(family) as listening, socket.socket(family) as here:
        try:
            listening.bind((host, 0))
        except OSError as error:
            pytest.skip(str(error))
        listening.listen()
        here.connect(listening.getsockname())
        longest = 65_535 if family == socket.AF_INET else 1 << 32  # of IPv4
        assert path_mtu(here) == min(longest, int(Path("/sys/class/net/lo/mtu").read_text()))
    assert path_mtu(here) is None, "it is closed"


def test_a_live_connection_tells_its_figures(pair):
    here, there = pair
    for _ in range(20):
        here.sendall(bytes(50_000))
        received = 0
        while received < 50_000:
            received += len(there.recv(65536))
        there.sendall(b"!")
        here.recv(1)
    info = read_tcp_info(here)
    assert 0 < info.min_rtt_us <= info.rtt_us < 1_000_000
    assert round_trip_s(here) == pytest.approx(info.min_rtt_us * 1e-6), "without queues"
    assert info.last_ack_recv_ms < 1000
    assert info.bytes_acked >= 1_000_000
    assert info.bytes_delivered >= 1_000_000
    assert info.bytes_retrans == 0
    assert unacknowledged_nbytes(here) == 0
    assert window_nbytes(here) >= 50_000


def test_what_the_other_side_does_not_read_is_unacknowledged(pair):
    here, _ = pair
    here.setblocking(False)
    with pytest.raises(BlockingIOError):
        [here.send(bytes(65536)) for _ in range(10_000)]
    assert unacknowledged_nbytes(here) > 0


def test_every_field_is_read_from_its_own_place():
    kernel = bytearray(232)
    for offset, value in ((16, 1448), (56, 10), (68, 11), (148, 13), (192, 1000)):
        struct.pack_into("=I", kernel, offset, value)
    for offset, value in ((120, 2**40), (208, 24)):
        struct.pack_into("=Q", kernel, offset, value)
    assert parse_tcp_info(bytes(kernel)) == TcpInfo(
        last_ack_recv_ms=10,
        rtt_us=11,
        min_rtt_us=13,
        bytes_acked=2**40,
        bytes_delivered=1_448_000,
        bytes_retrans=24,
    )


@pytest.mark.parametrize(
    ("nbytes", "known"),
    [
        (0, set()),
        (104, {"last_ack_recv_ms", "rtt_us"}),
        (136, {"last_ack_recv_ms", "rtt_us", "bytes_acked"}),
        (192, set(FIELDS) - {"bytes_delivered", "bytes_retrans"}),
        (400, set(FIELDS)),
    ],
    ids=["nothing", "2.6", "4.1", "4.10", "one of the future"],
)
def test_a_field_that_a_kernel_does_not_have_is_none(nbytes, known):
    info = parse_tcp_info(bytes(nbytes))
    assert {name for name in FIELDS if getattr(info, name) is not None} == known


def test_a_path_that_was_never_measured_has_no_shortest_round_trip():
    kernel = bytearray(232)
    struct.pack_into("=I", kernel, 148, 0xFFFFFFFF)
    assert parse_tcp_info(bytes(kernel)).min_rtt_us is None


def test_a_closed_socket_and_one_without_tcp_tell_nothing():
    with socket.socket() as closed:
        pass
    assert (read_tcp_info(closed), round_trip_s(closed)) == (None, 0.0)
    assert (unacknowledged_nbytes(closed), window_nbytes(closed)) == (0, 0)
    here, there = socket.socketpair()
    with closing(here), closing(there):
        assert read_tcp_info(here) is None
