# SPDX-License-Identifier: Apache-2.0
"""What the coordinator writes down before anybody hears of it.

The journal is the list of these records in order. Replaying them gives the state of the coordinator (its
`recover`); auditing them proves what the run did. Records are never changed, only appended. A `SnapshotRecord` says
all that the ones before it come to: from there on they are needed for proofs alone.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import Epoch, Incarnation, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import Bar, DataPosition, Digest, Held, IndexRange, Natural, Signature, Weight
from isthmus.elastic.core.sizes import KnownSizes
from isthmus.elastic.core.values import Size


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


class CommittedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one member put into a committed round. `agreed` says that it voted for what was committed, and holds it.

    `signature` is that of its ballot, if it agreed. `size` says how large its numbers were in the others' eyes, if that
    was in range; else, and where nobody could compare, it is 0.
    """

    ref: PeerRef
    weight: Weight
    num_tokens: Natural
    consumed: tuple[IndexRange, ...]
    agreed: bool = True
    signature: Signature = b""
    size: Size = 0.0


class CommitRecord(_Record, frozen=True, kw_only=True):
    """A round was committed: `outer_step` is the step it made, `previous` the digest it started from.

    `disputed` are members that had another result because, as they say, one member gave it to them: either may lie.
    `usual_size` says how large numbers were as the member in the middle saw them; 0: they could not be compared.
    """

    key: RoundKey
    outer_step: OuterStep
    previous: Digest
    digest: Digest
    contributions: tuple[CommittedPart, ...]
    final: bool
    disputed: tuple[PeerRef, ...] = ()
    usual_size: Size = 0.0


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

    With `and_earlier` all tickets that were made before it are revoked too. `expires_at_s` and `at_s`, when this was
    decided, are in Unix seconds. It may be forgotten when it has expired.
    """

    ticket_id: Annotated[bytes, Meta(min_length=8, max_length=8)]
    expires_at_s: Natural
    used_by: PeerId | None
    at_s: Natural
    is_once: bool = False
    and_earlier: bool = False


class Departure(msgspec.Struct, frozen=True):
    """The newest start of a peer that was a member and is no more, and the first epoch without it."""

    incarnation: Incarnation
    epoch: Epoch


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the newest request of a peer was given; no ranges if they came back since."""

    ref: PeerRef
    serial: Natural
    ranges: tuple[IndexRange, ...]


class Work(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many samples of a peer's commits have used up, and how many of them were so when its newest payload of a
    fragment was committed."""

    ref: PeerRef
    num_samples: int
    counted: tuple[tuple[int, int], ...]


class SnapshotRecord(_Record, frozen=True, kw_only=True):
    """All that the records before this one come to. It decides nothing: whoever begins with it knows what those told.

    Everything has the order in which it came to be, since some of it is forgotten in that order.

    Attributes:
        view: the newest, with the committed state.
        admitted: the members, each with the epoch since which it stands.
        excused: the late that the round goes on without, likewise.
        contributed: the newest committed state that holds work of this member or excused peer.
        reached: peers whose work a commit has held, in whatever start, and the first step that held it.
        departed: see `Departure`.
        previous: the state before the committed one, if that is known.
        last_commit: made the committed state; None if the run began or went back to it.
        rebuilt: where the run went back last.
        beginning: the state that the run began with, and where the data stood, unless that is forgotten by now.
        commits: all that the run can go back to, oldest first, the committed state's last.
        next_index: the first sample that was never given.
        free: samples that came back.
        owned: what each start of a peer has and no commit has used up.
        granted: the newest grant of every peer that had one.
        work: see `Work`.
        strikes: how often in a row a peer was wrong, with its start at the last time.
        bars: who is kept out.
        tickets: those that do not admit everybody any more.
        let_in: by which ticket each peer came last.
        sizes: see `KnownSizes`.
    """

    view: View
    admitted: tuple[tuple[PeerRef, Epoch], ...]
    excused: tuple[tuple[PeerRef, Epoch], ...]
    contributed: tuple[tuple[PeerRef, Held], ...]
    reached: tuple[tuple[PeerId, OuterStep], ...]
    departed: tuple[tuple[PeerId, Departure], ...]
    previous: Held | None
    last_commit: CommitRecord | None
    rebuilt: RebuildRecord | RollbackRecord | None
    beginning: tuple[Held, DataPosition] | None
    commits: tuple[Certificate, ...]
    next_index: Natural
    free: tuple[IndexRange, ...]
    owned: tuple[tuple[PeerRef, tuple[IndexRange, ...]], ...]
    granted: tuple[Grant, ...]
    work: tuple[Work, ...]
    strikes: tuple[tuple[PeerRef, int], ...]
    bars: tuple[Bar, ...]
    tickets: tuple[TicketRecord, ...]
    let_in: tuple[TicketRecord, ...]
    sizes: KnownSizes = KnownSizes()

    @property
    def committed(self) -> Held | None:
        """The committed state; None before the run began."""
        if self.commits:
            return self.commits[-1].made
        return None if self.beginning is None else self.beginning[0]

    @property
    def is_final(self) -> bool:
        """Whether the run's last outer step is committed."""
        return bool(self.commits) and self.commits[-1].final


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
    | SnapshotRecord
)
