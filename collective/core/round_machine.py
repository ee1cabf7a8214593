# SPDX-License-Identifier: Apache-2.0
"""One member's part in one round, as a pure machine over chunk references.

A round is any collective operation. The plan (core/slices.py) gives every slice of the buffer two trees: parts go up
to the slice's root, each node adding its children's parts to its own; the root encodes the result once, and the same
bytes go down to all. An operation without reduction has no way up. This machine decides who sends what and when a chunk
is complete. It never sees a byte: the values live in the effects, so the simulator can carry chunks that are multisets
of contributors.

Rules:
* Every part is counted once. A duplicate is dropped; order does not matter.
* Credit: a member that has not opened the round gets at most `eager_chunks` frames with chunks, so what it must hold
  back is bounded. A chunk of its own proves that it has opened.
* A chunk is finished only when all members have opened the round: before that the sum of weights is not known.
* The round is finished when every member has opened it, every part was handed out and every chunk is in place. Sends
  may still be under way then; the shell drains them before it lets go of the buffers.
* Two members that are apart hear of each other's openings through whoever has links with both (`HandOnOpening`); the
  plan sends nothing else between them. All who can hand an opening on do: whoever hears it twice has lost nothing.
* In what order a link sends results and parts is its own business.
* No time in here. Whoever moves the bytes sees who stands still, and asks `needs()` whom that concerns.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

from isthmus.collective.core.apart import NO_PAIR, Apart, apart_from, are_apart
from isthmus.collective.core.member_part import part_of
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
from isthmus.collective.core.slices import NOBODY, SlicePlan
from isthmus.collective.core.types import RoundKey


class RoundMachine:
    """See the module.

    Args:
        key: name of the round, for whoever reads a story of it.
        rank: our place in the view.
        slices: the plan; the same on all members.
        eager_chunks: how many chunks a member may get before it has opened the round, from 0 up.
        apart: pairs of ranks without a link, the same on all members; see core/apart.py.
    """

    def __init__(
        self,
        *,
        key: RoundKey,
        rank: int,
        slices: SlicePlan,
        eager_chunks: int,
        apart: Apart = NO_PAIR,
    ) -> None:
        world_size = slices.world_size
        if not 0 <= rank < world_size or eager_chunks < 0:
            raise ValueError(f"rank {rank} of {world_size}, {eager_chunks} eager chunks")
        self.key = key
        self.rank = rank
        self.slices = slices
        self.finished = False
        part = part_of(slices, rank)
        self._eager_chunks = eager_chunks
        self._others = tuple(other for other in range(world_size) if other != rank)
        self._apart = apart
        self._unlinked = apart_from(apart, rank)
        self._between = [
            () if other in self._unlinked else tuple(sorted(apart_from(apart, other) - self._unlinked - {rank}))
            for other in range(world_size)
        ]
        self._handed_on = sum(
            1 << other for other, hearers in enumerate(self._between) if hearers
        )  # bit r: r's opening
        self._opened = [other == rank for other in range(world_size)]
        self.num_unopened = len(self._others)
        """Members that are not known to have posted the round."""
        self._untold = sum(1 << other for other in self._others)  # bit r: the OPEN of rank r itself is not here yet
        self._sent_early = [0] * world_size
        self._waiting: list[list[SendPart | SendResult]] = [[] for _ in range(world_size)]
        self._is_handed_up = bytearray(slices.num_chunks)
        self._is_done = bytearray(slices.num_chunks)  # the result is in place here
        self._slice_of = part.slice_of
        self._route_of = part.route_of
        self._children_up = part.children_up
        self._children_down = part.children_down
        self._missing = list(part.missing)
        self._missing_parts = list(part.missing_parts)
        self._missing_results = list(part.missing_results)

    # -------------------------------------------------------------------------------- in and out

    def start(self) -> Sequence[RoundEffect]:
        """Open the round towards everybody and send what the credit allows. Call once, before any event."""
        effects: list[RoundEffect] = [SendOpen(other) for other in self._others if other not in self._unlinked]
        for chunk in range(self.slices.num_chunks):
            if not self._missing[chunk]:
                self._go_on(chunk, effects)
        self._finish_if_complete(effects)
        return effects

    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        """Take one fact, return the orders that follow, to be carried out in this order.

        Raises:
            ChunkRefused: the member named in it sent something outside the plan. The machine is unchanged.
        """
        effects: list[RoundEffect] = []
        match event:
            case PartArrived(rank=rank, chunk=chunk):
                self._on_part(rank, chunk, effects)
            case ResultArrived(rank=rank, chunk=chunk):
                self._on_result(rank, chunk, effects)
            case PeerOpened(rank=rank):
                self._check_member(rank)
                self._on_open(rank, effects)
            case LinkRenewed(rank=rank):
                self._check_member(rank)
                self._on_link_renewed(rank, effects)
            case _:
                assert_never(event)
        self._finish_if_complete(effects)
        return effects

    # -------------------------------------------------------------------------------- questions

    def needs(self, rank: int) -> bool:
        """Whether we cannot finish without hearing more from this member."""
        if rank == self.rank:
            return False
        is_awaited = not self._opened[rank] or self._must_hear >> rank & 1 == 1
        return is_awaited or self._missing_parts[rank] > 0 or self._missing_results[rank] > 0

    def hears_through(self, rank: int) -> bool:
        """Whether this member may still have to tell us that one has come with which we have no link.

        Nothing of its own need be missing, so `waiting_for` does not name it. But what it told may be lost with a link.
        """
        return any(not self._opened[other] and self.hears_of(other, via=rank) for other in self._unlinked)

    def num_missing(self, rank: int) -> int:
        """Chunks that this member still has to send us."""
        return self._missing_parts[rank] + self._missing_results[rank]

    def missing_from(self, rank: int) -> Iterator[tuple[int, bool]]:
        """The same one by one: each chunk, and whether it is a result."""
        for slice_, route in enumerate(self.slices.routes):
            for chunk in self.slices.chunks_of(slice_):
                if self._missing[chunk] >> rank & 1:
                    yield chunk, False
                if route.down[self.rank] == rank and not self._is_done[chunk]:
                    yield chunk, True

    @property
    def _must_hear(self) -> int:
        """Bit r: a chunk of rank r does not do, we need its opening, to hand it on."""
        return self._untold & self._handed_on

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks from which an opening, a part or a result is still missing."""
        return tuple(other for other in self._others if self.needs(other))

    def has_opened(self, rank: int) -> bool:
        """Whether this member is known to have posted the round."""
        return self._opened[rank]

    def owes_own_parts(self, rank: int) -> bool:
        """Whether it owes something that depends on nobody else: parts that it need not add to, or its own data."""
        if not self._missing_parts[rank] and not self._missing_results[rank]:
            return False
        for slice_, route in enumerate(self.slices.routes):
            is_leaf = route.up[rank] == self.rank and rank not in route.up
            gives_own = route.root == rank and route.down[self.rank] == rank and not route.is_reduced
            chunks = self.slices.chunks_of(slice_)
            if is_leaf and any(self._missing[chunk] >> rank & 1 for chunk in chunks):
                return True
            if gives_own and any(not self._is_done[chunk] for chunk in chunks):
                return True
        return False

    def adds_for(self, rank: int, chunk: int) -> bool:
        """Whether `rank` sends us sums of several parts for this chunk, which are weighted already."""
        return rank in self._route_of[chunk].up

    def is_into_root(self, rank: int, chunk: int) -> bool:
        """Whether what this member sends up for this chunk goes straight to the root."""
        route = self._route_of[chunk]
        return route.up[rank] == route.root

    def sends_own_part(self, chunk: int) -> bool:
        """Whether what we send up for this chunk is our own part alone."""
        return not self._children_up[self._slice_of[chunk]]

    def wants_result(self, rank: int, chunk: int) -> bool:
        """Whether this result would be installed. False for what is not this member's to give and for duplicates."""
        route = self._route_of[chunk]
        is_due = route.up[self.rank] == NOBODY or self._is_handed_up[chunk] == 1
        return route.down[self.rank] == rank and is_due and not self._is_done[chunk]

    def wants_part(self, rank: int, chunk: int) -> bool:
        """Whether this part would be added. False for what is not for us to add and for duplicates."""
        return self._route_of[chunk].up[rank] == self.rank and self._missing[chunk] >> rank & 1 == 1

    def between(self, rank: int) -> tuple[int, ...]:
        """Who hears from us of this member, since the two have no link, and we have one with each."""
        return self._between[rank]

    def hears_of(self, rank: int, *, via: int) -> bool:
        """Whether `via` may tell us of this member, since we have no link with it, and `via` has one with both."""
        return rank in self._unlinked and via not in self._unlinked and not are_apart(self._apart, rank, via)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        missing_parts = [0] * self.slices.world_size
        missing_results = [0] * self.slices.world_size
        for chunk in range(self.slices.num_chunks):
            route = self._route_of[chunk]
            for child in self._children_up[self._slice_of[chunk]]:
                missing_parts[child] += self._missing[chunk] >> child & 1
            giver = self.rank if route.root == self.rank else route.down[self.rank]
            missing_results[giver] += not self._is_done[chunk]
            if self._is_done[chunk]:
                assert not self._missing[chunk]
            if self._is_handed_up[chunk]:
                assert not self._missing[chunk]
                assert route.up[self.rank] != NOBODY
            # A result cannot exist before our part of it was handed up.
            if self._is_done[chunk] and route.up[self.rank] != NOBODY:
                assert self._is_handed_up[chunk]
        assert missing_parts == self._missing_parts
        assert missing_results == self._missing_results
        assert self.num_unopened == self._opened.count(False)
        for other in self._others:
            assert self._opened[other] or self._sent_early[other] <= self._eager_chunks
            assert not (self._opened[other] and self._waiting[other])
        is_complete = not self._missing_results[self.rank] and not self.waiting_for()
        assert self.finished == (is_complete and not self._must_hear)

    # -------------------------------------------------------------------------------- transitions

    def _on_part(self, rank: int, chunk: int, effects: list[RoundEffect]) -> None:
        self._check_member(rank, chunk)
        if self._route_of[chunk].up[rank] != self.rank:
            raise ChunkRefused(rank, chunk, "part that is not for us to add")
        self._open(rank, effects)
        bit = 1 << rank
        if not self._missing[chunk] & bit:
            return
        self._missing[chunk] ^= bit
        self._missing_parts[rank] -= 1
        effects.append(Accumulate(chunk, rank))
        if not self._missing[chunk]:
            self._go_on(chunk, effects)

    def _on_result(self, rank: int, chunk: int, effects: list[RoundEffect]) -> None:
        self._check_member(rank, chunk)
        route = self._route_of[chunk]
        if route.down[self.rank] != rank:
            raise ChunkRefused(rank, chunk, "result of a chunk that its sender does not give us")
        if route.up[self.rank] != NOBODY and not self._is_handed_up[chunk]:
            raise ChunkRefused(rank, chunk, "result of a chunk before our part to it")
        self._open(rank, effects)
        if self._is_done[chunk]:
            return
        self._is_done[chunk] = 1
        self._missing_results[rank] -= 1
        effects.append(InstallResult(chunk))
        self._hand_down(chunk, effects)

    def _on_open(self, rank: int, effects: list[RoundEffect]) -> None:
        if not self._untold >> rank & 1:
            return
        self._open(rank, effects)
        self._untold ^= 1 << rank
        effects += [HandOnOpening(to=other, of=rank) for other in self.between(rank)]

    def _on_link_renewed(self, rank: int, effects: list[RoundEffect]) -> None:
        effects.append(SendOpen(rank))
        effects += [HandOnOpening(to=rank, of=other) for other in self.between(rank) if not self._untold >> other & 1]
        orders: list[SendPart | SendResult] = []
        for chunk in range(self.slices.num_chunks):
            route = self._route_of[chunk]
            if self._is_handed_up[chunk] and route.up[self.rank] == rank and not self._is_done[chunk]:
                orders.append(SendPart(rank, chunk))
            if self._is_done[chunk] and route.down[rank] == self.rank:
                orders.append(SendResult(rank, chunk))
        not_sent_yet = set(self._waiting[rank])
        effects += [order for order in orders if order not in not_sent_yet]

    def _open(self, rank: int, effects: list[RoundEffect]) -> None:
        """An OPEN says it, and so does any frame with a chunk."""
        if self._opened[rank]:
            return
        self._opened[rank] = True
        self.num_unopened -= 1
        waiting, self._waiting[rank] = self._waiting[rank], []
        effects.extend(waiting)
        if not self.num_unopened:
            for slice_, route in enumerate(self.slices.routes):
                if route.root == self.rank and route.is_reduced:
                    for chunk in self.slices.chunks_of(slice_):
                        if not self._missing[chunk]:
                            self._go_on(chunk, effects)

    def _go_on(self, chunk: int, effects: list[RoundEffect]) -> None:
        """All parts that come together here are in: finish the chunk, or hand the sum up."""
        route = self._route_of[chunk]
        if route.root == self.rank:
            if route.is_reduced and self.num_unopened:
                return
            self._is_done[chunk] = 1
            self._missing_results[self.rank] -= 1
            effects.append(FinishChunk(chunk))
            self._hand_down(chunk, effects)
        elif route.up[self.rank] != NOBODY:
            self._is_handed_up[chunk] = 1
            self._send(SendPart(route.up[self.rank], chunk), effects)

    def _hand_down(self, chunk: int, effects: list[RoundEffect]) -> None:
        for child in self._children_down[self._slice_of[chunk]]:
            self._send(SendResult(child, chunk), effects)

    def _send(self, order: SendPart | SendResult, effects: list[RoundEffect]) -> None:
        if self._opened[order.to]:
            effects.append(order)
        elif self._sent_early[order.to] < self._eager_chunks:
            self._sent_early[order.to] += 1
            effects.append(order)
        else:
            self._waiting[order.to].append(order)

    def _finish_if_complete(self, effects: list[RoundEffect]) -> None:
        if self.finished or self.num_unopened or any(self._missing_parts) or any(self._missing_results):
            return
        if self._must_hear:
            return  # somebody may not have heard of a member
        self.finished = True
        effects.append(Finished())

    def _check_member(self, rank: int, chunk: int = -1) -> None:
        if not 0 <= rank < self.slices.world_size or rank == self.rank:
            raise ChunkRefused(rank, chunk, "sender is not another member of the round")
        if not -1 <= chunk < self.slices.num_chunks:
            raise ChunkRefused(rank, chunk, "no such chunk")
