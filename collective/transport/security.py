"""Which connections are encrypted, with whom: TLS 1.3, both sides with a certificate of the run.

What it gives. Nobody without the run's secret can open a connection, listen in, change a byte, or read later what was
recorded today (each connection has keys of its own). What it does not give: a member has the secret and could sign
itself a certificate with another member's name. `pins` close that hole: a mapping from peer to the fingerprint of its
key, which whoever makes the views can fill. With pins the secret need not be one, except that a ticket then proves
nothing about who answers.

A stranger with a ticket knows the authority's public key (`server_fingerprint` of any member) and nothing else: it
encrypts as `TicketSecurity`, showing no certificate. The acceptor lets such a connection live only if its hello then
says that it wants admission; `name_mismatch` tells.

Rules: both sides follow the same policy without a word between them. In mode `auto` whatever leaves the machine is
encrypted; over loopback the dialler does not, and the listener takes both. Certificates are renewed here while half of
their life is left; the key stays that of this object, so that pins stay true. A connection outlives its certificate.
AES-GCM keeps its promises for about 400 GB under one key, and Python does not offer the change of keys that TLS 1.3
has: a stream that has carried that much should be dialled anew.
"""

import asyncio
import datetime
import enum
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from collective.core.types import PeerId
from collective.errors import DeadlineExceeded, SecurityRefused
from collective.transport.certificates import LIFE, Authority, fingerprint_of, is_signed_by, peer_id_in
from collective.transport.sockets import is_loopback
from collective.transport.tls import Session, TlsSocket

NO_CERTIFICATE = "no certificate"
ANOTHER_PEER = "certificate of another peer"
NOT_PINNED = "certificate is not the pinned one"
ANOTHER_RUN = "certificate of another run"


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


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Security:
    """A member's side. One for all connections of a process, in one event loop.

    Args:
        peer_id: who we are.
        secret: 32 bytes that every member of the run has, see the module.
        mode: when to encrypt.
        pins: fingerprint of each peer's key. Looked up at each handshake, so the owner may change it; a peer that is
            not in there is refused. None pins nobody.
        now: the wall clock in UTC.
    """

    def __init__(
        self,
        peer_id: PeerId,
        secret: bytes,
        *,
        mode: Mode = Mode.AUTO,
        pins: Mapping[PeerId, bytes] | None = None,
        now: Callable[[], datetime.datetime] = _utc_now,
    ) -> None:
        self.mode = mode
        self._peer_id = peer_id
        self._authority = Authority(secret)
        self._key = Ed25519PrivateKey.generate()
        self._pins = pins
        self._now = now
        self._renew()

    @property
    def server_fingerprint(self) -> bytes:
        """32 bytes for a ticket: by them a stranger knows any member of the run. The authority's public key."""
        return self._authority.public_key

    @property
    def fingerprint(self) -> bytes:
        """32 bytes for the pins of others: of our own key."""
        return self._identity.fingerprint

    @property
    def is_served(self) -> bool:
        """Whether a listener takes encrypted connections at all."""
        return self.mode is not Mode.OFF

    def wanted_for(self, host: str) -> bool:
        """See DialSecurity."""
        return _is_wanted(self.mode, host)

    async def secure_dialled(self, sock: socket.socket, *, expect: PeerId | None, timeout_s: float) -> TlsSocket:
        """See DialSecurity."""
        self._renew_if_due()
        session = await _session(sock, self._dialling, server_side=False, timeout_s=timeout_s)
        peer_id = self._peer_in(session)
        if peer_id is None:
            raise SecurityRefused(NO_CERTIFICATE)
        if expect is not None and peer_id != expect:
            raise SecurityRefused(ANOTHER_PEER)
        return TlsSocket(sock, session, peer_id)

    async def secure_accepted(self, sock: socket.socket, *, timeout_s: float) -> TlsSocket:
        """Encrypt a connection that was just accepted. It may be a stranger's, or of a peer that is not the pinned one.

        So what its hello says must be held against `name_mismatch`: then the refusal can say why.

        Raises: as `secure_dialled`.
        """
        self._renew_if_due()
        session = await _session(sock, self._accepting, server_side=True, timeout_s=timeout_s)
        try:
            return TlsSocket(sock, session, self._peer_in(session))
        except SecurityRefused as doubt:
            return TlsSocket(sock, session, None, doubt.reason)

    @staticmethod
    def peer_id_of(sock: socket.socket) -> PeerId | None:
        """Whom the other side of a connection has proved to be. None if it is not encrypted or a stranger's."""
        return sock.peer_id if isinstance(sock, TlsSocket) else None

    def _peer_in(self, session: Session) -> PeerId | None:
        """Who the other side is; the TLS library has checked its certificate, if it showed one."""
        der = session.certificate
        if der is None:
            return None
        certificate = _parsed(der)
        peer_id = peer_id_in(certificate)
        if peer_id is None:
            raise SecurityRefused(ANOTHER_PEER)
        if self._pins is not None and self._pins.get(peer_id) != fingerprint_of(certificate):
            raise SecurityRefused(NOT_PINNED)
        return peer_id

    def _renew_if_due(self) -> None:
        if not self._made_at <= self._now() < self._made_at + LIFE / 2:
            self._renew()

    def _renew(self) -> None:
        self._made_at = self._now()
        self._identity = self._authority.issue(self._peer_id, self._made_at, key=self._key)
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER)
        self._dialling.verify_mode = ssl.CERT_REQUIRED
        self._accepting.verify_mode = ssl.CERT_OPTIONAL  # a stranger has none; its hello decides
        self._accepting.num_tickets = 0
        with self._identity.as_file() as path:
            for context in (self._dialling, self._accepting):
                context.load_cert_chain(path)
        for context in (self._dialling, self._accepting):
            context.load_verify_locations(cadata=self._authority.certificate.public_bytes(Encoding.DER))


class TicketSecurity:
    """The side of a stranger with a ticket: it knows the run's authority and has no certificate.

    Args:
        server_fingerprint: out of the ticket.
        mode: when to encrypt.
        now: the wall clock in UTC.
    """

    def __init__(
        self,
        server_fingerprint: bytes,
        *,
        mode: Mode = Mode.AUTO,
        now: Callable[[], datetime.datetime] = _utc_now,
    ) -> None:
        self.mode = mode
        self._authority_key = server_fingerprint
        self._now = now
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        # The library cannot check against a key alone, so we do. It does check that the other side has its own key.
        self._context.verify_mode = ssl.CERT_NONE

    def wanted_for(self, host: str) -> bool:
        """See DialSecurity."""
        return _is_wanted(self.mode, host)

    async def secure_dialled(self, sock: socket.socket, *, expect: PeerId | None, timeout_s: float) -> TlsSocket:
        """See DialSecurity."""
        session = await _session(sock, self._context, server_side=False, timeout_s=timeout_s)
        der = session.certificate
        if der is None:
            raise SecurityRefused(NO_CERTIFICATE)
        certificate = _parsed(der)
        if not is_signed_by(self._authority_key, certificate, self._now()):
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
