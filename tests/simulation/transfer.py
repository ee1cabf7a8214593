# SPDX-License-Identifier: Apache-2.0
"""One catch-up: ask donor after donor, receive a snapshot or replay commits, verify, give up on who falls silent."""

from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.core.events import CatchUp, CatchUpFailed, CaughtUp, Progressed
from tests.simulation.symbols import State

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode

DONOR_PATIENCE_S = 1.5
CHUNK_S = 0.25


class Transfer:
    """Carries out one `CatchUp` of a peer and ends it with one event."""

    def __init__(self, node: "PeerNode", order: CatchUp) -> None:
        self.node = node
        self.order = order
        self._attempt = -1
        self._moved_at = 0.0

    def next_donor(self) -> None:
        """Ask the next one, or fail when all were asked."""
        if self.node.transfer is not self:
            return
        self._attempt += 1
        self.node.sim.marks["transfer: asked another donor"] += self._attempt > 0
        if self._attempt >= len(self.order.donors):
            self.node.transfer = None
            self.node.sim.marks["transfer: failed"] += 1
            self.node.feed(CatchUpFailed(cause="no donor could serve"))
            return
        self._moved_at = self.node.clock.now()
        donor = self.order.donors[self._attempt].ref
        self.node.sim.bulk.ask_for_state(self.node, donor, self, self._attempt)
        self.node.later(DONOR_PATIENCE_S, "patience", self._lose_patience, self._attempt)

    def on_offer(self, donor: PeerRef, state: State | None, attempt: int) -> None:
        """The donor pinned its state and begins to send, or has nothing for us."""
        if self.node.transfer is not self or attempt != self._attempt:
            return
        if state is None or state.held.outer_step < self.order.target.outer_step:
            self.next_donor()
            return
        options, rng, mine = self.node.sim.options, self.node.sim.world.rng, self.node.state
        if mine is not None and mine.held.digest in (*state.lineage, state.held.digest):
            self.node.sim.marks["transfer: replayed commits"] += 1
            duration_s = options.replay_s * (state.held.outer_step - mine.held.outer_step)
        else:
            self.node.sim.marks["transfer: fetched a snapshot"] += 1
            duration_s = rng.uniform(*options.snapshot_s)
        self._receive(donor, state, attempt, self.node.clock.now() + duration_s)

    def _receive(self, donor: PeerRef, state: State, attempt: int, until: float) -> None:
        node = self.node
        if node.transfer is not self or attempt != self._attempt or not node.sim.bulk.still_serves(node, donor):
            return  # nothing arrives any more; patience runs out
        self._moved_at = node.clock.now()
        node.progress += 1
        node.feed(Progressed(progress=node.progress, blocked=False))
        if node.transfer is not self:
            return
        if node.clock.now() < until:
            wait_s = min(CHUNK_S, until - node.clock.now())
            node.later(wait_s, "chunk", self._receive, donor, state, attempt, until)
        elif state.held.outer_step == self.order.target.outer_step and state.held != self.order.target:
            self.node.sim.marks["transfer: not what was asked for"] += 1
            self.next_donor()  # verified, and not what was asked for
        else:
            node.transfer = None
            node.sim.checkers.caught_up(node, state)
            node.hold(state)
            node.feed(CaughtUp(held=state.held))

    def _lose_patience(self, attempt: int) -> None:
        if self.node.transfer is not self or attempt != self._attempt:
            return
        rest_s = self._moved_at + DONOR_PATIENCE_S - self.node.clock.now()
        if rest_s > 1e-6:
            self.node.later(rest_s, "patience", self._lose_patience, attempt)
        else:
            self.next_donor()
