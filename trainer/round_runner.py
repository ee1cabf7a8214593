# SPDX-License-Identifier: Apache-2.0
"""A round as the membership asks for it: exchange the payload, absorb the mean into staging, install or forget it.

This is the trainer's half of elastic/member.py. Rules: the payload stays as it is until the round's outcome is known,
so that a round can run again in the next view; nothing shared changes before the commit.
It must not know workers, samples or why a view changed.
"""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from isthmus.collective import Communicator, RoundStats
from isthmus.collective.core.types import Epoch, Member, OuterStep, RoundKey, View
from isthmus.elastic.commit_log import CommitLog
from isthmus.elastic.core.messages import Held
from isthmus.elastic.replica import CommitEntry, ResultChunk
from isthmus.elastic.rounds import Exchanged
from isthmus.optim.outer import Absorbed
from isthmus.trainer.outer_state import OuterState
from isthmus.trainer.round_schedule import RoundSchedule
from isthmus.trainer.threads import in_thread

_SURVEY_EVERY = 20
"""Outer steps between two looks at the links; each costs one small gather. In a new view the second, third, fifth, ...
look as well: what else filled the lines while it formed, such as states that were fetched, is no limit of theirs."""
_MARK_NBYTES = 16
_SURVEY_FRAGMENT = 0x7FFF
"""No fragment of the model has so large a number."""


class Keeper(Protocol):
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


class MemoryKeeper:
    """Keeps results for learners alone: whatever ends this process ends them."""

    def __init__(self, commit_log: CommitLog) -> None:
        self._commit_log = commit_log

    def founded(self, held: Held) -> None:
        """Nothing to keep."""

    async def before_vote(self, key: RoundKey, entry: CommitEntry) -> None:
        """Nothing to wait for."""

    def committed(self, previous: bytes, entry: CommitEntry) -> None:
        """For learners that are a few steps behind."""
        del previous
        self._commit_log.append(entry)


class RoundRunner:
    """Runs rounds between the payload and the outer state, one at a time.

    Args:
        communicator: the collective layer.
        state: live and staged shared state.
        schedule: which round makes which outer step.
        payload: fp32, as long as the largest fragment; the training loop fills its beginning before it says
            `RoundReady`.
        codec: how chunks are written on the wire.
        initial_parameters: makes the run's first parameters, [numel]; slow, runs in a thread.
        on_exchanged: told of every finished exchange, for logs.
        keeper: keeps the results, for learners and for later starts of this peer.
    """

    def __init__(
        self,
        *,
        communicator: Communicator,
        state: OuterState,
        schedule: RoundSchedule,
        payload: Tensor,
        codec: str,
        initial_parameters: Callable[[], Tensor],
        on_exchanged: Callable[[RoundKey, RoundStats], None],
        keeper: Keeper,
    ) -> None:
        self._communicator = communicator
        self._state = state
        self._schedule = schedule
        self._payload = payload
        self._codec = codec
        self._initial_parameters = initial_parameters
        self._on_exchanged = on_exchanged
        self._keeper = keeper
        self._staged_entry: CommitEntry | None = None
        self._surveyed_epoch: Epoch | None = None
        self._survey_from = 0  # what was told with the view
        self._surveyed_from = OuterStep(0)  # the first step in that epoch
        self.absorbed: Absorbed | None = None
        """What the workers do with their values after the newest commit."""

    async def found(self) -> Held:
        """Make the run's first shared state."""
        held = await self._state.found(await in_thread(self._initial_parameters))
        self._keeper.founded(held)
        return held

    async def install_view(self, view: View, survey_from: int = 0) -> None:
        """Connect to the members of this view; the lines are idle while they train, so new ones are measured then."""
        self._survey_from = survey_from
        await self._communicator.install(view)
        self._communicator.look_ahead()

    async def meet(self, member: Member) -> str | None:
        """See `Communicator.meet`."""
        return await self._communicator.meet(member)

    async def exchange(self, view: View, key: RoundKey, weight: float, told: tuple[float, ...] = ()) -> Exchanged:
        """Exchange the payload with the view's members and stage what follows from it.

        Raises:
            CollectiveError: the exchange cannot finish in this view; the payload is unchanged.
        """
        self.discard_staged(key)
        await self._survey_if_due(view, key)
        chunks: list[ResultChunk] = []
        mean = self._state.result_buffer()
        stats = await self._communicator.all_reduce(
            key,
            self._payload[: mean.numel()],
            out=mean,
            weight=weight,
            told=told or None,
            codec=self._codec,
            record=lambda start_numel, _numel, wire: chunks.append(ResultChunk(start_numel, bytes(wire))),
        )
        self._on_exchanged(key, stats)
        weights = tuple(zip((member.peer_id for member in view.members), stats.weights, strict=True))
        round_ = self._schedule.round_after(key.outer_step)
        async with asyncio.TaskGroup() as tasks:
            marking = tasks.create_task(in_thread(_marks_of, stats, tuple(chunks)))
            digest = await self._state.stage(round_, dict(weights))
        entry = CommitEntry(
            outer_step=OuterStep(key.outer_step + 1),
            digest=digest,
            fragment=key.fragment,
            codec=self._codec,
            weights=weights,
            chunks=tuple(sorted(chunks, key=lambda chunk: chunk.start_numel)),
        )
        await self._keeper.before_vote(key, entry)
        self._staged_entry = entry
        return Exchanged(digest=digest, weights=stats.weights, sizes=stats.sizes, results=marking.result())

    async def stage_again(self, entry: CommitEntry) -> None:
        """What an earlier start of this peer voted for is staged again: it may be committed.

        Raises:
            StateDiverged, RemoteProtocolError: it does not fit what is held.
        """
        await self._state.stage_result(entry)
        self._staged_entry = entry

    async def _survey_if_due(self, view: View, key: RoundKey) -> None:
        """All members come to the same points: they begin a view together, and do every round of it."""
        if view.epoch != self._surveyed_epoch:
            self._surveyed_epoch, self._surveyed_from = view.epoch, key.outer_step
        if key.outer_step < self._survey_from:
            return
        if view.world_size > 1 and _is_survey_due(key.outer_step - self._surveyed_from):
            await self._communicator.survey(RoundKey(key.epoch, key.outer_step, _SURVEY_FRAGMENT))

    async def install_staged(self, key: RoundKey, held: Held, *, final: bool) -> None:
        """The round is committed: staging becomes the shared state."""
        del key, final
        assert self._staged_entry is not None, f"nothing is staged for {held}"
        entry, self._staged_entry = self._staged_entry, None
        previous = self._state.live.held.digest
        self.absorbed = self._state.install_staged(held)
        self._keeper.committed(previous, entry)

    def discard_staged(self, key: RoundKey) -> None:
        """The round was aborted: forget what it staged, keep the payload."""
        del key
        self._state.discard_staged()
        self._staged_entry = None


def _marks_of(stats: RoundStats, chunks: tuple[ResultChunk, ...]) -> tuple[bytes, ...]:
    """A mark of what each member has added up, by rank, of its wire form; empty where others pass it on."""
    hashes = [hashlib.sha256() for _ in stats.members]
    for chunk in sorted(chunks, key=lambda chunk: chunk.start_numel):
        for rank, start, stop in stats.roots:
            if start <= chunk.start_numel < stop:
                hashes[rank].update(chunk.data)
    return tuple(made.digest()[:_MARK_NBYTES] for made in hashes) if stats.roots else ()


def _is_survey_due(num_steps: int) -> bool:
    """After so many outer steps in a view: 0, 1, 2, 4, 8, 16, 20, 40, ..."""
    return num_steps % _SURVEY_EVERY == 0 or (num_steps < _SURVEY_EVERY and num_steps.bit_count() == 1)
