# SPDX-License-Identifier: Apache-2.0
"""One peer of a run, put together: connections, what it holds, workers, its part in the run, and how that ends.

Everything here belongs to one `Peer`, lives in one task group and ends with it. The order of the start matters: the
disk first, then the workers, membership last, so that nobody waits for a peer that is not able to train yet.

It must not know how a run was found or founded (preparation.py), nor what a command looks like.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field

import msgspec

from isthmus.collective.core.types import RoundKey
from isthmus.collective.errors import CollectiveError
from isthmus.elastic.core.events import Finish
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import Held
from isthmus.elastic.donor.donor import Donor
from isthmus.elastic.errors import StateDiverged
from isthmus.elastic.observation import (
    BecameLearner,
    CertificateKept,
    Deviated,
    Observation,
    TrustHeard,
    ViewInstalled,
)
from isthmus.elastic.shell.member import Membership
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.config.outer_method import pace_of
from isthmus.trainer.config.wiring import kept_kinds, member_config, outer_of, samples_in_stock
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.contact.reach import Reach
from isthmus.trainer.engine.moments import Moments
from isthmus.trainer.engine.outer_step_runner import OuterStepRunner
from isthmus.trainer.engine.progress import Progress
from isthmus.trainer.engine.round_exchange import RoundExchange
from isthmus.trainer.engine.sample_feed import SampleFeed
from isthmus.trainer.engine.state_version import has_anchor
from isthmus.trainer.engine.training_loop import LoopTerms, TrainingLoop
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.errors import ExitCode, LoopLeft
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.events import LeaveAsked
from isthmus.trainer.record.status import FetchStatus, LeavingStatus
from isthmus.trainer.record.translation import exchanged
from isthmus.trainer.run.connections import Connections
from isthmus.trainer.run.holdings import Holdings
from isthmus.trainer.run.preparation import Start
from isthmus.trainer.run.shards import shard_supply, text_to_give
from isthmus.trainer.run.site import PeerOverseer, Site

log = logging.getLogger(__name__)

_LAST_ROUND_TIMEOUT_S = 600.0
"""For the evaluation and the checkpoint of the final state, after everybody has said goodbye."""
_MAX_NAMES = 4
"""Parameters that a deviation names; a chunk of a small model may hold all of them."""
_LAST_STEP_TIMEOUT_S = 20.0
"""For the inner step that is under way when this peer's part ends early."""


class Peer:
    """A peer that trains. `run` is its whole life.

    Attributes:
        connections, donor: take what the daemon's listener accepts, from the beginning on.
        farewell: by which it leaves in order.
        has_lost_loop: whether the loop that trained here has ended in order, before its run.

    Args:
        start: of this process.
        reach: where others reach it.
        bouncer: is told whom the coordinator says to believe.
        chronicle: is told what happens.
    """

    def __init__(self, start: Start, reach: Reach, bouncer: Bouncer, chronicle: Chronicle) -> None:
        config = start.config
        self._start = start
        self._chronicle = chronicle
        outer = outer_of(config)
        self._plan = plan = OuterPlan(outer)
        self._holdings = holdings = Holdings(start, chronicle, outer, plan)
        shares_parameters = has_anchor(outer, holdings.state.fragments)
        self._site = site = Site(start, chronicle, shares_parameters=shares_parameters)
        holdings.state.lend(site.anchors)
        first_parameters = None if shares_parameters else site.first_parameters
        self.connections = Connections(start, reach, lambda channel: self.donor.serve(channel))
        communicator = self.connections.communicator
        bouncer.ends(communicator.put_out)
        self._moments = Moments(
            mailbox=site.mailbox,
            hasher=holdings.hasher,
            are_shared=config.inner.type == "adamw" and config.inner.moments == "donor",
            least_steps=pace_of(config).warmup_steps,
            has_trained=lambda: self._overseer.inner_steps > 0,
            is_first_round=lambda: (held := holdings.state.held()) is not None and held.outer_step == 0,
            first_parameters=first_parameters,
        )
        self.donor = Donor(
            holdings.state,
            holdings.commit_log,
            upload=communicator.upload_cap,
            exchanged=communicator.progress,
            private=self._moments,
            text=text_to_give(start),
        )
        self._runner = OuterStepRunner(
            communicator=communicator,
            state=holdings.state,
            exchanges=RoundExchange(communicator, codec=config.outer.codec),
            initial_parameters=site.first_parameters,
            on_exchanged=lambda key, stats: chronicle.emit(exchanged(key, stats)),
            keeper=holdings.durability,
            tells_speed=plan.steps_may_differ and not config.members.equal_steps,
        )
        self._values = WorkerValues(
            pool=site.pool,
            mailbox=site.mailbox,
            anchors=site.anchors,
            outer=outer,
            plan=plan,
            state=holdings.state,
            read_delivered=self._runner.exchanges.read_delivered,
            moments=self._moments,
            first_parameters=first_parameters,
            inner_kinds=kept_kinds(config),
            recall=holdings.recall,
        )
        self.farewell = Farewell(self.donor)
        self.has_lost_loop = False
        self._overseer = PeerOverseer(
            start,
            chronicle,
            communicator,
            holdings=holdings,
            site=site,
            values=self._values,
            is_leaving=lambda: self.farewell.is_wanted,
        )
        self._progress = Progress(plan, total_steps=pace_of(config).total_inner_steps)
        if holdings.certificate is not None:
            self._progress.certified(holdings.certificate)
        self._observer = _Observer(start, chronicle, bouncer, holdings, self._progress, self._overseer, self.farewell)

    async def run(self) -> Finish:
        """Join, train, and end; returns exit code and reason.

        Raises:
            IsthmusError: the workers or this machine gave up.
        """
        try:
            aside = await self._recover()
            async with self._site.pool:
                await self._site.begin()
                return await self._take_part(aside)
        finally:
            await self.connections.communicator.close()
            self._site.close()
            self._holdings.close()

    async def _recover(self) -> tuple[RoundKey, Held] | None:
        """Begin with what this peer's disk has of the run; what it voted for last may be committed by now."""
        voted = await self._holdings.durability.recover(self._start.checkpoint)
        if voted is None:
            return None
        key, entry = voted
        try:
            await self._runner.stage_again(entry)
        except (StateDiverged, CollectiveError) as error:
            log.warning("result_unusable outer_step=%d cause=%r", entry.outer_step, str(error))
            return None
        return key, Held(entry.outer_step, entry.digest)

    async def _take_part(self, aside: tuple[RoundKey, Held] | None) -> Finish:
        membership, holdings = self._membership(aside), self._holdings
        supply = shard_supply(self._start, self.connections, self._chronicle)
        feed = SampleFeed(membership, stock=samples_in_stock(self._start.config), supply=supply)
        self._overseer.membership, self._observer.feed = membership, feed
        training = self._training(membership, feed)
        self.farewell.takes_part(membership)
        async with asyncio.TaskGroup() as tasks:
            trained = tasks.create_task(self._with_loop(training.run()))
            supplying = () if supply is None else (supply.run(),)
            helping = (
                feed.run(),
                *supplying,
                *holdings.work(),
                self._with_loop(self._site.pool.failed()),
                self.connections.callbacks.run(),
            )
            helpers = [tasks.create_task(work) for work in helping]
            self.farewell.finish = finish = await membership.run()
            # We have said goodbye; the last state is still to be judged (if the run is complete) and kept.
            is_complete = finish.code == ExitCode.DONE
            await asyncio.wait([trained], timeout=_LAST_ROUND_TIMEOUT_S if is_complete else _LAST_STEP_TIMEOUT_S)
            await holdings.finish(self._values)
            for task in (trained, *helpers):
                task.cancel()
        await holdings.drain()
        return finish

    async def _with_loop(self, work: Coroutine[None, None, None]) -> None:
        """What ends with the loop, if that leaves: nobody trains here any more then, so this peer leaves at once."""
        try:
            await work
        except LoopLeft:
            self.has_lost_loop = True
            self._chronicle.emit(LeaveAsked())
            self.farewell.leave(now=True)

    def _membership(self, aside: tuple[RoundKey, Held] | None) -> Membership:
        start, holdings = self._start, self._holdings
        machine = MemberMachine(
            member_config(start.config),
            start.me,
            self.connections.reach.first,
            start.terms.digest(),
            held=holdings.state.held(),
            aside=aside,
            signer=holdings.signer,
            certificate=holdings.certificate,
        )
        return Membership(
            machine,
            coordinators=start.coordinators,
            dial=self.connections.dial,
            dial_donor=self.connections.dial_donor,
            runner=self._runner,
            replica=holdings.state,
            hasher=holdings.hasher,
            observe=self._observer.observe,
            private=self._moments,
            locate=self.connections.reach.now,
        )

    def _training(self, membership: Membership, feed: SampleFeed) -> TrainingLoop:
        config = self._start.config
        return TrainingLoop(
            membership=membership,
            runner=self._runner,
            state=self._holdings.state,
            plan=self._plan,
            values=self._values,
            feed=feed,
            progress=self._progress,
            terms=LoopTerms(
                batch_size=config.inner.batch_size,
                outer_steps=config.run.outer_steps,
                patience=config.members.patience,
                follows_speed=not config.members.equal_steps,
            ),
            overseer=self._overseer,
        )


@dataclass(slots=True, eq=False)
class _Observer:
    """What the membership tells, for whom it matters here; and all of it for the record. `feed`: of this membership."""

    start: Start
    chronicle: Chronicle
    bouncer: Bouncer
    holdings: Holdings
    progress: Progress
    overseer: PeerOverseer
    farewell: "Farewell"
    feed: SampleFeed = field(init=False)

    def observe(self, event: Observation) -> None:
        match event:
            case BecameLearner():
                self.feed.reset()
                if self.farewell.is_wanted:
                    self.holdings.durability.save_held()  # it may be the only one, and is not to die with this process
            case TrustHeard(trust=trust):
                self.bouncer.heard(trust)
            case CertificateKept(certificate=certificate):
                self.holdings.certified(certificate)
                self.progress.certified(certificate)
                self.overseer.certified(certificate)
            case ViewInstalled(members=members) if not self.overseer.num_rounds:
                present, wanted = len(members), self.start.config.members.start_peers
                if present < wanted:
                    log.info("waiting_for_peers present=%d wanted=%d; others join with the ticket", present, wanted)
            case Deviated(tensor=str(tensor), start_bytes=int(start), stop_bytes=int(stop)):
                names = self.holdings.state.parameters_in(tensor, start, stop)
                event = msgspec.structs.replace(event, parameters=names[:_MAX_NAMES])
            case _:
                pass
        self.chronicle.observe(event)


class Farewell:
    """How this peer's part in the run ends: whether it is to go, what that waits for, and with which word it went.

    Args:
        donor: others may still fetch from it.
    """

    def __init__(self, donor: Donor) -> None:
        self._donor = donor
        self._membership: Membership | None = None
        self._now: bool | None = None
        self.finish: Finish | None = None
        """How the membership ended, once it has."""

    @property
    def is_wanted(self) -> bool:
        """Whether this peer is to go."""
        return self._now is not None

    def leave(self, *, now: bool) -> None:
        """Leave at the next commit boundary, or at once. Repeated calls change nothing but can hurry it."""
        self._now = now or bool(self._now)
        if self._membership is not None:
            self._membership.leave(now=now)

    def takes_part(self, membership: Membership) -> None:
        """This peer has a part in the run now, to be left at once if that was wanted before."""
        self._membership = membership
        if self._now is not None:
            membership.leave(now=self._now)

    def status(self) -> LeavingStatus | None:
        """What keeps this peer that wants to go; None if it does not."""
        if self._now is None:
            return None
        if self.finish is not None:
            return LeavingStatus(waits_for="checkpoint", reason=self.finish.reason)
        if self._membership is None:
            return LeavingStatus(waits_for="start")
        fetches = tuple(
            FetchStatus(peer_id=peer_id, sent_bytes=sent, total_bytes=total)
            for peer_id, (sent, total) in sorted(self._donor.fetches().items())
        )
        return LeavingStatus(waits_for=self._membership.leaves_after or "answer", fetches=fetches)
