# SPDX-License-Identifier: Apache-2.0
"""A donor as the learner sees it: questions with verified answers.

Rules: nothing a donor says is believed. Manifests are checked against their own root, chunks against the manifest,
commits against the size of the state; whatever fails is a DonorFault or a CollectiveError, and the caller drops the
donor. Answers come in the order of the questions.
"""

import asyncio

from isthmus.collective.core.types import Member, OuterStep
from isthmus.collective.errors import DeadlineExceeded, RemoteProtocolError
from isthmus.collective.transport import Channel
from isthmus.collective.transport.channel import ChannelFrame, Into
from isthmus.collective.transport.wire import FrameType
from isthmus.elastic.errors import ChunkCorrupted, DonorRefused, DonorStalled
from isthmus.elastic.state.digest import StateManifest, digest_of
from isthmus.elastic.state.replica import CommitEntry, ResultChunk
from isthmus.elastic.state.wire import (
    COMMIT_HEADERS,
    MANIFESTS,
    MAX_STOCK,
    PIECE_NBYTES,
    REFUSALS,
    STOCKS,
    TEXT_OFFERS,
    ChunkRequest,
    CommitRequest,
    ManifestRequest,
    Pace,
    PrivateRequest,
    StateRequest,
    StockRequest,
    TextOffer,
    TextRequest,
)
from isthmus.elastic.wire import decode, encode


class DonorLink:
    """One STATE connection to a donor. Not for use by two tasks at once."""

    def __init__(self, member: Member, channel: Channel, pace: Pace) -> None:
        self.member = member
        self._channel = channel
        self._pace = pace

    async def offer(self, first: OuterStep | None) -> tuple[StateManifest, tuple[int, ...]]:
        """Ask the donor to pin its state; returns its verified description, and the sizes of its commits.

        One round trip. The sizes are those of the commit that made `first` and of the ones after it: none if it is
        not kept any more, or if nobody asks for them.
        """
        await self._ask(ManifestRequest())
        if first is not None:
            await self._ask(StockRequest(first))
        frame = await self._answer(FrameType.STATE_HEADER, expected_nbytes=4 << 20)
        manifest = decode(MANIFESTS, frame.payload)
        manifest.verify()
        if first is None:
            return manifest, ()
        frame = await self._answer(FrameType.STATE_HEADER, expected_nbytes=MAX_STOCK * 9)
        return manifest, decode(STOCKS, frame.payload).nbytes

    async def private(self) -> StateManifest:
        """Ask the donor for the state that is its own; returns its verified description."""
        await self._ask(PrivateRequest())
        frame = await self._answer(FrameType.STATE_HEADER, expected_nbytes=4 << 20)
        manifest = decode(MANIFESTS, frame.payload)
        manifest.verify()
        return manifest

    async def text(self, digest: bytes) -> TextOffer:
        """Ask the donor for the text with this digest, or a part of one; returns its verified description."""
        await self._ask(TextRequest(digest))
        frame = await self._answer(FrameType.STATE_HEADER, expected_nbytes=PIECE_NBYTES)
        offer = decode(TEXT_OFFERS, frame.payload)
        offer.manifest.verify()
        return offer

    def expect(self, pace: Pace) -> None:
        """Give the donor other deadlines from now on."""
        self._pace = pace

    async def commit(self, outer_step: int, *, max_nbytes: int) -> CommitEntry:
        """The commit that made `outer_step`; one larger than `max_nbytes` is refused before it is read."""
        await self._ask(CommitRequest(OuterStep(outer_step)))
        frame = await self._answer(FrameType.STATE_HEADER, expected_nbytes=1 << 20)
        header = decode(COMMIT_HEADERS, frame.payload)
        if header.outer_step != outer_step or header.nbytes > max_nbytes:
            raise RemoteProtocolError("commit is not the one asked for")
        chunks = []
        for number, (start_numel, nbytes) in enumerate(header.chunks):
            data = memoryview(bytearray(nbytes))
            await self._take_pieces(number, data)
            chunks.append(ResultChunk(start_numel, data.tobytes()))
        return header.with_chunks(tuple(chunks))

    async def ask_chunk(self, index: int) -> None:
        """Ask for one chunk of the pinned state. `take_chunk` gets the answers, in the same order."""
        await self._ask(ChunkRequest(index))

    async def take_chunk(self, index: int, destination: memoryview, digest: bytes) -> None:
        """Receive the next chunk into its place and check its digest.

        Args:
            index: the number that was asked for.
            destination: where it belongs; writable, exactly as long as the chunk.
            digest: what the manifest says of it.

        Raises:
            ChunkCorrupted: the destination holds wrong bytes now.
        """
        await self._take_pieces(index, destination)
        if await asyncio.to_thread(digest_of, destination) != digest:
            raise ChunkCorrupted(index)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    async def _ask(self, request: StateRequest) -> None:
        await self._channel.send(FrameType.STATE_REQUEST, encode(request), timeout_s=self._pace.patience_s)

    async def _take_pieces(self, number: int, destination: memoryview) -> None:
        for start in range(0, destination.nbytes, PIECE_NBYTES):
            piece = destination[start : start + PIECE_NBYTES]
            await self._answer(FrameType.STATE_CHUNK, expected_nbytes=piece.nbytes, into=_only(number, piece))

    async def _answer(self, frame_type: FrameType, *, expected_nbytes: int, into: Into | None = None) -> ChannelFrame:
        timeout_s = self._pace.allowance_s(expected_nbytes)
        try:
            frame = await self._channel.receive(timeout_s=timeout_s, into=into)
        except DeadlineExceeded as error:
            raise DonorStalled(timeout_s, expected_nbytes) from error
        if frame.type is FrameType.STATE_ERROR:
            refusal = decode(REFUSALS, frame.payload)
            raise DonorRefused(refusal.reason, is_busy=refusal.is_busy)
        if frame.type is not frame_type:
            raise RemoteProtocolError("answer of another type")
        return frame


def _only(number: int, piece: memoryview) -> Into:
    """A chunk frame that arrives now must be this piece."""

    def place(frame_type: FrameType, chunk: int, _nbytes: int) -> memoryview | None:
        if frame_type is not FrameType.STATE_CHUNK:
            return None
        if chunk != number:
            raise RemoteProtocolError("chunk is not the one asked for")
        return piece

    return place
