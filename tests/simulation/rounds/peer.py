# SPDX-License-Identifier: Apache-2.0
"""One simulated site: its process, the gate for frames, and a caller who keeps some operations in flight.

Stands in for collective's engine.py, mesh.py and communicator.py. While it is paused (SIGSTOP) whatever happens to it
waits; frames wait in its kernel. A crash takes everything, at any effect of any machine.
"""

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.types import Incarnation, PeerId, PeerRef, RoundKey, View
from tests.simulation.rounds.bundle import Bundle, Notice
from tests.simulation.rounds.operation import Operation
from tests.simulation.rounds.options import BROKEN_LOOK_S, INSTALL_GRACE_S, LOOK_S, SIGN_EVERY_S
from tests.simulation.rounds.stash import Stashes
from tests.simulation.rounds.values import ABORT, ENDED, Frame

if TYPE_CHECKING:
    from tests.simulation.rounds.simulator import RoundSimulator


class CrashedError(Exception):
    """The process is gone in the middle of what it did."""


class Peer:
    """See the module."""

    def __init__(self, sim: "RoundSimulator", peer_id: PeerId) -> None:
        self.sim, self.peer_id = sim, peer_id
        self.world, self.network, self.options, self.parts = sim.world, sim.network, sim.options, sim.parts
        self.checker, self.check_machines = sim.checker, sim.check_machines
        self.is_hidden = int(peer_id, 16) <= sim.options.num_hidden
        self.incarnation = self.start_number = 0
        self.ref = PeerRef(peer_id, Incarnation(0))
        self.alive = self.died_silently = False
        self.paused_until = self.paused_since = 0.0
        self.resumed_at = -1.0
        self.jammed_until = self.jammed_since = -math.inf
        self.fence = Fence.before_any_view()
        self.view: View | None = None
        self.step = -1
        self.rounds: dict[RoundKey, Operation] = {}
        self.bundles: dict[PeerRef, Bundle] = {}

    @property
    def name(self) -> str:
        return f"{self.peer_id[-2:]}.{self.incarnation}"

    def is_hidden_from(self, other: "Peer") -> bool:
        """Whether neither of the two can dial the other."""
        return self.is_hidden and other.is_hidden

    @property
    def is_paused(self) -> bool:
        return self.world.now < self.paused_until

    # ------------------------------------------------------------------------ the process

    def start(self) -> None:
        """A new process, which asks the server to be let in."""
        if self.alive:
            return
        self.incarnation += 1
        self.ref = PeerRef(self.peer_id, Incarnation(self.incarnation))
        self.start_number += 1
        self.alive, self.died_silently = True, False
        self.paused_until, self.resumed_at, self.jammed_until = 0.0, -1.0, -math.inf
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.fence = Fence.before_any_view()
        self.view = None
        self.step = -1
        self.rounds = {}
        self.bundles = {}
        self._ended: set[RoundKey] = set()
        self._num_spent = 0  # rounds of this view that have failed with credit that was not given back
        self._stashes = Stashes(drops_older_epochs=self.parts.drops_older_epochs)
        self._results: set[int] = set()
        self._look_due: float | None = None
        self._asked_at = self._signed_at = self._installed_at = 0.0
        self._tick_s = LOOK_S
        self.world.say(self.name, "starts")
        self.later(0.0, "join", self._ask_to_join, self.fence.epoch)

    def crash(self, *, silently: bool) -> None:
        """Killed (its host answers for it), or its whole machine is gone (nobody does)."""
        if self.alive:
            self.world.say(self.name, "crashes", "silently" if silently else "")
            self.alive, self.died_silently = False, silently
            self.start_number += 1
            self.rounds = {}
            self.paused_until = 0.0
            self.network.process_gone(self.peer_id, silently=silently)

    def maybe_crash(self) -> None:
        """Called between any two effects. Raises CrashedError."""
        if self.network.chance(self.options.crash_per_effect):
            self.crash(silently=self.world.rng.random() < self.options.silent_death)
            self.sim.faults.restart_later(self)
            raise CrashedError

    def pause(self, duration_s: float) -> None:
        self.world.say(self.name, f"is stopped for {duration_s:.2f} s")
        if not self.is_paused:
            self.paused_since = self.world.now
        self.paused_until = max(self.paused_until, self.world.now + duration_s)
        self.world.after(duration_s, "resume", self.resume)

    @property
    def is_jammed(self) -> bool:
        """Whether its chunks wait, and all else goes on."""
        return self.world.now < self.jammed_until

    def jam(self, duration_s: float) -> None:
        self.world.say(self.name, f"sends no chunk for {duration_s:.2f} s")
        if not self.is_jammed:
            self.jammed_since = self.world.now
        self.jammed_until = max(self.jammed_until, self.world.now + duration_s)
        self.world.after(duration_s, "unjam", self.unjam)

    def unjam(self) -> None:
        if self.alive and not self.is_jammed:
            for bundle in tuple(self.bundles.values()):
                self.run(self.start_number, bundle.pump)

    def resume(self) -> None:
        if not self.alive or self.is_paused or self.paused_until <= self.resumed_at:
            return
        self.resumed_at = self.world.now
        self.paused_until = self.world.now
        # Sockets and timers are all due at once: which come first is chance.
        timers_first = self.world.rng.random() < 0.5
        if not timers_first:
            self.network.look_again(self.peer_id)
        backlog, self._backlog = self._backlog, []
        start = self.start_number
        for action, args in backlog:
            self.run(start, action, *args)
        if timers_first:
            self.network.look_again(self.peer_id)
        for bundle in tuple(self.bundles.values()):
            self.run(start, bundle.pump)

    def run(self, start: int, action: Callable[..., None], *args: Any) -> None:
        """Do something in this process, if it is still the same one; later, if it is stopped."""
        if start != self.start_number or not self.alive:
            return
        if self.is_paused:
            self._backlog.append((action, args))
            return
        with contextlib.suppress(CrashedError):
            action(*args)

    def later(self, delay_s: float, label: str, action: Callable[..., None], *args: Any) -> None:
        """A timer of this process."""
        self.world.after(delay_s, label, self.run, self.start_number, action, *args)

    # ------------------------------------------------------------------------ as the server's client

    def on_view(self, view: View, step: int) -> None:
        """Install it: rounds of older views end, links to members that stay are kept."""
        if view.epoch <= self.fence.epoch:
            return
        for operation in tuple(self.rounds.values()):
            operation.fail("a newer view was installed", ())
        former = {member.ref for member in self.view.members} if self.view is not None else set()
        members = {member.ref for member in view.members}
        for ref in tuple(self.bundles):
            if ref not in members and ref in former:
                self.bundles.pop(ref).close()
        self.fence, self.view = Fence.of(view), view
        self._installed_at = self.world.now
        self._ended = set()
        self._num_spent = 0
        self._stashes.drop_before(view.epoch)
        if self.ref not in members:
            self.later(self.world.rng.uniform(0.2, 1.0), "ask to join", self._ask_to_join, view.epoch)
            return
        for ref in sorted(members - {self.ref}):
            if self.is_hidden_from(self.sim.peers[ref.peer_id]):
                continue
            bundle = self.bundles.setdefault(ref, Bundle(self, ref))
            if bundle.is_dialler:
                bundle.repair()
        self._begin(step)

    def on_commit(self, epoch: int, step: int) -> None:
        """All members have the results of this step."""
        if epoch == self.fence.epoch and step == self.step:
            self._begin(step + 1)

    def _ask_to_join(self, epoch: int) -> None:
        if epoch == self.fence.epoch:
            self.sim.server.hear(self, "join")

    # ------------------------------------------------------------------------ the caller

    def _begin(self, step: int) -> None:
        """Post all operations of a step, each in its time."""
        assert self.view is not None
        self.step = step
        self._results = set()
        for fragment in range(self.options.num_operations):
            delay_s = self.world.rng.uniform(*self.options.compute_s)
            self.later(delay_s, "post", self._post, RoundKey(self.view.epoch, step, fragment))  # type: ignore[arg-type]

    def _post(self, key: RoundKey) -> None:
        if key.epoch != self.fence.epoch or key.outer_step != self.step or self.view is None:
            return
        plan = self.sim.plan_of(self.view, key.fragment)
        num_ahead = sum(other.spends_credit for other in self.rounds.values()) + self._num_spent
        eager_chunks = self.options.eager_chunks if num_ahead < self.options.max_rounds_ahead else 0
        operation = self.rounds[key] = self.parts.operation(self, self.view, key, plan, eager_chunks)
        self.checker.posted(operation)
        operation.start()
        for member in self.view.members:
            for frame in self._stashes.take(member.ref, key):
                if not operation.is_done:
                    self._deliver(operation, frame)
        self._arm_look(LOOK_S)

    def cancel_something(self) -> None:
        """The caller gives an operation up, and reports that it has nothing."""
        if self.rounds:
            self.world.rng.choice(list(self.rounds.values())).give_up("cancelled by its caller", ())

    def operation_done(self, operation: Operation) -> None:
        self._close(operation)
        self.checker.ended(operation)
        self._results.add(operation.key.fragment)
        if len(self._results) == self.options.num_operations:
            self.sim.server.hear(self, "done", operation.key.epoch, operation.key.outer_step)

    def operation_failed(self, operation: Operation, suspects: tuple[str, ...]) -> None:
        self._close(operation)
        if operation.error != "a newer view was installed":
            self.sim.server.hear(self, "failed", operation.key.epoch, suspects)

    def _close(self, operation: Operation) -> None:
        if self.rounds.pop(operation.key, None) is not None and operation.key.epoch == self.fence.epoch:
            self._ended.add(operation.key)
            # Others still hold its chunks back: what they were lent with them is not free for another round.
            self._num_spent += operation.spends_credit and self.parts.keeps_spent_credit

    # ------------------------------------------------------------------------ the engine

    def on_frame(self, bundle: Bundle, frame: Frame) -> None:
        if frame.kind == ENDED:
            for key in frame.ended:
                self._on_ended(bundle, frame.sender, key)
            return
        assert frame.key is not None
        standing = self.parts.judge(self.fence, frame.sender, frame.key.epoch)
        if standing is Standing.STALE:
            return
        if frame.key in self._ended:
            return
        operation = self.parts.find_round(self.rounds, frame.key)
        if standing is Standing.CURRENT and operation is not None:
            self._deliver(operation, frame)
        else:
            self._stashes.put(frame)
            self.checker.held_back(self, frame.sender, self._stashes.of(frame.sender))

    def _deliver(self, operation: Operation, frame: Frame) -> None:
        rank = operation.view.rank_of(frame.sender.peer_id)
        if rank is not None:
            operation.on_frame(rank, frame)

    def bundle_for_dial_from(self, ref: PeerRef) -> Bundle | None:
        """Take a connection, also from a peer that no view has named to us yet."""
        members = self.view.members if self.view is not None else ()
        if any(member.peer_id == ref.peer_id and ref.incarnation < member.incarnation for member in members):
            return None
        return self.bundles.setdefault(ref, Bundle(self, ref))

    def on_broken(self, bundle: Bundle, *, is_their_fault: bool) -> None:
        for operation, rank in self._rounds_with(bundle):
            operation.on_broken(rank, is_their_fault=is_their_fault)
        if self.wants(bundle):
            bundle.repair()
            self.look_now()

    def on_renewed(self, bundle: Bundle) -> None:
        for operation, rank in self._rounds_with(bundle):
            operation.on_renewed(rank)
        if self._ended and self.parts.tells_ended:
            bundle.notices.append(Notice(Frame(ENDED, self.ref, ended=tuple(sorted(self._ended)))))

    def _on_ended(self, bundle: Bundle, sender: PeerRef, key: RoundKey) -> None:
        """A round has ended at a member, and what it sent of it may have been lost: as if it had given up."""
        operation = self.rounds.get(key)
        rank = operation.view.rank_of(sender.peer_id) if operation is not None else None
        if operation is not None and rank is not None and operation.bundles[rank] is bundle:
            operation.on_ended(rank)
        elif operation is None:
            self.on_frame(bundle, Frame(ABORT, sender, key))

    def wants(self, bundle: Bundle) -> bool:
        """Whether anything that runs needs this connection."""
        is_new = self.world.now < self._installed_at + INSTALL_GRACE_S and self.view is not None
        if is_new and self.view.holds(bundle.ref):  # type: ignore[union-attr] # there is one
            return True
        return any(operation.concerns(rank) for operation, rank in self._rounds_with(bundle))

    def _rounds_with(self, bundle: Bundle) -> list[tuple[Operation, int]]:
        return [
            (operation, rank)
            for operation in self.rounds.values()
            for rank, other in enumerate(operation.bundles)
            if other is bundle and not operation.is_done
        ]

    # ------------------------------------------------------------------------ supervision

    def look_now(self) -> None:
        """Something changed that the supervision should see."""
        self._arm_look(0.0)

    def _arm_look(self, tick_s: float) -> None:
        due = self.world.now + tick_s
        if self._look_due is not None and self._look_due <= due:
            return
        self._look_due, self._asked_at, self._tick_s = due, self.world.now, tick_s
        self.later(tick_s, "look", self._look, due)

    def _look(self, due: float) -> None:
        if self._look_due != due:
            return
        self._look_due = None
        now = self.world.now
        late_s = max(0.0, now - self._asked_at - self._tick_s)
        if now - self._signed_at >= SIGN_EVERY_S and self.rounds:
            self._signed_at = now
            for ref in sorted({bundle.ref for item in self.rounds.values() for bundle in item.bundles if bundle}):
                self.parts.sign(self.bundles[ref])
        is_broken = False
        for operation in tuple(self.rounds.values()):
            if not operation.is_done:
                is_broken |= operation.look(late_s)
                self.checker.looked(operation)
        if self.rounds:
            self._arm_look(BROKEN_LOOK_S if is_broken else LOOK_S)
