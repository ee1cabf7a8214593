# SPDX-License-Identifier: Apache-2.0
"""What the peers wrote down themselves (events.jsonl and its older parts), against the journal.

A commit that a peer saw must be in the journal, with the same digest, also if the run has gone back behind it: of
itself a journal cannot show that its end is missing. So must be the views that the peer was told of, the state it
caught up to and the weight of its work; and the log of the coordinator's own process repeats every record. Only lines
of this run count: a log outlives its runs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from isthmus.collective.core.types import Epoch, OuterStep, RoundKey
from isthmus.elastic import observation as told
from isthmus.elastic.audit import Finding, RecordIndex, Verdict, judge
from isthmus.elastic.audit.findings import short
from isthmus.trainer.record import events
from isthmus.trainer.record.event_log import FILE_NAME, missing_files, read_events
from isthmus.trainer.record.events import event_of
from isthmus.trainer.record.translation import recorded

_Known = (
    told.RoundStarted | told.RoundStaged | told.RoundCommitted | told.ViewInstalled | told.WentBack | told.CatchUpEnded
    | events.CommitDecided | events.ViewDecided | events.Genesis | events.RolledBack | events.Lease
    | events.LeaseReturned
)  # fmt: skip


class Deviant(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """A peer that voted for another state than the one that was committed as `outer_step`."""

    outer_step: int
    peer_id: str


@dataclass(slots=True)
class Log:
    """The lines of one run in one folder's log, or of several."""

    lines: list[_Known] = field(default_factory=list)
    samples_per_data_epoch: int | None = None


class MissingLogs(msgspec.Struct, frozen=True, kw_only=True):
    """Older parts of a peer's log that are gone: dropped since there were too many, or taken away."""

    folder: Path
    number: int


def missing_logs(folders: Iterable[Path]) -> tuple[MissingLogs, ...]:
    """Which of these folders no longer have all of their log. Raises OSError."""
    found = ((folder, missing_files(folder / FILE_NAME)) for folder in folders)
    return tuple(MissingLogs(folder=folder, number=number) for folder, number in found if number)


def read_logs(paths: Iterable[Path]) -> dict[str, Log]:
    """Every run that these logs tell of, by run id. A start of which the run is not known is left out.

    Raises:
        OSError: one of them cannot be read.
    """
    logs: dict[str, Log] = {}
    for path in paths:
        for started, lines in _starts(path):
            log = logs.setdefault(started.run_id, Log())
            log.lines += lines
            log.samples_per_data_epoch = log.samples_per_data_epoch or started.samples_per_data_epoch
    return logs


def _starts(path: Path) -> Iterator[tuple[events.Started | events.LogContinued, list[_Known]]]:
    started: events.Started | events.LogContinued | None = None
    lines: list[_Known] = []
    for event in map(event_of, read_events(path)):
        match event:
            case events.LogOpened():
                if started is not None:
                    yield started, lines
                started, lines = None, []
            case events.LogContinued(run_id=run_id) if run_id and started is None:
                started = event  # of what came before it nothing is left
            case events.Started():
                started = event
            case _ if isinstance(event, _Known):
                lines.append(event)
            case _:
                pass  # of no interest here, or of another version
    if started is not None:
        yield started, lines


def audit_logs(log: Log, index: RecordIndex) -> Verdict:
    """I1, I2, I3, I5, I7, I8: what the peers saw is what the journal says."""
    lines = _since_rebuilt(log, index)
    findings = [finding for line in lines for finding in _compare(line, index)]
    findings += _outvoted(log, index)
    return judge("logs", ("I1", "I2", "I3", "I5", "I7", "I8"), findings, num_looked_at=len(lines), unit="lines")


def _since_rebuilt(log: Log, index: RecordIndex) -> list[_Known]:
    """Without what a peer wrote down until it took part in the rebuilt run: that is of the journal that was lost.

    The same where the oldest records are in an archive that is not here.
    """
    lines: list[_Known] = []
    peers: set[str] = set()
    for line in log.lines:
        epoch = getattr(line, "epoch", 0)
        if epoch >= index.rebuilt_epoch and (epoch, getattr(line, "outer_step", None) or 0) > index.since:
            peers.add(line.peer)
        if line.peer in peers:
            lines.append(line)
    return lines


def deviants(log: Log, index: RecordIndex) -> tuple[Deviant, ...]:
    """Who voted for another state than the committed one, by outer step. No fault of the run: votes are for that."""
    votes = (line for line in log.lines if isinstance(line, told.RoundStaged))
    return tuple(sorted({deviant for vote in votes if (deviant := _deviant(vote, index)) is not None}))


def _deviant(vote: told.RoundStaged, index: RecordIndex) -> Deviant | None:
    found = index.commits.get(_key(vote))
    if found is None or found[1].digest.hex() == vote.digest:
        return None
    return Deviant(outer_step=found[1].outer_step, peer_id=vote.peer)


def _outvoted(log: Log, index: RecordIndex) -> Iterator[Finding]:
    """A state that a half of its members did not vote for was not to be committed."""
    against: dict[RoundKey, set[str]] = {}
    for line in log.lines:
        if isinstance(line, told.RoundStaged) and _deviant(line, index) is not None:
            against.setdefault(_key(line), set()).add(line.peer)
    for key, peers in against.items():
        slot, record = index.commits[key]
        number = len(record.contributions)
        if 2 * len(peers) >= number:
            said = f"step {record.outer_step} was committed though {len(peers)} of its {number} members"
            yield Finding(invariant="I1", slot=slot, sentence=f"{said} voted for another state")


def _key(line: told.RoundStarted | told.RoundStaged | told.RoundCommitted | events.CommitDecided) -> RoundKey:
    """The round of a line. A commit names the step that it made, the others the one they start from."""
    step = line.outer_step - isinstance(line, told.RoundCommitted | events.CommitDecided)
    return RoundKey(Epoch(line.epoch), OuterStep(step), line.fragment)


def _compare(line: _Known, index: RecordIndex) -> Iterator[Finding]:
    match line:
        case told.RoundCommitted() | events.CommitDecided():
            yield from _compare_commit(line, index)
        case told.ViewInstalled() | events.ViewDecided():
            yield from _compare_view(line, index)
        case events.Genesis(outer_step=step, digest=digest):
            yield from _compare_state(f"{line.peer} wrote down that the run began with", step, digest, index)
        case events.RolledBack():
            yield from _compare_rollback(line, index)
        case told.WentBack(epoch=epoch) if index.is_whole and epoch not in {*index.rollbacks, index.rebuilt_epoch}:
            said = f"{line.peer} was told that the run went back in epoch {epoch}, the journal does not hold it"
            yield Finding(invariant="I3", slot=None, sentence=said)
        case told.CatchUpEnded(outer_step=step, digest=digest) if step is not None and digest is not None:
            yield from _compare_state(f"{line.peer} caught up to", step, digest, index)
        case told.RoundStarted(weight=weight):
            slot, record = index.commits.get(_key(line), (None, None))
            for item in record.contributions if record is not None else ():
                if item.ref.peer_id == line.peer and item.weight != weight:
                    said = f"{line.peer} gave its work weight {weight} in step {line.outer_step + 1}"
                    yield Finding(
                        invariant="I2", slot=slot, sentence=f"{said}, the journal counts it with {item.weight}"
                    )
        case events.Lease() if index.is_whole and (line.of, line.serial, line.samples) not in index.grants:
            said = f"{line.peer} wrote down that {line.of} was given {line.samples} samples (request {line.serial})"
            yield Finding(invariant="I7", slot=None, sentence=f"{said}, the journal does not hold it")
        case events.LeaseReturned() if index.is_whole and (line.of, line.epoch, line.samples) not in index.returns:
            said = f"{line.peer} wrote down that {line.of} returned {line.samples} samples in epoch {line.epoch}"
            yield Finding(invariant="I7", slot=None, sentence=f"{said}, the journal does not hold it")
        case _:
            pass


def _compare_commit(line: told.RoundCommitted | events.CommitDecided, index: RecordIndex) -> Iterator[Finding]:
    step = line.outer_step
    said = f"{line.peer} saw step {step} committed as {line.digest[:12]}"
    found = index.commits.get(_key(line)) or index.rounds.get(step)
    if found is None:
        if index.is_whole:
            yield Finding(invariant="I3", slot=None, sentence=f"{said}, the journal does not hold it")
        return
    slot, record = found
    if record.digest.hex() != line.digest:
        yield Finding(invariant="I1", slot=slot, sentence=f"{said}, the journal has {short(record.digest)}")
    elif record.key != _key(line):
        said += f" in epoch {line.epoch} (fragment {line.fragment})"
        has = f"epoch {record.key.epoch} (fragment {record.key.fragment})"
        yield Finding(invariant="I3", slot=slot, sentence=f"{said}, the journal has {has}")
    elif record.final != line.final:
        said += " as the last one" if line.final else " as one of many"
        yield Finding(invariant="I3", slot=slot, sentence=f"{said}, the journal says otherwise")


def _compare_view(line: told.ViewInstalled | events.ViewDecided, index: RecordIndex) -> Iterator[Finding]:
    said = f"{line.peer} was told of view {line.epoch} of {', '.join(line.members) or 'nobody'}"
    found = index.views.get(line.epoch)
    if found is None:
        if index.is_whole:
            yield Finding(invariant="I8", slot=None, sentence=f"{said}, the journal does not hold it")
        return
    slot, view = found
    if tuple(member.peer_id for member in view.members) != line.members:
        yield Finding(invariant="I8", slot=slot, sentence=f"{said}, the journal has other members")


def _compare_rollback(line: events.RolledBack, index: RecordIndex) -> Iterator[Finding]:
    said = f"{line.peer} wrote down that the run went back from step {line.given_up} in epoch {line.epoch}"
    if (found := index.rollbacks.get(line.epoch)) is None:
        if index.is_whole:
            yield Finding(invariant="I3", slot=None, sentence=f"{said}, the journal does not hold it")
        return
    slot, record = found
    if msgspec.structs.replace(recorded(record), t_s=line.t_s, wall=line.wall, peer=line.peer) != line:
        yield Finding(invariant="I3", slot=slot, sentence=f"{said}, the journal tells it otherwise")


def _compare_state(said: str, step: int, digest: str, index: RecordIndex) -> Iterator[Finding]:
    said = f"{said} step {step} as {digest[:12]}"
    states = index.states.get(step, [])
    if not states:
        if index.is_whole:
            yield Finding(invariant="I5", slot=None, sentence=f"{said}, the journal does not hold it")
    elif all(held.hex() != digest for _, held in states):
        slot, held = states[-1]
        yield Finding(invariant="I5", slot=slot, sentence=f"{said}, the journal has {short(held)}")
