# SPDX-License-Identifier: Apache-2.0
"""The joiner's side of an admission: whom to ask, with what, and how long.

Must not know what the answer is used for. Errors: `Refused` (5), `NobodyReachable` (4).
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from cryptography import x509

from isthmus.collective.core.types import Instant
from isthmus.collective.errors import CollectiveError, HandshakeRefused, PeerUnreachable, SecurityRefused
from isthmus.collective.transport import Hello, Mode, Purpose, TicketSecurity, connect
from isthmus.collective.transport.certificates import certificate_from_bytes, certificate_to_bytes
from isthmus.elastic.shell.dialler import LATER_CODE
from isthmus.trainer.contact.admission import Admitted, NotAdmitted, Request, RunTerms, hello_maker
from isthmus.trainer.contact.identity import PeerIdentity
from isthmus.trainer.contact.ticket import Ticket, TicketFault, TicketRefused
from isthmus.trainer.errors import NobodyReachable, Refused

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""For one connection and its answer."""

PATIENCE_S = 12.0
"""How long a joiner asks on. A coordinator that is started again is back within a few seconds, and a standby takes over
within ten. People wait for the answer."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a joiner has learnt: the run's terms, its own certificate, the host that it was seen to come from, and where
    some peers of the run are."""

    terms: RunTerms
    certificate: x509.Certificate
    seen_from: str
    peers: tuple[str, ...]


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


def stranger_hello(
    me: PeerIdentity,
    run_id: str,
    token: bytes,
    certificate: x509.Certificate | None = None,
    *,
    purpose: Purpose = Purpose.ADMISSION,
) -> Hello:
    """What asks for admission, with a ticket's token or a certificate of the run, or both."""
    hello = hello_maker(me.ref, run_id)(purpose, 0, 1)
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
                causes |= error.attempts
                if error.is_nowhere:
                    nowhere |= error.attempts.keys()
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
        answer = msgspec.msgpack.decode(frame.payload, type=Admitted | NotAdmitted)
        if isinstance(answer, NotAdmitted):
            raise Refused(answer.reason)
        certificate = certificate_from_bytes(answer.certificate)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused("the coordinator's answer cannot be read", cure="run the same version of isthmus") from error
    finally:
        channel.close()
    return Admission(answer.terms, certificate, answer.seen_from, answer.peers)
