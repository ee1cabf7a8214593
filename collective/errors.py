# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between peers, by who must act.

    CollectiveError
    ├── expected fault: go on in the next view, or dial again
    │   ├── OperationAborted(key, cause, suspects)
    │   ├── ConnectionLost(cause)
    │   │   └── StreamBroken(cause)
    │   ├── PeerUnreachable(address, cause)
    │   └── DeadlineExceeded(what, timeout_s)
    ├── a peer's fault: its connection is closed, it may be evicted
    │   ├── RemoteProtocolError(reason)
    │   │   └── PayloadCorrupted(reason)
    │   └── PlanMismatch(field, ours, theirs, peer_id)
    ├── the operator's: HandshakeRefused(code, reason), SecurityRefused(reason), AddressInUse(address)
    └── the caller's: NonFiniteInput(first_index), RoundRefused(key, reason)

Rules: errors carry typed attributes; operating system errors are mapped once, in collective/transport. A
`RemoteProtocolError` never says anything about us: whatever bytes arrive, that is the only error they can cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isthmus.collective.core.types import PeerId, RoundKey


class CollectiveError(Exception):
    """Base of everything this package raises on purpose."""


class OperationAborted(CollectiveError):
    """The round cannot finish in this view. The input (out of place) is unchanged; try again in the next view.

    `suspects` are the peers that broke or fell silent, possibly none (a newer view, a cancelled caller).
    `told_by` is the member that gave up first and named them; None if this peer has found them itself. If nobody is
    named and the round took too long, it is the member that this one waits for.
    """

    def __init__(
        self, key: RoundKey, cause: str, suspects: Sequence[PeerId] = (), told_by: PeerId | None = None
    ) -> None:
        super().__init__(f"round {key.epoch}/{key.outer_step}/{key.fragment} aborted: {cause}")
        self.key = key
        self.cause = cause
        self.suspects = tuple(suspects)
        self.told_by = told_by


class ConnectionLost(CollectiveError):
    """The connection is gone: closed, reset, or silent past the kernel's limits."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"connection lost: {cause}")
        self.cause = cause


class StreamBroken(ConnectionLost):
    """It was lost for what came over it: bytes changed under the encryption, or an end within a frame.

    It says nothing about a peer, for anybody on the way can cause it. `cause` is a short word list for counters.
    """


class PeerUnreachable(CollectiveError):
    """Nobody answered at this address in time.

    `is_nowhere`: there is no such address, and trying again is in vain. `is_refused`: the host is up and says that
    nobody listens there. Both hold of an address with several candidates if they hold of each. `attempts` has what was
    tried, each with its cause.
    """

    def __init__(
        self,
        address: str,
        cause: str,
        *,
        is_nowhere: bool = False,
        is_refused: bool = False,
        attempts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{address} cannot be reached: {cause}" if attempts is None else f"nobody answers: {cause}")
        self.attempts = attempts or {address: cause}
        self.address = address
        self.cause = cause
        self.is_nowhere = is_nowhere
        self.is_refused = is_refused


class DeadlineExceeded(CollectiveError):
    """An awaited step did not end in its time."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what} took longer than {timeout_s:g} s")
        self.what = what
        self.timeout_s = timeout_s


class RemoteProtocolError(CollectiveError):
    """The other side broke the protocol. `reason` is a short word list for counters, never its bytes."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PayloadCorrupted(RemoteProtocolError):
    """A frame's checksum does not fit its bytes."""


class PlanMismatch(CollectiveError):
    """A member posted the same round with other terms. All members of the view see this error.

    `told_by` is the member that says so of another one; None if this peer has the word of `peer_id` itself.
    """

    def __init__(
        self, field: str, ours: object, theirs: object, peer_id: PeerId, told_by: PeerId | None = None
    ) -> None:
        by_whom = "" if told_by is None else f", says {told_by}"
        super().__init__(f"peer {peer_id} posted this round with {field}={theirs}, here it is {ours}{by_whom}")
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.peer_id = peer_id
        self.told_by = told_by


class HandshakeRefused(CollectiveError):
    """The other side does not want this connection. `code` is the exit code it asks the dialler to end with."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class SecurityRefused(CollectiveError):
    """This connection is not safe: not encrypted, or one side is not who it should be.

    It says nothing about a peer, for anybody on the way can cause it. `reason` is a short word list for counters.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the connection is not safe: {reason}")
        self.reason = reason


class AddressInUse(CollectiveError):
    """Somebody else listens at this address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"{address} is in use: stop the process that listens there, or choose another port")
        self.address = address


class NonFiniteInput(CollectiveError):
    """The caller's tensor holds NaN or infinity. No member gets a result."""

    def __init__(self, first_index: int) -> None:
        super().__init__(f"the tensor is not finite near element {first_index}; no member got a result")
        self.first_index = first_index


class RoundRefused(CollectiveError):
    """This round cannot be posted here: wrong epoch, a key used before, or no view yet."""

    def __init__(self, key: RoundKey, reason: str) -> None:
        super().__init__(f"round {key.epoch}/{key.outer_step}/{key.fragment} cannot be posted: {reason}")
        self.key = key
        self.reason = reason
