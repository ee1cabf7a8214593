# SPDX-License-Identifier: Apache-2.0
"""A loop of somebody's own in the place of workers: its processes started this daemon, and come to its socket.

They speak as workers do (ipc.py): whatever a `Step` asks for is done by the loop between two calls of its optimizer.
Rules: nothing here starts or kills them; when the loop is gone, so is this peer's part in the run, since nobody else
can train in its place; a daemon that lives on without it tells it so (`LoopEnd`). Must not know the loop's side
(trainer/attach/).
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from isthmus.trainer.errors import EnvironmentFault, ExitCode, IsthmusError
from isthmus.trainer.files import write_atomically
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.link import WorkerLink

FACTS_NAME: Final = "loop.json"
SOCKET_NAME: Final = "socket"
_END_NAME: Final = "end.json"

_LOOK_S = 0.5
_LINGER_S = 1.0


class LoopFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a loop says of itself before its daemon starts, in a folder that only this user can enter."""

    parameters: tuple[str, ...]
    """As `model.parameters` has them."""
    states: tuple[str, ...]
    """As `inner.states` has them."""
    num_processes: int
    """How many train together, each with its local rank."""
    pid: int
    """Of the one that starts the daemon."""
    tokens_per_sample: int
    """As `model.seq_len` has it."""
    mailbox_fd: int
    """Inherited: memory of all parameters, see `SharedBuffer`."""
    program: tuple[str, ...]
    """How it was started, word by word: what others type who start the same."""


class LoopEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a daemon says to its loop when it trains with it no more, and lives on for the other peers."""

    exit_code: int
    """The daemon will end with it."""
    cause: str
    """For people: what was wrong, and the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The loop that has started this process: its folder, and what it says of itself."""

    folder: Path
    facts: LoopFacts

    @property
    def is_alive(self) -> bool:
        """Whether its first process is."""
        return os.getppid() == self.facts.pid

    def give_up(self, end: LoopEnd) -> bool:
        """Tell it that nobody asks it for anything any more; in whatever step it stands, it looks once a second.

        Returns:
            Whether it is there to hear of it. If not, this process has nothing to live on for.
        """
        if not self.is_alive:
            return False
        try:
            write_atomically(self.folder / _END_NAME, msgspec.json.encode(end))
        except OSError:
            return False
        return True


class LoopGone(IsthmusError):
    """The loop has ended without its daemon."""

    exit_code = ExitCode.WORKER_CRASHED


def write_facts(folder: Path, facts: LoopFacts) -> None:
    """Before the daemon starts."""
    (folder / FACTS_NAME).write_bytes(msgspec.json.encode(facts))


def end_of(folder: Path) -> LoopEnd | None:
    """What the daemon of this folder has said to its loop for the end, if it has."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode((folder / _END_NAME).read_bytes(), type=LoopEnd)
    return None


def find_loop(folder: Path) -> Loop:
    """The loop that started this process.

    Raises:
        EnvironmentFault: there is none.
    """
    try:
        facts = msgspec.json.decode((folder / FACTS_NAME).read_bytes(), type=LoopFacts)
    except (OSError, msgspec.MsgspecError) as error:
        raise _no_loop(folder) from error
    loop = Loop(folder=folder, facts=facts)
    if not loop.is_alive:
        raise _no_loop(folder)
    return loop


def _no_loop(folder: Path) -> EnvironmentFault:
    return EnvironmentFault(
        f"no loop waits in {folder}", cure="call isthmus.attach in the training loop: it starts this command itself"
    )


class LoopCrew:
    """The processes of a loop, as `WorkerCrew` is those of workers.

    Args:
        loop: who they are.
        group: owns the tasks that listen and watch, until `close`.
    """

    pids: Sequence[int]

    def __init__(self, loop: Loop, group: asyncio.TaskGroup) -> None:
        facts = loop.facts
        self._group = group
        self._loop = loop
        self.link = WorkerLink(
            loop.folder / SOCKET_NAME,
            facts.num_processes,
            on_failure=lambda: None,
            explain=self._explain,
            linger_s=_LINGER_S,
        )
        self.pids = (facts.pid,)
        self.closed = asyncio.Event()
        """Set when nothing is left of it."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, timeout_s: float) -> tuple[ipc.Ready, ...]:
        """Wait until all processes are there; their reports by local rank.

        Raises:
            LoopGone: it has ended.
            WorkerStalled: not all came in time.
        """
        self._tasks += [self._group.create_task(self.link.run()), self._group.create_task(self._watch())]
        return await self.link.ready(timeout_s)

    async def stop(self, *, timeout_s: float) -> None:
        """Tell the loop that it is on its own from now on. Nobody waits for what it does then."""
        del timeout_s
        self.link.stop_workers()

    async def close(self) -> None:
        """Tidy up. May be called again."""
        for task in self._tasks:
            task.cancel()
        is_left = self._loop.is_alive
        self.link.close(at_once=not is_left)
        if not is_left:  # nobody is left who tidies up
            shutil.rmtree(self._loop.folder, ignore_errors=True)
        self.closed.set()

    async def _watch(self) -> None:
        while self._loop.is_alive:  # noqa: ASYNC110 - the kernel tells nobody of a parent's end
            await asyncio.sleep(_LOOK_S)
        self.link.fail(LoopGone("the training loop has ended, and its peer with it", cure="start the loop again"))

    async def _explain(self, local_ranks: Sequence[int]) -> str:
        who = ", ".join(map(str, local_ranks))
        return f"process {who} of the training loop has not called optimizer.step()"
