# SPDX-License-Identifier: Apache-2.0
"""Which peers can exchange with each other, and which of them make a view together.

Two peers behind NATs have no link. A view may hold both as long as one member, a hub, has links with all: what else
would go between the two goes through it (collective/core/apart.py).

Rules: both ends must say that they have a link, neither can speak for the other's side of the line. Members of one view
said so before it, except for the pairs that it names as apart, and for those that were parted since: one voice alone
accused such a link of a newcomer's, which costs it that link and not its place.
"""

from collections.abc import Mapping, Sequence

from isthmus.collective.core.apart import Pair, are_apart
from isthmus.collective.core.types import Instant, OuterStep, PeerId, View
from isthmus.elastic.core.sessions import Session

PARTED_S = 60.0
"""For so long rounds do without a link that a single voice has accused, at the first time."""


def have_met(one: Session, other: Session) -> bool:
    """Whether both say that they have a link, and were not parted."""
    return other.ref in one.met and one.ref in other.met and not are_parted(one, other)


def are_parted(one: Session, other: Session) -> bool:
    """Whether rounds do without their link, whatever they say of it."""
    return other.ref in one.parted or one.ref in other.parted


def part(one: Session, other: Session, now: Instant) -> None:
    """One of the two said that a round cannot be finished over their link, and nobody else said so of either."""
    one.part(other.ref, now, PARTED_S)
    other.part(one.ref, now, PARTED_S)


class Edges:
    """The links that the next view can count on, as far as is known.

    Args:
        view: the newest one.
    """

    def __init__(self, view: View) -> None:
        self._apart = frozenset(view.apart)
        self._ranks = {member.ref: rank for rank, member in enumerate(view.members)}

    def between(self, one: Session, other: Session) -> bool:
        """Whether the two can exchange."""
        if have_met(one, other):
            return True
        if are_parted(one, other):
            return False
        rank, other_rank = self._ranks.get(one.ref), self._ranks.get(other.ref)
        return rank is not None and other_rank is not None and not are_apart(self._apart, rank, other_rank)

    def hubs_among(self, sessions: Sequence[Session]) -> list[Session]:
        """Those that have links with all the others."""
        if not self._apart and all(item.ref in self._ranks and not item.parted for item in sessions):
            return list(sessions)
        return [item for item in sessions if all(item is other or self.between(item, other) for other in sessions)]

    def pairs_apart(self, sessions: Sequence[Session]) -> tuple[Pair, ...]:
        """The pairs without a link, by their places here."""
        everybody = range(len(sessions))
        return tuple((a, b) for b in everybody for a in range(b) if not self.between(sessions[a], sessions[b]))

    def with_a_hub(self, sessions: Sequence[Session], proven: Mapping[PeerId, OuterStep]) -> list[Session]:
        """All if there is a hub, else one and whoever has a link with it: of these groups, the one that goes on.

        That is one that holds the view's state, then the largest, then that of the peer whose work was committed first.

        Args:
            sessions: who would be members of the next view.
            proven: since which outer step commits have held work of a peer.
        """
        if len(sessions) < 2 or self.hubs_among(sessions):
            return list(sessions)
        groups = [[other for other in sessions if other is hub or self.between(hub, other)] for hub in sessions]
        never = max(proven.values(), default=0) + 1
        since = [proven.get(hub.ref.peer_id, never) for hub in sessions]
        holds = [any(item.holds_state is not False for item in group) for group in groups]
        best = max(range(len(groups)), key=lambda at: (holds[at], len(groups[at]), -since[at], -at))
        return groups[best]
