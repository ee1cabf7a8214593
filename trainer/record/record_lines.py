# SPDX-License-Identifier: Apache-2.0
"""The journal's records as lines of events.jsonl: the log of a coordinator's process repeats each of them."""

from typing import assert_never

from isthmus.collective.core.types import RoundKey, View
from isthmus.elastic.core.doors import FOR_EVER
from isthmus.elastic.core.leases import count
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    SnapshotRecord,
    TicketRecord,
    ViewRecord,
)
from isthmus.trainer.record.events import Field

Line = tuple[str, dict[str, Field]]


def line_of(record: Record) -> Line:
    """The event that tells of this record, and its fields."""
    match record:
        case Genesis(outer_step=outer_step, digest=digest, next_index=next_index):
            return "genesis", {"outer_step": outer_step, "digest": digest.hex(), "next_index": next_index}
        case RebuildRecord(testified=testified, insisted=insisted):
            who: dict[str, Field] = {"testified": [ref.peer_id for ref in testified], "insisted": insisted}
            return "rebuilt", _from_here(record) | who
        case RollbackRecord(given_up=given_up, holders=holders):
            who = {"given_up": given_up, "holders": [ref.peer_id for ref in holders]}
            return "rolled_back", _from_here(record) | who
        case ViewRecord(view=view, cause=cause, excused=excused):
            return "view_decided", view_fields(view) | {"cause": cause, "excused": [ref.peer_id for ref in excused]}
        case CommitRecord(key=key, outer_step=outer_step, digest=digest, contributions=contributions, final=final):
            return "commit_decided", key_fields(key) | {
                "outer_step": outer_step,
                "digest": digest.hex(),
                "members": [item.ref.peer_id for item in contributions],
                "tokens": sum(item.num_tokens for item in contributions),
                "final": final,
            }
        case LeaseRecord(ref=ref, serial=serial, ranges=ranges):
            return "lease", {"of": ref.peer_id, "serial": serial, "samples": count(ranges)}
        case ReleaseRecord(ref=ref, epoch=epoch, ranges=ranges):
            return "lease_returned", {"of": ref.peer_id, "epoch": epoch, "samples": count(ranges)}
        case BarRecord(bar=bar):
            return "put_out", {"of": bar.peer_id, "banned": bar.certificate >= FOR_EVER}
        case TicketRecord(ticket_id=ticket_id, used_by=None, and_earlier=and_earlier):
            return "ticket_revoked", {"ticket": ticket_id.hex(), "and_earlier": and_earlier}
        case TicketRecord(ticket_id=ticket_id, used_by=used_by):
            return "admitted", {"of": used_by, "ticket": ticket_id.hex()}
        case SnapshotRecord(view=view, commits=commits, owned=owned):
            return "snapshot", view_fields(view) | {
                "commits": len(commits),
                "samples": sum(count(own) for _, own in owned),
            }
        case _:
            assert_never(record)


def _from_here(record: RebuildRecord | RollbackRecord) -> dict[str, Field]:
    """The epoch that the run goes on under, and the state that it goes on from, if there is a certificate of it."""
    made = None if record.certificate is None else record.certificate.made
    return {
        "epoch": record.epoch,
        "outer_step": None if made is None else made.outer_step,
        "digest": None if made is None else made.digest.hex(),
    }


def key_fields(key: RoundKey) -> dict[str, Field]:
    """What names a round."""
    return {"epoch": key.epoch, "outer_step": key.outer_step, "fragment": key.fragment}


def view_fields(view: View) -> dict[str, Field]:
    """What names a view, who is in it, and which two of these have no link ("id id")."""
    members = [member.peer_id for member in view.members]
    return {
        "epoch": view.epoch,
        "outer_step": view.outer_step,
        "members": members,
        "apart": [f"{members[one]} {members[other]}" for one, other in view.apart],
    }
