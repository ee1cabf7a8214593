# SPDX-License-Identifier: Apache-2.0
"""One peer's training, from the anchor to the next commit and on.

    start from the anchor ─► inner steps on leased samples ─► store ─► emit ─► hand in ─┬─ exchange, vote, commit ─┬─►
                                    ▲                                                   └─ inner steps, if delayed ─┘ │
                                    └──────────────────────────────── land on the outcome ◄───────────────────────────┘

Rounds come one at a time, each of one fragment. Where the method has a delay the workers go on while a round is out, up
to its due step; there the loop waits for the commit, lands, and goes on to the next round.

Rules: which round comes next follows from the global outer step, never from a local count; work is handed in exactly
once, by the vote of the round it went into; when the membership is lost, so are payload, leases and the steps since the
last commit, also if it is won again before this loop looks: what was begun as a member of one view's admission is never
handed in after the next (`_require`). When a round is committed without this peer, because it was late, its work is
kept: the workers are moved along with the anchor, and go on; its samples go with the next round, and the fragment's
difference with the fragment's next. It must not know connections, views' reasons or how workers compute.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from isthmus.collective.core.types import View
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.messages import DataPosition
from isthmus.elastic.errors import ElasticError, NotAMember, RoundMissed, RunFinished
from isthmus.elastic.member import Membership
from isthmus.optim.outer import Round, Work
from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.outer_state import OuterState
from isthmus.trainer.round_runner import RoundRunner
from isthmus.trainer.round_schedule import RoundSchedule
from isthmus.trainer.sample_feed import LeasesLost, SampleFeed
from isthmus.trainer.tally import HandedIn, Tally
from isthmus.trainer.worker_values import WorkerValues

T = TypeVar("T")

_LOOK_S = 0.05
"""Between two looks whether a state that the others have is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What this peer did in one committed round. `loss` is the mean of its inner steps, None if it did none."""

    view: View
    outer_step: int
    digest: bytes
    final: bool
    inner_step: int
    num_tokens: int
    loss: float | None
    train_s: float
    wait_s: float
    """How long the workers stood still for it."""
    position: DataPosition | None


class TrainingLoop:
    """Trains whenever this peer is a member.

    Args:
        membership: says when we are a member, and what became of a round.
        runner: installs what was committed.
        state: the shared state.
        schedule: which round makes which outer step.
        values: the workers.
        feed: leased sample indices; whoever observes the membership resets it.
        batch_size: samples of one inner step.
        outer_steps: after which the run is done: nobody goes on while the last round is out.
        others_wait: whether other members stand in the exchange that this peer has not begun.
        patience: for how many times its own work of a round this peer lets them, before it hands in what it has.
        on_round: told of every commit that holds a payload of this peer, at once.
        on_landed: told of it again before the workers go on from its outcome; may have them judge it.
        on_inner_step: told of every inner step (global number, loss, tokens), for progress.
        on_blocked: told when this peer begins and ceases to stand still for the others.
        replace_workers: gets others in the place of those that hang or died, or raises.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        runner: RoundRunner,
        state: OuterState,
        schedule: RoundSchedule,
        values: WorkerValues,
        feed: SampleFeed,
        batch_size: int,
        outer_steps: int,
        others_wait: Callable[[], bool],
        patience: float,
        on_round: Callable[[RoundReport], None],
        on_landed: Callable[[RoundReport], Awaitable[None]],
        on_inner_step: Callable[[int, float, int], None],
        on_blocked: Callable[[bool], None],
        replace_workers: Callable[[WorkerCrashed], Awaitable[None]],
    ) -> None:
        self._membership = membership
        self._runner = runner
        self._state = state
        self._schedule = schedule
        self._values = values
        self._feed = feed
        self._batch_size = batch_size
        self._outer_steps = outer_steps
        self._others_wait = others_wait
        self._patience = patience
        self._on_round = on_round
        self._on_landed = on_landed
        self._on_inner_step = on_inner_step
        self._on_blocked = on_blocked
        self._replace_workers = replace_workers
        self._clock = asyncio.get_running_loop().time
        self._tally = Tally()
        self._inner_step = 0  # global number of the newest one, or of the last one that was left out
        self._pace_s: float | None = None  # of an inner step, as the last round's were
        self._awaited_since: float | None = None
        self._blocked_since: float | None = None

    async def run(self) -> None:
        """Train until the final commit or the end of the membership. What workers report of themselves comes through.

        Who hangs or dies takes the work since the last commit along, and nothing else: no round is out then, the leases
        stay.
        """
        with contextlib.suppress(RunFinished):
            while True:
                admitted = await self._membership.activated()
                try:
                    with contextlib.suppress(LeasesLost, NotAMember):
                        await self._train_as_member(admitted)
                        return
                except WorkerCrashed as crash:
                    self._feed.take_back()
                    await self._replace_workers(crash)

    async def _train_as_member(self, admitted: View) -> None:
        """Until the run's last commit. `admitted` is the view in which this peer became active."""
        self._require(admitted)
        self._tally = Tally()
        await self._values.start_from(self._state.pin())
        self._inner_step = self._schedule.inner_step_at(self._outer_step)
        # A fresh member may come in the middle of the others' round: then it hands in what it has. Not in the run's
        # first round, which all begin together. So does who has missed a round, or it would be late again and again.
        is_behind = self._outer_step > 0
        is_over = False
        while not is_over:
            try:
                is_over = await self._one_round(admitted, is_behind=is_behind)
                is_behind = False
            except RoundMissed:
                is_behind = True  # the work stays, and the next round begins with following the state
                if not self._has_moved:
                    await asyncio.sleep(_LOOK_S)  # it is on its way

    def _require(self, admitted: View) -> None:
        """Raise NotAMember unless what this peer does has counted without a break since it was admitted."""
        if self._membership.active_view is not admitted:
            raise NotAMember("put out of the view while it trained")

    @property
    def _outer_step(self) -> int:
        """Which state the workers train from."""
        return self._values.base.manifest.outer_step

    @property
    def _has_moved(self) -> bool:
        """Whether the run went on from the state that the workers train from."""
        return self._values.base is not self._state.live

    # -------------------------------------------------------------------------------- rounds

    async def _one_round(self, admitted: View, *, is_behind: bool) -> bool:
        """From one state to the next. Returns whether it was the run's last.

        Raises:
            RoundMissed: it was committed without this peer.
            NotAMember, LeasesLost: the membership ended; nothing of this round counts.
        """
        round_ = await self._do_the_work(admitted, is_behind=is_behind)
        handed_in = self._tally.hand_in(round_.fragment.index)
        steps = handed_in.share.inner_steps
        await self._values.emit(round_, Work(inner_steps=steps, samples=float(steps * self._batch_size)))
        self._require(admitted)
        ready = RoundReady(
            outer_step=self._values.base.manifest.outer_step,
            fragment=round_.fragment.index,
            weight=float(handed_in.share.num_tokens),
            num_tokens=handed_in.work.num_tokens,
            consumed=self._feed.consumed(),
        )
        self._awaited_since = None
        try:
            async with _beside(self._commit(round_, ready, handed_in)) as outcome:
                if round_.delay and ready.outer_step + 1 < self._outer_steps:
                    with contextlib.suppress(WorkerCrashed):  # it will be raised again, once this round is out
                        await self._train(round_.due_step, admitted, is_behind=False, outcome=outcome)
                self._block()
                report = await outcome
        finally:
            self._unblock()
        absorbed = self._runner.absorbed
        assert absorbed is not None, "a commit was installed without an outcome"
        await self._values.land(round_, absorbed)
        await self._on_landed(report)
        return report.final

    async def _commit(self, round_: Round, ready: RoundReady, handed_in: HandedIn) -> RoundReport:
        """Hand a round in and see it committed."""
        committed = await self._membership.commit_round(ready)
        live = self._state.pin()
        self._values.arrived(live)
        assert committed.held == live.held, "another state is installed than was committed"
        self._feed.settle(ready.consumed)
        self._tally.settle(handed_in)
        report = RoundReport(
            view=committed.view,
            outer_step=committed.held.outer_step,
            digest=committed.held.digest,
            final=committed.final,
            inner_step=round_.inner_step,
            num_tokens=handed_in.work.num_tokens,
            loss=handed_in.work.mean_loss,
            train_s=handed_in.work.train_s,
            wait_s=0.0 if self._blocked_since is None else self._clock() - self._blocked_since,
            position=committed.position,
        )
        self._on_round(report)
        return report

    def _block(self) -> None:
        self._blocked_since = self._clock()
        self._on_blocked(True)

    def _unblock(self) -> None:
        if self._blocked_since is not None:
            self._blocked_since = None
            self._on_blocked(False)

    # -------------------------------------------------------------------------------- work

    async def _do_the_work(self, admitted: View, *, is_behind: bool) -> Round:
        """Train until the round's payload can be made of what is in the mailbox. Returns the round."""
        while True:
            self._require(admitted)
            if self._has_moved:
                await self._values.follow(self._state.pin(), lambda: self._require(admitted))
                self._inner_step = max(self._inner_step, self._schedule.inner_step_at(self._outer_step))
                is_behind = True
            round_ = self._schedule.round_after(self._outer_step)
            await self._train(round_.inner_step, admitted, is_behind=is_behind)
            await self._values.store(round_.fragment.index)
            self._require(admitted)
            if not self._has_moved:
                self._inner_step = round_.inner_step
                return round_

    async def _train(
        self,
        until: int,
        admitted: View,
        *,
        is_behind: bool,
        outcome: "asyncio.Future[RoundReport] | None" = None,
    ) -> None:
        """Inner steps up to this one; or fewer, for who is behind while others wait, or keeps them waiting for long.

        `outcome` is that of the round which is out meanwhile. Without one, it ends when the run goes on elsewhere.
        """
        began, first = self._clock(), self._inner_step
        while self._inner_step < until and not self._must_hurry(is_behind=is_behind):
            self._require(admitted)
            if self._has_moved if outcome is None else outcome.done() and outcome.exception() is not None:
                break
            indices = await self._feed.take(self._batch_size)
            self._inner_step += 1
            done = await self._values.step(indices, inner_step=self._inner_step)
            self._tally.stepped(done.loss, done.num_tokens)
            self._on_inner_step(self._inner_step, done.loss, done.num_tokens)
        taken_s = self._clock() - began
        self._tally.took(taken_s)
        if self._inner_step > first:
            self._pace_s = taken_s / (self._inner_step - first)

    def _must_hurry(self, *, is_behind: bool) -> bool:
        """Whether the others wait for so long that the steps missing here cost more than they give."""
        if not self._others_wait():
            self._awaited_since = None
            return False
        now = self._clock()
        self._awaited_since = self._awaited_since or now
        if is_behind:
            return True
        if self._pace_s is None or not self._tally.unsettled.inner_steps:
            return False
        outer_step = self._outer_step
        begin, end = (self._schedule.inner_step_at(step) for step in (outer_step, outer_step + 1))
        return now - self._awaited_since > self._patience * (end - begin) * self._pace_s


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, T]) -> "AsyncIterator[asyncio.Future[T]]":
    """Let this go on while the body runs. When the body is left it has ended, cancelled if it had not."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await asyncio.sleep(0)  # what has ended is taken in
        task.cancel()
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ElasticError):
            raise error  # else the body has left for the same reason
