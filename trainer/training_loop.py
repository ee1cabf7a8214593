"""One peer's training, from the anchor to the next commit and on.

    load the anchor ─► inner steps on leased samples ─► store ─► emit ─► round ─► commit ─► load …

Rules: which round comes next follows from the global outer step, never from a local count; work is handed in exactly
once, by the vote of the round it went into; when the membership is lost, so are payload, leases and the steps since the
last commit, also if it is won again before this loop looks: what was begun as a member of one view's admission is never
handed in after the next (`_require`). It must not know connections, views' reasons or how workers compute.
"""

import asyncio
import contextlib
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from torch import Tensor

from collective.core.types import OuterStep, View
from elastic.core.events import RoundReady
from elastic.core.messages import DataPosition
from elastic.errors import NotAMember, RunFinished
from elastic.member import Committed, Membership
from optim.outer import Outer, Work
from trainer.outer_state import OuterState
from trainer.round_runner import RoundRunner
from trainer.round_schedule import RoundSchedule
from trainer.sample_feed import LeasesLost, SampleFeed
from trainer.threads import in_thread
from trainer.worker_pool import WorkerPool


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
    position: DataPosition | None


@dataclass(slots=True)
class _Work:
    losses: list[float] = field(default_factory=list)
    num_tokens: int = 0


class TrainingLoop:
    """Trains whenever this peer is a member.

    Args:
        membership: says when we are a member, and what became of a round.
        runner: installs what was committed.
        state: the shared state.
        outer: the method.
        schedule: which round makes which outer step.
        pool: the workers.
        mailbox: [numel] fp32, shared with the workers.
        feed: leased sample indices; whoever observes the membership resets it.
        batch_size: samples of one inner step.
        others_wait: whether other members stand in the exchange that this peer has not begun.
        on_round: told of every committed round, before the workers go on; may evaluate and write checkpoints.
        on_inner_step: told of every inner step (global number, loss, tokens), for progress.
        on_blocked: told when this peer begins and ceases to stand still for the others.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        runner: RoundRunner,
        state: OuterState,
        outer: Outer,
        schedule: RoundSchedule,
        pool: WorkerPool,
        mailbox: Tensor,
        feed: SampleFeed,
        batch_size: int,
        others_wait: Callable[[], bool],
        on_round: Callable[[RoundReport], Awaitable[None]],
        on_inner_step: Callable[[int, float, int], None],
        on_blocked: Callable[[bool], None],
    ) -> None:
        self._membership = membership
        self._runner = runner
        self._state = state
        self._outer = outer
        self._schedule = schedule
        self._pool = pool
        self._mailbox = mailbox
        self._feed = feed
        self._batch_size = batch_size
        self._others_wait = others_wait
        self._on_round = on_round
        self._on_inner_step = on_inner_step
        self._on_blocked = on_blocked
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Train until the final commit or the end of the membership. Errors of the workers come through."""
        with contextlib.suppress(RunFinished):
            while True:
                admitted = await self._membership.activated()
                with contextlib.suppress(LeasesLost, NotAMember):
                    await self._train_as_member(admitted)
                    return

    async def _train_as_member(self, admitted: View) -> None:
        """Until the run's last commit. `admitted` is the view in which this peer became active."""
        self._require(admitted)
        await self._load(self._state.anchor, keep=0.0)
        # A fresh member may come in the middle of the others' round: then it hands in what it has. Not in the run's
        # first round, which all begin together.
        is_fresh = self._state.live.manifest.outer_step > 0
        while not await self._one_round(admitted, is_fresh=is_fresh):
            is_fresh = False

    def _require(self, admitted: View) -> None:
        """Raise NotAMember unless this peer has been active without a break since it was admitted."""
        if self._membership.active_view is not admitted:
            raise NotAMember("put out of the view while it trained")

    async def _one_round(self, admitted: View, *, is_fresh: bool) -> bool:
        """From one commit to the next. Returns whether it was the run's last.

        Raises:
            NotAMember, LeasesLost: the membership ended; nothing of this round counts.
        """
        self._require(admitted)
        outer_step = self._state.live.manifest.outer_step
        round_ = self._schedule.round_after(outer_step)
        began = self._clock()
        inner_steps = range(self._schedule.inner_step_at(outer_step) + 1, round_.inner_step + 1)
        work = await self._train(inner_steps, admitted, is_fresh=is_fresh)
        await self._pool.store()
        self._require(admitted)
        done = Work(inner_steps=len(work.losses), samples=float(len(work.losses) * self._batch_size))
        await in_thread(self._outer.emit, round_, self._mailbox, self._state.live.state, done, out=self._mailbox)
        self._require(admitted)
        consumed = self._feed.consumed()
        handed_in = self._clock()
        ready = RoundReady(
            outer_step=OuterStep(outer_step),
            fragment=round_.fragment.index,
            weight=float(work.num_tokens),
            num_tokens=work.num_tokens,
            consumed=consumed,
        )
        self._on_blocked(True)
        try:
            committed = await self._membership.commit_round(ready)
        finally:
            self._on_blocked(False)
        self._feed.settle(consumed)
        await self._land(committed)
        await self._on_round(
            RoundReport(
                view=committed.view,
                outer_step=committed.held.outer_step,
                digest=committed.held.digest,
                final=committed.final,
                inner_step=round_.inner_step,
                num_tokens=work.num_tokens,
                loss=statistics.fmean(work.losses) if work.losses else None,
                train_s=handed_in - began,
                wait_s=self._clock() - handed_in,
                position=committed.position,
            )
        )
        return committed.final

    async def _train(self, inner_steps: range, admitted: View, *, is_fresh: bool) -> _Work:
        """These inner steps, or fewer for a fresh member whose fellows wait already."""
        work = _Work()
        for inner_step in inner_steps:
            if is_fresh and self._others_wait():
                break
            self._require(admitted)
            indices = await self._feed.take(self._batch_size)
            done = await self._pool.step(indices, inner_step=inner_step)
            work.losses.append(done.loss)
            work.num_tokens += done.num_tokens
            self._on_inner_step(inner_step, done.loss, done.num_tokens)
        return work

    async def _land(self, committed: Committed) -> None:
        absorbed = self._runner.absorbed
        assert absorbed is not None, "a commit was installed without an outcome"
        assert committed.held == self._state.held(), "another state is installed than was committed"
        if absorbed.target is not None:
            await self._load(absorbed.target, keep=absorbed.keep)

    async def _load(self, target: Tensor, *, keep: float) -> None:
        """Move the workers towards a tensor of the live state."""
        # Pinned, because this peer may be put out meanwhile and replay commits into whatever is recycled.
        pinned = self._state.pin()
        try:
            await in_thread(self._mailbox.copy_, target)
        finally:
            pinned.release()
        await self._pool.load(keep=keep)
