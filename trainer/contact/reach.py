# SPDX-License-Identifier: Apache-2.0
"""Where others may reach this peer: nobody has to know it, and nobody can before it is tried.

    listening on every interface    what `--advertise` says, every address of this machine, the one that the coordinator
                                    saw it come from, loopback for peers of this machine
    listening at one address        what `--advertise` says, or that address

Rules: only names addresses; which of them is right the dialler finds out (collective/transport/dialling.py). Nothing of
it holds for as long as a process lives: a provider gives another address, a cable moves.
"""

import ipaddress
import logging

from isthmus.collective.core.address import is_wildcard, join_address, join_candidates, split_address
from isthmus.collective.transport.interfaces import gather_candidates

log = logging.getLogger(__name__)

_MAX_OWN = 5
"""Of a machine with more addresses the first ones: the others would push out what was seen, and loopback."""


def reachable_at(listening: str, *, advertise: str | None = None, seen_from: str | None = None) -> str:
    """The address of this peer, with its candidates.

    Args:
        listening: `host:port` as the listener has it.
        advertise: what the operator says.
        seen_from: the host that the coordinator saw this peer come from: behind a NAT another than its own.
    """
    host, port = split_address(listening)
    if not is_wildcard(host):
        return advertise or listening
    *own, home = gather_candidates(host, port)
    seen = [join_address(seen_from, port)] if seen_from is not None and _is_abroad(seen_from) else []
    return join_candidates([*([advertise] if advertise else []), *own[:_MAX_OWN], *seen, home])


class Reach:
    """Where others may reach this process, for as long as it lives.

    Found before: that was gathered once. Of two peers whose addresses had both changed, one after the other, each was
    told where the other one had been, for ever; and tickets named an address that was nobody's.

    Attributes:
        first: the address when the process began.

    Args: see `reachable_at`.
    """

    def __init__(self, listening: str, *, advertise: str | None, seen_from: str | None) -> None:
        self._listening = listening
        self._advertise = advertise
        self._seen_from = seen_from
        self.first = self._newest = self._gather()

    def now(self, seen_from: str | None = None) -> str:
        """The address as it is now; as it was, where the system does not say (a process that may open no more files).

        Args:
            seen_from: the host that a coordinator sees this process come from now. One on this very machine sees
                nothing of a NAT, and what was seen before stays.
        """
        if seen_from is not None and _is_abroad(seen_from):
            self._seen_from = seen_from
        try:
            address = self._gather()
        except OSError as error:
            log.debug("own_addresses_unknown cause=%r", str(error))
            return self._newest
        if address != self._newest:
            log.info("address_changed address=%s", address)
            self._newest = address
        return address

    def _gather(self) -> str:
        return reachable_at(self._listening, advertise=self._advertise, seen_from=self._seen_from)


def _is_abroad(host: str) -> bool:
    """Whether it is an address, and not of the coordinator's own machine."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
