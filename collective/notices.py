"""The small frames of a round, as they travel: who opens it with which terms, and who gives it up."""

from collections.abc import Sequence

import msgspec

from collective.core.types import PeerId
from collective.plan import Terms


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of OPEN: the terms, and which results the sender holds from an earlier attempt (bit c: chunk c)."""

    terms: Terms
    held: bytes = b""


class AbortNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of ABORT: this member has given the round up."""

    cause: str
    suspects: tuple[PeerId, ...]


def abort_payload(cause: str, suspects: Sequence[PeerId]) -> bytes:
    """Payload of ABORT."""
    return msgspec.msgpack.encode(AbortNotice(cause[:512], tuple(suspects)))
