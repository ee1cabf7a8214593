"""One simulated peer: the real member machine, and a symbolic trainer, replica and donor around it.

A `PeerNode` is a site; each start of its process has a fresh machine, and everything but the disk is gone after a
crash. Effects are carried out in list order. While it is paused (SIGSTOP), whatever happens to it waits.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

from collective.core.fence import Fence
from collective.core.types import Incarnation, PeerId, PeerRef, RoundKey, View
from elastic.core.certificate import Certificate
from elastic.core.config import MemberConfig
from elastic.core.events import (
    AbortExchange,
    BecomeActive,
    BecomeLearner,
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
    LeasesWanted,
    MemberEffect,
    MemberEvent,
    Progressed,
    RoundReady,
    SendToCoordinator,
    StartExchange,
    TakeLeases,
    Tick,
)
from elastic.core.leases import count, merged
from elastic.core.member import MemberMachine
from elastic.core.messages import CoordinatorMessage, Held, IndexRange
from tests.simulation.exchange import Exchange, Frame
from tests.simulation.symbols import Payload, Result, State, first_state
from tests.simulation.transfer import Transfer

if TYPE_CHECKING:
    from tests.simulation.network import ControlConnection
    from tests.simulation.simulator import Simulator

PROGRESS_S = 0.25


class PeerNode:
    """One site."""

    def __init__(self, sim: "Simulator", peer_id: str) -> None:
        self.sim = sim
        self.peer_id = PeerId(peer_id)
        self.incarnation = 0
        self.start_number = 0  # as a token: what belonged to an older start never happens
        self.alive = False
        self.paused_until = 0.0
        self.hung = False  # the trainer stands still, the daemon goes on
        self.died_silently = False  # nobody answers in its place
        self.flawed_step = -1  # in this round it computes other bits than the rest
        self.exit: Finish | None = None
        self.disk: State | None = None
        self.disk_certificate: Certificate | None = None
        self.proof: Certificate | None = None  # the newest commit it has heard of (rebuilds.py)
        self.rebuilt_epoch = 0
        self.connection: ControlConnection | None = None
        self.machine: MemberMachine | None = None
        self.state: State | None = None
        self.staged: tuple[RoundKey, State, Result] | None = None
        self.exchange: Exchange | None = None
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.peer_id, Incarnation(self.incarnation))

    @property
    def is_up(self) -> bool:
        """Its process exists and its part is not over."""
        return self.alive and self.exit is None

    # ------------------------------------------------------------------------ the process

    def start(self) -> None:
        """A new process, with what is on the disk."""
        if self.alive:
            return
        self.incarnation += 1
        self.start_number += 1
        self.alive, self.exit, self.hung, self.died_silently = True, None, False, False
        self.connection = None
        self._backlog = []
        self.paused_until = 0.0
        self.state = self.disk
        self.staged = self.exchange = None
        self.gate = self.sim.parts.gate(self._on_frame)
        self.payload: Payload | None = None
        self._leases: tuple[IndexRange, ...] = ()
        self._serial = 0
        self.progress = 0
        self._training = 0  # token of the training in progress; 0 = none
        self._trainings = 0
        self.transfer: Transfer | None = None
        self._asked_in = 0
        self._tick_at: float | None = None
        manifest = b"\1" * 32 if self.sim.has_wrong_manifest(self) else self.sim.manifest
        held = self.state.held if self.state is not None else None
        config = MemberConfig(coordinator_timeout_s=120.0, farewell_timeout_s=8.0)
        self.machine = self.sim.parts.member(
            config,
            self.ref,
            f"{self.peer_id}:1",
            manifest,
            held,
            seal_key=self.sim.seal_key,
            certificate=self.disk_certificate,
        )
        self.sim.world.say(self.peer_id, "starts as", self.incarnation, "with", short(held))
        self.sim.checkers.started(self)
        self.sim.dial(self)

    def stop(self, why: str) -> None:
        """The process is gone, with everything but the disk."""
        if not self.alive:
            return
        self.sim.world.say(self.peer_id, why)
        self.sim.checkers.stopped(self)
        self.alive = False
        self.start_number += 1
        self.machine = None
        self.state = self.staged = self.exchange = None
        self.paused_until = 0.0

    def crash(self, *, silently: bool) -> None:
        """Killed (its host answers for it), or its whole machine is gone (nobody does)."""
        if self.alive:
            self.sim.peer_died(self, silently=silently)
            self.died_silently = silently
            self.stop("crashes silently" if silently else "crashes")

    def pause(self, duration_s: float) -> None:
        self.paused_until = max(self.paused_until, self.sim.world.now + duration_s)
        self.sim.world.say(self.peer_id, f"paused for {duration_s:.2f}")
        self.sim.world.after(duration_s, f"resume {self.peer_id}", self.resume)

    def resume(self, *, now: bool = False) -> None:
        if now:
            self.paused_until = 0.0
        if self.sim.world.now < self.paused_until:
            return
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run(self.start_number, action, *args)

    def run(self, start: int, action: Callable[..., None], *args: Any) -> None:
        """Do something in this process, if it is still the same one; later, if it is paused."""
        if start != self.start_number or not self.alive:
            return
        if self.sim.world.now < self.paused_until:
            self._backlog.append((action, args))
            return
        action(*args)

    def later(self, delay_s: float, label: str, action: Callable[..., None], *args: Any) -> None:
        """A timer of this process."""
        self.sim.world.after(delay_s, f"{label} {self.peer_id}", self.run, self.start_number, action, *args)

    def on_told(self, connection: "ControlConnection", message: CoordinatorMessage) -> None:
        if connection.up_at_peer:
            self.sim.checkers.heard(self, message)
            self.feed(CoordinatorSaid(message=message))

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
        effects = machine.handle(event, self.sim.world.now)
        if self.sim.check_machines:
            machine.check_invariants()
        start = self.start_number
        for effect in effects:
            self._carry_out(effect)
            if self.start_number != start:
                return
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.next_deadline() if self.machine is not None else None
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.later(deadline - self.sim.world.now, "tick", self._tick, deadline)

    def _tick(self, due: float) -> None:
        if self._tick_at != due:
            return
        self._tick_at = None
        deadline = self.machine.next_deadline() if self.machine is not None else None
        if deadline is not None and deadline <= self.sim.world.now:
            self.feed(Tick())
        else:
            self._arm()

    def _carry_out(self, effect: MemberEffect) -> None:
        checkers = self.sim.checkers
        match effect:
            case SendToCoordinator(message=message):
                self.sim.send_to_coordinator(self, message)
            case FoundState():
                self.later(self.sim.world.rng.uniform(0.1, 1.0), "found", self._found)
            case CatchUp():
                self.transfer = Transfer(self, effect)
                self.later(0.0, "ask", self.transfer.next_donor)
            case InstallView(view=view):
                checkers.view_installed(self, view)
                self.exchange = self.staged = None
                self.gate.fence = Fence.of(view)
            case BecomeActive(view=view):
                checkers.became_active(self, view)
                self._train()
            case BecomeLearner(reason=reason):
                self.sim.world.say(self.peer_id, "becomes learner:", reason)
                checkers.became_learner(self)
                self.payload = None
                self.exchange = self.staged = None
                self._training = 0
                self._leases = ()
            case StartExchange(view=view, key=key, weight=weight):
                self._start_exchange(view, key, weight)
            case AbortExchange(key=key):
                if self.exchange is not None and self.exchange.key == key:
                    self.exchange.failed = True
                    self.exchange = None
                self.staged = None
            case InstallStaged():
                self._install(effect)
            case TakeLeases(ranges=ranges):
                self._leases = merged((*self._leases, *ranges))
            case KeepCertificate(certificate=certificate):
                self.disk_certificate = certificate
            case Finish():
                self._finish(effect)
            case _:
                assert_never(effect)

    def _finish(self, effect: Finish) -> None:
        self.exit = effect
        self.sim.world.say(self.peer_id, "finishes with", effect.code, effect.reason)
        if self.state is not None and self.sim.options.checkpoint_every:
            self.disk = self.state
        self.sim.checkers.finished(self, effect)
        self.sim.hang_up(self)
        self.stop("is over")

    # ------------------------------------------------------------------------ training

    def _train(self) -> None:
        """Inner steps from the anchor, for a while; then the payload is ready."""
        self._trainings += 1
        self._training = self._trainings
        duration_s = self.sim.world.rng.uniform(*self.sim.options.train_s) * self.sim.speed_of(self)
        self.later(0.0, "train", self._step, self._training, self.sim.world.now + duration_s)

    def _step(self, training: int, until: float) -> None:
        if training != self._training:
            return
        if self.hung:
            self.later(PROGRESS_S, "hang", self._step, training, until)
            return
        missing = self.sim.options.samples_per_round - count(self._leases)
        if missing > 0 and self._asked_in != training:
            self._asked_in = training
            self.feed(LeasesWanted(num_samples=missing))
        starving = missing > 0 and self.sim.world.now >= until
        self.progress += not starving
        self.feed(Progressed(progress=self.progress, blocked=starving))
        if training != self._training:
            return
        if self.sim.world.now >= until and not starving:
            self._payload_ready()
        else:
            wait_s = min(PROGRESS_S, max(0.02, until - self.sim.world.now))
            self.later(wait_s, "train", self._step, training, until)

    def _payload_ready(self) -> None:
        assert self.state is not None
        self._training = 0
        self._serial += 1
        taken: list[IndexRange] = []
        missing = self.sim.options.samples_per_round
        rest: list[IndexRange] = []
        for item in self._leases:
            use = min(missing, len(item))
            missing -= use
            if use:
                taken.append(IndexRange(item.start, item.start + use))
            if use < len(item):
                rest.append(IndexRange(item.start + use, item.stop))
        self._leases = tuple(rest)
        step = self.state.held.outer_step
        weight = float(self.sim.options.samples_per_round)
        self.payload = Payload(self.ref, self._serial, step, weight, tuple(taken))
        self.sim.checkers.payload_made(self, self.payload)
        self.feed(
            RoundReady(
                outer_step=step,
                fragment=step % self.sim.options.num_fragments,
                weight=weight,
                num_tokens=count(taken),
                consumed=tuple(taken),
            )
        )

    # ------------------------------------------------------------------------ exchange

    def _start_exchange(self, view: View, key: RoundKey, weight: float) -> None:
        assert self.payload is not None
        assert self.state is not None
        self.staged = None
        self.exchange = exchange = Exchange(self, view, key, self.payload, weight)
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
        assert self.state is not None
        flawed = self.flawed_step == key.outer_step or self.sim.network.chance(self.sim.options.wrong_result)
        flaw = f"{self.peer_id}.{key}" if flawed else ""
        made = self.state.after(result, flaw=flaw)
        self.staged = (key, made, result)
        self.sim.checkers.staged(self, key, made, result, flawed=flawed)
        self.progress += 1
        # The outer optimizer runs in a thread: its end is an event of its own.
        self.later(0.001, "absorbed", self.feed, ExchangeDone(key=key, digest=made.held.digest))

    def exchange_failed(self, key: RoundKey, suspects: tuple[PeerId, ...], cause: str) -> None:
        self.sim.world.say(self.peer_id, f"cannot finish {key.epoch}/{key.outer_step}:", cause, suspects)
        self.later(0.0, "failed", self.feed, ExchangeFailed(key=key, suspects=suspects, cause=cause))

    def _install(self, effect: InstallStaged) -> None:
        assert self.staged is not None
        key, made, result = self.staged
        assert key == effect.key
        assert self.state is not None
        self.sim.checkers.installed(self, effect, made, result)
        self.hold(made)
        self.payload = None
        self.exchange = self.staged = None
        if not effect.final:
            self._train()

    def _hold(self, state: State) -> None:
        self.state = state
        self.progress += 1
        every = self.sim.options.checkpoint_every
        if every and state.held.outer_step % every == 0:
            self.disk = state

    def hold(self, state: State) -> None:
        """This is the shared state now."""
        self.state = state
        self.progress += 1
        every = self.sim.options.checkpoint_every
        if every and state.held.outer_step % every == 0:
            self.disk = state

    def _found(self) -> None:
        state = first_state(self.ref)
        self.hold(state)
        self.feed(CaughtUp(held=state.held))


def short(held: Held | None) -> str:
    """A state in few letters."""
    return "nothing" if held is None else f"{held.outer_step}:{held.digest.hex()[:6]}"
