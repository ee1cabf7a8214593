# SPDX-License-Identifier: Apache-2.0
"""Of several coordinators with one journal in etcd, one leads and the others are fenced off."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.elastic.errors import EtcdRefused, Superseded
from isthmus.elastic.journal.etcd_store import EtcdStore
from tests.multiprocess.etcd.coordinators import Coordinators, record
from tests.multiprocess.etcd_cluster import Cluster, needs_etcd

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600), needs_etcd]


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
