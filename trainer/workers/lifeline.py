# SPDX-License-Identifier: Apache-2.0
"""What a process asks the kernel about its parent, its children and its name. Only Linux is asked; elsewhere nothing
happens. Nothing slow is loaded for it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent_pid: int) -> bool:
    """Make the kernel end this process (SIGKILL) when its parent dies.

    What counts is the parent's thread that started this process. Call it before anything that takes long.

    Args:
        parent_pid: who started this process, as that one knows itself.

    Returns:
        Whether the parent was still there once this was arranged. If not, nobody will end this process.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    return os.getppid() == parent_pid


def adopt_orphans() -> None:
    """Become the parent of whatever process that this one has started, at any remove, loses its own parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """What `top` and `ps -o comm` call this process; of at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, value: "int | ctypes.c_char_p") -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
