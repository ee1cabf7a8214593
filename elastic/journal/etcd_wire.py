# SPDX-License-Identifier: Apache-2.0
"""What etcd's JSON gateway says, as far as we listen: bounded, typed, unknown fields passed over.

The gateway leaves out zeros and empty lists, writes 64-bit numbers as texts and bytes as base64.
"""

from collections.abc import Mapping

import msgspec

Request = Mapping[str, object]
"""The JSON of a request; bytes in it become base64."""


class Header(msgspec.Struct):
    """Of every answer: the revision of the store when it was given."""

    revision: int = 0


class KeyValue(msgspec.Struct):
    """One key. `create_revision` names this life of it; `lease` is 0 if it does not end with one."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    lease: int = 0


class RangeAnswer(msgspec.Struct):
    """/v3/kv/range: keys in order."""

    kvs: list[KeyValue] = []
    more: bool = False


class TxnPart(msgspec.Struct):
    """The answer to one operation of a transaction; None for a put."""

    response_range: RangeAnswer | None = None


class TxnAnswer(msgspec.Struct):
    """/v3/kv/txn: whether all comparisons held, and what the operations of that branch gave."""

    header: Header = msgspec.field(default_factory=Header)
    succeeded: bool = False
    responses: list[TxnPart] = []

    def found(self, index: int) -> KeyValue | None:
        """The key that the operation `index`, a range of one key, has found."""
        part = self.responses[index].response_range if index < len(self.responses) else None
        return part.kvs[0] if part is not None and part.kvs else None


class GrantAnswer(msgspec.Struct):
    """/v3/lease/grant: the lease and its time to live in seconds, which may be longer than asked for."""

    ID: int
    TTL: int


class _Alive(msgspec.Struct):
    TTL: int = 0


class KeepAliveAnswer(msgspec.Struct):
    """/v3/lease/keepalive: `result.TTL` is 0 if the lease is gone."""

    result: _Alive


class Done(msgspec.Struct):
    """An answer in which nothing is looked at."""
