# SPDX-License-Identifier: Apache-2.0
"""Which connections are encrypted, with whom: TLS 1.3, both sides with a certificate of the run.

What it gives. Nobody without a certificate of the run's authority can open a connection, and nobody as a peer whose key
it does not have. What is encrypted nobody can listen in on, change, or read later when it was recorded today (each
connection has keys of its own). What is not encrypted, over loopback or where the operator wants it so, is opened with
a proof of the key (proof.py) and no more.

A stranger with a ticket knows the authority's public key (`server_fingerprint` of any member) and nothing else: it
encrypts as `TicketSecurity`, showing no certificate. The acceptor lets such a connection live only if its hello then
says that it wants admission; `name_mismatch` tells.

Rules: both sides follow the same policy without a word between them. In mode `auto` whatever leaves the machine is
encrypted; over loopback the dialler does not, and the listener takes both. Who is put out of the run has its
certificates withdrawn; that is looked at in every handshake, and a connection that is there already is for its owner to
end. AES-GCM keeps its promises for about 400 GB under one key, and Python does not offer the change of keys that TLS
1.3 has: a stream that has carried that much should be dialled anew.
"""

import asyncio
import enum
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import DeadlineExceeded, SecurityRefused
from isthmus.collective.transport.certificates import (
    Authority,
    Credentials,
    is_signed_by,
    name_in,
    peer_id_in,
    signer_of,
)
from isthmus.collective.transport.hello import Hello, HelloReply
from isthmus.collective.transport.interfaces import is_loopback
from isthmus.collective.transport.proof import certificate_answered, certificate_shown, with_answer, with_proof
from isthmus.collective.transport.tls import Session, TlsSocket

NO_CERTIFICATE = "no certificate"
ANOTHER_PEER = "certificate of another peer"
ANOTHER_RUN = "certificate of another run"
WITHDRAWN = "certificate was withdrawn"


class Mode(enum.StrEnum):
    """When to encrypt."""

    AUTO = "auto"
    """Whatever leaves this machine."""
    ON = "on"
    OFF = "off"


class DialSecurity(Protocol):
    """What a dialler needs."""

    def wanted_for(self, host: str) -> bool:
        """Whether a connection to or from this address (no name, no port) must be encrypted."""
        ...

    def prove(self, sock: socket.socket, hello: Hello, *, expect: PeerId | None) -> Hello:
        """The hello for a connection that was just dialled and is not encrypted. Raises ConnectionLost."""
        ...

    def doubt_answer(self, hello: Hello, reply: HelloReply) -> str | None:
        """Why whoever has answered that hello is not who it says, or None if it has proved that it is."""
        ...

    async def secure_dialled(self, sock: socket.socket, *, expect: PeerId | None, timeout_s: float) -> TlsSocket:
        """Encrypt a connection that was just dialled.

        Args:
            sock: connected. It is the result's from then on; after an error the caller still has it.
            expect: who must answer, None for anybody of the run.
            timeout_s: for the whole handshake.

        Raises:
            SecurityRefused: the other side is not who it should be, or does not speak TLS 1.3.
            ConnectionLost, DeadlineExceeded: it broke off.
        """
        ...


def wall_s() -> float:
    """Unix seconds. A proof is made for now, and two machines must agree on when that is."""
    return time.time_ns() / 1e9


class Security:
    """A member's side. One for all connections of a process, in one event loop.

    Args:
        credentials: what we show, and whom we believe.
        mode: when to encrypt.
        wall_s: the wall clock in Unix seconds, for connections that are not encrypted.
        name_of: whom a certificate speaks of. Only `shared` has another answer than `peer_id_in`.

    Raises:
        ValueError: none of the authorities has signed the certificate, or it speaks of nobody.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        mode: Mode = Mode.AUTO,
        wall_s: Callable[[], float] = wall_s,
        name_of: Callable[[x509.Certificate], PeerId | None] = peer_id_in,
    ) -> None:
        self.mode = mode
        me, signer = name_of(credentials.certificate), signer_of(credentials.certificate, credentials.authorities)
        if me is None or signer is None:
            raise ValueError("these credentials are nobody's in this run")
        self.peer_id = me
        self.server_fingerprint = signer
        """32 bytes for a ticket: by them a stranger knows us. The public key of who has signed our certificate."""
        self._credentials = credentials
        self._authorities: list[x509.Certificate] = []
        self._void_up_to: dict[PeerId, int] = {}
        self._wall_s = wall_s
        self._name_of = name_of
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER)
        self._dialling.verify_mode = ssl.CERT_REQUIRED
        self._accepting.verify_mode = ssl.CERT_OPTIONAL  # a stranger has none; its hello decides
        self._accepting.num_tickets = 0
        with credentials.as_file() as path:
            for context in (self._dialling, self._accepting):
                context.load_cert_chain(path)
        self.believe(credentials.authorities)

    @classmethod
    def shared(cls, peer_id: PeerId, secret: bytes, *, mode: Mode = Mode.AUTO) -> "Security":
        """For scripts whose peers trust each other: whoever has the secret can speak as anybody.

        Args:
            peer_id: who we are.
            secret: 32 bytes that all peers have, and nobody else.
            mode: when to encrypt.
        """
        authority, key = Authority(secret), Ed25519PrivateKey.generate()
        certificate = authority.issue(key.public_key(), 1, peer_id=peer_id)
        return cls(Credentials(key, certificate, (authority.certificate,)), mode=mode, name_of=name_in)

    def believe(self, authorities: Iterable[x509.Certificate]) -> None:
        """Take certificates of these authorities too from now on. Of those that are known already nothing is done."""
        for authority in authorities:
            if authority not in self._authorities:
                self._authorities.append(authority)
                for context in (self._dialling, self._accepting):
                    context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))

    @property
    def key(self) -> Ed25519PrivateKey:
        """Our own."""
        return self._credentials.key

    @property
    def authorities(self) -> tuple[x509.Certificate, ...]:
        """Whose certificates are taken now."""
        return tuple(self._authorities)

    def withdraw(self, peer_id: PeerId, up_to: int) -> bool:
        """Let a peer's certificates up to this number be void from now on. Whether that is news.

        It is looked at in handshakes: whoever owns the connections that are there already has to end them.
        """
        is_news = up_to > self._void_up_to.get(peer_id, 0)
        if is_news:
            self._void_up_to[peer_id] = up_to
        return is_news

    @property
    def is_served(self) -> bool:
        """Whether a listener takes encrypted connections at all."""
        return self.mode is not Mode.OFF

    def wanted_for(self, host: str) -> bool:
        """See DialSecurity."""
        return _is_wanted(self.mode, host)

    def prove(self, sock: socket.socket, hello: Hello, *, expect: PeerId | None) -> Hello:
        """See DialSecurity."""
        own = self._credentials
        return with_proof(sock, hello, to=expect, key=own.key, certificate=own.certificate, wall_s=self._wall_s())

    def doubt(self, sock: socket.socket, hello: Hello) -> str | None:
        """Why a dialler that is not encrypted is not who its hello says, or None if it has proved that it is."""
        try:
            certificate = certificate_shown(sock, hello, me=self.peer_id, wall_s=self._wall_s())
            self.require_member(certificate, hello.peer_id)
        except SecurityRefused as doubt:
            return doubt.reason
        return None

    def answer(self, hello: Hello, reply: HelloReply) -> HelloReply:
        """Our reply to a hello that `doubt` had nothing against."""
        return with_answer(hello, reply, key=self._credentials.key, certificate=self._credentials.certificate)

    def doubt_answer(self, hello: Hello, reply: HelloReply) -> str | None:
        """See DialSecurity."""
        try:
            self.require_member(certificate_answered(hello, reply), reply.peer_id)
        except SecurityRefused as doubt:
            return doubt.reason
        return None

    def require_member(self, certificate: x509.Certificate, peer_id: PeerId) -> None:
        """Check a certificate that did not come through TLS. Who shows it must have proved that it has its key.

        Raises:
            SecurityRefused: it is not of this run, of another peer, or withdrawn.
        """
        if signer_of(certificate, self._authorities) is None:
            raise SecurityRefused(ANOTHER_RUN)
        if self._proven(certificate) != peer_id:
            raise SecurityRefused(ANOTHER_PEER)

    async def secure_dialled(self, sock: socket.socket, *, expect: PeerId | None, timeout_s: float) -> TlsSocket:
        """See DialSecurity."""
        session = await _session(sock, self._dialling, server_side=False, timeout_s=timeout_s)
        peer_id = self._peer_in(session)
        if peer_id is None:
            raise SecurityRefused(NO_CERTIFICATE)
        if expect is not None and peer_id != expect:
            raise SecurityRefused(ANOTHER_PEER)
        return TlsSocket(sock, session, peer_id)

    async def secure_accepted(self, sock: socket.socket, *, timeout_s: float) -> TlsSocket:
        """Encrypt a connection that was just accepted. It may be a stranger's, or of a peer that was put out.

        So what its hello says must be held against `name_mismatch`: then the refusal can say why.

        Raises: as `secure_dialled`.
        """
        session = await _session(sock, self._accepting, server_side=True, timeout_s=timeout_s)
        try:
            return TlsSocket(sock, session, self._peer_in(session))
        except SecurityRefused as doubt:
            return TlsSocket(sock, session, None, doubt.reason)

    def _peer_in(self, session: Session) -> PeerId | None:
        """Who the other side is; the TLS library has checked its certificate, if it showed one."""
        der = session.certificate
        return None if der is None else self._proven(_parsed(der))

    def _proven(self, certificate: x509.Certificate) -> PeerId:
        """Whom a certificate speaks of that an authority has signed."""
        peer_id = self._name_of(certificate)
        if peer_id is None:
            raise SecurityRefused(ANOTHER_PEER)
        if certificate.serial_number <= self._void_up_to.get(peer_id, 0):
            raise SecurityRefused(WITHDRAWN)
        return peer_id


class TicketSecurity:
    """The side of a stranger with a ticket: it knows the run's authority and has no certificate.

    Args:
        server_fingerprints: one out of the ticket; several where any of them will do.
        mode: when to encrypt.
    """

    def __init__(self, *server_fingerprints: bytes, mode: Mode = Mode.AUTO) -> None:
        self.mode = mode
        self._authority_keys = server_fingerprints
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        # The library cannot check against a key alone, so we do. It does check that the other side has its own key.
        self._context.verify_mode = ssl.CERT_NONE

    def wanted_for(self, host: str) -> bool:
        """See DialSecurity."""
        return _is_wanted(self.mode, host)

    def prove(self, sock: socket.socket, hello: Hello, *, expect: PeerId | None) -> Hello:  # noqa: ARG002 - a ticket is
        """See DialSecurity. A stranger's hello has a ticket in it."""
        return hello

    def doubt_answer(self, hello: Hello, reply: HelloReply) -> str | None:  # noqa: ARG002
        """See DialSecurity. Where nothing is encrypted a stranger has nothing to know anybody by."""
        return None

    async def secure_dialled(self, sock: socket.socket, *, expect: PeerId | None, timeout_s: float) -> TlsSocket:
        """See DialSecurity."""
        session = await _session(sock, self._context, server_side=False, timeout_s=timeout_s)
        der = session.certificate
        if der is None:
            raise SecurityRefused(NO_CERTIFICATE)
        certificate = _parsed(der)
        if not any(is_signed_by(key, certificate) for key in self._authority_keys):
            raise SecurityRefused(ANOTHER_RUN)
        peer_id = peer_id_in(certificate)
        if peer_id is None or (expect is not None and peer_id != expect):
            raise SecurityRefused(ANOTHER_PEER)
        return TlsSocket(sock, session, peer_id)


def name_mismatch(sock: socket.socket, claimed: PeerId, *, may_be_stranger: bool) -> str | None:
    """Why who somebody claims to be does not fit the certificate, or None if it does or nothing is encrypted.

    Args:
        sock: encrypted or not.
        claimed: what its hello or reply says.
        may_be_stranger: whether somebody without a certificate is welcome.
    """
    if not isinstance(sock, TlsSocket):
        return None
    if sock.doubt is not None:
        return sock.doubt
    if sock.peer_id is None:
        return None if may_be_stranger else NO_CERTIFICATE
    return None if sock.peer_id == claimed else ANOTHER_PEER


def _is_wanted(mode: Mode, host: str) -> bool:
    return mode is Mode.ON or (mode is Mode.AUTO and not is_loopback(host))


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers have names of their own, checked here
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


async def _session(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, timeout_s: float) -> Session:
    session = Session(context, server_side=server_side)
    try:
        async with asyncio.timeout(timeout_s):
            await session.shake_hands(sock)
    except TimeoutError as error:
        raise DeadlineExceeded("the TLS handshake", timeout_s) from error
    return session


def _parsed(der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise SecurityRefused("certificate cannot be read") from error
