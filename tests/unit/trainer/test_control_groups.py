# SPDX-License-Identifier: Apache-2.0
"""What control groups leave of the machine, in trees of both versions as the kernel lays them out."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.trainer import control_groups
from isthmus.trainer.control_groups import memory_limits, num_processors

CORES = 64
GB = 1 << 30
Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Makes /proc/self/cgroup and the files below /sys/fs/cgroup, on a machine of 64 cores."""

    def make(membership: str, **files: str) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            path = tmp_path / "root" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / path.name.replace("_", ".", 1)).write_text(content)

    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(CORES))
    return make


def test_without_a_group_the_machine_is_all_there_is(tree: Tree) -> None:
    assert (num_processors(), memory_limits()) == (CORES, [])
    tree("0::/user.slice\n", cpu_max="max 100000\n", memory_max="max\n", memory_current="5\n")
    assert (num_processors(), memory_limits()) == (CORES, [])


def test_a_container_is_at_the_root_of_what_it_sees(tree: Tree) -> None:
    tree(
        "0::/\n",
        cpu_max="200000 100000\n",
        memory_max=f"{8 * GB}\n",
        memory_current=f"{3 * GB}\n",
        memory_stat=f"anon 7\ninactive_file {GB}\nactive_file 9\n",
    )
    assert (num_processors(), memory_limits()) == (2, [(8 * GB, 6 * GB)])


def test_of_a_unit_and_those_above_it_the_tightest_counts(tree: Tree) -> None:
    tree("0::/a/b\n", a__b__cpu_max="max 100000\n", a__cpu_max="150000 100000\n", cpu_max="400000 100000\n")
    assert num_processors() == 2, "a quota of one and a half is rounded up"
    tree(
        "0::/a/b\n", a__b__memory_max="100\n", a__b__memory_current="70\n", a__memory_max="90\n", a__memory_current="80"
    )
    assert memory_limits() == [(100, 30), (90, 10)]


def test_the_first_version_has_a_tree_for_each_controller(tree: Tree) -> None:
    tree(
        "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        cpu__job__cpu_cfs_quota_us="300000\n",
        cpu__job__cpu_cfs_period_us="100000\n",
        cpu__cpu_cfs_quota_us="-1\n",
        cpu__cpu_cfs_period_us="100000\n",
        memory__job__memory_limit_in_bytes="100\n",
        memory__job__memory_usage_in_bytes="100\n",
        memory__job__memory_stat="inactive_file 1\ntotal_inactive_file 20\n",
    )
    assert (num_processors(), memory_limits()) == (3, [(100, 20)])


@pytest.mark.parametrize("path", ["/docker/0123", "/../../elsewhere", "/"])
def test_a_group_whose_name_is_not_seen_from_here_is_the_root(tree: Tree, path: str) -> None:
    tree(f"2:cpu:{path}\n", cpu__cpu_cfs_quota_us="100000\n", cpu__cpu_cfs_period_us="100000\n")
    assert num_processors() == 1


@pytest.mark.parametrize("content", ["", "0 0", "100000", "100000 0", "x y", "-1 100000", "1 2 3", "9" * 5000])
def test_a_file_that_says_something_else_is_no_limit(tree: Tree, content: str) -> None:
    tree("0::/\n", cpu_max=content, memory_max=content, memory_current=content, memory_stat="inactive_file\n")
    assert num_processors() == CORES


def test_a_quota_below_one_processor_leaves_one(tree: Tree) -> None:
    tree("0::/\n", cpu_max="1000 100000\n")
    assert num_processors() == 1
