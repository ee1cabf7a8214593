# SPDX-License-Identifier: Apache-2.0
"""What a caller may choose about moving bulk bytes, and what it is told afterwards. Values only."""

from dataclasses import dataclass, field

from isthmus.collective.core.types import PeerRef
from isthmus.collective.rounds.supervision import Patience
from isthmus.collective.transport.sockets import SocketOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """What one finished round was. Bytes include headers."""

    members: tuple[PeerRef, ...]
    weights: tuple[float, ...]
    """Of the members, in their order."""
    weight_sum: float
    bytes_sent: int
    bytes_received: int
    seconds: float
    plan: str = "butterfly"
    predicted_s: float | None = None
    """What the cost model expected, where links are measured."""
    sizes: tuple[float, ...] = ()
    """Of a mean or sum of floats: the root mean square of each member's numbers, as far as they were added up here; 0
    where none of its own were. All are of the same elements, so they can be compared."""
    sums: tuple[float, ...] = ()
    """By root: the size of its sum where that is larger than every part seen here, else 0; comparable with `sizes`. The
    root has made it so, or a part that only the root has seen: see rounds/sizes.py."""
    roots: tuple[tuple[int, int, int], ...] = ()
    """(rank, start, stop): who made the result of these elements and gave it to all others itself; empty where results
    go through third hands."""
    coded: tuple[tuple[int, int], ...] = ()
    """(start, stop): where this member's own part was encoded by itself. What it gave of the rest was added as it was,
    and perhaps encoded with a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkOptions:
    """How one peer moves bulk bytes. Local: peers may differ."""

    eager_chunks: int = 4
    """Chunks sent to a peer that has not posted the round yet; of short ones as many as make the same bytes."""
    max_rounds_ahead: int = 4
    """Rounds of which a peer may send us chunks before we post them."""
    install_grace_s: float = 1.0
    """How long `install` waits for new connections; the first round goes on with what is missing."""
    patience: Patience = field(default_factory=Patience)
    sockets: SocketOptions = field(default_factory=SocketOptions)
    max_upload: float | None = None
    """Bytes a second that all bulk links together may send; None for no bound."""
    max_download: float | None = None

    def __post_init__(self) -> None:
        if min(self.eager_chunks, self.max_rounds_ahead) < 1:
            raise ValueError(f"eager chunks and rounds ahead must be at least 1: {self}")
