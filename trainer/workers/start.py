# SPDX-License-Identifier: Apache-2.0
"""The first thing a worker process does: `python -m trainer.workers.start JOB`.

To load torch takes seconds. A daemon that is killed meanwhile must not leave a worker behind, nor a signal for the
daemon's whole group end one: so both are seen to before anything is loaded.
"""

import faulthandler
import json
import os
import signal
import sys

from isthmus.trainer.errors import ExitCode
from isthmus.trainer.workers.lifeline import die_with

STACK_SIGNAL = signal.SIGUSR1
"""A worker that gets it writes the stacks of its threads to its log, and goes on."""


def main() -> None:
    """Tie this process to its daemon, then become the worker that the only argument describes."""
    # A supervisor that stops a service signals all its processes; the daemon then still needs us to leave in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    if not die_with(int(json.loads(sys.argv[1])["parent_pid"])):
        os._exit(ExitCode.UNEXPECTED)
    from isthmus.trainer.workers.worker import main as work

    work()


if __name__ == "__main__":
    main()
