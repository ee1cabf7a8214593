# SPDX-License-Identifier: Apache-2.0
"""How both sides prove who they are on a connection that is not encrypted: by certificates, and signed first frames.

What it gives: nobody opens a connection as a peer whose key it does not have, and a proof that somebody has heard opens
no other connection. Over loopback it names both ports, so it fits only the connection it was made for, and is good for
`LOOPBACK_WINDOW_S`. Between machines ports may be translated and clocks differ: there it is good for `WINDOW_S`, at the
peer it names if its dialler knew whom to expect. The answer signs the dialler's proof, so it fits no other hello. What
it does not give, and only encryption does: that nobody on the
way reads, changes or takes over the connection afterwards, or shows the same proof again within that time.

Knows no policy: which connections are encrypted, and whose certificates count, is security.py.
"""

import socket
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import SecurityRefused
from isthmus.collective.transport.certificates import certificate_from_bytes, certificate_to_bytes, key_in
from isthmus.collective.transport.hello import Hello, HelloReply
from isthmus.collective.transport.interfaces import is_loopback
from isthmus.collective.transport.sockets import lost

LOOPBACK_WINDOW_S = 60.0
WINDOW_S = 600.0
NO_PROOF = "no proof of the key"
WRONG_PROOF = "proof of another key"
ANOTHER_CONNECTION = "proof of another connection"
OUT_OF_TIME = "proof of another time"

_PURPOSE = b"isthmus hello 1\0"
_ANSWER = b"isthmus reply 1\0"


class Proof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The credential of a hello. `to` is who must answer, empty for anybody; `ports` are the dialler's and ours."""

    certificate: Annotated[bytes, Meta(max_length=1024)]
    to: Annotated[str, Meta(max_length=16)]
    at_ms: Annotated[int, Meta(ge=0, le=2**53)]
    ports: tuple[Annotated[int, Meta(ge=0, le=65535)], Annotated[int, Meta(ge=0, le=65535)]]
    signature: Annotated[bytes, Meta(max_length=64)] = b""


def with_proof(
    sock: socket.socket,
    hello: Hello,
    *,
    to: PeerId | None,
    key: Ed25519PrivateKey,
    certificate: x509.Certificate,
    wall_s: float,
) -> Hello:
    """The hello of a connection that was dialled just now, with its credential.

    Raises:
        ConnectionLost: the connection is gone already.
    """
    proof = Proof(certificate_to_bytes(certificate), to or "", round(wall_s * 1000), _ports(sock, is_dialled=True))
    signed = msgspec.structs.replace(proof, signature=key.sign(_words(hello, proof)))
    return msgspec.structs.replace(hello, credential=msgspec.msgpack.encode(signed))


def certificate_shown(sock: socket.socket, hello: Hello, *, me: PeerId, wall_s: float) -> x509.Certificate:
    """The certificate that an accepted connection shows in its hello, and whose key it has. It may be worth nothing.

    Raises:
        SecurityRefused: there is none, or no proof of the key that fits this connection.
        ConnectionLost: the connection is gone already.
    """
    try:
        proof = msgspec.msgpack.decode(hello.credential, type=Proof)
        certificate = certificate_from_bytes(proof.certificate)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise SecurityRefused(NO_PROOF) from error
    try:
        Ed25519PublicKey.from_public_bytes(key_in(certificate)).verify(proof.signature, _words(hello, proof))
    except (InvalidSignature, ValueError) as error:
        raise SecurityRefused(WRONG_PROOF) from error
    ports = _ports(sock, is_dialled=False)
    if proof.ports != ports or proof.to not in ("", me):
        raise SecurityRefused(ANOTHER_CONNECTION)
    window_s = WINDOW_S if ports == _UNKNOWN_PORTS else LOOPBACK_WINDOW_S
    if abs(wall_s - proof.at_ms / 1000) > window_s:
        raise SecurityRefused(OUT_OF_TIME)
    return certificate


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The credential of a reply."""

    certificate: Annotated[bytes, Meta(max_length=1024)]
    signature: Annotated[bytes, Meta(max_length=64)]


def with_answer(
    hello: Hello, reply: HelloReply, *, key: Ed25519PrivateKey, certificate: x509.Certificate
) -> HelloReply:
    """The reply to a hello that came with a proof, with its credential."""
    answer = Answer(certificate_to_bytes(certificate), key.sign(_answering(hello, reply)))
    return msgspec.structs.replace(reply, credential=msgspec.msgpack.encode(answer))


def certificate_answered(hello: Hello, reply: HelloReply) -> x509.Certificate:
    """The certificate that a reply to our hello shows, and whose key its sender has. It may be worth nothing.

    Raises:
        SecurityRefused: there is none, or no proof of the key that fits our hello.
    """
    try:
        answer = msgspec.msgpack.decode(reply.credential, type=Answer)
        certificate = certificate_from_bytes(answer.certificate)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise SecurityRefused(NO_PROOF) from error
    try:
        Ed25519PublicKey.from_public_bytes(key_in(certificate)).verify(answer.signature, _answering(hello, reply))
    except (InvalidSignature, ValueError) as error:
        raise SecurityRefused(WRONG_PROOF) from error
    return certificate


_UNKNOWN_PORTS = (0, 0)


def _answering(hello: Hello, reply: HelloReply) -> bytes:
    """What an answer signs. The dialler's proof is like no other: it has a signature over an instant and ports."""
    return _ANSWER + msgspec.msgpack.encode((hello.credential, reply.peer_id, reply.incarnation))


def _words(hello: Hello, proof: Proof) -> bytes:
    """What is signed: everything that the hello says of who dials what for. Not its memory, which is named for us."""
    place = (hello.purpose, hello.stream, hello.num_streams)
    who = (hello.run_id, hello.peer_id, hello.incarnation)
    return _PURPOSE + msgspec.msgpack.encode((who, place, proof.to, proof.at_ms, proof.ports))


def _ports(sock: socket.socket, *, is_dialled: bool) -> tuple[int, int]:
    """The dialler's port and the acceptor's, where both see the same ones."""
    try:
        ours, theirs = sock.getsockname(), sock.getpeername()
    except OSError as error:
        raise lost(error) from error
    if not is_loopback(str(theirs[0])):
        return _UNKNOWN_PORTS
    return (ours[1], theirs[1]) if is_dialled else (theirs[1], ours[1])
