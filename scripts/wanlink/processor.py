# SPDX-License-Identifier: Apache-2.0
"""A processor of its own for what stands for a machine of its own, as far as there are any.

Peers and emulator share few cores here. Ordinary scheduling lets a process wait tens of milliseconds behind another
one although a core is idle, which no peer on a machine of its own would: with two peers, TLS and two cores that looked
like 10 % of an exchange's time. Processes in real-time classes are moved to an idle core at once.

The network stays on one core, and what the peers' kernels do with a packet that has arrived is done on the others: it
is the peers' work, and took the network half of its time. Four peers with 200 Mbit/s and small packets filled its core
before, and lost packets by the thousand in queues that no real network would have had.
"""

import contextlib
import os

PEER = 1
NETWORK = 2
"""Goes first: a network does not wait until its peers leave it a core."""


def claim(priority: int) -> None:
    """Run this process, and what it starts, in a real-time class. Without effect where that is not allowed."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))


def settle() -> int:
    """Stay on one core; returns a mask of the others, 0 if there are none."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return 0
    os.sched_setaffinity(0, cores[-1:])
    return sum(1 << core for core in cores[:-1])
