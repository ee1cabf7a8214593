# SPDX-License-Identifier: Apache-2.0
"""The workers of all this user's peers on this machine divide its processors, also if peers come and go.

Each worker has an abstract Unix socket with a name that the others know. Nobody listens on it: it only stands in the
kernel's list of sockets, and goes with its process, however that ends. So reading the list counts the workers. Those in
another network namespace, a container say, do not see each other; a container has a quota of its own.

Rules: a worker that is not alone has no more threads than its part of the machine, and one that is has what it was
given. What cannot be counted divides nothing.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Self

import torch

log = logging.getLogger(__name__)

_SOCKETS = Path("/proc/net/unix")
_LOOK_S = 2.0
"""Between two looks at who is there."""


class Neighbours:
    """Those that have such a socket.

    Args:
        group: who counts each other; None: all of this user.
    """

    def __init__(self, group: str | None = None) -> None:
        self._prefix = f"isthmus-worker-{os.getuid() if group is None else group}-"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            self._socket.bind(f"\0{self._prefix}{secrets.token_hex(8)}")

    def count(self) -> int:
        """How many workers there are, this one among them."""
        try:
            listed = _SOCKETS.read_text()
        except OSError:
            return 1
        return max(1, listed.count(f"@{self._prefix}"))

    def close(self) -> None:
        """This one is gone."""
        self._socket.close()


class SharedThreads:
    """How many threads torch has in this worker, as a context.

    Args:
        most: so many if no other peer is here.
        neighbours: with whom it shares the machine; None: with nobody.
        num_processors: of the machine.
    """

    def __init__(self, most: int, neighbours: Neighbours | None, *, num_processors: int | None = None) -> None:
        self._most, self._neighbours = most, neighbours
        self._num_processors = num_processors or os.cpu_count() or 1
        self._look_at = 0.0
        torch.set_num_threads(most)

    def __enter__(self) -> Self:
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        if self._neighbours is not None:
            self._neighbours.close()

    def look(self) -> None:
        """Once in a while: who is here now?"""
        if self._neighbours is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        num_workers = self._neighbours.count()
        num_threads = min(self._most, max(1, self._num_processors // num_workers))
        if num_threads != torch.get_num_threads():
            log.info("threads num_threads=%d workers_on_this_machine=%d", num_threads, num_workers)
            torch.set_num_threads(num_threads)
