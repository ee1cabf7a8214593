# SPDX-License-Identifier: Apache-2.0
"""What must never happen in the collective layer, and what must. Keeps its own books and asks no machine.

I2 a result holds each member of its round once, with its weight, and is the same on all that have it; nothing of
   another key, epoch or chunk is ever counted.
I4 an operation ends; who hangs or is cut off is suspected in time, and nobody is blamed for the silence of a third.
I9 what a peer must hold back is bounded.
"""

import math
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from isthmus.collective.core.types import PeerRef, RoundKey, View
from tests.simulation.network import pair_of
from tests.simulation.rounds.options import FIRST_CONTACT_S, KEEPALIVE_S, LOOK_S, REDIAL_S, SILENCE_S
from tests.simulation.rounds.values import PART, RESULT, Frame, Result, Value, weight_of
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.rounds.operation import Operation
    from tests.simulation.rounds.peer import Peer
    from tests.simulation.rounds.simulator import RoundSimulator

MARGIN_S = 2 * LOOK_S + 0.4
"""Between a limit and the look that finds it passed."""
CUT_IS_FOUND_S = max(SILENCE_S, KEEPALIVE_S[1]) + REDIAL_S + FIRST_CONTACT_S + MARGIN_S
LIVENESS_S = 25.0
NUM_LIVE_COMMITS = 2


class RoundChecker:
    """See the module."""

    def __init__(self, sim: "RoundSimulator") -> None:
        self.sim = sim
        self.counters: Counter[str] = Counter()
        self.blames: list[set[str]] = []
        """Whom peers have suspected by what they saw themselves, one after another."""
        self._num_makings = 0
        self._results: dict[RoundKey, dict[int, int]] = {}
        self._holders: set[tuple[RoundKey, PeerRef]] = set()

    def _fail(self, invariant: str, operation: "Operation", what: str) -> NoReturn:
        raise Violation(invariant, f"{operation.name}: {what}")

    # ------------------------------------------------------------------------ I2

    def posted(self, operation: "Operation") -> None:
        self.counters["operations"] += 1

    def counted(self, operation: "Operation", chunk: int, before: Value, arrived: Value) -> None:
        """`arrived` is about to be added to `before`."""
        if isinstance(arrived, Result) or isinstance(before, Result) or not arrived:
            self._fail("I2", operation, f"adds {arrived} to {before} in chunk {chunk}")
        known = {part.ref for part in before}
        for part in arrived:
            if part.key != operation.key or part.chunk != chunk:
                self._fail("I2", operation, f"counts {part} in chunk {chunk}")
            if part.ref in known:
                self._fail("I2", operation, f"counts {part} twice")
            known.add(part.ref)

    def new_making(self) -> int:
        """A number for a result that is being made."""
        self._num_makings += 1
        return self._num_makings

    def installed(self, operation: "Operation", chunk: int, value: Value) -> None:
        self._check_result(operation, chunk, value)

    def finished(self, operation: "Operation") -> None:
        """The machine says that everything is in place."""
        for chunk in range(operation.plan.num_chunks):
            self._check_result(operation, chunk, operation.memory.get(chunk, ()))
        self.counters["finished"] += 1

    def ended(self, operation: "Operation") -> None:
        """The caller gets the results."""
        mine = {}
        for chunk in range(operation.plan.num_chunks):
            mine[chunk] = self._check_result(operation, chunk, operation.memory.get(chunk, ()))
        theirs = self._results.setdefault(operation.key, mine)
        if mine != theirs:
            self._fail("I2", operation, f"has other results than the first that ended: {mine} and {theirs}")
        self._holders.add((operation.key, operation.peer.ref))

    def committed(self, view: View, step: int) -> None:
        for fragment in range(self.sim.options.num_operations):
            key = RoundKey(view.epoch, step, fragment)  # type: ignore[arg-type] # a plain number is one
            for member in view.members:
                if (key, member.ref) not in self._holders:
                    raise Violation("I2", f"step {step} is committed without a result of {member.peer_id} in {key}")

    def _check_result(self, operation: "Operation", chunk: int, value: Value) -> int:
        """The number of its making."""
        if not isinstance(value, Result):
            self._fail("I2", operation, f"no result in the place of chunk {chunk}: {value}")
        key, view = operation.key, operation.view
        weights = {member.ref: weight_of(member.ref, key.outer_step, key.fragment) for member in view.members}
        problem = ""
        if len(value.parts) != len(weights) or {part.ref for part in value.parts} != set(weights):
            problem = "does not hold each member once"
        elif any(part.weight != weights[part.ref] for part in value.parts) or value.weight_sum != sum(weights.values()):
            problem = "has other weights"
        elif any(part.key != key or part.chunk != chunk for part in value.parts):
            problem = "is of another round or chunk"
        if problem:
            self._fail("I2", operation, f"chunk {chunk} {problem}: {value}")
        return value.making

    # ------------------------------------------------------------------------ bounds

    def held_back(self, peer: "Peer", sender: PeerRef, stash: dict[tuple[RoundKey, str, int], Frame]) -> None:
        """Something came before its round was posted."""
        self.counters["held back"] += 1
        options = self.sim.options
        chunks: Counter[RoundKey] = Counter()
        for key, kind, _ in stash:
            chunks[key] += kind in (PART, RESULT)
        who = f"{peer.name} holds back of {sender.peer_id[-2:]}"
        if max(chunks.values(), default=0) > options.eager_chunks:
            raise Violation("I9", f"{who} more than the credit of a round: {dict(chunks)}")
        if sum(chunks.values()) > options.eager_chunks * options.max_rounds_ahead:
            raise Violation("I9", f"{who} more than the credit of a view: {dict(chunks)}")

    def corrupt_found(self) -> None:
        self.counters["corrupt frames found"] += 1

    # ------------------------------------------------------------------------ I4

    def blamed(self, operation: "Operation", ranks: "Sequence[int]", cause: str) -> None:
        """A peer suspects others by what it sees itself."""
        self.counters["suspicions"] += 1
        self.blames.append({operation.view.members[rank].peer_id for rank in ranks})
        if cause == "not finished in time":
            self._fail("I4", operation, f"stuck, waits for {operation.machine.waiting_for()}")
        for rank in ranks:
            other = self.sim.peers[operation.view.members[rank].peer_id]
            # The side that waits cannot dial, and the other one does not before it has a round that needs it.
            idle_until = operation.seen_open_at.get(rank, math.inf) + REDIAL_S + FIRST_CONTACT_S
            is_idle = cause == "connection lost" and self.sim.world.now < idle_until
            self.counters["idle members blamed"] += is_idle
            if not is_idle and not self._has_excuse(operation, other):
                self._fail("I4", operation, f"blames {other.name}, with which nothing is wrong: {cause}")

    def looked(self, operation: "Operation") -> None:
        """A peer has just looked who stands still, and still runs this."""
        if operation.is_done or operation.num_paused_s > 0:
            return
        now, network = self.sim.world.now, self.sim.network
        for rank in operation.machine.waiting_for():
            bundle = operation.bundles[rank]
            if not operation.machine.has_opened(rank) or bundle is None:
                continue  # of who has no link with us a third member tells
            other = self.sim.peers[operation.view.members[rank].peer_id]
            hung_s = now - max(other.paused_since, operation.posted_at) if other.is_paused else 0.0
            if hung_s > SILENCE_S + MARGIN_S:
                self._fail("I4", operation, f"does not notice that {other.name} hangs")
            since = max(other.jammed_since, operation.posted_at, bundle.moved_at)
            jammed_s = now - since if other.is_jammed else 0.0
            if jammed_s > SILENCE_S + MARGIN_S and operation.machine.owes_own_parts(rank):
                self._fail("I4", operation, f"does not notice that {other.name} sends nothing that is needed")
            cut_since = network.broken_since(operation.peer.peer_id, other.peer_id)
            if cut_since is not None and now - max(cut_since, operation.posted_at) > CUT_IS_FOUND_S:
                self._fail("I4", operation, f"does not notice that {other.name} is cut off")

    def at_rest(self) -> None:
        """All faults have ended and the steps go on: nothing of an older view may still be under way."""
        for peer in self.sim.peers.values():
            for operation in peer.rounds.values():
                if operation.key.epoch != self.sim.server.view.epoch:
                    self._fail("I4", operation, "is still under way")

    def _has_excuse(self, operation: "Operation", other: "Peer") -> bool:
        """Whether something is or was just wrong with this member, or between the two."""
        now, me = self.sim.world.now, operation.peer
        since = now - SILENCE_S - FIRST_CONTACT_S - MARGIN_S
        member = operation.view.members[operation.view.rank_of(other.peer_id) or 0]
        network = self.sim.network
        return (
            not other.alive
            or other.ref != member.ref
            or other.is_paused
            or other.resumed_at >= since
            or max(me.jammed_until, other.jammed_until) >= since
            or network.is_broken(me.peer_id, other.peer_id)
            or network.fault_at.get(pair_of(me.peer_id, other.peer_id), -1.0) >= since
            or self.sim.server.view.epoch > operation.key.epoch
        )
