# SPDX-License-Identifier: Apache-2.0
"""Where a peer can be reached: one address, or several candidates of which nobody knows yet which one leads there.

    10.9.0.1:7000                                   an address: host:port
    10.9.0.1:7000,[fd00::1]:7000,127.0.0.1:7000     candidates, the likeliest first

A machine has several interfaces, and which of them another machine can reach is found by dialling only
(transport/dialling.py). Everything between the two ends passes the text on as it is.

Rules: pure text; no resolver, no sockets.
"""

from collections.abc import Iterable

MAX_CANDIDATES = 8
MAX_LENGTH = 512
"""Of an address with all of its candidates."""
EVERY_INTERFACE = "*"
"""The host to listen on for all interfaces of a machine, of IPv4 and IPv6."""

_SEPARATOR = ","
_WILDCARDS = (EVERY_INTERFACE, "0.0.0.0", "::")


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, with IPv6 hosts in brackets, as (host, port).

    Raises:
        ValueError: no such form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of split_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether listening there means several interfaces: nobody can dial it."""
    return host in _WILDCARDS


def candidates_of(address: str) -> tuple[str, ...]:
    """The single addresses, in order."""
    return tuple(address.split(_SEPARATOR))


def join_candidates(candidates: Iterable[str]) -> str:
    """One text of the first ones that fit, each once."""
    chosen = list(dict.fromkeys(candidates))[:MAX_CANDIDATES]
    while len(chosen) > 1 and sum(map(len, chosen)) + len(chosen) > MAX_LENGTH:
        del chosen[-1]
    return _SEPARATOR.join(chosen)
