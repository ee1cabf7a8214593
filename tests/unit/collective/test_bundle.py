# SPDX-License-Identifier: Apache-2.0
"""All links to one peer: which stream takes what, how fast, in which order. Real sockets; their distance is set."""

import contextlib
import socket
import struct

import pytest

from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.transport.bundle import Bundle, Notice
from isthmus.collective.transport.link import Caps, Link
from isthmus.collective.transport.sockets import SocketOptions, congestion_control_of, find_speed_anew, pace
from isthmus.collective.transport.wire import FrameType, Header, pack

PEER = PeerRef(PeerId("0" * 16), Incarnation(1))
SO_MAX_PACING_RATE = 47
NO_PACE = 2**64 - 1
NAMES = {b"n": "notice", b"c": "part", b"r": "result"}


class Listening:
    """Owner of a bundle that keeps what it hears."""

    def __init__(self):
        self.renewed = []
        self.taken = []

    def place(self, _bundle, link, header):
        return link.staging.room(header.payload_nbytes), self

    def take(self, _link, frame):
        self.taken.append(frame)

    def on_broken(self, _bundle, _cause):
        pass

    def on_renewed(self, bundle):
        self.renewed.append(bundle)


def pace_of(sock):
    return struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]


@contextlib.asynccontextmanager
async def bundle_of(num_streams, *, round_trip_s, control="bbr"):
    """(bundle, our ends, their ends) with so many streams to a peer at this distance."""
    bundle = Bundle(
        PEER,
        is_dialler=True,
        num_streams=num_streams,
        chunk_nbytes=1 << 20,
        hello=lambda *_: None,
        owner=Listening(),
        options=SocketOptions(),
        security=None,
        caps=Caps(),
    )
    ours, theirs = [], []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for stream in range(num_streams):
            ours.append(socket.create_connection(server.getsockname()))
            theirs.append(server.accept()[0])
            ours[-1].setblocking(False)
            bundle.attach(ours[-1], stream)
    if round_trip_s is not None:
        bundle.round_trip_s, bundle._control = round_trip_s, control
    try:
        yield bundle, ours, theirs
    finally:
        bundle.close()
        for sock in theirs:
            sock.close()


def small(payload):
    return Notice(pack(Header(type=FrameType.ABORT, payload_nbytes=len(payload)), payload), payload)


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_a_paced_path_uses_as_few_streams_as_carry_it_and_shares_the_pace_out_to_them():
    async with bundle_of(8, round_trip_s=0.05) as (bundle, ours, _):
        bundle.pace(100e6)  # 5 MB on their way, 1 MiB a stream
        assert [pace_of(sock) for sock in ours] == [20_000_000] * 8
        taken = [bundle.next_out(link) for link in bundle._links.values()]
        assert taken == [None] * 8
        bundle.parts.extend(small(b"c") for _ in range(8))
        taken = [bundle.next_out(link) is not None for link in bundle._links.values()]
        assert taken == [True] * 5 + [False] * 3


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="Linux's")
@pytest.mark.parametrize(("pace", "unsent"), [(20e6, 600_000), (1e6, 256 << 10), (1e9, 1 << 20)])
async def test_a_paced_stream_has_something_to_go_on_with_while_we_are_busy(pace, unsent):
    async with bundle_of(1, round_trip_s=0.01) as (bundle, ours, _):
        bundle.pace(pace)
        assert ours[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == unsent
        bundle.pace(None)
        assert ours[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 256 << 10


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_fewer_streams_that_carry_what_more_of_them_did_find_their_speed_anew(monkeypatch):
    anew = []
    monkeypatch.setattr("isthmus.collective.transport.link.find_speed_anew", anew.append)
    async with bundle_of(8, round_trip_s=0.05) as (bundle, ours, _):
        bundle.pace(100e6)  # five of eight streams are used
        assert anew == ours
        bundle.pace(100e6)
        bundle.raise_pace()  # eight
        bundle.pace(None)  # all
        assert anew == ours
        bundle.pace(12e6)  # one
        assert anew == ours * 2


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux's")
async def test_who_finds_its_speed_anew_keeps_its_congestion_control_and_its_bytes():
    async with bundle_of(1, round_trip_s=0.05) as (_, ours, theirs):
        before = congestion_control_of(ours[0])
        ours[0].send(b"first")
        find_speed_anew(ours[0])
        ours[0].send(b"then")
        assert congestion_control_of(ours[0]) == before != ""
        assert theirs[0].recv(9, socket.MSG_WAITALL) == b"firstthen"


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_a_stream_whose_window_has_collapsed_stands_back_while_others_do_not(monkeypatch):
    windows = dict.fromkeys(range(4), 1 << 20)
    monkeypatch.setattr(Link, "window_nbytes", lambda link: windows[link.stream])
    async with bundle_of(4, round_trip_s=0.15) as (bundle, _, _):
        bundle.pace(12e6)  # 1.8 MB on their way: two streams

        def takers():
            bundle.parts.extend(small(b"c") for _ in range(4))
            taken = [stream for stream, link in bundle._links.items() if bundle.next_out(link) is not None]
            bundle.parts.clear()
            return taken

        assert takers() == [0, 1]
        windows.update({0: 200 << 10, 3: 4 << 20})
        assert takers() == [0, 1], "what has not collapsed is as good as any, or they would take turns"
        windows[0] = 1448
        assert takers() == [1, 2]
        windows.update({1: 2896, 2: 14_480, 3: 14_480})
        assert takers() == [2, 3]
        windows.update(dict.fromkeys(range(4), 1448))
        assert takers() == [0, 1]
        windows.update(dict.fromkeys(range(4), 0))  # a system that does not tell
        assert takers() == [0, 1]


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_without_a_pace_all_streams_send_as_fast_as_they_can():
    async with bundle_of(4, round_trip_s=0.05) as (bundle, ours, _):
        bundle.pace(10e6)
        bundle.pace(None)
        assert [pace_of(sock) for sock in ours] == [NO_PACE] * 4
        bundle.results.extend(small(b"r") for _ in range(4))
        assert all(bundle.next_out(link) is not None for link in bundle._links.values())


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_a_pace_that_is_raised_takes_more_streams_where_it_needs_them():
    async with bundle_of(8, round_trip_s=0.05) as (bundle, ours, _):
        bundle.pace(20e6)
        assert [pace_of(sock) for sock in ours] == [20_000_000] * 8  # one stream is used
        bundle.raise_pace()
        assert bundle.pace_now == 30e6
        assert [pace_of(sock) for sock in ours] == [15_000_000] * 8


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_what_was_found_beyond_a_pace_fades_with_the_operations_that_follow():
    async with bundle_of(8, round_trip_s=0.05) as (bundle, _, _):
        bundle.pace(10e6)
        bundle.raise_pace()
        found = bundle.pace_now
        bundle.pace(10e6)
        assert 10e6 < bundle.pace_now < found
        for _ in range(5):
            bundle.pace(10e6)
        assert bundle.pace_now == 10e6
        bundle.pace(None)
        assert bundle.pace_now is None


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_what_was_found_beyond_the_pace_of_one_plan_is_a_factor_for_that_of_another():
    async with bundle_of(8, round_trip_s=0.05) as (bundle, _, _):
        bundle.pace(30e6)  # of a ring: the whole line is this neighbour's
        bundle.pace(10e6)  # of a butterfly: three share it
        assert bundle.pace_now == 10e6
        bundle.raise_pace()
        bundle.pace(30e6)
        assert 30e6 < bundle.pace_now < 45e6


@pytest.mark.parametrize(("round_trip_s", "control"), [(0.0001, "bbr"), (0.05, "cubic")])
async def test_near_paths_and_those_without_bbr_are_never_paced(round_trip_s, control):
    async with bundle_of(2, round_trip_s=round_trip_s, control=control) as (bundle, ours, _):
        bundle.pace(1e6)
        bundle.raise_pace()
        assert [pace_of(sock) for sock in ours] == [NO_PACE] * 2
        bundle.parts.extend(small(b"c") for _ in range(2))
        assert all(bundle.next_out(link) is not None for link in bundle._links.values())


async def test_what_was_lost_is_to_be_sent_again_once_with_the_next_stream_that_comes_up_whichever_it_is():
    async with bundle_of(3, round_trip_s=0.05) as (bundle, _, theirs):

        def attach(stream):
            with socket.create_server(("127.0.0.1", 0)) as server:
                ours = socket.create_connection(server.getsockname())
                theirs.append(server.accept()[0])
            ours.setblocking(False)
            bundle.attach(ours, stream)

        renewed = bundle._owner.renewed
        bundle._links[1].close()
        bundle._links[2].close()
        assert renewed == []
        attach(3)  # there was none of this number before
        assert renewed == [bundle]
        attach(1)
        assert renewed == [bundle], "nothing was lost since"
        attach(0)  # in the place of one that may be dead
        assert renewed == [bundle] * 2


async def test_the_distance_is_that_of_the_quickest_stream(monkeypatch):
    seen_s = iter([0.004, 0.0003, 0.0, 0.005])
    monkeypatch.setattr("isthmus.collective.transport.bundle.round_trip_s", lambda _sock: next(seen_s))
    async with bundle_of(4, round_trip_s=None) as (bundle, _, _):
        assert bundle.round_trip_s == 0.0003


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="pacing is Linux's")
async def test_what_was_known_of_one_path_is_forgotten_over_another(monkeypatch):
    seen_s = iter([0.0003, 0.004, 0.05, 0.06])
    monkeypatch.setattr("isthmus.collective.transport.bundle.round_trip_s", lambda _sock: next(seen_s))
    monkeypatch.setattr("isthmus.collective.transport.bundle.congestion_control_of", lambda _sock: "bbr")
    async with bundle_of(2, round_trip_s=None) as (bundle, _, theirs):

        def attach(host):
            with socket.create_server((host, 0)) as server:
                ours = socket.create_connection(server.getsockname())
                theirs.append(server.accept()[0])
            ours.setblocking(False)
            bundle.attach(ours, 0)

        assert bundle.round_trip_s == 0.0003
        attach("127.0.0.2")
        assert (bundle.round_trip_s, bundle.is_far) == (0.05, True)
        bundle.pace(10e6)
        monkeypatch.setattr("isthmus.collective.transport.bundle.round_trip_s", lambda _sock: 0.0004)
        attach("127.0.0.1")
        assert (bundle.round_trip_s, bundle.is_far, bundle.pace_now) == (0.0004, False, None)


class SetClock:
    """The loop, but for its time."""

    def __init__(self, loop):
        self._loop = loop
        self.now = 100.0

    def time(self):
        return self.now

    def __getattr__(self, name):
        return getattr(self._loop, name)


async def test_a_chunk_takes_at_least_what_the_present_one_has_taken_until_its_latest_byte(until):
    payload = bytes(40_000)
    frame = pack(Header(type=FrameType.PART, payload_nbytes=len(payload)), payload) + payload
    async with bundle_of(2, round_trip_s=0.05) as (bundle, _, theirs):
        link = bundle._links[0]
        clock = link._loop = SetClock(link._loop)
        assert bundle.chunk_s == 0.0
        theirs[0].send(frame[:10_000])
        await until(lambda: link.bytes_received == 10_000)
        clock.now += 3.0
        theirs[0].send(frame[10_000:20_000])
        await until(lambda: link.bytes_received == 20_000)
        clock.now += 50.0  # silence
        assert bundle.chunk_s == 3.0
        clock.now -= 48.0
        theirs[0].send(frame[20_000:])
        await until(lambda: bundle._owner.taken)
        assert bundle.chunk_s == pytest.approx(1.0), "a fifth of five seconds: a moving average"


async def test_streams_that_the_dialler_does_not_know_of_are_closed():
    async with bundle_of(3, round_trip_s=0.05) as (bundle, _, _):
        bundle.keep_streams(3)
        assert len(bundle._links) == 3
        bundle.keep_streams(1)
        assert list(bundle._links) == [0]
        assert bundle.num_streams == 1


async def test_while_a_used_stream_is_missing_the_spare_ones_send(until):
    async with bundle_of(3, round_trip_s=0.05) as (bundle, _, theirs):
        bundle.pace(1e6)
        spare = bundle._links[2]
        bundle.parts.append(small(b"c"))
        assert bundle.next_out(spare) is None
        theirs[0].close()
        await until(lambda: not bundle.is_whole)
        assert bundle.next_out(spare) is not None


@pytest.mark.parametrize(
    ("round_trip_s", "order"),
    [(0.0001, ["notice", "result", "part"]), (0.05, ["notice", "part", "result"])],
)
async def test_near_results_go_first_and_far_parts_do(round_trip_s, order):
    async with bundle_of(1, round_trip_s=round_trip_s) as (bundle, _, _):
        bundle.parts.append(small(b"c"))
        bundle.results.append(small(b"r"))
        bundle.notices.append(small(b"n"))
        link = bundle._links[0]
        frames = [bundle.next_out(link) for _ in order]
        assert [NAMES[bytes(frame.pieces(None)[1])] for frame in frames] == order
        assert bundle.next_out(link) is None


def test_a_pace_on_a_socket_that_is_closed_is_no_error():
    with socket.socket() as closed:
        pass
    pace(closed, 1e6)
    find_speed_anew(closed)
