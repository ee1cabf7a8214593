# SPDX-License-Identifier: Apache-2.0
"""Members, and fences for frames, without one of their rules (mutants.py)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.collective.core.types import Epoch, Instant, OuterStep, RoundKey, View
from isthmus.elastic.core.events import (
    ExchangeDone,
    MemberEffect,
    MemberEvent,
    StartExchange,
)
from isthmus.elastic.core.local_round import LocalRound
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import Heartbeat, Held, NewView, RoundFailed, Vote
from isthmus.elastic.core.place import Phase, Place
from tests.simulation.exchange import Frame, FrameGate


class InstallsWithoutCommit(MemberMachine):
    def handle(self, event: MemberEvent, now: Instant) -> Sequence[MemberEffect]:
        effects = list(super().handle(event, now))
        place = self._place
        key, staged = place.round.key, place.round.staged
        if isinstance(event, ExchangeDone) and key is not None and staged is not None:
            place.effects = effects
            place.install_if_staged(Held(OuterStep(key.outer_step + 1), staged))
        return effects


class ForgetsItsPayload(MemberMachine):
    def _on_new_view(self, message: NewView) -> None:
        place, view = self._place, message.view
        if place.view is not None and view.epoch > place.view.epoch and place.round.staged is None:
            had_payload = place.round.payload is not None
            place.effects += place.round.forget()
            super()._on_new_view(message)
            if had_payload and place.view is not None:
                place._stop_training("starts over in the new view")
                place.phase = Phase.SYNCING
                place._take_part()
        else:
            super()._on_new_view(message)


class CausesWithoutEnd(LocalRound):
    """It repeats what it was told as often as it likes."""

    def report(self) -> Vote | RoundFailed | None:
        word = super().report()
        return msgspec.structs.replace(word, cause=word.cause * 100) if isinstance(word, RoundFailed) else word


class SaysTooMuch(MemberMachine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._place.round = CausesWithoutEnd(self.me, self._place.round.sign)


class CallsBytesSteps(Place):
    def heartbeat(self, epoch: Epoch) -> Heartbeat:
        beat = super().heartbeat(epoch)
        return msgspec.structs.replace(beat, inner_steps=beat.progress)


class CountsBytesAsWork(MemberMachine):
    place_type = CallsBytesSteps


class ThrowsLateWorkAway(Place):
    def _carry_over(self) -> None:
        """As who was put out does."""
        payload, held = self.round.payload, self.held
        if payload is not None and held is not None and payload.outer_step != held.outer_step:
            self._stop_training("late")


class ForgetsLateWork(MemberMachine):
    place_type = ThrowsLateWorkAway


class WeighsAnew(LocalRound):
    """Another try, another weight."""

    def start(self, view: View, weights: tuple[float, ...] = ()) -> Sequence[MemberEffect]:
        effects = super().start(view, weights)
        return [
            dataclasses.replace(item, weight=item.weight + view.epoch % 2) if isinstance(item, StartExchange) else item
            for item in effects
        ]


class ChangesItsWeight(MemberMachine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._place.round = WeighsAnew(self.me, self._place.round.sign)


class OpenGate(FrameGate):
    """Takes every frame for the round that is running, whatever epoch and whose start it is of."""

    def arrive(self, frame: Frame, current: RoundKey | None, outer_step: int) -> None:
        if current is not None:
            self._deliver(frame)
        else:
            super().arrive(frame, current, outer_step)
