# SPDX-License-Identifier: Apache-2.0
"""Events (facts that happened) and effects (orders to carry out) of the two elastic machines.

Contract with whoever drives a machine:
* Effects are carried out in list order. A `Persist` is durable before any later effect of the list starts.
* Every asynchronous effect ends by feeding exactly one event back: `StartExchange` → `ExchangeDone` or
  `ExchangeFailed` (none after `AbortExchange` of the same key), `CatchUp` → `CaughtUp` or `CatchUpFailed`
  (a newer `CatchUp` replaces a running one, which then stays silent), `FoundState` → `CaughtUp`.
* `Tick` is fed when `next_deadline()` has passed. Time is the caller's.
"""

from dataclasses import dataclass

from isthmus.collective.core.types import Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import CoordinatorMessage, DataPosition, Held, IndexRange, PeerMessage
from isthmus.elastic.core.records import Record


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline has passed."""


# ------------------------------------------------------------------------------------ coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSaid:
    """A message arrived from this start of a peer."""

    sender: PeerRef
    message: PeerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnectionLost:
    """The control connection of this start of a peer broke. It may come back."""

    sender: PeerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOut:
    """Evict a peer: what there is of it now, with its certificates up to this number, or whatever may come.

    `incarnation` is its newest start that is connected, if any is: it need not have said anything yet. `at_s` is now in
    Unix seconds.
    """

    peer_id: PeerId
    incarnation: Incarnation | None
    certificate: int
    for_ever: bool
    at_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UseTicket:
    """A ticket, perhaps for one peer only, is used by this one. Instants are in Unix seconds."""

    ticket_id: bytes
    expires_at_s: int
    used_by: PeerId
    at_s: int
    is_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeTicket:
    """Let a ticket admit nobody any more; with `and_earlier` none made before it either. Instants as in `UseTicket`."""

    ticket_id: bytes
    expires_at_s: int
    at_s: int
    and_earlier: bool = False


Order = PutOut | UseTicket | RevokeTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """The operator, or this process itself, wants something. Answered by `Answered` with the same serial."""

    serial: int
    order: Order


CoordinatorEvent = PeerSaid | PeerConnectionLost | Ordered | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make the record durable before any later effect."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToPeer:
    """Send if connected, else forget: the machine repeats what matters."""

    to: PeerRef
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Resign:
    """The journal is an old copy, as a peer has proved: stop, and let nobody hear of it any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """End the connections of a peer's starts up to this one, when they have been told what came before.

    Nothing is heard of them any more.
    """

    peer_id: PeerId
    up_to: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The order with this serial is carried out, or refused for a reason."""

    serial: int
    refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expose:
    """Tell the operator what a peer has said that is not true, after this committed step."""

    ref: PeerRef
    outer_step: OuterStep
    cause: str


CoordinatorEffect = Persist | SendToPeer | Disconnect | Answered | Resign | Expose


# ------------------------------------------------------------------------------------ member


@dataclass(frozen=True, slots=True)
class Connected:
    """The control connection to the coordinator is up (again)."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The control connection is gone; the shell is dialling again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSaid:
    """A message arrived from the coordinator."""

    message: CoordinatorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReady:
    """The local payload of the round after `outer_step` is emitted and kept until its outcome is known."""

    outer_step: OuterStep
    fragment: int
    weight: float
    num_tokens: int
    consumed: tuple[IndexRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMade:
    """This peer has a link with `ref`, as `MeetPeers` asked; or it tried in vain, for this `cause`."""

    ref: PeerRef
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeDone:
    """The round's result is staged; the shared state would have this digest. `weights` and so on: see `Vote`."""

    key: RoundKey
    digest: bytes
    weights: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    results: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFailed:
    """The exchange cannot finish in this view; the payload is untouched. `told_by`, `differs`: see `RoundFailed`."""

    key: RoundKey
    suspects: tuple[PeerId, ...]
    cause: str
    told_by: PeerId | None = None
    differs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp:
    """A committed state is held now: fetched, replayed, founded or loaded from a checkpoint."""

    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpFailed:
    """No donor could serve the state this time."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Something got done: `progress` and `inner_steps` only grow. `blocked` = waiting for others."""

    progress: int
    blocked: bool
    inner_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesWanted:
    """The trainer will soon need this many more sample indices."""

    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """The user wants this peer to leave: at the next commit boundary, or `now`."""

    now: bool


MemberEvent = (
    Connected
    | Disconnected
    | CoordinatorSaid
    | LinkMade
    | RoundReady
    | ExchangeDone
    | ExchangeFailed
    | CaughtUp
    | CatchUpFailed
    | Progressed
    | LeasesWanted
    | LeaveRequested
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToCoordinator:
    """Send if connected, else forget: the machine repeats what matters."""

    message: PeerMessage


@dataclass(frozen=True, slots=True)
class FoundState:
    """Make the run's first state, install it, and answer with CaughtUp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """Get from what is held to `target`, by replaying commits or fetching a snapshot, and install it."""

    target: Held
    donors: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallView:
    """Reconfigure the collective layer; exchanges of older epochs end. `survey_from`: see `NewView`."""

    view: View
    survey_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BecomeActive:
    """This peer is a member and holds the view's state: train from the anchor."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class BecomeLearner:
    """This peer is no member: stop training, forget the payload and its leases. What is staged stays until it is
    aborted or installed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BecomeExcused:
    """This peer is late and the round goes on without it: train on, with payload and leases. Commits are followed."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOver:
    """The round from `outer_step` was committed without this peer's payload: the work goes into the next round.

    `held` is the state now.
    """

    outer_step: OuterStep
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class StartExchange:
    """Run the exchange of this round among the view's members, from the kept payload, into staging.

    `weights`, if there are any: what everybody's part weighs, by rank, whatever they say.
    """

    view: View
    key: RoundKey
    weight: float
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortExchange:
    """Stop this exchange and forget what it staged. The payload stays."""

    key: RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallStaged:
    """The round is committed: what it staged becomes the shared state `held`, member or not.

    `position` is where the data stands then; None if the commit was learnt from a view.
    """

    key: RoundKey
    held: Held
    final: bool
    position: DataPosition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLeases:
    """These sample indices may be trained on."""

    ranges: tuple[IndexRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCertificate:
    """This is the newest commit that this peer can prove: keep it beyond this process. Nothing waits for it."""

    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeLinks:
    """Connect with these beside everything else; a `LinkMade` for each says what became of it."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """This peer's part in the run is over. `code` is the exit code, `reason` one sentence."""

    code: int
    reason: str


MemberEffect = (
    SendToCoordinator
    | FoundState
    | CatchUp
    | InstallView
    | BecomeActive
    | BecomeLearner
    | BecomeExcused
    | CarryOver
    | StartExchange
    | AbortExchange
    | InstallStaged
    | TakeLeases
    | KeepCertificate
    | MakeLinks
    | Finish
)
