# SPDX-License-Identifier: Apache-2.0
"""etcd loses its answers or its nodes: what was written is found again, and nothing twice."""

import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from isthmus.elastic.errors import EtcdUnavailable, JournalUnwritable
from isthmus.elastic.journal import etcd
from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_store import EtcdStore
from tests.multiprocess.etcd.coordinators import Coordinators, record
from tests.multiprocess.etcd_cluster import Cluster, Node, needs_etcd
from tests.multiprocess.ports import free_ports

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600), needs_etcd]


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
