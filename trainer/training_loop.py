"""One peer's training, from the anchor to the next commit and on.

    load the anchor ─► inner steps on leased samples ─► store ─► emit ─► round ─► commit ─► load …

Rules: which round comes next follows from the global outer step, never from a local count; work is handed in exactly
once, by the vote of the round it went into; when the membership is lost, so are payload, leases and the steps since the
last commit, also if it is won again before this loop looks: what was begun as a member of one view's admission is never
handed in after the next (`_require`). When a round is committed without this peer, because it was late, its work is
kept: the workers are moved along with the anchor, and go on. It must not know connections, views' reasons or how
workers compute.
"""

import asyncio
import contextlib
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from torch import Tensor

from collective.core.types import View
from elastic.core.events import RoundReady
from elastic.core.messages import DataPosition
from elastic.errors import NotAMember, RoundMissed, RunFinished
from elastic.member import Committed, Membership
from optim.outer import Outer, Round, Work
from trainer.outer_state import OuterState
from trainer.round_runner import RoundRunner
from trainer.round_schedule import RoundSchedule
from trainer.sample_feed import LeasesLost, SampleFeed
from trainer.state_version import Version
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
    """Inner steps that no commit holds yet."""

    losses: list[float] = field(default_factory=list)
    num_tokens: int = 0
    train_s: float = 0.0


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
        patience: for how many times its own work of a round this peer lets them, before it hands in what it has.
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
        patience: float,
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
        self._patience = patience
        self._on_round = on_round
        self._on_inner_step = on_inner_step
        self._on_blocked = on_blocked
        self._clock = asyncio.get_running_loop().time
        self._base: Version | None = None  # what the workers train from, pinned
        self._work = _Work()
        self._round_s: float | None = None  # what a whole round took this peer the last time

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
        self._work = _Work()
        await self._start_from(self._state.pin(), self._state.live.anchors[0], keep=0.0)
        # A fresh member may come in the middle of the others' round: then it hands in what it has. Not in the run's
        # first round, which all begin together.
        is_fresh = self._outer_step > 0
        while not await self._one_round(admitted, is_fresh=is_fresh):
            is_fresh = False

    def _require(self, admitted: View) -> None:
        """Raise NotAMember unless what this peer does has counted without a break since it was admitted."""
        if self._membership.active_view is not admitted:
            raise NotAMember("put out of the view while it trained")

    @property
    def _outer_step(self) -> int:
        """Which state the workers train from."""
        assert self._base is not None, "the workers have not been loaded"
        return self._base.manifest.outer_step

    async def _one_round(self, admitted: View, *, is_fresh: bool) -> bool:
        """From one state to the next. Returns whether it was the run's last.

        Raises:
            NotAMember, LeasesLost: the membership ended; nothing of this round counts.
        """
        round_ = await self._do_the_work(admitted, is_fresh=is_fresh)
        work, base = self._work, self._base
        assert base is not None, "it has trained from something"
        done = Work(inner_steps=len(work.losses), samples=float(len(work.losses) * self._batch_size))
        await in_thread(self._outer.emit, round_, self._mailbox, base.states[0], done, out=self._mailbox)
        self._require(admitted)
        consumed = self._feed.consumed()
        handed_in = self._clock()
        ready = RoundReady(
            outer_step=base.manifest.outer_step,
            fragment=round_.fragment.index,
            weight=float(work.num_tokens),
            num_tokens=work.num_tokens,
            consumed=consumed,
        )
        self._on_blocked(True)
        try:
            committed = await self._membership.commit_round(ready)
        except RoundMissed:
            return False  # the work stays, and the next round begins with following the state
        finally:
            self._on_blocked(False)
        self._feed.settle(consumed)
        self._work = _Work()
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
                train_s=work.train_s,
                wait_s=self._clock() - handed_in,
                position=committed.position,
            )
        )
        return committed.final

    async def _do_the_work(self, admitted: View, *, is_fresh: bool) -> Round:
        """Train until the round's payload can be made of what is in the mailbox. Returns the round."""
        began = self._clock()
        while True:
            self._require(admitted)
            await self._follow(admitted)
            outer_step = self._outer_step
            round_ = self._schedule.round_after(outer_step)
            inner_steps = range(self._schedule.inner_step_at(outer_step) + 1, round_.inner_step + 1)
            await self._train(inner_steps, admitted, is_fresh=is_fresh)
            await self._pool.store()
            self._require(admitted)
            if not self._has_moved:
                self._work.train_s += self._clock() - began
                return round_

    async def _train(self, inner_steps: range, admitted: View, *, is_fresh: bool) -> None:
        """These inner steps; or fewer, for a fresh member whose fellows wait, and for who is far behind the others."""
        work, began = self._work, self._clock()
        awaited_since: float | None = None
        for inner_step in inner_steps:
            if self._others_wait():
                awaited_since = awaited_since or self._clock()
                if is_fresh or (work.losses and self._is_late(awaited_since)):
                    return
            self._require(admitted)
            if self._has_moved:
                return
            indices = await self._feed.take(self._batch_size)
            done = await self._pool.step(indices, inner_step=inner_step)
            work.losses.append(done.loss)
            work.num_tokens += done.num_tokens
            self._on_inner_step(inner_step, done.loss, done.num_tokens)
        self._round_s = self._clock() - began

    def _is_late(self, awaited_since: float) -> bool:
        """Whether the others wait for so long that the steps missing here cost more than they give."""
        limit_s = None if self._round_s is None else self._patience * self._round_s
        return limit_s is not None and self._clock() - awaited_since > limit_s

    # -------------------------------------------------------------------------------- what the workers hold

    @property
    def _has_moved(self) -> bool:
        """Whether the run went on from the state that the workers train from."""
        return self._base is not self._state.live

    async def _follow(self, admitted: View) -> None:
        """Move the workers along with the anchor: what they have done since their base stays what it is.

        `local + (new anchor - old anchor)`: the next pseudo-gradient from the new anchor is then the late work and
        whatever is added to it, and nobody else's step is undone.
        """
        if not self._has_moved:
            return
        new, old = self._state.pin(), self._base
        assert old is not None, "only a started loop follows"
        await self._pool.store()
        if self._membership.active_view is not admitted:
            new.release()
            raise NotAMember("put out of the view while it followed")
        await in_thread(self._shift, new, old)
        self._rebase(new)
        await self._pool.load(keep=0.0)

    def _shift(self, new: Version, old: Version) -> None:
        self._mailbox.add_(new.anchors[0]).sub_(old.anchors[0])

    async def _land(self, committed: Committed) -> None:
        absorbed, live = self._runner.absorbed, self._state.pin()
        assert absorbed is not None, "a commit was installed without an outcome"
        assert committed.held == live.held, "another state is installed than was committed"
        if absorbed.target is None:
            self._rebase(live)
        else:
            await self._start_from(live, absorbed.target, keep=absorbed.keep)

    async def _start_from(self, version: Version, target: Tensor, *, keep: float) -> None:
        """Move the workers towards a tensor of this version, which is pinned: they train from it now."""
        await in_thread(self._mailbox.copy_, target)
        self._rebase(version)
        await self._pool.load(keep=keep)

    def _rebase(self, version: Version) -> None:
        """The workers train from this version now.

        It stays pinned: the state may move on meanwhile, and replayed commits are written into whatever is recycled.
        """
        old, self._base = self._base, version
        if old is not None:
            old.release()
