# SPDX-License-Identifier: Apache-2.0
"""The member's long work: views, exchanges and commits, in exactly the machine's order.

`RoundRunner` is what the trainer brings along; `RunningExchange` owns the one that may run, and makes sure that it
ends with exactly one event, or with none after it was aborted.

Rules: what changes the shared state is awaited before the next effect begins. An exchange runs beside, as a task of
the member's TaskGroup. A fault of the network is an event; anything else ends the run.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from isthmus.collective.core.types import Instant, Member, PeerId, RoundKey, View
from isthmus.collective.errors import CollectiveError, NonFiniteInput, OperationAborted, PlanMismatch
from isthmus.elastic import observation as told
from isthmus.elastic.core.events import AbortExchange, ExchangeDone, ExchangeFailed, InstallView, StartExchange
from isthmus.elastic.core.messages import Held
from isthmus.elastic.observation import Observe

_MOST_WEIGHT = 1e15
"""That a vote can say (core/values.py). A round takes more from a member that claims it, and that is no reason to
refuse the votes of all that have heard it: what they say of it is still more than its samples can weigh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What an exchange has staged: the digest that the shared state would have. The rest: see `Vote`."""

    digest: bytes
    weights: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    results: tuple[bytes, ...] = ()


class RoundRunner(Protocol):
    """The trainer's half of a round. Called from the event loop; at most one method is under way at a time."""

    async def found(self) -> Held:
        """Make the run's first shared state and install it."""
        ...

    async def install_view(self, view: View, survey_from: int = 0) -> None:
        """Tell the collective layer its members. Bounded in time; CollectiveError if links could not be made.

        Before the outer step `survey_from` no plan may rest on what members tell each other of their links.
        """
        ...

    async def meet(self, member: Member) -> str | None:
        """Make a link with a peer that may become a member, or wait for its call. Ends in bounded time.

        Returns:
            None if there is one, else why not.
        """
        ...

    async def exchange(self, view: View, key: RoundKey, weight: float, told: tuple[float, ...] = ()) -> Exchanged:
        """Exchange the kept payload among the view's members and stage what follows from it.

        May be cancelled. It must then return only when nothing of it writes to staging any more, threads included.

        Args:
            view: whose members.
            key: of the round.
            weight: of the payload.
            told: what everybody's payload weighs, by rank, whatever they say; empty: as they say.

        Raises:
            CollectiveError: it cannot finish in this view; the payload is unchanged.
        """
        ...

    async def install_staged(self, key: RoundKey, held: Held, *, final: bool) -> None:
        """The round is committed: what it staged becomes the shared state `held`."""
        ...

    def discard_staged(self, key: RoundKey) -> None:
        """Forget what the round staged, if anything. The payload stays."""
        ...


class RunningExchange:
    """Owns the running exchange.

    Args:
        runner: the trainer's half.
        tasks: where the exchange runs.
        done: takes the exchange's one event.
        spoiled: takes the reason if the local payload cannot be exchanged in any view.
        observe: told of views and rounds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        runner: RoundRunner,
        tasks: asyncio.TaskGroup,
        *,
        done: Callable[[ExchangeDone | ExchangeFailed], None],
        spoiled: Callable[[str], None],
        observe: Observe,
        clock: Callable[[], Instant],
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._done = done
        self._spoiled = spoiled
        self._observe = observe
        self._clock = clock
        self._running: asyncio.Task[None] | None = None
        self._key: RoundKey | None = None
        self._void: RoundKey | None = None
        self._voted: tuple[RoundKey, bytes] | None = None
        self.view: View | None = None
        """The view of the newest exchange."""

    async def install_view(self, effect: InstallView) -> None:
        """Give the view to the collective layer. Missing links are the next exchange's finding, not an error here."""
        fault = None
        try:
            await self._runner.install_view(effect.view, effect.survey_from)
        except CollectiveError as error:
            fault = str(error)
        incarnations = tuple(member.incarnation for member in effect.view.members)
        addresses = tuple(member.address for member in effect.view.members)
        fields = told.view_fields(effect.view)
        self._observe(told.ViewInstalled(**fields, incarnations=incarnations, addresses=addresses, cause=fault))

    def start(self, effect: StartExchange) -> None:
        """Begin an exchange; the one before has ended."""
        if effect.key == self._void:
            return  # it was aborted before it began
        assert self._running is None or self._running.done(), "one exchange at a time"
        self.view, self._key = effect.view, effect.key
        self._observe(told.RoundStarted(**told.round_fields(effect.key), weight=effect.weight))
        self._running = self._tasks.create_task(self._exchange(effect))

    def take_vote(self, key: RoundKey) -> bytes | None:
        """The digest that this peer voted for in this round, if it got so far. Once: commits are told again."""
        if self._voted is None or self._voted[0] != key:
            return None
        digest, self._voted = self._voted[1], None
        return digest

    def void(self, key: RoundKey) -> None:
        """From now on no event may come of this exchange. Called as soon as the machine says so."""
        self._void = key
        if key == self._key:
            self.stop()

    async def abort(self, effect: AbortExchange) -> None:
        """Wait until the exchange has ended and forget what it staged."""
        self.stop()
        if self._running is not None:
            await asyncio.wait([self._running])
            self._running = None
        self._runner.discard_staged(effect.key)
        self._observe(told.RoundAborted(**told.round_fields(effect.key)))

    async def install_staged(self, key: RoundKey, held: Held, *, final: bool) -> None:
        """The exchange's result is committed."""
        await self._runner.install_staged(key, held, final=final)
        self._running = None

    def stop(self) -> None:
        """Cancel the exchange, if one runs."""
        if self._running is not None:
            self._running.cancel()

    async def _exchange(self, effect: StartExchange) -> None:
        key, began = effect.key, self._clock()
        try:
            made = await self._runner.exchange(effect.view, key, effect.weight, effect.weights)
        except NonFiniteInput as error:
            self._spoiled(str(error))
        except CollectiveError as error:
            self._failed(key, error)
        else:
            if key != self._void:
                self._voted = key, made.digest
                digest, taken_s = made.digest.hex(), self._clock() - began
                self._observe(told.RoundStaged(**told.round_fields(key), digest=digest, seconds=taken_s))
                weights = tuple(min(weight, _MOST_WEIGHT) for weight in made.weights)
                self._done(
                    ExchangeDone(
                        key=key,
                        digest=made.digest,
                        weights=weights,
                        sizes=made.sizes,
                        sums=made.sums,
                        results=made.results,
                    )
                )

    def _failed(self, key: RoundKey, error: CollectiveError) -> None:
        if key != self._void:
            suspects, cause = _suspects(error), str(error)
            told_by = error.told_by if isinstance(error, OperationAborted | PlanMismatch) else None
            self._observe(told.RoundBroke(**told.round_fields(key), suspects=suspects, cause=cause))
            differs = isinstance(error, PlanMismatch) and told_by is None
            self._done(ExchangeFailed(key=key, suspects=suspects, cause=cause, told_by=told_by, differs=differs))


def _suspects(error: CollectiveError) -> tuple[PeerId, ...]:
    match error:
        case OperationAborted(suspects=suspects):
            return suspects
        case PlanMismatch(peer_id=peer_id):
            return (peer_id,)
        case _:
            return ()
