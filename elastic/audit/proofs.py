# SPDX-License-Identifier: Apache-2.0
"""What the certificates of a journal's commits must say: they follow from its records alone."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from isthmus.elastic.audit.beginning import Beginning, beginning_at, kept_commits, kept_states, slot_of_beginning
from isthmus.elastic.audit.coverage import all_but
from isthmus.elastic.audit.findings import Finding, short
from isthmus.elastic.audit.lineage import rollbacks_in
from isthmus.elastic.core.certificate import Certificate, genesis_link
from isthmus.elastic.core.leases import merged
from isthmus.elastic.core.messages import DataPosition, Held, IndexRange
from isthmus.elastic.core.records import CommitRecord, LeaseRecord, RebuildRecord, Record, RollbackRecord
from isthmus.elastic.core.run_state import contributors_of


class _Place(NamedTuple):
    """Where the data stands, and what the next certificate names as its parent."""

    next_index: int
    used: tuple[IndexRange, ...]
    link: bytes

    @property
    def position(self) -> DataPosition:
        return DataPosition(self.next_index, all_but(self.used, self.next_index))


_NOWHERE = _Place(0, (), b"")


def certificates_at(records: Sequence[Record], slots: Collection[int]) -> dict[int, Certificate]:
    """The certificates of the commits in these slots, without a seal, and of a beginning that was rebuilt from one.

    Those that a leading snapshot keeps are among them, with the seal that they have there.

    Args:
        records: from the first one on.
        slots: whose certificates are wanted; those of other records are left out.
    """
    found = dict(kept_commits(records))
    beginning = slot_of_beginning(records)
    back_to = {item.slot: item.back_to for item in rollbacks_in(records)}
    wanted = {*slots, *back_to.values()}
    kept = {slot: _place_of(begins, found.get(slot)) for slot, begins in kept_states(records)}
    place = _NOWHERE
    for slot, record in enumerate(records[: max(wanted, default=-1) + 1]):
        match record:
            case CommitRecord():
                used = (item for part in record.contributions for item in part.consumed)
                place = place._replace(used=merged((*place.used, *used)))
                certificate = _certificate_of(record, place)
                place = place._replace(link=certificate.link)
                if slot in slots:
                    found[slot] = certificate
            case LeaseRecord():
                place = place._replace(next_index=max([place.next_index, *(item.stop for item in record.ranges)]))
            case RollbackRecord():
                place = kept.get(back_to[slot], _NOWHERE)
            case _ if slot == beginning and (begins := beginning_at(slot, record)) is not None:
                if isinstance(record, RebuildRecord) and record.certificate is not None:
                    found[slot] = record.certificate
                place = _place_of(begins, found.get(slot))
                if slot in kept:  # a snapshot's: since that state was made, samples have been given
                    place = place._replace(link=kept[slot].link)
            case _:
                pass
        if slot in wanted:
            kept.setdefault(slot, place)
    return found


def _place_of(begins: Beginning, certificate: Certificate | None) -> _Place:
    """Where a state begins that has this certificate, or none."""
    end, unconsumed = begins.position.next_index, merged(begins.position.unconsumed)
    link = genesis_link(Held(begins.outer_step, begins.digest), DataPosition(end, unconsumed))
    return _Place(end, all_but(unconsumed, end), link if certificate is None else certificate.link)


def _certificate_of(record: CommitRecord, place: _Place) -> Certificate:
    """`place`: the samples of this commit are used up, and its parent is the one before it."""
    return Certificate(
        key=record.key,
        previous=record.previous,
        digest=record.digest,
        contributors=contributors_of(record),
        final=record.final,
        position=place.position,
        parent=place.link,
    )


def contradictions(told: str, certificate: Certificate, due: Certificate, slot: int) -> Iterator[Finding]:
    """What a certificate says else than the journal about the same round; whose seal it has is not looked at.

    Args:
        told: where it was found, and of which commit it is.
        certificate: as it was found.
        due: as it must be.
        slot: of the commit.
    """
    if certificate.digest != due.digest:
        said = f"{told} as {short(certificate.digest)}, the journal has {short(due.digest)}"
        yield Finding(invariant="I1", slot=slot, sentence=said)
    if certificate.previous != due.previous:
        said = f"{told} that started from {short(certificate.previous)}, in the journal {short(due.previous)}"
        yield Finding(invariant="I1", slot=slot, sentence=said)
    named, parts = ([(item.ref, item.weight) for item in one.contributors] for one in (certificate, due))
    if named != parts:
        yield Finding(invariant="I2", slot=slot, sentence=f"{told} of other work than the journal's")
    if certificate.final != due.final:
        said = f"{told} as {'the last one' if certificate.final else 'one of many'}, the journal says otherwise"
        yield Finding(invariant="I3", slot=slot, sentence=said)
    if certificate.position != due.position:
        said = f"{told} that names other samples as used up than the journal"
        yield Finding(invariant="I7", slot=slot, sentence=said)
    if certificate.parent != due.parent:
        yield Finding(invariant="I1", slot=slot, sentence=f"{told}, which does not follow the one before it")
