# SPDX-License-Identifier: Apache-2.0
"""Every kind of malformed bytes at a real port leaves a counter and one line, whoever sends it and when."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import socket
import struct
from collections import Counter

import msgspec
import pytest

from isthmus.collective import Epoch, Incarnation, Member, OuterStep, PeerId, View
from isthmus.collective.api.communicator import Communicator
from isthmus.collective.core.types import PeerRef
from isthmus.collective.errors import ConnectionLost
from isthmus.collective.rounds.options import BulkOptions
from isthmus.collective.transport import (
    Channel,
    Hello,
    HelloReply,
    Listener,
    Purpose,
    SocketOptions,
    connect,
    refusal_log,
)
from isthmus.collective.transport.accept_limit import TOO_MANY_HANDSHAKES, AcceptLimiter, AcceptLimits
from isthmus.collective.transport.dialling import open_connection
from isthmus.collective.transport.security import Mode, Security
from isthmus.collective.transport.wire import PROTOCOL_VERSION, FrameType, Header, pack

SERVER, CLIENT = PeerRef(PeerId("5" * 16), Incarnation(3)), PeerRef(PeerId("0" * 15 + "c"), Incarnation(7))
SECRET = b"s" * 32
ADDRESS = "127.0.0.1:1"


def frame(frame_type, payload=b"", **fields):
    return pack(Header(type=frame_type, payload_nbytes=len(payload), **fields), payload) + payload


def hello(purpose=Purpose.CONTROL):
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id="run",
        purpose=purpose,
        peer_id=CLIENT.peer_id,
        incarnation=CLIENT.incarnation,
    )


def hello_frame(**change):
    fields = msgspec.to_builtins(hello(), builtin_types=(bytes,)) | change
    return frame(FrameType.HELLO, msgspec.msgpack.encode(fields))


def header(frame_type, payload_nbytes, **fields):
    return pack(Header(type=frame_type, payload_nbytes=payload_nbytes, **fields))


def with_byte(data, position, value):
    return data[:position] + bytes([value]) + data[position + 1 :]


def weighing(weight):
    data = frame(FrameType.CONTROL, b"hi")
    return data[:28] + struct.pack("!d", weight) + data[36:]


@dataclasses.dataclass(frozen=True)
class Case:
    """Bytes, where they are sent, and what they are counted as."""

    where: str
    data: bytes
    reason: str
    hangs_up: bool = False


BEFORE_HELLO = {
    "noise": Case("plain", bytes(range(256)) * 4, "wrong magic"),
    "a web browser": Case("plain", b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nUser-Agent: y\r\n\r\n", "wrong magic"),
    "zeros": Case("plain", bytes(48), "wrong magic"),
    "another magic": Case("plain", b"XX" + hello_frame()[2:], "wrong magic"),
    "another version of the frame": Case(
        "plain", with_byte(hello_frame(), 2, PROTOCOL_VERSION + 1), "wrong protocol version"
    ),
    "an unknown type": Case("plain", with_byte(hello_frame(), 3, 99), "unknown frame type"),
    "control before hello": Case("plain", frame(FrameType.CONTROL, b"hi"), "frame type not allowed here"),
    "a reply before hello": Case("plain", frame(FrameType.HELLO_REPLY, b"hi"), "frame type not allowed here"),
    "a long hello": Case("plain", header(FrameType.HELLO, 4097), "payload too long"),
    "four GiB of hello": Case("plain", header(FrameType.HELLO, 2**32 - 1), "payload too long"),
    "a flipped bit": Case("plain", with_byte(hello_frame(), 60, 0), "checksum does not fit"),
    "no msgpack": Case("plain", frame(FrameType.HELLO, b"\xc1"), "malformed Hello"),
    "an empty hello": Case("plain", frame(FrameType.HELLO), "malformed Hello"),
    "deep nesting": Case("plain", frame(FrameType.HELLO, b"\x91" * 4000), "malformed Hello"),
    "a huge array": Case("plain", frame(FrameType.HELLO, b"\xdd\xff\xff\xff\xff"), "malformed Hello"),
    "no text": Case("plain", frame(FrameType.HELLO, b"\x81\xa3\xff\xfe\xfd\x01"), "malformed Hello"),
    "an unknown field": Case("plain", hello_frame(admin=True), "malformed Hello"),
    "a negative start": Case("plain", hello_frame(incarnation=-1), "malformed Hello"),
    "a path for a peer id": Case("plain", hello_frame(peer_id="../../etc/passwd"), "malformed Hello"),
    "a long credential": Case("plain", hello_frame(credential=bytes(2049)), "malformed Hello"),
    "an unknown purpose": Case("plain", hello_frame(purpose="root"), "malformed Hello"),
    "a stream out of range": Case("plain", hello_frame(stream=64), "malformed Hello"),
    "another protocol in a sound hello": Case("plain", hello_frame(protocol_version=PROTOCOL_VERSION + 1), "refused"),
    "a purpose that nobody serves": Case("plain", hello_frame(purpose="admission"), "refused"),
    "half a hello": Case("plain", hello_frame()[:50], "closed before hello", hangs_up=True),
    "half a hello and silence": Case("plain", hello_frame()[:50], "no hello in time"),
    "noise as TLS": Case("plain", b"\x16" + bytes(range(256)), "TLS: wrong version number"),
    "no client hello": Case("plain", b"\x16\x03\x01\x00\x05hello", "TLS: unexpected message"),
    "half a client hello": Case("plain", b"\x16\x03\x01\x02\x00\x01", "no hello in time"),
    "noise inside TLS": Case("tls", bytes(range(256)), "wrong magic"),
    "no hello inside TLS": Case("tls", frame(FrameType.HELLO, b"\xc1"), "malformed Hello"),
    "plain bytes beside TLS": Case("beside tls", hello_frame(), "TLS: wrong version number"),
    "another name than the certificate's": Case("tls", hello_frame(peer_id="a" * 16), "certificate of another peer"),
}


def behind_hello(purpose, other):
    """What a connection for this purpose must not carry; `other` is a type of the other purposes."""
    own = {Purpose.CONTROL: FrameType.CONTROL, Purpose.STATE: FrameType.STATE_REQUEST}.get(purpose, FrameType.OPEN)
    cases = {
        "noise": (bytes(range(255, -1, -1)), "wrong magic"),
        "another version": (with_byte(frame(own, b"hi"), 2, PROTOCOL_VERSION + 1), "wrong protocol version"),
        "an unknown type": (with_byte(frame(own, b"hi"), 3, 99), "unknown frame type"),
        "a second hello": (frame(FrameType.HELLO, b"hi"), "frame type not allowed here"),
        "a frame of another purpose": (frame(other, b"hi"), "frame type not allowed here"),
        "four GiB": (header(own, 2**32 - 1), "payload too long"),
        "a flipped bit": (frame(own, b"abcd", epoch=1)[:-1] + b"X", "checksum does not fit"),
        "a weight that is none": (with_byte(frame(own, b"hi", weight=1.0), 28, 0xFF), "weight is not from 0 to 2**64"),
    }
    found = {
        f"{purpose}: {name}": Case(purpose, data, f"{purpose}: {reason}") for name, (data, reason) in cases.items()
    }
    half = Case(purpose, frame(own, b"abcd")[:50], f"{purpose}: closed within a frame", hangs_up=True)
    changed = Case(f"beside tls {purpose}", b"\x17\x03\x03\x00\x20" + bytes(32), f"{purpose}: TLS: ")
    return found | {f"{purpose}: half a frame": half, f"{purpose}: a record that is changed": changed}


def early(frame_type, count, payload=b"1234"):
    return b"".join(frame(frame_type, payload, epoch=2, chunk=chunk) for chunk in range(count))


BULK = {
    "a sign with a payload": (frame(FrameType.SIGN, b"1"), "payload too long"),
    "long padding": (header(FrameType.PADDING, (32 << 10) + 1), "payload too long"),
    "parts far ahead": (early(FrameType.PART, 600), "too far ahead"),
    "results far ahead": (early(FrameType.RESULT, 600), "too far ahead"),
    "much memory ahead": (early(FrameType.RESULT, 20, bytes(1 << 20)), "too far ahead"),
    "openings without end": (early(FrameType.OPEN, 600), "too far ahead"),
}
BELLS = {
    "part of a bell": Case("memory bulk", b"IS", "bulk: shared memory: part of a bell"),
    "no such slot": Case("memory bulk", struct.pack("!II", 99, 8), "bulk: shared memory: no such slot"),
    "a long slot": Case("memory bulk", struct.pack("!II", 0, 2**32 - 1), "bulk: shared memory: no such slot"),
    "a slot that was not filled": Case(
        "memory bulk", struct.pack("!II", 0, 0), "bulk: shared memory: a slot is free that was not filled"
    ),
    "a slot twice": Case(
        "memory bulk", struct.pack("!IIII", 0, 8, 0, 8), "bulk: shared memory: a slot is filled that was not free"
    ),
    "noise in a slot": Case("memory bulk", struct.pack("!II", 0, 4096), "bulk: wrong magic"),
    "bytes beside the memory": Case("beside memory bulk", b"IS", "bulk: shared memory: bytes came beside it"),
}
CASES = (
    BEFORE_HELLO
    | behind_hello(Purpose.CONTROL, FrameType.STATE_CHUNK)
    | behind_hello(Purpose.STATE, FrameType.CONTROL)
    | behind_hello(Purpose.BULK, FrameType.CONTROL)
    | BELLS
    | {f"bulk: {name}": Case(Purpose.BULK, data, f"bulk: {reason}") for name, (data, reason) in BULK.items()}
)


class Port:
    """A listener with everything behind it that a peer has."""

    def __init__(self, *, encrypts=False):
        self.client = Security.shared(CLIENT.peer_id, SECRET, mode=Mode.ON) if encrypts else None
        self.communicator = Communicator(
            me=SERVER,
            hello=lambda *_: hello(Purpose.BULK),
            chunk_nbytes=1 << 20,
            options=BulkOptions(install_grace_s=0.0, sockets=SocketOptions(shares_memory=False)),
        )
        self.listener = Listener(
            "127.0.0.1:0",
            accept=lambda _: HelloReply(accepted=True, peer_id=SERVER.peer_id, incarnation=SERVER.incarnation),
            routes={Purpose.CONTROL: self._echo, Purpose.STATE: self._echo},
            bulk=self.communicator.adopt,
            hello_timeout_s=0.5,
            security=Security.shared(SERVER.peer_id, SECRET, mode=Mode.AUTO) if encrypts else None,
        )

    async def _echo(self, channel: Channel):
        while True:
            frame = await channel.receive(timeout_s=5)
            await channel.send(frame.type, frame.payload, timeout_s=5)

    @property
    def counters(self):
        """As the daemon shows them."""
        bulk = {f"bulk: {reason}": count for reason, count in self.communicator.refused.items()}
        return Counter(self.listener.counters) + Counter(bulk)

    async def __aenter__(self):
        await self.listener.start()
        members = (Member(CLIENT.peer_id, CLIENT.incarnation, ADDRESS), Member(*vars_of(SERVER), ADDRESS))
        await self.communicator.install(View(Epoch(1), OuterStep(0), b"", members))
        return self

    async def __aexit__(self, *_):
        await self.communicator.close()
        await self.listener.close()

    async def dial(self, where):
        """A connection to here, as far as `where` says: a raw socket, and how to send over it."""
        purpose = where.split()[-1]
        if purpose in list(Purpose):
            sock, _, _ = await open_connection(
                self.listener.address,
                hello(Purpose(purpose)),
                timeout_s=5,
                security=self.client,
                options=SocketOptions(shares_memory="memory" in where),
            )
            return sock
        host, _, port = self.listener.address.rpartition(":")
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        if "tls" not in where or self.client is None:
            return sock
        return await self.client.secure_dialled(sock, expect=None, timeout_s=5)


def vars_of(ref):
    return ref.peer_id, ref.incarnation


async def send(port, case):
    """Send the bytes, and wait until the other side hangs up, or do it."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(await port.dial(case.where)) as sock:
        if case.where.startswith("memory"):
            assert os.write(sock._memory.rings, case.data) == len(case.data)
        elif "beside" in case.where:
            assert socket.socket.send(sock, case.data) == len(case.data)
        else:
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(sock, case.data)
        if case.hangs_up:
            sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(5):
            with contextlib.suppress(OSError):
                while await loop.sock_recv_into(sock, bytearray(1 << 16)):
                    pass


async def works(port, security=None):
    with contextlib.closing(
        await connect(port.listener.address, hello(), timeout_s=5, security=security or port.client)
    ) as channel:
        await channel.send(FrameType.CONTROL, b"still there?", timeout_s=5)
        return bytes((await channel.receive(timeout_s=5)).payload) == b"still there?"


@pytest.fixture(autouse=True)
def _hears_all(caplog):
    caplog.set_level(logging.DEBUG, refusal_log.__name__)


def lines(caplog):
    """What is told of ended connections: a warning, and hardly a word where the other side merely hung up."""
    told = [record for record in caplog.records if record.name == refusal_log.__name__ or record.levelname == "WARNING"]
    assert all((record.levelname == "DEBUG") == ("closed before hello" in record.getMessage()) for record in told)
    return [record.getMessage() for record in told]


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what sockets do has no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_malformed_bytes_leave_a_counter_and_one_line_and_others_go_on(case, caplog):
    async with Port(encrypts="tls" in case.where or case.data[:1] == b"\x16") as port:
        await send(port, case)
        await until(lambda: port.counters.total() == 1)
        ((reason, _),) = port.counters.items()
        assert reason.startswith(case.reason)
        (line,) = lines(caplog)
        words = re.escape(repr(reason.removeprefix("bulk: ")))
        assert re.fullmatch(rf"connection_ended( \w+='[^'\n]*'| \w+=\"[^\"\n]*\")* reason={words} so_far=1", line)
        assert "peer_id=" in line or case.where in ("plain", "tls", "beside tls")
        assert await works(port)
        await send(port, case)
        await until(lambda: port.counters.total() == 2)
        assert port.counters == {reason: 2}
        assert len(lines(caplog)) == 1


def test_the_table_has_every_kind_that_the_protocol_knows():
    assert len(CASES) >= 36
    reasons = {case.reason for case in CASES.values()}
    assert {"wrong magic", "wrong protocol version", "unknown frame type", "checksum does not fit"} <= reasons


async def test_words_of_a_stranger_are_quoted_and_short(caplog):
    async with Port() as port:
        port.listener._accept = lambda hello: HelloReply(
            accepted=False, reason=f"no run {hello.run_id}", peer_id=SERVER.peer_id, incarnation=SERVER.incarnation
        )
        await send(port, Case("plain", hello_frame(run_id="x\nERROR forged_line a=1"), "refused"))
        (line,) = lines(caplog)
        assert "\n" not in line
        assert "detail='no run x\\nERROR forged_line a=1'" in line


async def test_handshakes_from_loopback_are_limited_too_and_members_never_meet_the_limit(caplog):
    limits = AcceptLimits(address_burst=4, address_rate=0.001)
    security = Security.shared(SERVER.peer_id, SECRET, mode=Mode.AUTO)
    port = Port(encrypts=True)
    port.listener._limiter = AcceptLimiter(limits)
    client = Security.shared(CLIENT.peer_id, SECRET, mode=Mode.ON)
    assert security.is_served
    async with port:
        for _ in range(10):
            sock, _, _ = await open_connection(port.listener.address, hello(), timeout_s=5, security=client)
            sock.close()
        for _ in range(10):
            await send(port, Case("plain", b"\x16\x03\x01\x00\x05hello", ""))
        assert port.counters == {"TLS: unexpected message": 4, TOO_MANY_HANDSHAKES: 6}
        with pytest.raises(ConnectionLost):
            await open_connection(port.listener.address, hello(), timeout_s=5, security=client)
        plain = Security.shared(CLIENT.peer_id, SECRET, mode=Mode.AUTO)
        assert await works(port, plain)  # plain connections have their own, larger bucket
