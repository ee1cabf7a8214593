# SPDX-License-Identifier: Apache-2.0
"""Coordinators of one run, with a journal in a real etcd. Not tests."""

import contextlib
from itertools import count

from isthmus.elastic.core.records import Genesis
from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_store import EtcdStore
from isthmus.elastic.journal.etcd_wire import Done, Request
from tests.multiprocess.etcd_cluster import Cluster

_runs = count()


def record(number: int) -> Genesis:
    return Genesis(outer_step=number, digest=b"0" * 32, next_index=0)


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
