"""Borrowing a donor's private state, such as its inner optimizer's moments, before this peer trains for the first time.

Rules: nobody waits for it but this peer, which is a learner as yet. Whatever goes wrong, the next donor is asked, and
if none is left the peer begins fresh. There is no truth to compare it with: chunks must have the digests that the donor
itself has named, so that what arrives is what was sent, and whether that can be used is the trainer's to say.
"""

import logging
from collections import deque
from collections.abc import Sequence

from collective.core.types import Member
from collective.errors import CollectiveError
from elastic.digest import StateManifest, chunk_of
from elastic.donor_link import DonorLink
from elastic.donors import Dial
from elastic.errors import ElasticError
from elastic.replica import PrivateState
from elastic.state_wire import ChunkMap, Pace

_log = logging.getLogger(__name__)


async def borrow(private: PrivateState, donors: Sequence[Member], dial: Dial, pace: Pace) -> Member | None:
    """Take it from the first donor that has it.

    Args:
        private: where it goes.
        donors: members of the run, the likeliest first.
        dial: opens a STATE connection.
        pace: deadlines.

    Returns:
        Whose it is; None if nobody gave any.
    """
    for member in donors:
        link = None
        try:
            link = DonorLink(member, await dial(member), pace)
            manifest = await link.private()
            await _fetch(link, manifest, private.begin_borrowing(manifest), pace.window)
            await private.borrowed()
        except (CollectiveError, ElasticError) as error:
            _log.info("nothing_borrowed peer_id=%s cause=%s", member.peer_id, error)
        else:
            _log.info("private_state_borrowed peer_id=%s nbytes=%d", member.peer_id, manifest.nbytes)
            return member
        finally:
            if link is not None:
                link.close()
    return None


async def _fetch(link: DonorLink, manifest: StateManifest, destinations: Sequence[memoryview], window: int) -> None:
    """All chunks, a few of them asked for ahead."""
    chunks = ChunkMap(manifest)
    asked: deque[int] = deque()
    for index in range(len(chunks)):
        await link.ask_chunk(index)
        asked.append(index)
        if len(asked) == window:
            await _take(link, manifest, destinations, chunks.place(asked[0]), asked.popleft())
    while asked:
        await _take(link, manifest, destinations, chunks.place(asked[0]), asked.popleft())


async def _take(
    link: DonorLink, manifest: StateManifest, destinations: Sequence[memoryview], place: tuple[int, int], index: int
) -> None:
    tensor, chunk = place
    destination = chunk_of(destinations[tensor], chunk, manifest.chunk_nbytes)
    await link.take_chunk(index, destination, manifest.tensors[tensor].chunk_digests[chunk])
