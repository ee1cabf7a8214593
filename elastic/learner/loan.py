# SPDX-License-Identifier: Apache-2.0
"""Borrowing a donor's private state, such as its inner optimizer's moments, before this peer trains for the first time.

Rules: nobody waits for it but this peer, which is a learner as yet. Whatever goes wrong, the next donor is asked, and
if none is left the peer begins fresh. There is no truth to compare it with: chunks must have the digests that the donor
itself has named, so that what arrives is what was sent, and whether that can be used is the trainer's to say.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from isthmus.collective.core.types import Member
from isthmus.collective.errors import CollectiveError
from isthmus.elastic.errors import DonorStalled, ElasticError
from isthmus.elastic.learner.donor_link import DonorLink
from isthmus.elastic.learner.donors import Dial
from isthmus.elastic.state.digest import StateManifest, chunk_of
from isthmus.elastic.state.replica import PrivateState
from isthmus.elastic.state.wire import ChunkMap, Pace

_log = logging.getLogger(__name__)

_SIGN_S = 1.0
_ANSWER_S = 60.0
"""Within which a donor makes its copy, or says that it will not: more than it gives itself."""


async def borrow(
    private: PrivateState, donors: Sequence[Member], dial: Dial, pace: Pace, *, advanced: Callable[[int], None]
) -> Member | None:
    """Take it from the first donor that has it.

    Args:
        private: where it goes.
        donors: members of the run, the likeliest first.
        dial: opens a STATE connection.
        pace: deadlines.
        advanced: called with what there is of progress, for who shows none is put out: bytes that were verified, and
            a 1 now and then while a donor is busy with an inner step, which has a bound.

    Returns:
        Whose it is; None if nobody gave any.
    """
    for member in donors:
        link = None
        try:
            link = DonorLink(member, await dial(member), pace)
            manifest = await _patiently(link.private(), advanced)
            async for nbytes in _fetch(link, manifest, private.begin_borrowing(manifest), pace.window):
                advanced(nbytes)
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


async def _patiently(asking: Coroutine[Any, Any, StateManifest], advanced: Callable[[int], None]) -> StateManifest:
    """Wait for it, and say that this is no standing still."""
    task = asyncio.ensure_future(asking)
    try:
        async with asyncio.timeout(_ANSWER_S):
            while not task.done():
                await asyncio.wait([task], timeout=_SIGN_S)
                advanced(1)
        return task.result()
    except TimeoutError as error:
        raise DonorStalled(_ANSWER_S, 0) from error
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _fetch(
    link: DonorLink, manifest: StateManifest, destinations: Sequence[memoryview], window: int
) -> AsyncIterator[int]:
    """All chunks, a few of them asked for ahead; gives the bytes of each one that has arrived."""
    chunks = ChunkMap(manifest)
    num_asked = 0
    for index in range(len(chunks)):
        while num_asked < min(index + window, len(chunks)):
            await link.ask_chunk(num_asked)
            num_asked += 1
        tensor, chunk = chunks.place(index)
        destination = chunk_of(destinations[tensor], chunk, manifest.chunk_nbytes)
        await link.take_chunk(index, destination, manifest.tensors[tensor].chunk_digests[chunk])
        yield destination.nbytes
