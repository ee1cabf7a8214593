# SPDX-License-Identifier: Apache-2.0
"""What can be seen of the processes from outside, as it happens: logs as they grow, ends, answers, health.

The pulse, twenty times a second, reads the logs on, notices ends, and keeps the account of when enough of the run was
healthy to commit.

Rules: what is known comes from logs, /proc and exit codes, never from inside the processes. Every wait has a limit.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from isthmus.trainer.errors import NobodyReachable
from isthmus.trainer.record.event_log import FILE_NAME, EventReader
from isthmus.trainer.run.control_socket import ControlClient
from scripts.chaoslab.evidence import COORDINATOR, End, Log, Wait, now_s, wall_s
from scripts.chaoslab.process import NOBODY_REACHABLE, Process, is_alive

PULSE_S = 0.05
START_LIMIT_S = 90.0
"""From the command to membership: two imports of torch on a busy machine, a snapshot, and a commit boundary."""
STATUS_LIMIT_S = 5.0
"""`ControlClient` waits no longer."""
WORKERS_GONE_LIMIT_S = 15.0
"""The kernel ends them with their daemon; one that is still importing torch asks for that, and looks, afterwards."""
_ASK_EVERY_S = 1.0


class Stuck(Exception):
    """The run does not do what all else rests on."""


class Watch:
    """Sees the processes of all sites.

    Args:
        num_peers: sites beside the coordinator's.
        min_peers: how many members a commit needs.
    """

    def __init__(self, num_peers: int, min_peers: int) -> None:
        self.peers = range(1, num_peers + 1)
        self.processes: dict[int, Process] = {}
        """The newest of each site."""
        self.copied: list[Process] = []
        """Those before, of a site whose folder was copied: they run until they hear of the copy."""
        self.ailing: dict[int, set[str]] = defaultdict(set)
        """What is being done to a site now."""
        self.held: set[int] = set()
        """Sites whose processes a fault starts again itself."""
        self.outer_step = 0
        """The newest that a peer has committed."""
        self.logs: dict[Path, Log] = {}
        self.waits: list[Wait] = []
        self.ends: list[End] = []
        self.able: list[tuple[float, bool]] = []
        self._min_peers = min_peers
        self._uncoordinated_at_s = now_s()
        self._readers: dict[Path, EventReader] = {}
        self._orphans: list[tuple[int, float, list[int]]] = []

    def follow(self, process: Process) -> None:
        """It is the site's process now. Of what it has written nothing has been read yet."""
        folder = process.folder
        self.processes[process.site] = process
        self.logs.setdefault(folder, Log(process.site, f"{folder.parent.name}/{folder.name}"))
        self._readers.setdefault(folder, EventReader(folder / FILE_NAME))

    def skip(self, folder: Path) -> None:
        """What is in this folder's log was copied: it happened elsewhere."""
        self._readers[folder] = EventReader(folder / FILE_NAME)
        list(self._readers[folder].new())

    def pulse(self) -> None:
        """Look at everything once."""
        for process in (*self.copied, *self.processes.values()):
            self._read_on(process)
            if not process.has_ended and not process.is_running:
                self._note_end(process)
        self.copied = [process for process in self.copied if not process.has_ended]
        if not self.is_coordinated():
            self._uncoordinated_at_s = now_s()
        self._orphans = [orphans for orphans in self._orphans if not self._are_buried(*orphans)]
        is_able = self.is_coordinated() and len(self.healthy()) >= self._min_peers
        if not self.able or self.able[-1][1] != is_able:
            self.able.append((now_s(), is_able))

    def _read_on(self, process: Process) -> None:
        for event in self._readers[process.folder].new():
            self.logs[process.folder].events.append(event)
            match event["event"]:
                case "started":
                    process.is_listening = True
                    process.is_up = process.is_up or process.site == COORDINATOR
                case "join":
                    process.is_up = True
                case "commit":
                    process.outer_step = event["outer_step"]
                    self.outer_step = max(self.outer_step, event["outer_step"])
                case _:
                    pass

    def mourn(self, site: int, workers: list[int]) -> None:
        """The site's process was killed now: its workers have to follow."""
        self._orphans.append((site, now_s(), workers))

    def _are_buried(self, site: int, since_s: float, workers: list[int]) -> bool:
        is_over = not any(map(is_alive, workers)) or now_s() - since_s > WORKERS_GONE_LIMIT_S + 2.0
        if is_over:
            self.note("workers follow their daemon", site, since_s, WORKERS_GONE_LIMIT_S)
        return is_over

    def _note_end(self, process: Process) -> None:
        process.has_ended = True
        if not process.is_listening and self._uncoordinated_at_s >= process.began_s:
            # Who finds nobody to ask for the run's terms says so after some seconds; its supervisor tries again.
            process.expected.add(NOBODY_REACHABLE)
        code, expected = process.popen.returncode, frozenset(process.expected)
        words = "" if code in expected else process.words()
        self.ends.append(End(site=process.site, at_s=now_s(), code=code, expected=expected, words=words))

    # -------------------------------------------------------------------------------- what is so

    def is_coordinated(self) -> bool:
        """Whether there is a coordinator, and nothing is being done to it."""
        return self._is_well(COORDINATOR)

    def healthy(self) -> list[int]:
        """Peers that are there and to whom nothing is being done."""
        return [site for site in self.peers if self._is_well(site)]

    def active(self) -> list[int]:
        """Healthy peers that have the newest commit, or the one before."""
        return [site for site in self.healthy() if self.processes[site].outer_step >= self.outer_step - 1]

    def _is_well(self, site: int) -> bool:
        process = self.processes.get(site)
        is_there = process is not None and process.is_running and process.is_up
        return is_there and site not in self.held and not self.ailing[site]

    def times(self, process: Process, name: str) -> list[float]:
        """When this start of a process wrote such events."""
        times = [wall_s(event) for event in self.logs[process.folder].named(name)]
        return [at_s for at_s in times if at_s >= process.began_s]

    def unexpected(self) -> list[End]:
        """Processes that have ended though nobody wanted that."""
        return [end for end in self.ends if end.code not in end.expected]

    # -------------------------------------------------------------------------------- waiting

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for it at most so long; returns whether it is so."""
        deadline = now_s() + limit_s
        while not condition() and now_s() < deadline:  # noqa: ASYNC110 - what is looked at is other processes
            await asyncio.sleep(PULSE_S / 2)
        return condition()

    async def require(self, what: str, condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        """Wait for what must come.

        Raises:
            Stuck: it does not, or a process has ended meanwhile.
        """
        if not await self.until(lambda: condition() or bool(self.unexpected()), limit_s) or self.unexpected():
            words = [end.words for end in self.unexpected()] or [process.words() for process in self.processes.values()]
            raise Stuck("\n".join([f"no {what} within {limit_s:g} s", *words]))

    def note(self, what: str, site: int, at_s: float, limit_s: float) -> None:
        """An operation that began at `at_s` ends now, or is not waited for any longer."""
        self.waits.append(Wait(what=what, site=site, at_s=at_s, seconds=now_s() - at_s, limit_s=limit_s))

    async def ask_around(self) -> None:
        """Ask one healthy peer after the other for its status, for ever."""
        while True:
            for site in self.healthy():
                process, at_s = self.processes[site], now_s()
                with contextlib.suppress(NobodyReachable):  # the wait tells that it took too long
                    await asyncio.to_thread(_ask, process.folder)
                if process.is_running and process is self.processes[site] and not self.ailing[site]:
                    self.note("answer to `isthmus status`", site, at_s, STATUS_LIMIT_S)
                await asyncio.sleep(_ASK_EVERY_S)
            await asyncio.sleep(_ASK_EVERY_S)


def _ask(folder: Path) -> None:
    ControlClient(folder, timeout_s=STATUS_LIMIT_S + 1.0).status()
