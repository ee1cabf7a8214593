"""WHAT is exchanged, given a view: an all-reduce that survives the internet, and the connections under it.

Read README.md first, it says how a byte travels. `Communicator` is the face for tensors, `collective.transport` the
one for control messages and state transfer. No policy in here: who takes part is elastic's business.
"""

from typing import TYPE_CHECKING

from collective.core.types import (
    Epoch,
    Incarnation,
    Instant,
    Member,
    OuterStep,
    PeerId,
    PeerRef,
    RoundKey,
    View,
)
from collective.errors import (
    AddressInUse,
    CollectiveError,
    ConnectionLost,
    DeadlineExceeded,
    HandshakeRefused,
    NonFiniteInput,
    OperationAborted,
    PayloadCorrupted,
    PeerUnreachable,
    PlanMismatch,
    RemoteProtocolError,
    RoundRefused,
)

if TYPE_CHECKING:
    from collective.communicator import BulkOptions, Communicator, ReduceStats, decode_result

__all__ = [
    "AddressInUse",
    "BulkOptions",
    "CollectiveError",
    "Communicator",
    "ConnectionLost",
    "DeadlineExceeded",
    "Epoch",
    "HandshakeRefused",
    "Incarnation",
    "Instant",
    "Member",
    "NonFiniteInput",
    "OperationAborted",
    "OuterStep",
    "PayloadCorrupted",
    "PeerId",
    "PeerRef",
    "PeerUnreachable",
    "PlanMismatch",
    "ReduceStats",
    "RemoteProtocolError",
    "RoundKey",
    "RoundRefused",
    "View",
    "decode_result",
]


if not TYPE_CHECKING:  # else every misspelt name of this package would pass for Any

    def __getattr__(name: str) -> object:
        # The values above are wanted by programs that never touch a tensor; torch is loaded for those that do.
        if name in ("BulkOptions", "Communicator", "ReduceStats", "decode_result"):
            from collective import communicator

            return getattr(communicator, name)
        raise AttributeError(name)
