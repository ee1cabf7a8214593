# SPDX-License-Identifier: Apache-2.0
"""From what members saw of their own links to a table that all of them share.

A member sees only what it moved: how much it sent in all and to each other member while more was waiting to be sent,
how much it received, how long a round trip takes. What of that is a limit of the network and what merely nobody
asked for is told apart here, from everybody's view together.

Rules: the same observations give the same table on every member. What is no limit is unknown, not a number: a plan
made from a limit that is none would spare a link for no reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from isthmus.collective.core.apart import NO_PAIR, Apart, apart_from
from isthmus.collective.core.link_table import LinkTable

_SATURATED = 0.7
"""A member that receives less than this part of what the others could send it is limited by its own line; a pair
that moves less than this part of its sender's fair share is limited by the way between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one member saw, by rank of the other member where there are several. 0 where it saw nothing."""

    sent: float
    """Most bytes/s to all together, while more was waiting."""
    received: float
    """Most bytes/s from all together."""
    one_way_s: tuple[float, ...]
    """Half a round trip without queues."""
    sent_to: tuple[float, ...]
    """Most bytes/s to each other member, while more was waiting for it."""

    def to_numbers(self) -> list[float]:
        """As a flat row, for the wire."""
        return [self.sent, self.received, *self.one_way_s, *self.sent_to]

    @classmethod
    def from_numbers(cls, row: Sequence[float]) -> "Observation":
        """The inverse of `to_numbers`."""
        world_size = (len(row) - 2) // 2
        numbers = [number if 0.0 <= number < inf else 0.0 for number in row]
        return cls(
            sent=numbers[0],
            received=numbers[1],
            one_way_s=tuple(numbers[2 : 2 + world_size]),
            sent_to=tuple(numbers[2 + world_size :]),
        )


def table_of(observations: Sequence[Observation], apart: Apart = NO_PAIR) -> LinkTable:
    """One table out of all members' observations, in the order of ranks, of which these pairs have no link."""
    everybody = range(len(observations))
    upload = tuple(seen.sent or inf for seen in observations)
    shares = tuple(upload[rank] / max(1, len(observations) - 1 - len(apart_from(apart, rank))) for rank in everybody)
    download = tuple(_download(rank, observations, shares, apart) for rank in everybody)
    rate = tuple(
        tuple(_rate(sender, receiver, observations, shares, download) for receiver in everybody) for sender in everybody
    )
    latency_s = tuple(
        tuple(_latency_s(observations[sender], observations[receiver], sender, receiver) for receiver in everybody)
        for sender in everybody
    )
    table = LinkTable(latency_s=latency_s, rate=rate, upload=upload, download=download)
    return table.quantised().without(apart)


def _download(receiver: int, observations: Sequence[Observation], shares: Sequence[float], apart: Apart) -> float:
    seen = observations[receiver].received
    senders = set(range(len(shares))) - apart_from(apart, receiver) - {receiver}
    offered = sum(shares[sender] for sender in sorted(senders))
    were_waiting = any(observations[sender].sent_to[receiver] for sender in senders)
    return seen if were_waiting and 0.0 < seen < _SATURATED * offered < inf else inf


def _rate(
    sender: int,
    receiver: int,
    observations: Sequence[Observation],
    shares: Sequence[float],
    download: Sequence[float],
) -> float:
    seen = observations[sender].sent_to[receiver]
    if sender == receiver or not seen or download[receiver] < inf:
        return inf
    return seen if seen < _SATURATED * shares[sender] else inf


def _latency_s(one: Observation, other: Observation, sender: int, receiver: int) -> float:
    """Both ends measure the same round trip; the shorter one has met fewer queues."""
    known = [seconds for seconds in (one.one_way_s[receiver], other.one_way_s[sender]) if seconds > 0.0]
    return min(known, default=0.0) if sender != receiver else 0.0
