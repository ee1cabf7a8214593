# SPDX-License-Identifier: Apache-2.0
"""Daemons in a control group with less than the machine has, as a container or a systemd unit sets it."""

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process
from tests.multiprocess.run_harness import OPEN_END, Run, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

ENVIRONMENT = 3
Inside = tuple[str, ...]
LARGE = ("--model.dim", "512", "--model.num_layers", "12", "--model.hidden_dim", "2048")


@pytest.fixture
def limited() -> Iterator[Callable[..., Inside]]:
    """Makes a group with limits, by the names of both versions; returns the words that start a program in it."""
    groups: list[Path] = []

    def make(controller: str, first: dict[str, str], second: dict[str, str]) -> Inside:
        root = Path("/sys/fs/cgroup")
        is_first = (root / controller / "cgroup.procs").exists()
        group = (root / controller if is_first else root) / f"isthmus-{uuid.uuid4().hex}"
        try:
            group.mkdir()
            groups.append(group)
            for name, value in (first if is_first else second).items():
                (group / name).write_text(value)
        except OSError as error:
            pytest.skip(f"{controller} cannot be limited here: {error}")
        return ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")

    yield make
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()


def found(run: Run, *flags: str, inside: Inside) -> Process:
    """As `Run.found`, but it sees for itself how many threads it may have."""
    words = ("up", "-c", str(run.config), "--data", str(run.text), "--outer-steps", str(OPEN_END), *flags)
    return run.start(*words, inside=inside)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_a_worker_has_no_more_threads_than_its_group_may_use(tmp_path: Path, limited: Callable[..., Inside]) -> None:
    """Found: it had one for each core of the machine, which the kernel then stopped by turns."""
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    inside = limited("cpu", quota, {"cpu.max": "100000 100000"})
    with running(tmp_path) as run:
        founder = found(run, inside=inside)
        run.until_step(2, founder)
        (workers,) = founder.events("workers")
        assert workers["devices"] == ["cpu (1 thread)"]
        run.leave_all()


def test_a_run_that_does_not_fit_into_its_group_does_not_begin(tmp_path: Path, limited: Callable[..., Inside]) -> None:
    nbytes = str(700 << 20)
    inside = limited("memory", {"memory.limit_in_bytes": nbytes}, {"memory.max": nbytes})
    with running(tmp_path) as run:
        founder = found(run, *LARGE, inside=inside)
        assert run.until_ended(founder) == [ENVIRONMENT]
        text = founder.console.with_suffix(".err").read_text()
    assert "of memory here, and" in text
    free = re.search(r"memory_free='([\d.]+) MB'", text)
    assert free is not None, "not that of the machine"
    assert float(free[1]) < 700
