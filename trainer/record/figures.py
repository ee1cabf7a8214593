# SPDX-License-Identifier: Apache-2.0
"""The figures of one start of a peer, of which `status`, metrics and the summary are made: a pure fold of its events.

Who replays events.jsonl gets the figures that were shown, but for those that `Unfiled` events feed. Must not decide
anything.
"""

from bisect import bisect_left

import msgspec
from msgspec.structs import replace

from isthmus.elastic import observation as told
from isthmus.elastic.observation import Event
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.record import events
from isthmus.trainer.record.status import LOSSES_SHOWN, MemberStatus, RoundStatus, Status, StepStatus

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PACE_COMMITS = 20


class Durations(msgspec.Struct, frozen=True):
    """How often something took how long: by bucket, the last one without an end; and all together, seconds."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    total_s: float = 0.0

    def plus(self, seconds: float) -> "Durations":
        """With one more."""
        place = bisect_left(BUCKETS_S, seconds)
        counts = tuple(count + (index == place) for index, count in enumerate(self.counts))
        return Durations(counts, self.total_s + seconds)


class Figures(Status, frozen=True, kw_only=True):
    """A status, what it is made of, and what the metrics show beside it, all of this start."""

    num_parameters: int | None = None
    is_member: bool = False
    seen: frozenset[str] = frozenset()
    """Other members of any view."""
    pace: tuple[tuple[float, int], ...] = ()
    """When (`t_s`) which outer step was committed, of the newest ones."""
    train_s: float = 0.0
    evaluation_s: float = 0.0
    evaluation_held_s: float = 0.0
    """Of `Evaluate`, all together."""
    round_loss: float | None = None
    """Of the newest committed round that knows one."""
    exchange: events.Round | None = None
    """The newest."""
    evictions: int = 0
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """How often which kind of event came, by tag."""
    round_seconds: Durations = Durations()
    wait_seconds: Durations = Durations()
    exchange_seconds: Durations = Durations()
    checkpoint_seconds: Durations = Durations()
    wall: str = ""
    """When the newest event came, ISO 8601."""
    flops_per_token: int | None = None
    """Of a step."""
    peak_flops: float | None = None
    """Of all workers' devices, FLOP/s."""
    code: int | None = None
    """Exit code; None until the end is told."""
    cause: str = ""
    is_leaving: bool = False
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    events_lost: int = 0
    state_served_bytes: int = 0

    def mfu_of(self, tokens: int, seconds: float) -> float | None:
        """Share of what the devices can do at most, of so many tokens in so many seconds; None if it is not known."""
        if self.flops_per_token is None or self.peak_flops is None or seconds <= 0.0:
            return None
        return self.flops_per_token * tokens / seconds / self.peak_flops

    def times(self, kind: type[Event]) -> int:
        """How often this kind of event came."""
        return self.counts.get(str(kind.__struct_config__.tag), 0)


BLANK = Figures(run_id="", peer_id="", incarnation=0, pid=0, phase="starting", outer_step=0, total_outer_steps=0)


def fold(figures: Figures, event: Event) -> Figures:
    """The figures after this event. A log that is opened begins anew."""
    if isinstance(event, events.LogOpened):
        return replace(BLANK, peer_id=event.peer, wall=event.wall)
    tag = str(event.__struct_config__.tag)
    counts = figures.counts | {tag: figures.counts.get(tag, 0) + 1}
    return _fold(replace(figures, wall=event.wall, counts=counts), event)


def _fold(figures: Figures, event: Event) -> Figures:
    match event:
        case events.Started(run_id=run_id, num_parameters=number):
            coordinator = figures.coordinator if number else event.address
            return replace(figures, run_id=run_id, num_parameters=number, coordinator=coordinator)
        case events.LogContinued(run_id=run_id):
            return replace(figures, run_id=run_id or figures.run_id)
        case told.CoordinatorConnected(address=address):
            return replace(figures, coordinator=address)
        case told.ViewInstalled(epoch=epoch, members=members):
            seen = figures.seen | set(members) - {event.peer}
            return replace(figures, epoch=epoch, members=_members(event), seen=seen, peers_seen=len(seen))
        case told.BecameActive():
            return replace(figures, phase="training", is_member=True, inner_step=0)
        case told.BecameLearner():
            evictions = figures.evictions + figures.is_member
            return replace(figures, phase="learning", is_member=False, inner_step=0, evictions=evictions)
        case told.CatchUpEnded(outer_step=int(step)):
            return replace(figures, outer_step=step)
        case told.RoundCommitted(outer_step=step, seconds=seconds):
            return replace(figures, outer_step=step, round_seconds=figures.round_seconds.plus(seconds))
        case events.CommitDecided(outer_step=step) if figures.num_parameters == 0:
            return replace(figures, outer_step=step)
        case events.Coordinated(epoch=epoch, outer_step=step, members=members):
            known = tuple(MemberStatus(peer_id=peer_id, incarnation=0, address="") for peer_id in members)
            return replace(figures, epoch=epoch, outer_step=step, members=known)
        case events.Workers(flops_per_token=flops, peak_flops=peak):
            return replace(figures, flops_per_token=flops, peak_flops=peak)
        case events.InnerStep(loss=loss, tokens=tokens):
            return replace(
                figures,
                phase="training",
                inner_step=min(figures.inner_step + 1, figures.inner_steps_per_round),
                num_inner_steps=figures.num_inner_steps + 1,
                tokens=figures.tokens + tokens,
                train_loss=figures.train_loss if loss is None else loss,
                step=_step(figures, event),
            )
        case events.HandedIn():
            return replace(figures, phase="exchanging")
        case events.Round(bytes_sent=sent, bytes_received=received, seconds=seconds):
            return replace(
                figures,
                exchange=event,
                sent_bytes=figures.sent_bytes + sent,
                received_bytes=figures.received_bytes + received,
                exchange_seconds=figures.exchange_seconds.plus(seconds),
            )
        case events.Trained():
            return _trained(figures, event)
        case events.Evaluate(loss=loss):
            return replace(
                figures,
                validation_loss=loss,
                validation_bits_per_byte=event.bits_per_byte,
                validation_outer_step=event.outer_step,
                validation_tokens=event.tokens,
                evaluation_s=figures.evaluation_s + event.seconds,
                evaluation_held_s=figures.evaluation_held_s + event.held_s,
            )
        case events.Checkpoint(outer_step=step, seconds=seconds):
            all_s = figures.checkpoint_seconds.plus(seconds)
            return replace(figures, checkpoint_outer_step=step, checkpoint_seconds=all_s)
        case events.Counted(refused=refused, state_served_bytes=nbytes):
            return replace(figures, refused=refused, state_served_bytes=nbytes)
        case events.LeaveAsked():
            return replace(figures, is_leaving=True)
        case told.Finished(code=code, cause=cause) | events.Failed(code=code, cause=cause):
            return replace(figures, code=code, cause=cause)
        case events.CoordinatorEnded(complete=complete):
            code, cause = (ExitCode.DONE, "") if complete else (ExitCode.LEFT, "stopped")
            return replace(figures, code=code, cause=cause)
        case _:
            return figures


def _step(figures: Figures, event: events.InnerStep) -> StepStatus | None:
    """What the newest step took; of one whose seconds nobody told, what the one before it did."""
    if event.seconds is None or event.seconds <= 0.0:
        return figures.step
    return StepStatus(
        seconds=event.seconds,
        data_seconds=event.data_s,
        passes_seconds=event.passes_s,
        clip_seconds=event.clip_s,
        update_seconds=event.update_s,
        tokens_per_s=event.tokens / event.seconds,
        mfu=figures.mfu_of(event.tokens, event.seconds),
    )


def _trained(figures: Figures, event: events.Trained) -> Figures:
    exchange, loss = figures.exchange, event.loss
    return replace(
        figures,
        phase="training",
        inner_step=0,
        num_commits=figures.num_commits + 1,
        pace=(*figures.pace, (event.t_s, event.outer_step))[-_PACE_COMMITS:],
        train_s=figures.train_s + event.train_s,
        first_loss=loss if figures.first_loss is None else figures.first_loss,
        round_loss=figures.round_loss if loss is None else loss,
        train_loss=figures.train_loss if loss is None else loss,
        losses=figures.losses if loss is None else (*figures.losses, (event.outer_step, loss))[-LOSSES_SHOWN:],
        wait_seconds=figures.wait_seconds.plus(event.wait_s),
        last_round=RoundStatus(
            outer_step=event.outer_step,
            seconds=event.train_s + event.wait_s,
            exchange_seconds=0.0 if exchange is None else exchange.seconds,
            bytes=0 if exchange is None else exchange.bytes_sent + exchange.bytes_received,
            num_members=event.world_size,
            loss=loss,
            wait_seconds=event.wait_s,
            predicted_seconds=None if exchange is None else exchange.predicted_s,
        ),
    )


def _members(view: told.ViewInstalled) -> tuple[MemberStatus, ...]:
    me, num_members = view.peer, len(view.members)
    if (len(view.incarnations), len(view.addresses)) != (num_members, num_members):  # an older version's line
        view = replace(view, incarnations=(0,) * num_members, addresses=("",) * num_members)
    return tuple(
        MemberStatus(
            peer_id=peer_id,
            incarnation=incarnation,
            address=address,
            is_apart=not {f"{me} {peer_id}", f"{peer_id} {me}"}.isdisjoint(view.apart),
            is_me=peer_id == me,
        )
        for peer_id, incarnation, address in zip(view.members, view.incarnations, view.addresses, strict=True)
    )


def as_of(figures: Figures, now_s: float) -> Figures:
    """The same at this time, seconds as in `t_s`: rates and what is left."""
    return replace(
        figures,
        uptime_s=now_s,
        goodput=min(1.0, figures.train_s / now_s) if now_s > 0 else 0.0,
        tokens_per_s=figures.tokens / now_s if now_s > 0 else None,
        seconds_left=_seconds_left(figures, now_s),
    )


def _seconds_left(figures: Figures, now_s: float) -> float | None:
    """Until the run's end at the pace of the newest commits; None before there are two."""
    if len(figures.pace) < 2:
        return None
    (began, first), (ended, last) = figures.pace[0], figures.pace[-1]
    left_s = (figures.total_outer_steps - last) * (ended - began) / max(1, last - first)
    return max(0.0, left_s - (now_s - ended))
