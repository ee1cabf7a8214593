# SPDX-License-Identifier: Apache-2.0
"""The commands by which an operator says who may be in a run: they talk to the process where its coordinator lives."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.collective.core.types import PeerId
from isthmus.trainer.cli.config import AsJson, Dir
from isthmus.trainer.cli.support import client_of
from isthmus.trainer.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.contact.ticket import Ticket

_LONGEST_S = 366 * 86_400

Peer = Annotated[str, typer.Argument(help="Its id, see isthmus peers.", show_default=False)]


def peers(directory: Dir = None, as_json: AsJson = False) -> int:
    """Who is in the run: members, learners, and who is kept out of it."""
    import msgspec

    from isthmus.trainer.record.status import render_peers

    found = client_of(directory).peers()
    print(msgspec.json.encode(found).decode() if as_json else render_peers(found))
    return int(ExitCode.DONE)


def evict(peer: Peer, directory: Dir = None) -> int:
    """Put a peer out of the run at once. It may join again with a ticket."""
    from isthmus.trainer.run.control_messages import PutOutRequest

    order = PutOutRequest(_peer_id(peer), for_ever=False)
    client_of(directory, of_coordinator=True).order(order)
    return int(ExitCode.DONE)


def ban(
    peer: Annotated[str, typer.Argument(help="Its id, or its public key in 64 hex digits.", show_default=False)],
    directory: Dir = None,
) -> int:
    """Put a peer out of the run for ever, and revoke the ticket by which it came. It need not be there."""
    from isthmus.trainer.run.control_messages import PutOutRequest

    order = PutOutRequest(_peer_id(peer), for_ever=True)
    client_of(directory, of_coordinator=True).order(order)
    return int(ExitCode.DONE)


def ticket(
    directory: Dir = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="A new one with a new end. Those before admit until theirs.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="A new one for the first peer that uses it.")] = False,
    lifetime: Annotated[
        str | None,
        typer.Option(help="A new one that admits for so long, as 90min or 2d. Default: the run's.", show_default=False),
    ] = None,
    revoke_all: Annotated[
        bool,
        typer.Option(
            "--revoke-all",
            help="Let all tickets made so far admit nobody any more, and make a new one. Who has joined stays.",
        ),
    ] = False,
    revoke: Annotated[
        str | None,
        typer.Option(
            "--revoke",
            help="Let this ticket admit nobody any more: the ticket, @FILE, or its id. Who has joined with it stays.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print the line that others join with, make a new one, or end the ones before."""
    from isthmus.trainer.contact.ticket import named_ticket
    from isthmus.trainer.run.control_messages import RevokeRequest, TicketRequest

    is_new = renew or once or revoke_all or lifetime is not None
    if revoke is not None and is_new:
        raise ConfigError("--revoke is about one ticket that exists, and the other flags are about a new one")
    if revoke is not None:
        order = RevokeRequest(*named_ticket(revoke))
        client_of(directory, of_coordinator=True).order(order)
        return int(ExitCode.DONE)
    request = TicketRequest(is_new, once, _seconds(lifetime))
    client = client_of(directory, of_coordinator=True)
    if revoke_all:
        client.order(RevokeRequest())
    _print_ticket(*client.ticket(request), as_json=as_json)
    return int(ExitCode.DONE)


def _print_ticket(given: "Ticket", program: Sequence[str] | None, *, as_json: bool) -> None:
    from isthmus.trainer.contact.ticket import encode_ticket, invitation

    if as_json:
        fields = {
            "schema": "isthmus.ticket/1",
            "run_id": given.run_id,
            "ticket": encode_ticket(given),
            "expires_at": given.expires_at_s,
        }
        print(json.dumps(fields))
    else:
        print(invitation(given, program))


def _peer_id(given: str) -> PeerId:
    text = given.strip().lower()
    if re.fullmatch("[0-9a-f]{64}", text):
        return PeerId(hashlib.sha256(bytes.fromhex(text)).hexdigest()[:16])
    if re.fullmatch("[0-9a-f]{16}", text):
        return PeerId(text)
    raise ConfigError(f"{given} is no peer", cure="give the 16 hexadecimal digits of its id, which isthmus peers shows")


def _seconds(given: str | None) -> float | None:
    if given is None:
        return None
    from isthmus.trainer.config.quantities import parse_seconds

    try:
        seconds = parse_seconds(given)
    except ValueError as error:
        raise ConfigError(f"--lifetime is {given}, {error}") from error
    if not isinstance(seconds, float | int) or not 0 < seconds <= _LONGEST_S:
        raise ConfigError(f"--lifetime is {given}, expected more than nothing and at most a year")
    return float(seconds)
