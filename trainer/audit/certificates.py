# SPDX-License-Identifier: Apache-2.0
"""The certificates that peers keep, against the journal: genuine, of its commits, each naming the one before it.

A certificate outlives the journal: whoever has one can prove a commit that the journal has lost. So one that the
journal does not hold is a finding, unless that was rebuilt and the certificate is of before. One that the journal does
hold must be what the journal's records make it, so two that follow the same parent are found unless the run went back
between them. Seals and signatures, those in the journal too, are checked where one of the folders knows the run's
authorities. Must not know how a certificate comes to a
peer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from isthmus.elastic.audit import Finding, RecordIndex, Verdict, judge
from isthmus.elastic.audit.proofs import certificates_at, contradictions
from isthmus.elastic.core.certificate import Certificate, ballot
from isthmus.elastic.core.notary import Verifier
from isthmus.elastic.core.records import CommitRecord, RebuildRecord, Record, RollbackRecord
from isthmus.trainer.checkpoint.certificates import FILE_NAME, read_certificates


@dataclass(frozen=True, slots=True)
class KeptCertificates:
    """A peer's file: its certificates, oldest first, and what of it is none."""

    path: Path
    certificates: tuple[Certificate, ...]
    damage: str | None


def read_kept(folders: Sequence[Path]) -> list[KeptCertificates]:
    """The files of these peers' folders.

    Raises:
        OSError: one of them cannot be read.
    """
    return [_read(path) for folder in folders if (path := folder / FILE_NAME).exists()]


def _read(path: Path) -> KeptCertificates:
    try:
        pieces = read_certificates(path)
    except (msgspec.MsgspecError, RecursionError) as error:
        return KeptCertificates(path, (), str(error))
    read = tuple(piece for piece in pieces if piece is not None)
    missing = len(pieces) - len(read)
    return KeptCertificates(path, read, f"{missing} of {len(pieces)} pieces are no certificate" if missing else None)


def audit_certificates(
    kept: Sequence[KeptCertificates], verifier: Verifier | None, records: Sequence[Record], index: RecordIndex
) -> Verdict:
    """I1, I2, I3, I7, I9: what the peers can prove is what the journal says.

    Args:
        kept: the peers' files.
        verifier: of the run; None if nobody here knows its authorities.
        records: the journal's.
        index: the same records.
    """
    book = _Book(verifier, records, index)
    ours = [file for file in kept if not book.is_of_another_run(file)]
    number = sum(len(file.certificates) for file in ours)
    return judge("certificates", ("I1", "I2", "I3", "I7", "I9"), book.findings(ours), num_looked_at=number,
                 unit="certificates")  # fmt: skip


class _Book:
    """The journal as certificates tell of it."""

    def __init__(self, verifier: Verifier | None, records: Sequence[Record], index: RecordIndex) -> None:
        self._verifier = verifier
        self._records = records
        self._index = index
        self._rebuilt = next((item for item in records if isinstance(item, RebuildRecord)), None)
        self._members = {member.ref for _, view in index.views.values() for member in view.members}

    def is_of_another_run(self, file: KeptCertificates) -> bool:
        """A folder that was used before: nothing was committed there yet that would have replaced the file."""
        return bool(file.certificates) and not any(
            self._is_genuine(item) or self._members & {part.ref for part in item.contributors}
            for item in file.certificates
        )

    def _is_genuine(self, certificate: Certificate) -> bool:
        return self._verifier is not None and certificate.check(self._verifier)

    def findings(self, files: Sequence[KeptCertificates]) -> Iterator[Finding]:
        """What is wrong with these files."""
        for slot, record in enumerate(self._records):
            if isinstance(record, RebuildRecord | RollbackRecord) and self._is_forged(record.certificate):
                what = "the journal was rebuilt from" if isinstance(record, RebuildRecord) else "the run went back to"
                said = f"{what} a certificate that the run's keys do not prove"
                yield Finding(invariant="I9", slot=slot, sentence=said)
            elif isinstance(record, CommitRecord) and not self._is_signed(record):
                said = f"the commit of step {record.outer_step} is not signed by most of its members"
                yield Finding(invariant="I9", slot=slot, sentence=said)
        due = certificates_at(self._records, self._slots_of(files))
        for file in files:
            if file.damage is not None:
                said = f"the certificates of {file.path} are damaged: {file.damage}"
                yield Finding(invariant="I9", slot=None, sentence=said)
            for certificate in file.certificates:
                yield from self._judge(_told(file.path, certificate), certificate, due)

    def _slots_of(self, files: Sequence[KeptCertificates]) -> set[int]:
        commits = self._index.commits
        return {commits[item.key][0] for file in files for item in file.certificates if item.key in commits}

    def _is_forged(self, certificate: Certificate | None) -> bool:
        return certificate is not None and self._verifier is not None and not certificate.check(self._verifier)

    def _is_signed(self, record: CommitRecord) -> bool:
        """Whether more than half of the commit's members have signed for it, as far as that can be checked."""
        verifier = self._verifier
        if verifier is None:
            return True
        voters = {
            item.ref.peer_id
            for item in record.contributions
            if verifier.is_signed_by(
                item.ref.peer_id,
                ballot(record.key, record.previous, record.digest, item.ref, item.weight),
                item.signature,
            )
        }
        return 2 * len(voters) > len(record.contributions)

    def _judge(self, told: str, certificate: Certificate, due: dict[int, Certificate]) -> Iterator[Finding]:
        if self._is_forged(certificate):
            said = f"{told}, which the run's keys do not prove: it was changed, or is of another run"
            yield Finding(invariant="I9", slot=None, sentence=said)
        elif (found := self._index.commits.get(certificate.key)) is None:
            yield from self._judge_unknown(told, certificate)
        else:
            yield from contradictions(told, certificate, due[found[0]], found[0])

    def _judge_unknown(self, told: str, certificate: Certificate) -> Iterator[Finding]:
        """A commit that the journal does not hold: of before it was rebuilt, or lost."""
        rebuilt, key = self._rebuilt, certificate.key
        if rebuilt is not None and key.epoch < rebuilt.epoch:
            known = rebuilt.certificate
            if known is not None and known.key == key and known.link != certificate.link:
                said = f"{told}, the journal was rebuilt from another one of the same round"
                yield Finding(invariant="I1", slot=self._records.index(rebuilt), sentence=said)
        elif (kept := self._index.kept.get(key)) is not None:
            yield from contradictions(told, certificate, kept, 0)
        elif self._index.is_whole and certificate.order > self._index.since:
            yield Finding(invariant="I3", slot=None, sentence=f"{told}, the journal does not hold it")


def _told(path: Path, certificate: Certificate) -> str:
    return f"{path} has a certificate of step {certificate.made.outer_step} in epoch {certificate.key.epoch}"
