# SPDX-License-Identifier: Apache-2.0
"""The whole product on a real etcd: a coordinator, a standby that takes over, and peers that find it."""

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from isthmus.elastic.core.records import Record, SnapshotRecord, ViewRecord
from isthmus.elastic.journal.etcd import EtcdAccess
from isthmus.elastic.journal.etcd_store import EtcdStore
from isthmus.elastic.journal.store import verified
from tests.multiprocess.etcd_cluster import Cluster, etcd_nodes, needs_etcd
from tests.multiprocess.ports import free_ports
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import Audit, assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, now_s, running, wall_s

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600), needs_etcd]

ENVIRONMENT, REFUSED = 3, 5


def _flags(cluster: Cluster, addresses: Sequence[str], *more: str) -> list[str]:
    flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps(cluster.endpoints)]
    return [*flags, "--coordinator.addresses", json.dumps(addresses), *more]


def _standby(run: Run, coordinator: Process, cluster: Cluster, address: str, *more: str) -> Process:
    ticket = coordinator.directory / "standby.ticket"
    flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps(cluster.endpoints), "--listen", address]
    standby = run.start("coordinator", "--standby", f"@{ticket}", *flags, *more)
    run.until("readiness of the standby", lambda: "standing_by for=" in _log_of(standby))
    return standby


def _log_of(process: Process) -> str:
    return process.console.with_suffix(".err").read_text()


def _records(coordinator: Process, cluster: Cluster) -> list[Record]:
    run_id = json.loads((coordinator.directory / "run.json").read_bytes())["run_id"]
    store = EtcdStore(cluster.access, run_id=run_id, peer_id="reader", address="")
    records = [record for _, record in verified(store._rows(0), store.path)]
    snapshots = [slot for slot, record in enumerate(records) if isinstance(record, SnapshotRecord)]
    assert list(store.replay()) == records[snapshots[-1] if snapshots else 0 :]
    store.close()
    return records


def _assert_superseded(coordinator: Process, successor: str) -> None:
    ended = coordinator.outcome()
    assert ended.code == REFUSED
    assert f"was taken over by the coordinator at {successor}" in ended.sentences[-1]


def _end(run: Run, peers: Sequence[Process], coordinator: Process) -> None:
    for peer in peers:
        peer.signal(signal.SIGINT)
    assert run.until_ended(*peers) == [LEFT] * len(peers)
    coordinator.signal(signal.SIGINT)
    assert run.until_ended(coordinator) == [LEFT]


def _assert_one_history(audit: Audit, *processes: Process) -> None:
    """Whatever anybody was told of is in the journal: a fork would be told of twice."""
    journal = {record.outer_step: record.digest.hex() for record in audit.commits}
    for process in processes:
        told = process.events("commit_decided") + process.events("commit")
        assert told
        for event in told:
            assert journal[event["outer_step"]] == event["digest"], f"{process.name} at {event['outer_step']}"


def test_a_standby_takes_over_from_a_killed_coordinator_and_no_committed_step_is_lost(tmp_path: Path) -> None:
    last = 120
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    members = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(last)]
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        compacted = ("--coordinator.compact_every", "20")
        coordinator = run.coordinator(*_flags(cluster, addresses, "--listen", addresses[0]), *members, *compacted)
        run.wait_for_ticket()
        standby = _standby(run, coordinator, cluster, addresses[1], *compacted)
        peers = [run.join(), run.join()]
        run.until_step(last // 4, *peers)
        coordinator.kill()
        before = max(event["outer_step"] for event in coordinator.events("commit_decided"))
        assert run.until_ended(standby, *peers) == [0, 0, 0]
        records = _records(standby, cluster)
    assert len(coordinator.events("snapshot")) >= 1
    assert len(standby.events("snapshot")) >= 1
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
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    members = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(OPEN_END)]
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        coordinator = run.coordinator(*_flags(cluster, addresses, "--listen", addresses[0]), *members)
        run.wait_for_ticket()
        standby = _standby(run, coordinator, cluster, addresses[1])
        peers = [run.join(), run.join()]
        run.until_step(5, *peers)
        coordinator.signal(signal.SIGSTOP)
        run.until("commits of the standby", lambda: len(standby.events("commit_decided")) >= 3)
        coordinator.signal(signal.SIGCONT)
        _assert_superseded(coordinator, addresses[1])
        _end(run, peers, standby)
        audit = Audit.of(_records(standby, cluster))
    _assert_one_history(audit, coordinator, standby, *peers)
    for peer in peers:
        assert len(peer.events("join")) == 1


def test_a_coordinator_that_is_interrupted_hands_over_to_its_standby(tmp_path: Path) -> None:
    last = 200
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        flags = _flags(cluster, addresses, "--listen", addresses[0], "--run.outer_steps", str(last))
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        standby = _standby(run, coordinator, cluster, addresses[1])
        run.told("status", "--dir", str(standby.directory))
        peer = run.join()
        run.until_step(10, peer)
        coordinator.signal(signal.SIGINT)
        assert run.until_ended(coordinator, standby, peer) == [LEFT, 0, 0]
        audit = Audit.of(_records(standby, cluster))
    assert [record.outer_step for record in audit.commits] == list(range(1, last + 1))
    assert len(peer.events("join")) == 1


class Wire:
    """A way to a node that can be cut: what comes in at `address` goes to the node and back."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._node = (host, int(port))
        self._is_cut = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept).start()

    def cut(self) -> None:
        self._is_cut = True
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outside, _ = self._door.accept()
                if self._is_cut:
                    outside.close()
                    continue
                pair = (outside, socket.create_connection(self._node))
                self._pairs.append(pair)
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=self._pump, args=(source, sink)).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction's thread closes the other one


def test_a_coordinator_that_cannot_reach_etcd_sends_its_peers_to_the_one_that_can(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    members = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(OPEN_END)]
    with (
        etcd_nodes(tmp_path, 1) as cluster,
        running(tmp_path) as run,
        contextlib.closing(Wire(cluster.endpoints[0])) as wire,
    ):
        flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps([wire.address])]
        flags += ["--coordinator.addresses", json.dumps(addresses), "--listen", addresses[0]]
        coordinator = run.coordinator(*flags, *members)
        run.wait_for_ticket()
        standby = _standby(run, coordinator, cluster, addresses[1])
        peers = [run.join(), run.join()]
        run.until_step(5, *peers)
        wire.cut()
        run.until("commits of the standby", lambda: len(standby.events("commit_decided")) >= 3)
        assert coordinator.is_running
        wire.mend()
        _assert_superseded(coordinator, addresses[1])
        run.until_step(max(peer.step for peer in peers) + 3, *peers)
        _end(run, peers, standby)
        audit = Audit.of(_records(standby, cluster))
    _assert_one_history(audit, coordinator, standby, *peers)
    for peer in peers:
        assert len(peer.events("join")) == 1


def test_commits_go_on_soon_after_etcds_leader_is_killed(tmp_path: Path, record_property) -> None:
    members = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(OPEN_END)]
    with etcd_nodes(tmp_path, 3) as cluster, running(tmp_path) as run:
        flags = ["--coordinator.store", "etcd", "--coordinator.etcd", json.dumps(cluster.endpoints)]
        coordinator = run.coordinator(*flags, *members)
        run.wait_for_ticket()
        peers = [run.join(), run.join()]
        run.until_step(3, *peers)
        outages_s = []
        for _ in range(3):
            leading = cluster.leader()
            leading.kill()
            killed_at = now_s()
            num_decided = len(coordinator.events("commit_decided"))
            rest = tuple(node.endpoint for node in cluster.nodes if node is not leading)
            cluster.until_ready(EtcdAccess(endpoints=rest))
            etcd_s = now_s() - killed_at
            run.until("next commits", lambda n=num_decided: len(coordinator.events("commit_decided")) > n + 2)
            after = [wall_s(event) for event in coordinator.events("commit_decided")[num_decided - 1 :]]
            outages_s.append(max(later - earlier for earlier, later in pairwise(after)))
            assert outages_s[-1] < etcd_s + 20.0, (outages_s, etcd_s)  # a second on an idle machine
            assert after[-1] > killed_at
            cluster.start(leading)
            cluster.until_ready(EtcdAccess(endpoints=(leading.endpoint,)))
        _end(run, peers, coordinator)
        audit = Audit.of(_records(coordinator, cluster))
    record_property("outage_max_s", round(max(outages_s), 2))
    assert [record.outer_step for record in audit.commits] == list(range(1, len(audit.commits) + 1))
    for peer in peers:
        assert len(peer.events("join")) == 1
        assert not peer.events("fault", kind="coordinator_lost")


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
        assert "is in use by the coordinator at " in sentence
        assert ",127.0.0.1:" in sentence
        assert first.is_running
        first.signal(signal.SIGINT)
        assert run.until_ended(first) == [LEFT]


def test_a_standby_that_takes_over_knows_who_is_banned_and_lets_in_who_is_not(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    members = ["--members.start_peers", "2", "--members.min_peers", "1", "--run.outer_steps", str(OPEN_END)]
    with etcd_nodes(tmp_path, 1) as cluster, running(tmp_path) as run:
        coordinator = run.coordinator(*_flags(cluster, addresses, "--listen", addresses[0]), *members)
        run.wait_for_ticket()
        once = run.command("ticket", "--once", "--dir", str(coordinator.directory)).out
        standby = _standby(run, coordinator, cluster, addresses[1])
        peers = [run.join(), run.join()]
        run.until_step(3, *peers)
        peers[1].is_judged = True
        assert run.command("ban", peers[1].peer_id, "--dir", str(coordinator.directory)).code == 0
        assert peers[1].outcome().code == REFUSED
        run.ticket.write_text(once)
        last = run.join()  # its ticket is used up
        run.until("membership", lambda: bool(last.events("join")))
        coordinator.kill()
        step = last.step
        run.until_step(step + 3, peers[0], last)

        for folder, reason in ((peers[1].directory, "was banned from the run"), (None, "has been used")):
            refused = run.join(folder=folder)
            refused.is_judged = True
            (sentence,) = refused.outcome().sentences
            assert reason in sentence
        run.ticket.write_text(run.command("ticket", "--dir", str(standby.directory)).out)
        newcomer = run.join()
        run.until("membership", lambda: bool(newcomer.events("join")))
        _end(run, [peers[0], last, newcomer], standby)
    assert_same_commits(*peers, last, newcomer)
