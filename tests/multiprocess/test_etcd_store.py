# SPDX-License-Identifier: Apache-2.0
"""The journal in a real etcd: order, fences, lost answers, lost nodes."""

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.elastic.core.messages import Bar, IndexRange
from isthmus.elastic.core.records import BarRecord, Genesis, Record, SnapshotRecord, TicketRecord
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.errors import EtcdRefused, EtcdUnavailable, JournalCorrupted, JournalUnwritable, Superseded
from isthmus.elastic.journal import etcd, etcd_store
from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_store import EtcdStore
from isthmus.elastic.journal.etcd_wire import Done, Request
from tests.multiprocess.etcd_cluster import Cluster, Node, etcd_nodes, free_ports, needs_etcd

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600), needs_etcd]

_runs = count()


def record(number: int) -> Genesis:
    return Genesis(outer_step=number, digest=b"0" * 32, next_index=0)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node for all tests that harm nobody but their own run."""
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Cluster]:
    with etcd_nodes(tmp_path, 3) as cluster:
        yield cluster


class Coordinators:
    """Stores of one run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.run_id = f"run-{next(_runs)}"
        self.stores: list[EtcdStore] = []

    def store(
        self,
        name: str,
        access: EtcdAccess | None = None,
        *,
        lease_s: int = 60,
        patience_s: float = 30.0,
        keep_archives: int = 0,
    ):
        store = EtcdStore(
            access or self.cluster.access,
            run_id=self.run_id,
            peer_id=name,
            address=f"{name}:7000",
            lease_s=lease_s,
            patience_s=patience_s,
            keep_archives=keep_archives,
        )
        self.stores.append(store)
        return store

    def leading(self, name: str, **options) -> EtcdStore:
        """A store that has taken the lead and read the journal."""
        store = self.store(name, **options)
        assert store.try_to_lead() is None
        list(store.replay())
        return store

    def steps(self) -> list[int]:
        """The journal as somebody else reads it."""
        return [entry.outer_step for entry in self.store("reader").replay()]

    def end_lease(self, store: EtcdStore) -> None:
        """As if it had not given a sign of life for so long."""
        self.ask("lease/revoke", {"ID": store._leadership._lease})

    def ask(self, path: str, request: Request) -> None:
        with contextlib.closing(EtcdClient(self.cluster.access)) as client:
            client.call(path, request, Done, timeout_s=10.0, attempt_s=10.0)  # a lease ends once

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def run(node: Cluster) -> Iterator[Coordinators]:
    coordinators = Coordinators(node)
    yield coordinators
    coordinators.close()


@pytest.fixture
def big_run(trio: Cluster) -> Iterator[Coordinators]:
    coordinators = Coordinators(trio)
    yield coordinators
    coordinators.close()


# ---------------------------------------------------------------------------------------------------------- a journal


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


# ------------------------------------------------------------------------------------------------------- one at a time


def test_second_coordinator_is_told_who_leads(run: Coordinators) -> None:
    first, second = run.leading("one"), run.store("two")
    for _ in range(100):
        leader = second.try_to_lead()
        assert leader is not None
        assert (leader.peer_id, leader.address) == ("one", "one:7000")
    first.append(record(0))


def test_of_coordinators_that_start_at_the_same_instant_exactly_one_leads(run: Coordinators) -> None:
    for _ in range(25):
        rivals = Coordinators(run.cluster)
        stores = [rivals.store(f"rival-{number}") for number in range(4)]
        barrier = threading.Barrier(len(stores))

        def stand(store: EtcdStore, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return store.try_to_lead() is None

        with ThreadPoolExecutor(len(stores)) as pool:
            leads = list(pool.map(stand, stores))
        assert sum(leads) == 1
        leader = stores[leads.index(True)]
        assert list(leader.replay()) == []
        leader.append(record(1))
        assert rivals.steps() == [1]
        rivals.close()


def test_coordinator_that_ends_in_order_makes_room_at_once(run: Coordinators) -> None:
    first, second = run.leading("one"), run.store("two")
    first.append(record(0))
    assert second.try_to_lead() is not None
    first.close()
    assert second.try_to_lead() is None


def test_next_start_in_the_same_folder_takes_over_without_waiting_and_fences_the_one_before(run: Coordinators) -> None:
    first = run.leading("one")
    first.append(record(0))
    again = run.leading("one")
    assert again.append(record(1)) == 1
    with pytest.raises(Superseded):
        first.append(record(7))
    assert run.steps() == [0, 1]


def test_leader_that_was_frozen_is_refused_and_its_record_is_nowhere(run: Coordinators) -> None:
    old = run.leading("old", lease_s=6)
    old.append(record(0))
    for number in range(2):  # nobody gives signs of life for `old`
        new = run.store(f"new-{number}", lease_s=6)
        deadline = time.monotonic() + 60.0
        while new.try_to_lead() is not None:
            assert time.monotonic() < deadline, "the lease does not end"
            time.sleep(0.02)
        list(new.replay())
        with pytest.raises(Superseded) as caught:
            old.append(record(1000 + number))
        assert caught.value.holder == f"new-{number}:7000"
        with pytest.raises(Superseded):
            old.append(record(2000 + number))  # for good
        with pytest.raises(Superseded):
            old.keep_alive()
        new.append(record(number + 1))
        old = new
    assert run.steps() == [0, 1, 2]


def test_leader_whose_lease_ended_never_writes_beside_its_successor(run: Coordinators) -> None:
    old = run.leading("c-0")
    expected = []
    for number in range(60):
        run.end_lease(old)
        new = run.leading(f"c-{number + 1}")
        if number % 2:
            new.append(record(number))  # one that has written, and one that has only led
            expected.append(number)
        with pytest.raises(Superseded):
            old.append(record(5000))
        old = new
    assert run.steps() == expected


@pytest.mark.parametrize("first_deed", ["append", "keep_alive"])
def test_successor_that_wrote_and_ended_still_fences_the_one_before(run: Coordinators, first_deed: str) -> None:
    old = run.leading("old")
    old.append(record(0))
    run.end_lease(old)
    new = run.leading("new")
    new.append(record(1))
    new.close()
    deeds = {"append": lambda: old.append(record(9)), "keep_alive": old.keep_alive}
    with pytest.raises(Superseded):
        deeds[first_deed]()
    with pytest.raises(Superseded):
        old.append(record(9))
    assert run.steps() == [0, 1]
    assert run.store("third").try_to_lead() is None


def test_leader_that_does_not_know_the_journal_overwrites_nothing(run: Coordinators) -> None:
    first = run.leading("one")
    first.append(record(0))
    first.close()
    careless = run.store("two")
    assert careless.try_to_lead() is None
    with pytest.raises(Superseded):
        careless.append(record(9))
    assert run.steps() == [0]


def test_leader_whose_lease_ended_while_nobody_else_led_goes_on(run: Coordinators) -> None:
    store = run.leading("one")
    store.append(record(0))
    run.end_lease(store)
    assert store.append(record(1)) == 1  # an append finds out by itself
    run.end_lease(store)
    assert store.keep_alive()
    assert run.store("two").try_to_lead() is not None
    assert store.append(record(2)) == 2
    assert run.steps() == [0, 1, 2]


def test_signs_of_life_keep_the_lease(run: Coordinators) -> None:
    first, second = run.leading("one", lease_s=5), run.store("two")
    began = time.monotonic()
    while time.monotonic() - began < 12.0:
        assert first.keep_alive()
        assert second.try_to_lead() is not None
        time.sleep(first.sign_of_life_s)


_WRITER = st.sampled_from(["a", "b"])
_DEED = st.sampled_from(["append", "append", "end lease", "lead", "keep alive", "restart"])


@settings(max_examples=40)
@given(deeds=st.lists(st.tuples(_WRITER, _DEED), min_size=4, max_size=30))
def test_whatever_two_writers_do_no_slot_has_two_records_and_none_is_lost(
    node: Cluster, deeds: list[tuple[str, str]]
) -> None:
    run = Coordinators(node)
    writers: dict[str, EtcdStore | None] = {"a": None, "b": None}
    told: list[int] = []  # by slot, what an append has promised
    numbers = count(1)
    for name, deed in deeds:
        writer = writers[name]
        try:
            if deed == "restart" or (deed == "lead" and writer is None):
                started = run.store(name)
                leads = started.try_to_lead() is None
                assert not leads or [entry.outer_step for entry in started.replay()] == told
                writers[name] = started if leads else None
            elif writer is None:
                continue
            elif deed == "append":
                number = next(numbers)
                assert writer.append(record(number)) == len(told)
                told.append(number)
            elif deed == "keep alive":
                assert writer.keep_alive()
            elif deed == "end lease":
                with contextlib.suppress(EtcdRefused):  # it may have ended before
                    run.end_lease(writer)
        except Superseded:
            writers[name] = None
        assert run.steps() == told
    run.close()


# -------------------------------------------------------------------------------------------------------- lost answers


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many answers to requests of a path are lost from now on: etcd does what it is asked, and nobody hears."""
    left: dict[str, int] = {}
    real = EtcdClient._exchange

    def lossy(self, path, body, answer, deadline):
        given = real(self, path, body, answer, deadline)
        if left.get(path, 0) > 0:
            left[path] -= 1
            raise etcd._Failed("the answer was lost")
        return given

    monkeypatch.setattr(EtcdClient, "_exchange", lossy)
    return left


def test_append_whose_answers_were_lost_finds_its_own_record(run: Coordinators, losses: dict[str, int]) -> None:
    store = run.leading("one")
    for number in range(10):
        losses["kv/txn"] = number % 4
        assert store.append(record(number)) == number
        assert losses["kv/txn"] == 0
    assert run.steps() == list(range(10))


def test_election_whose_answer_was_lost_is_won_all_the_same(run: Coordinators, losses: dict[str, int]) -> None:
    losses |= {"kv/txn": 2, "lease/grant": 1, "kv/range": 1}
    store = run.leading("one")
    assert store.keep_alive()
    store.append(record(0))
    run.end_lease(store)
    losses |= {"kv/txn": 1}
    assert store.append(record(1)) == 1
    assert run.store("two").try_to_lead() is not None
    assert run.steps() == [0, 1]


def test_append_whose_answer_was_lost_and_whose_lease_then_ended_is_still_found(
    run: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run.leading("one")
    real = EtcdClient._exchange
    lost = []

    def lossy(self, path, body, answer, deadline):
        given = real(self, path, body, answer, deadline)
        if path == "kv/txn" and not lost:
            lost.append(path)
            run.end_lease(store)
            raise etcd._Failed("the answer was lost")
        return given

    monkeypatch.setattr(EtcdClient, "_exchange", lossy)
    assert store.append(record(0)) == 0
    assert store.append(record(1)) == 1
    assert run.steps() == [0, 1]


# ---------------------------------------------------------------------------------------------------------- lost nodes


def test_endpoints_that_refuse_or_say_nothing_are_passed_over(run: Coordinators) -> None:
    (refusing,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = EtcdAccess(
            endpoints=(
                f"127.0.0.1:{refusing}",
                f"127.0.0.1:{silent.getsockname()[1]}",
                *run.cluster.endpoints,
            )
        )
        store = run.leading("one", access=access)
        began = time.monotonic()
        assert [store.append(record(number)) for number in range(3)] == [0, 1, 2]
        assert time.monotonic() - began < 25.0


def test_etcd_that_is_not_there_is_an_error_in_time_that_names_every_node() -> None:
    endpoints = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    store = EtcdStore(EtcdAccess(endpoints=endpoints), run_id="r", peer_id="p", address="a", patience_s=1.0)
    began = time.monotonic()
    with pytest.raises(EtcdUnavailable) as caught:
        store.try_to_lead()
    assert set(caught.value.causes) == set(endpoints)
    assert "refused" in str(caught.value)
    with pytest.raises(JournalUnwritable, match="see to the etcd cluster"):
        store.append(record(0))
    assert time.monotonic() - began < 30.0
    store.close()


def test_append_that_waits_for_etcd_ends_when_its_store_is_closed(big_run: Coordinators) -> None:
    store = big_run.leading("one", patience_s=300.0)
    for node in big_run.cluster.nodes:
        node.kill()
    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(store.append, record(0))
        with pytest.raises(TimeoutError):
            appending.result(timeout=0.3)
        store.close()
        assert isinstance(appending.exception(timeout=60.0), JournalUnwritable)


def _restart(cluster: Cluster, *nodes: Node) -> None:
    cluster.start(*nodes)
    for node in nodes:
        cluster.until_ready(EtcdAccess(endpoints=(node.endpoint,)))


def test_next_record_is_written_soon_after_the_leading_node_is_killed(big_run: Coordinators, record_property) -> None:
    cluster = big_run.cluster
    store = big_run.leading("one")
    numbers, outages_s = count(), []
    for _ in range(7):
        for _ in range(5):
            store.append(record(next(numbers)))
        leading = cluster.leader()
        leading.kill()
        began = time.monotonic()
        store.append(record(next(numbers)))
        outages_s.append(time.monotonic() - began)
        _restart(cluster, leading)
    record_property("outage_median_s", round(statistics.median(outages_s), 3))
    record_property("outage_max_s", round(max(outages_s), 3))
    assert statistics.median(outages_s) < 15.0, outages_s  # a second on an idle machine; an election may be split
    assert big_run.steps() == list(range(next(numbers)))  # no fork, nothing lost, nothing twice
    assert store.keep_alive()


def test_run_pauses_while_etcd_has_no_quorum_and_goes_on_with_it(big_run: Coordinators) -> None:
    cluster = big_run.cluster
    store, rival = big_run.leading("one", lease_s=2, patience_s=120.0), big_run.store("two", lease_s=2)
    store.append(record(0))
    leading = cluster.leader()
    down = [node for node in cluster.nodes if node is not leading]
    for node in down:
        node.kill()
    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(store.append, record(1))
        with pytest.raises(EtcdUnavailable):
            rival.try_to_lead()  # three seconds: longer than the lease
        assert not store.keep_alive()
        assert not appending.done()
        _restart(cluster, *down)
        assert appending.result(timeout=120.0) == 1
    assert store.append(record(2)) == 2
    assert big_run.steps() == [0, 1, 2]
