# SPDX-License-Identifier: Apache-2.0
"""How a stranger with a ticket becomes somebody whom the run knows, and who is let in afterwards.

A joiner's first connection (purpose `admission`) shows the ticket's token, its own public key, and a signature that
proves the key. The coordinator's process answers with the run manifest, the digest of its text, the authorities whose
certificates count, and a certificate of the joiner's key. From then on every connection is opened with that key, and
encrypted where `net.tls` wants it. So the expiry of a ticket keeps strangers out and never throws a member out: whoever
has a certificate that was not withdrawn may ask with it instead of a ticket.

Rules: only coordinators have the run's secret, and with it the authority; nobody gets what others are known by. Secrets
are compared in constant time and never logged. The first connection is encrypted even on one machine, if the ticket has
a fingerprint: only its answer tells what `net.tls` says.
"""

import hashlib
import hmac
import logging
import random
from collections.abc import Callable
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from isthmus.collective.core.address import MAX_LENGTH
from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.collective.errors import SecurityRefused
from isthmus.collective.transport import (
    Authority,
    Channel,
    Credentials,
    FrameType,
    Hello,
    HelloReply,
    Mode,
    Purpose,
    Security,
)
from isthmus.collective.transport.certificates import (
    KEY_NBYTES,
    certificate_from_bytes,
    certificate_to_bytes,
    key_in,
    peer_id_of_key,
)
from isthmus.collective.transport.hello import STRANGERS
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from isthmus.elastic.core.doorkeeper import BANNED
from isthmus.elastic.core.doors import Doors
from isthmus.elastic.core.events import UseTicket
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.shell.dialler import LATER_CODE
from isthmus.trainer.config.manifest import MAX_MANIFEST_NBYTES
from isthmus.trainer.contact.identity import PeerIdentity, RunIdentity
from isthmus.trainer.contact.ticket import Claims, TicketFault, TicketRefused, verify_token
from isthmus.trainer.errors import ExitCode, Refused

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""For one connection and its answer."""

MAX_AUTHORITIES = 8
_MAX_PEERS = 16
"""That a stranger is told of."""
_PURPOSE = b"isthmus admission 1\0"
_Certificate = Annotated[bytes, Meta(max_length=1024)]


class RunTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer must know of a run before it can be part of it.

    `authorities` are the certificates of those whose word on who is who counts, the oldest first: one, unless a
    coordinator that had lost the run's secret went on with another.
    """

    run_id: Annotated[str, Meta(max_length=64)]
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_NBYTES)]
    data_digest: Annotated[str, Meta(max_length=128)]
    authorities: Annotated[tuple[_Certificate, ...], Meta(min_length=1, max_length=MAX_AUTHORITIES)]

    def digest(self) -> bytes:
        """What peers compare at join: manifest and text together, 32 bytes."""
        return hashlib.sha256(self.manifest + b"\0" + self.data_digest.encode()).digest()

    def __repr__(self) -> str:
        return f"RunTerms(run_id={self.run_id!r})"


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The credential of a stranger's hello. Token or certificate may be empty; the signature proves the key."""

    public_key: Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
    token: Annotated[bytes, Meta(max_length=64)]
    certificate: _Certificate
    signature: Annotated[bytes, Meta(max_length=64)] = b""

    def words(self, hello: Hello) -> bytes:
        """What is signed."""
        who = (hello.run_id, hello.peer_id, hello.incarnation)
        return _PURPOSE + msgspec.msgpack.encode((who, self.public_key, self.token, self.certificate))


class Admitted(msgspec.Struct, frozen=True, tag="admitted", forbid_unknown_fields=True):
    """The answer to a stranger that is let in. `seen_from` is the host that it came from.

    `peers` are addresses of some that are in the run: they give the text to who lacks it.
    """

    terms: RunTerms
    certificate: _Certificate
    seen_from: Annotated[str, Meta(max_length=64)]
    peers: Annotated[tuple[Annotated[str, Meta(max_length=MAX_LENGTH)], ...], Meta(max_length=_MAX_PEERS)] = ()


class NotAdmitted(msgspec.Struct, frozen=True, tag="not admitted", forbid_unknown_fields=True):
    """The answer to a stranger that is not let in after all."""

    reason: Annotated[str, Meta(max_length=512)]


def authority_of(run: RunIdentity) -> Authority:
    """Who signs the certificates of a run; its private key follows from the run's secret."""
    return Authority(hmac.digest(run.secret, b"isthmus authority 1\0" + run.run_id.encode(), "sha256"))


def own_security(me: PeerIdentity, certificate: x509.Certificate, terms: RunTerms, tls: str) -> Security:
    """Who we are on all connections, and which are encrypted.

    Args:
        me: this start of this peer.
        certificate: of its key.
        terms: of the run.
        tls: `net.tls`, the same on all peers of the run.

    Raises:
        ValueError: the certificate is not of the run, or what the run says of its authorities cannot be read.
    """
    authorities = tuple(map(certificate_from_bytes, terms.authorities))
    return Security(Credentials(me.key, certificate, authorities), mode=Mode(tls))


class Gatekeeper:
    """Decides about every hello that reaches this peer's port.

    Args:
        me: who answers.
        terms: of the run.
        security: knows who is a member. The listener has let everybody but strangers prove who they are.
        run: where a coordinator lives; None elsewhere, where nobody is admitted.
        now_s: the wall clock in Unix seconds; it judges tickets and numbers certificates.
        coordinator: the one that lives here, once it does.
    """

    def __init__(
        self,
        me: PeerRef,
        terms: RunTerms,
        *,
        security: Security,
        run: RunIdentity | None,
        now_s: Callable[[], float],
        coordinator: Callable[[], CoordinatorShell | None] = lambda: None,
    ) -> None:
        self._me = me
        self._terms = terms
        self._security = security
        self._run = run
        self._authority = None if run is None else authority_of(run)
        self._now_s = now_s
        self._coordinator = coordinator

    def accept(self, hello: Hello) -> HelloReply:
        """Yes, or no with the exit code and the sentence that the dialler should end with."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return self._no(f"this peer speaks protocol {PROTOCOL_VERSION}, not {hello.protocol_version}: upgrade")
        if hello.run_id != self._terms.run_id:
            return self._no(
                f"the ticket is for run {hello.run_id!r}, here is {self._terms.run_id}; ask for a new ticket"
            )
        if hello.purpose in STRANGERS:
            try:
                self._judge(hello)
            except Refused as refused:
                return self._no(str(refused))
        coordinator = self._coordinator()
        is_away = coordinator is not None and coordinator.is_away
        if hello.purpose in (*STRANGERS, Purpose.CONTROL) and is_away:
            return self._no("this coordinator cannot reach its journal; look for another one", code=LATER_CODE)
        return HelloReply(accepted=True, peer_id=self._me.peer_id, incarnation=self._me.incarnation)

    async def admit(self, channel: Channel) -> None:
        """Tell an accepted stranger what run this is, and give it its certificate."""
        assert self._authority is not None, "others admit nobody"
        peer_id = channel.hello.peer_id
        answer: Admitted | NotAdmitted
        try:
            request, claims = self._judge(channel.hello)
            if claims is not None:
                await self._use(claims, peer_id)
        except Refused as refused:
            answer = NotAdmitted(str(refused))
        else:
            number = max(round(self._now_s() * 1000), self._doors().void_up_to(peer_id) + 1)
            certificate = self._authority.issue(Ed25519PublicKey.from_public_bytes(request.public_key), number)
            peers = self._others(peer_id)
            answer = Admitted(self._terms, certificate_to_bytes(certificate), channel.host, peers)
            log.info("admitted peer_id=%s by=%s", peer_id, "certificate" if claims is None else claims.ticket_id.hex())
        await channel.send(FrameType.CONTROL, msgspec.msgpack.encode(answer), timeout_s=_TIMEOUT_S)

    def _others(self, peer_id: PeerId) -> tuple[str, ...]:
        """Addresses of some peers that are in the run, in any order, so that not all ask the same one."""
        coordinator = self._coordinator()
        places = {} if coordinator is None else coordinator.status().addresses
        others = [address for ref, address in places.items() if address and ref.peer_id != peer_id]
        return tuple(random.sample(others, min(len(others), _MAX_PEERS)))

    def _doors(self) -> Doors:
        coordinator = self._coordinator()
        return Doors() if coordinator is None else coordinator.doors

    async def _use(self, claims: Claims, peer_id: PeerId) -> None:
        """Remember by which ticket this peer came. Raises Refused: it was for one peer, and another one was faster."""
        coordinator = self._coordinator()
        if coordinator is None:
            raise Refused("the coordinator is not there")
        order = UseTicket(
            ticket_id=claims.ticket_id,
            expires_at_s=claims.expires_at_s,
            used_by=peer_id,
            at_s=round(self._now_s()),
            is_once=claims.is_once,
        )
        refusal = await coordinator.order(order, timeout_s=_TIMEOUT_S)
        if refusal is not None:
            raise Refused(refusal, cure="ask for a new ticket")

    def _judge(self, hello: Hello) -> tuple[Request, Claims | None]:
        """What a stranger asks with, and its ticket if it has one.

        Raises:
            Refused: it is not admitted.
        """
        if self._run is None:
            raise Refused("this peer is not the coordinator; use the ticket that the founder printed")
        request, doors = _proven_request(hello), self._doors()
        if doors.is_banned(hello.peer_id):
            raise Refused(BANNED)
        try:
            claims = verify_token(self._run.secret, hello.run_id, request.token, now_s=self._now_s())
            if (refusal := doors.refusal(claims.ticket_id, hello.peer_id)) is not None:
                fault = TicketFault.USED if claims.is_once else TicketFault.REVOKED
                raise TicketRefused(fault, refusal)
            return request, claims
        except TicketRefused:
            if not request.certificate:
                raise
        try:
            certificate = certificate_from_bytes(request.certificate)
            self._security.require_member(certificate, hello.peer_id)
        except (ValueError, SecurityRefused) as doubt:
            told = doubt.reason if isinstance(doubt, SecurityRefused) else "certificate cannot be read"
            raise Refused(f"neither ticket nor certificate admits to the run ({told}); ask for a new ticket") from doubt
        if key_in(certificate) != request.public_key:
            raise Refused("the certificate is of another key")
        return request, None

    def _no(self, reason: str, *, code: int = ExitCode.REFUSED) -> HelloReply:
        me = self._me
        return HelloReply(accepted=False, code=code, reason=reason, peer_id=me.peer_id, incarnation=me.incarnation)


def _proven_request(hello: Hello) -> Request:
    """What a stranger asks with, if the key in it is its own and its name is that of the key. Raises Refused."""
    try:
        request = msgspec.msgpack.decode(hello.credential, type=Request)
        Ed25519PublicKey.from_public_bytes(request.public_key).verify(request.signature, request.words(hello))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, InvalidSignature) as error:
        raise Refused("the request for admission is not signed with the key in it") from error
    if peer_id_of_key(request.public_key) != hello.peer_id:
        raise Refused("the peer id is not that of the key")
    return request


def hello_maker(me: PeerRef, run_id: str) -> Callable[[Purpose, int, int], Hello]:
    """What this peer says on its own connections: (purpose, stream, num_streams) -> Hello."""

    def make(purpose: Purpose, stream: int = 0, num_streams: int = 1) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id=run_id,
            purpose=purpose,
            peer_id=me.peer_id,
            incarnation=me.incarnation,
            stream=stream,
            num_streams=num_streams,
        )

    return make
