"""How many connections strangers may open: a bucket for each address, and one for all strangers together.

An attempt costs a token and gets it back when the connection shows a valid hello. So whoever belongs here can open
hundreds of streams in a moment and never meets the limit, however often its links break, while whoever does not is
turned away before any work is done for it (a TLS handshake costs us most of a millisecond).

Rules: an IPv4 address counts for itself, IPv6 by its /64, because that is what one household gets. Loopback is exempt
unless told otherwise: who is on this machine has easier ways to do harm. The table of addresses is bounded; the one
not seen for longest is forgotten. An address that has shown a valid hello does not need the strangers' bucket, so a
flood from many addresses cannot keep it out. No clock in here: the caller says what time it is.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from collective.core.bucket import TokenBucket
from collective.core.types import Instant

_IPV6_SITE_BITS = 64

TOO_MANY_FROM_ADDRESS = "too many from one address"
TOO_MANY_STRANGERS = "too many strangers"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLimits:
    """Attempts without a valid hello. A peer's 64 streams at once fit into the burst of its address."""

    address_rate: float = 5.0
    address_burst: int = 64
    strangers_rate: float = 50.0
    strangers_burst: int = 256
    max_addresses: int = 4096
    exempts_loopback: bool = True


class Attempt:
    """One connection that was just accepted. `refusal` says why it must be closed at once, None if it may go on."""

    def __init__(self, refusal: str | None = None, address: "_Address | None" = None) -> None:
        self.refusal = refusal
        self._address = address
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
        if self._address is not None:
            self._address.is_known = True


class _Address:
    """What is remembered of one address."""

    def __init__(self, limits: AcceptLimits) -> None:
        self.bucket = TokenBucket(limits.address_rate, limits.address_burst)
        self.is_known = False


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

    def attempt(self, host: str, now: Instant) -> Attempt:
        """Judge a connection from this address. A refused one costs nothing.

        Args:
            host: as the socket names it, without port.
            now: monotonic seconds.
        """
        site = self._site_of(host)
        if site is None:
            return Attempt()
        address = self._remember(site)
        if address.bucket.delay_s(now, 1) > 0:
            return Attempt(TOO_MANY_FROM_ADDRESS)
        if not address.is_known and self._strangers.delay_s(now, 1) > 0:
            return Attempt(TOO_MANY_STRANGERS)
        attempt = Attempt(address=address)
        attempt.pay(address.bucket, now)
        if not address.is_known:
            attempt.pay(self._strangers, now)
        return attempt

    def _remember(self, site: str) -> _Address:
        address = self._addresses.get(site)
        if address is None:
            address = self._addresses[site] = _Address(self._limits)
            if len(self._addresses) > self._limits.max_addresses:
                self._addresses.popitem(last=False)
        self._addresses.move_to_end(site)
        return address

    def _site_of(self, host: str) -> str | None:
        """What counts as one address. None for an exempt one."""
        try:
            parsed = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return host  # not an internet address: all of its kind count as one
        if isinstance(parsed, ipaddress.IPv6Address):
            parsed = parsed.ipv4_mapped or parsed
        if parsed.is_loopback and self._limits.exempts_loopback:
            return None
        if isinstance(parsed, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((parsed, _IPV6_SITE_BITS), strict=False))
        return str(parsed)
