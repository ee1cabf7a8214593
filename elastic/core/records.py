# SPDX-License-Identifier: Apache-2.0
"""What the coordinator writes down before anybody hears of it.

The journal is the list of these records in order. Replaying them gives the state of the coordinator (its
`recover`); auditing them proves what the run did. Records are never changed, only appended.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from collective.core.types import Epoch, OuterStep, PeerId, PeerRef, RoundKey, View
from elastic.core.certificate import Certificate
from elastic.core.messages import Bar, Digest, IndexRange, Natural, Weight


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of every journal record."""


class Genesis(_Record, frozen=True, kw_only=True):
    """The state the run started from: step 0, or a checkpoint. `next_index` is the first free sample."""

    outer_step: OuterStep
    digest: Digest
    next_index: Natural
    returned: tuple[IndexRange, ...] = ()


class RebuildRecord(_Record, frozen=True, kw_only=True):
    """The journal before this one was lost. The run goes on from the newest commit that its peers could prove.

    `epoch` is newer than any that the lost journal can have reached. Without a certificate nothing was committed that
    anybody could prove, and a Genesis follows. `testified` are the members of the certificate that brought one;
    `insisted` says that they were no majority and the operator went on all the same.
    """

    epoch: Epoch
    certificate: Certificate | None
    testified: tuple[PeerRef, ...]
    insisted: bool


class RollbackRecord(_Record, frozen=True, kw_only=True):
    """Nobody who holds the committed state came back: the run goes on from the newest commit that somebody holds.

    `certificate` is of that commit; None if it is the state that the journal begins with. `given_up` is the newest
    outer step that was committed: it and all others after the certificate's are no part of the run any more, and what
    was given to peers since then is void. `holders` hold the state that the run goes on from.
    """

    epoch: Epoch
    certificate: Certificate | None
    given_up: OuterStep
    holders: tuple[PeerRef, ...]


class ViewRecord(_Record, frozen=True, kw_only=True):
    """A view was decided. `cause` says why, for people. `excused`: see `NewView`; all of them, also older ones.

    `struck` are members that it does without because what they said of their work was not true.
    """

    view: View
    cause: str
    excused: tuple[PeerRef, ...] = ()
    struck: tuple[PeerRef, ...] = ()


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one member put into a committed round. `agreed` says that it voted for what was committed, and holds it."""

    ref: PeerRef
    weight: Weight
    num_tokens: Natural
    consumed: tuple[IndexRange, ...]
    agreed: bool = True


class CommitRecord(_Record, frozen=True, kw_only=True):
    """A round was committed: `outer_step` is the step it made, `previous` the digest it started from.

    `disputed` are members that had another result because, as they say, one member gave it to them: either may lie.
    """

    key: RoundKey
    outer_step: OuterStep
    previous: Digest
    digest: Digest
    contributions: tuple[Contribution, ...]
    final: bool
    disputed: tuple[PeerRef, ...] = ()


class LeaseRecord(_Record, frozen=True, kw_only=True):
    """Sample indices were given to a peer."""

    ref: PeerRef
    serial: Natural
    ranges: tuple[IndexRange, ...]


class ReleaseRecord(_Record, frozen=True, kw_only=True):
    """A peer is gone since `epoch`; its leases that no commit consumed are free again."""

    ref: PeerRef
    epoch: Epoch
    ranges: tuple[IndexRange, ...]


class BarRecord(_Record, frozen=True, kw_only=True):
    """The operator has put a peer out. A later record of the same peer adds to it."""

    bar: Bar


class TicketRecord(_Record, frozen=True):
    """A peer was let in by a ticket, which admits no other one if it `is_once`; or it was revoked, by nobody.

    `expires_at_s` and `at_s`, when this was decided, are in Unix seconds. It may be forgotten when it has expired.
    """

    ticket_id: Annotated[bytes, Meta(min_length=8, max_length=8)]
    expires_at_s: Natural
    used_by: PeerId | None
    at_s: Natural
    is_once: bool = False


Record = (
    Genesis
    | RebuildRecord
    | RollbackRecord
    | ViewRecord
    | CommitRecord
    | LeaseRecord
    | ReleaseRecord
    | BarRecord
    | TicketRecord
)
