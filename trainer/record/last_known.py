# SPDX-License-Identifier: Apache-2.0
"""What a folder tells of a peer that does not run any more: how far it came, how it ended, and what to type next.

Reads the event log only. Must not know how a running peer is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from isthmus.trainer.errors import ExitCode, NothingRuns
from isthmus.trainer.files import MEMBERSHIP_NAME
from isthmus.trainer.record.events import FILE_NAME, Field, has_events, read_events


@dataclass(slots=True)
class LastKnown:
    """Of the newest start in a folder.

    Attributes:
        run_id: of the run; empty if the start did not get so far.
        outer_step: the newest that it committed, or held when it left; 0 before the first.
        code: its exit code; None if it ended without a word, as a killed process does.
        cause: its last words.
        is_coordinator: whether it was a coordinator without a peer.
        wall: when its log ends, ISO 8601.
    """

    run_id: str = ""
    outer_step: int = 0
    code: int | None = None
    cause: str = ""
    is_coordinator: bool = False
    wall: str = ""

    def hear(self, event: Mapping[str, Field]) -> None:
        """Take the next event of the log."""
        self.wall = str(event.get("wall", self.wall))
        match event:
            case {"event": "log_opened"}:
                self.code, self.cause = None, ""
            case {"event": "started", "run_id": str(run_id)}:
                self.outer_step = self.outer_step if run_id == self.run_id else 0
                self.run_id = run_id
                self.is_coordinator = event.get("num_parameters") == 0
            case {"event": "commit_decided", "outer_step": int(outer_step)} if self.is_coordinator:
                self.outer_step = outer_step
            case {"event": "commit" | "catch_up", "outer_step": int(outer_step)}:
                self.outer_step = outer_step
            case {"event": "coordinator_ended", "complete": bool(is_complete)}:
                self.code, self.cause = (ExitCode.DONE, "") if is_complete else (ExitCode.LEFT, "stopped")
            case {"event": "leave", "code": int(code), "cause": str(cause)}:
                self.code, self.cause = code, cause
            case _:
                pass


def last_known(folder: Path) -> LastKnown | None:
    """None if no peer of ours has ever run in this folder, or its log cannot be read."""
    if not has_events(folder / FILE_NAME):
        return None
    found = LastKnown()
    try:
        for event in read_events(folder / FILE_NAME):
            found.hear(event)
    except OSError:
        return None
    return found if found.wall else None


def nothing_runs(folder: Path, past: LastKnown) -> NothingRuns:
    """The sentence about it, and what to type next."""
    when = f"{datetime.fromisoformat(past.wall):%Y-%m-%d %H:%M} UTC"
    reached = f"at outer step {past.outer_step} ({when})" if "outer step" not in past.cause else f"({when})"
    if past.code == ExitCode.DONE and past.is_coordinator:
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
    who = "coordinator" if past.is_coordinator else "peer"
    return NothingRuns(f"nothing runs in {folder}: its {who} of {past.run_id} {how} {reached}", cure=cure)
