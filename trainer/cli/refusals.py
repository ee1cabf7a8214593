# SPDX-License-Identifier: Apache-2.0
"""What is refused, or warned of, before a peer starts: tickets that do not fit, and traffic that nobody encrypts.

Rules: nothing has been written or dialled yet; a refusal is one sentence with its cure, a warning is a line of the log.
Must not know how a peer runs, nor whom the coordinator will refuse.
"""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.collective.core.address import candidates_of
from isthmus.trainer.cli.support import RUNS_FOLDER, choose_folder
from isthmus.trainer.errors import ConfigError, NothingRuns

if TYPE_CHECKING:
    from isthmus.trainer.config.sources import ResolvedConfig
    from isthmus.trainer.contact.ticket import Ticket

log = logging.getLogger(__name__)


def peers_ticket(given: str) -> "Ticket":
    """The ticket of a peer.

    Raises:
        TicketRefused: it is none, or a standby's.
        ConfigError: the file that holds it cannot be read.
    """
    from isthmus.trainer.contact.ticket import TicketFault, TicketRefused, read_ticket

    ticket = read_ticket(given)
    if ticket.secret:
        raise TicketRefused(
            TicketFault.FOR_STANDBYS,
            "this ticket is for standby coordinators and holds the run's secret",
            cure="join with the ticket that the coordinator printed",
        )
    return ticket


def standby_ticket(given: str, resolved: "ResolvedConfig") -> "Ticket":
    """The ticket of a standby that could really take over.

    Raises:
        TicketRefused: it is none, or a peer's.
        ConfigError: the file cannot be read, the journal could not be had here, or peers would not look here.
    """
    from isthmus.trainer.contact.ticket import TicketFault, TicketRefused, read_ticket

    ticket, config = read_ticket(given), resolved.config
    if not ticket.secret:
        raise TicketRefused(
            TicketFault.FOR_PEERS,
            "this ticket lets peers in, and a standby needs more",
            cure="give the file standby.ticket of the coordinator's folder",
        )
    if config.coordinator.store == "sqlite":
        raise ConfigError(
            "a standby needs the run's journal, and coordinator.store sqlite is a file of one coordinator",
            cure='say store = "etcd" in [coordinator], as the run\'s coordinator does',
            key="coordinator.store",
            origin=resolved.origins["coordinator.store"],
        )
    address = config.node.advertise or config.node.listen
    if not any(address in candidates_of(known) for known in ticket.addresses):
        raise ConfigError(
            f"peers look for coordinators at {', '.join(ticket.addresses)}, and not at {address}",
            cure="say one of these with --listen or --advertise, or found the run with more coordinator.addresses",
            key="node.listen",
            origin=resolved.origins["node.listen"],
        )
    return ticket


def hint_at_expiry(ticket: "Ticket") -> None:
    """Warn of a ticket that may be too old; the coordinator decides."""
    from isthmus.trainer.contact.ticket import expiry_hint

    if (hint := expiry_hint(ticket, now_s=datetime.now(UTC).timestamp())) is not None:
        log.warning("ticket_old hint=%r; if the coordinator refuses it, ask for a new one", hint)


def joined_folder(resolved: "ResolvedConfig") -> tuple[Path, tuple[str, ...]]:
    """The folder of a peer that comes back, and where the coordinators of its run may be.

    Raises:
        ConfigError: there is no such folder, or there are several.
        IsthmusError: what it keeps of the run cannot be read, see `recall_membership`.
    """
    from isthmus.trainer.files import MEMBERSHIP_NAME
    from isthmus.trainer.run.founding import recall_membership

    try:
        folder = choose_folder(resolved.config.node.dir, holding=MEMBERSHIP_NAME, or_else=NothingRuns).absolute()
    except NothingRuns as nothing:
        raise ConfigError(
            f"there is no ticket, and under {RUNS_FOLDER}/ no peer that could come back without one",
            cure="join with the ticket that the coordinator printed, or name the peer's folder with --dir",
        ) from nothing
    kept = recall_membership(folder)
    return folder, () if kept is None else kept.coordinators


def require_secure(resolved: "ResolvedConfig", *, insecure: bool, dialled: Sequence[str] = ()) -> None:
    """Nothing leaves this machine unencrypted unless the operator insists.

    Args:
        resolved: says whether anything is encrypted, and where others reach this machine.
        insecure: `--insecure`.
        dialled: addresses where the coordinators of the run may be.

    Raises:
        ConfigError: something would, or `--insecure` contradicts the configuration.
    """
    from isthmus.collective.transport.interfaces import is_home

    config, origin = resolved.config, resolved.origins["net.tls"]
    if config.net.tls != "off":
        if insecure:
            raise ConfigError(
                f"--insecure contradicts net.tls {config.net.tls} from {origin}",
                cure="leave one of them out",
                key="net.tls",
                origin=origin,
            )
        return
    named = [("the ticket's address", one) for address in dialled for one in candidates_of(address)]
    named += [("node.advertise", config.node.advertise or ""), ("node.listen", config.node.listen)]
    for name, address in named:
        if address and not is_home(address) and not insecure:
            raise ConfigError(
                f"{name} {address} is beyond this machine, and net.tls from {origin} says to encrypt nothing",
                cure="leave the encryption on, stay on this machine with --listen 127.0.0.1:0, or add --insecure if "
                "the network is your own (a VPN, say)",
                key="net.tls",
                origin=origin,
            )


def warn_of_insecurity(resolved: "ResolvedConfig", *, insecure: bool) -> None:
    """Say in the log what `--insecure` means."""
    if insecure:
        log.warning(
            "not_encrypted listen=%s; whoever is on the way can read, change and join: leave out --insecure unless the "
            "network is your own",
            resolved.config.node.listen,
        )
