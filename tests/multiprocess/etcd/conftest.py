# SPDX-License-Identifier: Apache-2.0
"""Runs whose journal is in a real etcd."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.etcd.coordinators import Coordinators
from tests.multiprocess.etcd_cluster import Cluster, etcd_nodes


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node for all tests that harm nobody but their own run."""
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Cluster]:
    with etcd_nodes(tmp_path, 3) as cluster:
        yield cluster


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
