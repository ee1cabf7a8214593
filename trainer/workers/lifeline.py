# SPDX-License-Identifier: Apache-2.0
"""A process that must not outlive the one that started it, however that one ends. Nothing slow is loaded for it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> bool:
    """Make the kernel end this process (SIGKILL) when its parent dies; on Linux, elsewhere nothing is arranged.

    What counts is the parent's thread that started this process. Call it before anything that takes long.

    Args:
        parent_pid: who started this process, as that one knows itself.

    Returns:
        Whether the parent was still there once this was arranged. If not, nobody will end this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent_pid
