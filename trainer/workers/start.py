# SPDX-License-Identifier: Apache-2.0
"""How a worker process begins: forked from this daemon's fork server, which has loaded torch for all of them.

`split_off` makes the first start a matter of milliseconds. Where nobody has called it, or the fork server is gone,
another one is launched, by this module as a program. Rules: nothing slow is loaded before that program is tied to its
daemon. Must not know what is said to a worker.
"""

import atexit
import faulthandler
import os
import signal
from collections.abc import Sequence

from isthmus.trainer.threads import spin_briefly
from isthmus.trainer.workers.fork_server import ForkedProcess, ForkServer, ForkServerGone, Runner, serve
from isthmus.trainer.workers.lifeline import name_process

STACK_SIGNAL = signal.SIGUSR1
"""A worker that gets it writes the stacks of its threads to its log, and goes on."""

WORKER_NAME = "isthmus-worker"
"""What `top` calls it."""

_LOAD_TIMEOUT_S = 120.0
"""For the fork server's answer: it may have torch to load from a slow disk."""

_server: ForkServer | None = None
"""This process's: it has one, as it has one interpreter."""


def split_off() -> None:
    """Fork the fork server from this process, which must have one thread only. What is loaded by now is so for both."""
    global _server
    _server = ForkServer.split_off(_load)


def fork_server(*, anew: bool = False) -> ForkServer:
    """This process's; one is launched if there is none, or `anew`. Call it in the main thread."""
    global _server
    if _server is None or anew:
        spin_briefly()
        _server = ForkServer.launch(__name__)
        atexit.register(_server.close)
    return _server


async def start_worker(job: str, *, fds: Sequence[int], log: int) -> ForkedProcess:
    """A new worker.

    Args:
        job: a `WorkerJob` as JSON.
        fds: its mailbox and its text; in the worker they have other numbers than the job says.
        log: takes what it prints.

    Raises:
        OSError: there can be no new process.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        stdio = (nothing, log, log)
        try:
            return await fork_server().process(job, stdio=stdio, fds=fds, timeout_s=_LOAD_TIMEOUT_S)
        except ForkServerGone:
            fork_server().close()
        return await fork_server(anew=True).process(job, stdio=stdio, fds=fds, timeout_s=_LOAD_TIMEOUT_S)
    except ForkServerGone as gone:
        raise OSError(f"no worker can be started: {gone}") from gone
    finally:
        os.close(nothing)


def _load() -> Runner:
    import torch._dynamo  # noqa: F401 - the inner optimizer asks for it

    from isthmus.trainer.workers.worker import work

    def run(job: str, fds: Sequence[int]) -> None:
        name_process(WORKER_NAME)
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        work(job, fds)

    return run


if __name__ == "__main__":
    serve(_load)
