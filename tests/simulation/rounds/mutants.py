# SPDX-License-Identifier: Apache-2.0
"""The test of the test: broken variants of the collective layer, each of which the round simulator has to catch.

Some are rules of a machine that are taken out, some rules of the shell. Production code has no flag for any of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.progress import ProgressWatch
from isthmus.collective.core.round import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    ContributionArrived,
    HandOnOpening,
    LinkRenewed,
    RoundEffect,
    RoundEvent,
    SendContribution,
    SendOpen,
    SendResult,
)
from isthmus.collective.core.types import Epoch, Instant, PeerRef, RoundKey
from tests.simulation.rounds.bundle import Bundle
from tests.simulation.rounds.operation import Operation
from tests.simulation.rounds.parts import RoundParts

# ------------------------------------------------------------------------ machines


class CountsDuplicates(RoundMachine):
    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        before = self.duplicates
        effects = list(super().handle(event))
        if self.duplicates > before and isinstance(event, ContributionArrived) and not self._is_done[event.chunk]:
            effects.insert(0, Accumulate(event.chunk, event.rank))
        return effects


class ForwardsPartialSums(RoundMachine):
    """Hands up with the first child's part, before the others have arrived."""

    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        effects = list(super().handle(event))
        chunk = event.chunk if isinstance(event, ContributionArrived) else -1
        if chunk >= 0 and not self.is_root(chunk) and self._missing[chunk] and not self._is_handed_up[chunk]:
            self._is_handed_up[chunk] = 1
            self._send(SendContribution(self._route_of[chunk].up[self.rank], chunk), effects)
        return effects


class FinishesBeforeAllHaveOpened(RoundMachine):
    def _go_on(self, chunk: int, effects: list[RoundEffect]) -> None:
        unopened, self.num_unopened = self.num_unopened, 0
        super()._go_on(chunk, effects)
        self.num_unopened = unopened


class TrustsWhatItHolds(RoundMachine):
    """Takes its old result for valid, whatever the root holds."""

    def start(self) -> Sequence[RoundEffect]:
        effects = list(super().start())
        for chunk in range(self.slices.num_chunks):
            route = self._route_of[chunk]
            if self.held >> chunk & 1 and route.root != self.rank and not self._is_done[chunk]:
                self._is_done[chunk] = self._is_handed_up[chunk] = 1
                self._missing_results[route.down[self.rank]] -= 1
        return effects


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
    def _send(self, order: SendContribution | SendResult, effects: list[RoundEffect]) -> None:
        effects.append(order)


class EndsWhenItHasEverything(RoundMachine):
    """Finishes although somebody may lack an old result that only it holds."""

    def _finish_if_complete(self, effects: list[RoundEffect]) -> None:
        untold, self._untold = self._untold, 0
        super()._finish_if_complete(effects)
        self._untold = untold


class HandsOnOnlyOnce(RoundMachine):
    def handle(self, event: RoundEvent) -> Sequence[RoundEffect]:
        effects = super().handle(event)
        if isinstance(event, LinkRenewed):
            return [effect for effect in effects if not isinstance(effect, HandOnOpening)]
        return effects


class EndsBeforeItHandsOn(RoundMachine):
    """A chunk says that a member has opened, but not what there is to hand on."""

    @property
    def _must_hear(self) -> int:
        return self._untold if self.held else 0


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


class SumsGoOn(Operation):
    """Adds to what the last attempt has left of a sum."""

    def start(self) -> None:
        done = self.machine.held
        self.summed = {
            chunk for chunk, value in self.memory.items() if isinstance(value, tuple) and not done >> chunk & 1
        }
        super().start()


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
RETRIES = _TWO | {"keeps_results": True, "forgetful": 0.5, "view_rate": 2.0, "break_rate": 1.5, "jitter_s": 0.05}
FAR = {"latency_s": (0.05, 0.15), "window": 1, "compute_s": (0.0, 2.5), "frame_s": 0.01, "num_peers": 4}
LOSSES = _TWO | {"break_rate": 2.0, "corrupt": 0.01, "latency_s": (0.05, 0.15)}
SERVER_CUTS = {"cut_rate": 2.0, "view_rate": 2.0, "eager_chunks": 2, "max_rounds_ahead": 1, "latency_s": (0.01, 0.05)}
HIDDEN = LOSSES | {"num_peers": 4, "num_hidden": 3}
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
    "trusts_what_it_holds": _mutant(
        "an old result counts although its root sums again", RETRIES, machine=TrustsWhatItHolds
    ),
    "sends_nothing_again": _mutant("what was lost with a connection stays lost", LOSSES, machine=ForgetsToSendAgain),
    "opens_only_once": _mutant("an opening that was lost stays lost", machine=OpensOnlyOnce),
    "no_sign_of_life": _mutant("a waiting member says nothing", sign=say_nothing),
    "no_credit": _mutant("chunks are sent to members that have not opened", machine=KnowsNoCredit),
    "ends_with_old_results": _mutant(
        "a round ends although somebody may lack an old result", RETRIES, machine=EndsWhenItHasEverything
    ),
    "sums_go_on": _mutant("a retry adds to the sum that the last attempt has left", RETRIES, operation=SumsGoOn),
    "forgives_nothing": _mutant("time in which a peer was stopped counts against others", watch=ForgivesNothing),
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
        "an opening that was lost on its way through a third member stays lost", HIDDEN, machine=HandsOnOnlyOnce
    ),
    "ends_before_it_hands_on": _mutant(
        "a round ends at the third member before it has an opening to hand on", HIDDEN, machine=EndsBeforeItHandsOn
    ),
    "keeps_aborts": _mutant(
        "who has no link with a member that gives up does not hear of it",
        HIDDEN | {"cancel_rate": 1.0},
        hands_aborts_on=False,
    ),
    "holds_every_epoch": _mutant(
        "what a peer sent in views that it has left is held back with the rest", SERVER_CUTS, drops_older_epochs=False
    ),
}
