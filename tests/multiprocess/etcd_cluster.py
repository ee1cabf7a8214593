# SPDX-License-Identifier: Apache-2.0
"""Real etcd nodes for tests: one or three, on free loopback ports, with elections of half a second.

Not a test. `with etcd_nodes(folder, 3) as cluster:` starts them and waits until they have a leader; on the way out
they are killed. Needs the program `etcd` (on Debian and Ubuntu: apt-get install etcd-server).
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.errors import EtcdError
from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_wire import RangeAnswer
from tests.multiprocess.ports import free_ports

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (apt-get install etcd-server)")

START_TIMEOUT_S = 30.0
NUM_STARTS = 4
"""Another program may take a port between the moment it was found free and the node's start."""


class _Status(msgspec.Struct):
    header: dict[str, int]
    leader: int = 0


class Node:
    """One etcd process. `start` after `kill` goes on with its data."""

    def __init__(self, folder: Path, name: str, client_port: int, peer_port: int) -> None:
        self.name = name
        self.endpoint = f"127.0.0.1:{client_port}"
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.flags: list[str] = []
        self._folder = folder
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self, initial_cluster: str, scheme: str) -> None:
        assert ETCD is not None
        url = f"{scheme}://{self.endpoint}"
        command = [ETCD, "--name", self.name, "--data-dir", str(self._folder / self.name), "--logger", "zap"]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", initial_cluster, "--heartbeat-interval", "50", "--election-timeout", "500"]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._popen = subprocess.Popen(
                [*command, *self.flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()


class Cluster:
    """Nodes that work together. `flags` for each of them; with a `ca_file` the nodes are dialled encrypted."""

    def __init__(self, folder: Path, size: int, flags: Sequence[str], **files: Path) -> None:
        self._scheme = "https" if files else "http"
        self._files = files
        ports = free_ports(2 * size)
        self.nodes = [Node(folder, f"n{i}", ports[2 * i], ports[2 * i + 1]) for i in range(size)]
        for node in self.nodes:
            node.flags += flags
        self.initial = ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(node.endpoint for node in self.nodes)

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess(endpoints=self.endpoints, **self._files)

    def start(self, *nodes: Node) -> None:
        for node in nodes or self.nodes:
            node.start(self.initial, self._scheme)

    def until_ready(self, access: EtcdAccess | None = None) -> bool:
        """Wait until a majority answers. False if a node has ended instead."""
        client = EtcdClient(access or self.access)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(EtcdError):
                    client.call("kv/range", {"key": b"/isthmus/"}, RangeAnswer, timeout_s=1.0)
                    return True
                if not any(node.is_running for node in self.nodes):
                    return False
        finally:
            client.close()
        raise AssertionError(f"etcd does not answer at {self.endpoints}")

    def leader(self) -> Node:
        """Who leads now, as one of the living nodes says."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            statuses = [(node, self._status(node)) for node in self.nodes if node.is_running]
            for node, status in statuses:
                if status is not None and status.leader == status.header["member_id"]:
                    return node
        raise AssertionError("no node leads")

    def _status(self, node: Node) -> _Status | None:
        client = EtcdClient(EtcdAccess(endpoints=(node.endpoint,)))
        try:
            return client.call("maintenance/status", {}, _Status, timeout_s=0.5)
        except EtcdError:
            return None
        finally:
            client.close()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def etcd_nodes(folder: Path, size: int, *, flags: Sequence[str] = (), **files: Path) -> Iterator[Cluster]:
    """A cluster that answers. `files`: those of `EtcdAccess` that its clients need."""
    for attempt in range(NUM_STARTS):
        place = folder / f"etcd-{attempt}"
        place.mkdir()
        cluster = Cluster(place, size, flags, **files)
        try:
            cluster.start()
            if cluster.until_ready() and all(node.is_running for node in cluster.nodes):
                yield cluster
                return
        finally:
            cluster.kill()
            shutil.rmtree(place, ignore_errors=True)
    raise AssertionError("etcd does not start")
