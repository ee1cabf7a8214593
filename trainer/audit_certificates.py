"""The certificates that peers keep, against the journal: sealed, of its commits, each naming the one before it.

A certificate outlives the journal: whoever has one can prove a commit that the journal has lost. So one that the
journal does not hold is a finding, unless that was rebuilt and the certificate is of before. Seals are checked where
one of the folders has the run's keys. Must not know how a certificate comes to a peer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic.audit import Finding, RecordIndex, Verdict, judge
from elastic.audit.beginning import beginning_in
from elastic.audit.coverage import all_but, used_up
from elastic.audit.findings import short
from elastic.core.certificate import Certificate, genesis_link
from elastic.core.leases import merged
from elastic.core.messages import DataPosition, Held, IndexRange
from elastic.core.records import Genesis, LeaseRecord, RebuildRecord, Record
from trainer.certificates import FILE_NAME, read_certificates


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
    kept: Sequence[KeptCertificates], seal_key: bytes | None, records: Sequence[Record], index: RecordIndex
) -> Verdict:
    """I1, I2, I3, I7, I9: what the peers can prove is what the journal says.

    Args:
        kept: the peers' files.
        seal_key: of the run; None if nobody here knows it.
        records: the journal's.
        index: the same records.
    """
    book = _Book(seal_key, records, index)
    ours = [file for file in kept if not book.is_of_another_run(file)]
    number = sum(len(file.certificates) for file in ours)
    return judge("certificates", ("I1", "I2", "I3", "I7", "I9"), book.findings(ours), num_looked_at=number,
                 unit="certificates")  # fmt: skip


class _Book:
    """The journal as certificates tell of it."""

    def __init__(self, seal_key: bytes | None, records: Sequence[Record], index: RecordIndex) -> None:
        self._seal_key = seal_key
        self._records = records
        self._index = index
        self._rebuilt = next((item for item in records if isinstance(item, RebuildRecord)), None)
        self._members = {member.ref for _, view in index.views.values() for member in view.members}
        self._positions: dict[int, tuple[int, tuple[IndexRange, ...]]] = {}
        self._links: dict[int, set[bytes]] = {}  # of what was made of each step; of the beginning, what is named there
        for record in records:
            match record:
                case Genesis():
                    position = DataPosition(record.next_index, merged(record.returned))
                    self._links[record.outer_step] = {genesis_link(Held(record.outer_step, record.digest), position)}
                case RebuildRecord(certificate=certificate) if certificate is not None:
                    self._links[certificate.made.outer_step] = {certificate.link}
                case _:
                    pass

    def is_of_another_run(self, file: KeptCertificates) -> bool:
        """A folder that was used before: nothing was committed there yet that would have replaced the file."""
        return bool(file.certificates) and not any(
            self._is_sealed(item) or self._members & {part.ref for part in item.contributors}
            for item in file.certificates
        )

    def _is_sealed(self, certificate: Certificate) -> bool:
        return self._seal_key is not None and certificate.check(self._seal_key)

    def findings(self, files: Sequence[KeptCertificates]) -> Iterator[Finding]:
        """What is wrong with these files."""
        rebuilt = self._rebuilt
        if rebuilt is not None and rebuilt.certificate is not None and self._is_forged(rebuilt.certificate):
            said = "the journal was rebuilt from a certificate that does not have the run's seal"
            yield Finding(invariant="I9", slot=self._records.index(rebuilt), sentence=said)
        agreed: list[tuple[Path, int, Certificate]] = []
        for file in files:
            if file.damage is not None:
                said = f"the certificates of {file.path} are damaged: {file.damage}"
                yield Finding(invariant="I9", slot=None, sentence=said)
            for certificate in file.certificates:
                wrong = list(self._judge(file.path, certificate))
                yield from wrong
                found = self._index.commits.get(certificate.key)
                if not wrong and found is not None:
                    agreed.append((file.path, found[0], certificate))
                    self._links.setdefault(certificate.made.outer_step, set()).add(certificate.link)
        for slot, step in {(slot, certificate.made.outer_step): None for _, slot, certificate in agreed}:
            if len(self._links[step]) > 1:
                said = f"there are {len(self._links[step])} certificates of step {step}, which name others before them"
                yield Finding(invariant="I1", slot=slot, sentence=said)
        for path, slot, certificate in agreed:
            parents = self._links.get(certificate.key.outer_step)
            if parents is not None and certificate.parent not in parents:
                said = f"{_told(path, certificate)}, which does not follow the one before it"
                yield Finding(invariant="I1", slot=slot, sentence=said)

    def _is_forged(self, certificate: Certificate) -> bool:
        return self._seal_key is not None and not certificate.check(self._seal_key)

    def _judge(self, path: Path, certificate: Certificate) -> Iterator[Finding]:
        told = _told(path, certificate)
        if self._is_forged(certificate):
            said = f"{told}, which does not have the run's seal: it was changed, or is of another run"
            yield Finding(invariant="I9", slot=None, sentence=said)
            return
        if (found := self._index.commits.get(certificate.key)) is None:
            yield from self._judge_unknown(told, certificate)
            return
        slot, record = found
        if certificate.digest != record.digest:
            said = f"{told} as {short(certificate.digest)}, the journal has {short(record.digest)}"
            yield Finding(invariant="I1", slot=slot, sentence=said)
        if certificate.previous != record.previous:
            said = f"{told} that started from {short(certificate.previous)}, in the journal {short(record.previous)}"
            yield Finding(invariant="I1", slot=slot, sentence=said)
        weights = [(item.ref, item.weight) for item in certificate.contributors]
        if weights != [(item.ref, item.weight) for item in record.contributions]:
            yield Finding(invariant="I2", slot=slot, sentence=f"{told} of other work than the journal's")
        if certificate.final != record.final:
            said = f"{told} as {'the last one' if certificate.final else 'one of many'}, the journal says otherwise"
            yield Finding(invariant="I3", slot=slot, sentence=said)
        if not self._is_at_its_place(certificate, slot):
            said = f"{told} that names other samples as used up than the journal"
            yield Finding(invariant="I7", slot=slot, sentence=said)

    def _judge_unknown(self, told: str, certificate: Certificate) -> Iterator[Finding]:
        """A commit that the journal does not hold: of before it was rebuilt, or lost."""
        rebuilt, key = self._rebuilt, certificate.key
        if rebuilt is not None and key.epoch < rebuilt.epoch:
            known = rebuilt.certificate
            if known is not None and known.key == key and known.link != certificate.link:
                said = f"{told}, the journal was rebuilt from another one of the same round"
                yield Finding(invariant="I1", slot=self._records.index(rebuilt), sentence=said)
        elif self._index.is_whole:
            yield Finding(invariant="I3", slot=None, sentence=f"{told}, the journal does not hold it")

    def _is_at_its_place(self, certificate: Certificate, slot: int) -> bool:
        """Whether the data stood there when this was committed."""
        position = certificate.position
        if slot not in self._positions:
            self._positions[slot] = self._position_at(slot), used_up(self._records, certificate.made.outer_step)
        return (position.next_index, all_but(position.unconsumed, position.next_index)) == self._positions[slot]

    def _position_at(self, slot: int) -> int:
        next_index = 0
        for record in self._records[:slot]:
            if (begins := beginning_in(record)) is not None:
                next_index = max(next_index, begins.position.next_index)
            elif isinstance(record, LeaseRecord):
                next_index = max([next_index, *(item.stop for item in record.ranges)])
        return next_index


def _told(path: Path, certificate: Certificate) -> str:
    return f"{path} has a certificate of step {certificate.made.outer_step} in epoch {certificate.key.epoch}"
