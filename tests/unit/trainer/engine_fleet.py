# SPDX-License-Identifier: Apache-2.0
"""Peers that train under the daemon's engine in one event loop: real exchanges on loopback, votes counted in memory.

Everything between the workers and the votes is the product's: training loop, course, values, private state, exchanges,
shared state. Workers are rows of tests/unit/optim/adam_lab.py, the ones that `optim.simulate` trains too.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from isthmus.collective.core.types import Epoch, OuterStep, RoundKey, View
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.messages import DataPosition, Held, IndexRange
from isthmus.elastic.errors import RunFinished
from isthmus.elastic.shell.desk import Committed
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.outer import PARAM, Outer
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.moments import Moments
from isthmus.trainer.engine.own_state import OwnState
from isthmus.trainer.engine.progress import Progress
from isthmus.trainer.engine.sample_feed import SampleFeed
from isthmus.trainer.engine.state_version import has_anchor
from isthmus.trainer.engine.training_loop import LoopTerms, RoundReport, TrainingLoop
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.ipc import BackwardDone, StepDone
from tests.unit.optim.adam_lab import AdamRows, Rows
from tests.unit.optim.lab import INITIAL, TABLE
from tests.unit.trainer.loop_rig import step_done
from tests.unit.trainer.rig import Site, view_of

BATCH = 4
WORKERS = ("ash", "birch", "cedar")


class Pool:
    """The workers of one peer: one row."""

    def __init__(self, rows: Rows, row: int, places: Sequence[torch.Tensor]) -> None:
        self._rows, self._row, self._places = rows, row, places
        self._mailbox = places[0]
        self._num_steps = 0

    async def load(self, ranges: Sequence[slice] = (), *, kind: str = PARAM, place: int = 0, keep: float = 0.0) -> None:
        await asyncio.sleep(0)
        local, theirs = self._rows.tensors[kind][self._row], self._places[place]
        for part in ranges or (slice(0, TABLE.numel),):
            local[part] = keep * local[part] + (1 - keep) * theirs[part] if keep else theirs[part]

    async def store(self, ranges: Sequence[slice] = (), *, kind: str = PARAM) -> None:
        await asyncio.sleep(0)
        for place in ranges or (slice(0, TABLE.numel),):
            self._mailbox[place] = self._rows.tensors[kind][self._row][place]

    async def step(self, indices: Sequence[int], *, inner_step: int, position: float) -> StepDone:
        await asyncio.sleep(0)
        self._num_steps += 1
        self._rows.backward([self._row], [self._num_steps])
        self._rows.update([self._row], [self._num_steps])
        return step_done(inner_step, len(indices))

    async def backward(self, indices: Sequence[int], *, inner_step: int, position: float) -> BackwardDone:
        await asyncio.sleep(0)
        self._num_steps += 1
        self._rows.backward([self._row], [self._num_steps])
        return BackwardDone(serial=1, loss=float(inner_step), num_tokens=len(indices))

    async def update(self, *, inner_step: int, position: float) -> StepDone:
        await asyncio.sleep(0)
        self._rows.update([self._row], [self._num_steps])
        return step_done(inner_step, BATCH)


@dataclass
class Coordinator:
    """Takes a vote of everybody, and demands that they are equal."""

    num_members: int
    outer_steps: int
    votes: dict[int, list[bytes]] = field(default_factory=dict)
    all_here: dict[int, asyncio.Event] = field(default_factory=dict)

    async def vote(self, outer_step: int, digest: bytes) -> None:
        ballot = self.votes.setdefault(outer_step, [])
        ballot.append(digest)
        event = self.all_here.setdefault(outer_step, asyncio.Event())
        if len(ballot) == self.num_members:
            event.set()
        await event.wait()
        assert len(set(ballot)) == 1, f"outer step {outer_step}: the members have staged different states"


class Peer:
    """One peer; it is its own membership, lessor and overseer."""

    def __init__(
        self,
        site: Site,
        rows: Rows,
        row: int,
        coordinator: Coordinator,
        hasher: Hasher,
        *,
        is_awaited: bool = False,
    ) -> None:
        self.site, self.coordinator, self.is_awaited = site, coordinator, is_awaited
        self.parameters = rows.tensors[PARAM][row]
        places = tuple(torch.zeros(3, TABLE.numel))
        self.mailbox, *anchors = places
        site.state.lend(anchors)
        self.view: View
        self.reports: list[RoundReport] = []
        self.anchors: list[dict[str, torch.Tensor]] = []
        self._next_index = 0
        self.plan = OuterPlan(site.outer)
        self._pool, self._hasher = Pool(rows, row, places), hasher
        self._anchors = anchors
        self.feed = SampleFeed(self, stock=1000)
        self.values = self.new_values()
        self.loop = TrainingLoop(
            membership=self,
            runner=site.runner,
            state=site.state,
            plan=self.plan,
            values=self.values,
            feed=self.feed,
            progress=Progress(self.plan, total_steps=self.plan.inner_step(coordinator.outer_steps)),
            terms=LoopTerms(batch_size=BATCH, outer_steps=coordinator.outer_steps, patience=1e9, follows_speed=False),
            overseer=self,
        )

    def new_values(self, recall: Callable[[Held], Awaitable[OwnState | None]] | None = None) -> WorkerValues:
        """What a start of this peer has of its workers; `recall`: what its disk knows."""
        site = self.site
        return WorkerValues(
            pool=self._pool,
            mailbox=self.mailbox,
            anchors=self._anchors,
            outer=site.outer,
            plan=self.plan,
            state=site.state,
            read_delivered=site.runner.exchanges.read_delivered,
            moments=Moments(
                mailbox=self.mailbox, hasher=self._hasher, are_shared=False, least_steps=0, has_trained=lambda: False
            ),
            first_parameters=None
            if has_anchor(site.outer, site.state.fragments)
            else partial(in_thread, INITIAL.clone),
            recall=recall,
        )

    # trainer.engine.training_loop.Overseer

    def others_wait(self) -> bool:
        return self.is_awaited

    def stepped(self, inner_step: int, done: BackwardDone | StepDone) -> None:
        pass

    def blocked(self, is_blocked: bool) -> None:
        pass

    def committed(self, report: RoundReport) -> None:
        self.reports.append(report)
        self.anchors.append({name: tensor.clone() for name, tensor in self.site.state.live.tensors.items()})

    async def idle(self, until: asyncio.Future[None]) -> None:
        pass

    async def landed(self, report: RoundReport) -> None:
        pass

    async def replace_workers(self, crash: Exception) -> None:
        raise crash

    # elastic.shell.member.Membership

    @property
    def active_view(self) -> View:
        return self.view

    async def activated(self) -> View:
        return self.view

    async def take_leases(self, num_samples: int, /) -> tuple[IndexRange, ...]:
        if num_samples <= 0:
            raise RunFinished(0, "enough")
        first, self._next_index = self._next_index, self._next_index + num_samples
        return (IndexRange(first, self._next_index),)

    async def commit_round(self, ready: RoundReady) -> Committed:
        key = RoundKey(self.view.epoch, ready.outer_step, ready.fragment)
        made = await self.site.runner.exchange(self.view, key, ready.weight)
        await self.coordinator.vote(ready.outer_step, made.digest)
        held = Held(OuterStep(ready.outer_step + 1), made.digest)
        final = held.outer_step == self.coordinator.outer_steps
        await self.site.runner.install_staged(key, held, final=final)
        return Committed(key=key, view=self.view, held=held, final=final, position=DataPosition(0))


@contextlib.asynccontextmanager
async def fleet(
    outer: Outer,
    hasher: Hasher,
    *,
    outer_steps: int,
    codec: str = "raw",
    workers: Sequence[str] = WORKERS,
    rows: Rows | None = None,
) -> AsyncIterator[list[Peer]]:
    """Peers of a new run, in a view of all; `rows` are their workers, with Adam where none are given."""
    rows = rows or AdamRows(rows=len(workers))
    coordinator = Coordinator(len(workers), outer_steps)
    sites = [Site(number, hasher, outer=outer, codec=codec, table=TABLE) for number in range(len(workers))]
    try:
        for row, site in enumerate(sites):
            rows.begin(row, workers[row])
            await site.listener.start()
            await site.state.found(INITIAL)
        view = view_of(sites)
        await asyncio.gather(*(site.runner.install_view(view) for site in sites))
        peers = [Peer(site, rows, row, coordinator, hasher) for row, site in enumerate(sites)]
        for peer in peers:
            peer.view = view
        yield peers
    finally:
        for site in sites:
            await site.close()


async def train(peers: Sequence[Peer]) -> None:
    """Until the last outer step of all."""
    async with asyncio.TaskGroup() as tasks:
        feeding = [tasks.create_task(peer.feed.run()) for peer in peers]
        await asyncio.gather(*(peer.loop.run() for peer in peers))
        for task in feeding:
            task.cancel()


__all__ = ["BATCH", "WORKERS", "Epoch", "fleet", "train"]
