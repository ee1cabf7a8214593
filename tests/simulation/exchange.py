# SPDX-License-Identifier: Apache-2.0
"""One peer's end of the collective layer: the real MEAN machine and the real fence over symbolic chunks.

Stands in for collective's shells (engine, supervision): holds back frames of views and rounds to come, renews links,
suspects who is lost or stands still, tells the others when it gives up.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from isthmus.collective.core.apart import Pair, hubs
from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    ChunkRefused,
    FinishChunk,
    Finished,
    HandOnOpening,
    InstallResult,
    LinkRenewed,
    PartArrived,
    PeerOpened,
    ResultArrived,
    RoundEffect,
    RoundEvent,
    SendOpen,
    SendPart,
    SendResult,
)
from isthmus.collective.core.slices import NOBODY, Route, SlicePlan, butterfly, ring
from isthmus.collective.core.types import PeerId, PeerRef, RoundKey, View
from tests.simulation.symbols import FALSE, FALSE_SIZE, FAR_TOO_MUCH, ChunkValue, Payload, Result, Share
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode

LOOK_S = 0.75
STALL_S = 2.5
LINK_TIMEOUT_S = 2.0
FIRST_CONTACT_S = 2.5
MAX_HELD_BACK = 512


@dataclass(frozen=True, slots=True)
class Frame:
    """What travels between two peers: an opening, a part, a result, or "I gave up"."""

    sender: PeerRef
    key: RoundKey
    kind: str
    chunk: int = -1
    value: ChunkValue = ()
    suspects: tuple[PeerId, ...] = ()
    weight: float = 0.0
    size: float = 1.0


class Exchange:
    """The exchange of one round in one view."""

    def __init__(
        self, node: "PeerNode", view: View, key: RoundKey, payload: Payload, weight: float, told: Sequence[float] = ()
    ) -> None:
        rank = view.rank_of(node.peer_id)
        assert rank is not None
        options = node.sim.options
        self.node, self.view, self.key, self.rank = node, view, key, rank
        self.machine = RoundMachine(
            key=key,
            rank=rank,
            slices=slices_of(options.plan, options.chunks_per_peer, view.world_size, view.apart),
            eager_chunks=options.eager_chunks,
            apart=frozenset(view.apart),
        )
        self._unlinked = view.apart_from(rank)
        self.share: Share = (payload.name, weight)
        self.failed = False
        self.result: Result | None = None
        self.weights: list[float | None] = list(told) or [None] * view.world_size
        self.weights[rank] = weight
        self.sizes = [0.0] * view.world_size
        self._sums_seen = [0.0] * view.world_size
        self._size = payload.size
        if view.world_size == 1 and weight:
            self.sizes[rank] = payload.size  # whoever is alone measures itself
        self._is_told = bool(told)
        self._sums: dict[int, list[Share]] = defaultdict(lambda: [self.share])
        self._mass: dict[int, float] = defaultdict(float)  # of a chunk's parts: sizes by weights
        self._chunks: dict[int, ChunkValue] = {}
        self._incoming: ChunkValue = ()
        self._heard_at = dict.fromkeys(range(view.world_size), node.clock.now())
        self._moved_at = dict(self._heard_at)
        self._began = node.clock.now()

    @property
    def is_over(self) -> bool:
        return self.failed or self.result is not None

    def start(self) -> None:
        self._run(self.machine.start())
        self.node.later(LOOK_S, "look", self._look)

    def on_frame(self, frame: Frame) -> None:
        rank = self.view.rank_of(frame.sender.peer_id)
        assert rank is not None
        self._heard_at[rank] = self.node.clock.now()
        if frame.kind == "sign":
            return
        self._moved_at[rank] = self.node.clock.now()
        if frame.kind == "abort":
            for other in self.machine.between(rank) if not self.is_over else ():
                self._send(self.view.members[other].ref, "abort", suspects=frame.suspects, of=rank)
            self.fail(frame.suspects, f"{frame.sender.peer_id} gave up", told_by=frame.sender.peer_id)
            return
        event: RoundEvent
        if frame.kind == "open":
            event = PeerOpened(rank)
        elif frame.kind == "part":
            event = PartArrived(rank, frame.chunk)
        else:
            event = ResultArrived(rank, frame.chunk)
        self._incoming = frame.value
        if self.weights[rank] is None:
            self.weights[rank] = frame.weight
        if frame.kind == "part" and not self.machine.adds_for(rank, frame.chunk):
            ((share_name, _),) = frame.value
            self._incoming = ((share_name, self.weights[rank] or 0.0),)
            for seen, size in ((rank, frame.size), (self.rank, self._size)):
                if self.weights[seen]:
                    self.sizes[seen] = max(size, self.sizes[seen])
            self._mass[frame.chunk] += frame.size * (self.weights[rank] or 0.0)
        if frame.kind == "result" and self.share[1] > 0.0 and (FALSE in frame.value or frame.size > self._size):
            # Larger than ours at that place.
            self._sums_seen[rank], self.sizes[self.rank] = frame.size, self._size
        try:
            self._run(self.machine.handle(event))
        except ChunkRefused as error:
            raise Violation("I2", f"{self.node.peer_id} got a chunk that no honest member sends: {error}") from error

    def on_link_renewed(self, peer_id: PeerId) -> None:
        rank = self.view.rank_of(peer_id)
        if rank is not None and not self.failed:
            self._run(self.machine.handle(LinkRenewed(rank)))

    def on_gone(self, peer_id: PeerId) -> None:
        """Its host refuses the connection."""
        rank = self.view.rank_of(peer_id)
        if rank is not None and self.machine.needs(rank):
            self.fail((peer_id,), "connection refused")

    def fail(self, suspects: tuple[PeerId, ...], cause: str, *, told_by: PeerId | None = None) -> None:
        if self.is_over:
            return
        self.failed = True
        if told_by is None:
            for rank in self._linked:
                self._send(self.view.members[rank].ref, "abort", suspects=suspects)
        self.node.exchange_failed(self.key, suspects, cause, told_by)

    def _look(self) -> None:
        """Suspect members whose connection is lost, and those that have opened and then stand still."""
        if self.is_over or self.node.exchange is not self:
            return
        now = self.node.clock.now()
        machine = self.machine
        suspects = []
        for rank in set(machine.waiting_for()) - self._unlinked:
            peer_id = self.view.members[rank].peer_id
            is_silent = now - self._heard_at[rank] > STALL_S
            stands_still = machine.owes_own_parts(rank) and now - self._moved_at[rank] > STALL_S
            is_lost = self.node.sim.network.is_broken(self.node.peer_id, peer_id, LINK_TIMEOUT_S)
            never_met = now - self._began > FIRST_CONTACT_S and not self.node.sim.bulk.meet(self.node.peer_id, peer_id)
            if is_lost or never_met or (machine.has_opened(rank) and (is_silent or stands_still)):
                suspects.append(peer_id)
        for rank in self._linked:
            self._send(self.view.members[rank].ref, "sign")
        if suspects:
            self.fail(tuple(suspects), "connection lost or no byte moved")
        else:
            self.node.later(LOOK_S, "look", self._look)

    def _run(self, effects: Sequence[RoundEffect]) -> None:
        members = self.view.members
        for effect in effects:
            match effect:
                case SendOpen(to):
                    self._send(members[to].ref, "open")
                case HandOnOpening(to, of):
                    self._send(members[to].ref, "open", of=of)
                case SendPart(to, chunk):
                    self._send(members[to].ref, "part", chunk, tuple(self._sums[chunk]))
                case SendResult(to, chunk):
                    self._send(members[to].ref, "result", chunk, self._chunks[chunk])
                case Accumulate(chunk, _):
                    self._sums[chunk].extend(self._incoming)
                case FinishChunk(chunk):
                    self._chunks[chunk] = tuple(sorted(self._sums[chunk])) + self._false_part()
                case InstallResult(chunk):
                    self._chunks[chunk] = self._incoming
                case Finished():
                    self.result = tuple(self._chunks[chunk] for chunk in sorted(self._chunks))
                    self.node.exchange_done(self.key, self.result)
        if effects and self.node.sim.looks_into_machines():
            self.machine.check_invariants()

    @property
    def _linked(self) -> list[int]:
        """The other members that we have a link with."""
        return [rank for rank in range(self.view.world_size) if rank not in {self.rank, *self._unlinked}]

    def _weight_for(self, to: PeerRef) -> float:
        """Ours, as this member hears it."""
        others = [member.ref for member in self.view.members if member.ref != self.node.ref]
        lie = self.node.sim.lie_of(self.node.peer_id)
        if lie == "two_weights" or (lie == "one_weight" and to == others[0]):
            return self.share[1] + 1.0 + others.index(to)
        return self.share[1]

    def _is_betrayed(self, to: PeerRef) -> bool:
        """Whether this member is given another sum than the rest."""
        others = [member.ref for member in self.view.members if member.ref != self.node.ref]
        is_half = others.index(to) < len(self.view.members) // 2
        is_straight = self.node.sim.options.plan == "butterfly"  # what goes through third hands proves nothing
        return self.node.sim.lie_of(self.node.peer_id) == "two_results" and is_half and is_straight

    def _false_part(self) -> ChunkValue:
        """What a root adds that gives all others the same false sum. Where only its own part counts it need not."""
        others = [weight for rank, weight in enumerate(self.weights) if rank != self.rank]
        is_straight = self.node.sim.options.plan == "butterfly"
        lies = self.node.sim.lie_of(self.node.peer_id) == "false_sum" and is_straight and any(others)
        return (FALSE,) if lies else ()

    def marks(self) -> tuple[bytes, ...]:
        """Of the sums that each member has made, by rank."""
        slices = self.machine.slices
        if not all(route.is_star for route in slices.routes) or len(self.view.members) == 1:
            return ()
        marks = [b""] * slices.world_size
        for slice_, route in enumerate(slices.routes):
            made = repr([self._chunks[chunk] for chunk in slices.chunks_of(slice_)])
            marks[route.root] = hashlib.sha256(made.encode()).digest()[:16]
        return tuple(marks)

    def seen_sums(self) -> tuple[float, ...]:
        """Of those that are larger than all parts that this one has seen, as in collective/rounds/sizes.py.

        Who frames another, and alone has given anything, does not complain: the other could compare it with nobody, and
        would be out by that single word.
        """
        is_alone = not any(weight for rank, weight in enumerate(self.weights) if rank != self.rank)
        if is_alone and self.node.sim.lie_of(self.node.peer_id) == "framed":
            return (0.0,) * len(self.sizes)
        largest = max(self.sizes)
        return tuple(size if size > 2.0 * largest else 0.0 for size in self._sums_seen)

    def _size_for(self, to: PeerRef, kind: str, chunk: int, value: ChunkValue) -> float:
        """How large the numbers of a frame are."""
        if kind == "part" and self._frames(to):
            return FAR_TOO_MUCH
        if kind != "result":
            return self._size
        if FALSE in value:
            return FALSE_SIZE
        total = self._size * self.share[1] + self._mass[chunk]
        weight_sum = sum(weight or 0.0 for weight in self.weights)
        return total / weight_sum if weight_sum and self._looks_at_means else 0.0

    @property
    def _looks_at_means(self) -> bool:
        """Only where somebody is framed, or warms up, do the means of honest parts count; else nobody looks."""
        options = self.node.sim.options
        has_several = options.lie == "framed" or options.warm_up_rounds > 0
        return has_several and all(route.is_star for route in self.machine.slices.routes)

    def _frames(self, to: PeerRef) -> bool:
        """Whether this is the one member whose slice is to look false: the last of the others, who always has one."""
        others = [member.ref for member in self.view.members if member.ref != self.node.ref]
        return self._looks_at_means and self.node.sim.lie_of(self.node.peer_id) == "framed" and to == others[-1]

    def seen_weights(self) -> tuple[float, ...]:
        """What the members' parts weigh, as this one says that it has seen it."""
        seen = [0.0 if weight is None else weight for weight in self.weights]
        lie = self.node.sim.lie_of(self.node.peer_id)
        if lie in ("framing", "own_weight") and len(seen) > 1:
            seen[self.rank - (lie == "framing")] += 1.0
        return tuple(seen)

    def _send(
        self,
        to: PeerRef,
        kind: str,
        chunk: int = -1,
        value: ChunkValue = (),
        suspects: tuple[PeerId, ...] = (),
        of: int | None = None,
    ) -> None:
        """`of`: whose word is handed on; None: our own."""
        weight = self._weight_for(to) if of is None else self.weights[of] or 0.0
        sender = self.node.ref if of is None else self.view.members[of].ref
        if kind == "result" and self._is_betrayed(to):
            value = (*value, ("nobody", 1.0))
        size = self._size_for(to, kind, chunk, value)
        frame = Frame(sender, self.key, kind, chunk, value, suspects, weight, size)
        self.node.sim.bulk.send_frame(self.node, to, frame)


@cache
def slices_of(plan: str, chunks_per_peer: int, world_size: int, apart: tuple[Pair, ...] = ()) -> SlicePlan:
    """The trees of a plan: the ring goes round by rank."""
    routes: tuple[Route, ...] = butterfly(world_size, hubs(world_size, frozenset(apart)))
    # The second root owns nothing: slices may be empty.
    sizes = [0 if at == 1 and chunks_per_peer == 2 else chunks_per_peer for at in range(len(routes))]
    bounds = tuple(sum(sizes[:at]) for at in range(len(routes) + 1))
    if apart:
        pass  # only hubs are roots
    elif plan == "ring":
        routes = ring(range(world_size))
    elif plan == "two_hops" and world_size > 1:
        routes = tuple(_two_hops(root, world_size) for root in range(world_size))
    return SlicePlan(bounds=bounds, routes=routes)


def _two_hops(root: int, world_size: int) -> Route:
    """Of the half of the ranks that the root is not in, one member adds up and hands on."""
    half = world_size // 2
    near, far = (range(half), range(half, world_size)) if root < half else (range(half, world_size), range(half))
    between = far[near.index(root) % len(far)]
    parents = {rank: between if rank in far and rank != between else root for rank in range(world_size)}
    tree = tuple(NOBODY if rank == root else parent for rank, parent in parents.items())
    return Route(root=root, up=tree, down=tree)


class FrameGate:
    """Decides about every arriving frame by the fence, and keeps those that come too early, within a bound."""

    def __init__(self, deliver: Callable[[Frame], None]) -> None:
        self.fence = Fence.before_any_view()
        self.dropped = 0
        self.num_held_back = 0
        self._deliver = deliver
        self._held_back: list[Frame] = []

    def arrive(self, frame: Frame, current: RoundKey | None, outer_step: int) -> None:
        """Deliver, hold back or drop."""
        standing = self.fence.judge(frame.sender, frame.key.epoch)
        early = standing is Standing.CURRENT and frame.key != current and frame.key.outer_step >= outer_step
        if standing is Standing.CURRENT and frame.key == current:
            self._deliver(frame)
        elif (standing is Standing.FUTURE or early) and len(self._held_back) < MAX_HELD_BACK:
            self._held_back.append(frame)
            self.num_held_back += 1
        else:
            self.dropped += 1

    def holds_back(self, outer_step: int) -> bool:
        """Whether a frame of this round was too early."""
        return any(frame.key.outer_step == outer_step for frame in self._held_back)

    def again(self, current: RoundKey | None, outer_step: int) -> None:
        """The view or the round changed: look at what was held back."""
        frames, self._held_back = self._held_back, []
        for frame in frames:
            self.arrive(frame, current, outer_step)
