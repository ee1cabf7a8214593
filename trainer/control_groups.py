# SPDX-License-Identifier: Apache-2.0
"""What the control groups of this process leave it of the machine: containers, systemd units and batch jobs set them.

Both versions of them are read, of the process's own group and of all above it as far as they are seen: in a container
its own group is the root. Sources: the kernel's admin-guide/cgroup-v2.rst (`cpu.max`, `memory.max`), its
cgroup-v1/memory.rst and its scheduler/sched-bwc.rst. Where nothing can be read there is no limit. Must not know who
asks.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def num_processors() -> int:
    """How many this process may keep busy, at least 1: affinity, and the quota of its groups rounded up."""
    quotas = [math.ceil(quota) for folder in _groups("cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def memory_limits() -> list[tuple[int, int]]:
    """Of each group that has a limit: that limit, and how much of it is free, bytes. Cached files count as free."""
    return [limit for folder in _groups("memory") if (limit := _memory(folder)) is not None]


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups with that controller, from its own one up."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        own = root / path.lstrip("/")
        if ".." in own.parts or not own.is_dir():
            own = root  # another name than the one that is seen from here
        while own != root:
            yield own
            own = own.parent
        yield root


def _quota(folder: Path) -> float | None:
    """In processors."""
    told = _numbers(folder / "cpu.max")
    told = told or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
    return told[0] / told[1] if len(told) == 2 and min(told) > 0 else None  # -1 is no quota


def _memory(folder: Path) -> tuple[int, int] | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _numbers(folder / limit_name), _numbers(folder / used_name)
        if limit and used:
            return limit[0], max(0, limit[0] - used[0] + _entry(folder / "memory.stat", cache_name))
    return None


def _numbers(file: Path) -> tuple[int, ...]:
    """Those in a line; none if there is no such file, or something else is in it, as `max`."""
    try:
        return tuple(map(int, file.read_text().split()))
    except (OSError, ValueError):
        return ()


def _entry(file: Path, name: str) -> int:
    """Of a file with a name and a number in each line; 0 if it is not there."""
    try:
        return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name} ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
