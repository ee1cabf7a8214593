# SPDX-License-Identifier: Apache-2.0
"""From what happens to what is written down: elastic's observations, rounds and faults as lines of events.jsonl.

Every fact also goes to the scoreboard, whose figures `status` and the metrics show. Rules: one line a fact; digests in
full, so that an audit needs nothing else. Must not decide anything.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import assert_never

from isthmus.collective import RoundStats
from isthmus.collective.core.types import PeerRef, RoundKey
from isthmus.elastic.core.records import CommitRecord, RollbackRecord, ViewRecord
from isthmus.elastic.observation import (
    BecameActive,
    BecameExcused,
    BecameLearner,
    CatchUpEnded,
    CatchUpStarted,
    CertificateKept,
    CoordinatorAsks,
    CoordinatorConnected,
    CoordinatorLost,
    Deviated,
    ElasticEvent,
    Finished,
    PeerConnected,
    PeerDisconnected,
    PeerExposed,
    RecordWritten,
    RoundAborted,
    RoundBroke,
    RoundCommitted,
    RoundStaged,
    RoundStarted,
    TrustHeard,
    ViewInstalled,
    WentBack,
    WorkCarriedOver,
)
from isthmus.trainer.data.text import FoundText
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.errors import CheckpointFailed, WorkerCrashed, WorkerDiverged
from isthmus.trainer.record.events import EventLog, Field
from isthmus.trainer.record.record_lines import key_fields, line_of, view_fields
from isthmus.trainer.record.scoreboard import Scoreboard
from isthmus.trainer.workers.link import WorkerStalled
from isthmus.trainer.workers.process import WorkerDied

log = logging.getLogger(__name__)

_IS_A_FAULT = re.compile(" dropped: | differ about ")
"""Views that an operator may want to know the cause of."""

_MAX_NAMES = 4
"""Parameters that an event names; a chunk of a small model may hold all of them."""


class Chronicle:
    """Writes the events of one process.

    Args:
        events: where to.
        board: gets the same facts.
    """

    def __init__(self, events: EventLog, board: Scoreboard) -> None:
        self._log = events
        self._board = board

    def started(
        self,
        *,
        run_id: str,
        address: str,
        num_parameters: int,
        tokens_per_inner_step: int,
        samples_per_data_epoch: int | None,
    ) -> None:
        """This process knows what it is part of."""
        self._log.emit(
            "started",
            run_id=run_id,
            address=address,
            num_parameters=num_parameters,
            tokens_per_inner_step=tokens_per_inner_step,
            samples_per_data_epoch=samples_per_data_epoch,
        )
        self._log.name_start(run_id=run_id, samples_per_data_epoch=samples_per_data_epoch)

    def text_found(self, text: FoundText) -> None:
        """What this process trains on, and where that is from."""
        self._log.emit(
            "text",
            digest=text.corpus.digest,
            bytes=text.corpus.nbytes,
            description=text.corpus.description,
            source=text.source,
            peers=text.peers,
            fetched_bytes=text.fetched_nbytes,
            seconds=text.seconds,
        )
        log.info("text: %s", text)

    def stopped_coordinating(self, *, is_complete: bool) -> None:
        """A coordinator without a peer ends."""
        self._log.emit("coordinator_ended", complete=is_complete)

    def inner_step(self, inner_step: int, loss: float | None, num_tokens: int) -> None:
        """One inner step is done: too many for the log, not for the figures."""
        self._board.inner_step(inner_step, loss, num_tokens)

    def handed_in(self) -> None:
        """The payload of a round is made."""
        self._board.handed_in()

    def evaluated(self, outer_step: int, loss: float) -> None:
        """The anchor was judged on held-out text."""
        self._board.evaluated(loss)
        self._log.emit("evaluate", outer_step=outer_step, loss=loss)
        log.info("evaluated outer_step=%d validation_loss=%.4f", outer_step, loss)

    def checkpoint_saved(self, outer_step: int, seconds: float) -> None:
        """A checkpoint is on the disk."""
        self._board.checkpoint_saved(outer_step, seconds)
        self._log.emit("checkpoint", outer_step=outer_step, seconds=seconds)

    def checkpoint_failed(self, failure: CheckpointFailed) -> None:
        """A checkpoint could not be written. Training goes on."""
        self._board.checkpoint_failed()
        self._log.emit("fault", kind="checkpoint_failed", cause=str(failure))
        log.warning("checkpoint_failed cause=%r", str(failure))

    def worker_crashed(self, crash: WorkerCrashed) -> None:
        """Workers do not answer, or died. They are replaced; what they did since the last commit is done again."""
        match crash:
            case WorkerStalled():
                self._worker_hung(crash)
            case WorkerDied():
                self._worker_died(crash)
            case WorkerDiverged(outer_step=outer_step, fragment=fragment):
                self._log.emit("fault", kind="values_not_finite", outer_step=outer_step, fragment=fragment)
                log.warning("values_not_finite outer_step=%d fragment=%s; the workers begin anew", outer_step, fragment)
            case _:
                raise crash

    def _worker_died(self, death: WorkerDied) -> None:
        self._board.worker_died()
        self._log.emit(
            "fault",
            kind="worker_died",
            local_rank=death.local_rank,
            exit_code=death.worker_exit_code,
            memory_bytes=death.memory_nbytes,
            cause=death.how,
        )
        log.warning("worker_died cause=%r; the workers of this peer are replaced", death.how)

    def _worker_hung(self, hang: WorkerStalled) -> None:
        self._board.worker_hung()
        self._log.emit(
            "fault",
            kind="worker_hung",
            request=hang.request,
            local_ranks=hang.local_ranks,
            seconds=hang.timeout_s,
            cause=hang.what,
        )
        log.warning(
            "worker_hung request=%s seconds=%.0f cause=%r; the workers of this peer are killed and replaced",
            hang.request,
            hang.timeout_s,
            hang.what,
        )

    def counted(self, *, refused: Mapping[str, int], served_nbytes: int) -> None:
        """So far: connections that were not let in, by reason, and bytes of state for learners. For the figures."""
        self._board.counted(refused=refused, num_events_lost=self._log.num_lost, served_nbytes=served_nbytes)

    def exchanged(self, key: RoundKey, stats: RoundStats) -> None:
        """A mean is here: what it cost."""
        self._board.exchanged(stats)
        self._log.emit(
            "round",
            **key_fields(key),
            members=[ref.peer_id for ref in stats.members],
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            seconds=stats.seconds,
            plan=stats.plan,
            predicted_s=stats.predicted_s,
        )

    def trained(self, report: RoundReport) -> None:
        """What this peer did in a committed round, and how long it stood in it."""
        self._board.trained(report)
        log.info(
            "committed outer_step=%d epoch=%d world_size=%d loss=%s wait_s=%.2f",
            report.outer_step,
            report.view.epoch,
            report.view.world_size,
            "none" if report.loss is None else f"{report.loss:.4f}",
            report.wait_s,
        )
        self._log.emit(
            "trained",
            epoch=report.view.epoch,
            outer_step=report.outer_step,
            inner_step=report.inner_step,
            loss=report.loss,
            tokens=report.num_tokens,
            train_s=report.train_s,
            wait_s=report.wait_s,
        )

    def deviated(self, event: Deviated, parameters: Sequence[str]) -> None:
        """This peer was overruled. `parameters`: the model's names for where it was wrong first."""
        where = event.where
        fields: dict[str, Field] = {
            "outer_step": event.committed.outer_step,
            "digest": event.committed.digest.hex(),
            "voted": event.voted.hex(),
            "damaged_chunks": event.num_damaged,
        }
        if where is not None:
            fields |= {
                "tensor": where.tensor,
                "parameters": list(parameters[:_MAX_NAMES]),
                "start_bytes": where.start_nbytes,
                "stop_bytes": where.stop_nbytes,
                "differing_chunks": where.num_chunks,
            }
        self._log.emit("deviated", **fields)
        log.error(
            "deviated outer_step=%d tensor=%s parameters=%s bytes=%s chunks=%s cause=%r",
            event.committed.outer_step,
            None if where is None else where.tensor,
            ",".join(parameters[:_MAX_NAMES]) or None,
            None if where is None else f"{where.start_nbytes}-{where.stop_nbytes}",
            None if where is None else where.num_chunks,
            "memory changed that nobody wrote to: test it" if event.num_damaged else "another result than the others",
        )

    def observe(self, event: ElasticEvent) -> None:
        """An observer for elastic."""
        self._count(event)
        emit = self._log.emit
        match event:
            case RecordWritten(record=record):
                name, fields = line_of(record)
                emit(name, **fields)
            case PeerConnected(ref=ref):
                emit("peer_connected", of=ref.peer_id, incarnation=ref.incarnation)
            case PeerDisconnected(ref=ref, cause=cause):
                emit("fault", kind="peer_disconnected", of=ref.peer_id, incarnation=ref.incarnation, cause=cause)
            case CoordinatorConnected(address=address):
                emit("coordinator_connected", address=address)
            case CoordinatorLost(cause=cause):
                emit("fault", kind="coordinator_lost", cause=cause)
            case ViewInstalled(view=view, fault=fault):
                emit("view", **view_fields(view), cause=fault)
            case BecameActive(view=view):
                emit("join", **view_fields(view))
            case BecameLearner(reason=reason):
                emit("learner", cause=reason)
            case BecameExcused(view=view):
                emit("excused", **view_fields(view))
            case WorkCarriedOver(held=held):
                emit("carried_over", outer_step=held.outer_step)
            case RoundStarted(key=key, weight=weight):
                emit("round_started", **key_fields(key), weight=weight)
            case RoundStaged(key=key, digest=digest, seconds=seconds):
                emit("vote", **key_fields(key), digest=digest.hex(), seconds=seconds)
            case RoundBroke(key=key, suspects=suspects, cause=cause):
                emit("fault", kind="round_broke", **key_fields(key), suspects=list(suspects), cause=cause)
            case RoundAborted(key=key):
                emit("round_aborted", **key_fields(key))
            case RoundCommitted(key=key, held=held, final=final, seconds=seconds):
                fields = key_fields(key) | {"outer_step": held.outer_step}
                emit("commit", **fields, digest=held.digest.hex(), final=final, seconds=seconds)
            case CertificateKept(certificate=certificate):
                fields = key_fields(certificate.key) | {"outer_step": certificate.made.outer_step}
                emit("certificate", **fields, digest=certificate.digest.hex(), link=certificate.link.hex())
            case CoordinatorAsks(testified=testified, needed=needed):
                log.warning("coordinator_lost_its_journal testified=%d needed=%d", testified, needed)
                emit("fault", kind="journal_lost", testified=testified, needed=needed)
            case WentBack(epoch=epoch, outer_step=outer_step, cause=cause):
                log.warning("went_back epoch=%d outer_step=%d cause=%r", epoch, outer_step, cause)
                emit("went_back", epoch=epoch, outer_step=outer_step, cause=cause)
            case CatchUpStarted(target=target, num_donors=num_donors):
                emit("catch_up_started", outer_step=target.outer_step, donors=num_donors)
            case CatchUpEnded(held=held, cause=cause, nbytes=nbytes, seconds=seconds):
                emit(
                    "catch_up",
                    outer_step=None if held is None else held.outer_step,
                    digest=None if held is None else held.digest.hex(),
                    cause=cause,
                    bytes=nbytes,
                    seconds=seconds,
                )
            case TrustHeard(trust=trust):
                emit("trust", authorities=len(trust.authorities), barred=[bar.peer_id for bar in trust.barred])
            case Deviated():
                self.deviated(event, ())
            case PeerExposed():
                pass  # `lied`, below
            case Finished(code=code, reason=reason):
                emit("leave", code=code, cause=reason)
            case _:
                assert_never(event)

    def _count(self, event: ElasticEvent) -> None:
        board = self._board
        match event:
            case ViewInstalled(view=view):
                board.viewed(view)
            case BecameActive():
                board.became_member(is_member=True)
            case BecameLearner(reason=reason):
                board.became_member(is_member=False)
                log.info("learner cause=%r", reason)
            case BecameExcused(view=view):
                log.info("excused epoch=%d outer_step=%d; the others go on", view.epoch, view.outer_step)
            case CatchUpEnded(held=held) if held is not None:
                board.caught_up(held)
            case RecordWritten(record=RollbackRecord(epoch=epoch, given_up=step, certificate=certificate)):
                to = "the beginning" if certificate is None else certificate.made.outer_step
                log.warning("rolled_back epoch=%d from=%d to=%s; nobody holds a newer outer step", epoch, step, to)
            case RecordWritten(record=ViewRecord() | CommitRecord() as record):
                self._look_for_lies(record)
            case PeerExposed(ref=ref, outer_step=outer_step, cause=cause):
                self._lied(ref, outer_step, cause)
            case RoundAborted():
                board.aborted()
            case _:
                pass  # of interest to the log alone

    def _look_for_lies(self, record: ViewRecord | CommitRecord) -> None:
        """Members that were overruled or put out for what they said, and why a view is another one."""
        match record:
            case ViewRecord(view=view, cause=cause, struck=struck):
                for ref in struck:
                    self._lied(ref, view.outer_step, cause)
                if _IS_A_FAULT.search(cause) and not struck:
                    log.info("view_decided epoch=%d world_size=%d cause=%r", view.epoch, view.world_size, cause)
            case CommitRecord(outer_step=outer_step, contributions=contributions, disputed=disputed):
                for item in contributions:
                    if not item.agreed and item.ref not in disputed:
                        self._lied(item.ref, outer_step, f"{item.ref.peer_id} had another result than the others")

    def _lied(self, ref: PeerRef, outer_step: int, cause: str) -> None:
        """A member was overruled or put out for what it said: a fault of its machine, or a lie."""
        self._board.lied()
        self._log.emit("lied", of=ref.peer_id, incarnation=ref.incarnation, outer_step=outer_step, cause=cause)
        log.warning("member_lied of=%s outer_step=%d cause=%r", ref.peer_id, outer_step, cause)
