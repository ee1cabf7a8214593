# SPDX-License-Identifier: Apache-2.0
"""What peers and the coordinator say to each other.

Every message is idempotent and may arrive late, twice or out of order: senders repeat on timers, receivers decide
by epoch, outer step and incarnation. The sender's identity comes from its connection's handshake, never from a
message. Digests are the 32-byte roots of elastic/state/digest.py.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.address import MAX_LENGTH
from isthmus.collective.core.types import (
    PEER_ID_PATTERN,
    Epoch,
    Incarnation,
    Member,
    OuterStep,
    PeerId,
    PeerRef,
    RoundKey,
    View,
)
from isthmus.elastic.core.certificate import Certificate

# Everybody has these from here: whoever speaks of messages speaks of what is in them.
from isthmus.elastic.core.values import DataPosition as DataPosition
from isthmus.elastic.core.values import Digest as Digest
from isthmus.elastic.core.values import Held as Held
from isthmus.elastic.core.values import IndexRange as IndexRange
from isthmus.elastic.core.values import Mark as Mark
from isthmus.elastic.core.values import Natural as Natural
from isthmus.elastic.core.values import Reason as Reason
from isthmus.elastic.core.values import Signature as Signature
from isthmus.elastic.core.values import Size as Size
from isthmus.elastic.core.values import Weight as Weight


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of every control message."""


# ------------------------------------------------------------------------------------ peer to coordinator


class Join(_Message, frozen=True, kw_only=True):
    """ "Let me in", and after a reconnect "I am still here". Fresh and repeated Joins are the same message.

    `epoch` is the newest epoch its sender has heard of. A former member that does not know yet that it was dropped
    gives itself away by it: it must hear `Evicted`, and forget payload and leases, before it may be a learner.

    `certificate` is the newest commit that it can prove. A coordinator that has lost its journal goes on from it.
    """

    epoch: Epoch = Epoch(0)
    address: Annotated[str, Meta(max_length=MAX_LENGTH)]
    manifest_digest: Digest
    held: Held | None = None
    certificate: Certificate | None = None


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sent every `heartbeat_interval_s`, and when a payload is handed in.

    `progress` grows whenever the peer gets anything done, bytes included; `inner_steps` counts those of this start
    alone. `blocked` says that it waits for others, so that standing still is not its fault; `ready`, that its payload
    of the round from `outer_step` is handed in.
    """

    epoch: Epoch
    outer_step: OuterStep
    progress: Natural
    blocked: bool
    ready: bool = False
    inner_steps: Natural = 0


class Synced(_Message, frozen=True, kw_only=True):
    """A learner holds this committed state now."""

    held: Held


class Vote(_Message, frozen=True, kw_only=True):
    """The exchange is done and absorbed into staging: the shared state would have this digest.

    The `signature` is of the `ballot` (certificate.py); the certificate of the commit carries it to everybody.
    `weight`, `num_tokens` and `consumed` describe the sender's own contribution to the round. `weights` and `sizes` say
    what the sender saw of everybody's, by rank: the weights that it counted with, and how large the numbers were that
    it added up itself (0: none of this member's). `sums` says how large a sum was that each member has given to the
    sender, where it was larger than all these numbers (else 0; empty: none was). `results` are marks of what each
    member has added up and given to the sender; one of two members that have other marks of the same sum is not honest.
    """

    key: RoundKey
    digest: Digest
    weight: Weight
    num_tokens: Natural
    consumed: Annotated[tuple[IndexRange, ...], Meta(max_length=1024)]
    weights: Annotated[tuple[Weight, ...], Meta(max_length=1024)] = ()
    sizes: Annotated[tuple[Size, ...], Meta(max_length=1024)] = ()
    sums: Annotated[tuple[Size, ...], Meta(max_length=1024)] = ()
    results: Annotated[tuple[Mark, ...], Meta(max_length=1024)] = ()
    signature: Signature = b""


class RoundFailed(_Message, frozen=True, kw_only=True):
    """The exchange of this round cannot finish here. `suspects` are the peers that fell silent, if any.

    `told_by` is the member that gave up first and named these suspects; None if the sender has found them itself.
    `differs`: the suspect planned this round otherwise than the sender, and both may be honest.
    """

    key: RoundKey
    suspects: Annotated[tuple[PeerId, ...], Meta(max_length=1024)]
    cause: Reason
    told_by: PeerId | None = None
    differs: bool = False


class Leave(_Message, frozen=True, kw_only=True):
    """Let me go at the next commit boundary (`now` = at once, handing back leases).

    Who alone holds the committed state is answered with a Welcome that names it: it is no member any more, and stays
    until another peer holds that state. `held` and `address` are for a coordinator that does not know the sender.
    """

    now: bool = False
    held: Held | None = None
    address: Annotated[str, Meta(max_length=MAX_LENGTH)] = ""


class Unmet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No link with this start of a peer, and why."""

    ref: PeerRef
    cause: Annotated[str, Meta(max_length=160)]


class Met(_Message, frozen=True, kw_only=True):
    """Which of those that its sender was asked to meet it has a link with, and which it tried in vain."""

    peers: Annotated[tuple[PeerRef, ...], Meta(max_length=2048)] = ()
    unmet: Annotated[tuple[Unmet, ...], Meta(max_length=2048)] = ()


class LeaseRequest(_Message, frozen=True, kw_only=True):
    """More data, please: `num_samples` sample indices. `serial` makes repeats recognisable.

    `epoch` is the sender's view; a request from before its last admission is void, or the grant would be lost.
    """

    epoch: Epoch
    serial: Natural
    num_samples: Annotated[int, Meta(ge=1, le=2**31)]


PeerMessage = Join | Heartbeat | Synced | Vote | RoundFailed | Leave | LeaseRequest | Met


# ------------------------------------------------------------------------------------ coordinator to peer


class Welcome(_Message, frozen=True, kw_only=True):
    """You are a learner. `target` is the newest committed state, `donors` serve it.

    No target means that the run has no state yet; `found` asks this one peer to make it.
    """

    epoch: Epoch
    target: Held | None
    donors: Annotated[tuple[Member, ...], Meta(max_length=1024)]
    found: bool = False


class NewView(_Message, frozen=True, kw_only=True):
    """The membership from now on. Work of older epochs is void.

    The round goes on without the `excused`: they were members and are late. They keep their payload and their leases,
    follow the commits, and are members again after the next one. `contributed` is the newest committed state that
    holds work of the addressee, which may not have heard of that commit: it may have it staged, and what it has done
    from an older state is spent. `weights`, if there are any: what the members' parts weigh in the view's first round,
    by rank, whatever they say of it to each other. Before the outer step `survey_from` the members plan their rounds
    without asking each other about their links.
    """

    view: View
    contributed: Held | None = None
    excused: Annotated[tuple[PeerRef, ...], Meta(max_length=1024)] = ()
    weights: Annotated[tuple[Weight, ...], Meta(max_length=1024)] = ()
    survey_from: Natural = 0


class Commit(_Message, frozen=True, kw_only=True):
    """The round that the certificate names is committed. Whoever hears of it keeps the certificate."""

    certificate: Certificate


class Evicted(_Message, frozen=True, kw_only=True):
    """You are no member of epoch `epoch`. Answer with a fresh Join if you want to be."""

    epoch: Epoch
    reason: Reason


class Rebuilding(_Message, frozen=True, kw_only=True):
    """This coordinator has lost its journal and asks what everybody holds: answer with a Join, until you are told more.

    `testified` of the `needed` members of the newest certificate that came so far have brought one themselves.
    """

    testified: Natural
    needed: Natural


class Rebuilt(_Message, frozen=True, kw_only=True):
    """The run goes on from this certificate under `epoch`, which is newer than any before: its journal was lost, or
    nobody holds what was committed later.

    You are no member; payload and leases are void, and so is every state that was made after the certificate before
    this epoch, unless it is `committed`, what the run holds by now: who starts again may have that on its disk and not
    have written down that the run was rebuilt (scenarios/newest_state_under_an_old_certificate.toml). Answer with a
    fresh Join. Without a certificate the run goes on from its beginning. `given_up` is the newest outer step that was
    committed, where that is known; 0 where the journal was lost.
    """

    epoch: Epoch
    certificate: Certificate | None = None
    committed: Held | None = None
    given_up: OuterStep = OuterStep(0)


class Refused(_Message, frozen=True, kw_only=True):
    """You cannot take part, and trying again will not help. `code` is the exit code to end with."""

    code: Annotated[int, Meta(ge=0, le=255)]
    reason: Annotated[str, Meta(max_length=4096)]


class Bar(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A peer's starts up to `incarnation` are kept out, and its certificates up to this number are void."""

    peer_id: Annotated[PeerId, Meta(pattern=PEER_ID_PATTERN)]
    incarnation: Annotated[Incarnation, Meta(ge=0, le=2**53)]
    certificate: Natural


class Trust(_Message, frozen=True, kw_only=True):
    """Whom to believe: certificates of these authorities, except for what is barred. Adds to what was said before."""

    authorities: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=8)]
    barred: Annotated[tuple[Bar, ...], Meta(max_length=1024)]


class LeaseGrant(_Message, frozen=True, kw_only=True):
    """These sample indices are yours until you are no member any more. Repeats the request's serial."""

    serial: Natural
    ranges: Annotated[tuple[IndexRange, ...], Meta(max_length=4096)]


class Goodbye(_Message, frozen=True, kw_only=True):
    """You have left; nothing of yours is pending. `alone`: nobody else is known to hold the state of this step.

    `held` is what the addressee held as far as was known when this was decided. Who holds another state by now may be
    the only one that does: it is not meant, and asks again (seeds 4889, 6667).
    """

    outer_step: OuterStep
    alone: bool = False
    held: Held | None = None


class Meet(_Message, frozen=True, kw_only=True):
    """Make links with these, beside whatever you do: they may become members with you. Say `Met` of each."""

    peers: Annotated[tuple[Member, ...], Meta(max_length=2048)]


CoordinatorMessage = (
    Welcome | NewView | Commit | Evicted | Rebuilding | Rebuilt | Refused | Trust | LeaseGrant | Goodbye | Meet
)
