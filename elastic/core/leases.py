# SPDX-License-Identifier: Apache-2.0
"""Which samples are given to whom: exactly-once data under churn (I7).

Sample indices count up for ever; what an index means (which sample of which pass over the data) is the trainer's
business. An index is in exactly one of four places: not given yet (`>= next_index`), free again (given to a peer
that is gone, not consumed), owned by one start of one peer, or consumed by a commit. It moves only when a journal
record says so.

Rules: grants are journaled before they are told; the same request serial gives the same grant; only a commit
consumes; what its owner's departure leaves unconsumed becomes free. Nobody owns much more than it can train on before
its next commit: what a vote weighs rests on what its sender owns. Knows nothing of views or time.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.core.records import Grant, SnapshotRecord

MAX_RANGES_PER_GRANT = 64
"""A grant may hold fewer samples than asked for rather than more ranges than this: votes have to list them again."""

MAX_PIECES = 8191
"""Into how many pieces commits may break what is not consumed, the endless rest counted. One less than certificates
admit: after a rebuild from a full one, the rest may be one piece more."""

MAX_NEW_PIECES_PER_VOTE = MAX_RANGES_PER_GRANT
"""How many pieces one vote may add. A peer trains through its grants in order: it leaves at most one prefix open, and
what it used up of older grants costs at most one piece for each of their ranges."""

MAX_INDEX = 2**53
"""No index is as large: messages and the journal could not say it."""

MAX_ROUNDS_OWNED = 5
"""Work of so many rounds a peer may own and not have reported. It owns one round's work that waits for its commit, and
a stock of two rounds' work."""

SPARE_ROUNDS = 3
"""So many more it gets whenever it is a member again, or the others have gone on without it. Who is late keeps what it
has trained on, and needs a round's work to show that it works, and another one to hand in (seed 654)."""


def merged(ranges: Iterable[IndexRange]) -> tuple[IndexRange, ...]:
    """The same indices as sorted, disjoint, maximal, non-empty ranges."""
    result: list[IndexRange] = []
    for item in sorted(item for item in ranges if item.start < item.stop):
        if result and item.start <= result[-1].stop:
            result[-1] = IndexRange(result[-1].start, max(result[-1].stop, item.stop))
        else:
            result.append(item)
    return tuple(result)


def overlap(left: Iterable[IndexRange], right: Iterable[IndexRange]) -> tuple[IndexRange, ...]:
    """The indices that are in both, merged."""
    ours, theirs = merged(left), merged(right)
    result: list[IndexRange] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, stop = max(ours[i].start, theirs[j].start), min(ours[i].stop, theirs[j].stop)
        if start < stop:
            result.append(IndexRange(start, stop))
        if ours[i].stop < theirs[j].stop:
            i += 1
        else:
            j += 1
    return tuple(result)


def without(ranges: Iterable[IndexRange], removed: Iterable[IndexRange]) -> tuple[IndexRange, ...]:
    """The indices of `ranges` that are not in `removed`, merged."""
    holes = merged(removed)
    result: list[IndexRange] = []
    for item in merged(ranges):
        start = item.start
        for hole in holes:
            if hole.stop <= start or hole.start >= item.stop:
                continue
            if start < hole.start:
                result.append(IndexRange(start, hole.start))
            start = hole.stop
        if start < item.stop:
            result.append(IndexRange(start, item.stop))
    return tuple(result)


def count(ranges: Iterable[IndexRange]) -> int:
    """How many indices the (disjoint) ranges hold."""
    return sum(len(item) for item in ranges)


class LeaseLedger:
    """Where every sample index is. Changed only by applying what the journal says."""

    def __init__(self, next_index: int = 0, free: Iterable[IndexRange] = ()) -> None:
        self.next_index = next_index
        self.free = merged(free)
        self._owned: dict[PeerRef, tuple[IndexRange, ...]] = {}
        # The newest grant of each peer, so that a repeated request is recognised. Outlives the membership: an old
        # request that comes late must not be taken for a new one.
        self._newest: dict[PeerId, tuple[PeerRef, int, tuple[IndexRange, ...]]] = {}
        # Reported as consumed, but left out of a commit by `bounded`: its owner will not name it again. A restarted
        # coordinator does not know of it, and takes it for stock.
        self._spent: dict[PeerRef, tuple[IndexRange, ...]] = {}

    @classmethod
    def restored(cls, record: SnapshotRecord) -> "LeaseLedger":
        """As a snapshot of the journal says."""
        ledger = cls(record.next_index)
        ledger.free = record.free
        ledger._owned = dict(record.owned)
        ledger._newest = {item.ref.peer_id: (item.ref, item.serial, item.ranges) for item in record.granted}
        return ledger

    def owned(self) -> tuple[tuple[PeerRef, tuple[IndexRange, ...]], ...]:
        """Who owns what, in the order of their first grant."""
        return tuple(self._owned.items())

    def granted(self) -> tuple[Grant, ...]:
        """The newest grant of every peer."""
        return tuple(Grant(*item) for item in self._newest.values())

    def owned_by(self, ref: PeerRef) -> tuple[IndexRange, ...]:
        """What this start of the peer has been given and no commit has consumed."""
        return self._owned.get(ref, ())

    def num_unreported(self, ref: PeerRef) -> int:
        """How much of that it has not reported as consumed in a vote that was committed."""
        return count(without(self.owned_by(ref), self._spent.get(ref, ())))

    def owners(self) -> tuple[PeerRef, ...]:
        """Everybody who owns something, in the order of their first grant."""
        return tuple(self._owned)

    def plan(self, num_samples: int) -> tuple[IndexRange, ...]:
        """What a request for `num_samples` would be given: freed indices first, lowest first, then new ones."""
        granted: list[IndexRange] = []
        missing = num_samples
        for item in self.free:
            if missing == 0 or len(granted) == MAX_RANGES_PER_GRANT:
                break
            granted.append(IndexRange(item.start, min(item.stop, item.start + missing)))
            missing -= len(granted[-1])
        if missing and len(granted) < MAX_RANGES_PER_GRANT:
            granted.append(IndexRange(self.next_index, min(self.next_index + missing, MAX_INDEX)))
        return merged(granted)

    def newest_serial(self, ref: PeerRef) -> int:
        """Serial of the newest grant to this start of the peer; -1 before its first."""
        known = self._newest.get(ref.peer_id)
        return known[1] if known is not None and known[0] == ref else -1

    def newest_grant(self, ref: PeerRef) -> tuple[IndexRange, ...]:
        """Ranges of that newest grant; empty if they were released since."""
        known = self._newest.get(ref.peer_id)
        return known[2] if known is not None and known[0] == ref else ()

    def clip(self, ref: PeerRef, ranges: Iterable[IndexRange]) -> tuple[IndexRange, ...]:
        """Those of the ranges that `ref` owns and has not reported before: what it may report as consumed."""
        owned = overlap(self.owned_by(ref), ranges)
        return without(owned, self._spent[ref]) if ref in self._spent else owned

    def grant(self, ref: PeerRef, serial: int, ranges: tuple[IndexRange, ...]) -> None:
        """Apply a grant: the ranges leave the free pool (or are new) and belong to `ref`."""
        assert not any(overlap(ranges, owned) for owned in self._owned.values()), "an index has two owners"
        self.free = without(self.free, ranges)
        self.next_index = max([self.next_index, *(item.stop for item in ranges)])
        self._owned[ref] = merged((*self.owned_by(ref), *ranges))
        self._newest[ref.peer_id] = (ref, serial, ranges)

    def consume(self, ref: PeerRef, ranges: Collection[IndexRange]) -> None:
        """Apply a commit: these indices of `ref` are used up for good.

        Raises:
            AssertionError: if `ref` does not own one of them; the coordinator clips votes before it commits them.
        """
        owned = self.owned_by(ref)
        assert count(overlap(owned, ranges)) == count(merged(ranges)), "consumed what it does not own"
        self._keep(ref, without(owned, ranges))

    def release(self, ref: PeerRef, ranges: Collection[IndexRange]) -> None:
        """Apply a departure: these indices of `ref` are free again."""
        owned = self.owned_by(ref)
        assert count(overlap(owned, ranges)) == count(merged(ranges)), "released what it does not own"
        self.free = merged((*self.free, *ranges))
        self._keep(ref, without(owned, ranges))
        if self.newest_serial(ref) >= 0:
            self._newest[ref.peer_id] = (ref, self.newest_serial(ref), ())

    def position(self) -> DataPosition:
        """Which samples no commit has consumed yet, whoever has them."""
        owned = (item for ranges in self._owned.values() for item in ranges)
        return DataPosition(self.next_index, merged((*self.free, *owned)))

    def bounded(self, claims: Collection[tuple[IndexRange, ...]]) -> list[tuple[IndexRange, ...]]:
        """What a commit may consume of its votes, so that its position, and every later one, fits a certificate.

        Grants and departures do not change what is not consumed, commits alone do. A range that would add a piece too
        many stays unconsumed and its owner's, and is noted as reported: it counts for no other vote. Each is priced as
        if it were the only one, which is never too little: what the others take away can only bring its ends closer to
        a border.

        Args:
            claims: for each vote what its sender owns of what it reports (`clip`); disjoint.
        """
        position = self.position()
        pieces = merged((*position.unconsumed, IndexRange(position.next_index, 2**63)))
        starts = [item.start for item in pieces]
        left = MAX_PIECES - len(pieces)
        result: list[tuple[IndexRange, ...]] = []
        left_out: list[IndexRange] = []
        for claim in claims:
            own = MAX_NEW_PIECES_PER_VOTE
            taken: list[IndexRange] = []
            for item in claim:
                piece = pieces[bisect_right(starts, item.start) - 1]
                price = (piece.start < item.start) + (item.stop < piece.stop) - 1
                if price > 0 and min(left, own) < price:
                    left_out.append(item)
                    continue
                left, own = left - price, own - price
                taken.append(item)
            result.append(tuple(taken))
        for ref, owned in self._owned.items() if left_out else ():
            spent = merged((*self._spent.get(ref, ()), *overlap(owned, left_out)))
            if spent:
                self._spent[ref] = spent
        return result

    def check_invariants(self) -> None:
        """No index is in two places, none is beyond `next_index`."""
        places = [self.free, *self._owned.values()]
        everything = [item for place in places for item in place]
        assert count(everything) == count(merged(everything)), "an index is in two places"
        assert all(item.stop <= self.next_index for item in everything), "an index was given that does not exist yet"

    def _keep(self, ref: PeerRef, ranges: tuple[IndexRange, ...]) -> None:
        if ranges:
            self._owned[ref] = ranges
        else:
            self._owned.pop(ref, None)
            self._spent.pop(ref, None)
