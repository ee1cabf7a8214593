# SPDX-License-Identifier: Apache-2.0
"""The workers' parameters, and the version of the shared state that they are trained from.

    start_from      all of it becomes the anchor
    step, store     training, and the parameters of a fragment as they are now
    emit            a round's payload: how far the fragment has moved from its anchor
    arrived, land   the round is committed; the workers come to its outcome, or part of the way
    follow          the run went on without this peer: the workers move along

Rules: the base is pinned, because the state may move on and write over whatever is recycled. The mailbox is free for
the next question whenever no question is under way; a payload that must outlast training has memory of its own. Where
the workers stand still until the outcome is known and there is one fragment, the mailbox itself is the payload.

It must not know rounds' order, samples or the membership.
"""

from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import Absorbed, Outer, Round, State, Work
from isthmus.trainer.ipc import StepDone
from isthmus.trainer.moments import Moments
from isthmus.trainer.state_version import Version, gather_anchor
from isthmus.trainer.threads import in_thread
from isthmus.trainer.worker_pool import WorkerPool


class WorkerValues:
    """See the module.

    Args:
        pool: the workers.
        mailbox: the flat vector, fp32, shared with the workers.
        payload: fp32, as long as the largest fragment, or the mailbox itself.
        outer: the method.
        fragments: by index.
        moments: of the workers' optimizer, between peers.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        mailbox: Tensor,
        payload: Tensor,
        outer: Outer,
        fragments: Sequence[Fragment],
        moments: Moments,
    ) -> None:
        self._pool = pool
        self._mailbox = mailbox
        self._payload = payload
        self._outer = outer
        self._fragments = tuple(fragments)
        self._moments = moments
        self._base: Version | None = None
        self._arrived: Version | None = None
        self._is_anchor = False

    @property
    def base(self) -> Version:
        """What the workers train from."""
        assert self._base is not None, "the workers have not been loaded"
        return self._base

    async def start_from(self, version: Version) -> None:
        """The workers begin anew from this version, which is pinned."""
        await in_thread(gather_anchor, version.tensors, self._fragments, out=self._mailbox)
        self._rebase(version)
        self._is_anchor = True
        await self._pool.load(keep=0.0)
        await self._moments.begin(self._pool)

    async def step(self, indices: Sequence[int], *, inner_step: int) -> StepDone:
        """One inner step."""
        self._is_anchor = False
        done = await self._pool.step(indices, inner_step=inner_step)
        await self._moments.after_step(self._pool)
        return done

    # -------------------------------------------------------------------------------- a round of this peer

    async def store(self, index: int) -> None:
        """Put this fragment's parameters into the mailbox, for `emit`."""
        await self._pool.store(self._fragments[index].ranges)

    async def emit(self, round_: Round, work: Work) -> None:
        """Make the round's payload of what `store` has put into the mailbox."""
        index = round_.fragment.index
        await in_thread(self._emit, round_, self._fragments[index], self.base.states[index], work)

    def _emit(self, round_: Round, fragment: Fragment, state: State, work: Work) -> None:
        payload = self._payload[: fragment.numel]
        if self._payload is not self._mailbox:
            fragment.gather(self._mailbox, out=payload)
        self._outer.emit(round_, payload, state, work, out=payload)

    def arrived(self, version: Version) -> None:
        """The round is committed, and this, pinned, is its outcome; the workers go on from the base until `land`."""
        assert self._arrived is None, "one round at a time"
        self._arrived = version

    async def land(self, round_: Round, absorbed: Absorbed) -> None:
        """Bring the workers to the outcome of the round that has arrived."""
        version, self._arrived = self._arrived, None
        assert version is not None, "nothing has arrived"
        if absorbed.target is None:
            self._rebase(version)
            return
        fragment = self._fragments[round_.fragment.index]
        await in_thread(fragment.scatter, absorbed.target, out=self._mailbox)
        self._rebase(version)
        self._is_anchor = len(self._fragments) == 1 and absorbed.keep == 0.0
        await self._pool.load(fragment.ranges, keep=absorbed.keep)

    # -------------------------------------------------------------------------------- the run went on

    async def follow(self, new: Version, require: Callable[[], None]) -> None:
        """Move the workers along with the anchor: what they have done since their base stays what it is.

        `local + (new anchor - old anchor)`, fragment by fragment: the next difference from the new anchor is then the
        late work and whatever is added to it, and nobody else's step is undone.

        Args:
            new: pinned.
            require: raises if what the workers have done does not count any more.
        """
        old = self.base
        moved = new.moved_from(old)
        ranges = tuple(place for index in moved for place in self._fragments[index].ranges)
        if moved:
            try:
                await self._pool.store(ranges)
                require()
            except BaseException:
                new.release()
                raise
            await in_thread(self._shift, moved, new, old)
        self._rebase(new)
        if moved:
            self._is_anchor = False
            await self._pool.load(ranges, keep=0.0)

    def _shift(self, moved: Sequence[int], new: Version, old: Version) -> None:
        for index in moved:
            pairs = zip(
                self._fragments[index].pairs(new.anchors[index]),
                self._fragments[index].pairs(old.anchors[index]),
                strict=True,
            )
            for (after, place), (before, _) in pairs:
                self._mailbox[place].add_(after).sub_(before)

    # -------------------------------------------------------------------------------- the shared parameters

    async def judge_anchor(self, judge: Callable[[], Awaitable[float]]) -> float:
        """Lend the workers to `judge` with the shared parameters of the base; they get their own back.

        Only while nothing else is asked of them. Costs a copy of the parameters for as long as it takes, unless they
        hold the anchor anyway.
        """
        if self._is_anchor:
            return await judge()
        await self._pool.store()
        own = await in_thread(self._mailbox.clone)
        await in_thread(gather_anchor, self.base.tensors, self._fragments, out=self._mailbox)
        await self._pool.load(keep=0.0)
        loss = await judge()
        await in_thread(self._mailbox.copy_, own)
        await self._pool.load(keep=0.0)
        return loss

    def _rebase(self, version: Version) -> None:
        """The workers train from this version now. What has arrived and was not landed on is of a lost membership."""
        before = (self._base, self._arrived)
        self._base, self._arrived = version, None
        for old in before:
            if old is not None:
                old.release()
