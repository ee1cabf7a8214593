# SPDX-License-Identifier: Apache-2.0
"""Who leads a run: one key of etcd, bound to a lease that ends some seconds after its holder's last sign of life.

Rules: the key is made only where it is not there. Its `create_revision`, its life, names one leadership: whoever
makes a decision durable demands that this life goes on, in the same transaction. So the lease need not be right about
the time; it only says when somebody else may try. Every request here may be carried out twice.
"""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from isthmus.elastic.errors import EtcdError, EtcdRefused, JournalCorrupted, Superseded
from isthmus.elastic.journal.etcd import ATTEMPT_S, EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_wire import (
    Done,
    GrantAnswer,
    KeepAliveAnswer,
    KeyValue,
    RangeAnswer,
    Request,
    TxnAnswer,
)

LEASE_S = 5
"""A leader that is gone is replaced after this. Three signs of life fit in."""
TOKEN_NBYTES = 8
UNKNOWN_HOLDER = "an address unknown here, which has ended since"
_ASK_S = 3.0
"""For a question that is asked again anyway."""
_LEASE_IS_GONE = 5


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads: the value of the key. `token` names one `Leadership`, `peer_id` the folder of its process."""

    peer_id: str
    address: str
    token: str


class Leadership:
    """One process's part in the election of a run. Of one thread at a time, but for `is_alive` and `close`.

    Args:
        access: where etcd is.
        path: of the run in etcd.
        peer_id: of this process. What an earlier start in the same folder holds is taken over without waiting: the
            folder's lock proves that it has ended.
        address: where this coordinator serves, for people.
        lease_s: see LEASE_S; etcd makes it longer if its own election takes longer.

    Raises:
        OSError: a file of `access` cannot be used.
    """

    def __init__(
        self, access: EtcdAccess, path: PurePosixPath, *, peer_id: str, address: str, lease_s: int = LEASE_S
    ) -> None:
        self.key = f"{path}/leader".encode()
        self.me = Leader(peer_id=peer_id, address=address, token=secrets.token_hex(TOKEN_NBYTES))
        self.life = 0
        """`create_revision` of our key; 0 before we lead."""
        self._path = path
        self._lease_s = lease_s
        self._lease = 0
        self._access = access
        self._client = EtcdClient(access)
        self._pulse = EtcdClient(access)  # a sign of life must not wait behind anything else

    @property
    def sign_of_life_s(self) -> float:
        """`is_alive` is to be asked this often."""
        return self._lease_s / 3

    def holder(self) -> Leader | None:
        """Who leads now. Raises EtcdUnavailable or EtcdRefused."""
        found = self._found()
        return None if found is None else self.leader_in(found)

    def try_to_lead(self) -> Leader | None:
        """Become the leader if nobody is. None: we lead; else who does. Raises EtcdUnavailable or EtcdRefused."""
        found = self._found()
        if found is not None and (leader := self.leader_in(found)) != self.me:
            if leader.peer_id != self.me.peer_id:
                return leader
            _revoke(self._client, found.lease, timeout_s=_ASK_S)
        return self._campaign(())

    def lead_again(self, condition: Request) -> None:
        """Get the key again after its lease has ended, if nobody has it and `condition` still holds.

        Raises:
            Superseded: another one leads, or has led.
            EtcdUnavailable, EtcdRefused: see etcd.py.
        """
        holder = self._campaign((condition,))
        if holder is not None:
            raise Superseded(self._path, holder.address)

    def is_alive(self) -> bool:
        """Give a sign of life. Whether our lease was still there. Raises EtcdUnavailable or EtcdRefused."""
        answer = self._pulse.call("lease/keepalive", {"ID": self._lease}, KeepAliveAnswer, timeout_s=_ASK_S)
        return answer.result.TTL > 0

    def leader_in(self, found: KeyValue) -> Leader:
        """Decode the key's value. Raises JournalCorrupted."""
        try:
            return msgspec.json.decode(found.value, type=Leader)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise JournalCorrupted(self._path, None, f"the leader's key holds no leader: {error}") from error

    def close(self) -> None:
        """Let go. If we led, another one can lead at once. May be called twice."""
        self._client.close()
        self._pulse.close()
        if self.life:
            self.life = 0
            farewell = EtcdClient(self._access)
            with contextlib.suppress(EtcdError):  # then the lease ends by itself
                _revoke(farewell, self._lease, timeout_s=ATTEMPT_S)
            farewell.close()

    def _found(self) -> KeyValue | None:
        answer = self._client.call("kv/range", {"key": self.key}, RangeAnswer, timeout_s=_ASK_S)
        return answer.kvs[0] if answer.kvs else None

    def _campaign(self, conditions: Sequence[Request]) -> Leader | None:
        """Make the key, with a new lease, if it is not there and the conditions hold. None: it is ours.

        Raises Superseded if nobody has it and yet a condition does not hold.
        """
        grant = self._client.call("lease/grant", {"TTL": self._lease_s}, GrantAnswer, timeout_s=_ASK_S)
        put = {"key": self.key, "value": msgspec.json.encode(self.me), "lease": grant.ID}
        answer = transact(self._client, [made(self.key, 0), *conditions], [put], [self.key], timeout_s=_ASK_S)
        found = answer.found(0)
        if answer.succeeded:
            self.life, self._lease = answer.header.revision, grant.ID
        elif found is None:
            raise Superseded(self._path, UNKNOWN_HOLDER)
        elif (leader := self.leader_in(found)) != self.me:
            return leader
        else:  # made by an attempt whose answer was lost
            self.life, self._lease = found.create_revision, found.lease
        self._lease_s = grant.TTL
        return None


def made(key: bytes, revision: int) -> Request:
    """The condition that this life of the key began with this revision; 0: that there is no such key."""
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}


def transact(
    client: EtcdClient,
    conditions: Sequence[Request],
    puts: Sequence[Request],
    look: Sequence[bytes],
    *,
    deletes: Sequence[Request] = (),
    timeout_s: float,
) -> TxnAnswer:
    """Put and delete if all conditions hold, else look at these keys. Raises as `EtcdClient.call`."""
    request = {
        "compare": conditions,
        "success": [
            *({"requestPut": put} for put in puts),
            *({"requestDeleteRange": deleted} for deleted in deletes),
        ],
        "failure": [{"requestRange": {"key": key}} for key in look],
    }
    return client.call("kv/txn", request, TxnAnswer, timeout_s=timeout_s)


def _revoke(client: EtcdClient, lease: int, *, timeout_s: float) -> None:
    try:
        client.call("lease/revoke", {"ID": lease}, Done, timeout_s=timeout_s)
    except EtcdRefused as refused:
        if refused.code != _LEASE_IS_GONE:
            raise
