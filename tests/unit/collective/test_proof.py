# SPDX-License-Identifier: Apache-2.0
"""Who somebody is on a connection that is not encrypted: who has the key, on this connection, now."""

import contextlib
import socket

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.types import Incarnation
from isthmus.collective.errors import ConnectionLost, HandshakeRefused, SecurityRefused
from isthmus.collective.transport import (
    Authority,
    Credentials,
    Hello,
    HelloReply,
    Listener,
    Mode,
    Purpose,
    Security,
    connect,
)
from isthmus.collective.transport.certificates import peer_id_of_key
from isthmus.collective.transport.proof import (
    LOOPBACK_WINDOW_S,
    WINDOW_S,
    Proof,
    certificate_shown,
    with_answer,
    with_proof,
)
from isthmus.collective.transport.wire import PROTOCOL_VERSION

NOW_S = 1_000_000.0
AUTHORITY = Authority(b"s" * 32)
KEYS = {
    peer_id_of_key(key.public_key().public_bytes_raw()): key
    for key in (Ed25519PrivateKey.from_private_bytes(seed * 32) for seed in (b"1", b"2", b"3"))
}
SERVER, CLIENT, THIRD = KEYS
CERTIFICATES = {peer_id: AUTHORITY.issue(key.public_key(), 1) for peer_id, key in KEYS.items()}


def member(peer_id=CLIENT, *, now_s=NOW_S, authority=AUTHORITY):
    certificate = authority.issue(KEYS[peer_id].public_key(), 1)
    own = Credentials(KEYS[peer_id], certificate, (authority.certificate,))
    return Security(own, mode=Mode.OFF, wall_s=lambda: now_s)


def hello(peer_id=CLIENT, purpose=Purpose.CONTROL, **more):
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id="run",
        purpose=purpose,
        peer_id=peer_id,
        incarnation=Incarnation(7),
        **more,
    )


async def hang_up(channel):
    channel.close()


def listener(security=None, *, answers_as=SERVER):
    routes = dict.fromkeys((Purpose.CONTROL, Purpose.STATE, Purpose.ADMISSION), hang_up)
    reply = HelloReply(accepted=True, peer_id=answers_as, incarnation=Incarnation(3))
    return Listener(
        "127.0.0.1:0",
        accept=lambda _: reply,
        routes=routes,
        bulk=lambda sock, _: sock.close(),
        security=security or member(SERVER),
    )


class Forger:
    """Dials with a hello that it has changed after it was proved, or that is not its own."""

    def __init__(self, forge):
        self._forge = forge

    def wanted_for(self, host):
        return False

    def prove(self, sock, hello, *, expect):
        return self._forge(sock, hello)

    def doubt_answer(self, hello, reply):
        return None


def honest(sock, said, *, as_peer=CLIENT, key=None, certificate=None, to=None, wall_s=NOW_S):
    return with_proof(
        sock,
        said,
        to=to,
        key=key or KEYS[as_peer],
        certificate=certificate or CERTIFICATES[as_peer],
        wall_s=wall_s,
    )


def changed(sock, said, **fields):
    return msgspec.structs.replace(honest(sock, said), **fields)


FORGERIES = {
    "no credential": (lambda sock, said: said, "no proof of the key"),
    "noise": (lambda sock, said: msgspec.structs.replace(said, credential=b"\xc1" * 200), "no proof of the key"),
    "another's certificate": (
        lambda sock, said: honest(sock, said, certificate=CERTIFICATES[THIRD]),
        "proof of another key",
    ),
    "own certificate, another's name": (
        lambda sock, said: honest(sock, msgspec.structs.replace(said, peer_id=THIRD)),
        "certificate of another peer",
    ),
    "of another authority": (
        lambda sock, said: honest(sock, said, certificate=Authority(b"o" * 32).issue(KEYS[CLIENT].public_key(), 1)),
        "certificate of another run",
    ),
    "another's name, own signature, a certificate that the run never made": (
        lambda sock, said: honest(
            sock,
            msgspec.structs.replace(said, peer_id=THIRD),
            certificate=AUTHORITY.issue(KEYS[CLIENT].public_key(), 1, peer_id=THIRD),
        ),
        "certificate of another peer",
    ),
    "another incarnation": (
        lambda sock, said: changed(sock, said, incarnation=Incarnation(8)),
        "proof of another key",
    ),
    "another purpose": (lambda sock, said: changed(sock, said, purpose=Purpose.STATE), "proof of another key"),
    "another stream": (lambda sock, said: changed(sock, said, stream=1, num_streams=2), "proof of another key"),
    "for another acceptor": (lambda sock, said: honest(sock, said, to=THIRD), "proof of another connection"),
    "too old": (
        lambda sock, said: honest(sock, said, wall_s=NOW_S - LOOPBACK_WINDOW_S - 1),
        "proof of another time",
    ),
    "of the future": (
        lambda sock, said: honest(sock, said, wall_s=NOW_S + LOOPBACK_WINDOW_S + 1),
        "proof of another time",
    ),
}


@pytest.mark.parametrize(("forge", "reason"), FORGERIES.values(), ids=FORGERIES.keys())
@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.BULK])
async def test_only_who_has_the_key_speaks_as_its_peer_and_others_are_told_why_not(forge, reason, purpose):
    async with listener() as door:
        with pytest.raises(HandshakeRefused, match=reason):
            await connect(door.address, hello(purpose=purpose), timeout_s=5, security=Forger(forge))
        assert door.counters == {reason: 1}
        (await connect(door.address, hello(), timeout_s=5, security=member())).close()


class Impostor(Security):
    """Answers with what it likes."""

    def __init__(self, forge, who=THIRD):
        super().__init__(Credentials(KEYS[who], CERTIFICATES[who], (AUTHORITY.certificate,)), wall_s=lambda: NOW_S)
        self._forge = forge

    def answer(self, hello, reply):
        return self._forge(hello, reply)


def answering(said, reply, *, key=KEYS[THIRD], certificate=CERTIFICATES[THIRD]):
    return with_answer(said, reply, key=key, certificate=certificate)


IMPOSTURES = {
    "no credential": (lambda said, reply: reply, "no proof of the key"),
    "noise": (lambda said, reply: msgspec.structs.replace(reply, credential=b"\xc1"), "no proof of the key"),
    "its own certificate": (answering, "certificate of another peer"),
    "the other's certificate": (
        lambda said, reply: answering(said, reply, certificate=CERTIFICATES[SERVER]),
        "proof of another key",
    ),
    "an answer to another hello": (
        lambda said, reply: answering(hello(), reply, key=KEYS[SERVER], certificate=CERTIFICATES[SERVER]),
        "proof of another key",
    ),
    "of another authority": (
        lambda said, reply: answering(
            said, reply, certificate=Authority(b"o" * 32).issue(KEYS[THIRD].public_key(), 1, peer_id=SERVER)
        ),
        "certificate of another run",
    ),
}


@pytest.mark.parametrize(("forge", "reason"), IMPOSTURES.values(), ids=IMPOSTURES.keys())
@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.BULK])
async def test_only_who_has_the_key_answers_as_its_peer(forge, reason, purpose):
    """A member has taken the address of another one that has died."""
    async with listener(Impostor(forge), answers_as=SERVER) as door:
        with pytest.raises(SecurityRefused, match=reason):
            await connect(door.address, hello(purpose=purpose), timeout_s=5, security=member())


async def test_a_proof_that_was_heard_opens_no_other_connection():
    """A member is dialled by another one, and shows what it was shown to a third."""
    heard = []

    def accept(said):
        heard.append(said)
        return HelloReply(accepted=True, peer_id=THIRD, incarnation=Incarnation(1))

    routes = {Purpose.CONTROL: hang_up}
    async with (
        Listener(
            "127.0.0.1:0", accept=accept, routes=routes, bulk=lambda sock, _: sock.close(), security=member(THIRD)
        ) as thief,
        listener() as door,
    ):
        (await connect(thief.address, hello(), timeout_s=5, security=member())).close()
        (stolen,) = heard
        with pytest.raises(HandshakeRefused, match="proof of another connection"):
            await connect(door.address, hello(), timeout_s=5, security=Forger(lambda sock, said: stolen))


async def test_a_stranger_with_a_ticket_proves_nothing_here():
    async with listener() as door:
        (await connect(door.address, hello(purpose=Purpose.ADMISSION), timeout_s=5)).close()


class Distant:
    """The end of a connection between two machines, as its proof sees it."""

    def getsockname(self):
        return ("192.0.2.1", 40_000)

    def getpeername(self):
        return ("203.0.113.7", 7000)


def test_between_machines_ports_may_be_translated_and_clocks_may_differ_by_ten_minutes():
    said = honest(Distant(), hello())
    assert msgspec.msgpack.decode(said.credential, type=Proof).ports == (0, 0)
    for wall_s in (NOW_S - WINDOW_S + 1, NOW_S + WINDOW_S - 1):
        assert certificate_shown(Distant(), said, me=SERVER, wall_s=wall_s) == CERTIFICATES[CLIENT]
    with pytest.raises(SecurityRefused, match="proof of another time"):
        certificate_shown(Distant(), said, me=SERVER, wall_s=NOW_S + WINDOW_S + 1)


def test_a_hello_with_its_proof_stays_far_below_its_limit_of_4096_bytes():
    said = honest(Distant(), hello(stream=63, num_streams=64))
    assert len(msgspec.msgpack.encode(said)) < 1024


def test_a_connection_that_is_gone_is_lost():
    with contextlib.closing(socket.socket()) as unconnected, pytest.raises(ConnectionLost):
        honest(unconnected, hello())
