# SPDX-License-Identifier: Apache-2.0
"""Getting the run's text from the peers, or a part of it: by a joiner that lacks it, before it is in the run, so that
nobody waits; and by a member, ahead of need.

Rules: the digest of the text is known before anybody is asked, so a description is checked against it, and every chunk
against the description, before anything is kept. Chunks are kept in their order, so a text that is not whole yet ends
where the next one belongs. One donor gives at a time, the one that answers first. If it fails, the next goes on from
there. When all have failed, it is asked anew who there is, until nothing has arrived for `patience_s`. Who finds all of
them busy with others waits for its turn, up to `QUEUE_S`.

Memory is bounded: one chunk. Nothing here knows a disk.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from isthmus.collective.core.types import Instant, Member, PeerId
from isthmus.collective.errors import CollectiveError, PeerUnreachable
from isthmus.collective.transport import Channel
from isthmus.collective.transport.racing import race
from isthmus.elastic.errors import DonorFault, DonorRefused, ManifestInvalid, NoText
from isthmus.elastic.learner.donor_link import DonorLink
from isthmus.elastic.state.wire import ChunkMap, Pace, TextOffer

_log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long nobody may have given anything to a joiner. A run that is starting has its first member within that."""
QUEUE_S = 3600.0
"""How long all who have the text may be busy with others."""
_HEAD_START_S = 0.5
"""Of each donor over the next: the nearest one gives, and a silent one costs this."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
"""Between two rounds of attempts in vain: each is twice as long as the one before."""


class Shelf(Protocol):
    """Where the text goes."""

    async def begin(self, offer: TextOffer) -> int:
        """How many chunks are there already, from the first one on; the next one is wanted.

        Called for every donor; the offers have the same manifest. What it raises ends the fetch.
        """
        ...

    async def put(self, index: int, data: memoryview) -> None:
        """Keep the next chunk; its memory is used again afterwards. What it raises ends the fetch."""
        ...


class _Ready(NamedTuple):
    link: DonorLink
    offer: TextOffer


class TextFetch:
    """One text on its way. `run` once.

    Args:
        digest: of the text; 32 bytes.
        shelf: where it goes.
        find: addresses where donors may be, the likeliest first; asked again when all have failed.
        dial: opens a STATE connection to an address, within its own deadline.
        advanced: told of every chunk that is kept: who gave it, bytes that are there now, bytes of the whole.
        clock: monotonic seconds.
        pace: deadlines; tightened by what was measured.
        patience_s: how long nobody may have given anything; 0: one round of attempts.
    """

    def __init__(
        self,
        digest: bytes,
        shelf: Shelf,
        *,
        find: Callable[[], Awaitable[Sequence[str]]],
        dial: Callable[[str], Awaitable[Channel]],
        advanced: Callable[[PeerId, int, int], None],
        clock: Callable[[], Instant],
        pace: Pace | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._digest = digest
        self._shelf = shelf
        self._find = find
        self._dial = dial
        self._told = advanced
        self._clock = clock
        self._pace = pace or Pace()
        self._patience_s = patience_s
        self._causes: dict[str, str] = {}
        self._givers: dict[PeerId, None] = {}
        self._moved_at = clock()
        self._is_queued = False
        self.fetched_nbytes = 0
        """Bytes of the chunks that were kept."""

    @property
    def givers(self) -> tuple[PeerId, ...]:
        """Who has given anything, in order."""
        return tuple(self._givers)

    async def run(self) -> None:
        """Fetch until the text is whole.

        Raises:
            NoText: nobody gives it. What has arrived is kept.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            self._is_queued, before_nbytes = False, self.fetched_nbytes
            rest = list(dict.fromkeys(await self._find()))
            while (ready := await self._first(rest)) is not None:
                if await self._pull(*ready):
                    return
                rest.remove(ready.link.member.address)
            if self._clock() - self._moved_at >= (QUEUE_S if self._is_queued else self._patience_s):
                raise NoText([f"{address} ({cause})" for address, cause in self._causes.items()])
            if self.fetched_nbytes > before_nbytes:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _first(self, addresses: list[str]) -> _Ready | None:
        """The donor that answers first; who fails is no longer in `addresses`."""
        causes: dict[str, CollectiveError] = {}
        found = await race(
            tuple(addresses),
            self._open,
            head_start_s=_HEAD_START_S,
            let_go=lambda ready: ready.link.close(),
            causes=causes,
        )
        for address, error in causes.items():
            self._drop(address, error)
            addresses.remove(address)
        return None if found is None else found[1]

    async def _open(self, address: str) -> _Ready:
        channel = await self._dial(address)
        ref = channel.hello.ref
        link = DonorLink(Member(ref.peer_id, ref.incarnation, address), channel, self._pace)
        is_ready = False
        try:
            offer = await link.text(self._digest)
            if offer.manifest.digest != self._digest:
                raise ManifestInvalid("it is of another text")
            is_ready = True
        except DonorFault as error:
            self._is_queued |= isinstance(error, DonorRefused) and error.is_busy
            raise PeerUnreachable(address, str(error)) from error
        finally:
            if not is_ready:
                link.close()
        return _Ready(link, offer)

    async def _pull(self, link: DonorLink, offer: TextOffer) -> bool:
        """Take the chunks that are missing from this donor, in their order. False if it failed before the last."""
        manifest, chunks = offer.manifest, ChunkMap(offer.manifest)
        memory = memoryview(bytearray(manifest.chunk_nbytes))
        try:
            begin = num_asked = await self._shelf.begin(offer)
            there_nbytes = sum(map(chunks.nbytes, range(begin)))
            # To look through what was there may have taken longer than any donor waits: that is nobody's fault.
            self._moved_at = began_at = self._clock()
            since_nbytes = self.fetched_nbytes
            for index in range(begin, len(chunks)):
                while num_asked < min(index + self._pace.window, len(chunks)):
                    await link.ask_chunk(num_asked)
                    num_asked += 1
                tensor, chunk = chunks.place(index)
                data = memory[: chunks.nbytes(index)]
                await link.take_chunk(index, data, manifest.tensors[tensor].chunk_digests[chunk])
                await self._shelf.put(index, data)
                self._givers[link.member.peer_id] = None
                self.fetched_nbytes += data.nbytes
                there_nbytes += data.nbytes
                self._moved_at = now = self._clock()
                link.expect(self._pace.measured((self.fetched_nbytes - since_nbytes) / max(now - began_at, 1e-3)))
                self._told(link.member.peer_id, there_nbytes, manifest.nbytes)
        except (CollectiveError, DonorFault) as error:
            self._drop(link.member.address, error)
            return False
        finally:
            link.close()
        return True

    def _drop(self, address: str, error: Exception) -> None:
        cause = error.cause if isinstance(error, PeerUnreachable) else str(error)
        if self._causes.get(address) != cause:
            _log.info("text_donor_dropped address=%s cause=%r", address, cause)
        self._causes[address] = cause
