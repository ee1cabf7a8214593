"""How a stranger with a ticket learns what it joins, and what every connection must prove.

A joiner's first connection (purpose `admission`) presents the ticket's token. The coordinator's process answers with
the run manifest, the digest of its text, the mesh key and the TLS secret; from then on every connection of the run
presents that key, and is encrypted under that secret where `net.tls` wants it. So the expiry of a ticket keeps
strangers out and never throws a member out.

Rules: secrets are compared in constant time and never logged. The first connection is encrypted even on one machine,
if the ticket has a fingerprint: only its answer tells what `net.tls` says. The mesh key crosses loopback unencrypted
in mode "auto", so the TLS secret does not follow from it.
"""

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from collective.core.types import Instant, PeerRef
from collective.errors import CollectiveError, HandshakeRefused, PeerUnreachable, SecurityRefused
from collective.transport import (
    Channel,
    FrameType,
    Hello,
    HelloReply,
    Mode,
    Purpose,
    Security,
    TicketSecurity,
    connect,
)
from collective.wire import PROTOCOL_VERSION
from elastic.dialler import LATER_CODE
from trainer.errors import ExitCode, NobodyReachable, Refused
from trainer.run_manifest import MAX_MANIFEST_NBYTES
from trainer.ticket import Ticket, TicketFault, TicketRefused, verify_token

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""For one connection and its answer."""

PATIENCE_S = 30.0
"""How long a joiner asks on. A coordinator that is started again is back within a few seconds, and a standby takes over
within ten."""


class RunTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer must know of a run before it can be part of it."""

    run_id: Annotated[str, Meta(max_length=64)]
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_NBYTES)]
    data_digest: Annotated[str, Meta(max_length=128)]
    mesh_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    tls_secret: Annotated[bytes, Meta(min_length=32, max_length=32)]

    def digest(self) -> bytes:
        """What peers compare at join: manifest and text together, 32 bytes."""
        return hashlib.sha256(self.manifest + b"\0" + self.data_digest.encode()).digest()

    @property
    def seal_key(self) -> bytes:
        """What the run's commit certificates are sealed with, 32 bytes."""
        return seal_key(self.tls_secret, self.run_id)

    def __repr__(self) -> str:
        return f"RunTerms(run_id={self.run_id!r})"


def mesh_key(secret: bytes, run_id: str) -> bytes:
    """The key that members of a run show to each other, 32 bytes."""
    return hmac.digest(secret, b"isthmus mesh key 1\0" + run_id.encode(), "sha256")


def tls_secret(secret: bytes, run_id: str) -> bytes:
    """What the run's certificates are made from, 32 bytes."""
    return hmac.digest(secret, b"isthmus tls secret 1\0" + run_id.encode(), "sha256")


def seal_key(secret: bytes, run_id: str) -> bytes:
    """What a run's commit certificates are sealed with, 32 bytes, from its TLS secret.

    It follows from what the members alone have. The mesh key would not do: it crosses loopback unencrypted.
    """
    return hmac.digest(secret, b"isthmus seal key 1\0" + run_id.encode(), "sha256")


def member_security(me: PeerRef, terms: RunTerms, tls: str) -> Security:
    """Who we are on encrypted connections, and which those are.

    Args:
        me: this start of this peer.
        terms: of the run.
        tls: `net.tls`, the same on all peers of the run.
    """
    return Security(me.peer_id, terms.tls_secret, mode=Mode(tls))


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
        "the ticket has no fingerprint to know the run by: an older isthmus made it, or the run is not encrypted",
        cure="ask for a new ticket, or join with --insecure if no encryption is what you want",
    )


class Gatekeeper:
    """Decides about every hello that reaches this peer's port.

    Args:
        me: who answers.
        terms: of the run.
        secret: the run's, where a coordinator lives; None elsewhere, where nobody is admitted.
        now_s: the wall clock in Unix seconds; it judges tickets and nothing else.
        is_away: whether the coordinator here must send everybody to another one for now.
    """

    def __init__(
        self,
        me: PeerRef,
        terms: RunTerms,
        *,
        secret: bytes | None,
        now_s: Callable[[], float],
        is_away: Callable[[], bool] = lambda: False,
    ) -> None:
        self._me = me
        self._terms = terms
        self._secret = secret
        self._now_s = now_s
        self._is_away = is_away

    def accept(self, hello: Hello) -> HelloReply:
        """Yes, or no with the exit code and the sentence that the dialler should end with."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return self._no(f"this peer speaks protocol {PROTOCOL_VERSION}, not {hello.protocol_version}: upgrade")
        if hello.run_id != self._terms.run_id:
            return self._no(
                f"the ticket is for run {hello.run_id!r}, here is {self._terms.run_id}; ask for a new ticket"
            )
        if hello.purpose is Purpose.ADMISSION:
            if self._secret is None:
                return self._no("this peer is not the coordinator; use the ticket that the founder printed")
            try:
                verify_token(self._secret, hello.run_id, hello.credential, now_s=self._now_s())
            except TicketRefused as refused:
                return self._no(str(refused))
        elif not hmac.compare_digest(hello.credential, self._terms.mesh_key):
            return self._no("the connection does not show the run's key; join with a ticket")
        if hello.purpose in (Purpose.ADMISSION, Purpose.CONTROL) and self._is_away():
            return self._no("this coordinator cannot reach its journal; look for another one", code=LATER_CODE)
        return HelloReply(accepted=True, peer_id=self._me.peer_id, incarnation=self._me.incarnation)

    async def admit(self, channel: Channel) -> None:
        """Tell an accepted stranger what run this is."""
        wire = msgspec.msgpack.encode(self._terms)
        await channel.send(FrameType.CONTROL, wire, timeout_s=_TIMEOUT_S)

    def _no(self, reason: str, *, code: int = ExitCode.REFUSED) -> HelloReply:
        me = self._me
        return HelloReply(accepted=False, code=code, reason=reason, peer_id=me.peer_id, incarnation=me.incarnation)


def hello_maker(me: PeerRef, terms: RunTerms) -> Callable[[Purpose, int, int], Hello]:
    """What this peer says on its own connections: (purpose, stream, num_streams) -> Hello."""

    def make(purpose: Purpose, stream: int = 0, num_streams: int = 1) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id=terms.run_id,
            purpose=purpose,
            peer_id=me.peer_id,
            incarnation=me.incarnation,
            credential=terms.mesh_key,
            stream=stream,
            num_streams=num_streams,
        )

    return make


async def ask_terms(
    ticket: Ticket,
    me: PeerRef,
    *,
    security: TicketSecurity | None,
    pause: Callable[[], Awaitable[None]],
    clock: Callable[[], Instant],
    patience_s: float = PATIENCE_S,
) -> RunTerms:
    """Ask the ticket's addresses what run this is, again and again while nobody is there.

    Args:
        ticket: as given by the operator.
        me: who asks.
        security: see `stranger_security`.
        pause: awaited between two rounds of attempts.
        clock: monotonic seconds.
        patience_s: no round of attempts begins later than this.

    Raises:
        Refused: the coordinator does not want this ticket, or whoever answers is not of its run.
        NobodyReachable: nobody answered at any address.
    """
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id=ticket.run_id,
        purpose=Purpose.ADMISSION,
        peer_id=me.peer_id,
        incarnation=me.incarnation,
        credential=ticket.token,
    )
    causes: dict[str, str] = {}
    impostor: SecurityRefused | None = None
    give_up_at = clock() + patience_s
    is_told = False
    while True:
        nowhere: set[str] = set()
        for address in ticket.addresses:
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


async def _ask_one(address: str, hello: Hello, security: TicketSecurity | None) -> RunTerms:
    channel = await connect(address, hello, timeout_s=_TIMEOUT_S, security=security)
    try:
        frame = await channel.receive(timeout_s=_TIMEOUT_S)
        return msgspec.msgpack.decode(frame.payload, type=RunTerms)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused("the coordinator's answer cannot be read", cure="run the same version of isthmus") from error
    finally:
        channel.close()
