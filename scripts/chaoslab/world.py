# SPDX-License-Identifier: Apache-2.0
"""A coordinator and its peers as processes of this machine: started, killed, and surely gone afterwards.

Every site has one process at a time, in a folder of its own: the one before's, or a fresh one, as a peer that nobody
knows. A process that ends though nobody has asked it to is started again, as a supervisor would.
"""

import asyncio
import os
import shutil
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from scripts.chaoslab import host, roles
from scripts.chaoslab.evidence import COORDINATOR, JOURNAL_NAME, End, Evidence, Glimpse, glimpse, now_s, read_journal
from scripts.chaoslab.host import Network
from scripts.chaoslab.process import KILLED, LEFT, Process, children, is_alive, kill_all, pids, read_of
from scripts.chaoslab.watch import PULSE_S, START_LIMIT_S, WORKERS_GONE_LIMIT_S, Watch

ROOT = Path(__file__).resolve().parents[2]
ISTHMUS = str(Path(sys.executable).parent / "isthmus")
LEAVE_LIMIT_S = 30.0
"""10 s until the coordinator's goodbye (`MemberConfig.farewell_timeout_s`), 20 s for the inner step under way."""
MIN_PEERS = 2
_STARTING_AT_ONCE = 2
_MARK = "CHAOS_MARK"


class Tell(Protocol):
    """Takes a line for people, about what happened now or at `at_s`."""

    def __call__(self, line: str, *, at_s: float | None = None) -> None: ...


class World(Watch):
    """See the module. Used within `host.open_network`.

    Args:
        folder: for everything that is kept.
        sockets: a short path; for sockets and crash reports.
        num_peers: sites beside the coordinator's.
        network: where they listen.
        has_disks: each site has a file system of its own.
        tell: takes a line for people.
    """

    def __init__(
        self,
        folder: Path,
        sockets: Path,
        *,
        num_peers: int,
        network: Network,
        has_disks: bool,
        tell: Tell,
    ) -> None:
        super().__init__(num_peers, min(MIN_PEERS, num_peers))
        self.folder = folder
        self.network = network
        self.glimpses: list[Glimpse] = []
        self.num_starts = 0
        self.tell = tell
        self._sockets = sockets
        self._has_disks = has_disks
        self._num_folders: dict[int, int] = defaultdict(int)
        self._mark = uuid.uuid4().hex
        own = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS__")}
        self._environment = own | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(sockets),
            _MARK: self._mark,
        }

    # -------------------------------------------------------------------------------- begin and end

    async def open(self) -> None:
        """Start everything; returns when all peers are members. The pulse must beat already.

        Raises:
            Stuck: they are not.
        """
        roles.write_settings(self.folder, "".join(path.read_text() for path in sorted(ROOT.glob("*.md"))))
        for site in self._sites():
            if self._has_disks:
                host.mount_disk(self.disk(site))
            else:
                self.disk(site).mkdir()
        self.start(COORDINATOR)
        await self.require("ticket", roles.ticket(self.folder).exists)
        for site in self.peers:
            await self.require("start", self.may_start)
            self.start(site)
        await self.require("membership of all peers", lambda: all(self.processes[site].is_up for site in self.peers))

    def close(self) -> list[str]:
        """Kill what is left; returns what should not have been there."""
        for process in (*self.copied, *self.processes.values()):
            if process.is_running:
                process.kill()
        deadline = now_s() + WORKERS_GONE_LIMIT_S
        while (survivors := self._marked()) and now_s() < deadline:
            time.sleep(PULSE_S)
        wrong = [f"a process outlived its daemon: {read_of(pid, 'cmdline')[:200]!r}" for pid in survivors]
        kill_all(survivors)
        self.pulse()
        wrong += [f"a crash report:\n{path.read_text()}" for path in self._sockets.glob("isthmus-crash-*")]
        return wrong

    def keep_disks(self) -> None:
        """Copy what is on the sites' disks, which end with this process, to where it stays."""
        for site in self._sites() if self._has_disks else ():
            kept = self.folder / f"kept-{site}"
            host.free_disk(self.disk(site))
            shutil.copytree(self.disk(site), kept)
            host.unmount_disk(self.disk(site))
            self.disk(site).rmdir()
            kept.rename(self.disk(site))

    async def leave_all(self) -> None:
        """Let the peers leave in order, then the coordinator."""
        self.held |= set(self._sites())
        async with asyncio.TaskGroup() as tasks:
            for site in self.peers:
                if self.processes[site].is_running:
                    tasks.create_task(self.leave(site))
        if self.processes[COORDINATOR].is_running:
            await self.leave(COORDINATOR)

    def evidence(self, *, began_s: float, calm_until_s: float, ended_s: float) -> Evidence:
        """What the world knows, after `close`.

        Raises:
            JournalCorrupted: the journal is damaged.
        """
        records, checksums = read_journal(self.processes[COORDINATOR].folder)
        return Evidence(
            began_s=began_s,
            calm_until_s=calm_until_s,
            ended_s=ended_s,
            records=records,
            checksums=checksums,
            glimpses=self.glimpses,
            logs=list(self.logs.values()),
            waits=self.waits,
            ends=self.ends,
            able=self.able,
            num_starts=self.num_starts,
        )

    # -------------------------------------------------------------------------------- processes

    def start(
        self, site: int, *, fresh: bool = False, flags: Sequence[str] = (), program: Sequence[str] = (ISTHMUS,)
    ) -> Process:
        """Start the site's process: in the folder of the one before, or in a fresh one; `flags` beside ours."""
        self.pulse()  # what the one before has written is not this one's
        if fresh or not self._num_folders[site]:
            self._num_folders[site] += 1
        folder = self._newest_folder(site)
        role = roles.role(site, self.folder, num_peers=len(self.peers), min_peers=self._min_peers)
        place = ["--listen", self.network.listen(site), "--dir", str(folder)]
        command = self.network.command(site, [*program, *role, *place, *flags])
        process = Process.start(site, command, folder, self.folder / f"console-{site}.txt", self._environment)
        self.follow(process)
        self.num_starts += 1
        return process

    def copy(self, site: int) -> Process:
        """Start the site's process once more, from a copy of its folder; returns the older one, which runs on."""
        older, folder = self.processes[site], self._newest_folder(site)
        self._num_folders[site] += 1
        host.copy_folder(folder, self._newest_folder(site))
        self.skip(self._newest_folder(site))
        self.copied.append(older)
        self.start(site)
        return older

    def _newest_folder(self, site: int) -> Path:
        return self.disk(site) / str(self._num_folders[site])

    def kill(self, site: int) -> float:
        """SIGKILL the site's process; returns when."""
        at_s = now_s()
        process = self.processes[site]
        self.mourn(site, process.kill())
        if site == COORDINATOR:
            self.look_into_journal()
        self.pulse()
        return at_s

    def cut_power(self) -> tuple[float, float]:
        """SIGKILL all processes and their workers at once; returns when, and how long that took."""
        running = [process for process in self.processes.values() if process.is_running]
        workers = {process.site: children(process.popen.pid) for process in running}  # a look that takes long
        for process in running:
            process.expected.add(KILLED)
        at_s = now_s()
        kill_all([pid for process in running for pid in (*workers[process.site], process.popen.pid)])
        took_s = now_s() - at_s
        for process in running:
            process.popen.wait()
            self.mourn(process.site, workers[process.site])
        self.look_into_journal()
        self.pulse()
        return at_s, took_s

    def look_into_journal(self) -> None:
        """Note how far it is, now that nobody has it open."""
        folder = self.processes[COORDINATOR].folder
        if (folder / JOURNAL_NAME).exists():
            self.glimpses.append(glimpse(folder))

    async def leave(self, site: int, *, by_command: bool = False) -> None:
        """Ask the site's process to leave in order, by a signal or by `isthmus leave`, and wait until it has."""
        process, at_s = self.processes[site], now_s()
        if by_command:
            await self._command_to_leave(process)
        else:
            process.interrupt()
        await self.until(lambda: not process.is_running, LEAVE_LIMIT_S + 2.0)
        self.note("leave in order", site, at_s, LEAVE_LIMIT_S)
        if process.is_running:
            process.kill()
        self.pulse()

    async def _command_to_leave(self, process: Process) -> None:
        process.expected |= {LEFT, 0}
        asked = await asyncio.create_subprocess_exec(
            *(ISTHMUS, "leave", "--dir", str(process.folder)),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asked.communicate()
        code = asked.returncode if asked.returncode is not None else 0
        words = f"isthmus leave: {said.decode(errors='replace')}" if code else ""
        self.ends.append(End(site=process.site, at_s=now_s(), code=code, expected=frozenset({0}), words=words))

    async def join(self, site: int, *, fresh: bool) -> None:
        """Start the site's process and wait until it is what it was."""
        process = self.start(site, fresh=fresh)
        await self.until(lambda: process.is_up or not process.is_running, START_LIMIT_S + 2.0)
        if process.is_running:
            self.note("membership after a start", site, process.began_s, START_LIMIT_S)

    async def supervise(self) -> None:
        """The pulse, for ever; starts again what has ended by itself."""
        while True:
            self.pulse()
            for site, process in list(self.processes.items()):
                if process.has_ended and site not in self.held:
                    self.tell(f"{self.name(site)} ended by itself with {process.popen.returncode}: started again")
                    self.start(site)
            await asyncio.sleep(PULSE_S)

    def name(self, site: int) -> str:
        """For people."""
        return "coordinator" if site == COORDINATOR else f"peer {site}"

    def disk(self, site: int) -> Path:
        """Where the site keeps its folders."""
        return self.folder / f"site-{site}"

    # -------------------------------------------------------------------------------- inside

    def _sites(self) -> tuple[int, ...]:
        return (COORDINATOR, *self.peers)

    def may_start(self) -> bool:
        """Whether few enough processes import at this moment."""
        importing = [process for process in self.processes.values() if process.is_running and not process.is_listening]
        return len(importing) < _STARTING_AT_ONCE

    def _marked(self) -> list[int]:
        mark = f"{_MARK}={self._mark}".encode()
        return [pid for pid in pids() if mark in read_of(pid, "environ").split(b"\0") and is_alive(pid)]
