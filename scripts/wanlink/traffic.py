# SPDX-License-Identifier: Apache-2.0
"""Programs that measure a path from its two ends; each runs in one peer's namespace and prints one line of JSON.

    python -m scripts.wanlink.traffic echo      ADDRESS                         UDP: sends back what comes
    python -m scripts.wanlink.traffic rtt       ADDRESS PORT COUNT INTERVAL_MS  UDP to echo: round trips, in ms
    python -m scripts.wanlink.traffic count     ADDRESS FIRST_S IDLE_S          UDP: which numbered datagrams came
    python -m scripts.wanlink.traffic numbered  ADDRESS PORT COUNT PER_S        UDP to count: sends them
    python -m scripts.wanlink.traffic receive   ADDRESS STREAMS WARM_UP_S SECONDS   TCP: goodput
    python -m scripts.wanlink.traffic send      ADDRESS PORT STREAMS CONGESTION     TCP to receive
    python -m scripts.wanlink.traffic digest    ADDRESS                         TCP: sha256 of what comes
    python -m scripts.wanlink.traffic pour      ADDRESS PORT NBYTES CONGESTION  TCP to digest

Those with only an ADDRESS listen there and first print the port the system gave them.
`measure_*` start the two programs of a measurement and return its result.

Rules: standard library only. Every socket has a timeout. Congestion control is named, never left to the host, before
connecting and before listening: what is sent depends on it more than on anything else.
"""

import hashlib
import json
import selectors
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

from scripts.wanlink.wan import ROOT, Wan

TIMEOUT_S = 30.0
_IDLE_S = 5.0
"""A count ends when nothing has come for so long: a busy machine may not run the sender for seconds."""
PIECE_NBYTES = 1 << 18
DATAGRAM_NBYTES = 64
_RETURN_S = 4.0  # far beyond any path: on a busy machine a datagram is late before it is lost
_NUMBER = struct.Struct("!Id")
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h; needs root


# ------------------------------------------------------------------------------------------ the programs


def echo(address: str) -> None:
    """Send each datagram back, until killed."""
    with _udp(address) as server:
        server.settimeout(None)
        while True:
            server.sendto(*server.recvfrom(2048))


def rtt(address: str, port: str, count: str, interval_ms: str) -> None:
    """Print the round trips, in ms, of the datagrams that came back; one is under way at a time."""
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(_RETURN_S)
        client.connect((address, int(port)))
        for number in range(int(count)):
            client.send(_NUMBER.pack(number, time.monotonic()))
            try:
                while True:
                    returned, sent_at = _NUMBER.unpack(client.recv(2048))
                    if returned == number:
                        trips.append((time.monotonic() - sent_at) * 1e3)
                        break
            except TimeoutError:
                pass
            time.sleep(float(interval_ms) / 1e3)
    print(json.dumps(trips))


def count(address: str, first_s: str, idle_s: str) -> None:
    """Print how many different datagrams came, how many came again, and how many came after a later one.

    Ends when the first does not come within `first_s`, or no other within `idle_s`.
    """
    seen: set[int] = set()
    again = overtaken = 0
    latest = -1
    with _udp(address) as server:
        server.settimeout(float(first_s))
        try:  # the machine may be busy, and what this socket drops would count as lost on the way
            server.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 128 << 20)
        except PermissionError:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        try:
            while True:
                number, _ = _NUMBER.unpack_from(server.recv(2048))
                server.settimeout(float(idle_s))
                again += number in seen
                overtaken += number < latest
                latest = max(latest, number)
                seen.add(number)
        except TimeoutError:
            pass
    print(json.dumps({"different": len(seen), "again": again, "overtaken": overtaken}))


def numbered(address: str, port: str, count: str, per_s: str) -> None:
    """Send numbered datagrams at an even pace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((address, int(port)))
        start = time.monotonic()
        padding = bytes(DATAGRAM_NBYTES - _NUMBER.size)
        for number in range(int(count)):
            ahead = start + number / float(per_s) - time.monotonic()
            if ahead > 0.001:
                time.sleep(ahead)
            client.send(_NUMBER.pack(number, 0.0) + padding)
    print(json.dumps(int(count)))


def receive(address: str, streams: str, warm_up_s: str, seconds: str) -> None:
    """Print the payload that all streams brought after the warm-up, in 10⁶ bit/s."""
    buffer = bytearray(1 << 20)
    with socket.create_server((address, 0)) as server, selectors.DefaultSelector() as selector:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        connections = [server.accept()[0] for _ in range(int(streams))]
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        begin = time.monotonic() + float(warm_up_s)
        end = begin + float(seconds)
        nbytes = 0
        while (now := time.monotonic()) < end:
            for key, _ in selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                taken = key.fileobj.recv_into(buffer)
                nbytes += taken if now >= begin else 0
        for connection in connections:
            connection.close()
    print(json.dumps(nbytes * 8 / float(seconds) / 1e6))


def send(address: str, port: str, streams: str, congestion: str) -> None:
    """Send as fast as TCP lets, until the receiver has enough; print the retransmitted segments."""
    piece = bytes(PIECE_NBYTES)
    connections = [_connect(address, int(port), congestion) for _ in range(int(streams))]
    retransmitted = 0
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE)
        while selector.get_map():
            for key, _ in selector.select(TIMEOUT_S):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    key.fileobj.send(piece)
                except BlockingIOError:
                    continue
                except (ConnectionResetError, BrokenPipeError):
                    retransmitted += _total_retransmitted(key.fileobj)
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    print(json.dumps(retransmitted))


def digest(address: str) -> None:
    """Print the sha256 of what one TCP connection brings."""
    summed = hashlib.sha256()
    with socket.create_server((address, 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            while piece := connection.recv(PIECE_NBYTES):
                summed.update(piece)
    print(json.dumps(summed.hexdigest()))


def pour(address: str, port: str, nbytes: str, congestion: str) -> None:
    """Send so many pseudo-random bytes over one TCP connection; print their sha256."""
    content = hashlib.shake_128(b"wan").digest(int(nbytes))
    with _connect(address, int(port), congestion) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the receiver closes when it has all
    print(json.dumps(hashlib.sha256(content).hexdigest()))


def _udp(address: str) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 0))
    server.settimeout(TIMEOUT_S)
    print(server.getsockname()[1], flush=True)
    return server


def _connect(address: str, port: int, congestion: str) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    connection.connect((address, port))
    return connection


def _total_retransmitted(connection: socket.socket) -> int:
    """tcpi_total_retrans of struct tcp_info (linux/tcp.h)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 100)[0])


# ------------------------------------------------------------------------------------------ their use


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What a TCP transfer reached.

    Attributes:
        mbit: payload received, 10⁶ bit/s.
        cpu_share: the emulator's part of one core while it ran.
        retransmitted: segments, by the senders' count.
    """

    mbit: float
    cpu_share: float
    retransmitted: int


def measure_rtt(wan: Wan, source: int, target: int, *, count: int = 100, interval_ms: float = 5.0) -> list[float]:
    """Round trips from one peer to another, in ms; those that were lost are missing."""
    server, port = _listen(wan, target, "echo", wan.address(target))
    try:
        output = wan.run(source, _program("rtt", wan.address(target), port, count, interval_ms), timeout=120)
    finally:
        server.kill()
        server.communicate()
    trips: list[float] = json.loads(output)
    return trips


def measure_datagrams(
    wan: Wan, source: int, target: int, *, count: int, per_s: float, first_s: float = TIMEOUT_S
) -> dict[str, int]:
    """What of so many numbered datagrams came, came again, came late: the result of `count`."""
    server, port = _listen(wan, target, "count", wan.address(target), first_s, _IDLE_S)
    wan.run(source, _program("numbered", wan.address(target), port, count, per_s), timeout=60 + count / per_s)
    output, _ = server.communicate(timeout=TIMEOUT_S)
    counted: dict[str, int] = json.loads(output)
    return counted


def measure_throughput(
    wan: Wan, source: int, target: int, *, streams: int, congestion: str, warm_up_s: float, seconds: float
) -> Throughput:
    """TCP goodput from one peer to another."""
    server, port = _listen(wan, target, "receive", wan.address(target), streams, warm_up_s, seconds)
    sender = wan.popen(
        source,
        _program("send", wan.address(target), port, streams, congestion),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    before, start = wan.stats().cpu_s, time.monotonic()
    output, _ = server.communicate(timeout=TIMEOUT_S + warm_up_s + seconds)
    share = (wan.stats().cpu_s - before) / (time.monotonic() - start)
    retransmitted, _ = sender.communicate(timeout=TIMEOUT_S)
    return Throughput(mbit=json.loads(output), cpu_share=share, retransmitted=json.loads(retransmitted))


def measure_integrity(wan: Wan, source: int, target: int, *, nbytes: int, congestion: str) -> bool:
    """Whether so many bytes over TCP arrive as they were sent."""
    server, port = _listen(wan, target, "digest", wan.address(target))
    sent = wan.run(source, _program("pour", wan.address(target), port, nbytes, congestion), timeout=120)
    received, _ = server.communicate(timeout=TIMEOUT_S)
    return bool(json.loads(sent) == json.loads(received))


def _program(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "scripts.wanlink.traffic", name, *map(str, arguments)]


def _listen(wan: Wan, peer: int, name: str, *arguments: object) -> tuple["subprocess.Popen[str]", int]:
    process = wan.popen(peer, _program(name, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


PROGRAMS = {program.__name__: program for program in (echo, rtt, count, numbered, receive, send, digest, pour)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
