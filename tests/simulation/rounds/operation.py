# SPDX-License-Identifier: Apache-2.0
"""One operation at one peer: the real machine, and chunks that are made of parts. Stands in for
collective/rounds/running_round.py and supervision.py.

A chunk has one place in memory, as in life: a part, a sum and a result overwrite each other there, and a chunk is
encoded when a stream takes it, not when it is ordered.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from isthmus.collective.core.progress import StallLimits
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
    SendOpen,
    SendPart,
    SendResult,
)
from isthmus.collective.core.slices import SlicePlan
from isthmus.collective.core.types import RoundKey, View
from tests.simulation.rounds.bundle import Bundle, Notice
from tests.simulation.rounds.chunks import ChunkSend
from tests.simulation.rounds.options import FIRST_CONTACT_S, REDIAL_S, ROUND_S, SIGN_EVERY_S, SILENCE_S
from tests.simulation.rounds.values import ABORT, OPEN, PART, RESULT, Frame, Part, Result, Value, weight_of
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.rounds.peer import Peer

LIMITS = StallLimits(floor_s=SILENCE_S, chunk_times=0.0, ceiling_s=SILENCE_S)
MAX_FAULTS = 3


class Operation:
    """See the module."""

    def __init__(self, peer: "Peer", view: View, key: RoundKey, plan: SlicePlan, eager_chunks: int) -> None:
        rank = view.rank_of(peer.peer_id)
        assert rank is not None
        self.peer, self.view, self.key, self.plan, self.rank = peer, view, key, plan, rank
        self.eager_chunks = eager_chunks
        self.memory: dict[int, Value] = {}
        self.machine = peer.parts.machine(
            key=key, rank=rank, slices=plan, eager_chunks=eager_chunks, apart=frozenset(view.apart)
        )
        unlinked = view.apart_from(rank)
        self.bundles: list[Bundle | None] = [
            None if other in (rank, *unlinked) else peer.bundles[member.ref]
            for other, member in enumerate(view.members)
        ]
        self.is_done = False
        self.error: str | None = None
        self.posted_at = now = peer.world.now
        self.num_paused_s = 0.0
        self._weight = weight_of(peer.ref, key.outer_step, key.fragment)
        self._weights: list[float | None] = [None] * view.world_size
        self._weights[rank] = self._weight
        self._unsent: list[set[ChunkSend]] = [set() for _ in view.members]
        self._faults = [0] * view.world_size
        self._arrived: Value = ()
        self.summed: set[int] = set()
        """Chunks whose place holds a sum of this attempt, or what was made of it."""
        self._watches = {
            other: peer.parts.watch(LIMITS, now) for other, bundle in enumerate(self.bundles) if bundle is not None
        }
        self._broken_since: dict[int, float] = {}
        self.seen_open_at: dict[int, float] = {}

    def start(self) -> None:
        self._run(self.machine.start())

    # ------------------------------------------------------------------------ from the peer

    def on_frame(self, rank: int, frame: Frame) -> None:
        if self.is_done:
            return
        if frame.kind == ABORT:
            for other in self.machine.between(rank):
                self._notify(other, frame)
            self.fail(f"{self.view.members[rank].peer_id[-2:]} gave up", frame.suspects, is_ours=False)
            return
        self._take_weight(rank, frame)
        self._arrived = frame.value
        try:
            if frame.kind == OPEN:
                bundle = self.bundles[rank]
                if bundle is not None:
                    bundle.is_met = True
                effects = self.machine.handle(PeerOpened(rank))
            elif frame.kind == PART:
                effects = self.machine.handle(PartArrived(rank, frame.chunk))
            else:
                effects = self.machine.handle(ResultArrived(rank, frame.chunk))
        except ChunkRefused as error:
            raise Violation("I2", f"{self.name} got a chunk that no honest member sends: {error}") from error
        self._run(effects)

    def on_renewed(self, rank: int) -> None:
        bundle = self.bundles[rank]
        assert bundle is not None
        bundle.forget_queued(self)
        self._unsent[rank].clear()
        self._run(self.machine.handle(LinkRenewed(rank)))

    def on_ended(self, rank: int) -> None:
        """It has ended there, and a connection broke: what is still missing of that member was lost with it."""
        told = [other for other in range(self.view.world_size) if self.machine.hears_of(other, via=rank)]
        if not self.is_done and any(map(self.machine.needs, [rank, *told])):
            self.give_up(f"{self.view.members[rank].peer_id[-2:]} has ended it, and something was lost", ())

    def on_broken(self, rank: int, *, is_their_fault: bool) -> None:
        self._faults[rank] += is_their_fault
        if self._faults[rank] >= MAX_FAULTS:
            self.suspect([rank], "broke the protocol")

    def on_sent(self, send: ChunkSend) -> None:
        self._unsent[send.to].discard(send)
        self._end_if_drained()

    def frame_of(self, kind: str, chunk: int) -> Frame | None:
        """Encode now."""
        value: Value
        if kind == RESULT:
            value = self.memory[chunk]
        elif self.machine.sends_own_part(chunk):
            value = (self._own(chunk),)
        else:  # a result may have overwritten it: then nobody counts it any more, which the checker watches
            value = self.memory.get(chunk, ())
        return self._frame(kind, chunk=chunk, value=value)

    # ------------------------------------------------------------------------ supervision

    def concerns(self, rank: int) -> bool:
        """Whether it cannot end without the link to this member."""
        is_awaited = self.machine.needs(rank) or self.machine.hears_through(rank)
        return rank != self.rank and (is_awaited or bool(self._unsent[rank]))

    def owes_now(self, rank: int) -> bool:
        return bool(self._unsent[rank]) or self.machine.owes_own_parts(rank)

    def look(self, late_s: float) -> bool:
        """Suspect who is lost or stands still. Whether a connection is broken."""
        now = self.peer.world.now
        self.num_paused_s += late_s
        self._broken_since = {rank: since + late_s for rank, since in self._broken_since.items()}
        if now - self.posted_at >= ROUND_S:
            self.suspect([rank for rank in range(self.view.world_size) if self.concerns(rank)], "not finished in time")
            return False
        lost, cut_off, stalled = [], [], []
        broken_since = {}
        for rank, watch in self._watches.items():
            bundle = self.bundles[rank]
            assert bundle is not None
            if not bundle.is_whole and self.concerns(rank):
                since = broken_since[rank] = self._broken_since.get(rank, now)
                grace_s = REDIAL_S + 8 * bundle.round_trip_s if bundle.is_met else FIRST_CONTACT_S
                if (bundle.is_refused and bundle.was_connected) or now - since > grace_s:
                    lost.append(rank)
                bundle.repair()
            watch.forgive(late_s if late_s > SIGN_EVERY_S else 0.0)
            owes = self.concerns(rank) and self.machine.has_opened(rank)
            if self.machine.has_opened(rank):
                self.seen_open_at.setdefault(rank, now)
            owes_now = self.owes_now(rank)
            watch.observe(
                heard=bundle.heard,
                moved=bundle.moved,
                host_silent_s=bundle.host_silent_s(),
                chunk_s=0.0,
                owes_now=owes_now,
                now=now,
            )
            if self.concerns(rank) and watch.is_cut_off(now):
                cut_off.append(rank)
            elif watch.is_stalled(now, owes=owes):
                stalled.append(rank)
        self._broken_since = broken_since
        if lost:
            self.suspect(lost, "connection lost")
        if cut_off:
            self.suspect(cut_off, "its host does not answer")
        if stalled:
            self.suspect(stalled, "no byte moved for too long")
        return bool(broken_since)

    def suspect(self, ranks: Sequence[int], cause: str) -> None:
        """Give up because of these members, and say so to the others."""
        if not self.is_done:
            self.peer.checker.blamed(self, ranks, cause)
            self.give_up(cause, tuple(self.view.members[rank].peer_id for rank in ranks))

    def give_up(self, cause: str, suspects: tuple[str, ...]) -> None:
        """Fail, and tell the others."""
        if self.is_done:
            return
        self.fail(cause, suspects)
        for bundle in self.bundles:
            if bundle is not None:
                bundle.notices.append(Notice(self._frame(ABORT, suspects=suspects)))
                bundle.pump()

    def fail(self, cause: str, suspects: tuple[str, ...], *, is_ours: bool = True) -> None:
        """End without a result."""
        if not self.is_done:
            self.error = cause
            self.peer.world.say(self.name, "fails:", cause, suspects if is_ours else "")
            self._end()
            self.peer.operation_failed(self, suspects)

    @property
    def name(self) -> str:
        return f"{self.peer.name} {self.key.epoch}/{self.key.outer_step}/{self.key.fragment}"

    @property
    def spends_credit(self) -> bool:
        """Whether members may hold chunks of it that have not posted it."""
        return self.eager_chunks > 0 and self.machine.num_unopened > 0

    # ------------------------------------------------------------------------ effects

    def _run(self, effects: Sequence[RoundEffect]) -> None:
        touched = set()
        for effect in effects:
            if self.is_done:
                return
            self.peer.maybe_crash()
            match effect:
                case SendPart(to=to, chunk=chunk):
                    self._queue(PART, to, chunk)
                    touched.add(to)
                case SendResult(to=to, chunk=chunk):
                    self._queue(RESULT, to, chunk)
                    touched.add(to)
                case Accumulate(chunk=chunk, rank=rank):
                    self._accumulate(chunk, rank)
                case FinishChunk(chunk=chunk):
                    self._finish(chunk)
                case InstallResult(chunk=chunk):
                    self.peer.checker.installed(self, chunk, self._arrived)
                    self.memory[chunk] = self._arrived
                case SendOpen(to=to):
                    self._bundle(to).notices.append(Notice(self._frame(OPEN)))
                    touched.add(to)
                case HandOnOpening(to=to, of=of):
                    word = self._frame(OPEN)
                    self._notify(to, replace(word, sender=self.view.members[of].ref, weight=self._weights[of] or 0.0))
                case Finished():
                    self.peer.checker.finished(self)
                case _:
                    assert_never(effect)
        if self.peer.check_machines:
            self.machine.check_invariants()
        for to in touched:
            self._bundle(to).pump()
        self._end_if_drained()

    def _accumulate(self, chunk: int, rank: int) -> None:
        before: Value = self.memory[chunk] if chunk in self.summed else (self._own(chunk),)
        self.summed.add(chunk)
        self.peer.checker.counted(self, chunk, before, self._arrived)
        assert isinstance(before, tuple)
        assert isinstance(self._arrived, tuple)
        self.memory[chunk] = before + self._arrived

    def _finish(self, chunk: int) -> None:
        parts = self.memory[chunk] if chunk in self.summed else (self._own(chunk),)
        assert isinstance(parts, tuple)
        weight_sum = sum(weight for weight in self._weights if weight is not None)
        self.memory[chunk] = Result(parts, weight_sum, self.peer.checker.new_making())

    def _own(self, chunk: int) -> Part:
        return Part(self.peer.ref, self.key, chunk, self._weight)

    def _take_weight(self, rank: int, frame: Frame) -> None:
        known = self._weights[rank]
        if known is not None and known != frame.weight:
            raise Violation("I2", f"{self.name}: the weight of rank {rank} changed within a round")
        self._weights[rank] = frame.weight

    def _queue(self, kind: str, to: int, chunk: int) -> None:
        send = ChunkSend(self, kind, to, chunk)
        self._unsent[to].add(send)
        bundle = self._bundle(to)
        (bundle.results if kind == RESULT else bundle.parts).append(send)

    def _notify(self, to: int, frame: Frame) -> None:
        bundle = self._bundle(to)
        bundle.notices.append(Notice(frame))
        bundle.pump()

    def _bundle(self, rank: int) -> Bundle:
        bundle = self.bundles[rank]
        assert bundle is not None
        return bundle

    def _frame(self, kind: str, **fields: object) -> Frame:
        return Frame(kind, self.peer.ref, self.key, weight=self._weight, **fields)  # type: ignore[arg-type]

    def _end_if_drained(self) -> None:
        if self.machine.finished and not self.is_done and not any(self._unsent):
            self._end()
            self.peer.operation_done(self)

    def _end(self) -> None:
        self.is_done = True
        for bundle in self.bundles:
            if bundle is not None:
                bundle.forget_queued(self)
