# SPDX-License-Identifier: Apache-2.0
"""What a folder tells of a peer that does not run any more: how far it came, how it ended, and what to type next.

Reads the event log only. Must not know how a running peer is asked.
"""

from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from isthmus.trainer.errors import ExitCode, NothingRuns
from isthmus.trainer.files import MEMBERSHIP_NAME
from isthmus.trainer.record.event_log import FILE_NAME, read_events
from isthmus.trainer.record.events import event_of
from isthmus.trainer.record.figures import BLANK, Figures, fold


def last_known(folder: Path) -> Figures | None:
    """The figures of the newest start in this folder; None if no peer has ever run here, or its log cannot be read.

    The run and its outer step are those of an earlier start, if the newest one did not get so far.
    """
    figures, run_id, outer_step = BLANK, "", 0
    try:
        for event in filter(None, map(event_of, read_events(folder / FILE_NAME))):
            figures = fold(figures, event)
            if figures.run_id not in ("", run_id):
                run_id, outer_step = figures.run_id, 0
            outer_step = figures.outer_step or outer_step
    except OSError:
        return None
    return replace(figures, run_id=run_id, outer_step=outer_step) if figures.wall else None


def nothing_runs(folder: Path, past: Figures) -> NothingRuns:
    """The sentence about it, and what to type next."""
    is_coordinator = past.num_parameters == 0
    when = f"{datetime.fromisoformat(past.wall):%Y-%m-%d %H:%M} UTC"
    reached = f"at outer step {past.outer_step} ({when})" if "outer step" not in past.cause else f"({when})"
    if past.code == ExitCode.DONE and is_coordinator:
        cure = "its model is in the folders of its peers: isthmus export --dir FOLDER"
        return NothingRuns(f"nothing runs in {folder}: {past.run_id} is complete {reached}", cure=cure)
    if past.code == ExitCode.DONE:
        cure = (
            f"isthmus export --dir {folder} writes its model, and up --resume {folder} --run.outer_steps MORE goes on"
        )
        return NothingRuns(f"nothing runs in {folder}: {past.run_id} is complete {reached}", cure=cure)
    is_joiner = (folder / MEMBERSHIP_NAME).exists()
    cure = f"isthmus join --dir {folder} comes back" if is_joiner else "give its command again, and it goes on"
    how = "ended without a word" if past.code is None else f"ended with {past.code} ({past.cause})"
    who = "coordinator" if is_coordinator else "peer"
    return NothingRuns(f"nothing runs in {folder}: its {who} of {past.run_id} {how} {reached}", cure=cure)
