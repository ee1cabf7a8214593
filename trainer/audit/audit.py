# SPDX-License-Identifier: Apache-2.0
"""`isthmus audit`: what a run did, proved from its folders.

The journal says it all, and the peers' logs, certificates and checkpoints say whether the journal is all there is.
Everything is only read: no lock is taken, no file made or changed, and a run that goes on does not notice. What the
peers wrote is read before the journal, since a record is in the journal before anybody hears of it. Folders that are
copied from other machines while the run goes on must be copied in that order too.

Errors: `ConfigError` (2) where there is no journal to audit; `EnvironmentFault` (3) where it cannot be read. What is
wrong with the run is no error here but a finding (elastic/audit).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography import x509

from isthmus.collective.transport.certificates import certificate_from_bytes
from isthmus.elastic.audit import Audit, Finding, RecordIndex, Verdict, audit, judge
from isthmus.elastic.audit.beginning import first_slot
from isthmus.elastic.core.notary import Verifier
from isthmus.elastic.core.records import RebuildRecord, Record, SnapshotRecord
from isthmus.elastic.errors import JournalUnreadable
from isthmus.elastic.journal.reader import JournalReading, read_journal
from isthmus.elastic.shell.notary import RunVerifier
from isthmus.trainer.audit.certificates import KeptCertificates, audit_certificates, read_kept
from isthmus.trainer.audit.checkpoints import SavedState, audit_checkpoints, read_checkpoints
from isthmus.trainer.audit.logs import Deviant, Log, MissingLogs, audit_logs, deviants, missing_logs, read_logs
from isthmus.trainer.checkpoint.certificates import FILE_NAME as CERTIFICATES_NAME
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME
from isthmus.trainer.errors import ConfigError, EnvironmentFault, require_ours
from isthmus.trainer.files import RUN_NAME
from isthmus.trainer.record.event_log import FILE_NAME, has_events
from isthmus.trainer.run.founding import JOURNAL_NAME, find_authorities


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAudit:
    """What was found.

    Attributes:
        run_id: None if the journal does not say.
        journal: the file that was audited.
        archives: the files with older records of it.
        first_record: where its records begin; more than 0 if some are in an archive that is not here.
        folders: whose logs, certificates and checkpoints were looked at.
        proved: what the records say of the run, and the verdicts over them.
        deviants: who voted for another state than the committed one, as far as logs are here.
        missing_logs: whose logs do not go back to their beginning any more.
        knows_authorities: whether a folder knew those of the run, so that seals and signatures could be checked.
        verdicts: all of them, that over the journal's file first.
    """

    run_id: str | None
    journal: Path
    archives: tuple[Path, ...]
    first_record: int
    folders: tuple[Path, ...]
    proved: Audit
    deviants: tuple[Deviant, ...]
    missing_logs: tuple[MissingLogs, ...]
    knows_authorities: bool
    verdicts: tuple[Verdict, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return all(verdict.holds for verdict in self.verdicts)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, the journal's own faults first."""
        return tuple(finding for verdict in self.verdicts for finding in verdict.findings)


def find_verifier(folders: Sequence[Path], run_id: str) -> Verifier | None:
    """Of this run's seals and signatures; None if none of these folders knows the run's authorities."""
    found = {item for folder in folders for item in find_authorities(folder, run_id)}
    authorities = list[x509.Certificate]()
    for item in found:
        with contextlib.suppress(ValueError):
            authorities.append(certificate_from_bytes(item))
    return RunVerifier(run_id, lambda: authorities) if authorities else None


def audit_runs(given: Sequence[Path]) -> list[RunAudit]:
    """Audit every run of these folders of which a journal is there: peers' folders in any order, or folders of such.

    Raises:
        ConfigError: a folder is none, or there is no journal.
        EnvironmentFault: a file cannot be read, or a folder is another user's.
    """
    folders = [folder for path in given for folder in _peers_folders(path)]
    try:
        logs = read_logs(folder / FILE_NAME for folder in folders)
        missing = missing_logs(folders)
        saved = read_checkpoints(folders)
        kept = read_kept(folders)
        readings = [read_journal(path) for folder in folders if (path := folder / JOURNAL_NAME).exists()]
    except JournalUnreadable as error:
        raise EnvironmentFault(str(error), cure="check its permissions, or audit a copy of its folder") from error
    except OSError as error:
        raise EnvironmentFault(f"{error.filename} cannot be read: {error.strerror}", cure="check it") from error
    if not readings:
        names = ", ".join(map(str, given))
        cure = f"name the folder of its founder or coordinator too, where {JOURNAL_NAME} is"
        raise ConfigError(f"there is no journal in {names}", cure=cure)
    evidence = _Evidence(folders=tuple(folders), logs=logs, missing=missing, saved=saved, kept=kept)
    return [_audit_run(lot, evidence) for lot in _by_run(readings)]


def _by_run(readings: Sequence[JournalReading]) -> list[list[JournalReading]]:
    """The journals of each run. One that does not say its run, nor the file beside it, is that of the only run here."""
    lots: dict[str, list[JournalReading]] = {}
    nameless = []
    for reading in readings:
        run_id = reading.run_id or _run_named_beside(reading.path)
        nameless.append(reading) if run_id is None else lots.setdefault(run_id, []).append(reading)
    known = [lots[run_id] for run_id in sorted(lots)]
    if len(known) <= 1:
        return [[*(reading for lot in known for reading in lot), *nameless]]
    # Found before: beside two runs a destroyed journal was left out, and the audit held.
    return [*known, *([reading] for reading in nameless)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """What the peers of all runs here have kept."""

    folders: tuple[Path, ...]
    logs: Mapping[str, Log]
    missing: tuple[MissingLogs, ...]
    saved: Sequence[SavedState]
    kept: Sequence[KeptCertificates]


def _audit_run(readings: Sequence[JournalReading], evidence: _Evidence) -> RunAudit:
    """One run. Of several journals (`readings`) the longest counts, and of rebuilt ones the newest."""
    journal = max(readings, key=lambda reading: (_rebuilt_epoch(reading), reading.end))
    index = RecordIndex(journal.records, is_whole=journal.broken is None)
    log = evidence.logs.get(journal.run_id or "", Log())
    verifier = find_verifier(evidence.folders, journal.run_id or "")
    proved = audit(journal.records, samples_per_data_epoch=log.samples_per_data_epoch)
    over_records = (
        *proved.verdicts,
        audit_certificates(evidence.kept, verifier, journal.records, index),
        audit_logs(log, index),
        audit_checkpoints(evidence.saved, journal.run_id, journal.records, index, verifier),
    )
    return RunAudit(
        run_id=journal.run_id,
        journal=journal.path,
        archives=journal.archives,
        first_record=journal.base.slot,
        folders=evidence.folders,
        proved=proved,
        deviants=deviants(log, index),
        missing_logs=evidence.missing,
        knows_authorities=verifier is not None,
        verdicts=(
            _audit_files(journal, readings),
            *(verdict.shifted(journal.base.slot) for verdict in over_records),
        ),
    )


def _peers_folders(path: Path) -> list[Path]:
    """The folder itself, or, if it is no peer's folder, those in it: the demo's has all peers' events and no more."""
    require_ours(path)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {what}", cure="name the folders of the run's peers, such as runs/NAME")
    if _holds_state(path):
        return [path]
    for folder in path.iterdir():
        require_ours(folder)
    inner = [folder for folder in sorted(path.iterdir()) if _holds_state(folder) or has_events(folder / FILE_NAME)]
    return inner or ([path] if has_events(path / FILE_NAME) else [])


def _holds_state(folder: Path) -> bool:
    return any((folder / name).exists() for name in (JOURNAL_NAME, FOLDER_NAME, CERTIFICATES_NAME))


def _rebuilt_epoch(reading: JournalReading) -> int:
    slot = first_slot(reading.records)
    first = reading.records[slot] if slot < len(reading.records) else None
    if isinstance(first, SnapshotRecord):
        first = first.rebuilt
    return first.epoch if isinstance(first, RebuildRecord) else 0


def _audit_files(journal: JournalReading, readings: Sequence[JournalReading]) -> Verdict:
    """I9, I3: the files are what was written, and say the same as far as they go."""
    findings = [finding for reading in readings for finding in (*_damage(reading), *_misnamed(reading))]
    findings += _forks(journal, readings)
    number = len(journal.records)
    return judge("journal", ("I3", "I9"), findings, num_looked_at=number, unit="records")


def _damage(reading: JournalReading) -> Iterator[Finding]:
    for what, file in (("journal", reading), *(("archive", archive) for archive in reading.damaged)):
        if (broken := file.broken) is not None:
            where = "outside of its records" if broken.slot is None else f"at record {broken.slot}"
            said = f"the {what} {file.path} is damaged {where}: {broken.cause}"
            yield Finding(invariant="I9", slot=broken.slot, sentence=said)


class _Named(msgspec.Struct):
    """What matters here of `run.json`, which stands beside a journal; not its secret."""

    run_id: str


def _run_named_beside(journal: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeError, msgspec.MsgspecError):
        return msgspec.json.decode(journal.with_name(RUN_NAME).read_bytes(), type=_Named).run_id
    return None


def _misnamed(reading: JournalReading) -> Iterator[Finding]:
    run_id = _run_named_beside(reading.path)
    if None not in (reading.run_id, run_id) and reading.run_id != run_id:
        path = reading.path.with_name(RUN_NAME)
        said = f"the journal {reading.path} is of run {reading.run_id}, {path} says {run_id}"
        yield Finding(invariant="I9", slot=None, sentence=said)


def _forks(journal: JournalReading, readings: Sequence[JournalReading]) -> Iterator[Finding]:
    for other in readings:
        if other is journal or _rebuilt_epoch(other) != _rebuilt_epoch(journal):
            continue  # where one was lost and rebuilt, the other is older
        both = range(max(journal.base.slot, other.base.slot), other.end)
        parts = next((slot for slot in both if _record_in(journal, slot) != _record_in(other, slot)), None)
        if parts is not None:
            said = f"the journals {journal.path} and {other.path} part at record {parts}: two coordinators wrote"
            yield Finding(invariant="I3", slot=parts, sentence=said)


def _record_in(reading: JournalReading, slot: int) -> Record | None:
    return reading.records[slot - reading.base.slot] if slot < reading.end else None
