# SPDX-License-Identifier: Apache-2.0
"""What the workers of a peer can be asked for, all of them together: a training step or half of one, values, a loss.

Rules: one answer is made of all workers' answers; a request has a limit, which follows from how long its kind has taken
before (pace.py). The errors are listed in pool.py. Must not know how workers begin and end, nor what an outer step is.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.link import AnswerT, WorkerLink
from isthmus.trainer.workers.pace import WorkerPace
from isthmus.trainer.workers.shared_buffer import MAILBOX


class WorkerRequests:
    """A method for each request.

    Args:
        request_timeout_s: for the first answer to a kind of request, from the request on, and for any later one at
            most.
        hang_timeout_s: for any later one at least: longer where that kind has taken long before.
    """

    def __init__(self, *, request_timeout_s: float, hang_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._link: WorkerLink  # to the present workers, from `_ask_over` on; so is their pace
        self._pace: WorkerPace
        self._answered_s = 0.0

    async def step(self, indices: Sequence[int], *, inner_step: int, position: float | None = None) -> ipc.StepDone:
        """Train one inner step on a batch: `backward` and `update` in one request.

        Two steps may be under way; they are trained in the order of the calls. If the caller stops waiting, the step
        is trained all the same.

        Args:
            indices: samples, 1 to 65536 of them.
            inner_step: global number of the step, from 1.
            position: where the run is before it, which the learning rate follows; None: as far as that number says.

        Returns:
            Loss, norm and tokens of the whole batch; the seconds of the slowest worker.

        Raises:
            TrainingFault, WorkerDied, WorkerStalled: the pool is broken.
        """
        request = ipc.Step(
            serial=self._link.next_serial(),
            inner_step=inner_step,
            position=_position(inner_step, position),
            indices=_batch(indices),
        )
        return _slowest(await self._ask(request, ipc.StepDone))

    async def backward(
        self, indices: Sequence[int], *, inner_step: int, position: float | None = None
    ) -> ipc.BackwardDone:
        """Compute the loss and the clipped gradient on a batch, and leave it there: `store(kind="grad")` reads it.

        Arguments and errors as for `step`. What was left there before is forgotten.
        """
        request = ipc.Backward(
            serial=self._link.next_serial(),
            inner_step=inner_step,
            position=_position(inner_step, position),
            indices=_batch(indices),
        )
        return (await self._ask(request, ipc.BackwardDone))[0]

    async def update(self, *, inner_step: int, position: float | None = None) -> ipc.StepDone:
        """Let the inner optimizer use the gradient that is there now, once for each `backward`.

        One that came by `load(kind="grad")` is not clipped again. Loss and norm are those of the backward pass.
        Arguments, answer and errors as for `step`.
        """
        position = _position(inner_step, position)
        request = ipc.Update(serial=self._link.next_serial(), inner_step=inner_step, position=position)
        return _slowest(await self._ask(request, ipc.StepDone))

    async def load(
        self,
        ranges: Sequence[slice] = (),
        *,
        kind: str = "param",
        place: int = MAILBOX,
        keep: float = 0.0,
        own_steps: int | None = None,
    ) -> int:
        """Make the workers take values from the mailbox: value <- keep * value + (1 - keep) * mailbox.

        Leave the mailbox alone until this returns. The first load must be of all parameters, with keep = 0.

        Args:
            ranges: parts of the flat vector (`Fragment.ranges`); empty: everything.
            kind: as `Fragment.kind`: "param", "grad", or a tensor that the inner optimizer keeps, by its own name.
                Parameters for which it does not keep it are left alone.
            place: of the shared buffer, if the values are not in the mailbox.
            keep: in [0, 1].
            own_steps: of how many inner steps the inner optimizer's state is the outcome from now on; None: as before.

        Returns:
            How many elements were not finite where a part of them was to be kept; they are the mailbox's now.

        Raises:
            ConfigError: the inner optimizer keeps nothing of this kind; `OptimizerJob.require_kinds` tells beforehand.
            WorkerDied, WorkerStalled: the pool is broken.
        """
        request = ipc.Load(
            serial=self._link.next_serial(),
            kind=kind,
            place=place,
            spans=_spans(ranges),
            keep=keep,
            own_steps=own_steps,
        )
        replies = await self._ask(request, ipc.Loaded)
        return sum(reply.num_broken for reply in replies)

    async def store(self, ranges: Sequence[slice] = (), *, kind: str = "param") -> int:
        """Make the workers write values into the mailbox, which is the caller's again when this returns.

        Zeros stand for what does not exist: a kind that is not kept for a parameter, or not before the first step.
        Steps asked for before are in it, those asked for later are not. Arguments and errors as for `load`.

        Returns:
            After how many inner steps of the inner optimizer it is.
        """
        request = ipc.Store(serial=self._link.next_serial(), kind=kind, spans=_spans(ranges))
        replies = await self._ask(request, ipc.Stored)
        return replies[0].own_steps

    async def keep(self, *, place: int | None) -> ipc.Kept:
        """Make the workers keep a copy of the parameters for `evaluate`, if there is room. Errors as for `load`.

        Args:
            place: of the shared buffer, where their values are, and which is theirs until this returns; None: of the
                present ones.
        """
        request = ipc.Keep(serial=self._link.next_serial(), place=place)
        return (await self._ask(request, ipc.Kept))[0]

    async def evaluate(self, batches: range | None = None, *, is_kept: bool = False) -> ipc.Evaluated:
        """Held-out loss, in nats per token. Errors as for `load`.

        Args:
            batches: numbers of batches of held-out text; None: all. With the last one the copy is let go of.
            is_kept: of the parameters that were kept; else of the present ones.
        """
        span = None if batches is None else (batches.start, batches.stop)
        request = ipc.Evaluate(serial=self._link.next_serial(), batches=span, is_kept=is_kept)
        # Found before: all batches at once were held against the pace of one, and healthy workers killed.
        pace = "Evaluate all" if batches is None else None
        return (await self._ask(request, ipc.Evaluated, pace=pace))[0]

    def _ask_over(self, link: WorkerLink) -> None:
        """Ask the workers at this link from now on. Of their pace nothing is known."""
        self._link = link
        self._pace = WorkerPace(floor_s=self._hang_timeout_s, first_s=self._request_timeout_s)

    async def _ask(self, request: ipc.Question, kind: type[AnswerT], *, pace: str | None = None) -> list[AnswerT]:
        """The replies of all workers; how long they took is the pace of this kind of request, or of the one named."""
        name, clock = pace or type(request).__name__, asyncio.get_running_loop().time
        began = clock()
        replies = await self._link.ask(request, kind, self._pace.limit_s(name))
        now = clock()
        self._pace.took(name, now - max(began, self._answered_s))  # they do one after the other
        self._answered_s = now
        return replies


def _spans(ranges: Sequence[slice]) -> tuple[ipc.Span, ...]:
    return tuple((part.start, part.stop) for part in ranges)


def _position(inner_step: int, position: float | None) -> float:
    return inner_step - 1.0 if position is None else position


def _batch(indices: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(indices) <= ipc.MAX_STEP_SAMPLES:
        raise ValueError(f"a step takes 1 to {ipc.MAX_STEP_SAMPLES} samples, not {len(indices)}")
    return tuple(indices)


def _slowest(replies: Sequence[ipc.StepDone]) -> ipc.StepDone:
    return msgspec.structs.replace(replies[0], seconds=max(reply.seconds for reply in replies))
