# SPDX-License-Identifier: Apache-2.0
"""The commands by which an operator says who may be in a run: they talk to the process where its coordinator lives."""

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.collective.core.types import PeerId
from isthmus.trainer.cli_config import AsJson, Dir
from isthmus.trainer.cli_support import choose_folder
from isthmus.trainer.errors import ConfigError, ExitCode, NothingRuns

if TYPE_CHECKING:
    from isthmus.trainer.control_socket import ControlClient

_LONGEST_S = 366 * 86_400

Peer = Annotated[str, typer.Argument(help="Its id, see isthmus peers.", show_default=False)]


def peers(directory: Dir = None, as_json: AsJson = False) -> int:
    """Who is in the run: members, learners, and who is kept out of it."""
    import msgspec

    from isthmus.trainer.status import render_peers

    found = _client(directory).peers()
    print(msgspec.json.encode(found).decode() if as_json else render_peers(found))
    return int(ExitCode.DONE)


def evict(peer: Peer, directory: Dir = None) -> int:
    """Put a peer out of the run at once. It may join again with a ticket."""
    from isthmus.trainer.control_messages import PutOutRequest

    order = PutOutRequest(_peer_id(peer), for_ever=False)
    _client(directory).order(order)
    return int(ExitCode.DONE)


def ban(
    peer: Annotated[str, typer.Argument(help="Its id, or its public key in 64 hex digits.", show_default=False)],
    directory: Dir = None,
) -> int:
    """Put a peer out of the run for ever, and revoke the ticket by which it came. It need not be there."""
    from isthmus.trainer.control_messages import PutOutRequest

    order = PutOutRequest(_peer_id(peer), for_ever=True)
    _client(directory).order(order)
    return int(ExitCode.DONE)


def ticket(
    directory: Dir = None,
    once: Annotated[bool, typer.Option("--once", help="For the first peer that uses it.")] = False,
    lifetime: Annotated[
        str | None, typer.Option(help="How long it admits, as 90min or 2d. Default: the run's.", show_default=False)
    ] = None,
    revoke: Annotated[
        str | None,
        typer.Option(
            "--revoke",
            help="Let this ticket admit nobody any more: the ticket, @FILE, or its id. Who has joined with it stays.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Print a new ticket, or revoke one."""
    if revoke is not None and (once or lifetime is not None):
        raise ConfigError("--revoke is about a ticket that exists, --once and --lifetime about a new one")
    if revoke is not None:
        from isthmus.trainer.control_messages import RevokeRequest
        from isthmus.trainer.ticket import named_ticket

        order = RevokeRequest(*named_ticket(revoke))
        _client(directory).order(order)
    else:
        lifetime_s = _seconds(lifetime)
        print(_client(directory).ticket(is_once=once, lifetime_s=lifetime_s))
    return int(ExitCode.DONE)


def _client(directory: Path | None) -> "ControlClient":
    from isthmus.trainer.control_socket import PEER_FILE_NAME, ControlClient

    return ControlClient(choose_folder(directory, holding=PEER_FILE_NAME, or_else=NothingRuns))


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
    from isthmus.trainer.quantities import parse_seconds

    try:
        seconds = parse_seconds(given)
    except ValueError as error:
        raise ConfigError(f"--lifetime is {given}, {error}") from error
    if not isinstance(seconds, float | int) or not 0 < seconds <= _LONGEST_S:
        raise ConfigError(f"--lifetime is {given}, expected more than nothing and at most a year")
    return float(seconds)
