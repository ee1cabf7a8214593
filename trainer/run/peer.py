# SPDX-License-Identifier: Apache-2.0
"""One peer of a run, put together: network, membership, shared state, workers.

Everything here belongs to one `Peer`, lives in one task group and ends with it. The order of the start matters:
workers first, membership last, so that nobody waits for a peer that is not able to train yet.

It must not know how a run was found or founded (daemon.py), nor what a command looks like.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from isthmus.collective import Communicator
from isthmus.collective.api.callbacks import Callbacks
from isthmus.collective.core.types import Member, OuterStep, PeerRef, RoundKey
from isthmus.collective.errors import CollectiveError, PeerUnreachable
from isthmus.collective.transport import Channel, Hello, Purpose, Security, connect
from isthmus.elastic.core.events import Finish
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import Held
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.donor.donor import Donor
from isthmus.elastic.errors import StateDiverged
from isthmus.elastic.observation import (
    BecameLearner,
    CertificateKept,
    Deviated,
    ElasticEvent,
    TrustHeard,
    ViewInstalled,
)
from isthmus.elastic.shell.member import Membership
from isthmus.elastic.shell.notary import PeerSigner
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.checkpoint.certificates import FILE_NAME as CERTIFICATES_NAME
from isthmus.trainer.checkpoint.certificates import CertificateKeeper, load_certificates
from isthmus.trainer.checkpoint.checkpoint import Checkpoint
from isthmus.trainer.checkpoint.durability import Durability, Origin
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.config.outer_method import pace_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.wiring import (
    bulk_options,
    fragment_table,
    fragments_of,
    member_config,
    outer_of,
    samples_in_stock,
    training_job,
)
from isthmus.trainer.contact.admission import RunTerms
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.data.text import GivenText
from isthmus.trainer.data.text_shelf import MAX_NBYTES as MAX_TEXT_NBYTES
from isthmus.trainer.engine.moments import Moments
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.round_runner import RoundRunner
from isthmus.trainer.engine.sample_feed import SampleFeed
from isthmus.trainer.engine.state_version import has_anchor
from isthmus.trainer.engine.training_loop import RoundReport, TrainingLoop
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.errors import ExitCode, WorkerCrashed
from isthmus.trainer.model.decoder import initial_parameters
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.status import FetchStatus, LeavingStatus
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.loop import Loop
from isthmus.trainer.workers.pool import WorkerPool, loop_pool, worker_pool
from isthmus.trainer.workers.shared_buffer import SharedBuffer

log = logging.getLogger(__name__)

_DIAL_TIMEOUT_S = 5.0
_LAST_ROUND_TIMEOUT_S = 600.0
"""For the evaluation and the checkpoint of the final state, after everybody has said goodbye."""
_SIGN_OF_LIFE_S = 1.0
_MAX_REPLACED = 3
"""Workers that hang or die again and again, and never train a round, do so for a reason that no new start mends."""
_LAST_STEP_TIMEOUT_S = 20.0
"""For the inner step that is under way when this peer's part ends early."""

HelloMaker = Callable[[Purpose, int, int], Hello]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """What the daemon has decided before its peer can start.

    Attributes:
        me: this start of this peer.
        address: where others reach it.
        coordinators: where the coordinator listens, the likeliest first.
        config: the run's, with this peer's own `[node]`.
        terms: the run's.
        corpus: the text, the same on all peers; None: the loop's own affair.
        run_dir: this peer's folder.
        checkpoint: the state that a founder resumes from; None: the newest of this run in `run_dir`, if there is one.
        hello: what this peer says on its own connections.
        security: which of them are encrypted, and as whom.
        bouncer: is told whom the coordinator says to believe.
        loop: who trains here, if it is a loop of somebody's own.
    """

    me: PeerRef
    address: str
    coordinators: tuple[str, ...]
    config: Config
    terms: RunTerms
    corpus: Corpus | None
    run_dir: Path
    checkpoint: Checkpoint | None
    hello: HelloMaker
    security: Security
    bouncer: Bouncer
    loop: Loop | None


class Peer:
    """A peer that trains. `run` is its whole life; `leave` ends it in order.

    `communicator` and `donor` take the connections that the daemon's listener accepts, from the beginning on.
    """

    def __init__(self, plan: PeerPlan, chronicle: Chronicle) -> None:
        config = plan.config
        self._plan = plan
        self._chronicle = chronicle
        self._outer = outer_of(config)
        self._outer_plan = OuterPlan(self._outer)
        fragments = fragments_of(config)
        self.num_parameters = fragment_table(config.model).numel
        self._hasher = Hasher()
        loop = plan.loop
        if loop is None:
            self._mailbox = SharedBuffer.create(self.num_parameters)
        else:
            self._mailbox = SharedBuffer(loop.facts.mailbox_fd, self.num_parameters)
        self._first_values: Tensor | None = None  # of a loop of somebody's own, where nobody shares parameters
        self._state = OuterState(self._outer, fragments, self._outer_plan, self._hasher)
        # Worth the state, anchor and momentum: who has missed more fetches that instead.
        log_nbytes = config.node.commit_log_nbytes
        self._commit_log = CommitLog(max_nbytes=8 * self.num_parameters if log_nbytes is None else log_nbytes)
        self.communicator = Communicator(
            me=plan.me,
            hello=lambda _peer, stream, num_streams: plan.hello(Purpose.BULK, stream, num_streams),
            num_streams=config.net.num_streams,
            chunk_nbytes=config.net.chunk_nbytes,
            options=bulk_options(config),
            security=plan.security,
        )
        plan.bouncer.ends(self.communicator.put_out)
        self._first_parameters = None if has_anchor(self._outer, fragments) else self._begin_with
        self._moments = Moments(
            mailbox=self._mailbox.tensor,
            hasher=self._hasher,
            are_shared=config.inner.type == "adamw" and config.inner.moments == "donor",
            least_steps=pace_of(config).warmup_steps,
            has_trained=lambda: self._inner_steps > 0,
            is_first_round=lambda: (held := self._state.held()) is not None and held.outer_step == 0,
            first_parameters=self._first_parameters,
        )
        self.donor = Donor(
            self._state,
            self._commit_log,
            upload=self.communicator.upload_cap,
            exchanged=self.communicator.progress,
            private=self._moments,
            text=None if plan.corpus is None or plan.corpus.nbytes > MAX_TEXT_NBYTES else GivenText(plan.corpus),
        )
        self.callbacks = Callbacks(self.communicator, dial=self._call_back, serve=self.donor.serve)
        self._durability = Durability(
            plan.run_dir,
            Origin(run_id=plan.terms.run_id, run_manifest=plan.terms.manifest),
            state=self._state,
            commit_log=self._commit_log,
            every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            before_votes=config.members.durable,
            on_saved=chronicle.checkpoint_saved,
            on_failed=chronicle.checkpoint_failed,
        )
        self._private_files = PrivateFiles(
            plan.run_dir / PRIVATE_FOLDER_NAME, plan.terms.run_id, keep=config.checkpoint.keep
        )
        self._runner = RoundRunner(
            communicator=self.communicator,
            state=self._state,
            codec=config.outer.codec,
            initial_parameters=self._begin_with,
            on_exchanged=chronicle.exchanged,
            keeper=self._durability,
        )
        security = plan.security
        self._signer = PeerSigner(security.key, plan.terms.run_id, lambda: security.authorities)
        path = plan.run_dir / CERTIFICATES_NAME
        self._certificates = load_certificates(path, self._signer)
        self._keeper = CertificateKeeper(path, self._certificates)
        if self._certificates:
            self._durability.certified(self._certificates[-1])
        self._membership: Membership | None = None
        self._leaving: bool | None = None
        self._aside: tuple[RoundKey, Held] | None = None
        self._finish: Finish | None = None
        self._inner_steps = 0
        self._signs_of_life = 0
        self._num_rounds = 0
        self._num_replaced = 0  # since a commit held work of this peer
        self._blocked = False

    # -------------------------------------------------------------------------------- life

    async def run(self) -> Finish:
        """Join, train, and end; returns exit code and reason.

        Raises:
            IsthmusError: the workers or this machine gave up.
        """
        try:
            await self._recover()
            async with self._workers() as pool:
                if self._plan.loop is not None and self._first_parameters is not None:
                    await pool.store()
                    self._first_values = await in_thread(self._mailbox.tensor.clone)
                return await self._take_part(pool)
        finally:
            await self.communicator.close()
            self._mailbox.close()
            self._hasher.close()

    def leave(self, *, now: bool) -> None:
        """Leave at the next commit boundary, or at once. Repeated calls change nothing but can hurry it."""
        self._leaving = now or bool(self._leaving)
        if self._membership is not None:
            self._membership.leave(now=now)

    def farewell(self) -> LeavingStatus | None:
        """What keeps this peer that wants to go; None if it does not."""
        if self._leaving is None:
            return None
        if self._finish is not None:
            return LeavingStatus(waits_for="checkpoint", reason=self._finish.reason)
        if self._membership is None:
            return LeavingStatus(waits_for="start")
        fetches = tuple(
            FetchStatus(peer_id=peer_id, sent_bytes=sent, total_bytes=total)
            for peer_id, (sent, total) in sorted(self.donor.fetches().items())
        )
        return LeavingStatus(waits_for=self._membership.leaves_after or "answer", fetches=fetches)

    @property
    def membership(self) -> Membership | None:
        """This peer's part in the run, once it has one."""
        return self._membership

    async def _recover(self) -> None:
        """Begin with what this peer's disk has of the run; what it voted for last may be committed by now."""
        voted = await self._durability.recover(self._plan.checkpoint)
        if voted is None:
            return
        key, entry = voted
        try:
            await self._runner.stage_again(entry)
        except (StateDiverged, CollectiveError) as error:
            log.warning("result_unusable outer_step=%d cause=%r", entry.outer_step, str(error))
        else:
            self._aside = key, Held(entry.outer_step, entry.digest)

    async def _begin_with(self) -> Tensor:
        """The parameters of a new run, [numel]: by its seed, or those that the loop came with. Not to be kept."""
        if self._first_values is not None:
            return self._first_values
        if self._plan.loop is not None:
            await self._pool.store()
            return self._mailbox.tensor
        config = self._plan.config
        return await in_thread(partial(initial_parameters, config.model.decoder_config(), config.run.seed))

    def _workers(self) -> WorkerPool:
        plan, node = self._plan, self._plan.config.node
        if plan.loop is not None:
            return loop_pool(plan.loop)
        assert plan.corpus is not None, "workers of our own have a text"
        return worker_pool(
            training_job(plan.config),
            mailbox=self._mailbox,
            corpus=plan.corpus,
            num_workers=node.local_workers,
            device=node.device,
            num_threads=node.threads or None,
            log_dir=plan.run_dir,
            hang_timeout_s=node.hang_timeout_s,
        )

    async def _take_part(self, pool: WorkerPool) -> Finish:
        plan = self._plan
        machine = MemberMachine(
            member_config(plan.config),
            plan.me,
            plan.address,
            plan.terms.digest(),
            held=self._state.held(),
            aside=self._aside,
            signer=self._signer,
            certificate=self._certificates[-1] if self._certificates else None,
        )
        membership = Membership(
            machine,
            coordinators=plan.coordinators,
            dial=self._dial,
            dial_donor=self._dial_donor,
            runner=self._runner,
            replica=self._state,
            hasher=self._hasher,
            observe=self._observe,
            private=self._moments,
        )
        feed = SampleFeed(membership, stock=samples_in_stock(plan.config))
        self._membership, self._feed, self._pool = membership, feed, pool
        training = self._training(membership, feed, pool)
        self._remember()
        if self._leaving is not None:
            membership.leave(now=self._leaving)
        async with asyncio.TaskGroup() as tasks:
            trained = tasks.create_task(training.run())
            helping = (
                feed.run(),
                self._durability.run(),
                self._private_files.run(),
                self._keeper.run(),
                pool.failed(),
                self.callbacks.run(),
            )
            helpers = [tasks.create_task(task) for task in helping]
            self._finish = finish = await membership.run()
            # We have said goodbye; the last state is still to be judged (if the run is complete) and kept.
            is_complete = finish.code == ExitCode.DONE
            await asyncio.wait([trained], timeout=_LAST_ROUND_TIMEOUT_S if is_complete else _LAST_STEP_TIMEOUT_S)
            await self._durability.finish()
            if self._values.has_base:
                await self._keep_private(self._values.base.held, is_last=True)
            for task in (trained, *helpers):
                task.cancel()
        await self._keeper.drain()
        return finish

    def _remember(self) -> None:
        """Go on with this peer's own state, if its disk has the one that goes with the shared one that it holds."""
        held = self._state.held()
        private = None if held is None else self._private_files.load(held)
        if held is not None and private is not None:
            log.info("private_state_remembered outer_step=%d", held.outer_step)
            self._values.remember(held, private)

    def _training(self, membership: Membership, feed: SampleFeed, pool: WorkerPool) -> TrainingLoop:
        self._values = WorkerValues(
            pool=pool,
            mailbox=self._mailbox.tensor,
            outer=self._outer,
            plan=self._outer_plan,
            state=self._state,
            read_delivered=self._runner.exchanges.read_delivered,
            moments=self._moments,
            first_parameters=self._first_parameters,
        )
        return TrainingLoop(
            membership=membership,
            runner=self._runner,
            state=self._state,
            plan=self._outer_plan,
            values=self._values,
            feed=feed,
            batch_size=self._plan.config.inner.batch_size,
            outer_steps=self._plan.config.run.outer_steps,
            others_wait=lambda: not membership.is_excused and self.communicator.is_awaited(),
            patience=self._plan.config.members.patience,
            on_round=self._on_round,
            on_landed=self._on_landed,
            on_inner_step=self._on_inner_step,
            on_blocked=self._on_blocked,
            replace_workers=self._replace_workers,
        )

    async def _dial(self, address: str, purpose: Purpose) -> Channel:
        hello = self._plan.hello(purpose, 0, 1)
        return await connect(address, hello, timeout_s=_DIAL_TIMEOUT_S, security=self._plan.security)

    async def _dial_donor(self, member: Member) -> Channel:
        """Dial it, or where that does not get through have it call us."""
        if not self.communicator.calls_us(member.ref):
            try:
                return await self._dial(member.address, Purpose.STATE)
            except PeerUnreachable as error:
                log.debug("donor_unreachable peer_id=%s cause=%s", member.peer_id, error)
        return await self.callbacks.open(member, timeout_s=_DIAL_TIMEOUT_S)

    async def _call_back(self, address: str, ref: PeerRef) -> Channel:
        hello, security = self._plan.hello(Purpose.CALLED, 0, 1), self._plan.security
        return await connect(address, hello, timeout_s=_DIAL_TIMEOUT_S, security=security, expect=ref.peer_id)

    # -------------------------------------------------------------------------------- what happens

    def _observe(self, event: ElasticEvent) -> None:
        match event:
            case BecameLearner():
                self._feed.reset()
                if self._leaving is not None:
                    self._durability.save_held()  # it may be the only one, and is not to die with this process
            case TrustHeard(trust=trust):
                self._plan.bouncer.heard(trust)
            case CertificateKept(certificate=certificate):
                self._durability.certified(certificate)
                self._keeper.offer(certificate)
                if certificate.made.outer_step < self._commit_log.span.stop - 1:
                    self._commit_log.clear()  # the run went back behind commits that nobody else has heard of
            case ViewInstalled(view=view) if self._num_rounds == 0:
                wanted = self._plan.config.members.start_peers
                if view.world_size < wanted:
                    log.info(
                        "waiting_for_peers present=%d wanted=%d; others join with the ticket", view.world_size, wanted
                    )
            case Deviated(where=where) if where is not None:
                self._chronicle.deviated(event, self._state.parameters_in(where))
                return
            case _:
                pass
        self._chronicle.observe(event)

    def _on_inner_step(self, inner_step: int, loss: float | None, num_tokens: int) -> None:
        self._inner_steps += 1
        self._chronicle.inner_step(inner_step, loss, num_tokens)
        self._tell_progress()

    def _on_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        if blocked:
            self._chronicle.handed_in()
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self._membership is not None:
            progress = self._inner_steps + self._signs_of_life + self.communicator.progress()
            self._membership.progressed(progress, inner_steps=self._inner_steps, blocked=self._blocked)

    async def _replace_workers(self, crash: WorkerCrashed) -> None:
        """Once more, unless that has not helped before."""
        while True:
            if self._num_replaced == _MAX_REPLACED:
                raise crash
            self._num_replaced += 1
            self._chronicle.worker_crashed(crash)
            try:
                await self._pool.renew()
            except WorkerCrashed as again:
                crash = again
            else:
                return

    def _on_round(self, report: RoundReport) -> None:
        self._num_rounds += 1
        self._num_replaced = 0
        self._chronicle.trained(report)
        self._durability.reported(report.outer_step, report.digest, report.position)

    async def _keep_private(self, held: Held, *, is_last: bool = False) -> None:
        """Write this peer's own state beside a checkpoint of the shared one that it goes with."""
        if is_last:
            await self._private_files.drain()
        if self._durability.is_saving(held):
            await self._private_files.offer(held, self._values.private)
        if is_last:
            await self._private_files.drain()

    async def _on_landed(self, report: RoundReport) -> None:
        await self._keep_private(Held(OuterStep(report.outer_step), report.digest))
        config = self._plan.config
        is_due = (
            self._plan.loop is None
            and config.eval.every
            and (report.final or report.outer_step % config.eval.every == 0)
        )
        if is_due and report.view.rank_of(self._plan.me.peer_id) == 0:
            self._chronicle.evaluated(report.outer_step, await self._evaluate())

    async def _evaluate(self) -> float:
        """Judge the anchor. That may take long and has the pool's deadline; the others must not call it a stall."""
        judged = asyncio.ensure_future(self._values.judge_anchor(self._pool.evaluate))
        try:
            while not judged.done():
                await asyncio.wait([judged], timeout=_SIGN_OF_LIFE_S)
                self._signs_of_life += 1
                self._tell_progress()
            return judged.result()
        finally:
            judged.cancel()
            await asyncio.wait([judged])
