# SPDX-License-Identifier: Apache-2.0
"""The small frames of a round, as they travel: who opens it with which terms, and who gives it up."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import NonFiniteInput, OperationAborted, PlanMismatch, RemoteProtocolError
from isthmus.collective.rounds.plan import Terms
from isthmus.collective.transport.wire import NOTICE_NBYTES

_MAX_TEXT = 512
"""Longer words are cut, so that a notice keeps within its frame."""
_MAX_SUSPECTS = 1024
"""Peers that any view may have. More are nobody's word: what is heard here is told to the coordinator."""


@lru_cache(maxsize=64)  # training posts the same operations again and again
def opening_payload(terms: Terms) -> bytes:
    """Payload of OPEN."""
    return msgspec.msgpack.encode(terms)


class Mismatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender posted the round with `field=ours`, and `peer_id` with `field=theirs`."""

    field: str
    ours: int | str
    theirs: int | str
    peer_id: PeerId


class AbortNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of ABORT: this member has given the round up."""

    cause: str
    suspects: Annotated[tuple[PeerId, ...], Meta(max_length=_MAX_SUSPECTS)]
    mismatch: Mismatch | None = None
    is_overdue: bool = False
    """The round takes too long, and the sender can name nobody: whoever waits for a third one is to say so."""


def abort_payload(
    cause: str, suspects: Sequence[PeerId], mismatch: Mismatch | None = None, *, is_overdue: bool = False
) -> bytes:
    """Payload of ABORT. Of hundreds of suspects it names as many as fit in its frame, or it would break the link."""
    named = tuple(suspects)
    while True:
        payload = msgspec.msgpack.encode(AbortNotice(cause[:_MAX_TEXT], named, mismatch, is_overdue))
        if len(payload) <= NOTICE_NBYTES or not named:
            return payload
        named = named[: len(named) // 2]


HAS_RESULT = abort_payload("the round has ended there", ())
"""Of a member that has its result, to one that may have lost what it needs of it."""


def abort_payload_of(error: Exception | None, peer_id: PeerId) -> bytes:
    """Payload of ABORT that tells the others what ended the round at `peer_id`; None: it has its result."""
    match error:
        case None:
            return HAS_RESULT
        case OperationAborted():
            return abort_payload(error.cause, error.suspects)
        case NonFiniteInput():
            return abort_payload("its input is not finite", (peer_id,))
        case PlanMismatch():
            words = Mismatch(error.field, _sendable(error.ours), _sendable(error.theirs), error.peer_id)
            return abort_payload("it was posted with other terms", (), words)
        case _:
            return abort_payload("failed inside", ())


def mismatch_heard(words: Mismatch, terms: Terms, sender: PeerId) -> PlanMismatch:
    """What a mismatch that `sender` found is to a member with these terms: whoever posted other ones is named.

    The member may hear of it before it hears the terms of the one who differs, and may never hear such terms: the
    sender can make up what a third one posted. So that is its word, and not this member's.

    Raises:
        RemoteProtocolError: there is no such field.
    """
    if words.field not in terms.__struct_fields__:
        raise RemoteProtocolError("mismatch of no term")
    ours = getattr(terms, words.field)
    if _sendable(ours) == words.ours:
        return PlanMismatch(words.field, ours, words.theirs, words.peer_id, told_by=sender)
    return PlanMismatch(words.field, ours, words.ours, sender)


def _sendable(value: object) -> int | str:
    return value if isinstance(value, int) else str(value)[:_MAX_TEXT]
