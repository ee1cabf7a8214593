# SPDX-License-Identifier: Apache-2.0
"""What the command line and a daemon say to each other: msgpack, one answer a question."""

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import PEER_ID_PATTERN, PeerId
from isthmus.trainer.record.status import PeerStatus, Status


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of what goes over the socket."""


class StatusRequest(_Message, frozen=True):
    """How are you?"""


class LeaveRequest(_Message, frozen=True):
    """Hand in what you have and leave the run."""


class StopRequest(_Message, frozen=True):
    """Leave at once."""


class PeersRequest(_Message, frozen=True):
    """Who is there?"""


class PutOutRequest(_Message, frozen=True):
    """Evict this peer, or ban it for ever."""

    peer_id: Annotated[PeerId, Meta(pattern=PEER_ID_PATTERN)]
    for_ever: bool


class TicketRequest(_Message, frozen=True):
    """The run's ticket, or a new one: for one peer or any number, for so many seconds or as long as is usual."""

    is_new: bool
    is_once: bool = False
    lifetime_s: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None


class RevokeRequest(_Message, frozen=True):
    """Let this ticket, or all that were made so far, admit nobody any more.

    `expires_at_s`: when it would have expired, in Unix seconds, if known.
    """

    ticket_id: Annotated[bytes, Meta(min_length=8, max_length=8)] | None = None
    expires_at_s: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class StatusReply(_Message, frozen=True):
    """As I am."""

    status: Status


class PeersReply(_Message, frozen=True):
    """These."""

    peers: tuple[PeerStatus, ...]


class TicketReply(_Message, frozen=True):
    """The ticket, encoded, and who is invited by it: see `invitation`."""

    ticket: str
    program: tuple[str, ...] | None = None


class Accepted(_Message, frozen=True):
    """It will be done, or is done."""


class NotDone(_Message, frozen=True):
    """It was understood and not done."""

    reason: str


class NotUnderstood(_Message, frozen=True):
    """No such question."""

    reason: str


Request = StatusRequest | LeaveRequest | StopRequest | PeersRequest | PutOutRequest | TicketRequest | RevokeRequest
Reply = StatusReply | PeersReply | TicketReply | Accepted | NotDone | NotUnderstood
