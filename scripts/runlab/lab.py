# SPDX-License-Identifier: Apache-2.0
"""All peers of a lab: started, ordered about, shown, and gone in the end.

Rules: one event loop; an order is done at once, and what ends it later is a task of its own, which ends with the lab.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.trainer.control_groups import num_processors
from scripts.chaoslab.process import KILLED, LEFT
from scripts.runlab.sites import Site
from scripts.wanlink.wan import Wan

ISTHMUS = str(Path(sys.executable).parent / "isthmus")
LOOK_S = 0.2
SHOW_S = 5.0
TICKET_S = 120.0
LEAVE_S = 60.0
_PORT = 7000
_IN_ORDER = (0, LEFT, KILLED)
ORDERS = ("kill", "start", "freeze", "thaw", "cut", "heal", "leave")
"""What can be done to one peer. A freeze and a cut may be over by themselves after some seconds."""


class OrderError(Exception):
    """An order that makes no sense; the message says why and what to do."""


class Lab:
    """See the module.

    Args:
        folder: everything that is kept; exists, and is empty.
        num_peers: that are started at once.
        flags: of `isthmus up`, beside ours.
        wan: the emulated network; None: the peers share this machine's loopback.
        places: where it has each peer that there may be.
        say: takes a line for people.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_peers: int,
        flags: Sequence[str],
        wan: Wan | None,
        places: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self._flags, self._wan, self._places, self._say = folder, flags, wan, places, say
        self._num_peers = num_peers
        self.sites: list[Site] = []
        self._ending: dict[tuple[str, int], asyncio.Task[None]] = {}  # what ends a cut or a freeze later
        self._is_over = asyncio.Event()
        self.was_forced = False
        self._began = time.monotonic()

    # -------------------------------------------------------------------------------- from start to end

    async def run(self) -> int:
        """Until all peers have ended, or `end`; returns 1 if one ended with an error that nobody has ordered."""
        try:
            return await self._run()
        finally:
            for site in self.sites:
                site.kill()

    async def _run(self) -> int:
        self._new_site().start()
        await self._wait_for_ticket()
        for _ in range(1, 1 if self._is_over.is_set() else self._num_peers):
            self._new_site().start()
        shown_at = time.monotonic()
        while self._has_peers() and not self._is_over.is_set():
            self._tell_news()
            if time.monotonic() - shown_at >= SHOW_S:
                shown_at = time.monotonic()
                self._say(self.line())
            await asyncio.sleep(LOOK_S)
        self._tell_news()
        return await self._close()

    def _has_peers(self) -> bool:
        """Whether some run, or all were killed by an order and may be started again."""
        return any(site.is_running for site in self.sites) or all(site.was_killed for site in self.sites)

    def end(self) -> str:
        """All leave; the second time all are killed. Returns which, for people."""
        if self._is_over.is_set():
            self.was_forced = True
            for site in self.sites:
                site.kill()
            return "all are killed"
        self._is_over.set()
        return "all leave; once more to kill them"

    async def _wait_for_ticket(self) -> None:
        deadline = time.monotonic() + TICKET_S
        founder = self.sites[0]
        while not self._ticket.exists() and not self._is_over.is_set():
            if not founder.is_running or time.monotonic() > deadline:
                assert founder.process is not None
                words = founder.process.words() or "it has said nothing"
                raise OrderError(f"the founder has ended with {founder.process.popen.poll()}:\n{words}")
            await asyncio.sleep(LOOK_S)

    async def _close(self) -> int:
        for what, number in list(self._ending):
            self._forget_end(what, self.sites[number])
        has_failed = any(site.code not in _IN_ORDER for site in self.sites if not site.is_running)
        running = [site for site in self.sites if site.is_running]
        for site in reversed(running):  # the founder last: it coordinates until the others have left
            site.thaw()
            if not site.is_leaving:  # a second interrupt would stop it at once
                site.leave()
        await self._until_gone(running)
        for site in running:
            if site.is_running:
                self._say(f"{site.name} has not left within {LEAVE_S:g} s, and is killed")
                site.kill()
        self._tell_news()
        return int(has_failed)

    async def _until_gone(self, sites: Sequence[Site]) -> None:
        deadline = time.monotonic() + LEAVE_S
        while any(site.is_running for site in sites) and time.monotonic() < deadline:
            self._tell_news()
            await asyncio.sleep(LOOK_S)

    # -------------------------------------------------------------------------------- peers

    @property
    def _ticket(self) -> Path:
        return self.folder / "ticket"

    def _new_site(self) -> Site:
        number = len(self.sites)
        site = Site(
            number=number,
            place=self._places[number] if self._places else "",
            folder=self.folder / str(number),
            console=self.folder / f"console-{number}.txt",
            command=lambda: self._command(number),
            environment=dict(os.environ),
        )
        self.sites.append(site)
        return site

    def _command(self, number: int) -> list[str]:
        address = "127.0.0.1:0" if self._wan is None else f"{self._wan.address(number)}:{_PORT}"
        threads = str(max(1, num_processors() // self._num_peers))  # machines of their own do not see each other
        own = ["--dir", str(self.folder / str(number)), "--listen", address, "--node.threads", threads]
        role = ["up", "--ticket-file", str(self._ticket), "--peers", str(self._num_peers), *own, *self._flags]
        command = [ISTHMUS, *(role if number == 0 else ["join", f"@{self._ticket}", *own])]
        return command if self._wan is None else self._wan.command(number, command)

    # -------------------------------------------------------------------------------- orders

    def order(self, what: str, number: int | None, seconds: float | None) -> str:
        """Do it; returns what has been done, for people.

        Raises:
            OrderError: it cannot be done.
        """
        if what == "status":
            return self.table()
        if what == "down":
            said = self.end()
        elif what == "add":
            said = self._add()
        else:
            said = self._order(what, self._site(number), seconds)
        self._say(said)
        return said

    def _order(self, what: str, site: Site, seconds: float | None) -> str:
        if what not in ORDERS:
            raise OrderError(f"no such order: {what}")
        if what != "start" and not site.is_running:
            raise OrderError(f"{site.name} does not run; `start {site.number}` starts it")
        if what == "freeze":
            return self._freeze(site, seconds)
        if what == "cut":
            return self._cut(site, seconds)
        at_once = {
            "kill": self._kill,
            "start": self._start,
            "thaw": self._thaw,
            "heal": self._heal,
            "leave": self._leave,
        }
        return at_once[what](site)

    def _site(self, number: int | None) -> Site:
        if number is None or not 0 <= number < len(self.sites):
            raise OrderError(f"there is no peer {number}; there are 0 to {len(self.sites) - 1}")
        return self.sites[number]

    def _add(self) -> str:
        if self._places and len(self.sites) >= len(self._places):
            raise OrderError(
                f"the emulated network has room for {len(self._places)} peers, which are there: begin with more --peers"
            )
        site = self._new_site()
        site.start()
        return f"{site.name} joins"

    def _kill(self, site: Site) -> str:
        self._forget_end("freeze", site)
        site.kill()
        return f"{site.name} is killed; `start {site.number}` starts it again"

    def _start(self, site: Site) -> str:
        if site.is_running:
            raise OrderError(f"{site.name} runs already")
        site.start()
        return f"{site.name} is started again, in its own folder"

    def _leave(self, site: Site) -> str:
        if site.is_frozen:
            raise OrderError(f"{site.name} is frozen; `thaw {site.number}` first")
        if site.is_leaving:
            raise OrderError(f"{site.name} is leaving already; `kill {site.number}` ends it at once")
        site.leave()
        return f"{site.name} is asked to leave"

    def _freeze(self, site: Site, seconds: float | None) -> str:
        site.freeze()
        return f"{site.name} is frozen{self._lasting(seconds, 'freeze', site, 'thaw')}"

    def _thaw(self, site: Site) -> str:
        if not site.is_frozen:
            raise OrderError(f"{site.name} is not frozen")
        self._forget_end("freeze", site)
        site.thaw()
        return f"{site.name} goes on"

    def _cut(self, site: Site, seconds: float | None) -> str:
        self._emulated.cut(site.number, "*", both=True)
        site.is_cut = True
        return f"{site.name} is cut off from all others{self._lasting(seconds, 'cut', site, 'heal')}"

    def _heal(self, site: Site) -> str:
        if not site.is_cut:
            raise OrderError(f"{site.name} is not cut off")
        self._forget_end("cut", site)
        self._emulated.heal(site.number, "*", both=True)
        site.is_cut = False
        return f"{site.name} has its network again"

    @property
    def _emulated(self) -> Wan:
        if self._wan is None:
            raise OrderError("there is no network to cut: begin the lab with --wan, as root")
        return self._wan

    def _lasting(self, seconds: float | None, what: str, site: Site, end: str) -> str:
        """For so long it is so, unless another order comes; None: until it is ended."""
        self._forget_end(what, site)
        if seconds is None:
            return f"; `{end} {site.number}` ends that"

        async def later() -> None:
            await asyncio.sleep(seconds)
            self._say(self._order(end, site, None))

        self._ending[what, site.number] = asyncio.ensure_future(later())
        return f" for {seconds:g} s"

    def _forget_end(self, what: str, site: Site) -> None:
        task = self._ending.pop((what, site.number), None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # -------------------------------------------------------------------------------- what is shown

    def line(self) -> str:
        """How the run is doing."""
        newest = max(self.sites, key=lambda site: (site.is_running and site.is_heard, site.outer_step))
        members = newest.num_members if newest.is_running else 0
        loss = "-" if newest.loss is None else f"{newest.loss:.4f}"
        tokens = sum(site.num_tokens for site in self.sites)
        seconds = time.monotonic() - self._began
        return f"outer step {newest.outer_step}  members {members}  loss {loss}  tokens {tokens:,} in {seconds:.0f} s"

    def table(self) -> str:
        """Each peer."""
        rows = [f"{'peer':<14} {'is':<18} {'outer step':>10} {'loss':>8}  folder"]
        for site in self.sites:
            loss = "-" if site.loss is None else f"{site.loss:.4f}"
            rows.append(f"{site.name:<14} {site.standing:<18} {site.outer_step:>10} {loss:>8}  {site.folder}")
        return "\n".join([*rows, self.line()])

    def _tell_news(self) -> None:
        for site in self.sites:
            for line in site.news():
                self._say(line)
