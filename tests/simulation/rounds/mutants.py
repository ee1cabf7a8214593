# SPDX-License-Identifier: Apache-2.0
"""The test of the test: broken variants of the collective layer, each of which the round simulator has to catch.

Some are rules of a machine that are taken out, some rules of the shell. Production code has no flag for any of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.progress import ProgressWatch
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    HandOnOpening,
    LinkRenewed,
    PartArrived,
    RoundEffect,
    RoundEvent,
    SendOpen,
    SendPart,
    SendResult,
)
from isthmus.collective.core.types import Epoch, Instant, PeerRef, RoundKey
from tests.simulation.rounds.bundle import Bundle
from tests.simulation.rounds.operation import Operation
from tests.simulation.rounds.parts import RoundParts

# ------------------------------------------------------------------------ machines


class CountsDuplicates(RoundMachine):
    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        if isinstance(event, PartArrived) and not self._missing[event.chunk] >> event.rank & 1:
            effects = list(super().handle(event))
            return effects if self._is_done[event.chunk] else [Accumulate(event.chunk, event.rank), *effects]
        return super().handle(event)


class ForwardsPartialSums(RoundMachine):
    """Hands up with the first child's part, before the others have arrived."""

    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        effects = list(super().handle(event))
        chunk = event.chunk if isinstance(event, PartArrived) else -1
        if (
            chunk >= 0
            and self._route_of[chunk].root != self.rank
            and self._missing[chunk]
            and not self._is_handed_up[chunk]
        ):
            self._is_handed_up[chunk] = 1
            self._send(SendPart(self._route_of[chunk].up[self.rank], chunk), effects)
        return effects


class FinishesBeforeAllHaveOpened(RoundMachine):
    def _go_on(self, chunk: int, effects: list[RoundEffect]) -> None:
        unopened, self.num_unopened = self.num_unopened, 0
        if not self._is_done[chunk]:
            super()._go_on(chunk, effects)
        self.num_unopened = unopened


class ForgetsToSendAgain(RoundMachine):
    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        if isinstance(event, LinkRenewed):
            return [SendOpen(event.rank)]
        return super().handle(event)


class OpensOnlyOnce(RoundMachine):
    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        effects = super().handle(event)
        if isinstance(event, LinkRenewed):
            return [effect for effect in effects if not isinstance(effect, SendOpen)]
        return effects


class KnowsNoCredit(RoundMachine):
    def _send(self, order: SendPart | SendResult, effects: list[RoundEffect]) -> None:
        effects.append(order)


class HearsThroughNobody(RoundMachine):
    """Whoever waits for a third member's opening needs nothing of who hands it on."""

    def hears_through(self, rank: int) -> bool:
        return False


class HandsOnOnlyOnce(HearsThroughNobody):
    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        effects = super().handle(event)
        if isinstance(event, LinkRenewed):
            return [effect for effect in effects if not isinstance(effect, HandOnOpening)]
        return effects


class EndsBeforeItHandsOn(RoundMachine):
    """A chunk says that a member has opened, but not what there is to hand on."""

    @property
    def _must_hear(self) -> int:
        return 0


# ------------------------------------------------------------------------ shells


def everything_is_current(fence: Fence, sender: PeerRef, epoch: Epoch) -> Standing:
    """No fence."""
    return Standing.CURRENT


def round_of_any_epoch(rounds: Mapping[RoundKey, Operation], key: RoundKey) -> Operation | None:
    """The running round of this step and fragment, whichever attempt it is."""
    same = (
        round_ for name, round_ in rounds.items() if name.outer_step == key.outer_step and name.fragment == key.fragment
    )
    return next(same, None)


class ForgivesNothing(ProgressWatch):
    """Time in which we were stopped counts against the others."""

    def forgive(self, seconds: float) -> None:
        pass


class CountsIdleTime(ProgressWatch):
    """Time in which nothing was owed counts as standing still."""

    def observe(
        self, *, heard: int, moved: int, host_silent_s: float, chunk_s: float, owes_now: bool, now: Instant
    ) -> None:
        self._owes_now = True
        super().observe(
            heard=heard, moved=moved, host_silent_s=host_silent_s, chunk_s=chunk_s, owes_now=owes_now, now=now
        )


class MindsNoSilence(ProgressWatch):
    """Who owes nothing by itself may say nothing for ever."""

    def is_stalled(self, now: Instant, *, owes: bool, share: float = 1.0) -> bool:
        heard_at, self._heard_at = self._heard_at, now
        result = super().is_stalled(now, owes=owes, share=share)
        self._heard_at = heard_at
        return result


class MindsNoJam(ProgressWatch):
    """Who gives signs of life may keep back what it owes for ever."""

    def is_stalled(self, now: Instant, *, owes: bool, share: float = 1.0) -> bool:
        moved_at, self._moved_at = self._moved_at, now
        result = super().is_stalled(now, owes=owes, share=share)
        self._moved_at = moved_at
        return result


def say_nothing(bundle: Bundle) -> None:
    """No sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMutant:
    """Which rule is missing, the parts without it, and options that seeds draw too rarely to show it soon."""

    what: str
    parts: RoundParts
    focus: Mapping[str, object]


def _mutant(what: str, focus: Mapping[str, object] | None = None, **parts: object) -> RoundMutant:
    return RoundMutant(what=what, parts=RoundParts(**parts), focus=focus or {})  # type: ignore[arg-type]


_TWO = {"num_operations": 2, "plans": ("butterfly", "butterfly"), "num_streams": 3}
FAR = {"latency_s": (0.05, 0.15), "window": 1, "compute_s": (0.0, 2.5), "frame_s": 0.01, "num_peers": 4}
LOSSES = _TWO | {"break_rate": 2.0, "corrupt": 0.01, "latency_s": (0.05, 0.15)}
SERVER_CUTS = {"cut_rate": 2.0, "view_rate": 2.0, "eager_chunks": 2, "max_rounds_ahead": 1, "latency_s": (0.01, 0.05)}
HIDDEN = LOSSES | {"num_peers": 4, "num_hidden": 3}
PAUSES = {
    **{"pause_rate": 1.0, "num_peers": 5, "frame_s": 0.05, "window": 1, "num_hidden": 0},
    **dict.fromkeys(("crash_rate", "crash_per_effect", "break_rate", "cut_rate", "view_rate"), 0.0),
}
CANCELS = _TWO | {"cancel_rate": 1.0, "compute_s": (0.0, 1.0), "max_rounds_ahead": 1, "eager_chunks": 2}

ROUND_MUTANTS = {
    "counts_duplicates": _mutant("a part that comes again is added again", machine=CountsDuplicates),
    "no_fence": _mutant(
        "chunks of an older attempt count in the running one",
        judge=everything_is_current,
        find_round=round_of_any_epoch,
    ),
    "forwards_partial_sums": _mutant("a node hands its sum up before all parts are in", machine=ForwardsPartialSums),
    "ignores_corruption": _mutant("what arrives is not checked", checks_sums=False),
    "finishes_unopened": _mutant("a root finishes before all have opened", machine=FinishesBeforeAllHaveOpened),
    "sends_nothing_again": _mutant("what was lost with a connection stays lost", LOSSES, machine=ForgetsToSendAgain),
    "opens_only_once": _mutant("an opening that was lost stays lost", machine=OpensOnlyOnce),
    "no_sign_of_life": _mutant("a waiting member says nothing", sign=say_nothing),
    "no_credit": _mutant("chunks are sent to members that have not opened", machine=KnowsNoCredit),
    "forgives_nothing": _mutant(
        "time in which a peer was stopped counts against others", PAUSES, watch=ForgivesNothing
    ),
    "minds_no_jam": _mutant("signs of life excuse who sends nothing", {"jam_rate": 0.5}, watch=MindsNoJam),
    "mends_no_link_of_a_hub": _mutant(
        "who waits for a third member's opening does not mend the link over which it comes",
        HIDDEN | {"num_streams": 2, "compute_s": (0.0, 1.0)},
        machine=HearsThroughNobody,
    ),
    "minds_no_silence": _mutant(
        "a member that hangs is awaited as long as what it owes depends on others",
        PAUSES | {"num_operations": 2, "plans": ("ring", "ring")},
        watch=MindsNoSilence,
    ),
    "counts_idle_time": _mutant(
        "a member that had nothing to send for long is blamed as soon as it has", FAR, watch=CountsIdleTime
    ),
    "silent_about_ended": _mutant(
        "who has ended a round does not say so when a connection is made anew", LOSSES, tells_ended=False
    ),
    "returns_spent_credit": _mutant(
        "the credit of a failed round is lent again in the same view", CANCELS, keeps_spent_credit=False
    ),
    "hands_on_only_once": _mutant(
        "an opening that was lost on its way through a third member stays lost, and nobody minds that member's silence",
        HIDDEN,
        machine=HandsOnOnlyOnce,
    ),
    "ends_before_it_hands_on": _mutant(
        "a round ends at the third member before it has an opening to hand on", HIDDEN, machine=EndsBeforeItHandsOn
    ),
    "holds_every_epoch": _mutant(
        "what a peer sent in views that it has left is held back with the rest", SERVER_CUTS, drops_older_epochs=False
    ),
}
