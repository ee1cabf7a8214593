# SPDX-License-Identifier: Apache-2.0
"""What the elastic layer tells whoever watches: event logs, metrics, the page.

Rules: observations are facts after they happened, frozen, and cheap. An observer runs on the event loop between two
steps of a machine: it must not block, and what it raises is a bug that ends the run. They carry no time; the observer
stamps them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.collective.core.types import OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import Held, Trust
from isthmus.elastic.core.records import Record
from isthmus.elastic.state.parity import Difference

# ------------------------------------------------------------------------------------ at the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWritten:
    """A record is durable; nobody has heard of it yet. Views, commits, leases, joins and evictions are records."""

    slot: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExposed:
    """A peer has said what is not true, though nothing follows from it: a forged certificate."""

    ref: PeerRef
    outer_step: OuterStep
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """A control connection of this start of a peer is up, perhaps in place of an older one."""

    ref: PeerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDisconnected:
    """The control connection of this start of a peer is gone."""

    ref: PeerRef
    cause: str


# ------------------------------------------------------------------------------------ at a peer


@dataclass(frozen=True, slots=True)
class CoordinatorConnected:
    """The control connection to the coordinator is up."""

    address: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The control connection to the coordinator is gone; this peer dials again."""

    cause: str


@dataclass(frozen=True, slots=True)
class ViewInstalled:
    """The collective layer has this view. `fault` says why some of its links could not be made."""

    view: View
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class BecameActive:
    """This peer is a member and holds the view's state."""

    view: View


@dataclass(frozen=True, slots=True)
class BecameLearner:
    """This peer is no member (any more)."""

    reason: str


@dataclass(frozen=True, slots=True)
class BecameExcused:
    """This peer is late: the round goes on without it in this view."""

    view: View


@dataclass(frozen=True, slots=True)
class WorkCarriedOver:
    """A round was committed without this peer's payload, which goes into the next one. `held` is the state now."""

    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """The exchange of a round began here."""

    key: RoundKey
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStaged:
    """The exchange is done; this peer votes for the digest."""

    key: RoundKey
    digest: bytes
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBroke:
    """The exchange could not finish in this view."""

    key: RoundKey
    suspects: tuple[PeerId, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class RoundAborted:
    """The coordinator's word ended this exchange, or what it staged is forgotten."""

    key: RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommitted:
    """What the round staged is the shared state now. `seconds` since the payload was handed in."""

    key: RoundKey
    held: Held
    final: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateKept:
    """This is the newest commit that this peer can prove."""

    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAsks:
    """The coordinator has lost its journal: `testified` of the `needed` members have brought a certificate so far."""

    testified: int
    needed: int


@dataclass(frozen=True, slots=True)
class TrustHeard:
    """The coordinator says whose certificates count and who is put out; it may have said so before."""

    trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class WentBack:
    """The run goes on under `epoch` from `outer_step`, which is not the newest one that was told, for this `cause`."""

    epoch: int
    outer_step: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpStarted:
    """This learner begins to fetch or replay, or aims at a newer target."""

    target: Held
    num_donors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpEnded:
    """`held` is what this learner holds now, or None with the cause why it could not be had this time."""

    held: Held | None
    cause: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviated:
    """The others agreed on `committed` where this peer had voted for another digest; told when it is repaired.

    `where` is None if nobody could say any more what the committed state consisted of. `num_damaged` chunks of the
    state that this peer computed from had other bits than were committed: its memory is not to be trusted.
    """

    committed: Held
    voted: bytes
    where: Difference | None
    num_damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """This peer's part in the run is over."""

    code: int
    reason: str


ElasticEvent = (
    RecordWritten
    | PeerExposed
    | PeerConnected
    | PeerDisconnected
    | CoordinatorConnected
    | CoordinatorLost
    | ViewInstalled
    | BecameActive
    | BecameLearner
    | BecameExcused
    | WorkCarriedOver
    | RoundStarted
    | RoundStaged
    | RoundBroke
    | RoundAborted
    | RoundCommitted
    | CertificateKept
    | CoordinatorAsks
    | WentBack
    | TrustHeard
    | CatchUpStarted
    | CatchUpEnded
    | Deviated
    | Finished
)

Observe = Callable[[ElasticEvent], None]


def ignore(_event: ElasticEvent) -> None:
    """An observer that does not look."""
