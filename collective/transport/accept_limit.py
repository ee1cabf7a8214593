# SPDX-License-Identifier: Apache-2.0
"""How many connections strangers may open: a bucket for each address, one for all strangers together, and places.

An attempt costs a token and gets it back when the connection shows a valid hello. So whoever belongs here can open
hundreds of streams in a moment and never meets the limit, however often its links break, while whoever does not is
turned away before any work is done for it (a TLS handshake costs us most of a millisecond).

A place is what a connection without a valid hello holds: a socket, and perhaps a TLS handshake, for seconds. An address
that has never shown a valid hello gets an eighth of the places, all such addresses together get half of them, and an
address that has shown one gets half. So neither one address nor all strangers can take the last place.

Rules: an IPv4 address counts for itself, IPv6 by its /64, because that is what one household gets. Loopback counts as
known and has a bucket of its own size: 32 peers on one host with 64 streams each do not meet it. A TLS handshake from
there costs as much work as any, so it needs a token of an ordinary address besides. The table of addresses
is bounded; the stranger not seen for longest is forgotten, and only where there is none a known one. An address that
has shown a valid hello does not need the strangers' bucket, so a flood from many addresses cannot keep it out. No clock
in here: the caller says what time it is.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.types import Instant

_IPV6_SITE_BITS = 64

TOO_MANY_FROM_ADDRESS = "too many from one address"
TOO_MANY_STRANGERS = "too many strangers"
TOO_MANY_HANDSHAKES = "too many TLS handshakes from one address"
NO_PLACE = "too many without hello"
NO_PLACE_FOR_ADDRESS = "too many without hello from one address"
NO_PLACE_FOR_STRANGERS = "too many strangers without hello"

_STRANGER_SHARE = 8
_LARGE_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLimits:
    """Attempts without a valid hello. A peer's 64 streams at once fit into the burst of its address."""

    address_rate: float = 5.0
    address_burst: int = 64
    strangers_rate: float = 50.0
    strangers_burst: int = 256
    max_addresses: int = 4096
    loopback_rate: float = 200.0
    loopback_burst: int = 2048
    favours_loopback: bool = True


class ConnectionAttempt:
    """One connection that was just accepted. `refusal` says why it must be closed at once, None if it may go on."""

    def __init__(self, address: "_Address", refusal: str | None = None) -> None:
        self.refusal = refusal
        self.address = address
        self._paid: list[TokenBucket] = []

    def pay(self, bucket: TokenBucket, now: Instant) -> None:
        """Take a token that `forgive` gives back."""
        bucket.take(now, 1)
        self._paid.append(bucket)

    def forgive(self) -> None:
        """It has shown a valid hello: it cost nothing, and its address counts as known."""
        for bucket in self._paid:
            bucket.give_back(1)
        self._paid.clear()
        self.address.is_known = True


class _Address:
    """What is remembered of one address."""

    def __init__(
        self, site: str, bucket: TokenBucket, *, is_known: bool, handshakes: TokenBucket | None = None
    ) -> None:
        self.site = site
        self.bucket = bucket
        self.is_known = is_known
        self.handshakes = handshakes
        """What TLS handshakes cost besides; None: the bucket is as small as that already."""


class AcceptLimiter:
    """See the module."""

    def __init__(self, limits: AcceptLimits | None = None) -> None:
        self._limits = limits or AcceptLimits()
        self._strangers = TokenBucket(self._limits.strangers_rate, self._limits.strangers_burst)
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    @property
    def num_addresses(self) -> int:
        """How many addresses are remembered."""
        return len(self._addresses)

    def attempt(
        self, host: str, now: Instant, *, waiting: Collection[ConnectionAttempt] = (), num_places: int = 0
    ) -> ConnectionAttempt:
        """Judge a connection from this address. A refused one costs nothing.

        Args:
            host: as the socket names it, without port.
            now: monotonic seconds.
            waiting: the attempts that hold a place now.
            num_places: how many there are; 0: places are not counted.
        """
        address = self._remember(host)
        refusal = _no_place(address, waiting, num_places) if num_places else None
        if refusal is None and address.bucket.delay_s(now, 1) > 0:
            refusal = TOO_MANY_FROM_ADDRESS
        if refusal is None and not address.is_known and self._strangers.delay_s(now, 1) > 0:
            refusal = TOO_MANY_STRANGERS
        attempt = ConnectionAttempt(address, refusal)
        if refusal is None:
            attempt.pay(address.bucket, now)
            if not address.is_known:
                attempt.pay(self._strangers, now)
        return attempt

    def encrypts(self, attempt: ConnectionAttempt, now: Instant) -> str | None:
        """An attempt that may go on asks for a TLS handshake. Why it may not; None if it may."""
        bucket = attempt.address.handshakes
        if bucket is None:
            return None
        if bucket.delay_s(now, 1) > 0:
            return TOO_MANY_HANDSHAKES
        attempt.pay(bucket, now)
        return None

    def _remember(self, host: str) -> _Address:
        site, is_loopback = _site_of(host)
        address = self._addresses.get(site)
        if address is None:
            limits = self._limits
            is_near = is_loopback and limits.favours_loopback
            bucket, handshakes = TokenBucket(limits.address_rate, limits.address_burst), None
            if is_near:
                bucket, handshakes = TokenBucket(limits.loopback_rate, limits.loopback_burst), bucket
            address = _Address(site, bucket, is_known=is_near, handshakes=handshakes)
            if len(self._addresses) >= limits.max_addresses:
                self._forget_one()
            self._addresses[site] = address
        self._addresses.move_to_end(site)
        return address

    def _forget_one(self) -> None:
        """A stranger. Found before: a flood from 4096 addresses pushed members out, who then were strangers as well."""
        strangers = (site for site, address in self._addresses.items() if not address.is_known)
        del self._addresses[next(strangers, next(iter(self._addresses)))]


def _no_place(address: _Address, waiting: Collection[ConnectionAttempt], num_places: int) -> str | None:
    """Why there is no place for one more connection of this address; None if there is one."""
    if len(waiting) >= num_places:
        return NO_PLACE
    share = num_places // (_LARGE_SHARE if address.is_known else _STRANGER_SHARE)
    if sum(other.address.site == address.site for other in waiting) >= max(1, share):
        return NO_PLACE_FOR_ADDRESS
    if address.is_known:
        return None
    num_strangers = sum(not other.address.is_known for other in waiting)
    return NO_PLACE_FOR_STRANGERS if num_strangers >= max(1, num_places // _LARGE_SHARE) else None


def _site_of(host: str) -> tuple[str, bool]:
    """What counts as one address, and whether it is of this machine."""
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host, False  # not an internet address: all of its kind count as one
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, _IPV6_SITE_BITS), strict=False)), parsed.is_loopback
    return str(parsed), parsed.is_loopback
