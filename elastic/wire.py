# SPDX-License-Identifier: Apache-2.0
"""Bytes from the network into validated values, or one typed error.

Rules: whatever arrives, the only error is RemoteProtocolError; msgspec's own errors are not all of one kind (broken
UTF-8 and deep nesting have theirs), so they are mapped here and nowhere else. A message that decodes is well-formed,
not true: the machines decide by epoch, step and membership.
"""

from typing import TypeVar

import msgspec

from isthmus.collective.errors import RemoteProtocolError

_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()


def encode(value: msgspec.Struct) -> bytes:
    """The wire form of a message."""
    return _ENCODER.encode(value)


def decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | bytearray | memoryview) -> _T:
    """A validated message.

    Raises:
        RemoteProtocolError: the bytes are no such message.
    """
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError("message not understood") from error
