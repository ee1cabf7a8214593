# SPDX-License-Identifier: Apache-2.0
"""What the journal knows of each peer's work: how many samples its next payload may hold, and how often it was wrong.

Rules: both follow from the journal's records alone, so that a restarted coordinator judges as the one before it.
"""

from collections.abc import Collection

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.elastic.core.leases import count
from isthmus.elastic.core.records import Work
from isthmus.elastic.core.values import IndexRange

MAX_STRIKES = 3
"""After so many in a row a peer is sent home."""

_MAX_KNOWN = 1024
"""Peers whose strikes are counted; of more, those that were struck last."""


class WorkBook:
    """Samples that commits have consumed, by member and fragment.

    A payload of a fragment holds what its sender has done since a commit last held that fragment's payload of it. With
    several fragments that is more than the samples of one vote.
    """

    def __init__(self) -> None:
        self._done: dict[PeerRef, int] = {}
        self._counted: dict[PeerRef, dict[int, int]] = {}  # of `_done`, what the newest payload of a fragment held

    @classmethod
    def restored(cls, items: Collection[Work]) -> "WorkBook":
        """As a snapshot of the journal says."""
        book = cls()
        book._done = {item.ref: item.num_samples for item in items}
        book._counted = {item.ref: dict(item.counted) for item in items}
        return book

    def items(self) -> tuple[Work, ...]:
        """All that is known."""
        return tuple(Work(ref, done, tuple(self._counted[ref].items())) for ref, done in self._done.items())

    def num_samples(self, ref: PeerRef, fragment: int, consumed: Collection[IndexRange]) -> int:
        """How many samples may be behind a payload of this fragment, with those that its vote names."""
        return self._done.get(ref, 0) - self._counted.get(ref, {}).get(fragment, 0) + count(consumed)

    def committed(self, ref: PeerRef, fragment: int, consumed: Collection[IndexRange]) -> None:
        """A commit holds a payload of this member."""
        self._done[ref] = self._done.get(ref, 0) + count(consumed)
        self._counted.setdefault(ref, {})[fragment] = self._done[ref]

    def forget(self, ref: PeerRef) -> None:
        """It is no member any more: whatever it has done counts for nothing."""
        self._done.pop(ref, None)
        self._counted.pop(ref, None)


class Strikes:
    """How often in a row a peer was overruled or has said what is not true, and which start of it was the last time.

    A commit of its work that it agreed to ends the row.
    """

    def __init__(self, items: Collection[tuple[PeerRef, int]] = ()) -> None:
        self._numbers = {ref.peer_id: (number, ref) for ref, number in items}

    def items(self) -> tuple[tuple[PeerRef, int], ...]:
        """All rows that go on, those that were added to last at the end."""
        return tuple((ref, number) for number, ref in self._numbers.values())

    def of(self, peer_id: PeerId) -> int:
        """How many."""
        return self._numbers[peer_id][0] if peer_id in self._numbers else 0

    def is_out(self, ref: PeerRef) -> bool:
        """Whether this start of the peer has had its strikes. Another one may show that it was mended."""
        return self.of(ref.peer_id) >= MAX_STRIKES and self._numbers[ref.peer_id][1] == ref

    def add(self, ref: PeerRef) -> None:
        """One more."""
        before = self.of(ref.peer_id)
        self.clear(ref.peer_id)  # the newest ones are last
        self._numbers[ref.peer_id] = before + 1, ref
        if len(self._numbers) > _MAX_KNOWN:
            del self._numbers[next(iter(self._numbers))]

    def clear(self, peer_id: PeerId) -> None:
        """The row is over."""
        self._numbers.pop(peer_id, None)
