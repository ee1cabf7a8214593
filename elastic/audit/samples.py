"""Where did every sample go? The fourth check (I7), and the figures that prove "exactly once".

A sweep over the sample indices, not over time: all ranges that the records name are cut where another one begins or
ends, so that every index of a piece has had the same life, and that life is judged once. This is another way than the
coordinator's ledger goes (elastic/core/leases.py), and costs N log N for N ranges, however many samples they hold.

    never given ──given──► owned by one start of a peer ──a commit──► used up, for good
        free again ◄──returned, when its owner is gone──┘
"""

import enum
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, assert_never

import msgspec

from collective.core.types import PeerRef
from elastic.audit.beginning import beginning_in, slot_of_beginning
from elastic.audit.coverage import DataEpochs, count_data_epochs
from elastic.audit.findings import Finding, Verdict, judge
from elastic.core.messages import IndexRange
from elastic.core.records import (
    BarRecord,
    CommitRecord,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    TicketRecord,
    ViewRecord,
)


class SampleCount(msgspec.Struct, kw_only=True):
    """How many samples went where. Each is counted once, but for `num_uses` and `num_returns`."""

    first_index: int = 0
    """Where the run's own samples begin; those below belong to the checkpoint it began with."""
    next_index: int = 0
    """The first sample that nobody was ever given."""
    num_given: int = 0
    """Given to somebody."""
    num_used_up: int = 0
    """Used up by a commit."""
    num_uses: int = 0
    """As often as a commit used one up; more than `num_used_up` if one was trained twice."""
    num_returns: int = 0
    """As often as one came back from a peer that was gone."""
    num_leased: int = 0
    """Somebody's at the end of the journal."""
    num_free: int = 0
    """Came back and were given to nobody since."""
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
    findings = sorted([*_rules(records), *book.findings()], key=lambda finding: finding.slot or 0)
    return judge("leases", ("I7",), findings, num_looked_at=book.count.num_given, unit="samples"), book.count


# -------------------------------------------------------------------------------------------------------- over time


def _rules(records: Sequence[Record]) -> Iterator[Finding]:
    """What a record may say of its peer, whichever the samples."""
    members: frozenset[PeerRef] = frozenset()
    epoch = 0
    serials: dict[PeerRef, int] = {}
    for slot, record in enumerate(records):
        wrong: list[str] = []
        match record:
            case ViewRecord(view=view, excused=excused):
                members, epoch = frozenset((*(member.ref for member in view.members), *excused)), view.epoch
            case Genesis() | RebuildRecord():
                wrong += _free_before(record)
            case LeaseRecord(ref=ref, ranges=ranges):
                wrong += _order(f"the lease of {ref.peer_id}", ranges)
                if ref not in members:
                    wrong.append(f"{ref.peer_id} is given samples and is no member")
                if record.serial <= serials.get(ref, -1):
                    wrong.append(f"request {record.serial} of {ref.peer_id} is granted after {serials[ref]}")
                serials[ref] = record.serial
            case ReleaseRecord(ref=ref, ranges=ranges):
                wrong += _order(f"the return of {ref.peer_id}", ranges)
                if ref in members:
                    wrong.append(f"{ref.peer_id} returns samples and is a member")
                if record.epoch != epoch:
                    wrong.append(f"{ref.peer_id} returns samples in epoch {record.epoch}, the view is {epoch}")
            case CommitRecord():
                for item in record.contributions:
                    wrong += _order(f"the work of {item.ref.peer_id}", item.consumed)
            case BarRecord() | TicketRecord():
                pass
            case _:
                assert_never(record)
        for sentence in wrong:
            yield Finding(invariant="I7", slot=slot, sentence=sentence)


def _free_before(record: Genesis | RebuildRecord) -> list[str]:
    begins = beginning_in(record)
    if begins is None:
        return []
    end, free = begins.position.next_index, begins.position.unconsumed
    wrong = _order("the run's beginning", free)
    if any(item.stop > end for item in free):
        wrong.append(f"samples from {end} on are free again before they were ever given")
    return wrong


def _order(what: str, ranges: Sequence[IndexRange]) -> list[str]:
    end = -1
    for item in ranges:
        if item.start < end or item.stop <= item.start:
            return [f"{what} does not list samples in order, each once"]
        end = item.stop
    return []


# ----------------------------------------------------------------------------------------------------- over samples


class _Kind(enum.Enum):
    USED_BEFORE = enum.auto()
    """By the run whose checkpoint this one began with; unless they are FREE_BEFORE."""
    FREE_BEFORE = enum.auto()
    GIVEN = enum.auto()
    USED = enum.auto()
    RETURNED = enum.auto()


class _Move(NamedTuple):
    """What the record in `slot` did to a range of samples. `step`: the outer step that used them up."""

    span: IndexRange
    slot: int
    kind: _Kind
    ref: PeerRef | None = None
    step: int = 0


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
        moves = list(_moves(records))
        self._jumps = _jumps(moves)
        for piece, life in _sweep(moves):
            if life:
                self._judge(piece, life)
            elif piece.stop <= self._jumps[-1].stop:
                self._passed_over(piece)
        first = next((begins for item in records if (begins := beginning_in(item)) is not None), None)
        self.count.first_index = 0 if first is None else first.position.next_index
        self.count.next_index = self._jumps[-1].stop

    def findings(self) -> Iterator[Finding]:
        """One for each record and way of being wrong."""
        for (slot, sentence), pieces in self._found.items():
            yield Finding(invariant="I7", slot=slot, sentence=sentence.replace("{samples}", _named(pieces)))

    def _wrong(self, slot: int, sentence: str, piece: IndexRange) -> None:
        _extend(self._found.setdefault((slot, sentence), []), piece)

    def _judge(self, piece: IndexRange, life: Sequence[_Move]) -> None:
        count, size = self.count, len(piece)
        owner: _Move | None = None
        used: _Move | None = None
        for move in life:
            match move.kind:
                case _Kind.USED_BEFORE:
                    used = move
                case _Kind.FREE_BEFORE:
                    used = None
                case _Kind.GIVEN:
                    self._given(piece, move, owner, used)
                    owner = move
                case _Kind.USED:
                    self._used(piece, move, owner, used)
                    owner, used = None, move
                    count.num_uses += size
                case _Kind.RETURNED:
                    if owner is None or owner.ref != move.ref:
                        self._wrong(move.slot, f"{_name(move)} returns {{samples}} without owning them", piece)
                    self._kept(piece, owner, move.slot)
                    owner = None
                    count.num_returns += size
        self._kept(piece, owner, len(self._records))
        was_given = any(move.kind is _Kind.GIVEN for move in life)
        count.num_given += size if was_given else 0
        if used is not None:
            count.num_used_up += size if used.kind is _Kind.USED else 0
            _extend(self.used, piece)
        elif owner is not None:
            count.num_leased += size
        else:
            count.num_free += size

    def _given(self, piece: IndexRange, move: _Move, owner: _Move | None, used: _Move | None) -> None:
        if owner is not None:
            self._wrong(move.slot, f"{_name(move)} is given {{samples}} while {_name(owner)} owns them", piece)
        if used is not None:
            self._wrong(move.slot, f"{_name(move)} is given {{samples}}, which step {used.step} had used up", piece)
        self._kept(piece, owner, move.slot)

    def _used(self, piece: IndexRange, move: _Move, owner: _Move | None, used: _Move | None) -> None:
        if used is not None:
            self._wrong(move.slot, f"step {move.step} uses up {{samples}}, as step {used.step} did before", piece)
        elif owner is None or owner.ref != move.ref:
            who = f"for {_name(move)}, which does not own them"
            self._wrong(move.slot, f"step {move.step} uses up {{samples}} {who}", piece)
        self._kept(piece, owner, move.slot)

    def _kept(self, piece: IndexRange, owner: _Move | None, until: int) -> None:
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

    def _passed_over(self, piece: IndexRange) -> None:
        self.count.num_passed_over += len(piece)
        jump = self._jumps[bisect_right(self._jumps, piece.start, key=lambda item: item.start)]
        self._wrong(jump.slot, "later samples are given, {samples} never were", piece)


class _Jump(NamedTuple):
    """The record in `slot` gave new samples `[start, stop)`, which begin at or behind all that were given before."""

    start: int
    stop: int
    slot: int


def _jumps(moves: Sequence[_Move]) -> list[_Jump]:
    jumps = [_Jump(0, 0, 0)]
    for move in moves:
        if move.kind in (_Kind.GIVEN, _Kind.USED_BEFORE) and move.span.stop > jumps[-1].stop:
            jumps.append(_Jump(max(move.span.start, jumps[-1].stop), move.span.stop, move.slot))
    return jumps


def _moves(records: Sequence[Record]) -> Iterator[_Move]:
    for slot, record in enumerate(records):
        match record:
            case Genesis() | RebuildRecord():
                begins = beginning_in(record)
                if begins is None or slot != slot_of_beginning(records):
                    continue  # there is one; the chain's check says so if not
                end = begins.position.next_index
                yield _Move(IndexRange(0, end), slot, _Kind.USED_BEFORE, step=begins.outer_step)
                for item in begins.position.unconsumed:
                    yield _Move(item, slot, _Kind.FREE_BEFORE)
            case LeaseRecord(ref=ref):
                for item in record.ranges:
                    yield _Move(item, slot, _Kind.GIVEN, ref)
            case CommitRecord():
                for part in record.contributions:
                    for item in part.consumed:
                        yield _Move(item, slot, _Kind.USED, part.ref, record.outer_step)
            case ReleaseRecord(ref=ref):
                for item in record.ranges:
                    yield _Move(item, slot, _Kind.RETURNED, ref)
            case _:
                pass


def _sweep(moves: Sequence[_Move]) -> Iterator[tuple[IndexRange, list[_Move]]]:
    """Cut `[0, the largest index)` at every end of every range: each piece with its moves, oldest first."""
    ends: list[tuple[int, int]] = []
    for number, move in enumerate(moves):
        if len(move.span):
            ends.append((move.span.start, number))
            ends.append((move.span.stop, ~number))
    ends.sort()
    here: set[int] = set()
    at = 0
    for position, number in ends:
        if position > at:
            yield IndexRange(at, position), [moves[index] for index in sorted(here)]
            at = position
        if number >= 0:
            here.add(number)
        else:
            here.remove(~number)


def _leaving(records: Sequence[Record]) -> dict[PeerRef, list[int]]:
    """The slots of the views in which a start of a peer is no longer a member, nor excused for being late."""
    leaving: dict[PeerRef, list[int]] = {}
    members: frozenset[PeerRef] = frozenset()
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


def _name(move: _Move) -> str:
    return move.ref.peer_id if move.ref is not None else "nobody"


def _named(pieces: Sequence[IndexRange]) -> str:
    num = sum(len(piece) for piece in pieces)
    if num == 1:
        return f"sample {pieces[0].start}"
    shown = ", ".join(f"{piece.start}-{piece.stop - 1}" for piece in pieces[:3])
    return f"{num} samples ({shown}{', …' if len(pieces) > 3 else ''})"
