# SPDX-License-Identifier: Apache-2.0
"""A round's ends at the links: a chunk that waits to be sent, and the inbox that takes those of one member.

Rules: references only; whose memory the bytes are is the round's business.
"""

from typing import Protocol

from isthmus.collective.transport.link import Link
from isthmus.collective.transport.memory import Scratch
from isthmus.collective.transport.wire import Frame, FrameType, Header


class ChunkSender(Protocol):
    """The outbox, as its chunks see it."""

    def pieces_of(self, frame_type: FrameType, chunk: int, scratch: Scratch) -> tuple[bytes, memoryview] | None:
        """Encode now; None if that cannot be sent after all."""
        ...

    def on_sent(self, send: "ChunkSend", nbytes: int) -> None:
        """A chunk is the kernel's now."""
        ...


class ChunkTaker(Protocol):
    """The round, as its inboxes see it."""

    def wants_chunk(self, rank: int, header: Header) -> bool:
        """Whether this chunk of a member's is needed."""
        ...

    def take_chunk(self, link: Link, rank: int, frame: Frame) -> None:
        """A chunk is whole where it was placed."""
        ...


class ChunkSend:
    """A chunk in a queue; encoded when a socket can take it."""

    __slots__ = ("chunk", "owner", "to", "type")

    def __init__(self, owner: ChunkSender, frame_type: FrameType, to: int, chunk: int) -> None:
        self.owner = owner
        self.type = frame_type
        self.to = to
        self.chunk = chunk

    def pieces(self, scratch: Scratch) -> tuple[bytes, memoryview] | None:
        """See Outgoing."""
        return self.owner.pieces_of(self.type, self.chunk, scratch)

    def sent(self, nbytes: int) -> None:
        """See Outgoing."""
        self.owner.on_sent(self, nbytes)


class Inbox:
    """Takes the chunks of one member, without asking again whose they are."""

    __slots__ = ("owner", "rank")

    def __init__(self, owner: ChunkTaker, rank: int) -> None:
        self.owner = owner
        self.rank = rank

    def wants(self, header: Header) -> bool:
        """See Sink."""
        return self.owner.wants_chunk(self.rank, header)

    def take(self, link: Link, frame: Frame) -> None:
        """See Sink."""
        self.owner.take_chunk(link, self.rank, frame)
