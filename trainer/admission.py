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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from collective.core.types import Instant, PeerId, PeerRef
from collective.errors import CollectiveError, HandshakeRefused, PeerUnreachable, SecurityRefused
from collective.transport import (
    Authority,
    Channel,
    Credentials,
    FrameType,
    Hello,
    HelloReply,
    Mode,
    Purpose,
    Security,
    TicketSecurity,
    connect,
)
from collective.transport.certificates import (
    KEY_NBYTES,
    certificate_from_bytes,
    certificate_to_bytes,
    key_in,
    peer_id_of_key,
)
from collective.wire import PROTOCOL_VERSION
from elastic.coordinator import CoordinatorShell
from elastic.core.doorkeeper import BANNED
from elastic.core.doors import Doors
from elastic.core.events import UseTicket
from elastic.dialler import LATER_CODE
from trainer.errors import ExitCode, NobodyReachable, Refused
from trainer.identity import PeerIdentity, RunIdentity
from trainer.run_manifest import MAX_MANIFEST_NBYTES
from trainer.ticket import Claims, Ticket, TicketFault, TicketRefused, verify_token

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""For one connection and its answer."""

PATIENCE_S = 30.0
"""How long a joiner asks on. A coordinator that is started again is back within a few seconds, and a standby takes over
within ten."""

MAX_AUTHORITIES = 8
_PURPOSE = b"isthmus admission 1\0"
_Certificate = Annotated[bytes, Meta(max_length=1024)]


class RunTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer must know of a run before it can be part of it.

    `authorities` are the certificates of those whose word on who is who counts, the oldest first: one, unless a
    coordinator that had lost the run's secret went on with another. `seal_key` seals the run's commit certificates.
    """

    run_id: Annotated[str, Meta(max_length=64)]
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_NBYTES)]
    data_digest: Annotated[str, Meta(max_length=128)]
    authorities: Annotated[tuple[_Certificate, ...], Meta(min_length=1, max_length=MAX_AUTHORITIES)]
    seal_key: Annotated[bytes, Meta(min_length=32, max_length=32)]

    def digest(self) -> bytes:
        """What peers compare at join: manifest and text together, 32 bytes."""
        return hashlib.sha256(self.manifest + b"\0" + self.data_digest.encode()).digest()

    def __repr__(self) -> str:
        return f"RunTerms(run_id={self.run_id!r})"


@dataclass(frozen=True, slots=True)
class Admission:
    """What a joiner has learnt: the run's terms, and its own certificate."""

    terms: RunTerms
    certificate: x509.Certificate


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


class _Admitted(msgspec.Struct, frozen=True, tag="admitted", forbid_unknown_fields=True):
    terms: RunTerms
    certificate: _Certificate


class _NotAdmitted(msgspec.Struct, frozen=True, tag="not admitted", forbid_unknown_fields=True):
    reason: Annotated[str, Meta(max_length=512)]


def authority_of(run: RunIdentity) -> Authority:
    """Who signs the certificates of a run; its private key follows from the run's secret."""
    return Authority(hmac.digest(run.secret, b"isthmus authority 1\0" + run.run_id.encode(), "sha256"))


def seal_key_of(run: RunIdentity) -> bytes:
    """What a run's commit certificates are sealed with, 32 bytes. All members have it."""
    return hmac.digest(run.secret, b"isthmus seal key 2\0" + run.run_id.encode(), "sha256")


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


def stranger_security(ticket: Ticket, tls: str) -> TicketSecurity | None:
    """How somebody with this ticket makes sure that it is the run that answers; None if nothing is encrypted.

    Args:
        ticket: as given by the operator.
        tls: `net.tls` as given by the operator, which may not be the run's.

    Raises:
        TicketRefused: the ticket does not say how to know the run, and the operator has not asked for that.
    """
    if ticket.fingerprint:
        return TicketSecurity(ticket.fingerprint, mode=Mode.ON)
    if tls == Mode.OFF:
        return None
    raise TicketRefused(
        TicketFault.NO_FINGERPRINT,
        "the ticket has no fingerprint to know the run by: the run is not encrypted",
        cure="ask for a new ticket, or join with --insecure if no encryption is what you want",
    )


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
        if hello.purpose is Purpose.ADMISSION:
            try:
                self._judge(hello)
            except Refused as refused:
                return self._no(str(refused))
        coordinator = self._coordinator()
        is_away = coordinator is not None and coordinator.is_away
        if hello.purpose in (Purpose.ADMISSION, Purpose.CONTROL) and is_away:
            return self._no("this coordinator cannot reach its journal; look for another one", code=LATER_CODE)
        return HelloReply(accepted=True, peer_id=self._me.peer_id, incarnation=self._me.incarnation)

    async def admit(self, channel: Channel) -> None:
        """Tell an accepted stranger what run this is, and give it its certificate."""
        assert self._authority is not None, "others admit nobody"
        peer_id = channel.hello.peer_id
        answer: _Admitted | _NotAdmitted
        try:
            request, claims = self._judge(channel.hello)
            if claims is not None and claims.is_once:
                await self._use_up(claims, peer_id)
        except Refused as refused:
            answer = _NotAdmitted(str(refused))
        else:
            number = max(round(self._now_s() * 1000), self._doors().void_up_to(peer_id) + 1)
            certificate = self._authority.issue(Ed25519PublicKey.from_public_bytes(request.public_key), number)
            answer = _Admitted(self._terms, certificate_to_bytes(certificate))
            log.info("admitted peer_id=%s by=%s", peer_id, "certificate" if claims is None else claims.ticket_id.hex())
        await channel.send(FrameType.CONTROL, msgspec.msgpack.encode(answer), timeout_s=_TIMEOUT_S)

    def _doors(self) -> Doors:
        coordinator = self._coordinator()
        return Doors() if coordinator is None else coordinator.doors

    async def _use_up(self, claims: Claims, peer_id: PeerId) -> None:
        """A ticket for one peer is this one's from now on. Raises Refused: another one was faster."""
        coordinator = self._coordinator()
        if coordinator is None:
            raise Refused("the coordinator is not there")
        order = UseTicket(
            ticket_id=claims.ticket_id,
            expires_at_s=claims.expires_at_s,
            used_by=peer_id,
            at_s=round(self._now_s()),
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


def stranger_hello(me: PeerIdentity, run_id: str, token: bytes, certificate: x509.Certificate | None = None) -> Hello:
    """What asks for admission, with a ticket's token or a certificate of the run, or both."""
    hello = hello_maker(me.ref, run_id)(Purpose.ADMISSION, 0, 1)
    shown = b"" if certificate is None else certificate_to_bytes(certificate)
    request = Request(me.key.public_key().public_bytes_raw(), token, shown)
    request = msgspec.structs.replace(request, signature=me.key.sign(request.words(hello)))
    return msgspec.structs.replace(hello, credential=msgspec.msgpack.encode(request))


async def ask_admission(
    addresses: Sequence[str],
    hello: Hello,
    *,
    security: TicketSecurity | None,
    pause: Callable[[], Awaitable[None]],
    clock: Callable[[], Instant],
    patience_s: float = PATIENCE_S,
) -> Admission:
    """Ask at these addresses to be let into the run, again and again while nobody is there.

    Args:
        addresses: where coordinators may be, the likeliest first.
        hello: see `stranger_hello`.
        security: see `stranger_security`.
        pause: awaited between two rounds of attempts.
        clock: monotonic seconds.
        patience_s: no round of attempts begins later than this.

    Raises:
        Refused: the coordinator does not want this peer, or whoever answers is not of the run.
        NobodyReachable: nobody answered at any address.
    """
    causes: dict[str, str] = {}
    impostor: SecurityRefused | None = None
    give_up_at = clock() + patience_s
    is_told = False
    while True:
        nowhere: set[str] = set()
        for address in addresses:
            try:
                return await _ask_one(address, hello, security)
            except HandshakeRefused as refused:
                if refused.code != LATER_CODE:
                    raise Refused(refused.reason) from refused
                causes[address] = refused.reason
            except SecurityRefused as error:
                causes[address], impostor = error.reason, error  # another address may be the run's all the same
            except PeerUnreachable as error:
                causes[address] = error.cause
                if error.is_nowhere:
                    nowhere.add(address)
            except CollectiveError as error:
                causes[address] = str(error)
        tried = ", ".join(f"{address} ({cause})" for address, cause in causes.items())
        if impostor is not None or len(nowhere) == len(causes):
            break  # asked again, they would say the same
        if not is_told:
            is_told = True
            log.info("waiting_for_coordinator nobody_answers_at=%r up_to_s=%.0f", tried, patience_s)
        await pause()
        if clock() >= give_up_at:
            break
    if impostor is not None:
        raise Refused(
            f"who answers is not the run of this ticket: {tried}",
            cure="ask for a new ticket; if that does not help, compare the machines' clocks",
        ) from impostor
    raise NobodyReachable(
        f"nobody answers at {tried}",
        cure="check that the founder runs and that this address can be reached from here, or ask for a new ticket",
    )


async def _ask_one(address: str, hello: Hello, security: TicketSecurity | None) -> Admission:
    channel = await connect(address, hello, timeout_s=_TIMEOUT_S, security=security)
    try:
        frame = await channel.receive(timeout_s=_TIMEOUT_S)
        answer = msgspec.msgpack.decode(frame.payload, type=_Admitted | _NotAdmitted)
        if isinstance(answer, _NotAdmitted):
            raise Refused(answer.reason)
        certificate = certificate_from_bytes(answer.certificate)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused("the coordinator's answer cannot be read", cure="run the same version of isthmus") from error
    finally:
        channel.close()
    return Admission(answer.terms, certificate)
