# SPDX-License-Identifier: Apache-2.0
"""What `isthmus leave` says while a peer leaves: asks its daemon again and again, and ends when it has left.

Rules: a leave may take as long as its work does, so nothing here has a deadline but the daemon's answers. A process
that goes on without its peer, as its coordinator, has left all the same. Must not know what leaving means.

Errors: `NothingRuns` (the daemon was killed before it had left), `NobodyReachable` (it does not answer any more).
"""

import sys
import time
from collections.abc import Callable

from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.errors import NobodyReachable, NothingRuns
from isthmus.trainer.record.event_log import FILE_NAME, EventReader
from isthmus.trainer.record.status import LeavingStatus, Status
from isthmus.trainer.run.control_socket import ControlClient

_POLL_S = 0.1
_QUIET_S = 1.0
"""A leave that takes no longer is not talked about."""
_AGAIN_S = 10.0
"""The same line is said again after so long, so that nobody takes the wait for a hang."""
_MAX_SILENCES = 6
"""So many questions in a row may stay unanswered: the daemon may be busy, or its machine."""
_TAIL_NBYTES = 1 << 16

_WAITS = {
    "start": "waits until its daemon has begun",
    "commit": "waits for the commit that holds its last steps",
    "handover": "nobody else holds the state: waits until another peer has fetched it",
    "answer": "waits for the coordinator's answer",
    "checkpoint": "writes the state to the disk",
    "others": "has left, and its process ends",
}


def follow(client: ControlClient, say: Callable[[str], None]) -> str | None:
    """Wait until the peer has left, and say what it waits for.

    Returns:
        One sentence about how it left; None if it has not said.

    Raises:
        NothingRuns, NobodyReachable: see the module.
    """
    folder, began = client.run_dir, time.monotonic()
    said, said_at = "", began
    num_silences = 0
    while not client.has_ended():
        try:
            status = client.status()
            num_silences = 0
        except NobodyReachable:
            num_silences += 1
            if client.has_ended():
                break
            if num_silences >= _MAX_SILENCES:
                raise
            continue
        leaving = status.leaving
        if leaving is not None and leaving.waits_for == "others" and leaving.num_others:
            others = "another peer" if leaving.num_others == 1 else f"{leaving.num_others} other peers"
            return f"{leaving.reason}; its process coordinates {others} until they end: isthmus leave --now ends it"
        now, line = time.monotonic(), describe(status)
        if now >= began + _QUIET_S and (line != said or now >= said_at + _AGAIN_S):
            say(line)
            said, said_at = line, now
        time.sleep(_POLL_S)
    if client.was_killed():
        raise NothingRuns(
            f"the isthmus in {folder} has ended without a word before it had left (process {client.peer.pid})",
            cure="start it again, or look at its log",
        )
    newest = EventReader(folder / FILE_NAME, tail_nbytes=_TAIL_NBYTES).new()
    return next((str(line["cause"]) for line in reversed(list(newest)) if line["event"] == "leave"), None)


def describe(status: Status) -> str:
    """What a leaving peer waits for, in one line."""
    leaving = status.leaving or LeavingStatus(waits_for="start")
    line = f"leaving: {_WAITS.get(leaving.waits_for, leaving.waits_for)}"
    if leaving.waits_for == "commit" and status.inner_steps_per_round:
        steps = f"inner step {status.inner_step} of {status.inner_steps_per_round}"
        line += f" (outer step {status.outer_step}, {steps}, {len(status.members)} in the round)"
    if leaving.waits_for == "handover":
        line += f" (outer step {status.outer_step})"
        line += "".join(f"; {_of(item.sent_bytes, item.total_bytes)} to {item.peer_id}" for item in leaving.fetches)
    return line


def say_on_stderr(line: str) -> None:
    """For people; the result goes to stdout."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _of(sent: int, total: int) -> str:
    share = f", {min(100, 100 * sent // total)} %" if total else ""
    return f"{rounded_nbytes(sent)} of {rounded_nbytes(total)}{share}"
