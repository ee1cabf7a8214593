# SPDX-License-Identifier: Apache-2.0
"""What `isthmus doctor` and the run's processes say to each other: MessagePack in CONTROL frames.

    doctor ──► coordinator    purpose `doctor`, with a ticket: `Question`, answered by `Reply`
    coordinator ──► member    purpose `dial back`, as a peer: `Call`, answered by `Called`

Rules: every length has a bound. Padding travels in frames of its own type. Must not know sockets.
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from isthmus.collective.core.address import MAX_CANDIDATES, MAX_LENGTH
from isthmus.collective.core.types import PEER_ID_PATTERN, PeerId
from isthmus.collective.errors import RemoteProtocolError
from isthmus.collective.transport import Channel, FrameType
from isthmus.elastic.wire import decode, encode
from isthmus.trainer.config.manifest import MAX_MANIFEST_NBYTES

NONCE_NBYTES = 16
MAX_WINDOWS = 64
"""Of a transfer."""

Nonce = Annotated[bytes, Meta(min_length=NONCE_NBYTES, max_length=NONCE_NBYTES)]
_Address = Annotated[str, Meta(max_length=MAX_LENGTH)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# -------------------------------------------------------------------------------------- asked by the doctor


class FactsWanted(_Message, frozen=True, tag="facts wanted"):
    """What run is this?"""


class Ping(_Message, frozen=True, tag="ping"):
    """What time is it there?"""


class Upload(_Message, frozen=True, tag="upload"):
    """Count the padding that comes, after a `Go`."""


class Download(_Message, frozen=True, tag="download"):
    """Send padding, after a `Go`; no more than so many bytes a second, where they are given."""

    most_bytes_per_s: Annotated[float, Meta(ge=1.0, le=1e12)] | None = None


class Call(_Message, frozen=True, tag="call"):
    """Dial each of these addresses. Whoever listens there says the nonce, and nothing is said to it."""

    addresses: Annotated[tuple[_Address, ...], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    nonce: Nonce


Question = FactsWanted | Ping | Upload | Download | Call

# ------------------------------------------------------------------------------------- answered by the run


class Facts(_Message, frozen=True, kw_only=True, tag="facts"):
    """What a joiner would be told, and the program's version. `seen_from`: the host that the question came from."""

    version: Annotated[str, Meta(max_length=64)]
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_NBYTES)]
    data_digest: Annotated[str, Meta(max_length=128)]
    seen_from: Annotated[str, Meta(max_length=64)]
    num_members: _Count


class Now(_Message, frozen=True, tag="now"):
    """The wall clock, in Unix seconds."""

    wall_s: float


class Go(_Message, frozen=True, tag="go"):
    """It is your turn."""


class Moved(_Message, frozen=True, kw_only=True, tag="moved"):
    """What a transfer came to, as the coordinator's side knows it.

    `windows`: bytes that arrived in each window (transfer.py) from number `first` on; none if it has sent.
    `resent_nbytes` of `sent_nbytes` it sent again; both 0 if it has received, or its kernel does not tell.
    """

    first: _Count = 0
    windows: Annotated[tuple[_Count, ...], Meta(max_length=MAX_WINDOWS)] = ()
    sent_nbytes: _Count = 0
    resent_nbytes: _Count = 0


class Attempt(_Message, frozen=True):
    """One address that was dialled. `cause`: why our listener did not answer; None if it did."""

    address: _Address
    cause: Annotated[str, Meta(max_length=256)] | None


class Called(_Message, frozen=True, tag="called"):
    """What came of a `Call`."""

    attempts: Annotated[tuple[Attempt, ...], Meta(max_length=MAX_CANDIDATES)]


class MemberCalled(_Message, frozen=True, kw_only=True):
    """What came of the same call by a member, which may be reached at `address`."""

    peer_id: Annotated[PeerId, Meta(pattern=PEER_ID_PATTERN)]
    address: _Address
    attempts: Annotated[tuple[Attempt, ...], Meta(max_length=MAX_CANDIDATES)]


class CalledByBoth(_Message, frozen=True, kw_only=True, tag="called by both"):
    """What came of a `Call` by the coordinator, and by a member if one could be asked among `num_others`."""

    coordinator: Called
    member: MemberCalled | None
    num_others: _Count


class Busy(_Message, frozen=True, tag="busy"):
    """Others ask too, or this one asks too much. Later again."""


Reply = Facts | Now | Go | Moved | CalledByBoth | Called | Busy

QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
CALLS: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)

_T = TypeVar("_T")


async def say(channel: Channel, message: Question | Reply, *, timeout_s: float) -> None:
    """Send one message. Raises as `Channel.send`."""
    await channel.send(FrameType.CONTROL, encode(message), timeout_s=timeout_s)


async def hear(channel: Channel, decoder: msgspec.msgpack.Decoder[_T], *, timeout_s: float) -> _T:
    """Wait for one message. Raises as `Channel.receive`."""
    frame = await channel.receive(timeout_s=timeout_s)
    if frame.type is not FrameType.CONTROL:
        raise RemoteProtocolError("not a control message")
    return decode(decoder, frame.payload)
