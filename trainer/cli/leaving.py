# SPDX-License-Identifier: Apache-2.0
"""What `isthmus leave` says while a peer leaves: asks its daemon again and again, and ends when it has left.

Rules: a leave may take as long as its work does, so nothing here has a deadline but the daemon's answers. A process
that goes on without its peer, as its coordinator, has left all the same. A terminal shows each inner step, in one live
line; elsewhere a line is written when the wait is another one, and now and then. Must not know what leaving means.

Errors: `NothingRuns` (the daemon was killed before it had left), `NobodyReachable` (it does not answer any more).
"""

import time
from functools import partial

from isthmus.trainer.cli.console import Console
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.errors import NobodyReachable, NothingRuns
from isthmus.trainer.record.event_log import FILE_NAME, EventReader
from isthmus.trainer.record.status import LeavingStatus, Status
from isthmus.trainer.run.control_socket import ControlClient

_POLL_S = 0.1
_QUIET_S = 1.0
"""A leave that takes no longer is not talked about."""
_AGAIN_S = 10.0
"""So often a line is written while the wait is the same, so that nobody takes it for a hang."""
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


def follow(client: ControlClient, console: Console) -> str | None:
    """Wait until the peer has left, and say what it waits for.

    Returns:
        One sentence about how it left; None if it has not said.

    Raises:
        NothingRuns, NobodyReachable: see the module.
    """
    folder, began = client.run_dir, time.monotonic()
    told: object = None
    told_at, num_silences = began, 0
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
        wait = (None if leaving is None else leaving.waits_for, status.outer_step)
        if now >= began + _QUIET_S:
            console.watch(partial(str, line))
            if not console.has_live_line and (wait != told or now >= told_at + _AGAIN_S):
                console.log(line)
                told, told_at = wait, now
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


def _of(sent: int, total: int) -> str:
    share = f", {min(100, 100 * sent // total)} %" if total else ""
    return f"{rounded_nbytes(sent)} of {rounded_nbytes(total)}{share}"
