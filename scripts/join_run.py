# SPDX-License-Identifier: Apache-2.0
"""The processes of `scripts/bench join`, and what they say.

Rules: whatever is waited for has a deadline; a peer that ends by itself ends the run.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.wanlink.scenario import Scenario, Step
from scripts.wanlink.wan import Wan

PEER = Path(__file__).resolve().parent / "join_peer.py"
QUEUE_MS = 64.0
Row = dict[str, Any]


class Process:
    """One peer, and what it has said."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, changed: asyncio.Condition) -> None:
        self.number = number
        self.started = time.monotonic()
        self.process = process
        self.said: list[Row] = []
        self.is_killed = False
        self._changed = changed

    async def listen(self) -> None:
        """Take its words until it ends; it must not end by itself."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said.append(json.loads(line))
            async with self._changed:
                self._changed.notify_all()
        code = await self.process.wait()
        if not self.is_killed:
            raise RuntimeError(f"peer {self.number} has ended with {code}")

    def kill(self) -> None:
        """SIGKILL."""
        self.is_killed = True
        self.process.kill()

    def of(self, event: str) -> list[Row]:
        return [row for row in self.said if row["event"] == event]

    def has_said(self, event: str) -> bool:
        return bool(self.of(event))

    @property
    def step(self) -> int:
        return max((row["outer_step"] for row in self.of("committed")), default=0)


class Run:
    """The processes of one measurement.

    Args:
        settings: of all peers; see join_peer.Peer.
        wan: the network; None for loopback.
        folder: of the journal.
        deadline_s: for anything that is waited for.
    """

    def __init__(self, settings: Row, wan: Wan | None, folder: Path, *, deadline_s: float) -> None:
        self.wan, self.folder = wan, folder
        self._settings, self._deadline_s = settings, deadline_s
        self.processes: list[Process] = []
        self._changed = asyncio.Condition()
        self._listening: list[asyncio.Task[None]] = []

    async def start(self, tasks: asyncio.TaskGroup) -> Process:
        """The next peer."""
        number = len(self.processes)
        config = {
            "number": number,
            "host": "127.0.0.1" if self.wan is None else self.wan.address(number),
            "coordinator": self.processes[0].of("listening")[0]["address"] if number else None,
            **self._settings,
            "journal": str(self.folder / "journal.sqlite"),
            "heartbeat_timeout_s": 2.0,
        }
        argv = [sys.executable, str(PEER), json.dumps(config)]
        if self.wan is not None:
            argv = self.wan.command(number, argv)
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        self.processes.append(Process(number, process, self._changed))
        self._listening.append(tasks.create_task(self.processes[-1].listen()))
        return self.processes[-1]

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            said = "\n".join(f"peer {process.number}: {process.said[-5:]}" for process in self.processes)
            raise RuntimeError(f"no {what} within {self._deadline_s:.0f} s\n{said}") from None

    async def until_step(self, step: int, processes: Sequence[Process]) -> None:
        await self.until(f"outer step {step}", lambda: all(process.step >= step for process in processes))

    async def end(self) -> None:
        for task in self._listening:
            task.cancel()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.process.kill()
            await process.process.wait()


def tell(rows: list[Row], path: Path | None) -> None:
    """Write all figures of a benchmark, where that is asked for (`--json`)."""
    if path is not None:
        path.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))


@contextlib.asynccontextmanager
async def network(mbit: float | None, delay_ms: float, num_peers: int) -> AsyncIterator[Wan | None]:
    if mbit is None:
        yield None
        return
    port = {"up_mbit": mbit, "down_mbit": mbit, "queue_ms": QUEUE_MS}
    start = Step(links={"*": {"delay_ms": delay_ms}}, ports={"*": port})
    with Wan(scenario=Scenario(peers=num_peers, seed=1, start=start)) as wan:
        yield wan
