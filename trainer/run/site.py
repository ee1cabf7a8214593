# SPDX-License-Identifier: Apache-2.0
"""Where this peer trains: its workers with their mailbox, others in their place when they hang or die (`Site`); and
what their training has to do with the rest of the peer (`PeerOverseer`): record, disk, the coordinator's patience.

Must not know what a training loop does next, nor how a peer ends.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from isthmus.collective import Communicator
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.shell.member import Membership
from isthmus.trainer.config.wiring import fragment_table, model_of, tokens_per_sample, training_job
from isthmus.trainer.engine.evaluation import Evaluation, Judged, Turns
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.errors import TrainingFault, WorkerCrashed, WorkerDiverged, WorkerOutOfMemory
from isthmus.trainer.record import events, translation
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.run.holdings import Holdings
from isthmus.trainer.run.preparation import Start
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.ipc import BackwardDone, StepDone
from isthmus.trainer.workers.make_pool import loop_pool, worker_pool
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.process import WorkerDied
from isthmus.trainer.workers.shared_buffer import SharedBuffer

_SIGN_OF_LIFE_S = 1.0
_MAX_REPLACED = 3
"""Workers that hang or die again and again, and never train a round, do so for a reason that no new start mends."""


class Site:
    """The workers are there while `pool` is entered. `shares_parameters`: whether the method shares theirs."""

    def __init__(self, start: Start, chronicle: Chronicle, *, shares_parameters: bool) -> None:
        self._start = start
        self._chronicle = chronicle
        self._shares_parameters = shares_parameters
        loop, numel = start.loop, fragment_table(start.config.model).numel
        self._buffer = SharedBuffer.create(numel) if loop is None else SharedBuffer(loop.facts.mailbox_fd, numel)
        self.mailbox = self._buffer.tensor
        """[numel] fp32."""
        self.anchors = self._buffer.anchors
        """[numel] fp32 each; what lies there workers read without a copy."""
        self.pool = self._own_workers() if loop is None else loop_pool(loop)
        self._first_values: Tensor | None = None  # of a loop, where nobody shares parameters
        self._num_replaced = 0  # since a commit held work of this peer

    def _own_workers(self) -> WorkerPool:
        start, node = self._start, self._start.config.node
        assert start.text is not None, "workers of our own have a text"
        return worker_pool(
            training_job(start.config),
            mailbox=self._buffer,
            corpus=start.text.corpus,
            shuffle_shards=start.config.data.shuffle_shards,
            num_workers=node.local_workers,
            device=node.device,
            num_threads=node.threads or None,
            log_dir=start.options.run_dir,
            hang_timeout_s=node.hang_timeout_s,
        )

    @property
    def has_loop(self) -> bool:
        """Whether a loop of somebody's own trains here."""
        return self._start.loop is not None

    async def begin(self) -> None:
        """The workers are there. Where nobody shares parameters those of a loop are kept: it goes on from them."""
        self._tell_workers()
        if self.has_loop and not self._shares_parameters:
            await self.pool.store()
            self._first_values = await in_thread(self.mailbox.clone)

    async def first_parameters(self) -> Tensor:
        """The parameters of a new run, [numel]: by its seed, or those that the loop came with. Not to be kept."""
        if self._first_values is not None:
            return self._first_values
        if self.has_loop:
            await self.pool.store()
            return self.mailbox
        config = self._start.config
        return await in_thread(partial(model_of(config).initial_parameters, config.run.seed))

    async def replace_workers(self, crash: WorkerCrashed) -> None:
        """Once more, unless that has not helped before. Who had too little memory is given less at a time, if possible.

        Raises:
            WorkerCrashed: it has not, or a loop trains here.
            TrainingFault: what cannot be made less does not fit.
        """
        if self.has_loop:
            # What a loop keeps beside its parameters only it knows, so it cannot begin anew from here. Found before:
            # where its values were no numbers, the peer ended with the failure of a link that had not failed, "None".
            raise crash.of_loop() if isinstance(crash, WorkerDiverged) else crash
        while True:
            if not self._takes_less(crash):
                if self._num_replaced == _MAX_REPLACED:
                    raise crash
                self._num_replaced += 1
                self._chronicle.emit(translation.crashed(crash))
            try:
                await self.pool.renew()
            except WorkerCrashed as again:
                crash = again
            else:
                self._tell_workers()
                return

    def _takes_less(self, crash: WorkerCrashed) -> bool:
        """Whether there was no memory left, and the next workers need less."""
        is_certain = isinstance(crash, WorkerOutOfMemory)
        micro_batch = self.pool.micro_batch
        if micro_batch is None or not (is_certain or (isinstance(crash, WorkerDied) and crash.was_out_of_memory)):
            return False
        before = micro_batch.size
        if micro_batch.halve():
            if not is_certain:
                self._chronicle.emit(translation.crashed(crash))
            self._chronicle.emit(events.OutOfMemory(micro_batch=micro_batch.size, cause=str(crash)))
            return True
        if not is_certain:  # the kernel ends who has most, which need not be who took too much
            return False
        samples = "a sample does" if before == 1 else f"a micro-batch of {before} samples does"
        smaller = "" if before == 1 else "a smaller node.micro_batch or "
        raise TrainingFault(
            f"{samples} not fit into the memory of a worker: {crash.problem}",
            cure=f'take {smaller}node.activation_checkpointing = "full", more local workers or a smaller model',
        )

    def _tell_workers(self) -> None:
        config = self._start.config
        flops = None if self.has_loop else model_of(config).num_flops_per_token(tokens_per_sample(config.model))
        self._chronicle.emit(translation.workers_ready(self.pool, flops))

    def proved(self) -> None:
        """A commit holds work of these workers."""
        self._num_replaced = 0

    def close(self) -> None:
        """Let go of the mailbox."""
        self._buffer.close()


@dataclass(slots=True, eq=False)
class PeerOverseer:
    """The training loop's `Overseer`.

    Attributes:
        start, chronicle: of this process.
        communicator: moves bytes, which is progress too.
        holdings: keep what is committed.
        site, values: the workers.
        membership: hears how much gets done; set before the training begins.
        is_leaving: whether this peer is to leave the run.
        inner_steps: of this start.
        num_rounds: commits of this start that hold work of this peer.
    """

    start: Start
    chronicle: Chronicle
    communicator: Communicator
    holdings: Holdings
    site: Site
    values: WorkerValues
    is_leaving: Callable[[], bool]
    membership: Membership = field(init=False)
    inner_steps: int = 0
    num_rounds: int = 0
    _signs_of_life: int = 0
    _is_blocked: bool = False
    _turns: Turns = field(init=False)
    _evaluation: Evaluation = field(init=False)

    def __post_init__(self) -> None:
        config, clock = self.start.config, asyncio.get_running_loop().time
        self._turns = Turns(every=config.eval.every, tokens_per_sample=tokens_per_sample(config.model))
        self._evaluation = Evaluation(self.values, self.site.pool, clock, self._judged)
        if (known := self.holdings.certificate) is not None:
            self.certified(known)

    def others_wait(self) -> bool:
        """See Overseer."""
        return not self.membership.is_excused and self.communicator.is_awaited()

    def stepped(self, inner_step: int, done: BackwardDone | StepDone) -> None:
        """See Overseer."""
        self.inner_steps += 1
        self.chronicle.emit(translation.stepped(inner_step, done))
        self._tell_progress()

    def blocked(self, is_blocked: bool, /) -> None:
        """See Overseer."""
        self._is_blocked = is_blocked
        if is_blocked:
            self.chronicle.emit(events.HandedIn())
        self._tell_progress()

    def committed(self, report: RoundReport) -> None:
        """See Overseer."""
        self.num_rounds += 1
        self.site.proved()
        mfu = self.chronicle.figures.mfu_of(report.work.step_tokens, report.work.step_s)
        self.chronicle.emit(translation.trained(report, mfu))
        self.holdings.committed(report)

    async def landed(self, report: RoundReport) -> None:
        """See Overseer."""
        await self.holdings.landed(report, self.values, may_be_last=report.final or self.is_leaving())
        if self.site.has_loop:
            return
        step, view = report.outer_step, report.view
        rank = self._turns.rank(step, len(view.members), is_final=report.final)
        await self._with_signs_of_life(self._evaluation.advance())
        if rank is not None and view.rank_of(self.start.me.peer_id) == rank:
            await self._with_signs_of_life(self._evaluation.begin(step, self._turns.tokens(step)))
        if report.final:
            await self._with_signs_of_life(self._evaluation.finish())

    async def idle(self, until: asyncio.Future[None], /) -> None:
        """See Overseer."""
        await self._evaluation.idle(until)

    def certified(self, certificate: Certificate) -> None:
        """This is committed, by whomever."""
        self._turns.committed(certificate.made.outer_step, certificate.position)

    async def replace_workers(self, crash: WorkerCrashed) -> None:
        """See Overseer."""
        self._evaluation.drop()
        await self.site.replace_workers(crash)
        self.values.workers_replaced()

    def _judged(self, judged: Judged) -> None:
        text = self.start.text
        assert text is not None, "workers of our own have a text"
        self.chronicle.emit(translation.evaluated(judged, bytes_per_token=text.corpus.bytes_per_token))

    async def _with_signs_of_life(self, judging: Coroutine[None, None, None]) -> None:
        """That may take long, and has the pool's deadline; the others must not call it a stall."""
        task = asyncio.ensure_future(judging)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_SIGN_OF_LIFE_S)
                self._signs_of_life += 1
                self._tell_progress()
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _tell_progress(self) -> None:
        progress = self.inner_steps + self._signs_of_life + self.communicator.progress()
        self.membership.progressed(progress, inner_steps=self.inner_steps, blocked=self._is_blocked)
