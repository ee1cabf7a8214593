# SPDX-License-Identifier: Apache-2.0
"""Encrypted connections: the socket does what a plain one does, and nobody gets in who should not."""

import asyncio
import contextlib
import datetime
import os
import select
import socket
import ssl
import struct

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.collective.errors import (
    ConnectionLost,
    DeadlineExceeded,
    HandshakeRefused,
    PeerUnreachable,
    SecurityRefused,
)
from isthmus.collective.transport import Channel, FrameType, Hello, HelloReply, Listener, Purpose, connect
from isthmus.collective.transport.accept_limit import TOO_MANY_FROM_ADDRESS, AcceptLimiter, AcceptLimits
from isthmus.collective.transport.certificates import (
    Authority,
    Credentials,
    is_signed_by,
    key_from_pem,
    key_to_pem,
    name_in,
    peer_id_in,
    peer_id_of_key,
)
from isthmus.collective.transport.dialling import open_connection
from isthmus.collective.transport.security import Mode, Security, TicketSecurity
from isthmus.collective.transport.sockets import EncryptionFailed
from isthmus.collective.transport.tls import Session, TlsSocket
from isthmus.collective.transport.wire import PROTOCOL_VERSION

KEYS = {
    peer_id_of_key(key.public_key().public_bytes_raw()): key
    for key in (Ed25519PrivateKey.from_private_bytes(seed * 32) for seed in (b"1", b"2", b"3"))
}
SERVER, CLIENT, THIRD = KEYS
SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
NUMBER = 7
DAY = datetime.timedelta(days=1)


def now():
    return datetime.datetime.now(datetime.UTC)


def credentials(peer_id=CLIENT, secret=SECRET, number=NUMBER, believes=None):
    """Those of a peer that was admitted with this secret, and believes those who were with these."""
    certificate = Authority(secret).issue(KEYS[peer_id].public_key(), number)
    authorities = tuple(Authority(one).certificate for one in believes or (secret,))
    return Credentials(KEYS[peer_id], certificate, authorities)


def member(peer_id=CLIENT, secret=SECRET, mode=Mode.ON, *, believes=None, **more):
    return Security(credentials(peer_id, secret, believes=believes), mode=mode, **more)


def hello(purpose=Purpose.CONTROL, peer_id=CLIENT):
    return Hello(
        protocol_version=PROTOCOL_VERSION, run_id="run", purpose=purpose, peer_id=peer_id, incarnation=Incarnation(7)
    )


def reply(peer_id=SERVER):
    return HelloReply(accepted=True, peer_id=peer_id, incarnation=Incarnation(3))


async def echo(channel: Channel):
    while True:
        frame = await channel.receive(timeout_s=5)
        await channel.send(frame.type, frame.payload, chunk=frame.chunk, timeout_s=5)


def listener(security=None, *, answer=None, bulk=lambda sock, _: sock.close(), **more):
    return Listener(
        "127.0.0.1:0",
        accept=lambda _: answer or reply(),
        routes=dict.fromkeys((Purpose.CONTROL, Purpose.STATE, Purpose.ADMISSION), echo),
        bulk=bulk,
        security=security,
        **more,
    )


async def works(door, security, purpose=Purpose.CONTROL, **more):
    """Whether a frame goes there and back."""
    channel = await connect(door.address, hello(purpose), timeout_s=5, security=security, **more)
    with contextlib.closing(channel):
        frame_type = FrameType.STATE_CHUNK if purpose is Purpose.STATE else FrameType.CONTROL
        await channel.send(frame_type, b"still there?", timeout_s=5)
        return bytes((await channel.receive(timeout_s=5)).payload) == b"still there?"


def tcp_pair(buffer_nbytes=None):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if buffer_nbytes:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_nbytes)
        here = socket.socket()
        if buffer_nbytes:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
        here.connect(listening.getsockname())
        there, _ = listening.accept()
    here.setblocking(False)
    there.setblocking(False)
    return here, there


async def tls_pair(buffer_nbytes=None):
    here, there = tcp_pair(buffer_nbytes)
    return await asyncio.gather(
        member(CLIENT).secure_dialled(here, expect=SERVER, timeout_s=5),
        member(SERVER).secure_accepted(there, timeout_s=5),
    )


@contextlib.asynccontextmanager
async def closing_pair(buffer_nbytes=None):
    here, there = await tls_pair(buffer_nbytes)
    with contextlib.closing(here), contextlib.closing(there):
        yield here, there


def readable(sock, timeout_s=0.0):
    return bool(select.select([sock], [], [], timeout_s)[0])


# ------------------------------------------------------------------------------------ the socket


async def test_it_is_a_socket_for_asyncio_and_not_one_of_the_ssl_module():
    async with closing_pair() as (here, there):
        assert not isinstance(here, ssl.SSLSocket)
        assert here.gettimeout() == 0
        assert here.getpeername() == there.getsockname()
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        loop = asyncio.get_running_loop()
        loop.set_debug(True)  # asyncio checks sockets then
        data, received = os.urandom(3_000_000), bytearray(3_000_000)

        async def receive():
            view, got = memoryview(received), 0
            while got < len(data):
                got += await loop.sock_recv_into(there, view[got : got + 700_000])

        await asyncio.gather(loop.sock_sendall(here, data), receive())
        assert received == data


@settings(max_examples=30, deadline=None)
@given(
    frames=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 400_000)), min_size=1, max_size=8),
    reads=st.lists(st.integers(1, 300_000), min_size=1, max_size=5),
    seed=st.binary(min_size=1, max_size=4),
)
def test_every_byte_arrives_once_and_nothing_stays_behind_however_it_is_cut(frames, reads, seed):
    """The sender stops as soon as all is counted as taken, as a link does that has nothing more to send."""
    here, there = asyncio.run(tls_pair(buffer_nbytes=4096))
    with contextlib.closing(here), contextlib.closing(there):
        data = (seed * 500_000)[: max(sum(frame) for frame in frames)]
        unsent = [[memoryview(data)[:head], memoryview(data)[head : head + body]] for head, body in frames]
        expected = b"".join(bytes(piece) for frame in unsent for piece in frame)
        received, num_reads = bytearray(), 0
        while len(received) < len(expected):
            if unsent:
                try:
                    advance(unsent, here.sendmsg(unsent[0]))
                except BlockingIOError:
                    assert not readable(here)
            first = bytearray(reads[num_reads % len(reads)])
            second = bytearray(48)
            num_reads += 1
            try:
                nbytes = there.recvmsg_into([first, second])[0]
            except BlockingIOError:
                assert unsent or readable(there, 5), "bytes were counted as sent that the kernel never got"
                continue
            assert nbytes > 0
            received += (first + second)[:nbytes]
        assert received == expected
        assert not unsent


def advance(unsent, nbytes):
    frame = unsent[0]
    while frame and nbytes >= len(frame[0]):
        nbytes -= len(frame.pop(0))
    if frame:
        frame[0] = frame[0][nbytes:]
    else:
        unsent.pop(0)


async def test_what_was_decrypted_already_is_pending_and_the_kernel_does_not_know():
    async with closing_pair() as (here, there):
        assert there.pending() == 0
        here.send(b"x" * 5000)
        assert readable(there, 5)
        assert there.recv_into(bytearray(10)) == 10
        assert there.pending() > 0
        assert not readable(there)
        assert there.recv_into(bytearray(9000)) == 4990
        assert there.pending() == 0


async def test_half_a_record_is_not_pending_for_ever():
    async with closing_pair() as (here, there):
        relay_in, relay_out = tcp_pair()
        with contextlib.closing(relay_in), contextlib.closing(relay_out):
            here.send(b"y" * 1000)
            assert readable(there, 5)
            record = os.read(there.fileno(), 65536)
            assert len(record) > 1000
            os.dup2(relay_out.fileno(), there.fileno())
            relay_in.send(record[:500])
            assert readable(there, 5)
            with pytest.raises(BlockingIOError):
                there.recv_into(bytearray(1000))
            assert there.pending() == 0
            relay_in.send(record[500:])
            assert readable(there, 5)
            assert there.recv_into(bytearray(1000)) == 1000


async def test_a_byte_that_was_changed_on_the_way_is_never_delivered():
    async with closing_pair() as (here, there):
        forged = b"\x17\x03\x03\x00\x40" + os.urandom(64)
        os.write(here.fileno(), forged)
        assert readable(there, 5)
        with pytest.raises(EncryptionFailed, match="bad record mac"):
            there.recv_into(bytearray(100))


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_the_end_of_the_stream_is_zero_bytes_after_all_that_was_sent(says_goodbye):
    async with closing_pair() as (here, there):
        here.send(b"last words")
        if says_goodbye:
            os.write(here.fileno(), goodbye(here))
        here.shutdown(socket.SHUT_RDWR)
        loop = asyncio.get_running_loop()
        buffer = bytearray(100)
        assert await loop.sock_recv_into(there, buffer) == 10
        assert await loop.sock_recv_into(there, buffer) == 0
        assert there.recv_into(buffer) == 0


def goodbye(sock):
    """TLS's own way to end a stream."""
    with contextlib.suppress(ssl.SSLWantReadError):
        sock._tls.unwrap()
    return sock._outgoing.read()


async def test_a_connection_that_is_reset_is_an_operating_system_error_after_what_came_before():
    async with closing_pair() as (here, there):
        there.send(b"unread")
        here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        here.close()
        buffer = bytearray(100)
        with pytest.raises(ConnectionResetError):
            [there.recv_into(buffer) for _ in range(3)]
        with pytest.raises(OSError, match="Broken pipe"):
            there.send(b"x" * 300_000)


async def test_the_unencrypted_face_of_the_socket_is_closed_off():
    async with closing_pair() as (here, _):
        for name in ("recv", "recvfrom", "recvmsg", "sendall", "sendto", "sendfile", "makefile", "dup"):
            with pytest.raises(TypeError, match="past the encryption"):
                getattr(here, name)(b"secret")
        with pytest.raises(ValueError, match="no flags"):
            here.send(b"secret", socket.MSG_OOB)
        with pytest.raises(ValueError, match="no flags"):
            here.recvmsg_into([bytearray(8)], 0, socket.MSG_PEEK)


async def test_closing_does_not_wait_for_the_other_side():
    async with closing_pair(buffer_nbytes=4096) as (here, _):
        with pytest.raises(BlockingIOError):
            [here.send(bytes(100_000)) for _ in range(1000)]
        here.shutdown(socket.SHUT_RDWR)
        here.close()
        assert here.fileno() == -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            here.send(b"more")


# ------------------------------------------------------------------------------------ certificates


def test_all_coordinators_make_the_same_authority_from_the_secret_and_another_secret_makes_another():
    assert Authority(SECRET).certificate == Authority(SECRET).certificate
    assert Authority(SECRET).public_key != Authority(OTHER_SECRET).public_key
    with pytest.raises(ValueError, match="32 bytes"):
        Authority(b"short")


def test_a_certificate_names_its_key_and_can_be_checked_with_the_authoritys_public_key_alone():
    own = credentials()
    assert peer_id_in(own.certificate) == CLIENT
    assert own.certificate.serial_number == NUMBER
    assert is_signed_by(Authority(SECRET).public_key, own.certificate)
    assert not is_signed_by(Authority(OTHER_SECRET).public_key, own.certificate)
    assert not is_signed_by(b"no key", own.certificate)
    assert "key" not in repr(own)


def test_a_certificate_that_names_another_peer_than_its_key_is_nobodys_even_if_the_authority_made_it():
    stolen = Authority(SECRET).issue(KEYS[CLIENT].public_key(), NUMBER, peer_id=SERVER)
    assert is_signed_by(Authority(SECRET).public_key, stolen)
    assert name_in(stolen) == SERVER
    assert peer_id_in(stolen) is None
    with pytest.raises(ValueError, match="nobody's"):
        Security(Credentials(KEYS[CLIENT], stolen, (Authority(SECRET).certificate,)))


def test_credentials_of_another_run_are_nobodys():
    with pytest.raises(ValueError, match="nobody's"):
        member(believes=(OTHER_SECRET,))


def test_a_key_comes_back_from_its_file_and_nothing_else_is_one():
    key = KEYS[CLIENT]
    assert key_from_pem(key_to_pem(key)).private_bytes_raw() == key.private_bytes_raw()
    for pem in (b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", key_to_pem(key)[:60]):
        with pytest.raises(ValueError, match="no private key"):
            key_from_pem(pem)
    another_kind = x25519.X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ValueError, match="no Ed25519 key"):
        key_from_pem(another_kind)


@pytest.mark.parametrize(
    "names",
    [
        [],
        [x509.DNSName("5555555555555555.peer")],
        [x509.UniformResourceIdentifier("peer:../../etc/passwd")],
        [x509.UniformResourceIdentifier(f"peer:{SERVER}\n")],
        [x509.UniformResourceIdentifier(f"other:{SERVER}")],
        [x509.UniformResourceIdentifier(f"peer:{SERVER}"), x509.UniformResourceIdentifier(f"peer:{CLIENT}")],
    ],
    ids=["none", "of a host", "no peer id", "with a line end", "another kind", "two"],
)
def test_a_certificate_with_any_other_name_is_nobodys(names):
    assert name_in(certificate_with(names)) is None
    assert peer_id_in(certificate_with(names)) is None


def certificate_with(names, key=KEYS[SERVER]):
    builder = x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1, now() - DAY, now() + DAY, [])
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    return builder.sign(key, None)


# ------------------------------------------------------------------------------------ who gets in


@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.STATE])
async def test_members_of_a_run_talk_and_know_each_other_by_their_certificates(purpose):
    async with listener(member(SERVER)) as door:
        assert await works(door, member(), purpose, expect=SERVER)
        assert door.counters == {}


async def test_a_bulk_connection_is_handed_on_encrypted_with_the_peers_proven_name():
    taken = asyncio.get_running_loop().create_future()
    async with listener(member(SERVER), bulk=lambda sock, hello: taken.set_result((sock, hello))) as door:
        mine, answer, _ = await open_connection(
            door.address, hello(Purpose.BULK), timeout_s=5, security=member(), expect=SERVER
        )
        theirs, _ = await taken
        with contextlib.closing(mine), contextlib.closing(theirs):
            assert isinstance(mine, TlsSocket)
            assert isinstance(theirs, TlsSocket)
            assert (mine.peer_id, theirs.peer_id) == (SERVER, CLIENT)
            assert answer.peer_id == SERVER
            mine.send(b"first byte")
            assert await asyncio.get_running_loop().sock_recv_into(theirs, bytearray(100)) == 10


async def test_nothing_readable_goes_over_the_wire():
    """A relay in the middle sees everything that both sides send."""
    seen = bytearray()
    async with listener(member(SERVER)) as door:

        async def relay(reader, writer):
            other_reader, other_writer = await asyncio.open_connection(*door.address.split(":"))

            async def pump(source, sink):
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            channel = await connect(f"127.0.0.1:{port}", hello(), timeout_s=5, security=member(), expect=SERVER)
            await channel.send(FrameType.CONTROL, b"the mesh key" * 100, timeout_s=5)
            await channel.receive(timeout_s=5)
            channel.close()
    assert len(seen) > 2400
    for clear in (b"mesh key", b"IS\x01", CLIENT.encode(), SERVER.encode()):
        assert clear not in seen


def own_context(secret=SECRET, *, identity=None, peer_id=CLIENT, version=ssl.TLSVersion.TLSv1_3):
    """A client that checks nothing and shows what it is told to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = version
    if secret is not None:
        with (identity or credentials(peer_id, secret)).as_file() as path:
            context.load_cert_chain(path)
    return context


def self_signed():
    key = KEYS[CLIENT]
    certificate = certificate_with([x509.UniformResourceIdentifier(f"peer:{CLIENT}")], key)
    return Credentials(key, certificate, ())


def of_another_key():
    """A certificate of the run with the right name, for a key that the authority should not have given it to."""
    certificate = Authority(SECRET).issue(KEYS[THIRD].public_key(), NUMBER, peer_id=CLIENT)
    return Credentials(KEYS[THIRD], certificate, ())


class OwnSecurity:
    """Dials with a context of the test's."""

    def __init__(self, context):
        self.context = context

    def wanted_for(self, host):
        return True

    async def secure_dialled(self, sock, *, expect, timeout_s):
        session = Session(self.context, server_side=False)
        await session.shake_hands(sock)
        return TlsSocket(sock, session, SERVER)


STRANGERS = {
    "TLS 1.2": (lambda: own_context(version=ssl.TLSVersion.TLSv1_2), "TLS: unsupported protocol", "alert"),
    "no certificate": (lambda: own_context(None), "no certificate", "no certificate"),
    "of another run": (lambda: own_context(OTHER_SECRET), "certificate of another run", "unknown ca|decrypt error"),
    "signed by itself": (lambda: own_context(identity=self_signed()), "certificate of another run", "unknown ca"),
    "with a name that is not its key's": (
        lambda: own_context(identity=of_another_key()),
        "certificate of another peer",
        "certificate of another peer",
    ),
    "of another peer": (
        lambda: own_context(peer_id=THIRD),
        "certificate of another peer",
        "certificate of another peer",
    ),
}


@pytest.mark.parametrize(("context", "counted", "told"), STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_dialler_that_does_not_belong_is_refused_counted_and_told_why_and_others_go_on(context, counted, told):
    async with listener(member(SERVER)) as door:
        with contextlib.closing(await connect(door.address, hello(), timeout_s=5, security=member())) as friend:
            with pytest.raises((SecurityRefused, HandshakeRefused), match=told):
                await connect(door.address, hello(), timeout_s=5, security=OwnSecurity(context()))
            assert door.counters == {counted: 1}
            await friend.send(FrameType.CONTROL, b"me too", timeout_s=5)
            assert bytes((await friend.receive(timeout_s=5)).payload) == b"me too"
        assert await works(door, member())


IMPOSTORS = {
    "of another run": (lambda: member(SERVER, OTHER_SECRET), "certificate of another run"),
    "of another peer": (lambda: member(THIRD), "certificate of another peer"),
}


@pytest.mark.parametrize(("server", "reason"), IMPOSTORS.values(), ids=IMPOSTORS.keys())
async def test_a_dialler_refuses_whoever_answers_and_is_not_the_expected_peer(server, reason):
    async with listener(server()) as door:
        with pytest.raises(SecurityRefused) as refused:
            await connect(door.address, hello(), timeout_s=5, security=member(), expect=SERVER)
        assert refused.value.reason == reason


async def test_an_impostor_never_gets_to_see_the_hello_with_its_credential():
    async with listener(member(THIRD), answer=reply(THIRD)) as door:
        with pytest.raises(SecurityRefused):
            await connect(door.address, hello(), timeout_s=5, security=member(), expect=SERVER)
        assert await works(door, member())
        assert door.counters == {"closed before hello": 1}


async def test_a_hello_reply_must_say_the_same_name_as_the_certificate():
    async with listener(member(THIRD), answer=reply(SERVER)) as door:
        with pytest.raises(SecurityRefused, match="another peer"):
            await connect(door.address, hello(), timeout_s=5, security=member())


async def test_without_encryption_another_peer_than_the_expected_is_unreachable():
    async with listener() as door:
        assert await works(door, None, expect=SERVER)
        with pytest.raises(PeerUnreachable, match="another peer"):
            await connect(door.address, hello(), timeout_s=5, expect=THIRD)


PLAIN = {"frame": b"IS" + bytes(46), "http": b"GET / HTTP/1.1\r\n\r\n", "zeros": bytes(100)}


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN.keys())
async def test_plain_bytes_at_an_encrypted_door_are_not_encrypted(data):
    async with listener(member(SERVER)) as door:
        with socket.create_connection(door.address.split(":")) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, data)
            assert await loop.sock_recv(sock, 100) == b""  # an end and not a reset, which would destroy an alert
        assert door.counters == {"not encrypted": 1}
        assert await works(door, member())


async def test_a_plain_dialler_at_an_encrypted_door_loses_its_connection():
    async with listener(member(SERVER)) as door:
        with pytest.raises(ConnectionLost):
            await connect(door.address, hello(), timeout_s=5)
        assert door.counters == {"not encrypted": 1}


@pytest.mark.parametrize("security", [None, member(SERVER, mode=Mode.OFF)], ids=["none", "off"])
async def test_tls_at_a_plain_door_is_unexpected(security):
    async with listener(security) as door:
        with pytest.raises(ConnectionLost):
            await connect(door.address, hello(), timeout_s=5, security=member())
        assert door.counters == {"unexpected TLS": 1}
        assert await works(door, None if security is None else member(mode=Mode.OFF))


BROKEN = {
    "junk": (b"\x16" + bytes(range(256)), "TLS: wrong version number"),
    "huge record": (b"\x16\x03\x01\xff\xff" + bytes(1000), "TLS: "),
    "huge message": (b"\x16\x03\x01\x00\x10\x01\xff\xff\xff" + bytes(12), "TLS: "),
    "no hello": (b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00", "TLS: "),
}


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_handshake_is_counted_by_reason(data, reason):
    async with listener(member(SERVER)) as door:
        await say(door, data)
        ((counted, count),) = door.counters.items()
        assert counted.startswith(reason)
        assert count == 1
        assert await works(door, member())


def client_hello():
    session = Session(own_context(None), server_side=False)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.tls.do_handshake()
    return session.outgoing.read()


@pytest.mark.parametrize("data", [b"", b"\x16", client_hello()[:100], client_hello()], ids=["0", "1", "half", "hello"])
async def test_a_handshake_that_stops_is_closed_at_its_deadline(data):
    async with listener(member(SERVER), hello_timeout_s=0.1) as door:
        await say(door, data)
        assert door.counters == {"no hello in time": 1}
        assert await works(door, member())


async def test_a_handshake_that_is_hung_up_is_counted():
    async with listener(member(SERVER)) as door:
        with socket.create_connection(door.address.split(":")) as sock:
            sock.sendall(client_hello()[:50])
        assert await works(door, member())
        assert door.counters == {"closed before hello": 1}


async def test_a_side_that_never_answers_a_handshake_ends_the_dial_at_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="TLS handshake"):
            await connect(address, hello(), timeout_s=0.1, security=member())


async def test_a_listener_that_closes_in_mid_handshake_leaves_nothing_open():
    door = listener(member(SERVER))
    await door.start()
    sock = socket.create_connection(door.address.split(":"))
    with contextlib.closing(sock):
        sock.sendall(client_hello())
        await asyncio.get_running_loop().run_in_executor(None, sock.recv, 65536)  # it has begun
        await door.close()
        sock.settimeout(5)
        while sock.recv(65536):
            pass


async def say(door, data):
    """Send bytes as a stranger and wait until the other side closes; return what it said."""
    host, port = door.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


async def test_a_thousand_connects_from_one_address_cost_a_few_tries_and_members_get_in():
    limiter = AcceptLimiter(AcceptLimits(favours_loopback=False))
    async with listener(member(SERVER), limiter=limiter, max_unknown=2000) as door:
        host, port = door.address.split(":")
        loop = asyncio.get_running_loop()

        async def knock():
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind(("127.0.0.66", 0))
            with contextlib.closing(sock), contextlib.suppress(ConnectionError):
                await loop.sock_connect(sock, (host, int(port)))
                await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\n\r\n")
                while await loop.sock_recv(sock, 100):
                    pass

        started = loop.time()
        for _ in range(10):
            await asyncio.gather(*(knock() for _ in range(100)))
            assert await works(door, member())
        let_in = 64 + 5 * (loop.time() - started)
        assert door.counters["not encrypted"] <= let_in + 1
        assert door.counters["not encrypted"] + door.counters[TOO_MANY_FROM_ADDRESS] == 1000
        assert limiter.num_addresses == 2


async def test_members_never_meet_the_limit_of_their_address():
    limits = AcceptLimits(favours_loopback=False, address_burst=2, address_rate=0.001, strangers_burst=2)
    async with listener(member(SERVER), limiter=AcceptLimiter(limits)) as door:
        for _ in range(10):
            assert await works(door, member())
        assert door.counters == {}


# ------------------------------------------------------------------------------------ strangers with a ticket


async def test_a_stranger_with_a_ticket_may_ask_for_admission_and_for_nothing_else():
    async with listener(member(SERVER)) as door:
        stranger = TicketSecurity(member(THIRD).server_fingerprint, mode=Mode.ON)  # any member's will do
        assert await works(door, stranger, Purpose.ADMISSION)
        assert await works(door, stranger, Purpose.ADMISSION, expect=SERVER)
        with pytest.raises(HandshakeRefused, match="no certificate"):
            await connect(door.address, hello(), timeout_s=5, security=stranger)
        assert door.counters == {"no certificate": 1}


async def test_a_stranger_refuses_whoever_is_not_of_the_run_of_its_ticket():
    async with listener(member(SERVER, OTHER_SECRET)) as door:
        stranger = TicketSecurity(member().server_fingerprint, mode=Mode.ON)
        with pytest.raises(SecurityRefused, match="another run"):
            await connect(door.address, hello(Purpose.ADMISSION), timeout_s=5, security=stranger)
    async with listener(member(THIRD)) as door:
        with pytest.raises(SecurityRefused, match="another peer"):
            await connect(door.address, hello(Purpose.ADMISSION), timeout_s=5, security=stranger, expect=SERVER)
    async with listener(member(SERVER, OTHER_SECRET)) as door:
        either = TicketSecurity(member().server_fingerprint, Authority(OTHER_SECRET).public_key, mode=Mode.ON)
        assert await works(door, either, Purpose.ADMISSION)


# ------------------------------------------------------------------------------------ withdrawal, authorities, policy


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO], ids=["encrypted", "plain"])
async def test_a_certificate_that_was_withdrawn_opens_no_door_and_a_newer_one_does(mode):
    server = member(SERVER, mode=mode)
    async with listener(server) as door:
        assert await works(door, member(mode=mode))
        assert server.withdraw(CLIENT, NUMBER)
        assert not server.withdraw(CLIENT, NUMBER - 1)
        with pytest.raises(HandshakeRefused, match="certificate was withdrawn"):
            await connect(door.address, hello(), timeout_s=5, security=member(mode=mode))
        assert door.counters == {"certificate was withdrawn": 1}
        newer = Security(credentials(number=NUMBER + 1), mode=mode)
        assert await works(door, newer)


async def test_whoever_answers_with_a_certificate_that_was_withdrawn_is_refused():
    async with listener(member(SERVER)) as door:
        client = member()
        client.withdraw(SERVER, NUMBER)
        with pytest.raises(SecurityRefused, match="certificate was withdrawn"):
            await connect(door.address, hello(), timeout_s=5, security=client, expect=SERVER)


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO], ids=["encrypted", "plain"])
async def test_members_of_two_authorities_talk_once_both_believe_both(mode):
    server, client = member(SERVER, mode=mode), member(CLIENT, OTHER_SECRET, mode, believes=(SECRET, OTHER_SECRET))
    async with listener(server) as door:
        with pytest.raises((SecurityRefused, HandshakeRefused)):
            await connect(door.address, hello(), timeout_s=5, security=client)
        server.believe([Authority(OTHER_SECRET).certificate] * 2)
        assert await works(door, client, expect=SERVER)


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO], ids=["encrypted", "plain"])
async def test_peers_with_a_shared_secret_have_the_names_that_they_take(mode):
    one, other = PeerId("0" * 15 + "1"), PeerId("0" * 15 + "2")
    async with listener(Security.shared(one, SECRET, mode=mode), answer=reply(one)) as door:
        channel = await connect(
            door.address,
            hello(peer_id=other),
            timeout_s=5,
            security=Security.shared(other, SECRET, mode=mode),
            expect=one,
        )
        channel.close()
        assert door.counters == {}
        with pytest.raises((SecurityRefused, HandshakeRefused), match=r"unknown ca|another run|decrypt error"):
            await connect(
                door.address,
                hello(peer_id=other),
                timeout_s=5,
                security=Security.shared(other, OTHER_SECRET, mode=mode),
            )


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (Mode.AUTO, {"127.0.0.1": False, "::1": False, "::ffff:127.0.0.1": False, "10.0.0.1": True, "fe80::1%a": True}),
        (Mode.ON, {"127.0.0.1": True, "203.0.113.7": True}),
        (Mode.OFF, {"127.0.0.1": False, "203.0.113.7": False}),
    ],
)
def test_what_leaves_this_machine_is_encrypted_unless_told_otherwise(mode, wanted):
    stranger = TicketSecurity(member().server_fingerprint, mode=mode)
    for security in (member(mode=mode), stranger):
        assert {host: security.wanted_for(host) for host in wanted} == wanted


async def test_over_loopback_the_usual_dialler_is_plain_and_the_usual_listener_takes_both():
    async with listener(member(SERVER, mode=Mode.AUTO)) as door:
        for mode, is_encrypted in ((Mode.AUTO, False), (Mode.ON, True)):
            sock, _, _ = await open_connection(
                door.address, hello(), timeout_s=5, security=member(mode=mode), expect=SERVER
            )
            with contextlib.closing(sock):
                assert isinstance(sock, TlsSocket) is is_encrypted
        assert door.counters == {}
