# SPDX-License-Identifier: Apache-2.0
"""The journal in a real etcd: its order, its snapshots, and damage."""

import time

import pytest

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.elastic.core.messages import Bar, IndexRange
from isthmus.elastic.core.records import BarRecord, Genesis, Record, SnapshotRecord, TicketRecord
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.errors import JournalCorrupted, JournalUnwritable, Superseded
from isthmus.elastic.journal import etcd, etcd_store
from isthmus.elastic.journal.etcd_store import EtcdStore
from tests.multiprocess.etcd.coordinators import Coordinators, record
from tests.multiprocess.etcd_cluster import Cluster, needs_etcd

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600), needs_etcd]


def test_records_come_back_in_order_and_the_journal_goes_on_where_it_ended(run: Coordinators) -> None:
    first = run.leading("one")
    assert [first.append(record(number)) for number in range(3)] == [0, 1, 2]
    first.close()
    again = run.store("one")
    assert again.try_to_lead() is None
    assert list(again.replay()) == [record(number) for number in range(3)]
    assert again.append(record(3)) == 3
    assert run.steps() == [0, 1, 2, 3]


def test_a_run_has_not_begun_for_who_was_let_in_or_put_out_before_it_did(run: Coordinators) -> None:
    store, beside = run.leading("one"), run.store("two")
    bar = Bar(PeerId("0123456789abcdef"), Incarnation(1), 1)
    for early in (TicketRecord(b"ticket 1", 2, bar.peer_id, 1, True), BarRecord(bar=bar)):
        store.append(early)
        assert not beside.has_begun()
        assert beside.knows_run()
    store.append(record(0))
    assert beside.has_begun()


def compacted(store: EtcdStore, times: int, *, every: int = 3) -> list[Record]:
    """Write so many snapshots, each after some bars; returns all records."""
    records: list[Record] = [record(0)]
    store.append(records[0])
    for number in range(times):
        for index in range(every):
            peer = PeerId(f"{number * every + index:016x}")
            records.append(BarRecord(bar=Bar(peer, Incarnation(1), 1)))
            store.append(records[-1])
        records.append(RunState.replay(records).snapshot())
        store.append(records[-1])
    return records


def slots_of(run: Coordinators) -> list[int]:
    store = run.stores[0]
    return [slot for slot, _, _ in store._rows(0)]


def test_a_replay_begins_with_the_newest_snapshot_and_older_slots_stay(run: Coordinators) -> None:
    first = run.leading("one")
    records = compacted(first, 2)
    assert slots_of(run) == list(range(len(records)))
    last = BarRecord(bar=Bar(PeerId("f" * 16), Incarnation(1), 1))
    assert first.append(last) == len(records)
    first.close()
    again = run.store("two")
    assert again.has_begun()
    assert again.knows_run()
    assert again.try_to_lead() is None
    assert list(again.replay()) == [records[-1], last]
    assert again.append(record(3)) == len(records) + 1
    run.stores.remove(first)
    assert len(slots_of(run)) == len(records) + 2


@pytest.mark.parametrize("keep", [1, 2])
def test_of_the_older_slots_only_those_since_so_many_snapshots_stay(run: Coordinators, keep: int) -> None:
    store = run.store("one", keep_archives=keep)
    assert store.try_to_lead() is None
    list(store.replay())
    records = compacted(store, 5)
    snapshots = [slot for slot, item in enumerate(records) if isinstance(item, SnapshotRecord)]
    assert slots_of(run) == list(range(snapshots[-1 - keep], len(records)))
    reader = run.store("reader")
    assert list(reader.replay()) == records[-1:]
    assert reader.has_begun()
    assert reader.knows_run()


def test_who_is_fenced_off_moves_no_base_and_deletes_nothing(run: Coordinators) -> None:
    old = run.store("one", keep_archives=1)
    assert old.try_to_lead() is None
    list(old.replay())
    records = compacted(old, 2)
    run.end_lease(old)
    new = run.leading("two")
    new.append(record(7))
    with pytest.raises(Superseded):
        old.append(RunState.replay(records).snapshot())
    assert list(run.store("reader").replay()) == [records[-1], record(7)]


def test_a_base_without_its_slot_or_a_slot_without_its_base_is_damage(run: Coordinators) -> None:
    store = run.store("one", keep_archives=1)
    assert store.try_to_lead() is None
    list(store.replay())
    compacted(store, 3)
    base = store._base_key
    run.ask("kv/deleterange", {"key": store._key(store._slot - 1)})
    with pytest.raises(JournalCorrupted, match="it is missing"):
        list(run.store("reader").replay())
    run.ask("kv/put", {"key": base, "value": b"nonsense"})
    with pytest.raises(JournalCorrupted, match="what it goes on from"):
        list(run.store("reader").replay())
    run.ask("kv/deleterange", {"key": base})
    with pytest.raises(JournalCorrupted, match="record 0: it is missing"):
        list(run.store("reader").replay())


def test_runs_do_not_see_each_other(run: Coordinators, node: Cluster) -> None:
    run.leading("one").append(record(1))
    other = Coordinators(node)
    assert other.steps() == []
    assert not other.store("two").knows_run()
    other.close()


def test_long_journal_is_read_in_pages_and_a_page_that_is_too_large_in_smaller_ones(
    run: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "_PAGE_SLOTS", 16)
    store = run.leading("one")
    for number in range(40):
        store.append(record(number))
    assert run.steps() == list(range(40))
    monkeypatch.setattr(etcd, "MAX_ANSWER_NBYTES", 1500)
    assert run.steps() == list(range(40))


def test_page_that_holds_one_record_too_large_to_read_is_an_error(
    run: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.leading("one").append(record(0))
    monkeypatch.setattr(etcd, "MAX_ANSWER_NBYTES", 100)
    with pytest.raises(JournalUnwritable, match="more than 100 bytes"):
        run.steps()


@pytest.mark.parametrize("harm", ["changed", "missing", "foreign", "empty", "format"])
def test_damage_is_found_at_its_slot(run: Coordinators, harm: str) -> None:
    store = run.leading("one")
    for number in range(3):
        store.append(record(number))
    key = store._key(1)
    if harm == "missing":
        run.ask("kv/deleterange", {"key": key})
    elif harm == "foreign":
        run.ask("kv/put", {"key": f"{store.path}/x".encode(), "value": b""})
    else:
        value = {"changed": b"\x01" + b"t" * 8 + b"c" * 32 + b"r", "empty": b"", "format": b"\x02" * 50}[harm]
        run.ask("kv/put", {"key": key, "value": value})
    with pytest.raises(JournalCorrupted) as caught:
        run.steps()
    assert caught.value.slot == (None if harm == "foreign" else 1)


def test_record_that_etcd_finds_too_large_is_refused_at_once_and_for_ever(run: Coordinators) -> None:
    store = run.leading("one")
    ranges = tuple(IndexRange(2**40 + number, 2**40 + number + 1) for number in range(120_000))
    began = time.monotonic()
    with pytest.raises(JournalUnwritable, match=r"larger than|too large"):
        store.append(Genesis(outer_step=0, digest=b"0" * 32, next_index=0, returned=ranges))
    assert time.monotonic() - began < 30.0
    with pytest.raises(JournalUnwritable):
        store.append(record(1))
    assert run.steps() == []


def test_closed_store_takes_no_records(run: Coordinators) -> None:
    store = run.leading("one")
    store.close()
    store.close()
    with pytest.raises(JournalUnwritable, match="closed"):
        store.append(record(0))
