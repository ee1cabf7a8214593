# SPDX-License-Identifier: Apache-2.0
"""Who did what: the figures of a run that its journal holds. Judges nothing."""

from collections.abc import Sequence

import msgspec

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.elastic.audit.beginning import beginning_at
from isthmus.elastic.audit.lineage import given_up_in, rollbacks_in, state_after
from isthmus.elastic.core.records import (
    CommitRecord,
    Genesis,
    RebuildRecord,
    Record,
    RollbackRecord,
    SnapshotRecord,
    ViewRecord,
)


class Share(msgspec.Struct, kw_only=True):
    """What one peer put into the steps that count. `num_starts` counts those of its starts that were members."""

    peer_id: PeerId
    num_starts: int = 0
    num_commits: int = 0
    num_tokens: int = 0
    num_samples: int = 0


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A member that the view `epoch` went on without. `outer_step` is the one committed then, `cause` for people."""

    peer_id: PeerId
    incarnation: int
    epoch: int
    outer_step: int
    cause: str


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """The run went back from `from_step` to `to_step` under `epoch`; what the commits between had held is lost."""

    epoch: int
    from_step: int
    to_step: int
    num_commits: int
    num_tokens: int
    num_samples: int


class Account(msgspec.Struct, kw_only=True):
    """A run as a whole: from `first_step`, which its journal began with, to `outer_step`.

    Commits that the run has given up count only in `given_up`.
    """

    first_step: int = 0
    outer_step: int = 0
    is_complete: bool = False
    is_rebuilt: bool = False
    """The journal before this one was lost; it is told of what came after."""
    num_records: int = 0
    num_commits: int = 0
    num_views: int = 0
    epoch: int = 0
    fewest_members: int = 0
    """In any commit."""
    most_members: int = 0
    shares: tuple[Share, ...] = ()
    """In the order in which the peers became members."""
    departures: tuple[Departure, ...] = ()
    given_up: tuple[GivenUp, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of everybody."""
        return sum(share.num_tokens for share in self.shares)


def account_for(records: Sequence[Record]) -> Account:
    """Add the records up."""
    account = Account(num_records=len(records))
    shares: dict[PeerId, Share] = {}
    starts: set[PeerRef] = set()
    departures: list[Departure] = []
    members: dict[PeerRef, None] = {}
    given_up = given_up_in(records)
    for slot, record in enumerate(records):
        match record:
            case Genesis() | RebuildRecord() | SnapshotRecord():
                _begin(account, slot, record)
                if isinstance(record, SnapshotRecord) and slot == 0:
                    members = dict.fromkeys(ref for ref, _ in (*record.admitted, *record.excused))
                    account.epoch = record.view.epoch
                    # In the order of ranks; whether they have contributed before is not known here.
                    shares = {ref.peer_id: Share(peer_id=ref.peer_id, num_starts=1) for ref in members}
                    starts = set(members)
            case ViewRecord(view=view, excused=excused):
                account.num_views += 1
                account.epoch = max(account.epoch, view.epoch)
                stays = {member.ref: None for member in view.members}
                standing = stays | dict.fromkeys(excused)
                departures += (_departure(ref, record, account.outer_step) for ref in members if ref not in standing)
                for ref in stays:
                    share = shares.setdefault(ref.peer_id, Share(peer_id=ref.peer_id))
                    share.num_starts += ref not in starts
                starts |= stays.keys()
                members = standing
            case CommitRecord():
                account.outer_step = record.outer_step
                if slot not in given_up:
                    _add_commit(account, shares, record)
            case RollbackRecord():
                account.outer_step, _ = state_after(record, records)
                account.epoch = max(account.epoch, record.epoch)
                members = {}
            case _:
                pass
    account.shares, account.departures = tuple(shares.values()), tuple(departures)
    account.given_up = _all_given_up(records)
    return account


def _all_given_up(records: Sequence[Record]) -> tuple[GivenUp, ...]:
    found: list[GivenUp] = []
    for rollback in rollbacks_in(records):
        record = records[rollback.slot]
        assert isinstance(record, RollbackRecord)
        commits = [commit for slot in rollback.given_up if isinstance(commit := records[slot], CommitRecord)]
        parts = [item for commit in commits for item in commit.contributions]
        found.append(
            GivenUp(
                epoch=record.epoch,
                from_step=record.given_up,
                to_step=state_after(record, records)[0],
                num_commits=len(commits),
                num_tokens=sum(item.num_tokens for item in parts),
                num_samples=sum(len(piece) for item in parts for piece in item.consumed),
            )
        )
    return tuple(found)


def _begin(account: Account, slot: int, record: Genesis | RebuildRecord | SnapshotRecord) -> None:
    if isinstance(record, RebuildRecord):
        account.is_rebuilt, account.epoch = True, record.epoch
    if (begins := beginning_at(slot, record)) is not None:
        account.first_step = account.outer_step = begins.outer_step
        account.is_complete = begins.final


def _add_commit(account: Account, shares: dict[PeerId, Share], record: CommitRecord) -> None:
    number = len(record.contributions)
    account.fewest_members = min(account.fewest_members, number) if account.num_commits else number
    account.most_members = max(account.most_members, number)
    account.num_commits += 1
    account.is_complete |= record.final
    for item in record.contributions:
        share = shares.setdefault(item.ref.peer_id, Share(peer_id=item.ref.peer_id))
        share.num_commits += 1
        share.num_tokens += item.num_tokens
        share.num_samples += sum(len(piece) for piece in item.consumed)


def _departure(ref: PeerRef, record: ViewRecord, outer_step: int) -> Departure:
    # The coordinator tells all changes of a view in one line, "; " between them, each with its peer in front.
    said = [part for part in record.cause.split("; ") if part.startswith(f"{ref.peer_id} ")]
    cause = said[0].removeprefix(f"{ref.peer_id} ") if said else record.cause
    return Departure(
        peer_id=ref.peer_id,
        incarnation=ref.incarnation,
        epoch=record.view.epoch,
        outer_step=outer_step,
        cause=cause,
    )
