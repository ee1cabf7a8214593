# SPDX-License-Identifier: Apache-2.0
"""What a round's machine hears and what it orders: events in, effects out (core/round_machine.py).

Rules: plain values; a chunk is a number. `rank` and `to` are places in the round's view.
"""

import msgspec

from isthmus.collective.errors import RemoteProtocolError


class ChunkRefused(RemoteProtocolError):
    """A member sent a chunk that the plan does not allow."""

    def __init__(self, rank: int, chunk: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.chunk = chunk


class _Word(msgspec.Struct, frozen=True, gc=False):
    """Base of events and effects: values, made by the thousand."""


# ------------------------------------------------------------------------------------ events


class PeerOpened(_Word, frozen=True, gc=False):
    """This member has posted the round, with the same plan."""

    rank: int


class PartArrived(_Word, frozen=True, gc=False):
    """A part of a chunk that is added up here is whole and verified."""

    rank: int
    chunk: int


class ResultArrived(_Word, frozen=True, gc=False):
    """The finished chunk is here, whole and verified, from `rank`."""

    rank: int
    chunk: int


class LinkRenewed(_Word, frozen=True, gc=False):
    """The way to this member broke and was made anew: whatever was on it may be lost."""

    rank: int


RoundEvent = PeerOpened | PartArrived | ResultArrived | LinkRenewed

# ------------------------------------------------------------------------------------ effects


class SendOpen(_Word, frozen=True, gc=False):
    """Tell this member our terms: the plan, the codec, our weight."""

    to: int


class HandOnOpening(_Word, frozen=True, gc=False):
    """Tell member `to` the terms of member `of`, as that has told us: the two have no link."""

    to: int
    of: int


class SendPart(_Word, frozen=True, gc=False):
    """Send our part of this chunk, with what was added to it here, up its tree."""

    to: int
    chunk: int


class Accumulate(_Word, frozen=True, gc=False):
    """Add the part that this member sent to the chunk's sum. The first one is added to our own part."""

    chunk: int
    rank: int


class FinishChunk(_Word, frozen=True, gc=False):
    """The sum is whole (maybe only our own part): divide, encode once, keep what the encoding decodes to."""

    chunk: int


class SendResult(_Word, frozen=True, gc=False):
    """Send the finished chunk's encoding to this member, ahead of parts."""

    to: int
    chunk: int


class InstallResult(_Word, frozen=True, gc=False):
    """Decode the chunk that just arrived into its place in the output."""

    chunk: int


class Finished(_Word, frozen=True, gc=False):
    """Everything that is wanted here is in place. Comes exactly once."""


RoundEffect = SendOpen | HandOnOpening | SendPart | Accumulate | FinishChunk | SendResult | InstallResult | Finished
