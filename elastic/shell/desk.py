# SPDX-License-Identifier: Apache-2.0
"""What the trainer waits for: to be a member, the outcome of its round, samples to train on.

Rules: every wait ends, with its answer, `NotAMember` or `RunFinished`. Answers are given in the order of the machine's
effects, with one exception: that this peer is no longer active is known at once, so that nobody starts to train from a
state that is being left. Nothing here knows connections or how a round runs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from isthmus.collective.core.types import RoundKey, View
from isthmus.elastic.core.messages import DataPosition, Held, IndexRange
from isthmus.elastic.errors import ElasticError, NotAMember, RoundMissed

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A round of this peer is committed and installed. `view` is the one it was exchanged in."""

    key: RoundKey
    view: View
    held: Held
    final: bool
    position: DataPosition | None = None
    """Where the data stands behind it; None if it was learnt from a view."""


class _Slot(Generic[_T]):
    """An answer that some tasks wait for."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[_T]] = set()
        self._closed_by: ElasticError | None = None

    async def wait(self) -> _T:
        """The next answer."""
        if self._closed_by is not None:
            raise self._closed_by
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        try:
            return await answer
        finally:
            self._waiting.discard(answer)

    def give(self, value: _T) -> bool:
        """Answer whoever waits; returns whether somebody did."""
        pending = [answer for answer in self._waiting if not answer.done()]
        for answer in pending:
            answer.set_result(value)
        return bool(pending)

    def fail(self, error: ElasticError) -> None:
        """There will be no answer to whoever waits now."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(error)

    def close(self, error: ElasticError) -> None:
        """There will never be an answer again."""
        self._closed_by = error
        self.fail(error)


class Desk:
    """Between the machine's effects and the trainer's questions."""

    def __init__(self) -> None:
        self.active_view: View | None = None
        """The view in which this peer became active; None: it must not train. It stays while the peer is excused."""
        self.is_excused = False
        """Whether this peer is late, and the round goes on without it."""
        self._num_demotions_due = 0
        self._activation: _Slot[View] = _Slot()
        self._round: _Slot[Committed] = _Slot()
        self._leases: _Slot[tuple[IndexRange, ...]] = _Slot()
        self._leases_asked = False
        self._unclaimed: tuple[IndexRange, ...] = ()

    # -------------------------------------------------------------------------------- the trainer asks

    async def activation(self) -> View:
        """Wait until active."""
        return self.active_view if self.active_view is not None else await self._activation.wait()

    async def round_outcome(self) -> Committed:
        """Wait for the outcome of the round that was just handed in."""
        return await self._round.wait()

    async def leases(self, ask: Callable[[], None]) -> tuple[IndexRange, ...]:
        """Wait for samples; `ask` is called if no request is under way."""
        if self._unclaimed:
            ranges, self._unclaimed = self._unclaimed, ()
            return ranges
        if not self._leases_asked:
            self._leases_asked = True
            ask()
        return await self._leases.wait()

    # -------------------------------------------------------------------------------- the machine answers

    def demoted(self) -> None:
        """The machine has just said that this peer is a learner; its turn in the order of effects comes later."""
        self._num_demotions_due += 1
        self.active_view = None
        self.is_excused = False

    def became_learner(self, reason: str) -> None:
        """Everything before has been carried out: payload and leases are void."""
        self._num_demotions_due -= 1
        self._unclaimed = ()
        self._leases_asked = False
        self._round.fail(NotAMember(reason))
        self._leases.fail(NotAMember(reason))

    def became_active(self, view: View) -> None:
        """This peer holds the view's state, unless that is over already."""
        if self._num_demotions_due == 0:
            self.is_excused = False
            self.active_view = self.active_view or view
            self._activation.give(self.active_view)

    def excused(self) -> None:
        """The round goes on without this peer."""
        self.is_excused = self.active_view is not None

    def carried_over(self, outer_step: int) -> None:
        """The round from this step was committed without this peer's payload."""
        self._round.fail(RoundMissed(outer_step))

    def committed(self, outcome: Committed) -> None:
        """The round is installed."""
        self._round.give(outcome)

    def took_leases(self, ranges: tuple[IndexRange, ...]) -> None:
        """Samples have come. If the one who asked is gone, they are kept for the next."""
        self._leases_asked = False
        if not self._leases.give(ranges):
            self._unclaimed += ranges

    def close(self, error: ElasticError) -> None:
        """This peer's part is over: all waits end with this error, now and later."""
        self.active_view = None
        for slot in (self._activation, self._round, self._leases):
            slot.close(error)
