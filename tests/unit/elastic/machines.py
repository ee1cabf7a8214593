# SPDX-License-Identifier: Apache-2.0
"""Driving the pure machines by hand: short names for what tests say again and again."""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import msgspec

from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate, Contributor, ballot
from isthmus.elastic.core.config import CoordinatorConfig, MemberConfig
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import (
    Connected,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSaid,
    ExchangeDone,
    KeepCertificate,
    MemberEffect,
    MemberEvent,
    PeerSaid,
    Persist,
    RoundReady,
    SendToCoordinator,
    SendToPeer,
    Tick,
)
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import (
    CoordinatorMessage,
    DataPosition,
    Held,
    IndexRange,
    Join,
    Meet,
    Met,
    NewView,
    PeerMessage,
    RoundFailed,
    Vote,
)
from isthmus.elastic.core.place import Phase
from isthmus.elastic.core.records import Record
from tests.keys import Keys, certified

MANIFEST = b"\7" * 32
KEYS = Keys()
OTHERS = Keys(b"another run")
T = TypeVar("T")


def ref(number: int, incarnation: int = 1) -> PeerRef:
    return PeerRef(PeerId(f"{number:016x}"), Incarnation(incarnation))


def member(number: int, incarnation: int = 1) -> Member:
    return Member(ref(number).peer_id, Incarnation(incarnation), f"host{number}:1")


def held(step: int, kind: int = 0) -> Held:
    return Held(OuterStep(step), bytes([kind, step % 256]) * 15 + step.to_bytes(2))


def view(epoch: int, step: int, *numbers: int) -> View:
    return View(Epoch(epoch), OuterStep(step), held(step).digest, tuple(member(number) for number in numbers))


def key(epoch: int, step: int, fragment: int = 0) -> RoundKey:
    return RoundKey(Epoch(epoch), OuterStep(step), fragment)


def certificate(
    epoch: int,
    step: int,
    *numbers: int,
    kind: int = 0,
    final: bool = False,
    parent: Certificate | None = None,
    keys: Keys = KEYS,
) -> Certificate:
    """Of the commit in this epoch that starts from this step, made by these peers (1 and 2, if none is named)."""
    made = Certificate(
        key=key(epoch, step),
        previous=held(step).digest if parent is None else parent.digest,
        digest=held(step + 1, kind).digest,
        contributors=tuple(Contributor(ref(number).peer_id, Incarnation(1), 2.0) for number in numbers or (1, 2)),
        final=final,
        position=DataPosition(100, (IndexRange(40, 50),)),
        parent=bytes(32) if parent is None else parent.link,
    )
    return certified(made, keys)


def payload(step: int, *consumed: IndexRange) -> RoundReady:
    return RoundReady(outer_step=OuterStep(step), fragment=0, weight=2.0, num_tokens=3, consumed=consumed)


class CoordinatorDriver:
    """A coordinator machine with a clock, a journal and a mailbox per peer."""

    def __init__(self, machine: CoordinatorMachine | None = None, now: float = 0.0, **config: Any) -> None:
        rules: dict[str, Any] = {"manifest_digest": MANIFEST, "sealer": KEYS.of_the_run, "outer_steps": 1000} | config
        self.config = CoordinatorConfig(**rules)
        self.machine = machine if machine is not None else CoordinatorMachine(self.config)
        self.now = now
        self.journal: list[Record] = []
        self.effects: Sequence[CoordinatorEffect] = ()
        self.unreachable: set[PeerRef] = set()

    def feed(self, event: CoordinatorEvent) -> Sequence[CoordinatorEffect]:
        """Hand the machine an event. Peers that it asks to meet do so at once, but for the `unreachable`."""
        self.effects = self._handle(event)
        asked = [
            effect for effect in self.effects if isinstance(effect, SendToPeer) and isinstance(effect.message, Meet)
        ]
        for effect in asked:
            assert isinstance(effect.message, Meet)
            away = self.unreachable & {effect.to, *(peer.ref for peer in effect.message.peers)}
            met = tuple(peer.ref for peer in effect.message.peers if not away & {effect.to, peer.ref})
            said = PeerSaid(sender=effect.to, message=Met(peers=met)) if met else None
            self.effects = [*self.effects, *(self._handle(said) if said else ())]
        return self.effects

    def _handle(self, event: CoordinatorEvent) -> Sequence[CoordinatorEffect]:
        effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        self.journal += [effect.record for effect in effects if isinstance(effect, Persist)]
        return effects

    def says(self, sender: PeerRef | int, message: PeerMessage) -> Sequence[CoordinatorEffect]:
        """Votes are signed by their senders, if they are not yet."""
        sender = ref(sender) if isinstance(sender, int) else sender
        committed = self.machine.state.committed
        if isinstance(message, Vote) and not message.signature and committed is not None:
            words = ballot(message.key, committed.digest, message.digest, sender, message.weight)
            message = msgspec.structs.replace(message, signature=KEYS.of(sender.peer_id).sign(words))
        return self.feed(PeerSaid(sender=sender, message=message))

    def wait(self, seconds: float) -> None:
        """Nobody speaks for so long; the machine looks at the clock whenever it wants to."""
        until = self.now + seconds
        effects: list[CoordinatorEffect] = []
        while (deadline := self.machine.next_deadline()) is not None and deadline < until:
            assert deadline > self.now, "it would look at the clock for ever"
            self.now = deadline
            effects += self.feed(Tick())
        self.now = until
        self.effects = [*effects, *self.feed(Tick())]

    def told(self, number: int, kind: type[T], incarnation: int = 1) -> T:
        """The newest message of this kind that the last event, or what happened while we waited, sent to the peer."""
        found = [item for item in self.all_told(number, incarnation) if isinstance(item, kind)]
        assert found, f"{number} was told {self.all_told(number, incarnation)}"
        return found[-1]

    def all_told(self, number: int, incarnation: int = 1) -> list[CoordinatorMessage]:
        sends = [effect for effect in self.effects if isinstance(effect, SendToPeer)]
        return [effect.message for effect in sends if effect.to == ref(number, incarnation)]

    def records(self, kind: type[T]) -> list[T]:
        return [record for record in self.journal if isinstance(record, kind)]

    def recovered(self, after_s: float = 1.0) -> Self:
        """The same coordinator after a restart."""
        machine = CoordinatorMachine.recover(self.config, list(self.journal), self.now + after_s)
        driver = type(self)(machine, self.now + after_s)
        driver.config, driver.journal = self.config, list(self.journal)
        return driver

    # ------------------------------------------------------------------------ common histories

    def join(self, number: int, state: Held | None = None, *, epoch: int = 0, incarnation: int = 1) -> None:
        message = Join(epoch=Epoch(epoch), address=f"host{number}:1", manifest_digest=MANIFEST, held=state)
        self.says(ref(number, incarnation), message)

    def vote(self, number: int, digest: bytes | None = None, *consumed: IndexRange, epoch: int | None = None) -> None:
        current = self.machine.state.view
        made = digest if digest is not None else held(current.outer_step + 1).digest
        round_key = key(current.epoch if epoch is None else epoch, current.outer_step)
        self.says(number, Vote(key=round_key, digest=made, weight=1.0, num_tokens=1, consumed=consumed))

    def fail(self, number: int, *suspects: int) -> None:
        current = self.machine.state.view
        peers = tuple(ref(suspect).peer_id for suspect in suspects)
        self.says(number, RoundFailed(key=key(current.epoch, current.outer_step), suspects=peers, cause="test"))

    def with_members(self, *numbers: int) -> "CoordinatorDriver":
        """These peers are the members of the newest view."""
        first, *rest = numbers
        self.join(first, held(0))
        for number in rest:
            self.join(number, self.machine.state.committed)
        while self.member_numbers() != list(numbers):
            for number in self.member_numbers():
                self.vote(number)
        return self

    def with_veterans(self, *numbers: int) -> "CoordinatorDriver":
        """These peers are the members of the newest view, and the last commit holds work of each."""
        self.with_members(*numbers)
        for number in numbers:
            self.vote(number)
        return self

    def member_numbers(self) -> list[int]:
        return [int(item.peer_id, 16) for item in self.machine.state.view.members]


class MemberDriver:
    """A member machine with a clock, peer number 1."""

    def __init__(
        self,
        state: Held | None = None,
        *,
        aside: tuple[RoundKey, Held] | None = None,
        certificate: Certificate | None = None,
        **config: Any,
    ) -> None:
        rules = MemberConfig(**config)
        self.machine = MemberMachine(
            rules,
            ref(1),
            "host1:1",
            MANIFEST,
            state,
            aside=aside,
            signer=KEYS.of(ref(1).peer_id),
            certificate=certificate,
        )
        self.now = 0.0
        self.effects: Sequence[MemberEffect] = ()

    def feed(self, event: MemberEvent) -> Sequence[MemberEffect]:
        self.effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return self.effects

    def hears(self, message: CoordinatorMessage) -> Sequence[MemberEffect]:
        return self.feed(CoordinatorSaid(message=message))

    def active_in(self, mine: View) -> "MemberDriver":
        """A member of this view, whose state it holds."""
        self.feed(Connected())
        self.hears(NewView(view=mine))
        assert self.machine.phase is Phase.ACTIVE
        return self

    def hands_in(self, *consumed: IndexRange) -> "MemberDriver":
        """The payload of its round is exchanged, the result staged: it has voted for the usual digest."""
        mine = self.machine.view
        assert mine is not None
        self.feed(payload(mine.outer_step, *consumed))
        self.feed(ExchangeDone(key=key(mine.epoch, mine.outer_step), digest=held(mine.outer_step + 1).digest))
        return self

    def said(self) -> list[PeerMessage]:
        return [effect.message for effect in self.effects if isinstance(effect, SendToCoordinator)]

    def ordered(self) -> list[MemberEffect]:
        """What the last event ordered, without messages and certificates."""
        return [effect for effect in self.effects if not isinstance(effect, SendToCoordinator | KeepCertificate)]

    def kept(self) -> list[Certificate]:
        """The certificates that the last event ordered to be kept."""
        return [effect.certificate for effect in self.effects if isinstance(effect, KeepCertificate)]
