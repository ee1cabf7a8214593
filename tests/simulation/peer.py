# SPDX-License-Identifier: Apache-2.0
"""One simulated peer: the real member machine, and a symbolic trainer, replica and donor around it.

A `PeerNode` is a site; each start of its process has a fresh machine, and everything but the disk is gone after a
crash. Effects are carried out in list order. While it is paused (SIGSTOP), whatever happens to it waits.
"""

from random import Random
from typing import TYPE_CHECKING, assert_never

from isthmus.collective.core.fence import Fence
from isthmus.collective.core.types import Incarnation, Instant, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.config import MemberConfig
from isthmus.elastic.core.events import (
    AbortExchange,
    BecomeActive,
    BecomeExcused,
    BecomeLearner,
    CarryOver,
    CatchUp,
    CaughtUp,
    CoordinatorSaid,
    ExchangeDone,
    ExchangeFailed,
    Finish,
    FoundState,
    InstallStaged,
    InstallView,
    KeepCertificate,
    LeaveRequested,
    LinkMade,
    MakeLinks,
    MemberEffect,
    MemberEvent,
    Progressed,
    SendToCoordinator,
    StartExchange,
    TakeLeases,
    Tick,
)
from isthmus.elastic.core.exit_codes import LEFT
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import CoordinatorMessage, Evicted, Held, RoundFailed, Vote
from tests.simulation.disk import Disk
from tests.simulation.exchange import Exchange, Frame
from tests.simulation.methods import Met, common, met_by, pairs_in, rounds_of
from tests.simulation.process import Process
from tests.simulation.symbols import Payload, Result, State, first_state
from tests.simulation.transfer import Transfer
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.network import ControlConnection
    from tests.simulation.simulator import Simulator


class PeerNode(Process):
    """One site."""

    def __init__(self, sim: "Simulator", peer_id: str) -> None:
        super().__init__(sim.world, peer_id)
        self.sim = sim
        self.peer_id = PeerId(peer_id)
        self.incarnation = 0
        self.ref = PeerRef(self.peer_id, Incarnation(0))
        self.hung = False  # the trainer stands still, the daemon goes on
        self.undialled_by: frozenset[str] = frozenset()
        """Who cannot dial this start: what it advertises reaches them not."""
        self.next_undialled_by: frozenset[str] = frozenset()
        self.votes = True  # else its outer step hangs: it has results, and makes nothing of them
        self.is_leaving = False  # it was asked to go
        self.died_silently = False  # nobody answers in its place
        self.flawed_step = -1  # in this round it computes other bits than the rest
        self.exit: Finish | None = None
        self.disk = Disk(sim.world, sim.options)
        self.disk_certificate: Certificate | None = None
        self.proof: Certificate | None = None  # the newest commit it has heard of (rebuilds.py)
        self.rebuilt_epoch = 0
        self.heard_epoch = 0
        self.connection: ControlConnection | None = None
        self.machine: MemberMachine | None = None
        self.state: State | None = None
        self.staged: tuple[RoundKey, State, Result, Met] | None = None
        self.voted: RoundKey | None = None
        self.exchange: Exchange | None = None
        self.moments = sim.options.warm_up_rounds + 1  # rounds that its inner optimizer has behind it

    @property
    def size(self) -> float:
        """How large the numbers of its newest round are: the mean learning rate of that round, while it warms up."""
        rounds = self.sim.options.warm_up_rounds
        return min(1.0, (self.moments - 0.5) / rounds) if rounds else 1.0

    @property
    def is_up(self) -> bool:
        """Its process exists and its part is not over."""
        return self.alive and self.exit is None

    def work_of(self, ref: PeerRef) -> int | None:
        """Inner steps of that start; None if it is not the one that runs."""
        return self.inner_steps if self.alive and self.ref == ref else None

    # ------------------------------------------------------------------------ the process

    def leave(self, *, now: bool) -> None:
        """Somebody asks this start to go; it hears that when it is awake."""
        self.is_leaving = True
        self.run(self.start_number, self.feed, LeaveRequested(now=now))

    def start(self) -> None:
        """A new process, with what is on the disk."""
        if self.alive:
            return
        self.born()
        self.incarnation = self.sim.number_of_new_start(self)
        self.ref = PeerRef(self.peer_id, Incarnation(self.incarnation))
        self.exit, self.hung, self.died_silently = None, False, False
        undialled_by, self.next_undialled_by = self.next_undialled_by, frozenset()
        self.undialled_by = frozenset() if self.sim.network.healed else undialled_by
        self.votes, self.is_leaving = True, False
        self._unabsorbed: tuple[RoundKey, Result] | None = None
        self.connection = None
        self.state = self.disk.state
        self.staged = self.exchange = None
        self.gate = self.sim.parts.gate(self._on_frame)
        self.worker = self.sim.parts.worker(self)
        if Random(f"moments of {self.peer_id} {self.incarnation}").random() < 0.5:
            self.moments = 0  # they were not on its disk
        self.payload: Payload | None = None  # handed in
        self.progress = 0
        self.inner_steps = 0  # as it tells the coordinator: each of the course's is several of these
        self.transfer: Transfer | None = None
        manifest = b"\1" * 32 if self.sim.has_wrong_manifest(self) else self.sim.manifest
        held = self.state.held if self.state is not None else None
        config = MemberConfig(coordinator_timeout_s=600.0, farewell_timeout_s=8.0)
        self.machine = self.sim.parts.member(
            config,
            self.ref,
            f"{self.peer_id}:1",
            manifest,
            held,
            signer=self.sim.keys.of(self.peer_id),
            certificate=self.disk_certificate,
        )
        self.sim.world.say(self.peer_id, "starts as", self.incarnation, "with", short(held))
        self.sim.checkers.started(self)
        self.sim.control.dial(self)

    def copied(self) -> "PeerNode":
        """Another site with what is on this disk. It does not run yet."""
        copy = PeerNode(self.sim, self.peer_id)
        copy.incarnation, copy.disk = self.incarnation, self.disk.copied()
        copy.disk_certificate, copy.clock.rate = self.disk_certificate, self.clock.rate
        return copy

    def stop(self, why: str) -> None:
        """The process is gone, with everything but the disk."""
        if not self.alive:
            return
        self.sim.world.say(self.peer_id, why)
        self.sim.checkers.stopped(self)
        self.gone()
        self.machine = None
        self.state = self.staged = self.exchange = None

    def crash(self, *, silently: bool) -> None:
        """Killed (its host answers for it), or its whole machine is gone (nobody does)."""
        if self.alive:
            self.sim.control.peer_died(self, silently=silently)
            self.died_silently = silently
            self.sim.marks[f"disk: {self.disk.crash(power_lost=silently)}"] += 1
            self.stop("crashes silently" if silently else "crashes")

    def hang(self, hung: bool) -> None:
        """Its trainer stands still, or goes on."""
        self.hung = hung
        self.sim.checkers.hangs_or_not()

    @property
    def is_awaited(self) -> bool:
        """Whether others stand in the exchange that it has not begun."""
        is_idle = self.exchange is None and self.payload is None
        return is_idle and self.state is not None and self.gate.holds_back(self.state.held.outer_step)

    @property
    def stands_still(self) -> bool:
        """Whether the run has to go on without it, although its heart beats."""
        return self.hung or not self.votes

    def hang_absorb(self, hung: bool) -> None:
        """It makes nothing of the results that it gets, or does so again."""
        self.votes = not hung
        self.sim.checkers.hangs_or_not()
        late = self._unabsorbed
        if self.votes and late is not None:
            self._unabsorbed = None
            if self.exchange is not None and self.exchange.key == late[0]:
                self._absorb(*late)

    def on_told(self, connection: "ControlConnection", message: CoordinatorMessage) -> None:
        if connection.up_at_peer:
            self.sim.checkers.heard(self, message)
            start = self.start_number
            self.feed(CoordinatorSaid(message=message))
            if self.is_up and self.start_number == start:
                self.sim.checkers.knows(self, message)

    def on_refused(self, key: RoundKey, gone: PeerRef) -> None:
        if self.exchange is not None and self.exchange.key == key:
            self.exchange.on_gone(gone.peer_id)

    def on_link_renewed(self, peer_id: PeerId) -> None:
        if self.exchange is not None:
            self.exchange.on_link_renewed(peer_id)

    # ------------------------------------------------------------------------ the machine

    def feed(self, event: MemberEvent) -> None:
        """Hand the machine an event and carry out what it orders."""
        machine = self.machine
        if machine is None or self.exit is not None:
            return
        self.sim.checkers.feels(self, event)
        effects = machine.handle(event, self.clock.now())
        if isinstance(event, CoordinatorSaid) and isinstance(event.message, Evicted) and self.staged is not None:
            is_lost = self.voted == self.staged[0] and AbortExchange(key=self.voted) in effects
            demand(not is_lost, "I3", f"{self.peer_id} is put out, and forgets what it has voted for")
        if effects and self.sim.looks_into_machines():
            machine.check_invariants()
        start = self.start_number
        for effect in effects:
            self._carry_out(effect)
            if self.start_number != start:
                return
        if not isinstance(event, Progressed):  # the most frequent event changes no deadline
            self.arm()
            self.worker.hand_in()

    def deadline(self) -> Instant | None:
        return self.machine.next_deadline() if self.machine is not None else None

    def on_deadline(self) -> None:
        self.feed(Tick())

    def _carry_out(self, effect: MemberEffect) -> None:
        checkers = self.sim.checkers
        match effect:
            case SendToCoordinator(message=message):
                if isinstance(message, Vote):
                    self.voted = message.key
                self.sim.control.send_to_coordinator(self, message)
            case FoundState():
                self.later(self.sim.world.rng.uniform(0.1, 1.0), "found", self._found)
            case CatchUp():
                assert self.staged is None, "fetched over what is staged"
                self.transfer = Transfer(self, effect)
                self.later(0.0, "ask", self.transfer.next_donor)
            case InstallView(view=view):
                checkers.view_installed(self, view)
                assert self.staged is None, "staged in a view that is gone"
                self.exchange = None
                self.gate.fence = Fence.of(view)
            case BecomeActive(view=view):
                checkers.became_active(self, view)
                if self.worker.course is None:
                    assert self.state is not None
                    self.worker.begin(self.state)
                self.worker.go_on()
            case BecomeExcused(view=view):
                self.sim.world.say(self.peer_id, "is excused in view", view.epoch)
            case CarryOver(outer_step=outer_step):
                assert self.payload is not None
                assert self.payload.outer_step == outer_step
                checkers.carried_over(self)
                self.payload = None
                self.worker.missed()
                self.worker.go_on()
            case BecomeLearner():
                self.sim.world.say(self.peer_id, "becomes learner:", effect.reason)
                checkers.became_learner(self, effect)
                self.payload = self.exchange = None
                self.worker.stop()
            case StartExchange(view=view, key=key, weight=weight, weights=told):
                self._start_exchange(view, key, weight, told)
            case AbortExchange(key=key):
                if self.exchange is not None and self.exchange.key == key:
                    self.exchange.failed = True
                    self.exchange = None
                self.staged = None
            case InstallStaged():
                self._install(effect)
            case TakeLeases(ranges=ranges):
                self.worker.lease(ranges)
            case KeepCertificate(certificate=certificate):
                self.disk_certificate = certificate
            case MakeLinks(peers=peers):
                for member in peers:
                    self.later(self.sim.bulk.dial_s, "dial", self._dial, member.ref)
            case Finish():
                self._finish(effect)
            case _:
                assert_never(effect)

    def _dial(self, ref: PeerRef) -> None:
        """What becomes of a link with a peer that may become a member."""
        cause = self.sim.bulk.why_no_link(self, ref)
        self.feed(LinkMade(ref=ref, cause=cause))

    def _finish(self, effect: Finish) -> None:
        self.exit = effect
        self.sim.world.say(self.peer_id, "finishes with", effect.code, effect.reason)
        # Who leaves in order has its state on the disk when it is gone, however seldom that is written before.
        if self.state is not None and (self.sim.options.checkpoint_every or effect.code == LEFT):
            self.disk.write(self.state, flush=True)
        self.sim.checkers.finished(self, effect)
        self.sim.control.hang_up(self)
        self.stop("is over")
        self.sim.is_over(self)

    # ------------------------------------------------------------------------ exchange

    def _start_exchange(self, view: View, key: RoundKey, weight: float, told: tuple[float, ...]) -> None:
        assert self.payload is not None
        assert self.state is not None
        self.staged = None
        self.exchange = exchange = Exchange(self, view, key, self.payload, weight, told)
        exchange.start()
        if self.exchange is exchange:
            self.gate.again(key, self.state.held.outer_step)

    def on_frame_arrived(self, frame: Frame) -> None:
        key = self.exchange.key if self.exchange is not None else None
        self.gate.arrive(frame, key, self.state.held.outer_step if self.state is not None else 0)

    def _on_frame(self, frame: Frame) -> None:
        if self.exchange is not None and not self.exchange.failed:
            self.exchange.on_frame(frame)

    def exchange_done(self, key: RoundKey, result: Result) -> None:
        if self.votes:
            self._absorb(key, result)
        else:
            self._unabsorbed = key, result

    def _absorb(self, key: RoundKey, result: Result) -> None:
        assert self.state is not None
        assert self.exchange is not None
        flawed = self.flawed_step == key.outer_step or self.sim.network.chance(self.sim.options.wrong_result)
        flawed = flawed or self.sim.lie_of(self.peer_id) == "digest"
        flaw = f"{self.peer_id}.{key}" if flawed else ""
        rounds = rounds_of(self.sim.plan, key.outer_step + 1)
        pairs = pairs_in(rounds, self.exchange.view, key, result)
        made = self.state.after(common(rounds, pairs, result), flaw=flaw)
        self.staged = (key, made, result, met_by(self.peer_id, pairs, result))
        sizes, sums = tuple(self.exchange.sizes), self.exchange.seen_sums()
        self.sim.checkers.staged(self, key, made, result, flawed=flawed, sizes=sizes, sums=sums)
        self.progress += 1
        # The outer optimizer runs in a thread: its end is an event of its own.
        weights = self.exchange.seen_weights()
        marks = self.exchange.marks()
        is_known = self.sim.checkers.history.was_in_a_commit(self.peer_id)  # what a newcomer says would harm nobody
        if is_known and self.sim.lie_of(self.peer_id) in ("recants", "accuses", "tells"):
            others = [member.peer_id for member in self.exchange.view.members if member.peer_id != self.peer_id]
            other, lie = others[key.epoch % len(others)] if others else None, self.sim.options.lie
            suspects = () if lie != "accuses" or other is None else (other,)
            told_by = other if lie == "tells" else None
            said = RoundFailed(key=key, suspects=suspects, cause="says so, and votes", told_by=told_by)
            self.sim.control.send_to_coordinator(self, said)
        done = ExchangeDone(key=key, digest=made.held.digest, weights=weights, sizes=sizes, sums=sums, results=marks)
        self.later(0.001, "absorbed", self.feed, done)

    def exchange_failed(self, key: RoundKey, suspects: tuple[PeerId, ...], cause: str, told_by: PeerId | None) -> None:
        self.sim.world.say(self.peer_id, f"cannot finish {key.epoch}/{key.outer_step}:", cause, suspects)
        event = ExchangeFailed(key=key, suspects=suspects, cause=cause, told_by=told_by)
        self.later(0.0, "failed", self.feed, event)

    def _install(self, effect: InstallStaged) -> None:
        assert self.staged is not None
        key, made, result, met = self.staged
        assert key == effect.key
        assert self.state is not None
        self.sim.checkers.installed(self, effect, made, result)
        self.hold(made)
        self.payload = self.exchange = self.staged = None
        self.worker.committed(made, met)
        self.worker.go_on()

    def hold(self, state: State) -> None:
        """This is the shared state now."""
        self.state = state
        self.progress += 1
        every = self.sim.options.checkpoint_every
        if every and state.held.outer_step % every == 0:
            self.disk.write(state)

    def _found(self) -> None:
        state = first_state(self.ref)
        self.hold(state)
        self.sim.checkers.founded(self, state)
        self.feed(CaughtUp(held=state.held))


def short(held: Held | None) -> str:
    """A state in few letters."""
    return "nothing" if held is None else f"{held.outer_step}:{held.digest.hex()[:6]}"
