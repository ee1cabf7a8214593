# SPDX-License-Identifier: Apache-2.0
"""This machine's own addresses: which ones others may reach it at, and in which order to dial somebody else's.

Rules: asks the operating system anew every time, since interfaces come and go; sends nothing. Link-local addresses
(fe80::/10, 169.254/16) are left out: they mean something only together with an interface.
"""

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from isthmus.collective.core.address import join_address, split_address

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation (RFC 5737, RFC 3849), beyond any network of ours; nothing is sent to them."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # of Linux
_IS_TEMPORARY = 0x01


def own_interfaces() -> tuple[IPInterface, ...]:
    """The addresses of all interfaces that are up, with their networks; loopback is left out.

    Raises:
        OSError: they are not told, as where this process may open no more files.
    """
    stats = psutil.net_if_stats()
    found: list[IPInterface] = []
    for name, addresses in psutil.net_if_addrs().items():
        if name in stats and not stats[name].isup:
            continue
        for item in addresses:
            one = _interface(item.address, item.netmask) if item.family in _FAMILIES else None
            if one is not None:
                found.append(one)
    return tuple(found)


def gather_candidates(host: str, port: int) -> list[str]:
    """Where a socket that listens on a wildcard host may be reached: the network that leads out of here comes first.

    Temporary addresses come last: each is another one tomorrow, and leads nowhere that a lasting one of its network
    does not. Found before: they came first, and pushed the lasting one out of what a peer tells.

    Args:
        host: "*", "::" or "0.0.0.0"; the last one is of IPv4 only.
        port: that it listens on.
    """
    versions = (4,) if host == "0.0.0.0" else (4, 6)
    own = [item for item in own_interfaces() if item.version in versions]
    ways_out, temporary = _ways_out(), _temporary_addresses()

    def rank(item: IPInterface) -> tuple[bool, int, bool]:
        near = (place for place, way in enumerate(ways_out) if way in item.network)
        return item.ip in temporary, next(near, len(ways_out)), item.ip not in ways_out

    own.sort(key=rank)
    return [*(join_address(str(item.ip), port) for item in own), join_address("127.0.0.1", port)]


def sort_candidates(candidates: Sequence[str], own: Sequence[IPInterface]) -> list[str]:
    """Which candidates to dial, in this order: this machine itself, networks that it is part of, the rest.

    Another machine's loopback is our own: it is dialled only if the peer may live here, because it names one of this
    machine's addresses or nothing but loopback.

    Args:
        candidates: single addresses.
        own: see `own_interfaces`.
    """
    addresses = {item.ip for item in own}
    is_here = any(_ip(item) in addresses for item in candidates) or all(map(is_home, candidates))

    def rank(candidate: str) -> int:
        ip = _ip(candidate)
        if is_home(candidate):
            return 0
        if ip is None:
            return 3  # a name
        if ip in addresses:
            return 1
        return 2 if any(ip in item.network for item in own) else 3

    return sorted((item for item in candidates if is_here or not is_home(item)), key=rank)


def plain_host(host: str) -> str:
    """A socket's host without its scope, and IPv4 as IPv4 where it comes over a socket of both."""
    host = host.partition("%")[0]
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def _interface(address: str, netmask: str | None) -> IPInterface | None:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
        if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
            return None
        if netmask is None:
            return ipaddress.ip_interface(ip)
        mask = ipaddress.ip_address(netmask)
        return ipaddress.ip_interface(f"{ip}/{int(mask).bit_count()}")
    except ValueError:
        return None


def _ways_out() -> list[IPAddress]:
    """Our address on the way to far away, by version; none where there is no such way."""
    found: list[IPAddress] = []
    for family, far_away in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far_away, 9))
                found.append(ipaddress.ip_address(plain_host(probe.getsockname()[0])))
        except OSError:
            continue
    return found


def _temporary_addresses() -> frozenset[IPAddress]:
    """Those of IPv6 that the system replaces every day (RFC 8981); none where it does not say."""
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return frozenset()
    rows = (line.split() for line in lines)  # address, interface, length of prefix, scope, flags, name
    return frozenset(ipaddress.ip_address(bytes.fromhex(row[0])) for row in rows if int(row[4], 16) & _IS_TEMPORARY)


def _ip(candidate: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(split_address(candidate)[0])
    except ValueError:
        return None


def is_home(candidate: str) -> bool:
    """Whether it is a loopback address, or the name of one."""
    ip = _ip(candidate)
    return ip.is_loopback if ip is not None else candidate.startswith("localhost:")


def is_loopback(host: str) -> bool:
    """Whether an address of a socket (no name, no port) means this machine itself."""
    try:
        return ipaddress.ip_address(plain_host(host)).is_loopback
    except ValueError:
        return False
