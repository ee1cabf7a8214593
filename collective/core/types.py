# SPDX-License-Identifier: Apache-2.0
"""The values that every layer speaks of: peers, views, rounds.

Rules: immutable, comparable, wire-ready (msgspec structs, decoded with unknown fields forbidden). No behaviour
beyond look-ups. Nothing here knows a socket, a tensor or a clock.
"""

from typing import NewType

import msgspec

from isthmus.collective.core.apart import Pair, apart_from, hubs

PeerId = NewType("PeerId", str)
"""Stable name of one site in the run: 16 lower-case hexadecimal digits."""

Incarnation = NewType("Incarnation", int)
"""One start of a peer's process. A later start has a larger number."""

Epoch = NewType("Epoch", int)
"""Number of a view. Grows with every change of membership and never goes back."""

OuterStep = NewType("OuterStep", int)
"""How many exchanges have been committed in this run."""

Instant = float
"""Seconds on a monotonic clock that the caller owns. Machines only compare and add."""

HUGE = 1e30
"""How large numbers are that cannot be squared in their dtype or cannot be read, as root mean square."""

PEER_ID_PATTERN = "^[0-9a-f]{16}$"


class PeerRef(msgspec.Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """One start of one peer: the unit that can crash, be evicted, or join again."""

    peer_id: PeerId
    incarnation: Incarnation


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer with its place in a view. `address` is where others reach it (core/address.py)."""

    peer_id: PeerId
    incarnation: Incarnation
    address: str

    @property
    def ref(self) -> PeerRef:
        """The peer and its incarnation, without the address."""
        return PeerRef(self.peer_id, self.incarnation)


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who takes part, from which committed state on.

    `outer_step` and `digest` name the shared state that every member must hold before it takes part. Ranks are
    positions in `members`; they mean nothing outside this view. `apart` names the pairs of ranks, the lower one first,
    that have no link with each other; at least one member has links with all.

    Raises:
        ValueError: `apart` names something else.
    """

    epoch: Epoch
    outer_step: OuterStep
    digest: bytes
    members: tuple[Member, ...]
    apart: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        if not self.apart:
            return
        if any(not 0 <= one < other < self.world_size for one, other in self.apart):
            raise ValueError("pairs that are apart must be ranks of the view, the lower one first")
        if not hubs(self.world_size, frozenset(self.apart)):
            raise ValueError("no member has links with all")

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def rank_of(self, peer_id: PeerId) -> int | None:
        """Position of a peer in this view, or None for an outsider."""
        for rank, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return rank
        return None

    def apart_from(self, rank: int) -> frozenset[int]:
        """The ranks that this one has no link with."""
        return apart_from(frozenset(self.apart), rank)

    def holds(self, ref: PeerRef) -> bool:
        """Whether exactly this start of the peer is a member."""
        return any(member.ref == ref for member in self.members)


class RoundKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Name of one attempt to exchange one fragment.

    `outer_step` is the committed step the round starts from; its commit makes `outer_step + 1`. A retry in another
    view has another epoch, so bytes of an abandoned attempt can never be taken for the new one's.
    """

    epoch: Epoch
    outer_step: OuterStep
    fragment: int
