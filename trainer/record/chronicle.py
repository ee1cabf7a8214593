# SPDX-License-Identifier: Apache-2.0
"""Where every event of a process goes: into the file, the log for people, and the figures. Must not decide anything."""

import logging
import re
from collections.abc import Sequence

from msgspec.structs import replace

from isthmus.collective import LinkReport
from isthmus.collective.core.address import candidates_of
from isthmus.collective.transport.interfaces import is_home
from isthmus.elastic import observation as told
from isthmus.elastic.observation import Event, Observation
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.record import events
from isthmus.trainer.record.event_log import EventLog
from isthmus.trainer.record.figures import Figures, as_of, fold
from isthmus.trainer.record.status import MemberStatus, Status, figure
from isthmus.trainer.record.translation import observed

log = logging.getLogger(__name__)

_IS_A_FAULT = re.compile(" dropped: | differ about ")
"""Views that an operator may want to know the cause of."""


class Chronicle:
    """Takes the events of one process, all in one thread; its figures may be read by any.

    Args:
        events: the file.
        figures: of this start, with what no event tells: which peer, run and configuration it is of.
    """

    def __init__(self, events: EventLog, figures: Figures) -> None:
        self._log = events
        self._figures = figures

    def emit(self, event: Event) -> None:
        """Tell it to everybody."""
        event = self._log.write(event)
        self._figures = fold(self._figures, event)
        if (words := _in_words(event)) is not None:
            log.log(*words)

    def observe(self, fact: Observation) -> None:
        """An observer for elastic."""
        for event in observed(fact):
            self.emit(event)

    @property
    def figures(self) -> Figures:
        """As they are now."""
        return replace(as_of(self._figures, self._log.now_s()), events_lost=self._log.num_lost)

    def status(self, links: Sequence[LinkReport] = ()) -> Status:
        """What `isthmus status` tells. `links` are those with the members."""
        figures = self.figures
        known = {name: getattr(figures, name) for name in Status.__struct_fields__}
        paths: dict[str, LinkReport] = {link.peer_id: link for link in links if link.host}
        known["members"] = tuple(
            replace(
                _along(paths.get(member.peer_id), member), is_coordinator=_lives_at(member.address, figures.coordinator)
            )
            for member in figures.members
        )
        return Status(**known | {"phase": "leaving" if figures.is_leaving else figures.phase})


def _lives_at(address: str, coordinator: str | None) -> bool:
    """Whether this member's process is the coordinator's too. Of its addresses some may have changed."""
    if coordinator is None or address == coordinator:
        return coordinator is not None
    known = set(candidates_of(coordinator))
    return any(candidate in known and not is_home(candidate) for candidate in candidates_of(address))


def _along(link: LinkReport | None, member: MemberStatus) -> MemberStatus:
    if link is None:
        return member
    round_trip_ms = link.round_trip_s * 1e3 if link.round_trip_s else None
    return replace(member, host=link.host, is_dialled=link.is_dialled, round_trip_ms=round_trip_ms)


def _in_words(event: Event) -> tuple[int, str] | None:
    """The line of the log, if people are to hear of it."""
    match event:
        case events.Text(bytes=nbytes, description=description):
            return logging.INFO, f"text: {rounded_nbytes(nbytes)}, {description}, from {_origin(event)}"
        case events.Trained(outer_step=step, epoch=epoch, world_size=size, loss=loss, wait_s=wait_s):
            mean = "none" if loss is None else f"{loss:.4f}"
            committed = f"committed outer_step={step} epoch={epoch} world_size={size}"
            return logging.INFO, f"{committed} loss={mean} wait_s={wait_s:.2f}"
        case events.Evaluate(outer_step=step, loss=loss, bits_per_byte=bits, tokens=tokens):
            judged = f"evaluated outer_step={step} tokens={tokens}"
            return logging.INFO, f"{judged} validation_loss={figure(loss, '.4f')} bits_per_byte={figure(bits, '.4f')}"
        case told.BecameLearner(cause=cause):
            return logging.INFO, f"learner cause={cause!r}"
        case told.BecameExcused(epoch=epoch, outer_step=step):
            return logging.INFO, f"excused epoch={epoch} outer_step={step}; the others go on"
        case events.ViewDecided(epoch=epoch, members=members, cause=cause) if _IS_A_FAULT.search(cause):
            return logging.INFO, f"view_decided epoch={epoch} world_size={len(members)} cause={cause!r}"
        case told.WentBack(epoch=epoch, outer_step=step, cause=cause):
            return logging.WARNING, f"went_back epoch={epoch} outer_step={step} cause={cause!r}"
        case events.RolledBack(epoch=epoch, given_up=step, outer_step=to):
            where = f"epoch={epoch} from={step} to={'the beginning' if to is None else to}"
            return logging.WARNING, f"rolled_back {where}; nobody holds a newer outer step"
        case told.Lied(of=peer_id, outer_step=step, cause=cause):
            return logging.WARNING, f"member_lied of={peer_id} outer_step={step} cause={cause!r}"
        case told.CoordinatorAsks(testified=testified, needed=needed):
            return logging.WARNING, f"coordinator_lost_its_journal testified={testified} needed={needed}"
        case events.CheckpointFailed(cause=cause):
            return logging.WARNING, f"checkpoint_failed cause={cause!r}"
        case events.CheckpointNotCopied(cause=cause):
            return logging.WARNING, f"checkpoint_not_copied cause={cause!r}; it is on this peer's disk"
        case events.WorkerDied(cause=cause):
            return logging.WARNING, f"worker_died cause={cause!r}; the workers of this peer are replaced"
        case events.WorkerHung(request=request, seconds=seconds, cause=cause):
            hung = f"worker_hung request={request} seconds={seconds:.0f} cause={cause!r}"
            return logging.WARNING, f"{hung}; the workers of this peer are killed and replaced"
        case events.OutOfMemory(micro_batch=size, cause=cause):
            return logging.WARNING, f"out_of_memory micro_batch={size} cause={cause!r}; the workers begin anew"
        case events.ValuesNotFinite(outer_step=step, fragment=fragment):
            return logging.WARNING, f"values_not_finite outer_step={step} fragment={fragment}; the workers begin anew"
        case told.Deviated(outer_step=step, tensor=tensor, damaged_chunks=damaged):
            where = f"tensor={tensor} parameters={','.join(event.parameters) or None}"
            span = None if tensor is None else f"{event.start_bytes}-{event.stop_bytes}"
            cause = "memory changed that nobody wrote to: test it" if damaged else "another result than the others"
            extent = f"bytes={span} chunks={event.differing_chunks}"
            return logging.ERROR, f"deviated outer_step={step} {where} {extent} cause={cause!r}"
        case _:
            return None


def _origin(text: events.Text) -> str:
    if text.source == "machine":
        return "this machine"
    if not text.peers:
        return "the copy of an earlier start"
    names = ", ".join(peer_id[:4] for peer_id in text.peers)
    before = text.bytes - text.fetched_bytes
    kept = f" ({rounded_nbytes(before)} of it were here)" if before else ""
    return f"peers {names} in {text.seconds:.1f} s{kept}"
