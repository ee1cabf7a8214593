# SPDX-License-Identifier: Apache-2.0
"""One string that lets a second machine join: addresses, run, how to know the run again, a token that expires.

Layout: `isthmus1` and lower-case base32 (no padding) of ::

    length    u16   of the body
    body            msgpack array (addresses, run_id, fingerprint, token)
    check     4     first bytes of SHA-256 over length and body: a slip of the hand, not an attacker

The token is what admits: the ticket's id (8 bytes: when it was made, in milliseconds, and two random bytes),
expires_at (u64, Unix seconds), whether it is for one peer only (u8), and HMAC-SHA-256 of these and the run id under the
run's secret, so the coordinator checks it without remembering whom it gave one; it remembers those that were revoked or
used up, and up to which id all were revoked. The fingerprint is what protects the
token on its way: it is shown to nobody who cannot prove to be of the run. A standby's ticket holds the run's secret
besides, as the fifth element of the body: with it a coordinator admits others, so it is for the run's own
coordinators only.

Rules: the coordinator decides about expiry, a joiner's clock is only a hint; tokens are compared in constant time; a
token is never logged. Must not know sockets.

Errors: `TicketRefused` (exit code 5) with a `TicketFault`.
"""

import base64
import binascii
import enum
import hashlib
import hmac
import os
import re
import secrets
import select
import shlex
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.address import MAX_LENGTH
from isthmus.trainer.errors import ConfigError, Refused

PREFIX = "isthmus"
VERSION = "2"
ID_NBYTES = 8
COMMAND_VARIABLE = "ISTHMUS_COMMAND"
"""Of the environment: what a training loop of one's own does, `up` or `join`, where it does not say so itself."""
NEWEST_ID = b"\xff" * ID_NBYTES
"""Of a token that is never revoked with earlier ones."""
TOKEN_NBYTES = 49
FINGERPRINT_NBYTES = 32
SECRET_NBYTES = 32

_MAX_TEXT_LENGTH = 8192
_PIPE_TIMEOUT_S = 5.0
_CLAIMS = struct.Struct(f">{ID_NBYTES}sQB")
_LENGTH = struct.Struct(">H")
_CHECK_NBYTES = 4
_PURPOSE = b"isthmus join token 3\0"  # in 2, ids were random
_INVITES = "isthmusjoin"
_ASK_AGAIN = "ask for a new ticket"


class TicketFault(enum.Enum):
    """Why a ticket or its token does not admit."""

    NO_TICKET = "no ticket"
    OTHER_VERSION = "other version"
    TRUNCATED = "truncated"
    GARBLED = "garbled"
    EXPIRED = "expired"
    FORGED = "forged"
    REVOKED = "revoked"
    USED = "used"
    NO_FINGERPRINT = "no fingerprint"
    FOR_PEERS = "for peers"
    FOR_STANDBYS = "for standbys"


class TicketRefused(Refused):
    """This ticket does not admit.

    Attributes:
        fault: why.
    """

    def __init__(self, fault: TicketFault, problem: str, *, cure: str = _ASK_AGAIN) -> None:
        super().__init__(problem, cure=cure)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a joiner needs to know.

    Attributes:
        addresses: of the run's coordinators, the likeliest first; each with its candidates.
        run_id: which run.
        fingerprint: `FINGERPRINT_NBYTES` bytes by which the run's peers are known (`Security.server_fingerprint`);
            empty if the run's connections are not encrypted.
        token: what the coordinator asks for; see `issue_token`.
        secret: the run's, in a standby's ticket; empty in those of peers.
    """

    addresses: tuple[str, ...]
    run_id: str
    token: bytes
    fingerprint: bytes = b""
    secret: bytes = b""

    @property
    def expires_at_s(self) -> int:
        """When the token ends, in Unix seconds of the coordinator's clock."""
        return _claims_of(self.token).expires_at_s

    @property
    def ticket_id(self) -> bytes:
        """`ID_NBYTES` bytes by which it can be revoked."""
        return _claims_of(self.token).ticket_id

    def __repr__(self) -> str:
        return f"Ticket(addresses={self.addresses}, run_id={self.run_id!r}, expires_at_s={self.expires_at_s})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a token says of its ticket."""

    ticket_id: bytes
    expires_at_s: int
    is_once: bool


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    addresses: Annotated[tuple[Annotated[str, Meta(min_length=3, max_length=MAX_LENGTH)], ...], Meta(min_length=1)]
    run_id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z")]
    fingerprint: Annotated[bytes, Meta(max_length=FINGERPRINT_NBYTES)]
    token: Annotated[bytes, Meta(min_length=TOKEN_NBYTES, max_length=TOKEN_NBYTES)]


class _StandbyBody(_Body, frozen=True, array_like=True, forbid_unknown_fields=True):
    secret: Annotated[bytes, Meta(max_length=SECRET_NBYTES)] = b""


def next_id(after: bytes, *, now_s: float) -> bytes:
    """The id of a ticket that is made now: larger than `after`, whatever the clock (Unix seconds) says."""
    number = round(now_s * 1000) << 16 | secrets.randbits(16)
    return max(number, int.from_bytes(after) + 1).to_bytes(ID_NBYTES)


def make_ticket(
    *,
    ticket_id: bytes,
    secret: bytes,
    run_id: str,
    addresses: Sequence[str],
    expires_at_s: int,
    fingerprint: bytes = b"",
    is_once: bool = False,
) -> Ticket:
    """A ticket for whoever gets to see it, until `expires_at_s`; with `is_once` for the first peer that uses it."""
    token = issue_token(ticket_id, secret, run_id, expires_at_s, is_once=is_once)
    return Ticket(addresses=tuple(addresses), run_id=run_id, fingerprint=fingerprint, token=token)


def encode_ticket(ticket: Ticket) -> str:
    """The string that people pass on."""
    fields = (ticket.addresses, ticket.run_id, ticket.fingerprint, ticket.token)
    body = msgspec.msgpack.encode(_StandbyBody(*fields, ticket.secret) if ticket.secret else _Body(*fields))
    framed = _LENGTH.pack(len(body)) + body
    packed = framed + hashlib.sha256(framed).digest()[:_CHECK_NBYTES]
    return PREFIX + VERSION + base64.b32encode(packed).decode("ascii").rstrip("=").lower()


def decode_ticket(text: str) -> Ticket:
    """Read a ticket. White space does not matter (mail programs wrap long lines), nor does the case of letters.

    The words of `invitation` before it are no harm.

    Raises:
        TicketRefused: it is none, is of another version, or was damaged on its way. It may still have expired.
    """
    compact = "".join(text.split()).lower().rpartition(_INVITES)[2].partition("'")[0]
    if not compact.startswith(PREFIX) or len(compact) > _MAX_TEXT_LENGTH:
        raise TicketRefused(
            TicketFault.NO_TICKET, "this is not a ticket", cure=f"a ticket starts with {PREFIX}{VERSION}; copy it whole"
        )
    version, encoded = compact[len(PREFIX) : len(PREFIX) + 1], compact[len(PREFIX) + 1 :]
    if version != VERSION:
        raise TicketRefused(
            TicketFault.OTHER_VERSION,
            f"this ticket is of version {version or 'none'}, we read version {VERSION}",
            cure="run the same version of isthmus on all peers",
        )
    packed = _unpack(encoded)
    framed, check = packed[:-_CHECK_NBYTES], packed[-_CHECK_NBYTES:]
    if hashlib.sha256(framed).digest()[:_CHECK_NBYTES] != check:
        raise _garbled()
    try:
        body = msgspec.msgpack.decode(framed[_LENGTH.size :], type=_StandbyBody)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _garbled() from error
    if len(body.fingerprint) not in (0, FINGERPRINT_NBYTES) or len(body.secret) not in (0, SECRET_NBYTES):
        raise _garbled()
    return Ticket(
        addresses=body.addresses,
        run_id=body.run_id,
        fingerprint=body.fingerprint,
        token=body.token,
        secret=body.secret,
    )


def invitation(ticket: Ticket, program: Sequence[str] | None = None) -> str:
    """What is printed for others: the line that they type, whole, and how long it works.

    Args:
        ticket: theirs.
        program: how a training loop of one's own is started, word by word, if that is what joins.
    """
    until = datetime.fromtimestamp(ticket.expires_at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    words = ("isthmus", "join", encode_ticket(ticket))
    line = shlex.join(words) if program is None else loop_line(words, program)
    return f"others join with (until {until}):\n\n    {line}\n"


def loop_line(words: Sequence[str], program: Sequence[str]) -> str:
    """What starts a training loop of one's own, such that it does what these words of a command line say."""
    return f"{COMMAND_VARIABLE}={shlex.quote(shlex.join(words))} {shlex.join(program)}"


def read_ticket(argument: str) -> Ticket:
    """Read a ticket given on the command line: the ticket itself, `@FILE` that holds it, or `-` for standard input.

    Raises:
        ConfigError: the file cannot be read.
        TicketRefused: see `decode_ticket`.
    """
    if argument == "-":
        argument = "@/dev/stdin"
    if not argument.startswith("@"):
        return decode_ticket(argument)
    path = Path(argument[1:])
    try:
        # Whatever the path names, opening it must not wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            content = _read_bounded(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"the ticket's file {path} cannot be read: {error.strerror}", cure="name a file that holds a ticket"
        ) from error
    if not content:
        raise ConfigError(
            f"no ticket comes from {path}", cure="name a file that holds a ticket, or a pipe that one is written to"
        )
    return decode_ticket(content.decode("ascii", errors="replace"))


def _read_bounded(descriptor: int) -> bytes:
    """What a file holds, or what comes through a pipe in time; nothing of anything else, which may have no end."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        return b""
    content, ends_at = b"", time.monotonic() + _PIPE_TIMEOUT_S
    while len(content) <= _MAX_TEXT_LENGTH:
        left_s = max(0.0, ends_at - time.monotonic())
        if not select.select([descriptor], [], [], left_s)[0]:
            break
        piece = os.read(descriptor, _MAX_TEXT_LENGTH + 1 - len(content))
        if not piece:
            break
        content += piece
    return content


def expiry_hint(ticket: Ticket, *, now_s: float) -> str | None:
    """What to tell people about a ticket that has expired by this machine's clock; None if it has not.

    Only a hint for an error message: clocks differ, and the coordinator's decides.
    """
    late_s = now_s - ticket.expires_at_s
    return f"by this machine's clock the ticket expired {_age(late_s)} ago" if late_s >= 0 else None


def named_ticket(argument: str) -> tuple[bytes, int | None]:
    """Which ticket is meant: itself, `@FILE` that holds it, or its id in 16 hexadecimal digits.

    Returns:
        Its id, and when it expires (Unix seconds), if that is known.

    Raises: as `read_ticket`.
    """
    if re.fullmatch(f"[0-9a-fA-F]{{{2 * ID_NBYTES}}}", argument.strip()):
        return bytes.fromhex(argument.strip()), None
    ticket = read_ticket(argument)
    return ticket.ticket_id, ticket.expires_at_s


def issue_token(ticket_id: bytes, secret: bytes, run_id: str, expires_at_s: int, *, is_once: bool = False) -> bytes:
    """`TOKEN_NBYTES` bytes that admit to a run until `expires_at_s` (Unix seconds)."""
    claims = _CLAIMS.pack(ticket_id, expires_at_s, is_once)
    return claims + _mac(secret, run_id, claims)


def verify_token(secret: bytes, run_id: str, token: bytes, *, now_s: float) -> Claims:
    """Check a token; the coordinator's side of a join. Whether it was revoked or used up is not known here.

    Args:
        secret: the run's.
        run_id: the run's.
        token: from the network; any bytes.
        now_s: Unix seconds.

    Raises:
        TicketRefused: `FORGED` (also: of another run) or `EXPIRED`.
    """
    mac = token[_CLAIMS.size :]
    if len(token) != TOKEN_NBYTES or not hmac.compare_digest(mac, _mac(secret, run_id, token[: _CLAIMS.size])):
        raise TicketRefused(TicketFault.FORGED, f"the ticket was not made for run {run_id}")
    claims = _claims_of(token)
    late_s = now_s - claims.expires_at_s
    if late_s >= 0:
        raise TicketRefused(TicketFault.EXPIRED, f"the ticket expired {_age(late_s)} ago")
    return claims


def _claims_of(token: bytes) -> Claims:
    ticket_id, expires_at_s, is_once = _CLAIMS.unpack_from(token)
    return Claims(ticket_id=ticket_id, expires_at_s=expires_at_s, is_once=bool(is_once))


def _mac(secret: bytes, run_id: str, claims: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + claims + run_id.encode(), "sha256")


def _unpack(encoded: str) -> bytes:
    """The bytes of a ticket, as many as its length says.

    Without the length, a ticket whose end is missing could not be told from one with a wrong letter.
    """
    # A cut may leave a number of letters that base32 never has; they carry no whole byte.
    whole = encoded[: len(encoded) - (1 if len(encoded) % 8 in (1, 3, 6) else 0)]
    try:
        packed = base64.b32decode(whole + "=" * (-len(whole) % 8), casefold=True)
    except binascii.Error as error:
        raise _garbled() from error
    expected = _LENGTH.size + _CHECK_NBYTES + (_LENGTH.unpack_from(packed)[0] if len(packed) >= _LENGTH.size else 0)
    if expected > _MAX_TEXT_LENGTH:
        raise _garbled()  # no ticket is that long
    if len(packed) < expected:
        raise TicketRefused(
            TicketFault.TRUNCATED,
            f"the ticket's end is missing: {len(packed)} of {expected} bytes are there",
            cure="copy it whole",
        )
    if len(packed) > expected or len(whole) != len(encoded):
        raise _garbled()
    return packed


def _garbled() -> TicketRefused:
    return TicketRefused(TicketFault.GARBLED, "the ticket is damaged", cure="copy it again, whole and unchanged")


def _age(seconds: float) -> str:
    for name, unit_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} seconds"
