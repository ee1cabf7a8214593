# SPDX-License-Identifier: Apache-2.0
"""Who lies loses only itself: what a lie may not do to a commit, and whom the coordinator may call a liar."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.leases import count
from isthmus.elastic.core.messages import CoordinatorMessage, Refused, RoundFailed
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from isthmus.elastic.core.work import MAX_STRIKES
from tests.simulation.symbols import Payload, name
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator

_BELIEVED = 80
"""So many commits long the numbers of a liar that was alone are usual, or its own."""
_FRESH_ROUNDS = 4
"""After so many rounds of its own a member's numbers are nine times as large as after its first."""
TOO_LARGE = 100.0
"""Times the others' numbers, for the same work: who has done more may send more (seed 1006)."""


class Lies:
    """Keeps what the members saw of each other."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self._sizes: dict[RoundKey, dict[PeerRef, tuple[float, ...]]] = defaultdict(dict)
        self._failed: dict[RoundKey, set[PeerRef]] = defaultdict(set)  # who could not finish
        self._epoch = 0
        self._disputes: set[frozenset[str]] = set()  # pairs that differed about a weight, to this coordinator
        self._told: int | None = None  # the epoch, while its members count with weights that they were told
        self._overruled: dict[PeerId, tuple[int, PeerRef]] = {}  # in a row, the last time as this start
        self._struck: dict[PeerId, PeerRef] = {}  # which start was wrong last
        self._believed_until = 0
        self._members: Collection[PeerId] = ()
        self._has_erred = False  # this coordinator takes an honest member to be at odds with another (seed 21472)
        self._measured: dict[PeerId, float] = {}  # members whose numbers the coordinator knows
        self._is_usual_known = False

    def staged(self, node: "PeerNode", key: RoundKey, sizes: tuple[float, ...], sums: tuple[float, ...]) -> None:
        # Of a sum that is large by a member's part its root can tell whether that is noise: it has seen the part.
        false = sums if self._sim.options.lie == "false_sum" else (0.0,) * len(sizes)
        self._sizes[key][node.ref] = tuple(map(max, sizes, false))

    def coordinator_started(self) -> None:
        self._disputes.clear()
        self._has_erred = False
        self._told = None
        self._failed.clear()

    def _is_stranger(self, peer_id: PeerId) -> bool:
        """Whose numbers have grown beyond what the others have seen of them: it may be put out beside newcomers."""
        peer, warms_up = self._sim.peers[peer_id], self._sim.options.warm_up_rounds > 0
        return warms_up and peer.moments > _FRESH_ROUNDS and peer.size > 2.0 * self._measured.get(peer_id, 0.0)

    def may_be_large(self, peer_id: PeerId) -> bool:
        """Whether who does not warm up stays beside others that do: of a stranger nobody knows that it is honest."""
        return not self._is_usual_known or self._measured.get(peer_id, 0.0) > 0.0

    def view_decided(self, record: ViewRecord) -> None:
        struck = {ref.peer_id for ref in record.struck}
        self._disputes = {pair for pair in self._disputes if not pair & struck}
        if "differ about a weight" in record.cause:
            one, _, other = record.cause.split(" ")[:3]
            self._disputes.add(frozenset((one, other)))
            demand(one != other, "liars", f"{one} contradicts itself, and stays")
            as_told = self._told is None or self._told != self._epoch
            demand(as_told, "liars", f"{one} or {other} counts with other weights than it was told to")
            self._told = record.view.epoch
            for peer in (one, other):
                others = {item for pair in self._disputes if peer in pair for item in pair - {peer}}
                demand(len(others) < 2, "liars", f"{peer} is at odds with {sorted(others)}, and stays")
        self._epoch = record.view.epoch
        self._struck |= {ref.peer_id: ref for ref in record.struck}
        has_strangers = any(map(self._is_stranger, self._members))
        self._members = [item.peer_id for item in record.view.members]
        self._has_erred |= has_strangers and "numbers" in record.cause
        for ref in record.struck:
            is_just = self._sim.is_liar(ref.peer_id) or self._has_erred
            demand(is_just, "liars", f"{name(ref)} is called a liar: {record.cause}")
            demand(not record.view.holds(ref), "liars", f"{name(ref)} is called a liar and stays")
        if "are said to be" in record.cause:
            found = any(self._sim.is_liar(word) for word in record.cause.split()) or self._has_erred
            found |= self._sim.options.lie == "framed"  # one word against another: out for a while, without a strike
            demand(found, "liars", f"an honest part is left out: {record.cause}")

    def told(self, to: PeerRef, message: CoordinatorMessage, view: View | None) -> None:
        """What ends a peer's part, or the run."""
        if isinstance(message, Refused) and "times in a row" in message.reason:
            was_wrong = self._struck.get(to.peer_id, to) == to
            demand(was_wrong, "liars", "{} is sent home for what another start of it did", to)
        if not isinstance(message, Refused) or self._sim.options.wrong_result > 0:
            return
        if "times in a row" in message.reason:
            demand(self._sim.is_liar(to.peer_id), "liars", f"{name(to)} is sent home: {message.reason}")
        if "results differ" in message.reason:
            few = view is not None and view.world_size < 3
            demand(few, "liars", f"one liar among {0 if view is None else view.world_size} halts the run")

    def rebuilt(self) -> None:
        """The journal is lost, and with it who was wrong how often."""
        self._overruled.clear()
        self._struck.clear()
        self._measured.clear()
        self._is_usual_known = False

    def reported(self, sender: PeerRef, report: RoundFailed) -> None:
        self._failed[report.key].add(sender)

    def committed(self, record: CommitRecord, view: View, payloads: Mapping[PeerRef, Payload]) -> None:
        self._told = None
        failed = self._failed.pop(record.key, set()) & {item.ref for item in record.contributions}
        demand(not failed, "I1", f"committed with {[name(ref) for ref in failed]}, which could not finish")
        for item in record.contributions:
            self._measured[item.ref.peer_id] = max(item.size, self._measured.get(item.ref.peer_id, 0.0))
        self._is_usual_known |= record.usual_size > 0.0
        self._believe(record)
        seen = self._sizes.pop(record.key, {})
        for ref, sizes in seen.items():
            own = view.rank_of(ref.peer_id)
            is_seen = view.holds(ref) and own is not None and len(sizes) == view.world_size
            is_judged = is_seen and record.outer_step > self._believed_until
            if is_judged and own is not None and record.contributions[own].weight > 0.0 and sizes[own] > 0.0:
                self._no_noise(own, sizes, [item.weight for item in record.contributions])
        for item in record.contributions:
            samples = count(payloads[item.ref].works[0][1])  # of one fragment, more than this step's
            demand(item.weight <= samples, "liars", f"{name(item.ref)} weighs {item.weight} with {samples} samples")
            if item.ref in record.disputed:
                continue
            if not item.agreed:
                self._struck[item.ref.peer_id] = item.ref
            peer_id, overruled = item.ref.peer_id, self._overruled.get(item.ref.peer_id, (0, item.ref))
            self._overruled[peer_id] = (0, item.ref) if item.agreed else (overruled[0] + 1, item.ref)
            is_out = overruled[0] < MAX_STRIKES or overruled[1] != item.ref
            demand(is_out, "liars", f"{name(item.ref)} was overruled {MAX_STRIKES} times and votes again")

    def _believe(self, record: CommitRecord) -> None:
        """A state that a liar has made alone is its work, and what is usual is its word."""
        first, *others = record.contributions
        if not others and self._sim.is_liar(first.ref.peer_id):
            self._believed_until = record.outer_step + _BELIEVED

    def _no_noise(self, own: int, sizes: Sequence[float], weights: Sequence[float]) -> None:
        """Nobody's part that this honest member added up is far larger than the others' in the middle (seed 41572)."""
        known = [rank for rank, size in enumerate(sizes) if size > 0.0 and weights[rank] > 0.0]
        for rank in known:
            others = [sizes[other] * max(1.0, weights[rank] / weights[other]) for other in known if other != rank]
            is_noise = rank != own and sizes[rank] > TOO_LARGE * statistics.median(others)
            demand(not is_noise, "liars", "noise is committed")
