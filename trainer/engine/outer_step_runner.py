# SPDX-License-Identifier: Apache-2.0
"""An outer step as the membership asks for it: exchange payloads, step into staging, install or forget it.

This is elastic's `RoundRunner`, the trainer's half of its `Membership`. Rules: payloads stay as they are until the
outcome is known, so that a step can run again in the next view; nothing shared changes before the commit. It must not
know workers, samples or why a view changed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from isthmus.collective import Communicator, RoundStats
from isthmus.collective.core.types import Epoch, Member, OuterStep, RoundKey, View
from isthmus.elastic.core.messages import Held
from isthmus.elastic.shell.exchange import Exchanged
from isthmus.elastic.state.replica import CommitEntry
from isthmus.trainer.engine.outer_state import OuterState, RoundOutcome
from isthmus.trainer.engine.round_exchange import Payload, RoundExchange
from isthmus.trainer.engine.round_records import sealed
from isthmus.trainer.engine.state_version import CHAIN
from isthmus.trainer.threads import in_thread

_SURVEY_EVERY = 20
"""Outer steps between two looks at the links; each costs one small gather. In a new view the second, third, fifth, ...
look as well: what else filled the lines while it formed, such as states that were fetched, is no limit of theirs."""
_SURVEY_FRAGMENT, _SPEED_FRAGMENT = 0x7FFF, 0x7FFE
"""No fragments of the model have so large numbers."""


class ResultKeeper(Protocol):
    """Who keeps what rounds make."""

    def founded(self, held: Held) -> None:
        """This peer has made the run's first state."""
        ...

    async def before_vote(self, key: RoundKey, entry: CommitEntry) -> None:
        """A result is staged; it is voted for when this returns. Ends in bounded time."""
        ...

    def committed(self, previous: bytes, entry: CommitEntry) -> None:
        """This result was committed and is installed, onto the state with digest `previous` (32 bytes)."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class OuterStepRunner:
    """Runs outer steps between the payloads and the outer state, one at a time.

    Attributes:
        communicator: the collective layer.
        state: live and staged shared state.
        exchanges: the rounds on the network.
        initial_parameters: makes the run's first parameters, [numel].
        on_exchanged: told of every finished exchange, for logs.
        keeper: keeps the results, for learners and for later starts of this peer.
        tells_speed: whether members tell each other how fast they are, all or none.
    """

    communicator: Communicator
    state: OuterState
    exchanges: RoundExchange
    initial_parameters: Callable[[], Awaitable[Tensor]]
    on_exchanged: Callable[[RoundKey, RoundStats], None]
    keeper: ResultKeeper
    tells_speed: bool = False
    _surveys: "_Surveys" = field(init=False)
    _payloads: Sequence[Payload] = field(default=(), init=False)
    _planned_s: float = field(default=0.0, init=False)
    _staged: tuple[CommitEntry, tuple[float, ...]] | None = field(default=None, init=False)
    """With what our payloads weigh in it, by round."""
    _outcomes: tuple[RoundOutcome, ...] = field(default=(), init=False)
    """What the newest commit did, by round, until it is taken."""
    own_weights: tuple[float, ...] = field(default=(), init=False)
    """What this peer's payloads weighed in it, by round."""
    speeds: tuple[float, ...] = field(default=(), init=False)
    """What the members of the newest exchange have told of theirs, by rank; empty: nothing."""

    def __post_init__(self) -> None:
        self._surveys = _Surveys(self.communicator)

    def offer(self, payloads: Sequence[Payload], *, planned_s: float = 0.0) -> None:
        """What the next outer step exchanges, by round: before it is handed in. They stay as they are until then.

        `planned_s`: how long a planned inner step takes this peer, see engine/speed.py; 0.0: not known.
        """
        self._payloads, self._planned_s = payloads, planned_s

    async def found(self) -> Held:
        """Make the run's first shared state."""
        held = await self.state.found(await self.initial_parameters())
        self.keeper.founded(held)
        return held

    async def install_view(self, view: View, survey_from: int = 0) -> None:
        """Connect to the members of this view; the lines are idle while they train, so new ones are measured then."""
        self._surveys.begin_at = survey_from
        await self.communicator.install(view)
        self.communicator.look_ahead()

    async def meet(self, member: Member) -> str | None:
        """See `Communicator.meet`."""
        return await self.communicator.meet(member)

    async def exchange(self, view: View, key: RoundKey, weight: float, told: tuple[float, ...] = ()) -> Exchanged:
        """Exchange the payloads with the view's members and stage what follows from them.

        Raises:
            CollectiveError: the exchange cannot finish in this view; the payloads are unchanged.
        """
        self.discard_staged(key)
        await self._surveys.make_if_due(view, key)
        telling = asyncio.ensure_future(self._tell_speed(view, key))
        try:
            await asyncio.sleep(0)  # it is under way before the payloads are, whose pace on the lines is to stay
            made = await self.exchanges.run(
                view, key, self._payloads, weight=weight, told=told, mean_buffer=self.state.mean_buffer
            )
            self.speeds = await telling
        finally:
            telling.cancel()
            await asyncio.wait([telling])
            _ = telling.cancelled() or telling.exception()  # whoever failed first has said so
        for stats in made.stats:
            self.on_exchanged(key, stats)
        results = [
            (result, await in_thread(sealed, record) if self._is_sealed(payload) else record)
            for payload, (result, record) in zip(self._payloads, made.results, strict=True)
        ]
        async with asyncio.TaskGroup() as tasks:
            marking = tasks.create_task(in_thread(made.marks))
            digest = await self.state.stage(results)
        entry = CommitEntry(
            outer_step=OuterStep(key.outer_step + 1), digest=digest, rounds=tuple(record for _, record in results)
        )
        await self.keeper.before_vote(key, entry)
        self._staged = entry, tuple(made.own_weights)
        sums = made.sums if any(made.sums) else ()
        return Exchanged(digest=digest, weights=made.weights, sizes=made.sizes, sums=sums, results=marking.result())

    async def _tell_speed(self, view: View, key: RoundKey) -> tuple[float, ...]:
        """Beside the payloads: it costs no trip of its own."""
        if not self.tells_speed or view.world_size == 1:
            return ()
        place = RoundKey(key.epoch, key.outer_step, _SPEED_FRAGMENT)
        rows, _ = await self.communicator.all_gather(place, torch.tensor([self._planned_s], dtype=torch.float64))
        return tuple(float(row) for row in rows)

    def _is_sealed(self, payload: Payload) -> bool:
        """Whether nobody can replay the round: its values are the workers' alone."""
        return CHAIN in self.state.live.states[self.state.places[payload.round_.fragment]]

    async def stage_again(self, entry: CommitEntry) -> None:
        """What an earlier start of this peer voted for is staged again: it may be committed.

        Raises:
            StateDiverged, RemoteProtocolError: it does not fit what is held.
        """
        await self.state.stage_entry(entry)
        self._staged = entry, ()

    async def install_staged(self, key: RoundKey, held: Held, *, final: bool) -> None:
        """The step is committed: staging becomes the shared state."""
        del key, final
        assert self._staged is not None, f"nothing is staged for {held}"
        (entry, self.own_weights), self._staged = self._staged, None
        previous = self.state.live.held.digest
        self._outcomes = self.state.install_staged(held)
        self.keeper.committed(previous, entry)

    def take_outcomes(self) -> tuple[RoundOutcome, ...]:
        """What the newest commit did, by round, once: the state before it is in there, a copy that must not stay."""
        outcomes, self._outcomes = self._outcomes, ()
        return outcomes

    def discard_staged(self, key: RoundKey) -> None:
        """The attempt was aborted: forget what it staged, keep the payloads."""
        del key
        self.state.discard_staged()
        self._staged = None


class _Surveys:
    """Looks at the links, at points to which all members come: they begin a view together, and do every round of it.

    Args:
        communicator: the collective layer.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._epoch: Epoch | None = None
        self._first = OuterStep(0)  # of that epoch
        self.begin_at = 0
        """The outer step before which there are none, as was told with the view."""

    async def make_if_due(self, view: View, key: RoundKey) -> None:
        """Before the exchange of this outer step."""
        if view.epoch != self._epoch:
            self._epoch, self._first = view.epoch, key.outer_step
        if key.outer_step < self.begin_at:
            return
        if view.world_size > 1 and _is_survey_due(key.outer_step - self._first):
            await self._communicator.survey(RoundKey(key.epoch, key.outer_step, _SURVEY_FRAGMENT))


def _is_survey_due(num_steps: int) -> bool:
    """After so many outer steps in a view: 0, 1, 2, 4, 8, 16, 20, 40, ..."""
    return num_steps % _SURVEY_EVERY == 0 or (num_steps < _SURVEY_EVERY and num_steps.bit_count() == 1)
