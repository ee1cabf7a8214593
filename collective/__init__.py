# SPDX-License-Identifier: Apache-2.0
"""WHAT is exchanged, given a view: an all-reduce that survives the internet, and the connections under it.

Read README.md first, it says how a byte travels. `Communicator` is the face for tensors, `collective.transport` the
one for control messages and state transfer. No policy in here: who takes part is elastic's business.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.collective.api.blocking import BlockingCommunicator
    from isthmus.collective.api.communicator import Communicator
    from isthmus.collective.api.standalone import open_communicator, view_of
    from isthmus.collective.core.types import (
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
    from isthmus.collective.errors import (
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
        SecurityRefused,
    )
    from isthmus.collective.links.measurements import LinkReport
    from isthmus.collective.rounds.options import BulkOptions, RoundStats
    from isthmus.collective.rounds.replay import decode_result
    from isthmus.collective.transport.security import Mode, Security, TicketSecurity

__all__ = [
    "AddressInUse",
    "BlockingCommunicator",
    "BulkOptions",
    "CollectiveError",
    "Communicator",
    "ConnectionLost",
    "DeadlineExceeded",
    "Epoch",
    "HandshakeRefused",
    "Incarnation",
    "Instant",
    "LinkReport",
    "Member",
    "Mode",
    "NonFiniteInput",
    "OperationAborted",
    "OuterStep",
    "PayloadCorrupted",
    "PeerId",
    "PeerRef",
    "PeerUnreachable",
    "PlanMismatch",
    "RemoteProtocolError",
    "RoundKey",
    "RoundRefused",
    "RoundStats",
    "Security",
    "SecurityRefused",
    "TicketSecurity",
    "View",
    "decode_result",
    "open_communicator",
    "view_of",
]


if not TYPE_CHECKING:  # else every misspelt name of this package would pass for Any
    # Errors and values are wanted by programs that never touch a tensor or a socket; torch and the TLS library are
    # loaded for those that do. Codecs are wanted where nothing but torch is installed (scripts/bench gpu).
    _VALUES = ("Epoch", "Incarnation", "Instant", "Member", "OuterStep", "PeerId", "PeerRef", "RoundKey", "View")
    _LATE = {
        **dict.fromkeys(__all__, "isthmus.collective.errors"),
        **dict.fromkeys(_VALUES, "isthmus.collective.core.types"),
        **dict.fromkeys(("BulkOptions", "RoundStats"), "isthmus.collective.rounds.options"),
        "Communicator": "isthmus.collective.api.communicator",
        "decode_result": "isthmus.collective.rounds.replay",
        "BlockingCommunicator": "isthmus.collective.api.blocking",
        "LinkReport": "isthmus.collective.links.measurements",
        **dict.fromkeys(("open_communicator", "view_of"), "isthmus.collective.api.standalone"),
        **dict.fromkeys(("Mode", "Security", "TicketSecurity"), "isthmus.collective.transport.security"),
    }

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(name)
        return getattr(importlib.import_module(_LATE[name]), name)
