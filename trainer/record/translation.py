# SPDX-License-Identifier: Apache-2.0
"""What the layers below tell, as events: elastic's observations, the journal's records, rounds, and workers that crash.

Must not decide anything.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

from msgspec.structs import asdict, replace

from isthmus.collective import RoundStats
from isthmus.collective.core.types import PeerRef, RoundKey
from isthmus.elastic.core import records
from isthmus.elastic.core.doors import FOR_EVER
from isthmus.elastic.core.leases import count
from isthmus.elastic.core.messages import Held
from isthmus.elastic.observation import (
    CertificateKept,
    Event,
    Lied,
    Observation,
    RecordWritten,
    TrustHeard,
    round_fields,
    state_fields,
    view_fields,
)
from isthmus.trainer.data.text import FoundText
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.errors import WorkerCrashed, WorkerDiverged
from isthmus.trainer.record import events
from isthmus.trainer.workers.ipc import BackwardDone, StepDone
from isthmus.trainer.workers.link import WorkerStalled
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.process import WorkerDied


def observed(fact: Observation) -> Iterator[Event]:
    """What elastic has told: most of it is an event as it is."""
    match fact:
        case Event():
            yield fact
        case RecordWritten(record=record):
            yield recorded(record)
            yield from _lies(record)
        case CertificateKept(certificate=proof):
            yield events.Certificate(**round_fields(proof.key) | state_fields(proof.made), link=proof.link.hex())
        case TrustHeard(trust=trust):
            barred = tuple(bar.peer_id for bar in trust.barred)
            yield events.Trust(authorities=len(trust.authorities), barred=barred)
        case _:
            assert_never(fact)


def recorded(record: records.Record) -> Event:
    """The event that tells of a record of the journal."""
    match record:
        case records.Genesis(next_index=next_index):
            return events.Genesis(outer_step=record.outer_step, digest=record.digest.hex(), next_index=next_index)
        case records.RebuildRecord(epoch=epoch, certificate=proof, testified=testified, insisted=insisted):
            from_here = state_fields(None if proof is None else proof.made)
            return events.Rebuilt(epoch=epoch, **from_here, testified=_names(testified), insisted=insisted)
        case records.RollbackRecord(epoch=epoch, certificate=proof, given_up=given_up, holders=holders):
            from_here = state_fields(None if proof is None else proof.made)
            return events.RolledBack(epoch=epoch, **from_here, given_up=given_up, holders=_names(holders))
        case records.ViewRecord(view=view, cause=cause, excused=excused):
            return events.ViewDecided(**view_fields(view), cause=cause, excused=_names(excused))
        case records.CommitRecord(key=key, outer_step=step, digest=digest, contributions=contributions, final=final):
            return events.CommitDecided(
                **round_fields(key) | state_fields(Held(step, digest)),
                members=_names([item.ref for item in contributions]),
                tokens=sum(item.num_tokens for item in contributions),
                final=final,
            )
        case records.LeaseRecord(ref=ref, serial=serial, ranges=ranges):
            return events.Lease(of=ref.peer_id, serial=serial, samples=count(ranges))
        case records.ReleaseRecord(ref=ref, epoch=epoch, ranges=ranges):
            return events.LeaseReturned(of=ref.peer_id, epoch=epoch, samples=count(ranges))
        case records.BarRecord(bar=bar):
            return events.PutOut(of=bar.peer_id, banned=bar.certificate >= FOR_EVER)
        case records.TicketRecord(ticket_id=ticket_id, used_by=None, and_earlier=and_earlier):
            return events.TicketRevoked(ticket=ticket_id.hex(), and_earlier=and_earlier)
        case records.TicketRecord(ticket_id=ticket_id, used_by=used_by):
            assert used_by is not None, "the case above"
            return events.Admitted(of=used_by, ticket=ticket_id.hex())
        case records.SnapshotRecord(view=view, commits=commits, owned=owned):
            samples = sum(count(own) for _, own in owned)
            return events.Snapshot(**view_fields(view), commits=len(commits), samples=samples)
        case _:
            assert_never(record)


def _lies(record: records.Record) -> Iterator[Event]:
    """Members that were overruled or put out for what they said."""
    match record:
        case records.ViewRecord(view=view, cause=cause, struck=struck):
            for ref in struck:
                yield _lied(ref, view.outer_step, cause)
        case records.CommitRecord(outer_step=step, contributions=contributions, disputed=disputed):
            for item in contributions:
                if not item.agreed and item.ref not in disputed:
                    yield _lied(item.ref, step, f"{item.ref.peer_id} had another result than the others")
        case _:
            pass


def _lied(ref: PeerRef, outer_step: int, cause: str) -> Event:
    return Lied(of=ref.peer_id, incarnation=ref.incarnation, outer_step=outer_step, cause=cause)


def crashed(crash: WorkerCrashed) -> Event:
    """Workers do not answer, died, or have no numbers any more. Raises what is none of these."""
    match crash:
        case WorkerStalled(request=request, local_ranks=ranks, timeout_s=seconds, what=cause):
            return events.WorkerHung(request=request, local_ranks=ranks, seconds=seconds, cause=cause)
        case WorkerDied(local_rank=rank, worker_exit_code=code, memory_nbytes=nbytes, how=cause):
            return events.WorkerDied(local_rank=rank, exit_code=code, memory_bytes=nbytes, cause=cause)
        case WorkerDiverged(outer_step=step, fragment=fragment):
            return events.ValuesNotFinite(outer_step=step, fragment=fragment)
        case _:
            raise crash


def exchanged(key: RoundKey, stats: RoundStats) -> Event:
    """A mean is here: what it cost."""
    return events.Round(
        **round_fields(key),
        members=_names(stats.members),
        bytes_sent=stats.bytes_sent,
        bytes_received=stats.bytes_received,
        seconds=stats.seconds,
        plan=stats.plan,
        predicted_s=stats.predicted_s,
    )


def workers_ready(pool: WorkerPool, flops_per_token: int | None) -> events.Workers:
    """Who computes, and on what."""
    ready = pool.ready
    peaks = [each.peak_flops for each in ready if each.peak_flops is not None]
    return events.Workers(
        devices=pool.devices,
        precision=ready[0].precision,
        micro_batch=None if pool.micro_batch is None else pool.micro_batch.size,
        flops_per_token=flops_per_token,
        peak_flops=sum(peaks) if len(peaks) == len(ready) else None,
        seconds=max(each.seconds for each in ready),
    )


def stepped(inner_step: int, done: BackwardDone | StepDone) -> Event:
    """An inner step is done, or that half of it whose gradient is exchanged."""
    step = events.InnerStep(inner_step=inner_step, loss=done.loss, tokens=done.num_tokens)
    if isinstance(done, BackwardDone):
        return step
    return replace(step, seconds=done.seconds, **({} if done.parts is None else asdict(done.parts)))


def trained(report: RoundReport, mfu: float | None = None) -> Event:
    """What this peer did in a committed round, and how long it stood in it; `mfu`: see `events.Trained`."""
    work = report.work
    return events.Trained(
        epoch=report.view.epoch,
        outer_step=report.outer_step,
        inner_step=report.inner_step,
        loss=report.loss,
        tokens=report.num_tokens,
        train_s=report.train_s,
        wait_s=report.wait_s,
        world_size=report.view.world_size,
        step_s=work.step_s,
        step_tokens=work.step_tokens,
        data_s=work.data_s,
        passes_s=work.passes_s,
        clip_s=work.clip_s,
        update_s=work.update_s,
        mfu=mfu,
    )


def text_found(text: FoundText) -> Event:
    """What this process trains on, and where that is from."""
    return events.Text(
        digest=text.corpus.digest,
        bytes=text.corpus.nbytes,
        description=text.corpus.description,
        source=text.source,
        peers=text.peers,
        fetched_bytes=text.fetched_nbytes,
        seconds=text.seconds,
    )


def _names(refs: Sequence[PeerRef]) -> tuple[str, ...]:
    return tuple(ref.peer_id for ref in refs)
