# SPDX-License-Identifier: Apache-2.0
"""All peers of a lab: started, ordered about, shown, and gone in the end.

Rules: one event loop; an order is done at once, and what ends it later is a task of its own, which ends with the lab.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.trainer.control_groups import num_processors
from scripts.runlab.sites import Site
from scripts.wanlink.wan import Wan

ISTHMUS = str(Path(sys.executable).parent / "isthmus")
LOOK_S = 0.2
SHOW_S = 5.0
TICKET_S = 120.0
LEAVE_S = 60.0
_PORT = 7000
ORDERS = ("kill", "start", "freeze", "thaw", "cut", "heal", "leave")
"""What can be done to one peer; the first of a pair may be over by itself after some seconds."""


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
        self._undoing: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
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

    def end(self) -> None:
        """All leave; the second time all are killed."""
        if self._is_over.is_set():
            for site in self.sites:
                site.kill()
        self._is_over.set()

    async def _wait_for_ticket(self) -> None:
        deadline = time.monotonic() + TICKET_S
        founder = self.sites[0]
        while not self._ticket.exists() and not self._is_over.is_set():
            if not founder.is_running or time.monotonic() > deadline:
                founder.kill()
                assert founder.process is not None
                raise OrderError(f"the founder did not come up:\n{founder.process.words()}")
            await asyncio.sleep(LOOK_S)

    async def _close(self) -> int:
        for task in self._undoing:
            task.cancel()
        await asyncio.gather(*self._undoing, return_exceptions=True)
        running = [site for site in self.sites if site.is_running]
        for site in reversed(running):  # the founder last: it coordinates until the others have left
            site.thaw()
            site.signal(signal.SIGINT)
        await self._until_gone(running)
        for site in running:
            if site.is_running:
                self._say(f"{site.name} has not left within {LEAVE_S:g} s, and is killed")
                site.kill()
        self._tell_news()
        codes = [site.process.popen.returncode for site in self.sites if site.process is not None]
        return int(any(code not in (0, 20, -signal.SIGKILL) for code in codes))

    async def _until_gone(self, sites: Sequence[Site]) -> None:
        deadline = time.monotonic() + LEAVE_S
        while any(site.is_running for site in sites) and time.monotonic() < deadline:
            self._tell_news()
            await asyncio.sleep(LOOK_S)

    # -------------------------------------------------------------------------------- peers

    @property
    def _ticket(self) -> Path:
        return self.folder / "ticket"

    def console(self, number: int) -> Path:
        """What this peer has printed, in all its starts."""
        return self.folder / f"console-{number}.txt"

    def _new_site(self) -> Site:
        number = len(self.sites)
        site = Site(
            number=number,
            place=self._places[number] if self._places else "",
            folder=self.folder / str(number),
            console=self.console(number),
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
            self.end()
            return "all leave"
        if what == "add":
            return self._add()
        site = self._site(number)
        if what != "start" and not site.is_running:
            raise OrderError(f"{site.name} does not run; `start {site.number}` starts it")
        return getattr(self, f"_{what}")(site, seconds)  # type: ignore[no-any-return]

    def _site(self, number: int | None) -> Site:
        if number is None or not 0 <= number < len(self.sites):
            raise OrderError(f"there is no peer {number}; there are 0 to {len(self.sites) - 1}")
        return self.sites[number]

    def _add(self) -> str:
        if self._places and len(self.sites) >= len(self._places):
            raise OrderError(f"the emulated network has room for {len(self._places)} peers, and they are there")
        site = self._new_site()
        site.start()
        return f"{site.name} joins"

    def _kill(self, site: Site, _: float | None) -> str:
        site.kill()
        return f"{site.name} is killed; `start {site.number}` starts it again"

    def _start(self, site: Site, _: float | None) -> str:
        if site.is_running:
            raise OrderError(f"{site.name} runs already")
        site.start()
        return f"{site.name} is started again, in its own folder"

    def _leave(self, site: Site, _: float | None) -> str:
        site.signal(signal.SIGINT)
        return f"{site.name} is asked to leave"

    def _freeze(self, site: Site, seconds: float | None) -> str:
        site.freeze()
        return f"{site.name} is frozen" + self._undo(seconds, site.thaw, f"{site.name} goes on", f"thaw {site.number}")

    def _thaw(self, site: Site, _: float | None) -> str:
        site.thaw()
        return f"{site.name} goes on"

    def _cut(self, site: Site, seconds: float | None) -> str:
        self._join_or_cut(site, is_cut=True)
        undo = self._undo(
            seconds,
            lambda: self._join_or_cut(site, is_cut=False),
            f"{site.name} has its network again",
            f"heal {site.number}",
        )
        return f"{site.name} is cut off from all others{undo}"

    def _heal(self, site: Site, _: float | None) -> str:
        self._join_or_cut(site, is_cut=False)
        return f"{site.name} has its network again"

    def _join_or_cut(self, site: Site, *, is_cut: bool) -> None:
        if self._wan is None:
            raise OrderError("there is no network to cut: begin the lab with --wan, as root")
        if is_cut:
            self._wan.cut(site.number, "*", both=True)
        else:
            self._wan.heal(site.number, "*", both=True)
        site.is_cut = is_cut

    def _undo(self, seconds: float | None, undo: Callable[[], None], words: str, command: str) -> str:
        if seconds is None:
            return f"; `{command}` ends that"

        async def later() -> None:
            await asyncio.sleep(seconds)
            undo()
            self._say(words)

        task = asyncio.ensure_future(later())
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        return f" for {seconds:g} s"

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
