# SPDX-License-Identifier: Apache-2.0
"""Where did every sample go? The fourth check (I7), and the figures that prove "exactly once".

A sweep over the sample indices, not over time: all ranges that the records name are cut where another one begins or
ends, so that every index of a piece has had the same life, and that life is judged once. This is another way than the
coordinator's ledger goes (elastic/core/leases.py), and costs N log N for N ranges, however many samples they hold.

    never given ──given──► owned by one start of a peer ──a commit──► used up, for good
        free again ◄──returned, when its owner is gone──┘

Where the run goes back, every index is again what it was at the commit that it goes back to, and nobody owns any.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.audit.beginning import first_state, leading
from isthmus.elastic.audit.coverage import DataEpochs, count_data_epochs
from isthmus.elastic.audit.findings import Finding, Verdict, judge
from isthmus.elastic.audit.leases import lease_findings
from isthmus.elastic.audit.lineage import Rollback, rollbacks_in
from isthmus.elastic.audit.moves import Jump, Kind, Move, in_order, jumps_in, moves_in, pieces_of
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import CommitRecord, Record, ViewRecord


class SampleCount(msgspec.Struct, kw_only=True):
    """How many samples went where. Each is counted once, but for `num_uses`, `num_given_up` and `num_returns`."""

    first_index: int = 0
    """Where the run's own samples begin; those below belong to the checkpoint it began with."""
    next_index: int = 0
    """The first sample that nobody was ever given, or was before the run went back behind that."""
    num_given: int = 0
    """Given to somebody."""
    num_used_up: int = 0
    """Used up by a commit."""
    num_uses: int = 0
    """As often as a commit used one up; more than `num_used_up` if one was trained twice."""
    num_given_up: int = 0
    """As often as a commit used one up that the run has given up since."""
    num_returns: int = 0
    """As often as one came back from a peer that was gone."""
    num_leased: int = 0
    """Somebody's at the end of the journal."""
    num_free: int = 0
    """Came back, or the run went back, and were given to nobody since."""
    num_passed_over: int = 0
    """Never given, though later ones were."""
    data_epochs: DataEpochs | None = None
    """Passes over the data; None if it is not known how long one is."""

    @property
    def exactly_once(self) -> bool:
        """Whether no sample was used up by two commits, and none was passed over."""
        return self.num_uses == self.num_used_up and not self.num_passed_over


def audit_samples(records: Sequence[Record], *, samples_per_data_epoch: int | None) -> tuple[Verdict, SampleCount]:
    """I7: a sample is given to one peer at a time, used up once by who owns it, and returns when that is gone."""
    book = _Book(records)
    if samples_per_data_epoch is not None:
        book.count.data_epochs = count_data_epochs(book.used, samples_per_data_epoch)
    findings = sorted([*lease_findings(records), *book.findings()], key=lambda finding: finding.slot or 0)
    return judge("leases", ("I7",), findings, num_looked_at=book.count.num_given, unit="samples"), book.count


class _Book:
    """The lives of all samples, piece by piece."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.count = SampleCount()
        self.used: list[IndexRange] = []
        """What is used up at the end: sorted, disjoint, maximal."""
        self._records = records
        self._found: dict[tuple[int, str], list[IndexRange]] = {}
        self._commits = [slot for slot, record in enumerate(records) if isinstance(record, CommitRecord)]
        self._leaving = _leaving(records)
        self._rollbacks = rollbacks_in(records)
        moves = list(moves_in(records))
        self._jumps = jumps_in(moves, self._rollbacks)
        for piece, life in pieces_of(moves):
            self._judge(piece, life)
        begins = first_state(records)
        self.count.first_index = 0 if begins is None else begins.position.next_index
        self.count.next_index = self._jumps[-1][-1].stop

    def findings(self) -> Iterator[Finding]:
        """One for each record and way of being wrong."""
        for (slot, sentence), pieces in self._found.items():
            yield Finding(invariant="I7", slot=slot, sentence=sentence.replace("{samples}", _named(pieces)))

    def _wrong(self, slot: int, sentence: str, piece: IndexRange) -> None:
        pieces = self._found.setdefault((slot, sentence), [])
        if not pieces or pieces[-1].stop < piece.stop:  # else it was said before the run went back
            _extend(pieces, piece)

    def _judge(self, piece: IndexRange, life: Sequence[Move]) -> None:
        owner: Move | None = None
        used: Move | None = None
        counts: list[Move] = []  # what was done to it and not given up since
        back = 0
        for move in in_order(life, self._rollbacks):
            if isinstance(move, Rollback):
                self._kept(piece, owner, move.slot)
                self._passed_over(piece, counts, self._jumps[back])
                lost = [item for item in counts if item.slot > move.back_to]
                self.count.num_given_up += len(piece) * sum(item.kind is Kind.USED for item in lost)
                counts = counts[: len(counts) - len(lost)]
                owner, used, back = None, _user_of(counts), back + 1
                continue
            match move.kind:
                case Kind.USED_BEFORE:
                    used = move
                case Kind.FREE_BEFORE:
                    used = None
                case Kind.GIVEN:
                    self._given(piece, move, owner, used)
                    owner = move
                case Kind.USED:
                    self._used(piece, move, owner, used)
                    owner, used = None, move
                case Kind.RETURNED:
                    if owner is None or owner.ref != move.ref:
                        self._wrong(move.slot, f"{_name(move)} returns {{samples}} without owning them", piece)
                    self._kept(piece, owner, move.slot)
                    owner = None
                    self.count.num_returns += len(piece)
            counts.append(move)
        self._kept(piece, owner, len(self._records))
        self.count.num_passed_over += self._passed_over(piece, counts, self._jumps[back])
        if counts:
            self._count(piece, counts, owner, used)

    def _count(self, piece: IndexRange, counts: Sequence[Move], owner: Move | None, used: Move | None) -> None:
        count, size = self.count, len(piece)
        count.num_given += size if any(move.kind is Kind.GIVEN for move in counts) else 0
        count.num_uses += size * sum(move.kind is Kind.USED for move in counts)
        if used is not None:
            count.num_used_up += size if used.kind is Kind.USED else 0
            _extend(self.used, piece)
        elif owner is not None:
            count.num_leased += size
        else:
            count.num_free += size

    def _given(self, piece: IndexRange, move: Move, owner: Move | None, used: Move | None) -> None:
        if owner is not None:
            self._wrong(move.slot, f"{_name(move)} is given {{samples}} while {_name(owner)} owns them", piece)
        if used is not None:
            self._wrong(move.slot, f"{_name(move)} is given {{samples}}, which step {used.step} had used up", piece)
        self._kept(piece, owner, move.slot)

    def _used(self, piece: IndexRange, move: Move, owner: Move | None, used: Move | None) -> None:
        if used is not None:
            self._wrong(move.slot, f"step {move.step} uses up {{samples}}, as step {used.step} did before", piece)
        elif owner is None or owner.ref != move.ref:
            who = f"for {_name(move)}, which does not own them"
            self._wrong(move.slot, f"step {move.step} uses up {{samples}} {who}", piece)
        self._kept(piece, owner, move.slot)

    def _kept(self, piece: IndexRange, owner: Move | None, until: int) -> None:
        """Whoever is gone may own samples only until the next commit: a crash can delay the return no longer."""
        if owner is None or owner.ref not in self._leaving:
            return
        gone = _first_after(self._leaving[owner.ref], owner.slot)
        commit = None if gone is None else _first_after(self._commits, gone)
        if commit is not None and commit < until:
            record = self._records[commit]
            assert isinstance(record, CommitRecord)
            self._wrong(
                commit,
                f"step {record.outer_step} is committed and {_name(owner)}, gone by then, owns {{samples}}",
                piece,
            )

    def _passed_over(self, piece: IndexRange, counts: Sequence[Move], jumps: Sequence[Jump]) -> int:
        """How many samples of the piece were never given, though later ones were, until the run went back or ended."""
        if counts or piece.stop > jumps[-1].stop:
            return 0
        jump = jumps[bisect_right(jumps, piece.start, key=lambda item: item.start)]
        self._wrong(jump.slot, "later samples are given, {samples} never were", piece)
        return len(piece)


def _user_of(moves: Sequence[Move]) -> Move | None:
    """What has used the samples up in the end, if they are."""
    used: Move | None = None
    for move in moves:
        if move.kind in (Kind.USED_BEFORE, Kind.USED):
            used = move
        elif move.kind is Kind.FREE_BEFORE:
            used = None
    return used


def _leaving(records: Sequence[Record]) -> dict[PeerRef, list[int]]:
    """The slots of the views in which a start of a peer is no longer a member, nor excused for being late."""
    leaving: dict[PeerRef, list[int]] = {}
    snapshot = leading(records)
    standing = () if snapshot is None else (*snapshot.admitted, *snapshot.excused)
    members = frozenset(ref for ref, _ in standing)
    for slot, record in enumerate(records):
        if isinstance(record, ViewRecord):
            now = frozenset((*(member.ref for member in record.view.members), *record.excused))
            for ref in members - now:
                leaving.setdefault(ref, []).append(slot)
            members = now
    return leaving


def _first_after(slots: Sequence[int], slot: int) -> int | None:
    place = bisect_right(slots, slot)
    return slots[place] if place < len(slots) else None


def _extend(pieces: list[IndexRange], piece: IndexRange) -> None:
    if pieces and pieces[-1].stop == piece.start:
        pieces[-1] = IndexRange(pieces[-1].start, piece.stop)
    else:
        pieces.append(piece)


def _name(move: Move) -> str:
    return move.ref.peer_id if move.ref is not None else "nobody"


def _named(pieces: Sequence[IndexRange]) -> str:
    num = sum(len(piece) for piece in pieces)
    if num == 1:
        return f"sample {pieces[0].start}"
    shown = ", ".join(f"{piece.start}-{piece.stop - 1}" for piece in pieces[:3])
    return f"{num} samples ({shown}{', …' if len(pieces) > 3 else ''})"
