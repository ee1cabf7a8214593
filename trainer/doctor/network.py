# SPDX-License-Identifier: Apache-2.0
"""What measurements of the way to a run mean for people: each becomes a check with its sentence and its cure.

Pure. Must not know how anything is measured.
"""

import errno
import os
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from isthmus.collective.core.address import candidates_of, split_address
from isthmus.collective.errors import (
    CollectiveError,
    DeadlineExceeded,
    HandshakeRefused,
    PeerUnreachable,
    SecurityRefused,
)
from isthmus.collective.transport.interfaces import is_loopback
from isthmus.collective.transport.proof import WINDOW_S
from isthmus.collective.transport.security import ANOTHER_PEER, ANOTHER_RUN
from isthmus.elastic.shell.dialler import LATER_CODE
from isthmus.trainer.contact.ticket import Ticket, expiry_hint
from isthmus.trainer.doctor.messages import Attempt, CalledByBoth
from isthmus.trainer.doctor.path import Transfer, Trip
from isthmus.trainer.doctor.report import Check, Fact, fail, format_ms, format_rate, ok, warn

_CLOCK_S = 5.0
_SHORT_MTU = 1280
"""What IPv6 demands of every path."""
_MUCH_LOSS = 0.03
_ERRNO = re.compile(r"\[Errno (\d+)\].*", re.DOTALL)
_NEW_TICKET = "ask for a new ticket: isthmus ticket in the folder of the coordinator"


# ---------------------------------------------------------------------------------------- ticket and coordinator


def admits(ticket: Ticket) -> Check:
    """The coordinator has taken it."""
    until = datetime.fromtimestamp(ticket.expires_at_s, UTC)
    text = f"admits to {ticket.run_id} until {until:%Y-%m-%d %H:%M} UTC"
    return ok("ticket", text, run_id=ticket.run_id, expires_at_s=ticket.expires_at_s)


def unreached(ticket: Ticket, causes: Mapping[str, CollectiveError], *, now_s: float) -> Check:
    """Why no coordinator answers, in one sentence: who said no says most."""
    refusals = [error for error in causes.values() if isinstance(error, HandshakeRefused)]
    for refusal in sorted(refusals, key=lambda error: error.code == LATER_CODE):
        if refusal.code == LATER_CODE:
            return fail("coordinator", refusal.reason, "try again in a minute")
        return fail("ticket", refusal.reason.partition("; ")[0], _NEW_TICKET)
    told = ", ".join(
        f"{address} ({cause})" for error_at, error in causes.items() for address, cause in _each(error_at, error)
    )
    if any(
        isinstance(error, SecurityRefused) and error.reason in (ANOTHER_RUN, ANOTHER_PEER) for error in causes.values()
    ):
        return fail("coordinator", f"another run answers at {told}", _NEW_TICKET)
    if any(isinstance(error, DeadlineExceeded) for error in causes.values()):
        cure = "see whether the coordinator's process is stopped or hangs"
        return fail("coordinator", f"who answers says nothing: {told}", cure)
    if not all(isinstance(error, PeerUnreachable) for error in causes.values()):
        cure = "run the same version of isthmus there and here; if another program has that port, " + _NEW_TICKET
        return fail("coordinator", f"who answers does not speak with us: {told}", cure)
    hint = expiry_hint(ticket, now_s=now_s)
    return fail("coordinator", f"nobody answers at {told}" + (f"; {hint}" if hint else ""), _cure(ticket, causes))


def _each(address: str, error: CollectiveError) -> list[tuple[str, str]]:
    if isinstance(error, PeerUnreachable):
        return [(one, _plain(cause)) for one, cause in error.attempts.items()]
    return [(address, error.reason if isinstance(error, SecurityRefused) else str(error))]


def _plain(cause: str) -> str:
    """What the system calls an error, without its number and what asyncio makes of it."""
    numbered = _ERRNO.fullmatch(cause)
    return cause if numbered is None else os.strerror(int(numbered[1]))


def _cure(ticket: Ticket, causes: Mapping[str, CollectiveError]) -> str:
    hosts = [split_address(one)[0] for address in ticket.addresses for one in candidates_of(address)]
    if all(map(is_loopback, hosts)):
        return (
            "the founder listens on its own machine only: let it start without --listen 127.0.0.1, and ask for its "
            "new ticket"
        )
    said = [cause for address, error in causes.items() for _, cause in _each(address, error)]
    if all(cause == "refused" for cause in said):
        return f"check that the founder runs; if it was started again with another port, {_NEW_TICKET}"
    if all(cause == os.strerror(errno.ENETUNREACH) for cause in said):
        return (
            "no network of this machine leads there: connect the two (a VPN, say), or let the founder say where it "
            "can be reached with --advertise HOST:PORT"
        )
    return (
        "check that the founder runs; a firewall or a router may drop what comes: open or forward its port, and let it "
        "say where with --advertise HOST:PORT"
    )


def answers(address: str, seen_from: str, own: Collection[str]) -> Check:
    """The coordinator has answered.

    Args:
        address: where.
        seen_from: the host that it saw us come from.
        own: the hosts that this machine is, but for loopback.
    """
    seen = "" if seen_from in own or is_loopback(seen_from) else f"; it sees this machine as {seen_from} (a NAT)"
    return ok("coordinator", f"answers at {address}{seen}", address=address, seen_from=seen_from)


# ------------------------------------------------------------------------------------------------------ the path


def clock(trip: Trip, *, is_encrypted: bool) -> Check:
    """How far the clocks are apart."""
    error_s = trip.shortest_s / 2
    apart_s = abs(trip.ahead_s)
    side = "behind" if trip.ahead_s > 0 else "ahead of"
    text = f"{apart_s:.3f} s {side} the coordinator's (give or take {error_s:.3f} s)"
    facts = {"ahead_s": -trip.ahead_s, "error_s": error_s}
    cure = "set the clock, with NTP for example: timedatectl set-ntp true"
    if not is_encrypted and apart_s > WINDOW_S:
        return fail("clock", f"{text}; without encryption no peer is believed then", cure, **facts)
    if apart_s > _CLOCK_S + error_s:
        return warn("clock", f"{text}; times in events and logs cannot be compared", cure, **facts)
    return ok("clock", text, **facts)


def round_trip(trip: Trip) -> Check:
    """How far it is."""
    text = f"{format_ms(trip.shortest_s)} (the longest {format_ms(trip.longest_s)})"
    return ok("round_trip", text, shortest_s=trip.shortest_s, longest_s=trip.longest_s)


def path_mtu(mtu: int | None) -> Check:
    """The longest packets."""
    if mtu is None:
        return ok("path_mtu", "this system does not tell", bytes=None)
    text = f"packets of {mtu} bytes"
    if mtu < _SHORT_MTU:
        return warn("path_mtu", text, "a tunnel on the way makes them short: raise its MTU if you can", bytes=mtu)
    return ok("path_mtu", text, bytes=mtu)


def loss(down: Transfer, up: Transfer) -> Check:
    """What was sent again, by TCP's own count."""
    shares = {name: _share(transfer) for name, transfer in (("down", down), ("up", up))}
    told = ", ".join(f"{'unknown' if share is None else f'{share:.2%}'} {name}" for name, share in shares.items())
    text = f"sent again: {told}"
    if any(share is not None and share > _MUCH_LOSS for share in shares.values()):
        cure = "a cable instead of radio helps, and so does --max-upload below what the line carries"
        return warn("loss", text, cure, **shares)
    return ok("loss", text, **shares)


def _share(transfer: Transfer) -> float | None:
    sent = transfer.sent_nbytes + transfer.resent_nbytes
    return transfer.resent_nbytes / sent if transfer.sent_nbytes else None


def rate(name: str, transfer: Transfer, *, cap: float | None) -> Check:
    """What the path carries one way.

    Args:
        name: `down` or `up`.
        transfer: as measured.
        cap: of this node, bytes a second.
    """
    streams = "one connection" if transfer.num_streams == 1 else f"{transfer.num_streams} connections"
    facts = {"bytes_per_s": round(transfer.bytes_per_s), "num_streams": transfer.num_streams}
    if transfer.bytes_per_s == 0:
        return fail(
            name,
            "short messages pass and long ones do not",
            "packets of full size are lost on the way: lower the MTU of this machine's interface (ip link set DEV mtu "
            "1400), or let ICMP through the firewalls",
            **facts,
        )
    limited = "" if cap is None else f", held to {format_rate(cap)} here"
    return ok(name, f"{format_rate(transfer.bytes_per_s)} over {streams}{limited}", **facts)


# -------------------------------------------------------------------------------------------------- being called


def called(answer: CalledByBoth, *, is_home: bool) -> Check:
    """Whether the coordinator can dial this machine.

    Args:
        answer: what came of it.
        is_home: this peer listens for its own machine only.
    """
    attempts = answer.coordinator.attempts
    reached = _reached(attempts)
    if reached:
        return ok("called", f"the coordinator reaches this machine at {reached[0]}", reached=reached)
    if is_home:
        text = "--listen keeps this peer on its machine: no other one can call it"
        cure = "leave --listen out; or leave it so, if all other peers can be called"
        return warn("called", text, cure, reached=[])
    cure = (
        "it is enough that this peer calls, if all others can be called; else open or forward a port, and say --listen "
        "'*:PORT', and --advertise HOST:PORT where a router forwards it"
    )
    return warn("called", f"the coordinator cannot call this machine: {_told(attempts)}", cure, reached=[])


def member(answer: CalledByBoth, doubt: str | None) -> Check:
    """Whether there can be a link with a member.

    Args:
        answer: what came of its calls.
        doubt: why it cannot be reached from here; None if it can.
    """
    asked = answer.member
    if asked is None and not answer.num_others:
        return ok("member", "there is no other one yet", num_others=0)
    if asked is None:
        who = "the other member" if answer.num_others == 1 else f"any of the {answer.num_others} other members"
        text = f"the coordinator cannot call {who}, so nobody was asked to call this machine"
        return warn("member", text, "see that some members can be called", num_others=answer.num_others)
    reached = _reached(asked.attempts)
    facts: dict[str, Fact] = {"peer_id": asked.peer_id, "reached": reached, "reaches": doubt is None}
    if not reached and doubt is not None:
        return warn(
            "member",
            f"{asked.peer_id} and this machine cannot call each other: {doubt}",
            "they train through a member that has links with both; it is faster if one of the two can be called: open "
            "or forward its port, and let it say where with --advertise HOST:PORT",
            **facts,
        )
    return ok("member", f"{asked.peer_id} {_directions(reached, doubt)}", **facts)


def _directions(reached: list[str], doubt: str | None) -> str:
    if not reached:
        return "can be called from here, and cannot call this machine"
    if doubt is not None:
        return f"calls this machine at {reached[0]}, and cannot be called from here"
    return f"and this machine can call each other; it calls {reached[0]}"


def _reached(attempts: tuple[Attempt, ...]) -> list[str]:
    return [attempt.address for attempt in attempts if attempt.cause is None]


def _told(attempts: tuple[Attempt, ...]) -> str:
    """Those first of which there is more to say."""
    worth = [attempt for attempt in attempts if not str(attempt.cause).startswith("not dialled")]
    return ", ".join(f"{attempt.address} ({attempt.cause})" for attempt in worth or attempts)
