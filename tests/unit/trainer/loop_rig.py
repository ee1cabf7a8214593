# SPDX-License-Identifier: Apache-2.0
"""One peer's training without processes or network: workers that count samples, and a coordinator in memory.

Training on sample `i` takes 1 from parameter `i % NUMEL`, and the outer optimizer takes the mean as it is. So a payload
says exactly which samples went into it, and `commit` checks that against what the vote says was consumed.

With `streaming`, its settings, there are four layers of 16 parameters. As the workers keep their values then, the next
payload of a fragment is what was trained since the one before, although training goes on while that is under way.

With a `method` of its own, one that is delayed by a whole round, a payload is exactly the work on the samples that its
vote names: what was trained while another one was on its way is in neither.

`script` says what happens to the membership whenever somebody in here waits; when it is used up, nothing happens any
more. A peer without a membership is let in again where the script has nothing else to say.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.leases import LeaseLedger, count
from isthmus.elastic.core.messages import DataPosition, IndexRange
from isthmus.elastic.errors import NotAMember, RoundMissed, RunFinished
from isthmus.elastic.shell.desk import Committed
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.streaming import Streaming
from isthmus.trainer.engine.moments import Moments
from isthmus.trainer.engine.outer_state import OuterState, RoundOutcome
from isthmus.trainer.engine.progress import Progress
from isthmus.trainer.engine.round_exchange import Payload
from isthmus.trainer.engine.sample_feed import SampleFeed
from isthmus.trainer.engine.training_loop import LoopTerms, RoundReport, TrainingLoop
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.errors import WorkerCrashed
from isthmus.trainer.workers.ipc import BackwardDone, Evaluated, Kept, StepDone, StepParts
from isthmus.trainer.workers.link import WorkerStalled
from tests.unit.trainer.rig import stage_mean

NUMEL = 64
BATCH = 2
INNER_STEPS = 3
NUM_BATCHES = 3
"""Of held-out text."""
TABLE = FragmentTable.from_named_shapes((f"layer{number}", (16,)) for number in range(4))
ME = PeerRef(PeerId("0" * 16), Incarnation(1))


class Happening(enum.Enum):
    """What the coordinator does while this peer waits for something."""

    NOTHING = "nothing"
    DEMOTION = "demotion"  # the machine knows it, the effect is not carried out yet
    EVICTION = "eviction"
    RETURN = "return"
    BLINK = "blink"  # out and in again before anybody could look
    BLINK_WITH_COMMITS = "blink with commits"  # and the others went on meanwhile
    MISSED_ROUND = "missed round"  # it is late: the others went on without it, and what it did still counts


def step_done(inner_step: int, num_tokens: int) -> StepDone:
    """Whose loss is its number."""
    return StepDone(
        serial=1,
        inner_step=inner_step,
        loss=float(inner_step),
        num_tokens=num_tokens,
        grad_norm=1.0,
        lr=1.0,
        seconds=0.5,
        parts=StepParts(passes_s=0.25),
    )


@dataclass
class Runner:
    """What the loop reads of trainer.engine.outer_step_runner."""

    payloads: Sequence[Payload] = ()
    outcomes: tuple[RoundOutcome, ...] = ()
    own_weights: tuple[float, ...] = (1.0,)
    speeds: tuple[float, ...] = ()
    told: list[float] = field(default_factory=list)
    """What this peer has told of its own speed."""

    def offer(self, payloads: Sequence[Payload], *, planned_s: float) -> None:
        self.payloads = payloads
        self.told.append(planned_s)

    def take_outcomes(self) -> tuple[RoundOutcome, ...]:
        return self.outcomes


@dataclass
class Commit:
    outer_step: int
    samples: tuple[int, ...]
    num_tokens: int
    is_mine: bool = True


@dataclass
class Pool:
    """Workers that count, and do one thing after the other."""

    rig: "Rig"
    local: Tensor = field(default_factory=lambda: torch.full((NUMEL,), float("nan")))
    inner_steps: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    """All since it began from the anchor."""
    emitted: dict[int, int] = field(default_factory=dict)
    """How many of them there were when a fragment was last in a commit of this peer."""
    hangs_at: int = -1
    """Which request gives no answer, nor does any after it."""
    crash: WorkerCrashed = field(default_factory=lambda: WorkerStalled("step", (0,), 1.0, "hangs"))
    num_hangs: int = 0
    most_steps: int = 0
    """That were with them at once."""
    num_workers: int = 1
    has_room: bool = True
    kept: Tensor | None = None
    judged_at: list[int] = field(default_factory=list)
    """How many inner steps were done, since it began from the anchor, when held-out text was judged."""
    _num_steps: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def answer(self) -> None:
        self.hangs_at -= self.hangs_at > 0
        if self.hangs_at == 0:
            raise self.crash

    async def renew(self) -> None:
        self.hangs_at = -1
        self.num_hangs += 1
        self.local.fill_(torch.nan)
        await self.rig.wait()

    async def load(
        self, ranges: Sequence[slice] = (), *, kind: str = "param", place: int = 0, keep: float = 0.0
    ) -> None:
        assert kind == "param"
        async with self._turn:
            await self.rig.wait()
            self.answer()
            for part in ranges or (slice(0, NUMEL),):
                theirs = self.rig.places[place][part]
                self.local[part] = theirs if keep == 0.0 else keep * self.local[part] + (1 - keep) * theirs
            if not ranges:
                self.inner_steps.clear()
                self.trained.clear()
                self.emitted.clear()
            await self.rig.wait()

    async def step(self, indices: tuple[int, ...], *, inner_step: int, position: float) -> StepDone:
        assert position == inner_step - 1, "nobody tells of commits here"
        self._num_steps += 1
        self.most_steps = max(self.most_steps, self._num_steps)
        try:
            async with self._turn:
                await self.rig.wait()
                self.answer()
                for index in indices:
                    self.local[index % NUMEL] -= 1.0
                self.inner_steps.append(inner_step)
                self.trained += indices
                await self.rig.wait()
        finally:
            self._num_steps -= 1
        return step_done(inner_step, len(indices))

    async def keep(self, *, place: int | None) -> Kept:
        assert not self._num_steps, "an inner step is with the workers"
        await self.rig.wait()
        self.answer()
        self.kept = (self.local if place is None else self.rig.places[place]).clone() if self.has_room else None
        return Kept(serial=1, has_room=self.has_room, num_batches=NUM_BATCHES)

    async def evaluate(self, batches: range | None = None, *, is_kept: bool = False) -> Evaluated:
        """The loss of batch b is the sum of the parameters plus b; batches differ in size."""
        assert not self._num_steps, "an inner step is with the workers"
        await self.rig.wait()
        self.answer()
        values = self.kept if is_kept else self.local
        wanted = range(NUM_BATCHES) if batches is None else batches
        sizes = [number + 1 for number in wanted]
        offset = sum(number * size for number, size in zip(wanted, sizes, strict=True)) / sum(sizes)
        if batches is None:
            offset = 0.0
        self.judged_at.append(len(self.inner_steps))
        return Evaluated(serial=1, loss=float(values.sum()) + offset, num_tokens=sum(sizes))

    async def store(self, ranges: Sequence[slice] = (), *, kind: str = "param") -> None:
        assert kind == "param"
        async with self._turn:
            await self.rig.wait()
            self.answer()
            for place in ranges or (slice(0, NUMEL),):
                self.rig.mailbox[place] = self.local[place]
            await self.rig.wait()


@dataclass
class Overseer:
    """Notes what it is told."""

    rig: "Rig"
    reports: list[RoundReport] = field(default_factory=list)
    standstills: list[bool] = field(default_factory=list)
    is_awaited: bool = False
    stands_still: asyncio.Event = field(default_factory=asyncio.Event)

    def others_wait(self) -> bool:
        return self.is_awaited

    def stepped(self, inner_step: int, done: BackwardDone | StepDone) -> None:
        assert done.loss == inner_step, "a step is told in its turn"

    def blocked(self, is_blocked: bool) -> None:
        self.standstills.append(is_blocked)
        if is_blocked:
            self.stands_still.set()

    async def idle(self, until: asyncio.Future[None]) -> None:
        await self.rig.wait()

    def committed(self, report: RoundReport) -> None:
        self.reports.append(report)

    async def landed(self, report: RoundReport) -> None:
        await self.rig.wait()

    async def replace_workers(self, crash: WorkerCrashed) -> None:
        await self.rig.pool.renew()


class Rig:
    """Membership, coordinator and everything around one training loop."""

    def __init__(
        self,
        hasher: Hasher,
        script: Iterable[Happening] = (),
        *,
        outer_steps: int = 3,
        patience: float = 1e9,
        streaming: Mapping[str, object] | None = None,
        method: DiLoCo | None = None,
        momentum: float = 0.0,
        follows_speed: bool = True,
    ) -> None:
        self.outer_steps = outer_steps
        self.script = deque(script)
        self.outer = method or self._outer({"momentum": momentum}, streaming)
        self.is_delayed_by_a_round = method is not None
        self.plan = OuterPlan(self.outer)
        self.fragments = self.outer.fragments(TABLE)
        self.state = OuterState(self.outer, self.fragments, self.plan, hasher)
        self.places = tuple(torch.zeros(3, NUMEL))
        self.mailbox, *anchors = self.places
        self.state.lend(anchors)
        self.pool = Pool(self)
        self.runner = Runner()
        self.overseer = Overseer(self)
        self.ledger = LeaseLedger()
        self.commits: list[Commit] = []
        self.active_view: View | None = None
        self.is_over = False
        self._epoch = 0
        self._stint = 0
        self._is_demoted = False
        self._changing = asyncio.Lock()
        self.feed = SampleFeed(self, stock=2 * INNER_STEPS * BATCH)
        moments = Moments(
            mailbox=self.mailbox, hasher=hasher, are_shared=False, least_steps=0, has_trained=lambda: False
        )
        self.values = WorkerValues(
            pool=self.pool,
            mailbox=self.mailbox,
            anchors=anchors,
            outer=self.outer,
            plan=self.plan,
            state=self.state,
            read_delivered=lambda _round, payload, out: out.copy_(payload),
            moments=moments,
        )
        self.loop = TrainingLoop(
            membership=self,
            runner=self.runner,
            state=self.state,
            plan=self.plan,
            values=self.values,
            feed=self.feed,
            progress=Progress(self.plan, total_steps=self.plan.inner_step(outer_steps)),
            terms=LoopTerms(batch_size=BATCH, outer_steps=outer_steps, patience=patience, follows_speed=follows_speed),
            overseer=self.overseer,
        )

    def _outer(self, settings: Mapping[str, object], streaming: Mapping[str, object] | None) -> DiLoCo:
        rig, running = self, asyncio.get_running_loop()

        class SlowToEmit(DiLoCo if streaming is None else Streaming):
            """Its thread waits too, and the membership may change meanwhile."""

            def emit(self, *args, **kwargs):
                asyncio.run_coroutine_threadsafe(rig.wait(), running).result(timeout=20.0)
                emitted = DiLoCo.emit(self, *args, **kwargs)
                asyncio.run_coroutine_threadsafe(rig.wait(), running).result(timeout=20.0)
                return emitted

        return SlowToEmit(**{"lr": 1.0, "inner_steps": INNER_STEPS, **settings, **(streaming or {})})

    async def run(self) -> None:
        """The loop's whole life, with its feed."""
        if self.state.held() is None:
            await self.state.found(torch.zeros(NUMEL))
            self.admit()
        feeding = asyncio.ensure_future(self.feed.run())
        try:
            await self.loop.run()
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])

    # -------------------------------------------------------------------------------- what happens

    async def wait(self) -> None:
        """Somebody waits: the next of the script happens."""
        await asyncio.sleep(0)
        if self.script:
            async with self._changing:
                await self._happen(self.script.popleft() if self.script else Happening.NOTHING)

    async def _happen(self, what: Happening) -> None:
        match what:
            case Happening.DEMOTION:
                self._is_demoted = self._is_demoted or self.active_view is not None
                self.active_view = None
            case Happening.EVICTION:
                self.evict()
            case Happening.RETURN:
                self.admit()
            case Happening.BLINK:
                self.evict()
                self.admit()
            case Happening.BLINK_WITH_COMMITS:
                self.evict()
                await self.others_commit()
                await self.others_commit()
                self.admit()
            case Happening.MISSED_ROUND:
                if self.active_view is not None:
                    await self.others_commit()
            case Happening.NOTHING:
                pass

    def evict(self) -> None:
        if self.active_view is not None or self._is_demoted:
            self.active_view = None
            self._is_demoted = False
            self._stint += 1
            self.ledger.release(ME, self.ledger.owned_by(ME))
            self.feed.reset()

    def admit(self) -> None:
        self.evict()
        self._epoch += 1
        held = self.state.held()
        member = Member(ME.peer_id, ME.incarnation, "127.0.0.1:1")
        self.active_view = View(Epoch(self._epoch), held.outer_step, held.digest, (member,))

    async def others_commit(self) -> None:
        """The run goes on without this peer, which replays it."""
        if self.state.live.manifest.outer_step < self.outer_steps - 1:
            (round_,) = self.state.next_rounds()
            numel = self.fragments[round_.fragment.index].numel
            await self._install(torch.full((numel,), 100.0), final=False)
            self.commits.append(Commit(self.state.live.manifest.outer_step, (), 0, is_mine=False))

    async def _install(self, mean: Tensor, *, final: bool, view: View | None = None) -> Committed:
        step = self.state.live.manifest.outer_step
        (round_,) = self.state.next_rounds()
        held = await stage_mean(self.state, mean, {ME.peer_id: 1.0})
        self.runner.outcomes = self.state.install_staged(held)
        key = RoundKey(Epoch(self._epoch), OuterStep(step), round_.fragment.index)
        position = DataPosition(self.ledger.next_index)
        return Committed(key=key, view=view, held=held, final=final, position=position)

    # -------------------------------------------------------------------------------- elastic.shell.member.Membership

    async def activated(self) -> View:
        while self.active_view is None:
            if self.is_over:
                raise RunFinished(20, "left")
            async with self._changing:
                if self.active_view is None:
                    what = self.script.popleft() if self.script else Happening.NOTHING
                    await self._happen(Happening.RETURN if what is Happening.NOTHING else what)
            await asyncio.sleep(0)
        return self.active_view

    async def commit_round(self, ready: RoundReady) -> Committed:
        view, stint = self.active_view, self._stint
        if view is None:
            raise NotAMember("not active")
        if self.state.held().outer_step != ready.outer_step:
            raise RoundMissed(ready.outer_step)
        handed_in = self.runner.payloads[0].emitted.payload
        payload, num_trained = handed_in.clone(), len(self.pool.trained)
        await self.wait()
        async with self._changing:
            if stint != self._stint or self.active_view is None:
                raise NotAMember("evicted")
            if self.state.held().outer_step != ready.outer_step:
                raise RoundMissed(ready.outer_step)
            assert torch.equal(payload, handed_in), "the payload changed before its outcome was known"
            self._audit(ready, payload, num_trained)
            committed = await self._install(payload, final=ready.outer_step + 1 >= self.outer_steps, view=view)
        return committed

    async def take_leases(self, num_samples: int, /) -> tuple[IndexRange, ...]:
        await self.activated()
        stint = self._stint
        await self.wait()
        if stint != self._stint or self.active_view is None:
            raise NotAMember("evicted")
        ranges = self.ledger.plan(max(1, num_samples // 2))
        self.ledger.grant(ME, self.ledger.newest_serial(ME) + 1, ranges)
        await self.wait()  # the grant is given; what happens now, happens before it arrives
        return ranges

    # -------------------------------------------------------------------------------- the audit

    def _audit(self, ready: RoundReady, payload: Tensor, num_trained: int) -> None:
        samples = tuple(index for piece in ready.consumed for index in range(piece.start, piece.stop))
        index, pool = ready.fragment, self.pool
        assert index == self.plan.rounds(ready.outer_step + 1)[0].fragment.index
        share = pool.trained[pool.emitted.get(index, 0) : num_trained]
        if self.is_delayed_by_a_round:
            share = list(samples)
        if len(self.fragments) == 1:
            assert sorted(share) == list(samples), "the vote names other samples than were trained"
        if self.is_delayed_by_a_round or self._keeps_all(ready.outer_step + 1):
            expected = torch.zeros(NUMEL)
            for sample in share:
                expected[sample % NUMEL] += 1.0
            fragment = self.fragments[index]
            expected = fragment.gather(expected, out=torch.empty(fragment.numel))
            assert torch.equal(payload, expected), "the payload is not the work on the samples since the one before"
        assert (ready.num_tokens, ready.weight) == (len(samples), len(share))
        last = self.plan.inner_step(ready.outer_step + 1)
        assert pool.inner_steps == sorted(set(pool.inner_steps)), "a global step was trained twice"
        assert all(step <= last for step in pool.inner_steps[: num_trained // BATCH])
        pool.emitted[index] = num_trained
        self.ledger.consume(ME, ready.consumed)  # asserts that this peer still owns them
        self.commits.append(Commit(ready.outer_step + 1, samples, ready.num_tokens))

    def _keeps_all(self, outer_step: int) -> bool:
        return self.plan.rounds(outer_step)[0].delay == 0 or self.outer.keep == 1.0

    def audit_the_end(self) -> None:
        """Every step is there once, every sample is somewhere, and no lease was forgotten."""
        assert [commit.outer_step for commit in self.commits] == list(range(1, self.outer_steps + 1))
        samples = [index for commit in self.commits for index in commit.samples]
        assert len(samples) == len(set(samples))
        self.ledger.check_invariants()
        assert self.feed.available + count(self.feed.consumed()) == count(self.ledger.owned_by(ME))
