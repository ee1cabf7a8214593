# SPDX-License-Identifier: Apache-2.0
"""What a worker does that does not answer: what the kernel says of it, and its Python stack if it can still tell.

A worker writes the stacks of all its threads to its log when it gets the signal for that (start.py), also while
it waits in a library or holds the interpreter's lock. Who is stopped, or hangs in the kernel, cannot. Where several
workers owe an answer most of them wait for one in a collective: that one is named first. Linux; elsewhere the kernel
says nothing. Must not know what was asked.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.trainer.workers.process import WorkerProcess
from isthmus.trainer.workers.start import STACK_SIGNAL

_ANSWER_S = 2.0
"""A thread that runs is interrupted at once; on a machine without a free core that may take a while."""
_LOOK_S = 0.05
_NUM_FRAMES = 6
_STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "dead"}
_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_WAITING = "torch/distributed/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is known of one worker. `frames`: of its main thread, the innermost first; empty if it does not answer."""

    local_rank: int
    state: str
    waits_in: str
    frames: tuple[tuple[str, int, str], ...]

    @property
    def waits_for_others(self) -> bool:
        """Whether it stands in a collective of the workers: it is not the one that hangs."""
        return bool(self.frames) and _WAITING in self.frames[0][0]

    def __str__(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in else ""
        stack = " < ".join(f"{Path(path).name}:{line} {name}" for path, line, name in self.frames[:_NUM_FRAMES])
        what = f"at {stack}" if stack else "does not answer a signal either"
        waits = ", and waits for the others" if self.waits_for_others else ""
        return f"worker {self.local_rank} is {self.state}{where}, {what}{waits}"


async def inquire(processes: Sequence[WorkerProcess]) -> str:
    """Look at these workers; a sentence about each, who hangs before who waits for it. Ends within seconds."""
    findings = await asyncio.gather(*(_look_at(process) for process in processes))
    return "; ".join(map(str, sorted(findings, key=_place)))


def _place(found: Finding) -> tuple[bool, bool, int]:
    return bool(found.frames), found.waits_for_others, found.local_rank


async def _look_at(process: WorkerProcess) -> Finding:
    said = await _stacks(process)
    state, waits_in = _of_kernel(process.pid)
    return Finding(local_rank=process.local_rank, state=state, waits_in=waits_in, frames=frames_of(said))


async def _stacks(process: WorkerProcess) -> str:
    """What it writes into its log when it is asked for its stacks; empty if that is nothing."""
    before = process.log_path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, STACK_SIGNAL)
    size = before
    for _ in range(round(_ANSWER_S / _LOOK_S)):
        await asyncio.sleep(_LOOK_S)
        grown = process.log_path.stat().st_size
        if before < size == grown:
            break  # it has said all
        size = grown
    with process.log_path.open("rb") as log:
        log.seek(before)
        return log.read().decode("utf-8", "replace")


def frames_of(said: str) -> tuple[tuple[str, int, str], ...]:
    """File, line and function of the main thread's frames, the innermost first. faulthandler names that thread last."""
    thread = _THREAD.split(said)[-1]
    return tuple((match["path"], int(match["line"]), match["name"]) for match in _FRAME.finditer(thread))


def _of_kernel(pid: int) -> tuple[str, str]:
    """How the process is, in a word, and the kernel's function that it waits in."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "in a state that this system does not tell", ""
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        waits_in = ""
    return _STATES.get(letter, letter), "" if waits_in == "0" else waits_in
