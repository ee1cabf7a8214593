# SPDX-License-Identifier: Apache-2.0
"""The peers' processes: started, signalled, cut off, listened to, and known to be alive or not.

Every peer is asked for a sign of life each second; one that leaves five of them unanswered is mute until it speaks
again. That is what the layer above the collective one has for a peer that froze before it posted an operation: to
the collective layer such a peer is still computing.

Rules: a peer's connection is its life. What a peer says goes to `on_word`, its end to `on_end`, in order.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from scripts.faults.attempts import Site
from scripts.faults.words import Beat, Cut, FromPeer, Heal, Here, Launch, Weigh, Weight, line

ROOT = Path(__file__).resolve().parents[2]
WORD_S = 30.0
"""For words that take no time, on a machine with other work on it."""
_BEAT_S = 1.0
_MOST_UNANSWERED = 5


class FaultBenchError(Exception):
    """The benchmark itself cannot go on."""


class Keeper:
    """See the module.

    Args:
        folder: for the socket.
        nbytes: of a step's tensor.
        deadline_s: of each operation.
        num_streams: connections of each pair.

    Attributes:
        sites: the latest start of each peer, by its number.
    """

    def __init__(self, folder: Path, *, nbytes: int, deadline_s: float, num_streams: int) -> None:
        self.sites: dict[int, Site] = {}
        self.nbytes = nbytes
        self.deadline_s = deadline_s
        self._num_streams = num_streams
        self._path = folder / "server"
        self._nursery: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Server | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._incarnations: Counter[int] = Counter()
        self._arrivals: dict[tuple[int, int], asyncio.Future[Site]] = {}
        self._decoder: msgspec.json.Decoder[FromPeer] = msgspec.json.Decoder(FromPeer)
        self._weights: dict[Site, Weight] = {}
        self._changed = asyncio.Event()

    async def open(self, *, namespaces: bool) -> None:
        """Start the nursery and listen."""
        command = [sys.executable, "-m", "scripts.faults.nursery", *(["--namespaces"] if namespaces else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._listening = await asyncio.start_unix_server(self._welcome, self._path)
        self._nursery = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, cwd=ROOT, env=environment
        )
        self._beat()

    async def close(self) -> None:
        """Kill all processes, and wait for their ends."""
        assert self._nursery is not None
        assert self._listening is not None
        assert self._beating is not None
        self._beating.cancel()
        for site in self.sites.values():
            if site.is_alive:
                self.kill(site)
        await self.until(lambda: not any(site.is_alive for site in self.sites.values()), WORD_S)
        self._nursery.kill()
        await self._nursery.wait()
        self._listening.close()
        await self._listening.wait_closed()

    def on_word(self, site: Site, word: FromPeer) -> None:
        """A peer said something."""
        raise NotImplementedError

    def on_end(self, site: Site) -> None:
        """A peer is gone."""
        raise NotImplementedError

    async def launch(self, number: int) -> Site:
        """Start this peer, as its next incarnation. It is a member from the next view on."""
        self._incarnations[number] += 1
        incarnation = self._incarnations[number]
        arrival: asyncio.Future[Site] = asyncio.get_running_loop().create_future()
        self._arrivals[number, incarnation] = arrival
        self._to_nursery(
            Launch(
                number=number,
                incarnation=incarnation,
                path=str(self._path),
                nbytes=self.nbytes,
                deadline_s=self.deadline_s,
                num_streams=self._num_streams,
            )
        )
        async with asyncio.timeout(WORD_S):
            return await arrival

    def living(self) -> list[Site]:
        """Who would be in a view made now, in the order of ranks."""
        return [site for _, site in sorted(self.sites.items()) if site.stays]

    def kill(self, site: Site) -> float:
        """SIGKILL; returns when."""
        site.may_die = True
        return _signal(site, signal.SIGKILL)

    def freeze(self, site: Site) -> float:
        """SIGSTOP; returns when."""
        site.is_frozen = True
        return _signal(site, signal.SIGSTOP)

    def thaw(self, site: Site) -> None:
        """SIGCONT: from now on it is expected to report what it owes."""
        site.is_frozen = False
        site.owed = dict.fromkeys(site.owed, time.monotonic())
        _signal(site, signal.SIGCONT)

    def cut(self, site: Site) -> float:
        """Take the network from a peer; returns when."""
        at = time.monotonic()
        self._to_nursery(Cut(number=site.number))
        return at

    def heal(self, site: Site) -> None:
        """Give it back."""
        self._to_nursery(Heal(number=site.number))

    async def weigh(self, site: Site) -> Weight:
        """What this peer's process holds."""
        self._weights.pop(site, None)
        site.tell(Weigh())
        if not await self.until(lambda: site in self._weights, WORD_S):
            raise FaultBenchError(f"{site} does not answer")
        return self._weights[site]

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for what peers say to make it true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    # -------------------------------------------------------------------------------- inside

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one peer until its end."""
        here = self._decoder.decode(await reader.readline())
        assert isinstance(here, Here)
        arrival = self._arrivals.pop((here.number, here.incarnation))
        if arrival.done():  # nobody waits for this start any more
            writer.close()
            return
        site = Site(here.number, here.incarnation, here.pid, here.address, writer)
        self.sites[site.number] = site
        arrival.set_result(site)
        with contextlib.suppress(ConnectionError):
            while received := await reader.readline():
                self._hear(site, self._decoder.decode(received))
                self._changed.set()
        site.is_alive = False
        site.ended_at = time.monotonic()
        self.on_end(site)
        self._changed.set()
        writer.close()

    def _hear(self, site: Site, word: FromPeer) -> None:
        site.unanswered = 0
        site.is_mute = False
        if isinstance(word, Weight):
            self._weights[site] = word
        elif not isinstance(word, Beat):
            self.on_word(site, word)

    def _beat(self) -> None:
        self._beating = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)
        for site in self.sites.values():
            site.unanswered += 1
            if site.unanswered > _MOST_UNANSWERED:
                site.is_mute = True
                self._changed.set()
            else:
                site.tell(Beat())

    def _to_nursery(self, word: msgspec.Struct) -> None:
        assert self._nursery is not None
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(line(word))


def _signal(site: Site, what: signal.Signals) -> float:
    at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(site.pid, what)
    return at
