# SPDX-License-Identifier: Apache-2.0
"""Where the coordinator keeps its records: what every store promises, and the chain that proves a journal whole.

A journal is numbered slots, each with one record and a checksum over everything up to it. Stores differ in where the
slots are: one SQLite file (journal.py), or keys of an etcd cluster (etcd_store.py). Must not know what records mean,
but for one: a `SnapshotRecord` is worth all records before it, so that a store may begin with the newest one.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import NamedTuple, Protocol

import msgspec

from isthmus.elastic.core.records import Record
from isthmus.elastic.errors import JournalCorrupted

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Base(NamedTuple):
    """What a journal goes on from: its first slot, and the checksum of the slot before that."""

    slot: int = 0
    checksum: bytes = b""


FIRST = Base()
"""Of a journal that has all of its records."""


class Store(Protocol):
    """Where the coordinator keeps its records. One caller at a time, not always on the same thread."""

    @property
    def is_quick(self) -> bool:
        """Whether `append` takes less time than handing it to a thread would be worth."""
        ...

    @property
    def longest_nbytes(self) -> int:
        """No record may be longer, packed. Only a snapshot could be."""
        ...

    def append(self, record: Record) -> int:
        """Make the record durable; returns its slot. Blocks until it is. What is before a snapshot may be forgotten.

        Raises:
            Superseded: another coordinator writes this journal now.
            JournalUnwritable: it cannot be known to be durable. From then on every append raises.
        """
        ...

    def replay(self) -> Iterable[Record]:
        """The records in order, from the first one or a snapshot on; gone through once, before the first `append`.

        Raises:
            JournalCorrupted: a record is missing, moved or changed.
            JournalUnwritable: the store cannot be read now.
        """
        ...

    def close(self) -> None:
        """Let go of the store: an `append` that is under way ends soon. May be called twice, from any thread."""
        ...


def pack(record: Record) -> bytes:
    """A record as it is stored."""
    return _ENCODER.encode(record)


def chain(previous: bytes, slot: int, data: bytes) -> bytes:
    """Checksum of a slot, 32 bytes: it covers the slot's number and, through `previous`, everything before it."""
    return hashlib.sha256(previous + slot.to_bytes(8, "big") + data).digest()


def verified(
    rows: Iterable[tuple[int, bytes, bytes]], path: PurePath, base: Base = FIRST
) -> Iterator[tuple[bytes, Record]]:
    """(checksum, record) of (slot, checksum, data), each verified against its checksum and its predecessor.

    Args:
        rows: in order of their slots.
        path: the journal's, for the error.
        base: what the rows go on from.

    Raises:
        JournalCorrupted: a slot is missing, or holds what was not written there.
    """
    previous, due = base.checksum, base.slot
    for expected, (slot, checksum, data) in enumerate(rows, base.slot):
        if slot != expected:
            raise JournalCorrupted(path, expected, "it is missing")
        # A flipped bit may turn bytes into a number.
        if not isinstance(data, bytes) or checksum != chain(previous, slot, data):
            raise JournalCorrupted(path, slot, "its checksum is wrong")
        try:
            record = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise JournalCorrupted(path, slot, f"it is no record of this version: {error}") from error
        yield checksum, record
        previous, due = checksum, slot + 1
    if due == base.slot and base != FIRST:
        raise JournalCorrupted(path, base.slot, "it is missing")  # the snapshot that all begins with
