# SPDX-License-Identifier: Apache-2.0
"""Whatever single thing is changed in a valid history, the audit finds it, or the history is one that could have been.

"Could have been" is not for the audit to say: the coordinator's own fold over the records accepts it, and so do the
simulator's checkers, which keep their books sample by sample and without ranges.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.audit import audit
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.leases import MAX_INDEX
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    CommittedPart,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    SnapshotRecord,
    TicketRecord,
    ViewRecord,
)
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.journal.reader import read_journal
from tests.simulation.history import History
from tests.simulation.simulator import Simulator
from tests.simulation.work import Leases
from tests.simulation.world import Violation
from tests.unit.elastic.test_audit import history

SEEDS = (*range(12), 14, 35, 41, 79)
"""In 11 and the last four the journal was lost: with a certificate or without, with a majority or without."""
replace = msgspec.structs.replace


@functools.cache
def simulated(seed: int) -> tuple[Record, ...]:
    simulator = Simulator(seed)
    assert simulator.run().violation is None
    # A snapshot would witness against whatever changes before it; the other checks have to find that themselves.
    return tuple(record for record in simulator.coordinator.journal if not isinstance(record, SnapshotRecord))


def could_have_been(records: list[Record]) -> bool:
    """Judged without the audit: by the coordinator's fold, and by books that are kept sample by sample."""
    told, leases = History(), Leases(MAX_INDEX)
    members: set[PeerRef] = set()
    starts: dict[PeerId, int] = {}
    try:
        RunState.replay(records)
        for record in records:
            if not isinstance(record, RollbackRecord):
                told.persisted(record, 0.0)
            match record:
                case ViewRecord(view=view, excused=excused):
                    leases.view_decided(view, excused)
                    members = {member.ref for member in view.members}
                    starts |= {ref.peer_id: ref.incarnation for ref in members}
                case RollbackRecord(epoch=epoch, certificate=certificate, holders=holders):
                    # To these books it is as if the journal had been lost, and made anew from that certificate.
                    begins = told.lineage.genesis
                    told.persisted(
                        RebuildRecord(epoch=epoch, certificate=certificate, testified=(), insisted=True), 0.0
                    )
                    if certificate is None and begins is not None:
                        told.persisted(begins, 0.0)
                    leases.rebuilt(told.lineage.commits)
                    members = set()
                    if not holders or len({ref.peer_id for ref in holders}) < len(holders):
                        return False
                    if any(ref.incarnation < starts.get(ref.peer_id, 0) for ref in holders):
                        return False
                case LeaseRecord():
                    leases.granted(record)
                case ReleaseRecord():
                    leases.released(record)
                case CommitRecord():
                    refs = [item.ref for item in record.contributions]
                    if sorted(refs) != sorted(members) or any(item.weight < 0 for item in record.contributions):
                        return False
                    leases.consumed(record)
                case RebuildRecord(certificate=certificate, testified=testified):
                    leases.rebuilt(())
                    named = set() if certificate is None else {item.peer_id for item in certificate.contributors}
                    brought = [ref.peer_id for ref in testified]
                    if len(set(brought)) < len(brought) or not named.issuperset(brought):
                        return False
                    if record.insisted == (2 * len(brought) > len(named)):
                        return False
                case Genesis() | BarRecord() | TicketRecord() | SnapshotRecord():
                    pass
                case _:
                    assert_never(record)
    except (AssertionError, Violation):
        return False
    return True


# ------------------------------------------------------------------------------------------------- runs that went back

Draw = Callable[[st.SearchStrategy[int]], int]
OTHER = bytes([7]) * 32


def that_count(records: list[Record]) -> list[Certificate | None]:
    """The certificates of all states that the run can go back to, oldest first; the committed one is the last."""
    state, known = RunState(), list[Certificate | None]()
    for record in records:
        state.apply(record)
        match record:
            case Genesis():
                known = [None]
            case RebuildRecord(certificate=certificate) if certificate is not None:
                known = [certificate]
            case CommitRecord():
                known.append(state.certificate)
            case RollbackRecord():
                known = known[: known.index(state.certificate) + 1]
            case _:
                pass
    return known


def gone_back(records: list[Record], draw: Draw) -> list[Record]:
    """The same until some commit; then nobody holds its state, and newer starts go on from an older one."""
    slots = [slot for slot, record in enumerate(records) if isinstance(record, CommitRecord) and not record.final]
    if not slots:
        return records
    told = records[: slots[draw(st.integers(0, len(slots) - 1))] + 1]
    state, known = RunState.replay(told), that_count(told)
    views = [record.view for record in told if isinstance(record, ViewRecord) and record.view.members]
    starts = {item.peer_id: 0 for item in views[-1].members}
    for item in (item for view in views for item in view.members if item.peer_id in starts):
        starts[item.peer_id] = max(starts[item.peer_id], item.incarnation)
    members = tuple(Member(peer, Incarnation(number + 1), "somewhere:1") for peer, number in starts.items())

    def write(record: Record) -> None:
        state.apply(record)
        told.append(record)

    write(
        RollbackRecord(
            epoch=Epoch(state.epoch + draw(st.integers(1, 2))),
            certificate=known[draw(st.integers(0, len(known) - 2))],
            given_up=state.outer_step,
            holders=tuple(item.ref for item in members[: draw(st.integers(1, len(members)))]),
        )
    )
    assert state.committed is not None
    view = View(Epoch(state.epoch + 1), state.outer_step, state.committed.digest, members)
    write(ViewRecord(view=view, cause="all joined"))
    for serial in range(draw(st.integers(0, 3))):
        parts = []
        for item in members:
            write(LeaseRecord(ref=item.ref, serial=serial, ranges=state.leases.plan(draw(st.integers(1, 9)))))
            used = state.leases.owned_by(item.ref)[: draw(st.integers(0, 2))]
            parts.append(CommittedPart(item.ref, 1.0, 8, used))
        write(
            CommitRecord(
                key=RoundKey(state.epoch, state.outer_step, 0),
                outer_step=OuterStep(state.outer_step + 1),
                previous=state.committed.digest,
                digest=bytes([state.epoch % 256, state.outer_step % 256]) * 16,
                contributions=tuple(parts),
                final=False,
            )
        )
    return told


# ----------------------------------------------------------------------------------------------------- what is changed


def change_ranges(ranges: tuple[IndexRange, ...], draw: Draw) -> tuple[IndexRange, ...]:
    """One range is longer, shorter, elsewhere, there twice, or not there."""
    if not ranges:
        return (IndexRange(draw(st.integers(0, 40)), draw(st.integers(0, 60))),)
    place = draw(st.integers(0, len(ranges) - 1))
    item = ranges[place]
    start, stop = draw(st.integers(-3, 3)), draw(st.integers(-3, 3))
    new = {
        0: (IndexRange(max(0, item.start + start), max(0, item.stop + stop)),),
        1: (IndexRange(max(0, item.start + start), max(0, item.stop + start)),),
        2: (item, item),
        3: (),
    }[draw(st.integers(0, 3))]
    return ranges[:place] + new + ranges[place + 1 :]


def change_rebuild(record: RebuildRecord, draw: Draw) -> RebuildRecord:
    """What the lost journal was replaced with is something else, or somebody else has brought it."""
    known, refs = record.certificate, record.testified
    changes = [
        replace(record, epoch=max(0, record.epoch + draw(st.integers(-3, 3)))),
        replace(record, insisted=not record.insisted),
        replace(record, testified=refs[1:]),
        replace(record, testified=refs + refs[:1]),
        replace(record, testified=(*refs, PeerRef(PeerId("f" * 16), Incarnation(1)))),
    ]
    if known is not None:
        changes += [replace(record, certificate=other) for other in change_certificate(known, record.epoch, draw)]
    return changes[draw(st.integers(0, len(changes) - 1))]


def change_certificate(known: Certificate, epoch: int, draw: Draw) -> list[Certificate | None]:
    """None, or one with one field that says something else. `epoch`: of the record that goes on from it."""
    position = known.position
    return [
        None,
        replace(known, digest=OTHER),
        replace(known, final=not known.final),
        replace(known, key=replace(known.key, outer_step=known.key.outer_step + 1)),
        replace(known, key=replace(known.key, epoch=epoch + draw(st.integers(-1, 1)))),
        replace(known, contributors=known.contributors[1:]),
        replace(known, position=replace(position, next_index=draw(st.integers(0, 2 * position.next_index)))),
        replace(known, position=replace(position, unconsumed=change_ranges(position.unconsumed, draw))),
    ]


def change_rollback(record: RollbackRecord, draw: Draw) -> RollbackRecord:
    """The run goes back to something else, from something else, or to what nobody holds."""
    known, refs = record.certificate, record.holders
    changes = [
        replace(record, epoch=max(0, record.epoch + draw(st.integers(-3, 3)))),
        replace(record, given_up=max(0, record.given_up + draw(st.integers(-2, 2)))),
        replace(record, holders=()),
        replace(record, holders=refs + refs[:1]),
        replace(record, holders=tuple(PeerRef(ref.peer_id, Incarnation(ref.incarnation - 2)) for ref in refs)),
    ]
    if known is not None:
        changes += [replace(record, certificate=other) for other in change_certificate(known, record.epoch, draw)]
        changes += [
            replace(record, certificate=replace(known, parent=OTHER)),
            replace(record, certificate=replace(known, previous=OTHER)),
        ]
    return changes[draw(st.integers(0, len(changes) - 1))]


def change_record(record: Record, other: Record, draw: Draw) -> Record:
    """The same kind of record with one field that says something else."""
    match record:
        case Genesis():
            return [
                replace(record, digest=OTHER),
                replace(record, outer_step=record.outer_step + 1),
                replace(record, next_index=draw(st.integers(0, 20))),
                replace(record, returned=change_ranges(record.returned, draw)),
            ][draw(st.integers(0, 3))]
        case ViewRecord(view=view):
            refs = tuple(item.ref for item in view.members)
            late = (record.excused[1:], refs[-1:], (PeerRef(PeerId("f" * 16), Incarnation(1)),))[
                draw(st.integers(0, 2))
            ]
            return replace(
                record,
                excused=late if draw(st.booleans()) else record.excused,
                view=[
                    replace(view, digest=OTHER),
                    replace(view, epoch=max(0, view.epoch + draw(st.integers(-3, 3)))),
                    replace(view, outer_step=view.outer_step + 1),
                    replace(view, members=view.members[1:]),
                    replace(view, members=view.members + view.members[:1]),
                    replace(
                        view,
                        members=tuple(
                            replace(item, incarnation=item.incarnation + (1 if index else -1))
                            for index, item in enumerate(view.members)
                        ),
                    ),
                ][draw(st.integers(0, 5))],
            )
        case CommitRecord(contributions=parts):
            place = draw(st.integers(0, len(parts) - 1))
            part = parts[place]
            new = [
                (),
                (part, part),
                (replace(part, weight=-part.weight - 1),),
                (replace(part, weight=part.weight + 1),),
                (replace(part, ref=PeerRef(part.ref.peer_id, part.ref.incarnation + 1)),),  # type: ignore[arg-type]
                (replace(part, consumed=change_ranges(part.consumed, draw)),),
            ][draw(st.integers(0, 5))]
            return [
                replace(record, digest=OTHER),
                replace(record, previous=OTHER),
                replace(record, outer_step=record.outer_step + 1),
                replace(record, key=replace(record.key, epoch=record.key.epoch + 1)),
                replace(record, key=replace(record.key, outer_step=record.key.outer_step + 1)),
                replace(record, final=not record.final),
                *[replace(record, contributions=(*parts[:place], *new, *parts[place + 1 :]))] * 6,
            ][draw(st.integers(0, 11))]
        case LeaseRecord() | ReleaseRecord():
            whose = getattr(other, "ref", PeerRef(record.ref.peer_id, record.ref.incarnation + 1))  # type: ignore[arg-type]
            return [
                replace(record, ref=whose),
                *[replace(record, ranges=change_ranges(record.ranges, draw))] * 3,
            ][draw(st.integers(0, 3))]
        case RebuildRecord():
            return change_rebuild(record, draw)
        case RollbackRecord():
            return change_rollback(record, draw)
        case BarRecord(bar=bar):
            whose = getattr(other, "ref", PeerRef(PeerId("f" * 16), Incarnation(1)))
            return [
                replace(record, bar=replace(bar, incarnation=bar.incarnation + draw(st.integers(1, 2)))),
                replace(record, bar=replace(bar, peer_id=whose.peer_id)),
                replace(record, bar=replace(bar, certificate=bar.certificate + 1)),
            ][draw(st.integers(0, 2))]
        case TicketRecord():
            return replace(record, used_by=None)
        case SnapshotRecord():
            return replace(record, **{name: getattr(RunState().snapshot(), name) for name in ("view", "owned")})
        case _:
            assert_never(record)


@st.composite
def mutants(draw: Draw) -> tuple[list[Record], list[Record]]:
    """A valid history, and the same with one thing changed."""
    place = draw(st.integers(-1, len(SEEDS) - 1))
    valid = history() if place < 0 else list(simulated(SEEDS[place]))
    if not valid:
        valid = history()
    for _ in range(draw(st.integers(0, 2))):
        valid = gone_back(valid, draw)
    mutant = list(valid)
    slot, other = draw(st.integers(0, len(valid) - 1)), draw(st.integers(0, len(valid) - 1))
    back = [at for at, record in enumerate(valid) if isinstance(record, RollbackRecord)]
    match draw(st.integers(0, 8 if back else 6)):
        case 7 | 8:
            slot = back[draw(st.integers(0, len(back) - 1))]
            mutant[slot] = change_record(mutant[slot], mutant[other], draw)
        case 6:
            mutant[0] = change_record(mutant[0], mutant[other], draw)  # what it all begins with
        case 0:
            del mutant[slot]
        case 1:
            mutant.insert(other, mutant[slot])
        case 2:
            mutant[slot], mutant[other] = mutant[other], mutant[slot]
        case _:
            mutant[slot] = change_record(mutant[slot], mutant[other], draw)
    return valid, mutant


@given(case=mutants())
@settings(max_examples=250, deadline=None)
def test_any_single_change_is_found_or_gives_a_history_that_could_have_been(
    case: tuple[list[Record], list[Record]],
) -> None:
    valid, mutant = case
    assert audit(valid).holds
    if not could_have_been(mutant):
        proved = audit(mutant, samples_per_data_epoch=7)
        assert not proved.holds
        for verdict in proved.verdicts:
            for finding in verdict.findings:
                assert finding.slot is not None
                assert 0 <= finding.slot < len(mutant)


# ----------------------------------------------------------------------------------------------------------- snapshots


def begun(records: list[Record]) -> int:
    """How many records there are when the run has a state: no snapshot is written before."""
    return next(at for at in range(1, len(records) + 1) if RunState.replay(records[:at]).committed is not None)


@st.composite
def compacted(draw: Draw) -> tuple[list[Record], list[Record], list[Record]]:
    """A valid history from a snapshot on, then a change to what comes after that, and the same change to the whole."""
    place = draw(st.integers(-1, len(SEEDS) - 1))
    valid = history() if place < 0 else list(simulated(SEEDS[place])) or history()
    for _ in range(draw(st.integers(0, 2))):
        valid = gone_back(valid, draw)
    cut = draw(st.integers(begun(valid), len(valid)))
    mutant = list(valid)
    if cut < len(valid):
        slot, other = draw(st.integers(cut, len(valid) - 1)), draw(st.integers(cut, len(valid) - 1))
        match draw(st.integers(0, 5)):
            case 0:
                del mutant[slot]
            case 1:
                mutant.insert(other, mutant[slot])
            case 2:
                mutant[slot], mutant[other] = mutant[other], mutant[slot]
            case _:
                mutant[slot] = change_record(mutant[slot], mutant[other], draw)
    snapshot = RunState.replay(valid[:cut]).snapshot()
    return [snapshot, *valid[cut:]], [snapshot, *mutant[cut:]], mutant


@given(case=compacted())
@settings(max_examples=250, deadline=None)
def test_what_a_snapshot_stands_for_is_enough_to_judge_all_that_comes_after_it(
    case: tuple[list[Record], list[Record], list[Record]],
) -> None:
    valid, mutant, whole = case
    proved = audit(valid, samples_per_data_epoch=7)
    assert proved.holds, [item.findings for item in proved.verdicts if not item.holds]
    if not could_have_been(whole):
        assert not audit(mutant, samples_per_data_epoch=7).holds


@given(case=mutants(), place=st.integers(0, 10**6), other=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_snapshot_that_says_something_else_than_the_records_before_it_is_found(
    case: tuple[list[Record], list[Record]], place: int, other: int
) -> None:
    records, _ = case
    first = begun(records)
    at = first + place % (len(records) + 1 - first)
    snapshot = RunState.replay(records[:at]).snapshot()
    assert audit([*records[:at], snapshot, *records[at:]]).holds
    strange = RunState.replay(records[: other % at]).snapshot()
    for name, value in msgspec.structs.asdict(strange).items():
        lie = replace(snapshot, **{name: value})
        assert audit([*records[:at], lie, *records[at:]]).holds == (lie == snapshot), name


# ------------------------------------------------------------------------------------------------------------ the file


@functools.cache
def journal_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = Journal(path, run_id="demo-0123abcd")
        for record in simulated(3):
            journal.append(record)
        journal.close()
        return path.read_bytes()


@given(place=st.integers(0, len(journal_bytes()) - 1), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_any_bit_that_flips_in_the_file_is_found_or_changes_nothing(place: int, bit: int) -> None:
    content = bytearray(journal_bytes())
    content[place] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        path.write_bytes(content)
        reading = read_journal(path)
        assert {entry.name for entry in Path(folder).iterdir()} == {"journal.sqlite"}
    assert reading.records == simulated(3)[: len(reading.records)]
    if reading.broken is None:
        # The run's name has no checksum here; it stands in run.json as well, and the command compares the two.
        assert reading.run_id is not None
        assert reading.records == simulated(3)
    elif reading.broken.slot is not None:
        assert reading.broken.slot == len(reading.records)
