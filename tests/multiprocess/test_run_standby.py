"""The whole product on a real etcd: a coordinator, a standby that takes over, and peers that find it."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.core.records import Record, ViewRecord
from elastic.etcd_store import EtcdStore
from tests.multiprocess.etcd_cluster import Cluster, etcd_nodes, free_ports, needs_etcd
from tests.multiprocess.run_harness import Audit, Process, Run, assert_same_commits, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200), needs_etcd]

ENVIRONMENT, REFUSED = 3, 5


def _flags(cluster: Cluster, addresses: Sequence[str], *more: str) -> list[str]:
    flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps(cluster.endpoints)]
    return [*flags, "--coordinator.addresses", json.dumps(addresses), *more]


def _standby(run: Run, coordinator: Process, cluster: Cluster, address: str, *more: str) -> Process:
    ticket = coordinator.directory / "standby.ticket"
    flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps(cluster.endpoints), "--listen", address]
    return run.start("coordinator", "--standby", f"@{ticket}", *flags, *more)


def _records(coordinator: Process, cluster: Cluster) -> list[Record]:
    run_id = json.loads((coordinator.directory / "run.json").read_bytes())["run_id"]
    store = EtcdStore(cluster.access, run_id=run_id, peer_id="reader", address="")
    records = list(store.replay())
    store.close()
    return records


def test_a_standby_takes_over_from_a_killed_coordinator_and_no_committed_step_is_lost(tmp_path: Path) -> None:
    last = 60
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    members = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(last)]
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        coordinator = run.coordinator(*_flags(cluster, addresses, "--listen", addresses[0]), *members)
        run.wait_for_ticket()
        standby = _standby(run, coordinator, cluster, addresses[1])
        peers = [run.join(), run.join()]
        run.until_step(last // 4, *peers)
        coordinator.kill()
        before = max(event["outer_step"] for event in coordinator.events("commit_decided"))
        assert run.until_ended(standby, *peers) == [0, 0, 0]
        records = _records(standby, cluster)
    audit = Audit.of(records)
    assert [record.outer_step for record in audit.commits] == list(range(1, last + 1))
    assert last // 4 <= before < last
    assert len(assert_same_commits(*peers)) == last
    for peer in peers:
        assert len(peer.events("join")) == 1  # it never lost its membership
        assert {event["address"] for event in peer.events("coordinator_connected")} == set(addresses)
    views = [record.view for record in records if isinstance(record, ViewRecord)]
    assert {member.peer_id for view in views for member in view.members} == {peer.peer_id for peer in peers}


def test_a_frozen_coordinator_is_replaced_and_ends_when_it_wakes_up(tmp_path: Path) -> None:
    last = 60
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    members = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(last)]
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        coordinator = run.coordinator(*_flags(cluster, addresses, "--listen", addresses[0]), *members)
        run.wait_for_ticket()
        standby = _standby(run, coordinator, cluster, addresses[1])
        peers = [run.join(), run.join()]
        run.until_step(last // 4, *peers)
        coordinator.signal(signal.SIGSTOP)
        run.until("commits of the standby", lambda: len(standby.events("commit_decided")) >= 3)
        told = len(coordinator.events("commit_decided"))
        coordinator.signal(signal.SIGCONT)
        ended = coordinator.outcome()
        assert ended.code == REFUSED
        assert f"was taken over by the coordinator at {addresses[1]}" in ended.sentences[-1]
        assert run.until_ended(standby, *peers) == [0, 0, 0]
        audit = Audit.of(_records(standby, cluster))
        assert len(coordinator.events("commit_decided")) == told  # of what it decided since, nobody has heard
    assert [record.outer_step for record in audit.commits] == list(range(1, last + 1))
    assert len(assert_same_commits(*peers)) == last


def test_a_second_coordinator_of_a_run_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps(cluster.endpoints)]
        first = run.coordinator(*flags)
        run.wait_for_ticket()
        second = run.folder / "second"
        second.mkdir()
        for name in ("run.json", "terms.json"):
            (second / name).write_bytes((first.directory / name).read_bytes())
        flags += ["-c", str(run.config), "--data.path", str(run.text), "--listen", f"127.0.0.1:{free_ports(1)[0]}"]
        again = run.start("coordinator", *flags, folder=second).outcome()
        assert again.code == ENVIRONMENT
        (sentence,) = again.sentences
        assert "is in use by the coordinator at 127.0.0.1:" in sentence
        assert first.is_running
        first.signal(signal.SIGINT)
        assert run.until_ended(first) == [0]
