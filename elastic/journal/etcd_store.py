# SPDX-License-Identifier: Apache-2.0
"""The coordinator's memory in an etcd cluster, for those who already run one, and for coordinators that stand by.

    /isthmus/RUN_ID/leader              who may write (etcd_leader.py)
    /isthmus/RUN_ID/journal/%016d       one slot: format, token of its writer, checksum, record
    /isthmus/RUN_ID/base                the newest snapshot, which a replay begins with (`_Bases`)

Rules: a slot is written by one transaction which demands that the slot is empty and that the leadership it was
decided in goes on. That is the fence: of two coordinators that both believe to lead, one finds out with its next
record, before anybody hears of it. A transaction may be sent again: an append whose answer was lost finds its own
value in the slot. Records are only appended, and after a failed append the store takes no more. A snapshot and what
makes a replay begin with it are one transaction; older slots stay unless somebody wants only the newest of them.

Blocking, for threads; `append`, `keep_alive` and `close` may meet.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import msgspec

from isthmus.elastic.core.records import BarRecord, Record, SnapshotRecord, TicketRecord
from isthmus.elastic.errors import (
    EtcdError,
    EtcdRefused,
    EtcdTooMuch,
    EtcdUnavailable,
    JournalCorrupted,
    JournalUnwritable,
    Superseded,
)
from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_leader import (
    LEASE_S,
    TOKEN_NBYTES,
    UNKNOWN_HOLDER,
    Leader,
    Leadership,
    made,
    transact,
)
from isthmus.elastic.journal.etcd_wire import KeyValue, RangeAnswer, Request
from isthmus.elastic.journal.store import FIRST, Base, chain, pack, verified

_log = logging.getLogger(__name__)

_FORMAT = b"\x01"
_CHECKSUM_NBYTES = 32
_HEAD_NBYTES = len(_FORMAT) + TOKEN_NBYTES + _CHECKSUM_NBYTES
_LONGEST_NBYTES = 2**20
"""Of a record: etcd refuses requests of more than 1.5 MiB, if nobody has told it otherwise."""
_PAGE_SLOTS = 256
"""Slots read at once: records have some hundred bytes."""
_FIRST_SLOTS = 64
_PAGE_ATTEMPT_S = 5.0
_ASK_S = 3.0
_CURE = "see to the etcd cluster, then restart"


class _Bases(msgspec.Struct, frozen=True):
    """What a replay goes on from: the slot of the newest snapshot, and the checksum of the slot before. `older` are the
    slots of those before it, the newest first, as far as they are of use."""

    slot: int
    checksum: bytes
    older: tuple[int, ...] = ()


class EtcdStore:
    """A `Store` in etcd. To be written to after `try_to_lead` has returned None and `replay` has ended.

    Args:
        access: where etcd is.
        run_id: the run whose records these are.
        peer_id, address, lease_s: see `Leadership`.
        keep_archives: the slots from so many snapshots before the newest one on stay; 0: all.
        patience_s: how long etcd may give no answer before an append, or the replay, has failed.
        clock: monotonic seconds.

    Raises:
        OSError: a file of `access` cannot be used.
    """

    def __init__(
        self,
        access: EtcdAccess,
        *,
        run_id: str,
        peer_id: str,
        address: str,
        keep_archives: int = 0,
        patience_s: float = 600.0,
        lease_s: int = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        run = PurePosixPath("/isthmus", run_id)
        self.path = run / "journal"
        self._client = EtcdClient(access)
        self._leadership = Leadership(access, run, peer_id=peer_id, address=address, lease_s=lease_s)
        self._base_key = f"{run}/base".encode()
        self._bases: _Bases | None = None
        self._keep_archives = keep_archives
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()  # over what follows, and over the life of our leadership
        self._slot = 0
        self._checksum = b""
        self._broken: JournalUnwritable | Superseded | None = None
        self._is_closed = False

    # -------------------------------------------------------------------------------- leading

    @property
    def sign_of_life_s(self) -> float:
        """`keep_alive` is to be called this often."""
        return self._leadership.sign_of_life_s

    def try_to_lead(self) -> Leader | None:
        """Become the leader if nobody is. None: we lead; else who does.

        Raises:
            EtcdUnavailable: no answer for some seconds. Ask again, or give up.
            JournalUnwritable: etcd refuses.
        """
        with self._lock, self._refusals():
            return self._leadership.try_to_lead()

    def holder(self) -> Leader | None:
        """Who leads now. Raises as `try_to_lead`."""
        with self._lock, self._refusals():
            return self._leadership.holder()

    def knows_run(self) -> bool:
        """Whether somebody leads this run, or has left a record of it. Raises as `try_to_lead`."""
        with self._lock, self._refusals():
            return self._leadership.holder() is not None or self._holds_records()

    def has_begun(self) -> bool:
        """Whether there is a record of what this run does. Raises as `try_to_lead`.

        A peer may have been let in, or put out, before there was anything to be done.
        """
        with self._lock, self._refusals():
            if self._found_bases(timeout_s=_ASK_S) is not None:
                return True
            request: Request = {"key": self._key(0), "range_end": f"{self.path}0".encode(), "limit": _FIRST_SLOTS}
            try:
                first = self._client.call("kv/range", request, RangeAnswer, timeout_s=_ASK_S).kvs
            except EtcdTooMuch:
                return True  # there is more than who was let in
            records = (record for _, record in verified(map(self._row, first), self.path))
            return any(not isinstance(record, BarRecord | TicketRecord) for record in records)

    def keep_alive(self) -> bool:
        """Give a sign of life; lead again if our lease has ended and nobody else has led since.

        Returns whether etcd has answered. If not, the next append finds out whether we still lead.

        Raises:
            Superseded: another one leads.
        """
        try:
            if not self._leadership.is_alive():
                with self._lock:
                    self._lead_again()
        except EtcdError as error:
            if not self._is_closed:
                _log.warning("etcd_silent path=%s cause=%r", self.path, str(error))
            return False
        return True

    def close(self) -> None:
        """Let go of the journal. If we led, a standby can take over at once. May be called twice."""
        self._is_closed = True
        self._client.close()
        self._leadership.close()

    def _holds_records(self) -> bool:
        request = {"key": self._key(0), "keys_only": True}
        first = self._client.call("kv/range", request, RangeAnswer, timeout_s=_ASK_S).kvs
        return bool(first) or self._found_bases(timeout_s=_ASK_S) is not None

    def _found_bases(self, *, timeout_s: float) -> _Bases | None:
        found = self._client.call("kv/range", {"key": self._base_key}, RangeAnswer, timeout_s=timeout_s).kvs
        try:
            return msgspec.msgpack.decode(found[0].value, type=_Bases) if found else None
        except msgspec.MsgspecError as error:
            raise JournalCorrupted(self.path, None, f"it does not say what it goes on from: {error}") from error

    def _lead_again(self) -> None:
        """Where nobody has written since, nobody has decided anything: we go on."""
        if self._broken is not None:
            raise self._broken
        self._leadership.lead_again(made(self._key(self._slot), 0))
        _log.warning("leader_again path=%s slot=%d; the lease had ended", self.path, self._slot)

    # -------------------------------------------------------------------------------- the journal

    @property
    def is_quick(self) -> bool:
        """No: some milliseconds over the network, seconds while etcd elects a leader."""
        return False

    @property
    def longest_nbytes(self) -> int:
        """What etcd takes in one request, with room to spare."""
        return _LONGEST_NBYTES

    def append(self, record: Record) -> int:
        """See `Store`. It waits as long as etcd has no quorum, up to `patience_s`."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            data = pack(record)
            checksum = chain(self._checksum, self._slot, data)
            bases = self._bases_with(record)
            try:
                self._write(_FORMAT + bytes.fromhex(self._leadership.me.token) + checksum + data, bases)
            except Superseded as error:
                self._broken = error
                raise
            except EtcdError as error:
                self._broken = JournalUnwritable(self.path, str(error), cure=_CURE)
                raise self._broken from error
            self._bases = bases or self._bases
            self._checksum = checksum
            self._slot += 1
            return self._slot - 1

    def _bases_with(self, record: Record) -> _Bases | None:
        """What the next replay begins with, if that is this record."""
        if not isinstance(record, SnapshotRecord) or not self._slot:
            return None
        known = self._bases
        older = () if known is None else (known.slot, *known.older)[: self._keep_archives]
        return _Bases(self._slot, self._checksum, older)

    def replay(self) -> Iterator[Record]:
        """See `Store`. In pages, so that a long journal never lies in memory as a whole."""
        with self._lock:
            try:
                self._bases = bases = self._found_bases(timeout_s=self._patience_s)
                base = FIRST if bases is None else Base(bases.slot, bases.checksum)
                self._slot, self._checksum = base
                for checksum, record in verified(self._rows(base.slot), self.path, base):
                    self._checksum = checksum
                    self._slot += 1
                    yield record
            except EtcdError as error:
                raise JournalUnwritable(self.path, str(error), cure=_CURE) from error

    def _write(self, value: bytes, bases: _Bases | None) -> None:
        """Put the value into the next slot, and be sure of it. With it what a replay begins with from now on."""
        keep = self._keep_archives
        puts: list[Request] = [{"key": self._key(self._slot), "value": value}]
        deletes: list[Request] = []
        if bases is not None:
            puts.append({"key": self._base_key, "value": msgspec.msgpack.encode(bases)})
        if bases is not None and keep and len(bases.older) == keep:
            deletes.append({"key": self._key(0), "range_end": self._key(bases.older[-1])})
        deadline = self._clock() + self._patience_s
        ours, key = self._leadership, self._key(self._slot)
        while True:
            left_s = max(0.0, deadline - self._clock())
            conditions = [made(key, 0), made(ours.key, ours.life)]
            answer = transact(self._client, conditions, puts, [key, ours.key], deletes=deletes, timeout_s=left_s)
            slot, leader = answer.found(0), answer.found(1)
            if answer.succeeded or (slot is not None and slot.value == value):
                return  # now, or by an attempt whose answer was lost
            holder = None if leader is None else ours.leader_in(leader)
            if holder is not None and holder != ours.me:
                raise Superseded(self.path, holder.address)
            if slot is not None:
                raise Superseded(self.path, UNKNOWN_HOLDER)
            if left_s <= 0:
                raise EtcdUnavailable(self._patience_s, {"the leader's key": "it ends again and again"})
            self._lead_again()

    def _rows(self, first: int) -> Iterator[tuple[int, bytes, bytes]]:
        start, end, limit = self._key(first), f"{self.path}0".encode(), _PAGE_SLOTS  # "0" comes after "/"
        while True:
            request: Request = {"key": start, "range_end": end, "limit": limit}
            try:
                page = self._client.call(
                    "kv/range", request, RangeAnswer, timeout_s=self._patience_s, attempt_s=_PAGE_ATTEMPT_S
                )
            except EtcdTooMuch:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            for found in page.kvs:
                yield self._row(found)
            if not page.more or not page.kvs:
                return
            start = page.kvs[-1].key + b"\0"

    def _row(self, found: KeyValue) -> tuple[int, bytes, bytes]:
        number = found.key.decode(errors="replace").removeprefix(f"{self.path}/")
        if not number.isascii() or not number.isdigit():
            raise JournalCorrupted(self.path, None, f"the key {number!r} is no slot")
        if len(found.value) < _HEAD_NBYTES or not found.value.startswith(_FORMAT):
            raise JournalCorrupted(self.path, int(number), f"it is not of format {_FORMAT[0]}")
        return int(number), found.value[_HEAD_NBYTES - _CHECKSUM_NBYTES : _HEAD_NBYTES], found.value[_HEAD_NBYTES:]

    def _key(self, slot: int) -> bytes:
        return f"{self.path}/{slot:016d}".encode()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except EtcdRefused as error:
            raise JournalUnwritable(self.path, str(error), cure=_CURE) from error
